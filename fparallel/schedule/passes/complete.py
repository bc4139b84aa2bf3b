"""Waits and frees where there are none."""

from __future__ import annotations

from fparallel.schedule.ir import Free, Instr, Program, Schedule, Wait, is_async, wait_names
from fparallel.schedule.passes.placement import dying, map_programs


def complete(schedule: Schedule) -> Schedule:
    """Adds the waits and frees that a schedule lacks, in the plainest places.

    A step that nothing waits for is waited for at once; a buffer that nothing frees is freed at the end.
    What comes out of the compiler, runs and collectives in program order, is then ready to run; the other
    passes make it fast and small.

    Before::

        all_gather[dp]  w -> w@full
        run F <f>       (x) -> y
        run G <g>       (y, w@full) -> z

    After::

        all_gather[dp]  w -> w@full
        wait            w@full
        run F <f>       (x) -> y
        run G <g>       (y, w@full) -> z
        free            w@full, y

    Order of steps between roles: untouched.
    """
    return map_programs(schedule, _complete)


def _complete(program: Program) -> list[Instr]:
    last_wait: dict[str, int] = {}
    freed: set[str] = set()
    for i, instr in enumerate(program.instrs):
        if isinstance(instr, Wait):
            last_wait.update(dict.fromkeys(instr.bufs, i))
        elif isinstance(instr, Free):
            freed.update(instr.bufs)
    instrs: list[Instr] = []
    for i, instr in enumerate(program.instrs):
        instrs.append(instr)
        if is_async(instr) and all(last_wait.get(name, -1) < i for name in wait_names(instr)):
            instrs.append(Wait(tuple(dict.fromkeys(wait_names(instr)))))
    left = tuple(name for name in dying(program, program.instrs) if name not in freed)
    return [*instrs, Free(left)] if left else instrs
