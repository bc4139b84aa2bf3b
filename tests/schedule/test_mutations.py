"""Whatever breaks a schedule is caught, and the message says what it is."""

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fparallel.errors import ScheduleError
from tests.schedule import mutations as m
from tests.schedule.strategies import any_schedules, pipeline_schedules, training_schedules

# What each mutation may be reported as.
KINDS = {
    m.dropped_wait: "(read|freed|overwritten) in flight|never waited for",
    m.wait_after_use: "(read|freed|overwritten) in flight",
    m.double_free: "double free",
    m.use_after_free: "use after freed|freed in flight",
    m.dropped_free: "leak",
    m.free_of_unwritten: "free of an unwritten buffer",
    m.read_before_write: "read before write|free of an unwritten buffer",
    m.double_write: "double write",
    m.missing_result: "missing result",
    m.result_freed: "result freed",
    m.overwritten_argument: "argument overwritten",
    m.freed_argument: "argument freed",
    m.overwritten_in_flight: "overwritten in flight",
    m.wait_for_nothing: "wait for nothing",
    m.wrong_shape: "wrong shape",
    m.wrong_dtype: "wrong dtype",
    m.wrong_axes: "wrong axes",
    m.wrong_reduce: "wrong reduce op",
    m.wrong_kind: "wrong axes",
    m.dropped_collective_on_one_rank: "missing collective",
}
TRAINING_KINDS = {
    m.swapped_collectives_on_one_rank: r"group disagrees on (op|reduce op|dtype|shape|buffer)",
    m.shape_on_one_rank: "group disagrees on shape",
    m.dtype_on_one_rank: "group disagrees on dtype",
    m.reduce_on_one_rank: "group disagrees on reduce op",
}
PIPELINE_KINDS = {
    m.missing_recv: "missing recv",
    m.missing_send: "missing send",
    m.swapped_sends: "send and recv disagree on (shape|buffer)",
}


def assert_caught(mutate, rng, schedule, kind):
    broken = mutate(rng, schedule)
    assume(broken is not None)
    schedule.verify()
    with pytest.raises(ScheduleError) as error:
        broken.verify()
    message = str(error.value)
    where, problem = message.split("\n")[:2]
    assert re.match(rf"  ({kind})", problem), message
    assert re.match(r"rank \d+ \([a-z]+=\d", where), message
    assert re.search(r"^Fix: \w", message, flags=re.MULTILINE), message


randoms = st.randoms(use_true_random=False)


@pytest.mark.parametrize("mutate", KINDS, ids=lambda mutate: mutate.__name__)
@given(schedule=any_schedules(), rng=randoms)
def test_a_broken_program_is_caught(mutate, schedule, rng):
    assert_caught(mutate, rng, schedule, KINDS[mutate])


@pytest.mark.parametrize("mutate", TRAINING_KINDS, ids=lambda mutate: mutate.__name__)
@given(schedule=training_schedules(), rng=randoms)
def test_a_rank_that_does_not_do_what_the_others_do_is_caught(mutate, schedule, rng):
    assert_caught(mutate, rng, schedule, TRAINING_KINDS[mutate])


@pytest.mark.parametrize("mutate", PIPELINE_KINDS, ids=lambda mutate: mutate.__name__)
@given(schedule=pipeline_schedules(), rng=randoms)
def test_stages_that_do_not_match_are_caught(mutate, schedule, rng):
    assert_caught(mutate, rng, schedule, PIPELINE_KINDS[mutate])


@given(schedule=training_schedules(), rng=randoms)
def test_a_rank_of_its_own_with_the_same_program_is_fine(schedule, rng):
    m.isolate(schedule, rng.randrange(schedule.mesh.size)).verify()


@given(size=st.integers(2, 6))
def test_a_ring_of_sends_deadlocks_unless_someone_receives_first(size):
    m.ring(size, blocking_safe=True).verify()
    # two ranks share one queue, whose order decides even when sends do not block
    mode = "blocking and asynchronous" if size == 2 else "blocking"
    with pytest.raises(ScheduleError, match=f"deadlock under {mode} issue, in a circle"):
        m.ring(size, blocking_safe=False).verify()


@pytest.mark.parametrize("waits_at_once", [True, False])
def test_groups_that_wait_for_each_other_deadlock_though_each_is_consistent(waits_at_once):
    mode = "blocking and asynchronous" if waits_at_once else "blocking"
    with pytest.raises(ScheduleError, match=f"deadlock under {mode} issue") as error:
        m.crossed_groups(waits_at_once=waits_at_once).verify()
    lines = [line.strip() for line in str(error.value).split("\n") if "waits at" in line]
    assert lines == [
        "(dp=0 tp=0) waits at 0000 all_reduce[dp sum]  a -> a.sum for (dp=1 tp=0)",
        "(dp=1 tp=0) waits at 0000 all_reduce[tp sum]  b -> b.sum for (dp=1 tp=1)",
        "(dp=1 tp=1) waits at 0000 all_reduce[dp sum]  a -> a.sum for (dp=0 tp=1)",
        "(dp=0 tp=1) waits at 0000 all_reduce[tp sum]  b -> b.sum for (dp=0 tp=0)",
    ]
