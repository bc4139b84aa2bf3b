"""``fparallel lower``: the program of a training step on any mesh, without a rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import fparallel as fp
from fparallel.cli.job import example_batch, make_functions
from fparallel.cli.options import Options

__all__ = ["lower"]

_SENDING = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute", "send")


def lower(options: Options) -> None:
    """Prints schedule, memory and communication of the training step; with ``--json`` only the bytes."""
    mesh, rules, functions = options.make_mesh("abstract"), options.make_rules(), make_functions(options)
    step = fp.jit(
        functions.train_step,
        mesh=mesh,
        rules=rules,
        donate_argnums=0,
        pipeline=options.pipeline,
        compile=options.compile,
    )
    state = fp.eval_shape(functions.init_state, fp.ShapeDtypeStruct((2,), torch.int64))
    lowered = step.lower(state, example_batch(options))
    schedule = lowered.schedule
    schedule.verify()
    traffic = _traffic(schedule, mesh)
    cluster = _cluster(options.cluster) if options.cluster else None
    if options.draw:
        schedule.draw(options.draw, cluster)
    if options.json:
        print(json.dumps({"mesh": options.mesh_shape, "ranks": options.num_ranks, "bytes": traffic}))
        return
    print(options.describe())
    print(schedule)
    print(f"\nmemory of a rank\n{lowered.memory()}")
    print("\ncommunication of a rank in a step")
    for axis, ops in traffic.items():
        total = sum(ops.values())
        detail = ", ".join(f"{op} {size / 1e6:,.2f}" for op, size in ops.items() if size)
        print(f"  {axis:<6} {total / 1e6:12,.2f} MB" + (f"  ({detail})" if detail else ""))
    if len(schedule.programs) > 1:
        print(f"\nstages by time, a slot for each task\n{schedule.table()}")
    if cluster is not None:
        print(f"\npredicted on {options.cluster}\n{schedule.simulate(cluster)}")


def _traffic(schedule: Any, mesh: Any) -> dict[str, dict[str, float]]:
    """Payload bytes by mesh axis and kind of step, of the rank that sends most of it."""
    firsts = [schedule.first_rank(program) for program in schedule.programs]
    return {
        axis: {op: float(max(schedule.bytes(op, axis=axis, rank=r) for r in firsts)) for op in _SENDING}
        for axis in mesh.names
    }


def _cluster(name: str) -> fp.Cluster:
    """A preset, or what `fparallel calibrate` wrote."""
    return fp.Cluster.load(name) if Path(name).suffix else fp.Cluster.preset(name)
