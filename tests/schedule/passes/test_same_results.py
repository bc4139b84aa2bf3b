"""Every pass gives the same results, bit for bit, and the bytes that run are the bytes that were planned."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fparallel.runtime.executor import Executor
from fparallel.runtime.transport.simulated import SimulatedTransport
from fparallel.schedule import LocalOp, Ref, Schedule, Segment
from fparallel.schedule.memory import live_bytes
from fparallel.schedule.passes import PASSES, complete, run_passes
from fparallel.schedule.segment import LocalShape
from tests.schedule.strategies import any_schedules


def with_ops(segment: Segment) -> Segment:
    """A segment whose outputs depend on every element of every input."""
    ops: list[LocalOp] = []
    count = len(segment.inputs)

    def op(target: str, *args: object, **kwargs: object) -> Ref:
        index = count + len(ops)
        ops.append(LocalOp(target, args, (index,), tuple(kwargs.items())))
        return Ref(index)

    total = op("aten.full.default", [], 0.5, dtype=torch.float64)
    for i in range(count):
        wide = op("aten._to_copy.default", Ref(i), dtype=torch.float64)
        total = op("aten.add.Tensor", total, op("aten.sum.default", wide))
    results = []
    for k, (dtype, layout) in enumerate(segment.outputs):
        value = op("aten.add.Tensor", op("aten.tanh.default", total), k + 1)
        spread = op("aten.expand.default", value, LocalShape(layout))
        results.append(op("aten._to_copy.default", op("local.own", spread), dtype=dtype).index)
    return dataclasses.replace(segment, ops=tuple(ops), results=tuple(results))


def runnable(schedule: Schedule) -> Schedule:
    segments = {name: with_ops(segment) for name, segment in schedule.segments.items()}
    return dataclasses.replace(schedule, segments=segments)


def random_value(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 8).to(dtype)


def run(schedule: Schedule, mode: str, seed: int) -> tuple[dict[tuple[int, str], torch.Tensor], Executor]:
    """Results by rank and name. Freed buffers are overwritten, so that using one shows."""
    generator = torch.Generator().manual_seed(seed)
    constants, arguments = {}, []
    buffers = schedule.buffers
    for name, buffer in buffers.items():
        if buffer.kind == "constant":
            constants[name] = random_value(buffer.layout.shape, buffer.dtype, generator)
    for rank, coords in enumerate(schedule.mesh.rank_coords):
        names = [name for name in schedule.program(rank).arguments if buffers[name].kind == "argument"]
        shapes = [buffers[name].layout.local_shape(coords) for name in names]
        arguments.append(
            [random_value(shape, buffers[n].dtype, generator) for n, shape in zip(names, shapes, strict=True)]
        )
    transport = SimulatedTransport(schedule.mesh.size, mode, seed=seed)
    executor = Executor(schedule, transport, constants, check=True, trace=True)
    found = {}
    for rank, results in enumerate(executor.run(arguments)):
        for name, value in zip(schedule.program(rank).results, results, strict=True):
            found[rank, name] = value
    return found, executor


def assert_equal(a: dict[tuple[int, str], torch.Tensor], b: dict[tuple[int, str], torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for key, value in a.items():
        assert torch.equal(value, b[key]), key


FEW = settings(max_examples=max(4, settings.default.max_examples // 6))  # a run of all ranks takes a while


@pytest.mark.parametrize("name", PASSES)
@FEW
@given(schedule=any_schedules(), seed=st.integers(0, 1000), mode=st.sampled_from(["rendezvous", "buffered"]))
def test_a_pass_changes_no_bit_of_the_results(name, schedule, seed, mode):
    schedule = runnable(schedule)
    before, _ = run(schedule, "buffered", seed)
    after, executor = run(PASSES[name](schedule), mode, seed)
    assert_equal(before, after)
    for rank in executor.ranks:
        assert executor.live_bytes[rank] == live_bytes(PASSES[name](schedule), rank)


@FEW
@given(raw=any_schedules(raw=True), seed=st.integers(0, 1000), size=st.sampled_from([0, 200, 25e6]))
def test_all_passes_together_change_no_bit_of_the_results(raw, seed, size):
    plain, fast = complete(runnable(raw)), run_passes(runnable(raw), bucket_bytes=size)
    assert_equal(run(plain, "rendezvous", seed)[0], run(fast, "buffered", seed)[0])
