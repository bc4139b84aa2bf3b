"""Passes: pure functions from a schedule to a schedule with the same meaning.

| pass | what it does |
|---|---|
| `complete` | adds the waits and frees that are missing, in the plainest places |
| `hoist_reductions` | issues collectives as early as their inputs allow |
| `bucket` | merges collectives of one kind |
| `early_free` | frees as early as costs no overlap |
| `in_place` | lets an all_reduce write where it reads |
| `keep` | keeps what has been gathered for its next use, under a memory budget |
| `prefetch` | gathers parameters one unit ahead, under a memory budget |
| `sink_waits` | waits as late as is legal |

Each takes a valid schedule to a valid one, does nothing the second time, and may be left out. None of them
changes the order of the steps between roles (sends, receives, and collectives over axes along which
programs differ), so programs that agree and do not deadlock still do neither afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection

from fparallel.errors import ScheduleError, did_you_mean
from fparallel.schedule.ir import Schedule
from fparallel.schedule.passes.bucket import bucket, merge
from fparallel.schedule.passes.complete import complete
from fparallel.schedule.passes.early_free import early_free, free_early
from fparallel.schedule.passes.hoist_reductions import hoist, hoist_reductions
from fparallel.schedule.passes.in_place import in_place, reduce_in_place
from fparallel.schedule.passes.keep import keep, keep_gathered
from fparallel.schedule.passes.placement import Move, apply_moves, drop_unused
from fparallel.schedule.passes.prefetch import gather_ahead, prefetch
from fparallel.schedule.passes.sink_waits import sink_waits

__all__ = [
    "PASSES",
    "bucket",
    "complete",
    "early_free",
    "hoist_reductions",
    "in_place",
    "keep",
    "prefetch",
    "run_passes",
    "sink_waits",
]

PASSES: dict[str, Callable[..., Schedule]] = {
    "complete": complete,
    "hoist_reductions": hoist_reductions,
    "bucket": bucket,
    "early_free": early_free,
    "in_place": in_place,
    "keep": keep,
    "prefetch": prefetch,
    "sink_waits": sink_waits,
}


def run_passes(
    schedule: Schedule,
    *,
    off: Collection[str] = (),
    bucket_bytes: float = 25e6,
    memory_budget: float | None = None,
) -> Schedule:
    """Runs `PASSES` in their order, with the waits placed once.

    Args:
      schedule: runs and communication in program order, with or without waits and frees.
      off: names of passes to leave out.
      bucket_bytes: the size up to which `bucket` merges collectives.
      memory_budget: bytes of device memory per rank that `keep` and `prefetch` do not exceed; without one nothing is
        kept.

    Raises:
      ScheduleError: there is no pass of a name in `off`.
    """
    for name in off:
        if name not in PASSES:
            raise ScheduleError(
                f"there is no pass {name!r}", fix=f"use one of PASSES; {did_you_mean(name, PASSES)}"
            )
    if "complete" not in off:
        schedule = complete(schedule)
    kept = None if memory_budget is None else functools.partial(keep_gathered, memory_budget=memory_budget)
    moves: dict[str, Move | None] = {
        "hoist_reductions": hoist,
        "bucket": functools.partial(merge, max_bytes=bucket_bytes),
        "early_free": free_early,
        "in_place": reduce_in_place,
        "keep": kept,
        "prefetch": functools.partial(gather_ahead, memory_budget=memory_budget),
        "sink_waits": None,  # what every move ends with
    }
    wanted = [name for name in moves if name not in off]
    if not wanted:
        return schedule
    after = apply_moves(schedule, *filter(None, map(moves.get, wanted)))
    return drop_unused(after, schedule) if kept is not None else after
