"""Parameters gathered ahead of time."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from fparallel.schedule.ir import Collective, Instr, Program, Run, Schedule
from fparallel.schedule.passes.placement import apply_moves, device_bytes, live_device_bytes


def prefetch(
    schedule: Schedule, ahead_bytes: float | None = None, memory_budget: float | None = None
) -> Schedule:
    """Issues every gather of arguments one unit ahead, so that it overlaps with the runs of the unit before.

    The gathers with the same first use are a unit (a block's parameters, under ZeRO-3). A unit is issued
    just before the first use of the unit before it; the first unit before the run that precedes its first
    use. Where that would exceed a bound, it is issued as early as the bound allows, at the earliest where
    it stood.

    Args:
      schedule: the schedule, with its frees where they should be (see early_free).
      ahead_bytes: at most this many bytes of gathered, not yet used buffers per rank.
      memory_budget: at most this many bytes of device memory per rank.

    Before::

        all_gather[dp]  w1 -> w1@full
        wait            w1@full
        run F1 <f>      (x, w1@full) -> y
        free            w1@full
        all_gather[dp]  w2 -> w2@full
        wait            w2@full
        run F2 <f>      (y, w2@full) -> z
        free            w2@full, y

    After::

        all_gather[dp]  w1 -> w1@full
        all_gather[dp]  w2 -> w2@full
        wait            w1@full
        run F1 <f>      (x, w1@full) -> y
        free            w1@full
        wait            w2@full
        run F2 <f>      (y, w2@full) -> z
        free            w2@full, y

    Order of steps between roles: kept. A gather whose group spans several programs is left where it is.
    """
    move = functools.partial(gather_ahead, ahead_bytes=ahead_bytes, memory_budget=memory_budget)
    return apply_moves(schedule, move)


@dataclass
class _Gather:
    """A gather of arguments: where it stands, where it is used first, what it takes."""

    at: int
    use: int
    nbytes: int


def gather_ahead(
    schedule: Schedule,
    program: Program,
    instrs: list[Instr],
    *,
    ahead_bytes: float | None = None,
    memory_budget: float | None = None,
) -> list[Instr]:
    """The move of `prefetch`."""
    bound = math.inf if ahead_bytes is None else ahead_bytes
    budget = math.inf if memory_budget is None else memory_budget
    gathers = _gathers(schedule, program, instrs)
    live = live_device_bytes(schedule, program, instrs) if budget < math.inf else [0] * (len(instrs) + 1)
    ahead = [0.0] * (len(instrs) + 1)
    for gather in gathers:
        for i in range(gather.at, gather.use):
            ahead[i] += gather.nbytes
    target, before = -1, -1  # of the unit at hand: where to issue it, its first use
    moves: dict[int, int] = {}
    for gather in gathers:
        if gather.use != before:
            target = before if before >= 0 else _run_before(instrs, gather.use)
            before = gather.use
        place = gather.at
        for i in range(gather.at - 1, max(target, 0) - 1, -1):
            if max(live[i], live[i + 1]) + gather.nbytes > budget or ahead[i] + gather.nbytes > bound:
                break
            if i == target or isinstance(instrs[i], Run):
                place = i
        for i in range(place, gather.at):
            live[i + 1] += gather.nbytes
            ahead[i] += gather.nbytes
        moves[gather.at] = place
    keys = sorted(((moves[i], 0, i) if i in moves else (i, 1, i)) for i in range(len(instrs)))
    return [instrs[i] for _, _, i in keys]


def _gathers(schedule: Schedule, program: Program, instrs: Sequence[Instr]) -> list[_Gather]:
    """By first use; those that are never used are left out."""
    arguments = frozenset(program.arguments)
    first_use: dict[str, int] = {}
    for i, instr in enumerate(instrs):
        for name in instr.reads:
            first_use.setdefault(name, i)
    gathers = []
    for i, instr in enumerate(instrs):
        if not isinstance(instr, Collective) or instr.kind != "all_gather" or schedule.crosses_roles(instr):
            continue
        uses = [first_use[name] for name in instr.outs if name in first_use]
        if uses and arguments.issuperset(instr.ins):
            gathers.append(_Gather(i, min(uses), sum(device_bytes(schedule, name) for name in instr.outs)))
    return sorted(gathers, key=lambda gather: (gather.use, gather.at))


def _run_before(instrs: Sequence[Instr], at: int) -> int:
    return next((i for i in range(at - 1, -1, -1) if isinstance(instrs[i], Run)), at)
