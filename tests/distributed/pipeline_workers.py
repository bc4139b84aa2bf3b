"""What the ranks of the tests of pipelines on real processes do."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

import fparallel as fp
from fparallel.models import gpt
from fparallel.runtime.transport.distributed import DistributedTransport
from fparallel.schedule import Run
from tests.pipeline_models import F64, assert_close, mlp_batch, mlp_loss, mlp_params, sgd_step


def gpt_steps(
    rank: int, num_ranks: int, sizes: Sequence[int], layers: int, runs: Sequence[tuple[str, int, int]]
) -> None:
    """Steps of a GPT in float64 equal those without jit; a run is (order, micro-batches, ZeRO stage)."""
    cfg = gpt.Config(vocab=32, seq=4, layers=layers, dim=16, heads=2)
    mesh = fp.make_mesh(tuple(sizes), ("dp", "pp", "tp"))
    params = gpt.init_params(fp.random.key(0), cfg)
    params = fp.tree.map(lambda x: x.to(F64) if isinstance(x, Tensor) else x, params)
    for order, micros, stage in runs:
        rows = 2 * micros * sizes[0]
        ids = (torch.arange(rows * 5).reshape(rows, 5) * 7) % cfg.vocab
        mask = (torch.arange(rows * 4).reshape(rows, 4) % 3 != 1).to(F64)
        batch = {"tokens": ids[:, :4].contiguous(), "targets": ids[:, 1:].contiguous(), "mask": mask}
        plain = sgd_step(gpt.loss, micros)

        def step(params, batch, plain=plain):
            return plain(params, batch)

        rules = fp.Rules(batch="dp", mlp="tp", heads="tp", vocab="tp", layers="pp").zero(stage, axis="dp")
        jitted = fp.jit(step, mesh=mesh, rules=rules, pipeline=order)
        state, want = params, params
        for _ in range(1 if len(runs) > 2 else 2):
            state, loss = jitted(state, batch)
            want, want_loss = step(want, batch)
            assert_close((state, loss), (want, want_loss))


def stuck_in_a_pipeline(
    rank: int, num_ranks: int, deadline: float, stuck: int, kind: str, micro: int
) -> None:
    """In the second step, rank `stuck` stops before a task (`kind`, of its stage and a micro-batch)."""
    mesh = fp.make_mesh((num_ranks,), ("pp",))
    rules = fp.Rules({"blocks": "layers"}, layers="pp")
    args = mlp_params(num_ranks), mlp_batch(8)
    low = fp.jit(sgd_step(mlp_loss, 4), mesh=mesh, rules=rules, pipeline="1f1b").lower(*args)
    step = low.compile(transport=DistributedTransport(mesh, deadline=deadline))
    step(*args)
    if rank == stuck:
        instrs = low.schedule.program(rank).instrs
        label = f"{kind} stage{rank}.mb{micro}"
        at = next(i for i, instr in enumerate(instrs) if isinstance(instr, Run) and instr.label == label)
        (bound,) = step.runner.executor._bound
        bound.steps[at] = _stop
    step(*args)


def _stop(slots: object) -> None:
    print("stuck", flush=True)
    threading.Event().wait()
