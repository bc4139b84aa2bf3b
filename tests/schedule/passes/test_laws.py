"""What every pass keeps: validity, values, results; and that doing it twice is doing it once."""

import dataclasses
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fparallel.schedule import Collective, Free, Recv, Run, Schedule, Send, Wait
from fparallel.schedule.ir import wait_names
from fparallel.schedule.memory import memory
from fparallel.schedule.passes import PASSES, bucket, prefetch, run_passes
from tests.schedule.strategies import any_schedules, training_schedules


def dataflow(schedule: Schedule, once: bool = False) -> list[Counter[object]]:
    """Per program what computes each value: runs, sends and receives, and collectives tensor by tensor.

    A name is written once, so that equal multisets are equal graphs. `once`: gathers of the same to the same are one.
    """
    result = []
    for program in schedule.programs:
        steps: Counter[object] = Counter()
        gathered: dict[str, object] = {}  # of a name what it is, however often it is gathered

        def named(names: tuple[str, ...], gathered: dict[str, object] = gathered) -> tuple[object, ...]:
            return tuple(gathered.get(name, name) for name in names)

        for instr in program.instrs:
            if isinstance(instr, Run):
                steps["run", instr.segment, named(instr.ins), instr.outs, instr.inplace] += 1
            elif isinstance(instr, Collective):
                for source, out in zip(named(instr.ins), instr.outs, strict=True):
                    if once and instr.kind == "all_gather":
                        layout = schedule.buffers[out].layout
                        gathered[out] = (instr.kind, instr.axes, source, layout)
                        steps[gathered[out]] = 1
                    else:
                        steps[instr.kind, instr.axes, instr.reduce, source, out] += 1
            elif isinstance(instr, (Send, Recv)):
                steps[instr] += 1
        result.append(steps)
    return result


def steps_between_roles(schedule: Schedule) -> list[list[object]]:
    def what(instr: object) -> object:  # where a rank puts a sum is its own affair
        return dataclasses.replace(instr, inplace=False) if isinstance(instr, Collective) else instr

    return [[what(i) for i in program.instrs if schedule.crosses_roles(i)] for program in schedule.programs]


def assert_same_meaning(before: Schedule, after: Schedule, *, once: bool = False) -> None:
    """`once`: what was gathered several times may be gathered fewer times."""
    assert dataflow(after, once) == dataflow(before, once)
    assert steps_between_roles(after) == steps_between_roles(before)
    assert (after.mesh, after.segments) == (before.mesh, before.segments)
    assert after.buffers == {
        name: buffer for name, buffer in before.buffers.items() if not once or name in after.buffers
    }
    for old, new in zip(before.programs, after.programs, strict=True):
        assert (new.role, new.arguments, new.results, new.donated) == (
            old.role,
            old.arguments,
            old.results,
            old.donated,
        )


@pytest.mark.parametrize("name", PASSES)
@given(schedule=any_schedules())
def test_a_valid_schedule_stays_valid_and_means_the_same(name, schedule):
    after = PASSES[name](schedule)
    after.verify()
    assert_same_meaning(schedule, after, once=name == "keep")
    assert PASSES[name](after) == after


@given(
    raw=any_schedules(raw=True), off=st.sets(st.sampled_from([name for name in PASSES if name != "complete"]))
)
def test_any_subset_of_the_passes_makes_a_raw_schedule_valid(raw, off):
    after = run_passes(raw, off=off)
    after.verify()
    assert_same_meaning(raw, after)


@given(raw=any_schedules(raw=True))
def test_all_at_once_is_one_after_the_other(raw):
    after = raw
    for run in PASSES.values():
        after = run(after)
    assert str(run_passes(raw, memory_budget=math.inf)) == str(after)


@given(raw=any_schedules(raw=True), max_bytes=st.sampled_from([0, 100, 500, 2000, 25e6]))
def test_buckets_keep_their_bound_and_their_dtype(raw, max_bytes):
    after = bucket(raw, max_bytes)
    assert_same_meaning(raw, after)
    for program in after.programs:
        for instr in program.instrs:
            if isinstance(instr, Collective) and len(instr.ins) > 1:
                buffers = after.buffers
                size = max(sum(buffers[n].nbytes for n in names) for names in (instr.ins, instr.outs))
                assert size <= max_bytes
                assert len({buffers[name].dtype for name in (*instr.ins, *instr.outs)}) == 1


@given(raw=training_schedules(raw=True), room=st.sampled_from([0, 300, 1000, 10**9]))
def test_prefetch_stays_within_the_memory_budget(raw, room):
    before = run_passes(raw, off=["prefetch"])
    budget = memory(before).peak() + room
    after = prefetch(before, memory_budget=budget)
    after.verify(memory_budget=budget)
    assert_same_meaning(before, after)
    assert prefetch(after, memory_budget=budget) == after


@given(raw=any_schedules(raw=True))
def test_freeing_early_never_raises_the_peak(raw):
    late = run_passes(raw, off=["early_free", "prefetch"])
    early = run_passes(raw, off=["prefetch"])
    assert memory(early).peak() <= memory(late).peak()


@given(schedule=any_schedules())
def test_early_free_places_the_waits_that_sink_waits_would(schedule):
    early = PASSES["early_free"](schedule)
    assert PASSES["sink_waits"](early) == early


@given(schedule=any_schedules())
def test_the_instruction_after_a_wait_needs_every_step_that_the_wait_is_for(schedule):
    for program in PASSES["sink_waits"](schedule).programs:
        pending: list[Collective | Send | Recv] = []
        for instr, follower in zip(program.instrs, program.instrs[1:], strict=False):
            if isinstance(instr, (Collective, Send, Recv)):
                pending.append(instr)
            elif isinstance(instr, Wait):
                touched = set(follower.bufs) if isinstance(follower, Free) else set(follower.reads)
                waited = [step for step in pending if set(wait_names(step)) & set(instr.bufs)]
                assert all(touched & {*step.reads, *step.writes} for step in waited)
                pending = [step for step in pending if step not in waited]
