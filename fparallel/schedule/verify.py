"""The verifier: raises unless a schedule is safe to run.

Three parts. Each program by itself (`liveness.py`): every read is of a live, written, waited-for buffer;
nothing is freed or overwritten while it is in flight, twice, or without being donated; nothing leaks; types
fit. The programs together (`agreement.py`): members of a group issue the same collectives in the same
order, sends match receives, and nothing waits in a circle, with blocking or with asynchronous issue. And
the peak of memory against a budget. The cost is that of one pass over every distinct program, whatever the
number of ranks.
"""

from __future__ import annotations

import functools
from typing import NoReturn

from fparallel.errors import ScheduleError
from fparallel.schedule.agreement import check_agreement
from fparallel.schedule.deadlock import check_deadlock
from fparallel.schedule.ir import Collective, Program, Recv, Schedule, Send
from fparallel.schedule.liveness import check_program
from fparallel.schedule.memory import highest_peak
from fparallel.schedule.rendezvous import classes
from fparallel.schedule.text import bytes_text, instr_text

LESS_MEMORY = "shard more, recompute more, or run smaller micro-batches"


def verify(schedule: Schedule, memory_budget: int | None = None) -> None:
    """Checks that a schedule is safe to run.

    Args:
      schedule: the schedule.
      memory_budget: bytes of device memory that a rank may hold at most, or None.

    Raises:
      ScheduleError: it is not. The message names the rank and its coordinates, the instruction by number
      and text, the
        buffer, what is wrong, and how to fix it.
    """
    _check_axes(schedule)
    for program in schedule.programs:
        coords = schedule.mesh.coords(schedule.first_rank(program))
        check_program(schedule, program, functools.partial(_fail, schedule, program, coords))
    fail = functools.partial(fail_at, schedule)
    ranks = classes(schedule, fail)
    check_agreement(schedule, ranks, fail)
    check_deadlock(ranks, fail)
    if memory_budget is not None and (peak := highest_peak(schedule)).nbytes > memory_budget:
        fail_at(
            schedule,
            schedule.mesh.coords(peak.rank),
            peak.instruction,
            f"memory budget exceeded: the rank holds {bytes_text(peak.nbytes)} here, "
            f"{peak.nbytes - memory_budget} bytes more than the {bytes_text(memory_budget)} allowed",
            f"{LESS_MEMORY}; see lowered.memory()",
        )


def _fail(
    schedule: Schedule, program: Program, coords: dict[str, int], number: int | None, problem: str, fix: str
) -> NoReturn:
    at = " ".join(f"{axis}={c}" for axis, c in coords.items())
    where = f"rank {schedule.mesh.rank(coords)} ({at})"
    source = None
    if number is not None:
        instr = program.instrs[number]
        where += f", instruction {number:04d}  {instr_text(instr)}"
        source = getattr(instr, "source", "") or None
    raise ScheduleError(f"{where}\n  {problem}", fix=fix, where=source)


def fail_at(
    schedule: Schedule, coords: dict[str, int], number: int | None, problem: str, fix: str
) -> NoReturn:
    """Raises ScheduleError for an instruction of the rank at some coordinates."""
    program = Program((), (), (), frozenset(), ())
    if number is not None:
        program = schedule.program(schedule.mesh.rank(coords))
    _fail(schedule, program, coords, number, problem, fix)


def _check_axes(schedule: Schedule) -> None:
    """Every axis that occurs is one of the mesh."""
    shape = schedule.mesh.shape
    seen: set[int] = set()
    for buffer in schedule.buffers.values():
        if id(buffer.layout) in seen:
            continue
        seen.add(id(buffer.layout))
        for axis in buffer.layout.sharded_axes + buffer.layout.unreduced_axes:
            if shape.get(axis.name) != axis.total:
                raise ScheduleError(
                    f"unknown axis: {buffer} uses {axis} of {axis.total} ranks, the mesh is {schedule.mesh}",
                    fix="lay buffers out over axes of the schedule's mesh",
                )
    for program in schedule.programs:
        unknown = [axis for axis, at in program.role if not 0 <= at < shape.get(axis, 0)]
        if unknown:
            raise ScheduleError(
                f"unknown role: the program for {program.role_text} has no ranks in the mesh {schedule.mesh}",
                fix="give coordinates along axes of the schedule's mesh",
            )
        coords = schedule.mesh.coords(schedule.first_rank(program))
        for number, instr in enumerate(program.instrs):
            if isinstance(instr, Collective):
                axes = instr.axes
            elif isinstance(instr, (Send, Recv)):
                axes = (instr.axis,)
            else:
                continue
            for axis in axes:
                if shape.get(axis.name) != axis.total:
                    _fail(
                        schedule,
                        program,
                        coords,
                        number,
                        f"wrong axes: the mesh {schedule.mesh} has no {axis} of {axis.total} ranks",
                        "use axes of the schedule's mesh",
                    )
