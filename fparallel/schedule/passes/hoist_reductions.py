"""Collectives as early as their inputs allow."""

from __future__ import annotations

from fparallel.schedule.ir import Collective, Instr, Program, Schedule, is_async
from fparallel.schedule.passes.placement import apply_moves


def hoist_reductions(schedule: Schedule) -> Schedule:
    """Issues every collective on values of the program right after the run that makes its last input.

    Reductions of gradients then overlap with the rest of the backward pass. A collective on the output of
    another step stays where it is: issued earlier it would wait earlier. Collectives on arguments are for
    `prefetch`.

    Before::

        run B2 <b>                (y, w) -> d, g2
        run B1 <b>                (d, w) -> e, g1
        free                      y, d, e
        reduce_scatter[dp sum]    g2 -> g2@shard
        reduce_scatter[dp sum]    g1 -> g1@shard
        wait                      g2@shard, g1@shard
        free                      g2, g1
        run update <u>            (s, g2@shard, g1@shard) -> s'<=s
        free                      g2@shard, g1@shard

    After::

        run B2 <b>                (y, w) -> d, g2
        reduce_scatter[dp sum]    g2 -> g2@shard
        run B1 <b>                (d, w) -> e, g1
        reduce_scatter[dp sum]    g1 -> g1@shard
        free                      y, d, e
        wait                      g2@shard, g1@shard
        free                      g2, g1
        run update <u>            (s, g2@shard, g1@shard) -> s'<=s
        free                      g2@shard, g1@shard

    Order of steps between roles: kept. A collective whose group spans several programs moves only past runs
    and past steps inside a role, so all members still issue their common steps in the same order.
    """
    return apply_moves(schedule, hoist)


def hoist(schedule: Schedule, program: Program, instrs: list[Instr]) -> list[Instr]:
    """The move of `hoist_reductions`."""
    producer: dict[str, int] = {}
    keys: list[
        tuple[int, int, int]
    ] = []  # where each instruction goes: (after which one, moved, its old place)
    crossing = (-1, 0, -1)
    for i, instr in enumerate(instrs):
        key = (i, 0, i)
        if isinstance(instr, Collective) and not instr.inplace:
            sources = [producer[name] for name in instr.reads if name in producer]
            if sources and not any(is_async(instrs[source]) for source in sources):
                key = (max(sources), 1, i)
        if schedule.crosses_roles(instr):
            key = max(key, (crossing[0], 1, i))
            crossing = key
        keys.append(key)
        producer.update(dict.fromkeys(instr.writes, i))
    return [instrs[i] for _, _, i in sorted(keys)]
