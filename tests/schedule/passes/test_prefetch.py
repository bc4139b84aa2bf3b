"""How far ahead parameters are gathered."""

import pytest

from fparallel.schedule.memory import memory
from fparallel.schedule.passes import prefetch
from tests.schedule.examples import example, instr_lines

# x, w@full and what runs produce are 128 bytes, w is 64 on a rank
BLOCKS = """
    run E <e>       (x) -> h
    all_gather[dp]  w1 -> w1@full
    wait            w1@full
    run F1 <f>      (h, w1@full) -> y
    run A1 <a>      (y) -> z
    free            h, w1@full, y
    all_gather[dp]  w2 -> w2@full
    wait            w2@full
    run F2 <f>      (z, w2@full) -> u
    free            w2@full, z
"""

AHEAD = """
    all_gather[dp]  w1 -> w1@full
    run E <e>       (x) -> h
    all_gather[dp]  w2 -> w2@full
    wait            w1@full
    run F1 <f>      (h, w1@full) -> y
    run A1 <a>      (y) -> z
    free            h, w1@full, y
    wait            w2@full
    run F2 <f>      (z, w2@full) -> u
    free            w2@full, z
"""


def test_a_unit_is_issued_before_the_first_use_of_the_unit_before_it():
    assert instr_lines(prefetch(example(BLOCKS))) == instr_lines(example(AHEAD))


def test_the_gathers_of_one_run_are_one_unit():
    schedule = example("""
        all_gather[dp]  w1 -> w1@full
        wait            w1@full
        run F1 <f>      (x, w1@full) -> y
        free            w1@full
        all_gather[dp]  w2 -> w2@full
        all_gather[dp]  w3 -> w3@full
        wait            w2@full, w3@full
        run F2 <g>      (y, w2@full, w3@full) -> z
        free            w2@full, w3@full, y
    """)
    assert instr_lines(prefetch(schedule)) == instr_lines(
        example("""
            all_gather[dp]  w1 -> w1@full
            all_gather[dp]  w2 -> w2@full
            all_gather[dp]  w3 -> w3@full
            wait            w1@full
            run F1 <f>      (x, w1@full) -> y
            free            w1@full
            wait            w2@full, w3@full
            run F2 <g>      (y, w2@full, w3@full) -> z
            free            w2@full, w3@full, y
        """)
    )


@pytest.mark.parametrize(
    ("room", "moved_past"),
    [(0, []), (127, []), (128, ["A1", "F1"])],
)
def test_the_peak_stays_within_the_budget(room, moved_past):
    """The peak, 768 bytes, is at A1; a gather that is alive at A1 takes 128 more."""
    schedule = example(BLOCKS)
    peak = memory(schedule).peak()
    assert peak == 128 + 2 * 64 + 4 * 128
    after = prefetch(schedule, memory_budget=peak + room)
    assert memory(after).peak() <= peak + room
    instrs = list(after.programs[0].instrs)
    at = next(i for i, instr in enumerate(instrs) if instr.reads == ("w2",))
    assert [instr.label for instr in instrs[at:] if instr.op == "run"] == [*reversed(moved_past), "F2"]


def test_the_bytes_ahead_are_bounded():
    schedule = example(BLOCKS)
    assert prefetch(schedule, ahead_bytes=256) == prefetch(schedule)
    near = prefetch(schedule, ahead_bytes=128)  # w2 may not be in flight while w1 is not used yet
    names = [instr.reads[0] for instr in near.programs[0].instrs if instr.op in ("all_gather", "run")]
    assert names == ["w1", "x", "w2", "h", "y", "z"]
    assert prefetch(schedule, ahead_bytes=0) == schedule


def test_gathers_of_values_and_gathers_that_nobody_uses_stay():
    schedule = example("""
        run F <f>         (x) -> y@shard
        all_gather[dp]    y@shard -> y
        all_gather[dp]    w -> w@full
        wait              y
        run G <g>         (y) -> z
        wait              w@full
    """)
    assert prefetch(schedule) == schedule
