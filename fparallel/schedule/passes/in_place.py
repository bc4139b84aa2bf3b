"""Sums over ranks take the place of their terms."""

from __future__ import annotations

import dataclasses
from collections import Counter

from fparallel.schedule.ir import Collective, Free, Instr, Program, Schedule, is_async
from fparallel.schedule.passes.placement import apply_moves


def in_place(schedule: Schedule) -> Schedule:
    """Lets an all_reduce write where it reads, if nothing reads its inputs afterwards.

    It saves the memory of a bucket while the sum is taken.

    Before::

        run B <b>            (y, w) -> d, g
        all_reduce[dp sum]   g -> g@sum
        wait                 g@sum
        free                 g
        run update <u>       (w, g@sum) -> w'<=w

    After::

        run B <b>                     (y, w) -> d, g
        all_reduce[dp sum in place]   g -> g@sum
        wait                          g@sum
        run update <u>                (w, g@sum) -> w'<=w

    Order of steps between roles: untouched.
    """
    return apply_moves(schedule, reduce_in_place)


def reduce_in_place(schedule: Schedule, program: Program, instrs: list[Instr]) -> list[Instr]:
    """The move of `in_place`."""
    last_read = {name: i for i, instr in enumerate(instrs) for name in instr.reads}
    # a step that is no run may read on after the next one was issued: there must be no other
    talks = Counter(name for instr in instrs if is_async(instr) for name in instr.reads)
    freed = {name for instr in instrs if isinstance(instr, Free) for name in instr.bufs}
    taken: set[str] = set()
    made: list[Instr] = []
    for i, instr in enumerate(instrs):
        if isinstance(instr, Collective) and instr.kind == "all_reduce" and not instr.inplace:
            may = all(
                last_read[name] == i
                and talks[name] == 1
                and name in freed
                and schedule.buffers[name].kind == "temp"
                and schedule.buffers[name].memory == schedule.buffers[out].memory
                for name, out in zip(instr.ins, instr.outs, strict=True)
            )
            if may:
                taken.update(instr.ins)
                instr = dataclasses.replace(instr, inplace=True)
        elif isinstance(instr, Free) and not taken.isdisjoint(instr.bufs):
            instr = dataclasses.replace(instr, bufs=tuple(name for name in instr.bufs if name not in taken))
            if not instr.bufs:
                continue
        made.append(instr)
    return made
