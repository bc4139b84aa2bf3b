"""Orders made for given costs."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fparallel.errors import ScheduleError
from fparallel.schedule import auto
from fparallel.schedule import orders as o

TIMES = st.one_of(st.sampled_from([0.0, 0.5, 1.0, 2.0]), st.floats(0, 10))


def plan_of(rows, micros):
    ranks = len(rows)
    return o.Plan("auto", ranks, micros, 1, o.round_robin(ranks, 1), rows, True)


def end_of(rows, cost):
    done, _ = o.times(rows, lambda task: o.needs(task, len(rows)), cost)
    return max(end for _, end in done.values())


def known_orders(ranks, micros):
    """1f1b and gpipe with W right after B, and zb_h1."""
    split = [
        [
            [part for t in row for part in ((t, o.Task("W", *t[1:])) if t.kind == "B" else (t,))]
            for row in rows
        ]
        for rows in (o.one_f_one_b(ranks, micros, 1), o.gpipe(ranks, micros, 1))
    ]
    return [*split, o.zb_h1(ranks, micros, 1)]


@given(st.data())
def test_complete_bounded_and_never_slower_than_the_known_orders(data):
    ranks, micros = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 8))
    bounds = st.lists(st.integers(1, micros + 1), min_size=ranks, max_size=ranks)
    bound = data.draw(st.none() | bounds)
    random = data.draw(st.randoms(use_true_random=False))
    by_kind = data.draw(st.lists(TIMES, min_size=3, max_size=3))
    spread = data.draw(st.sampled_from([0.0, 0.3, 5.0]))
    costs = {
        o.Task(kind, s, m): by_kind["FBW".index(kind)] + spread * random.random()
        for kind in "FBW"
        for s in range(ranks)
        for m in range(micros)
    }
    rows = auto.best_rows(ranks, micros, costs.__getitem__, in_flight=bound)
    plan = plan_of(rows, micros)
    o.check(plan)
    limits = [micros] * ranks if bound is None else bound
    assert all(o.in_flight(plan, rank) <= limits[rank] for rank in range(ranks))
    end = end_of(rows, costs.__getitem__)
    for seed in known_orders(ranks, micros):
        if all(o.in_flight(plan_of(seed, micros), rank) <= limits[rank] for rank in range(ranks)):
            assert end <= end_of(seed, costs.__getitem__) * (1 + 1e-8)
    assert rows == auto.best_rows(ranks, micros, costs.__getitem__, in_flight=bound)


def test_one_micro_batch_in_flight_runs_them_one_after_the_other():
    rows = auto.best_rows(3, 4, o.unit_cost, in_flight=[1, 1, 1])
    assert rows[0] == [o.Task(kind, 0, m) for m in range(4) for kind in "FBW"]
    assert (
        end_of(rows, o.unit_cost) == 4 * 7 - 3
    )  # F down 3, B up 3, W 1, but the last ranks run W while B goes up
