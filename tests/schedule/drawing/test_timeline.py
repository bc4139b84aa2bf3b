"""Slots: one for every run, none for all else."""

import pytest
from hypothesis import given

from fparallel.errors import ScheduleError
from fparallel.mesh import Mesh
from fparallel.schedule import Collective, Free, Program, Run, Schedule, Wait
from fparallel.schedule.drawing.timeline import in_slots
from tests.runtime import schedules
from tests.schedule.strategies import any_schedules, pipeline_schedules


def run(label: str, inplace=()) -> Run:
    return Run("s", ("a",), ("b",), label, inplace)


def test_slots_of_two_stages():
    """The second stage starts when the first has sent; the answer comes back at once when it is done."""
    events = {(e.rank, e.number): (e.start, e.end) for e in in_slots(schedules.pipeline())}
    assert events == {
        (0, 0): (0, 1), (0, 1): (1, 1), (0, 2): (1, 1), (0, 3): (1, 1), (0, 4): (2, 2), (0, 5): (1, 2),
        (1, 0): (1, 1), (1, 1): (0, 1), (1, 2): (1, 2), (1, 3): (2, 2), (1, 4): (2, 2), (1, 5): (2, 2),
        (1, 6): (2, 2),
    }  # fmt: skip


def test_a_schedule_that_never_ends_has_no_slots():
    with pytest.raises(ScheduleError, match=r"never ends.*(\n.*)*Fix: schedule.verify"):
        in_slots(schedules.pipeline("crossed"))


def test_a_collective_over_roles_waits_for_its_last_member():
    mesh = Mesh((2,), ("pp",))
    reduce = [Collective("all_reduce", mesh.axes("pp"), ("x",), ("y",), "sum"), Wait(("y",))]
    programs = tuple(
        Program((("pp", at),), ("x",), ("y",), frozenset(), (*[run("F")] * runs, *reduce))
        for at, runs in ((0, 1), (1, 3))
    )
    spans = {(e.rank, e.number): (e.start, e.end) for e in in_slots(Schedule(mesh, {}, {}, programs))}
    assert (spans[0, 1], spans[1, 3]) == ((3, 3), (3, 3))
    assert (spans[0, 2], spans[1, 4]) == ((1, 3), (3, 3))


@given(any_schedules())
def test_every_step_of_every_role_has_its_slots(schedule):
    events = in_slots(schedule)
    expected = [
        (schedule.first_rank(p), number, instr.stream)
        for p in schedule.programs
        for number, instr in enumerate(p.instrs)
    ]
    assert sorted((e.rank, e.number, e.stream) for e in events) == sorted(expected)
    for p in schedule.programs:
        mine = {e.number: e for e in events if e.rank == schedule.first_rank(p)}
        clock = 0
        for number, instr in enumerate(p.instrs):
            event = mine[number]
            if isinstance(instr, Run):
                assert event.start >= clock and event.end == event.start + 1
            if isinstance(instr, (Run, Wait, Free)):
                clock = event.end
            else:
                assert event.start == event.end >= clock


@given(pipeline_schedules())
def test_partners_meet_at_one_time(schedule):
    """The k-th send of a rank to another happens when the other's k-th receive from it does."""
    times: dict = {}
    for event in in_slots(schedule):
        instr = schedule.program(event.rank).instrs[event.number]
        if instr.op in ("send", "recv"):
            here = schedule.mesh.coords(event.rank)
            there = schedule.mesh.group((instr.axis,), here)[instr.peer]
            pair = (event.rank, there) if instr.op == "send" else (there, event.rank)
            times.setdefault(pair, {}).setdefault(instr.op, []).append(event.start)
    for both in times.values():
        assert both["send"] == both["recv"]
