"""Waits as late as is legal."""

from __future__ import annotations

from fparallel.schedule.ir import Schedule
from fparallel.schedule.passes.placement import apply_moves


def sink_waits(schedule: Schedule) -> Schedule:
    """Takes out every wait and places it again as late as is legal.

    A step is waited for just before the first instruction that reads one of its outputs, or frees or
    overwrites one of its inputs or outputs; at the latest at the end of the program. Whatever stands in
    between overlaps with it.

    Before::

        all_gather[dp]  w -> w@full
        wait            w@full
        run F <f>       (x) -> y
        run G <g>       (y, w@full) -> z
        free            w@full, y

    After::

        all_gather[dp]  w -> w@full
        run F <f>       (x) -> y
        wait            w@full
        run G <g>       (y, w@full) -> z
        free            w@full, y

    Order of steps between roles: untouched.
    """
    return apply_moves(schedule)
