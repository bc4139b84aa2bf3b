"""What the ranks of the distributed tests do."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import threading
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fparallel.errors import MeshError
from fparallel.mesh import make_mesh
from fparallel.runtime.exchange import exchange_of
from fparallel.runtime.executor import Executor
from fparallel.runtime.transport import gloo, host, links
from fparallel.runtime.transport.distributed import DistributedTransport
from fparallel.runtime.transport.nccl import NcclWork
from fparallel.runtime.transport.simulated import SimulatedTransport
from fparallel.schedule import COLLECTIVES
from tests.runtime.cases import mesh_of, random_case
from tests.runtime.schedules import crossed_waits, matmul_over, pipeline, sums_in_place


def random_collectives(rank: int, num_ranks: int, sizes: Sequence[int], seeds: range, numel: int) -> None:
    """Random collectives, each equal to the reference in every bit, twice: the second uses buffers again."""
    mesh = mesh_of(sizes)
    gloo.CHUNKED = host.CHUNKED = 1 << 16
    transport = DistributedTransport(mesh, deadline=60)
    for seed in seeds:
        kind = COLLECTIVES[seed % len(COLLECTIVES)]
        if kind == "permute" and sizes == (2,):
            continue  # needs two (sub-)axes
        case = random_case(mesh, seed, kind=kind, numel=numel)
        executor = Executor(case.schedule(), transport, check=True)
        expected = case.expected()
        for step in range(2):
            (results,) = executor.run([[shards[rank].clone() for shards in case.shards()]])
            for got, want in zip(results, (per_rank[rank] for per_rank in expected), strict=True):
                assert got.dtype == want.dtype, case
                assert torch.equal(got, want), f"rank {rank}, step {step}: {case}"


def in_place(rank: int, num_ranks: int, numel: int) -> None:
    """Sums in the place of their terms: in rank order, as the simulated transport has them."""
    gloo.CHUNKED = host.CHUNKED = 1 << 12
    schedule = sums_in_place(num_ranks, numel)
    schedule.verify()
    generator = torch.Generator().manual_seed(0)
    shapes = [schedule.buffers[name].layout.shape for name in ("x", "y", "z")]
    given = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(num_ranks)]
    want = [functools.reduce(torch.add, terms) for terms in zip(*given, strict=True)]
    simulated = Executor(schedule, SimulatedTransport(num_ranks), check=True)
    for got in simulated.run([[x.clone() for x in terms] for terms in given]):
        assert all(torch.equal(a, 2 * b) for a, b in zip(got, want, strict=True))
    executor = Executor(schedule, DistributedTransport(schedule.mesh, deadline=60), check=True)
    for _ in range(3):
        (got,) = executor.run([[x.clone() for x in given[rank]]])
        assert all(torch.equal(a, 2 * b) for a, b in zip(got, want, strict=True))


def a_bucket_of_many(rank: int, num_ranks: int) -> None:
    links._INLINE = 2
    random_collectives(rank, num_ranks, (2,), range(1, 12, len(COLLECTIVES)), 0)


def packed_collectives(rank: int, num_ranks: int, sizes: Sequence[int], seeds: range) -> None:
    """What the NCCL transport packs, sends and unpacks, over gloo's own collectives."""
    mesh = mesh_of(sizes)
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for seed in seeds:
        case = random_case(mesh, seed, kind=COLLECTIVES[seed % len(COLLECTIVES)])
        case = dataclasses.replace(case, dtype=torch.float64 if case.reduce else torch.int64)
        schedule = case.schedule()
        exchange = exchange_of(schedule.programs[0].instrs[0], schedule, rank)
        for members in sorted({tuple(sorted(mesh.group(case.axes, at))) for at in mesh.rank_coords}):
            if members not in groups:
                groups[members] = dist.new_group(list(members), backend="gloo")
        inputs = [shards[rank] for shards in case.shards()]
        outputs = [torch.empty(at.local_shape(mesh.coords(rank)), dtype=case.dtype) for at in case.outs]
        NcclWork(groups[exchange.members], exchange.members).work(exchange)(inputs, outputs)
        expected = [per_rank[rank] for per_rank in case.expected()]
        for got, want in zip(outputs, expected, strict=True):
            torch.testing.assert_close(got, want)
        if exchange.kind == "all_reduce":
            both = [x.clone().contiguous() for x in inputs]
            NcclWork(groups[exchange.members], exchange.members).work(exchange)(both, both)
            for got, want in zip(both, expected, strict=True):
                torch.testing.assert_close(got, want)


def steps(rank: int, num_ranks: int) -> None:
    """Whole steps equal the simulated transport's, bit for bit."""
    schedule, arguments, _ = matmul_over(size=num_ranks)
    names = ("x", "w")

    def shards(at: dict[str, int]) -> list[torch.Tensor]:
        return [
            schedule.buffers[n].layout.shard(v, at).clone() for n, v in zip(names, arguments, strict=True)
        ]

    simulated = Executor(schedule, SimulatedTransport(num_ranks)).run(
        [shards(at) for at in schedule.mesh.rank_coords]
    )
    executor = Executor(schedule, DistributedTransport(schedule.mesh, deadline=60))
    for _ in range(3):
        ((total,),) = executor.run([shards(schedule.mesh.coords(rank))])
        assert torch.equal(total, simulated[rank][0])


def sends(rank: int, num_ranks: int) -> None:
    schedule = pipeline()
    executor = Executor(schedule, DistributedTransport(schedule.mesh, deadline=60))
    for step in range(3):
        x = torch.arange(4.0) + step
        (results,) = executor.run([[x]])
        assert rank == 1 or torch.equal(results[0], x * 2 + 1)


def crossed(rank: int, num_ranks: int) -> None:
    """Two large all_reduces in flight, and waits in another order on every rank."""
    gloo.CHUNKED = host.CHUNKED = 1 << 16
    schedule = crossed_waits()
    schedule.verify()
    executor = Executor(schedule, DistributedTransport(schedule.mesh, deadline=60))
    generator = torch.Generator().manual_seed(0)
    xs = [torch.randn(50000, generator=generator, dtype=torch.float64) for _ in range(3)]
    for _ in range(3):
        start = torch.ones(4, dtype=torch.float64)
        (results,) = executor.run([[xs[rank].clone(), xs[rank].clone(), start]])
        assert torch.equal(results[0], xs[0] + xs[1] + xs[2])
        assert torch.equal(results[1], torch.stack(xs).amax(0))
        assert rank != 1 or results[2].sum() == 8


def different_constants(rank: int, num_ranks: int) -> None:
    schedule, _, _ = matmul_over(size=num_ranks)
    Executor(
        schedule, DistributedTransport(schedule.mesh, deadline=60), {"c": torch.tensor(float(rank == 2))}
    )


def step_forever(
    rank: int, num_ranks: int, deadline: float, sleeper: int | None = None, pause: float = 0.0
) -> None:
    """Steps until something happens; rank `sleeper` stops stepping after the third, and the others say so.

    They pause then for some seconds, in which it may die.
    """
    schedule, arguments, _ = matmul_over(size=num_ranks)
    transport = DistributedTransport(schedule.mesh, deadline=deadline)
    executor = Executor(schedule, transport)
    layouts = [schedule.buffers[name].layout for name in ("x", "w")]
    at = schedule.mesh.coords(rank)
    for step in itertools.count():
        if step == 3:
            print("stepping", flush=True)
            threading.Thread(target=_say_when_waiting, args=(transport,), daemon=True).start()
        if step == 3 and rank == sleeper:
            threading.Event().wait()
        if step == 3:
            time.sleep(pause)
        executor.run(
            [[layout.shard(value, at).clone() for layout, value in zip(layouts, arguments, strict=True)]]
        )


def _say_when_waiting(transport: DistributedTransport) -> None:
    """Prints "waiting" once the rank has been inside one wait for half a second."""
    while (since := transport.watch.since) is None or time.monotonic() - since < 0.5:
        time.sleep(0.05)
    print("waiting", flush=True)


def stuck(rank: int, num_ranks: int) -> None:
    """A wait that never comes back to Python, as one inside a C library."""
    schedule, _, _ = matmul_over(size=num_ranks)
    transport = DistributedTransport(schedule.mesh, deadline=0.5)
    with transport.watch:
        threading.Event().wait()


def mesh_of_a_group(rank: int, num_ranks: int) -> None:
    """A process group that exists already is the job."""
    mesh = make_mesh((-1, 2), ("dp", "tp"), device="cpu")
    assert mesh.sizes == (num_ranks // 2, 2) and (mesh.kind, mesh.device) == ("job", "cpu")
    try:
        make_mesh((num_ranks + 1,), ("dp",), device="cpu")
    except MeshError as error:
        assert f"the job has {num_ranks}" in str(error)
    else:
        raise AssertionError("a mesh of more ranks than the job has")
    try:
        make_mesh((num_ranks,), ("dp",), device="cuda")
    except MeshError as error:
        assert "does not serve cuda" in str(error)
    else:
        raise AssertionError("a CUDA mesh over gloo")


def mesh_alone(rank: int, num_ranks: int, environment: dict[str, str]) -> None:
    """Without a job's environment, or with that of a job of one, the process is a job of one rank."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ.update(environment)
    for _ in range(2):
        mesh = make_mesh((-1,), ("dp",), device="cpu")
        assert mesh.sizes == (1,) and dist.get_world_size() == 1
    schedule, arguments, expected = matmul_over(size=1)
    executor = Executor(schedule, DistributedTransport(mesh))
    ((total,),) = executor.run([[value.clone() for value in arguments]])
    torch.testing.assert_close(total, expected)
