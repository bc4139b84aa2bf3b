"""Frees as early as costs no overlap."""

from __future__ import annotations

from fparallel.schedule.ir import Free, Instr, Program, Schedule
from fparallel.schedule.passes.placement import apply_moves, dying, place_frees


def early_free(schedule: Schedule) -> Schedule:
    """Frees every temp and every donated argument that is no result right after its last use.

    If communication still uses a buffer then, it is freed once that step is waited for: before the first
    instruction that reads the step's output or, if that is earlier, before the next step on the same
    communicator that holds on to buffers, with some run in between. So at most two batches of steps per
    communicator hold memory at a time.

    Before::

        run B2 <b>                (y, w) -> d, g2
        reduce_scatter[dp sum]    g2 -> g2@shard
        run B1 <b>                (d, w) -> e, g1
        reduce_scatter[dp sum]    g1 -> g1@shard
        wait                      g2@shard, g1@shard
        run update <u>            (s, g2@shard, g1@shard) -> s'<=s
        free                      y, d, e, g2, g1, g2@shard, g1@shard

    After::

        run B2 <b>                (y, w) -> d, g2
        free                      y
        reduce_scatter[dp sum]    g2 -> g2@shard
        run B1 <b>                (d, w) -> e, g1
        wait                      g2@shard
        free                      d, g2, e
        reduce_scatter[dp sum]    g1 -> g1@shard
        wait                      g1@shard
        free                      g1
        run update <u>            (s, g2@shard, g1@shard) -> s'<=s
        free                      g2@shard, g1@shard

    The waits are placed as by sink_waits, which changes nothing afterwards. Order of steps between roles:
    untouched.
    """
    return apply_moves(schedule, free_early)


def free_early(schedule: Schedule, program: Program, instrs: list[Instr]) -> list[Instr]:
    """The move of `early_free`."""
    kept = [instr for instr in instrs if not isinstance(instr, Free)]
    return place_frees(kept, dying(program, kept))
