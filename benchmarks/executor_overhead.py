"""What the executor costs per instruction: a schedule of empty segments, waits and frees.

python -m benchmarks.executor_overhead
"""

from __future__ import annotations

import time

import torch

from fparallel.layout import Layout
from fparallel.mesh import make_mesh
from fparallel.runtime.executor import Executor
from fparallel.runtime.transport.simulated import SimulatedTransport
from fparallel.schedule import Buffer, Collective, Free, Program, Run, Schedule, Segment, Wait

NUM_BLOCKS = 1000


def schedule(num_ranks: int, *, collectives: bool) -> Schedule:
    """Per block: a run of no ops over ten buffers, a free and, if asked for, an all_reduce and its wait."""
    mesh = make_mesh((num_ranks,), ("dp",), kind="simulated")
    dtype, whole = torch.float32, Layout.replicated((1,))
    partial = Layout.of([[]], [(mesh.axis("dp"), "sum")]) if num_ranks > 1 else whole
    names = [f"x{i}" for i in range(10)]
    buffers = {name: Buffer(name, dtype, whole, "argument") for name in names}
    segment = Segment("none", ((dtype, whole),) * 10, ((dtype, partial),), (), (0,))
    instrs: list = []
    for i in range(NUM_BLOCKS):
        buffers[f"y{i}"] = Buffer(f"y{i}", dtype, partial)
        instrs.append(Run("none", tuple(names), (f"y{i}",)))
        if collectives:
            buffers[f"z{i}"] = Buffer(f"z{i}", dtype, whole)
            instrs.append(Collective("all_reduce", (mesh.axis("dp"),), (f"y{i}",), (f"z{i}",), "sum"))
            instrs.append(Wait((f"z{i}",)))
        instrs.append(Free((f"y{i}",)))
    return Schedule(
        mesh, buffers, {"none": segment}, (Program((), tuple(names), (), frozenset(), tuple(instrs)),)
    )


def microseconds(num_ranks: int, *, collectives: bool) -> float:
    """Per instruction and rank, the best of ten runs."""
    plan = schedule(num_ranks, collectives=collectives)
    executor = Executor(plan, SimulatedTransport(num_ranks))
    arguments = [[torch.zeros(1) for _ in range(10)] for _ in range(num_ranks)]
    best = float("inf")
    for _ in range(10):
        start = time.perf_counter()
        executor.run(arguments)
        best = min(best, time.perf_counter() - start)
    return best * 1e6 / len(plan.programs[0]) / num_ranks


def main() -> None:
    torch.set_num_threads(1)
    local, moving = microseconds(1, collectives=False), microseconds(2, collectives=True)
    print(f"executor: {local:.2f} us per run or free, {moving:.2f} us with simulated all_reduces")


if __name__ == "__main__":
    main()
