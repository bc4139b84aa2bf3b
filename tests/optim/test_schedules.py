"""Schedules are closed formulas of the step count."""

import math

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fparallel import optim

COUNTS = [0, 1, 2, 3, 7, 9, 10, 11, 19, 49, 50, 99, 100, 101, 1000, 10**6]


def line(a, b, t, num_steps):
    return a + (b - a) * min(max(t / num_steps, 0), 1)


def half_cosine(a, b, t, num_steps, exponent=1.0):
    return b + (a - b) * (0.5 * (1 + math.cos(math.pi * min(max(t / num_steps, 0), 1)))) ** exponent


CASES = {
    "constant": (optim.constant_schedule(3e-4), lambda t: 3e-4),
    "linear": (optim.linear_schedule(1.0, 0.1, 50), lambda t: line(1.0, 0.1, t, 50)),
    "linear, late": (optim.linear_schedule(0.2, 0.9, 10, 40), lambda t: line(0.2, 0.9, t - 40, 10)),
    "linear, 0 steps": (optim.linear_schedule(0.2, 0.9, 0), lambda t: 0.9),
    "linear, 0 steps, late": (optim.linear_schedule(0.2, 0.9, 0, 10), lambda t: 0.2 if t < 10 else 0.9),
    "cosine": (optim.cosine_decay_schedule(0.5, 100), lambda t: half_cosine(0.5, 0.0, t, 100)),
    "cosine, alpha and exponent": (
        optim.cosine_decay_schedule(0.5, 100, alpha=0.1, exponent=2.0),
        lambda t: half_cosine(0.5, 0.05, t, 100, 2.0),
    ),
    "warm-up, constant": (optim.warmup_constant_schedule(0.1, 1.0, 10), lambda t: line(0.1, 1.0, t, 10)),
    "no warm-up, constant": (optim.warmup_constant_schedule(0.1, 1.0, 0), lambda t: 1.0),
    "warm-up, cosine": (
        optim.warmup_cosine_decay_schedule(0.1, 1.0, 10, 100, end_value=0.2),
        lambda t: line(0.1, 1.0, t, 10) if t < 10 else half_cosine(1.0, 0.2, t - 10, 90),
    ),
    "warm-up, cosine with exponent": (
        optim.warmup_cosine_decay_schedule(0.0, 1.0, 10, 100, exponent=3.0),
        lambda t: line(0.0, 1.0, t, 10) if t < 10 else half_cosine(1.0, 0.0, t - 10, 90, 3.0),
    ),
    "no warm-up, cosine": (
        optim.warmup_cosine_decay_schedule(0.1, 1.0, 0, 100),
        lambda t: half_cosine(1.0, 0.0, t, 100),
    ),
    "a peak of 0": (
        optim.warmup_cosine_decay_schedule(1.0, 0.0, 10, 100, end_value=0.5),
        lambda t: line(1.0, 0.0, t, 10) if t < 10 else half_cosine(0.0, 0.5, t - 10, 90),
    ),
    "joined": (
        optim.join_schedules(
            [
                optim.constant_schedule(0.3),
                optim.linear_schedule(1.0, 0.0, 40),
                optim.cosine_decay_schedule(2.0, 7),
            ],
            [3, 50],
        ),
        lambda t: 0.3 if t < 3 else line(1.0, 0.0, t - 3, 40) if t < 50 else half_cosine(2.0, 0.0, t - 50, 7),
    ),
    "joined with a plain function": (
        optim.join_schedules([lambda t: 0.5, lambda t: 2.0 * t], [10]),
        lambda t: 0.5 if t < 10 else 2.0 * (t - 10),
    ),
    "one, joined": (optim.join_schedules([optim.constant_schedule(0.3)], []), lambda t: 0.3),
}


@pytest.mark.parametrize("name", CASES)
def test_closed_form(name):
    schedule, expected = CASES[name]
    for t in COUNTS:
        assert float(schedule(t)) == pytest.approx(expected(t), rel=1e-12, abs=1e-15), t


@pytest.mark.parametrize("name", CASES)
def test_an_int_and_a_tensor_count_give_the_same(name):
    schedule, _ = CASES[name]
    for t in COUNTS:
        by_int, by_tensor = schedule(t), schedule(torch.tensor(t))
        assert by_int == by_tensor
        assert by_int.shape == by_tensor.shape == ()
        assert by_int.dtype == by_tensor.dtype == torch.float64


@pytest.mark.parametrize("name", CASES)
def test_the_count_may_be_traced(name):
    """One compiled graph for all counts: nothing branches on the value."""
    schedule, expected = CASES[name]
    graph = make_fx(schedule)(torch.tensor(0))
    for t in COUNTS:
        assert float(graph(torch.tensor(t))) == pytest.approx(expected(t), rel=1e-12, abs=1e-15), t


def test_the_end_values_are_exact():
    assert float(optim.linear_schedule(0.1, 0.3, 7)(7)) == 0.3
    assert float(optim.linear_schedule(0.1, 0.3, 7)(0)) == 0.1
    cosine = optim.warmup_cosine_decay_schedule(0.1, 0.7, 3, 10, end_value=0.3)
    assert [float(cosine(t)) for t in (0, 3, 10, 11)] == [0.1, 0.7, 0.3, 0.3]


@pytest.mark.parametrize(
    "make",
    [
        lambda: optim.linear_schedule(1.0, 0.0, -1),
        lambda: optim.cosine_decay_schedule(1.0, 0),
        lambda: optim.warmup_cosine_decay_schedule(0.0, 1.0, -1, 10),
        lambda: optim.warmup_cosine_decay_schedule(0.0, 1.0, 10, 10),
        lambda: optim.warmup_constant_schedule(0.0, 1.0, -1),
        lambda: optim.join_schedules([], []),
        lambda: optim.join_schedules([optim.constant_schedule(1.0)] * 2, []),
        lambda: optim.join_schedules([optim.constant_schedule(1.0)] * 3, [5, 2]),
        lambda: optim.join_schedules([optim.constant_schedule(1.0)] * 2, [-1]),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(make):
    with pytest.raises(optim.OptimError, match="Fix: "):
        make()
