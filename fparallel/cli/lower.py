"""``fparallel lower``: the program of a training step on any mesh, without a rank."""

from __future__ import annotations

import json
from typing import Any

import torch

import fparallel as fp
from fparallel.cli.job import example_batch, make_functions
from fparallel.cli.options import Options

__all__ = ["lower"]

_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute")


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


def _traffic(schedule: Any, mesh: Any) -> dict[str, dict[str, float]]:
    """Payload bytes by mesh axis and collective."""
    return {axis: {op: float(schedule.bytes(op, axis=axis)) for op in _COLLECTIVES} for axis in mesh.names}
