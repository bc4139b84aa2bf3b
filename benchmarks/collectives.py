"""Collectives between processes of one host: gloo's own beside the exchanges of the CPU transport.

"sent" exchanges messages over loopback; "read" reads large ones from the memory of the other process.

    python -m benchmarks.collectives [--ranks 2 4] [--kib 64 1024 8192 65536]

Prints milliseconds per operation (best of several rounds, all ranks together), for float32 tensors; the size
is that of the whole tensor: what an all_gather gives, what a reduce_scatter and an all_reduce take.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from fparallel._compat import all_gather_single, reduce_scatter_single
from fparallel.factors import Factor
from fparallel.layout import Layout
from fparallel.mesh import make_mesh
from fparallel.runtime.exchange import exchange_of
from fparallel.runtime.transport import gloo
from fparallel.runtime.transport.host import HostCommunicator
from fparallel.runtime.transport.links import connect
from fparallel.runtime.transport.messages import Pool
from fparallel.schedule import Buffer, Collective, Program, Schedule

HEADER = (
    *("ranks", "size", "all_gather gloo", "sent", "read", "reduce_scatter gloo", "sent", "read"),
    *("all_reduce gloo", "sent", "read"),
)


def operations(
    rank: int, num_ranks: int, numel: int, group: dist.ProcessGroup
) -> dict[str, Callable[[], None]]:
    """The operations by name, each from start to end."""
    mesh = make_mesh((num_ranks,), ("dp",), kind="simulated")
    dp = (mesh.axis("dp"),)
    sharded, whole = Layout.of([[Factor(numel, dp)]]), Layout.replicated((numel,))
    partial = Layout.of([[Factor(numel)]], [(dp[0], "sum")])
    part, full, total = torch.rand(numel // num_ranks), torch.rand(numel), torch.empty(numel)
    sends = gloo.GlooCommunicator(group, range(num_ranks), Pool(), 300.0)
    links = connect(group, range(num_ranks), 300.0)
    assert links is not None, "these processes cannot read each other's memory"
    reads = HostCommunicator(links, range(num_ranks), rank, Pool(), 300.0)

    def ours(
        communicator: Any, kind: str, src: Layout, dst: Layout, x: Tensor, out: Tensor
    ) -> Callable[[], None]:
        buffers = {"x": Buffer("x", x.dtype, src), "y": Buffer("y", x.dtype, dst)}
        instr = Collective(kind, dp, ("x",), ("y",), "" if kind == "all_gather" else "sum")
        schedule = Schedule(mesh, buffers, {}, (Program((), ("x",), ("y",), frozenset(), (instr,)),))
        issue = communicator.collective(exchange_of(instr, schedule, rank))
        return lambda: issue([x], [out]).wait()

    work = {
        "all_gather": (sharded, whole, part, full),
        "reduce_scatter": (partial, sharded, full, part),
        "all_reduce": (partial, whole, full, total),
    }
    theirs = {
        "all_gather": lambda: all_gather_single(total, part, group=group),
        "reduce_scatter": lambda: reduce_scatter_single(part, full, group=group),
        "all_reduce": lambda: dist.all_reduce(total, group=group),
    }
    found: dict[str, Callable[[], None]] = {}
    for kind, arguments in work.items():
        found[f"{kind} gloo"] = theirs[kind]
        found[f"{kind} sent"] = ours(sends, kind, *arguments)
        found[f"{kind} read"] = ours(reads, kind, *arguments)
    return found


def measure(rank: int, num_ranks: int, sizes: list[int], store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, num_ranks), rank=rank, world_size=num_ranks)
    group = dist.new_group(list(range(num_ranks)))
    for kib in sizes:
        ways = operations(rank, num_ranks, kib * 256 // num_ranks * num_ranks, group)
        best = dict.fromkeys(ways, float("inf"))
        repeats = max(2, min(30, 16384 // kib))
        for _ in range(6):  # the ways take turns, so that other load on the machine hits all of them
            for name, operation in ways.items():
                operation()
                dist.barrier()
                start = time.perf_counter()
                for _ in range(repeats):
                    operation()
                dist.barrier()
                best[name] = min(best[name], (time.perf_counter() - start) / repeats * 1e3)
        if rank == 0:
            row = [str(num_ranks), f"{kib} KiB", *(f"{ms:.2f}" for ms in best.values())]
            print(f"| {' | '.join(row)} |", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--kib", type=int, nargs="+", default=[4, 64, 256, 1024, 8192, 65536])
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"| {' | '.join(HEADER)} |")
    print("|" + "---|" * len(HEADER))
    for num_ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(measure, (num_ranks, options.kib, f"{folder}/store"), num_ranks)


if __name__ == "__main__":
    main()
