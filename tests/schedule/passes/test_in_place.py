"""Which sums take the place of their terms."""

import dataclasses

import pytest

from fparallel.errors import ScheduleError
from fparallel.schedule import Collective
from fparallel.schedule.memory import live_bytes
from fparallel.schedule.passes import in_place
from tests.schedule.examples import example, instr_lines

SUM = """
    run B <b>            (x) -> g
    all_reduce[dp sum]   g -> g@sum
    wait                 g@sum
    free                 g
    run U <u>            (g@sum) -> z
    free                 g@sum
"""


def test_a_dead_term_gives_its_place():
    before = example(SUM)
    after = in_place(before)
    after.verify()
    assert "all_reduce[dp sum in place]  g -> g@sum" in instr_lines(after)
    assert not any("free" in line and "g," in line for line in instr_lines(after))
    assert in_place(after) == after
    assert live_bytes(after, 0)[1] < live_bytes(before, 0)[1]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "(g@sum) -> z\n    free                 g@sum",
            "(g@sum, g) -> z\n    free                 g@sum, g",
        ),
        ("all_reduce[dp sum]", "reduce_scatter[dp sum]"),
        ("    run B <b>            (x) -> g\n", ""),
    ],
    ids=["read later", "another shape", "an argument"],
)
def test_others_do_not(old, new):
    text = SUM.replace(old, new)
    if "g@sum, g" in text:
        text = text.replace("    free                 g\n", "")
    if "reduce_scatter" in text:
        text = text.replace("g@sum", "g@shard")
    before = example(text)
    assert in_place(before) == before


def test_a_term_that_another_step_may_still_read_does_not():
    text = SUM.replace(
        "    wait                 g@sum\n",
        "    all_reduce[dp max]   g -> g@max\n    wait                 g@sum, g@max\n",
    ).replace("free                 g@sum", "free                 g@sum, g@max")
    before = example(text)
    assert in_place(before) == before


def test_the_verifier_knows_what_was_overwritten():
    schedule = in_place(example(SUM))
    (program,) = schedule.programs
    free = next(i for i in program.instrs if i.op == "free")
    again = [dataclasses.replace(i, bufs=(*i.bufs, "g")) if i is free else i for i in program.instrs]
    broken = dataclasses.replace(schedule, programs=(dataclasses.replace(program, instrs=tuple(again)),))
    with pytest.raises(ScheduleError, match="double free: g was overwritten"):
        broken.verify()
    wrong = [
        dataclasses.replace(i, kind="all_to_all", reduce="") if isinstance(i, Collective) else i
        for i in program.instrs
    ]
    broken = dataclasses.replace(schedule, programs=(dataclasses.replace(program, instrs=tuple(wrong)),))
    with pytest.raises(ScheduleError):
        broken.verify()
