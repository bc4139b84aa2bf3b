"""Every collective on the simulated transport equals the reference geometry, bit for bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fparallel.runtime.executor import Executor
from fparallel.runtime.transport.simulated import SimulatedTransport
from fparallel.schedule import COLLECTIVES
from tests.runtime.cases import Case, mesh_of, random_case

MESHES = ((2,), (3,), (4,), (2, 2), (2, 4), (3, 2), (2, 2, 2))


def run(case: Case, mode: str) -> None:
    executor = Executor(case.schedule(), SimulatedTransport(case.mesh.size, mode), check=True)
    results = executor.run([list(per_rank) for per_rank in zip(*case.shards(), strict=True)])
    for tensor, expected in enumerate(case.expected()):
        for rank, want in enumerate(expected):
            got = results[rank][tensor]
            assert got.dtype == want.dtype and torch.equal(got, want), (
                f"tensor {tensor} of rank {rank} in {case}"
            )


@pytest.mark.parametrize("kind", COLLECTIVES)
@given(
    sizes=st.sampled_from(MESHES),
    seed=st.integers(0, 10**6),
    mode=st.sampled_from(["buffered", "rendezvous"]),
)
def test_collective_equals_the_reference(kind, sizes, seed, mode):
    mesh = mesh_of(sizes)
    if kind == "permute" and len(sizes) == 1 and sizes != (4,):
        sizes = (2, 2)  # a permute needs two (sub-)axes
        mesh = mesh_of(sizes)
    run(random_case(mesh, seed, kind=kind), mode)


def test_a_sum_does_not_depend_on_its_bucket():
    """One tensor reduced alone and in a bucket of three: equal in every bit."""
    case = random_case(mesh_of((4,)), 3, kind="all_reduce")
    alone = [
        Case(case.mesh, case.kind, case.axes, case.reduce, case.dtype, (a,), (b,), 0)
        for a, b in zip(case.ins, case.outs, strict=True)
    ]
    shards = case.shards()
    bucket = Executor(case.schedule(), SimulatedTransport(4)).run(
        [list(r) for r in zip(*shards, strict=True)]
    )
    for i, one in enumerate(alone):
        got = Executor(one.schedule(), SimulatedTransport(4)).run([[s] for s in shards[i]])
        for rank in range(4):
            assert torch.equal(got[rank][0], bucket[rank][i])
