r"""Schedules: pure functions from the step count to a number.

A schedule takes the count of updates made so far (0 at the first), an int or a 0-d tensor, and returns a 0-d
float64 tensor. Nothing branches on the count in Python, so a schedule can be traced; and a 0-d float64 tensor
does not promote the leaves it scales. Lengths are in updates, and a length of 0 is legal wherever it has a
meaning.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fparallel.optim.base import Schedule
from fparallel.optim.errors import OptimError

__all__ = [
    "constant_schedule",
    "cosine_decay_schedule",
    "join_schedules",
    "linear_schedule",
    "warmup_constant_schedule",
    "warmup_cosine_decay_schedule",
]

Count = int | Tensor


def constant_schedule(value: float) -> Schedule:
    """The same value at every step.

    >>> constant_schedule(3e-4)(7)
    tensor(0.0003, dtype=torch.float64)
    """
    return lambda count: torch.full((), value, dtype=torch.float64)


def linear_schedule(
    init_value: float, end_value: float, transition_steps: int, transition_begin: int = 0
) -> Schedule:
    r"""A straight line from one value to another, constant before and after.

    .. math::
        a\,(1 - f) + b\,f, \qquad f = \operatorname{clamp}\left(\frac{t - t_0}{T}, 0, 1\right)

    Args:
        init_value: :math:`a`, the value at step ``transition_begin`` and before.
        end_value: :math:`b`, the value at step ``transition_begin + transition_steps`` and after.
        transition_steps: :math:`T`. With 0 the value jumps to ``end_value`` at ``transition_begin`` (optax
            instead stays at ``init_value`` forever).
        transition_begin: :math:`t_0`.

    >>> schedule = linear_schedule(1.0, 0.0, transition_steps=4)
    >>> [float(schedule(t)) for t in range(6)]
    [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    _check_steps("transition_steps", transition_steps, least=0)

    def schedule(count: Count) -> Tensor:
        t = _as_scalar(count) - transition_begin
        if transition_steps == 0:
            fraction = (t >= 0).to(torch.float64)
        else:
            fraction = torch.clamp(t / transition_steps, 0.0, 1.0)
        return init_value * (1 - fraction) + end_value * fraction

    return schedule


def cosine_decay_schedule(
    init_value: float, decay_steps: int, alpha: float = 0.0, exponent: float = 1.0
) -> Schedule:
    r"""Half a cosine from ``init_value`` down to ``alpha * init_value``, constant after.

    .. math::
        a \left((1 - \alpha)\left(\tfrac12 (1 + \cos(\pi\, \min(t, T) / T))\right)^p + \alpha\right)

    Args:
        init_value: :math:`a`, the value at step 0.
        decay_steps: :math:`T`, at least 1.
        alpha: the last value, as a share of the first.
        exponent: :math:`p`, of the cosine.

    With ``alpha=0`` and ``exponent=1`` this is ``torch.optim.lr_scheduler.CosineAnnealingLR`` up to
    ``T_max``, after which torch's rises again and this one stays.

    References:
        Loshchilov and Hutter, SGDR: Stochastic Gradient Descent with Warm Restarts, `arXiv:1608.03983
        <https://arxiv.org/abs/1608.03983>`_, equation 5.

    >>> schedule = cosine_decay_schedule(1.0, decay_steps=4)
    >>> [round(float(schedule(t)), 4) for t in range(6)]
    [1.0, 0.8536, 0.5, 0.1464, 0.0, 0.0]
    """
    _check_steps("decay_steps", decay_steps, least=1)
    return _cosine(init_value, alpha * init_value, decay_steps, exponent)


def warmup_constant_schedule(init_value: float, peak_value: float, warmup_steps: int) -> Schedule:
    """A straight line from ``init_value`` to ``peak_value``, constant after.

    With ``warmup_steps=0`` the value is ``peak_value`` from step 0 on.

    >>> schedule = warmup_constant_schedule(0.0, 1.0, warmup_steps=2)
    >>> [float(schedule(t)) for t in range(4)]
    [0.0, 0.5, 1.0, 1.0]
    """
    return linear_schedule(init_value, peak_value, warmup_steps)


def warmup_cosine_decay_schedule(
    init_value: float,
    peak_value: float,
    warmup_steps: int,
    decay_steps: int,
    end_value: float = 0.0,
    exponent: float = 1.0,
) -> Schedule:
    r"""A straight line up to ``peak_value``, then half a cosine down to ``end_value``, constant after.

    Args:
        init_value: the value at step 0, where the warm-up starts. The update of step 0 uses it: with 0.0 the
            first update is zero.
        peak_value: the value at step ``warmup_steps``.
        warmup_steps: the length of the straight line; with 0 there is none, and step 0 has ``peak_value``.
        decay_steps: the length of the whole, warm-up included: ``end_value`` is reached at this step.
        end_value: the value from there on.
        exponent: of the cosine, as in :func:`cosine_decay_schedule`.

    >>> schedule = warmup_cosine_decay_schedule(0.0, 1.0, warmup_steps=2, decay_steps=6)
    >>> [round(float(schedule(t)), 4) for t in range(8)]
    [0.0, 0.5, 1.0, 0.8536, 0.5, 0.1464, 0.0, 0.0]
    """
    _check_steps("warmup_steps", warmup_steps, least=0)
    if decay_steps <= warmup_steps:
        raise OptimError(
            f"decay_steps counts the warm-up too: got {decay_steps} in all, {warmup_steps} of warm-up",
            fix=f"give decay_steps > {warmup_steps}, or use warmup_constant_schedule for no decay",
        )
    return join_schedules(
        [
            linear_schedule(init_value, peak_value, warmup_steps),
            _cosine(peak_value, end_value, decay_steps - warmup_steps, exponent),
        ],
        boundaries=[warmup_steps],
    )


def join_schedules(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """One schedule after another; each starts counting at 0 where it takes over.

    Args:
        schedules: at least one.
        boundaries: one fewer than schedules, ascending: the steps at which the next schedule takes over.
            Schedule ``i + 1`` is called with ``count - boundaries[i]``, and its value used where that is not
            negative.

    Raises:
        OptimError: if the numbers do not fit, or the boundaries are negative or not ascending.

    >>> schedule = join_schedules([constant_schedule(1.0), linear_schedule(0.5, 0.0, 2)], boundaries=[2])
    >>> [float(schedule(t)) for t in range(5)]
    [1.0, 1.0, 0.5, 0.25, 0.0]
    """
    if len(schedules) == 0 or len(boundaries) != len(schedules) - 1:
        raise OptimError(
            f"got {len(schedules)} schedules and {len(boundaries)} boundaries between them",
            fix="give one boundary fewer than schedules",
        )
    if any(b < a for a, b in zip([0, *boundaries], boundaries, strict=False)):
        raise OptimError(
            f"boundaries are ascending step counts, got {list(boundaries)}",
            fix="give the step, counted from 0, at which each next schedule takes over",
        )

    def schedule(count: Count) -> Tensor:
        t = _as_scalar(count)
        value = _as_scalar(schedules[0](count))
        for boundary, following in zip(boundaries, schedules[1:], strict=True):
            value = torch.where(t < boundary, value, _as_scalar(following(count - boundary)))
        return value

    return schedule


def _cosine(init_value: float, end_value: float, num_steps: int, exponent: float) -> Schedule:
    def schedule(count: Count) -> Tensor:
        fraction = torch.clamp(_as_scalar(count) / num_steps, 0.0, 1.0)
        remaining = (0.5 * (1 + torch.cos(math.pi * fraction))) ** exponent
        return init_value * remaining + end_value * (1 - remaining)

    return schedule


def _as_scalar(value: float | Tensor) -> Tensor:
    """A 0-d float64 tensor; a count is exact up to 2**53."""
    if isinstance(value, Tensor):
        return value.to(torch.float64)
    return torch.full((), value, dtype=torch.float64)


def _check_steps(name: str, value: int, *, least: int) -> None:
    if value < least:
        raise OptimError(f"{name} must be at least {least}, got {value}", fix=f"give {name} >= {least}")
