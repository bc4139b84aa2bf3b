"""What is kept instead of gathered again, under a budget."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fparallel.mesh import Mesh
from fparallel.schedule import Collective, Schedule
from fparallel.schedule.memory import memory
from fparallel.schedule.passes import keep, run_passes
from tests.schedule.examples import example, instr_lines
from tests.schedule.passes.test_laws import assert_same_meaning
from tests.schedule.strategies import any_schedules, pipeline_schedules, training_schedules

# Two blocks, forward and backward: w is 64 bytes on a rank, all else 128
STEP = """
    all_gather[dp]  w1 -> w1@f
    run F1 <f>      (x, w1@f) -> y
    free            w1@f
    all_gather[dp]  w2 -> w2@f
    run F2 <f>      (y, w2@f) -> z
    free            w2@f
    run L <l>       (z) -> d
    free            z
    all_gather[dp]  w2 -> w2@b
    run B2 <b>      (y, w2@b, d) -> e
    free            w2@b, y, d
    all_gather[dp]  w1 -> w1@b
    run B1 <b>      (x, w1@b, e) -> c
    free            w1@b, e
"""


def gathers(schedule: Schedule, rank: int = 0) -> list[str]:
    return [name for instr in schedule.collectives("all_gather", rank=rank) for name in instr.ins]


def tensors(schedule: Schedule) -> int:
    """How many tensors are gathered, in all programs."""
    instrs = (instr for program in schedule.programs for instr in program.instrs)
    return sum(len(i.ins) for i in instrs if isinstance(i, Collective) and i.kind == "all_gather")


def test_each_budget_keeps_what_it_has_room_for():
    """Without any kept B2 holds most: x, w1, w2, y, d, w2@b and e. At L w2@f would come to x, w1, w2, y, z and d."""
    schedule = example(STEP)
    assert memory(schedule).peak() == 768
    kept = {budget: gathers(keep(schedule, budget)) for budget in (0, 767, 768, 895, 896, math.inf)}
    assert kept == {
        0: ["w1", "w2", "w2", "w1"],
        767: ["w1", "w2", "w2", "w1"],
        768: ["w1", "w2", "w1"],
        895: ["w1", "w2", "w1"],
        896: ["w1", "w2"],
        math.inf: ["w1", "w2"],
    }
    for budget in kept:
        after = keep(schedule, budget)
        after.verify(memory_budget=max(budget, 768))
    assert instr_lines(keep(schedule, 768)) == instr_lines(
        example("""
            all_gather[dp]  w1 -> w1@f
            wait            w1@f
            run F1 <f>      (x, w1@f) -> y
            free            w1@f
            all_gather[dp]  w2 -> w2@f  # kept
            wait            w2@f
            run F2 <f>      (y, w2@f) -> z
            run L <l>       (z) -> d
            free            z
            run B2 <b>      (y, w2@f, d) -> e
            free            w2@f, y, d
            all_gather[dp]  w1 -> w1@b
            wait            w1@b
            run B1 <b>      (x, w1@b, e) -> c
            free            w1@b, e
        """)
    )


def test_some_tensors_of_a_bucket_are_kept():
    text = """
        all_gather[dp]  w1, w2 -> w1@f, w2@f
        run F <f>       (x, w1@f, w2@f) -> y
        free            w1@f, w2@f
        run L <l>       (y) -> d
        all_gather[dp]  w2, w3 -> w2@b, w3@b
        run B <b>       (d, w2@b, w3@b) -> e
        free            w2@b, w3@b, y, d
    """
    assert instr_lines(keep(example(text))) == instr_lines(
        example("""
            all_gather[dp]  w1, w2 -> w1@f, w2@f  # kept
            wait            w1@f, w2@f
            run F <f>       (x, w1@f, w2@f) -> y
            free            w1@f
            run L <l>       (y) -> d
            all_gather[dp]  w3 -> w3@b
            wait            w3@b
            run B <b>       (d, w2@f, w3@b) -> e
            free            w2@f, w3@b, y, d
        """)
    )


def test_of_what_is_live_twice_one_is_enough_whatever_the_budget():
    text = """
        all_gather[dp]  w -> w@a
        all_gather[dp]  w -> w@b
        run F <f>       (x, w@a) -> y
        run G <g>       (y, w@b) -> z
        free            w@b, y
        run H <h>       (z, w@a) -> q
        free            w@a, z
    """
    after = keep(example(text), 0)
    assert gathers(after) == ["w"]
    assert (memory(example(text)).peak(), memory(after).peak()) == (704, 576)


@pytest.mark.parametrize(
    "last",
    [
        "all_gather[dp]  w -> w@b\nrun B <b>  (w@b) -> z<=w@b",  # z takes its place
        "all_gather[dp]  w -> w@b\nrun B <b>  (w@b) -> z",  # a result
        "all_gather[dp]  s -> w@b\nrun B <b>  (w@b) -> z\nfree  w@b",  # another source
    ],
)
def test_what_is_not_taken_out(last):
    schedule = example(f"all_gather[dp]  w -> w@a\nrun F <f>  (x, w@a) -> y\nfree  w@a\n{last}")
    assert keep(schedule) == run_passes(schedule, off=["complete", "bucket", "early_free", "prefetch"])


def test_what_is_sent_keeps_its_name():
    """The receiver knows it by that."""
    mesh = Mesh((2, 2), ("dp", "pp"))
    sender = example(
        """
        all_gather[dp]  w -> w@a
        run F <f>       (x, w@a) -> y
        free            w@a
        all_gather[dp]  w -> w@b
        send[pp 1]      w@b
        free            w@b
        """,
        mesh=mesh,
    )
    receiver = example("recv[pp 0]  w@b\nrun G <g>  (w@b) -> z\nfree  w@b", mesh=mesh)
    roles = [(("pp", 0),), (("pp", 1),)]
    programs = [
        dataclasses.replace(some.programs[0], role=role)
        for some, role in zip((sender, receiver), roles, strict=True)
    ]
    both = Schedule(
        mesh, receiver.buffers | sender.buffers, receiver.segments | sender.segments, tuple(programs)
    )
    after = keep(both)
    after.verify()
    assert gathers(after) == ["w", "w"]


@given(raw=any_schedules(raw=True), room=st.sampled_from([-500, 0, 300, 1000, 10**9]))
def test_the_peak_stays_within_the_budget(raw, room):
    plain = run_passes(raw, memory_budget=0, off=["prefetch", "keep"])
    before = max(row.peak for row in memory(plain).rows)
    budget = before + room
    after = keep(plain, budget)
    after.verify(memory_budget=max(budget, before))
    assert_same_meaning(plain, after, once=True)
    assert keep(after, budget) == after


@given(raw=st.one_of(training_schedules(raw=True), pipeline_schedules(raw=True)), data=st.data())
def test_a_larger_budget_never_gathers_more(raw, data):
    peaks = [memory(run_passes(raw, memory_budget=budget)).peak() for budget in (0, math.inf)]
    levels = st.integers(peaks[0] - 100, peaks[1] + 100)
    small, large = sorted(data.draw(st.tuples(levels, levels)))
    few, many = (run_passes(raw, memory_budget=budget) for budget in (small, large))
    assert tensors(many) <= tensors(few)
    for program in raw.programs:
        rank = raw.first_rank(program)
        assert many.bytes("all_gather", rank=rank) <= few.bytes("all_gather", rank=rank)
        assert set(gathers(many, rank)) == set(gathers(few, rank))


@given(raw=st.one_of(training_schedules(raw=True), pipeline_schedules(raw=True)))
def test_with_room_for_everything_each_tensor_is_gathered_once(raw):
    after = run_passes(raw, memory_budget=math.inf)
    for program in after.programs:
        names = gathers(after, after.first_rank(program))
        assert len(names) == len(set(names))


@given(raw=any_schedules(raw=True))
def test_without_a_budget_nothing_is_kept(raw):
    assert run_passes(raw) == run_passes(raw, off=["keep"])
