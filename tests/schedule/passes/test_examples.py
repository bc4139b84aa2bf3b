"""The example in the docstring of every pass is what the pass does."""

import pytest

from fparallel.errors import ScheduleError
from fparallel.schedule.passes import PASSES, run_passes
from tests.schedule.examples import docstring_example, example, instr_lines


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_turns_the_schedule_before_into_the_schedule_after(name):
    before, after = docstring_example(PASSES[name])
    if name != "complete":  # whose example lacks waits and frees
        before.verify()
    after.verify()
    assert instr_lines(PASSES[name](before)) == instr_lines(after)
    assert PASSES[name](before) == after


def test_passes_run_in_order_and_can_be_switched_off():
    raw = "run F <f> (x, w) -> y\nall_gather[dp] w -> w@full\nrun G <g> (y, w@full) -> z\nrun H <h> (z) -> q"
    schedule = example(raw, like=f"{raw}\nfree y, z, w@full")
    run_passes(schedule).verify()
    assert instr_lines(run_passes(schedule)) == instr_lines(
        example(
            """
            all_gather[dp]  w -> w@full
            run F <f>       (x, w) -> y
            wait            w@full
            run G <g>       (y, w@full) -> z
            free            y, w@full
            run H <h>       (z) -> q
            free            z
            """
        )
    )
    off = run_passes(schedule, off=["prefetch", "early_free"])
    off.verify()
    assert instr_lines(off) == instr_lines(
        example(
            """
            run F <f>       (x, w) -> y
            all_gather[dp]  w -> w@full
            wait            w@full
            run G <g>       (y, w@full) -> z
            run H <h>       (z) -> q
            free            y, w@full, z
            """
        )
    )


def test_a_pass_that_does_not_exist_cannot_be_switched_off():
    with pytest.raises(ScheduleError, match="did you mean 'bucket'"):
        run_passes(example("run F <f> (x) -> y"), off=["buckets"])
