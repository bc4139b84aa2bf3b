"""Law 5: every registered order runs every task once, in a possible order, within its memory and idle time."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fparallel.errors import ScheduleError
from fparallel.schedule import orders as o
from fparallel.schedule import tasks as tk
from tests.schedule.ordered import from_plan

ORDERS = tuple(o.ORDERS)
RANKS, MICROS = st.integers(1, 6), st.integers(1, 14)
many = settings(max_examples=settings.default.max_examples * 20)  # an order takes about a millisecond


@st.composite
def plans(draw):
    name = draw(st.sampled_from(ORDERS))
    chunks = f":{draw(st.integers(1, 4))}" if o.ORDERS[name].chunks is None else ""
    return o.make_plan(name + chunks, draw(RANKS), draw(MICROS))


def costs_of(plan, draw):
    """A positive time for every task."""
    random = draw(st.randoms(use_true_random=False))
    spread = draw(st.sampled_from([0.0, 0.1, 1.0, 100.0]))
    costs = {task: 1 + spread * random.random() for row in plan.rows for task in row}
    return costs.__getitem__


def test_the_orders_of_the_literature_are_registered():
    assert set(ORDERS) >= {"gpipe", "1f1b", "interleaved", "zb_h1", "zb_v"}


@many
@given(plans(), st.data())
def test_every_task_once_on_its_rank_after_its_needs(plan, data):
    cost = costs_of(plan, data.draw)
    wanted = set(itertools.product("FBW" if plan.splits else "FB", range(plan.stages), range(plan.micros)))
    assert len(plan.place) == plan.ranks * plan.chunks
    assert sorted(task for row in plan.rows for task in row) == sorted(wanted)
    assert all(plan.place[task.stage] == rank for rank, row in enumerate(plan.rows) for task in row)
    done = tk.plan_times(plan, cost)
    assert set(done) == wanted
    for task, (begin, end) in done.items():
        kind, stage, micro = task
        assert end == begin + cost(task)
        if kind == "F" and stage:
            assert done["F", stage - 1, micro][1] <= begin
        if kind == "B":
            assert done["F", stage, micro][1] <= begin
            assert stage + 1 == plan.stages or done["B", stage + 1, micro][1] <= begin
        if kind == "W":
            assert done["B", stage, micro][1] <= begin
    for row in plan.rows:
        assert all(done[a][1] <= done[b][0] for a, b in itertools.pairwise(row))
    busiest = max(sum(map(cost, row)) for row in plan.rows)
    assert max(end for _, end in done.values()) >= busiest * (1 - 1e-12)
    assert 0 <= tk.idle_fraction(plan, cost) + 1e-12 < 1


@settings(max_examples=settings.default.max_examples * 8)
@given(plans(), st.data())
def test_its_sends_and_receives_never_wait_in_a_circle(plan, data):
    """Under blocking and asynchronous issue; also every buffer is written, sent, read and freed in turn."""
    from_plan(plan, costs_of(plan, data.draw)).verify()


def test_receives_right_before_their_use_wait_in_a_circle():
    with pytest.raises(ScheduleError, match="deadlock under blocking"):
        from_plan(o.make_plan("1f1b", 2, 4), agreed=False).verify()


@many
@given(RANKS, MICROS)
def test_memory(ranks, micros):
    gpipe, f1b1, zb = (o.make_plan(name, ranks, micros) for name in ("gpipe", "1f1b", "zb_h1"))
    zb_v = o.make_plan("zb_v", ranks, micros)
    for rank in range(ranks):
        assert tk.in_flight(gpipe, rank) == micros
        assert tk.in_flight(f1b1, rank) == min(ranks - rank, micros)
        assert tk.in_flight(zb, rank) <= min(ranks, micros)
        assert tk.in_flight(zb_v, rank) <= 2 * ranks  # of half stages: as much as 1f1b on its first rank


@many
@given(RANKS, MICROS, st.integers(1, 4))
def test_idle_fraction_at_equal_costs(ranks, micros, chunks):
    def idle(name):
        return tk.idle_fraction(o.make_plan(name, ranks, micros))

    p, m, v = ranks, micros, chunks
    assert idle("gpipe") == pytest.approx((p - 1) / (m + p - 1))
    assert idle("1f1b") == pytest.approx((p - 1) / (m + p - 1))
    if m % p == 0:
        assert idle(f"interleaved:{v}") == pytest.approx((p - 1) / (v * m + p - 1))
    if m >= p:
        assert idle("zb_h1") == pytest.approx((p - 1) / (3 * m + p - 1))


def bottleneck(costs, cuts):
    return max(sum(costs[a:b]) for a, b in itertools.pairwise([0, *cuts, len(costs)]))


@many
@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.data())
def test_balance_is_contiguous_full_and_optimal(costs, data):
    stages = data.draw(st.integers(1, len(costs)))
    place = o.balance(costs, stages)
    assert place == sorted(place) and set(place) == set(range(stages))
    cuts = [place.index(stage) for stage in range(1, stages)]
    best = min(bottleneck(costs, c) for c in itertools.combinations(range(1, len(costs)), stages - 1))
    assert bottleneck(costs, cuts) == best
