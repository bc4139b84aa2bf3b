"""Orders made for given costs."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fparallel.errors import ScheduleError
from fparallel.schedule import auto
from fparallel.schedule import orders as o
from fparallel.schedule import tasks as tk

TIMES = st.one_of(st.sampled_from([0.0, 0.5, 1.0, 2.0]), st.floats(0, 10))


def plan_of(rows, micros):
    ranks = len(rows)
    return tk.Plan("auto", ranks, micros, 1, o.round_robin(ranks, 1), rows, True)


def end_of(rows, cost):
    done, _ = tk.times(rows, lambda task: tk.needs(task, len(rows)), cost)
    return max(end for _, end in done.values())


def known_orders(ranks, micros):
    """1f1b and gpipe with W right after B, and zb_h1."""
    split = [
        [
            [part for t in row for part in ((t, tk.Task("W", *t[1:])) if t.kind == "B" else (t,))]
            for row in rows
        ]
        for rows in (o.one_f_one_b(ranks, micros, 1), o.gpipe(ranks, micros, 1))
    ]
    return [*split, o.zb_h1(ranks, micros, 1)]


# An example takes about a tenth of a second.
@settings(max_examples=settings.default.max_examples * 4)
@given(st.data())
def test_complete_bounded_and_never_slower_than_the_known_orders(data):
    ranks, micros = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 8))
    bounds = st.lists(st.integers(1, micros + 1), min_size=ranks, max_size=ranks)
    bound = data.draw(st.none() | bounds)
    random = data.draw(st.randoms(use_true_random=False))
    by_kind = data.draw(st.lists(TIMES, min_size=3, max_size=3))
    spread = data.draw(st.sampled_from([0.0, 0.3, 5.0]))
    costs = {
        tk.Task(kind, s, m): by_kind["FBW".index(kind)] + spread * random.random()
        for kind in "FBW"
        for s in range(ranks)
        for m in range(micros)
    }
    rows = auto.best_rows(ranks, micros, costs.__getitem__, in_flight=bound)
    plan = plan_of(rows, micros)
    tk.check(plan)
    limits = [micros] * ranks if bound is None else bound
    assert all(tk.in_flight(plan, rank) <= limits[rank] for rank in range(ranks))
    end = end_of(rows, costs.__getitem__)
    for seed in known_orders(ranks, micros):
        if all(tk.in_flight(plan_of(seed, micros), rank) <= limits[rank] for rank in range(ranks)):
            assert end <= end_of(seed, costs.__getitem__) * (1 + 1e-8)
    assert rows == auto.best_rows(ranks, micros, costs.__getitem__, in_flight=bound)


def test_one_micro_batch_in_flight_runs_them_one_after_the_other():
    rows = auto.best_rows(3, 4, tk.unit_cost, in_flight=[1, 1, 1])
    assert rows[0] == [tk.Task(kind, 0, m) for m in range(4) for kind in "FBW"]
    assert end_of(rows, tk.unit_cost) == 4 * 7  # three forwards, three backwards and the W of the first rank


def test_uneven_costs_give_an_order_faster_than_the_known_ones():
    """B twice as long as F, and the second stage slower than the others."""

    def cost(task):
        return {"F": 1.0, "B": 2.0, "W": 0.5}[task.kind] * (1.5 if task.stage == 1 else 1.0)

    assert [end_of(rows, cost) for rows in known_orders(4, 8)] == [47.75, 50.75, 47.0]
    assert end_of(auto.best_rows(4, 8, cost, in_flight=[4] * 4), cost) <= 44.5
    assert end_of(auto.best_rows(4, 8, cost), cost) <= 43.0


def test_equal_costs_leave_no_more_bubble_than_zb_h1():
    plan = plan_of(auto.best_rows(4, 8, tk.unit_cost), 8)
    assert tk.idle_fraction(plan) == pytest.approx(3 / (3 * 8 + 3))
    assert [tk.in_flight(plan, rank) for rank in range(4)] == [4] * 4


@pytest.mark.parametrize("bound", [[0, 1, 1], [1, 1], [2, -1, 2]])
def test_a_bound_that_none_keeps(bound):
    with pytest.raises(ScheduleError, match=r"the least bound that works is \[1, 1, 1\](.|\n)*Fix: "):
        auto.best_rows(3, 4, tk.unit_cost, in_flight=bound)


@pytest.mark.parametrize("time", [-1.0, float("nan"), float("inf")])
def test_a_cost_that_is_no_time(time):
    with pytest.raises(ScheduleError, match=r"the cost of B1\.2 is"):
        auto.best_rows(2, 3, lambda task: time if task == ("B", 1, 2) else 1.0)


def test_costs_that_add_up_to_infinity():
    with pytest.raises(ScheduleError, match="add up to infinity"):
        auto.best_rows(2, 3, lambda task: 1e308)


def test_large_pipelines_take_a_short_time():
    """About a second; ten allow for a busy machine, and exclude what is not polynomial."""
    begin = time.process_time()
    auto.best_rows(8, 64, lambda task: 1.0 + 0.3 * (task.stage == 3) + 0.1 * (task.kind == "B"))
    assert time.process_time() - begin < 10
