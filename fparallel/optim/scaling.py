"""Multiplying all updates by one number: a constant, a schedule, a learning rate."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from fparallel.optim.base import GradientTransformation, ScalarOrSchedule, Schedule, Tree, stateless
from fparallel.optim.leaves import scale_leaves
from fparallel.tree import dataclass

__all__ = ["ScaleByScheduleState", "new_count", "scale", "scale_by_learning_rate", "scale_by_schedule"]


def new_count() -> Int[Tensor, ""]:
    """A step count at its start: a 0-d int64 zero."""
    return torch.zeros((), dtype=torch.int64)


def scale(step_size: float | Tensor) -> GradientTransformation:
    """Multiplies every update by ``step_size``.

    Args:
        step_size: a number or a 0-d tensor. Negative to descend.

    >>> import torch
    >>> tx = scale(-0.5)
    >>> tx.update([torch.tensor([2.0, -4.0])], tx.init(None))[0]
    [tensor([-1.,  2.])]
    """
    return stateless(lambda updates, params: scale_leaves(updates, step_size))


@dataclass
class ScaleByScheduleState:
    """``count``: how many updates were made, a 0-d int64 tensor."""

    count: Int[Tensor, ""]


def scale_by_schedule(step_size_fn: Schedule) -> GradientTransformation:
    """Multiplies the updates of step ``t = 0, 1, ...`` by ``step_size_fn(t)``.

    Args:
        step_size_fn: a function from the 0-d int64 step count to a 0-d tensor, without Python branches on the
            count (see ``schedules``).

    The first update uses ``step_size_fn(0)``, as in optax and as with ``torch.optim.lr_scheduler.LambdaLR``.

    >>> import torch
    >>> from fparallel.optim import linear_schedule
    >>> tx = scale_by_schedule(linear_schedule(1.0, 0.0, 4))
    >>> state = tx.init(None)
    >>> for _ in range(3):
    ...     updates, state = tx.update([torch.tensor(8.0)], state)
    ...     print(updates)
    [tensor(8.)]
    [tensor(6.)]
    [tensor(4.)]
    """

    def init_fn(params: Tree) -> ScaleByScheduleState:
        return ScaleByScheduleState(count=new_count())

    def update_fn(
        updates: Tree, state: ScaleByScheduleState, params: Tree | None = None
    ) -> tuple[Tree, Tree]:
        step_size = step_size_fn(state.count)
        return scale_leaves(updates, step_size), ScaleByScheduleState(count=state.count + 1)

    return GradientTransformation(init_fn, update_fn)


def scale_by_learning_rate(
    learning_rate: ScalarOrSchedule, *, flip_sign: bool = True
) -> GradientTransformation:
    """Multiplies the updates by minus the learning rate, a number or a schedule.

    Args:
        learning_rate: a number, a 0-d tensor, or a schedule (a function of the step count, which starts at
            0).
        flip_sign: whether to multiply by ``-learning_rate`` (descend) or by ``+learning_rate``.

    >>> import torch
    >>> tx = scale_by_learning_rate(0.25)
    >>> tx.update([torch.tensor(4.0)], tx.init(None))[0]
    [tensor(-1.)]
    """
    sign = -1 if flip_sign else 1
    if callable(learning_rate):
        return scale_by_schedule(lambda count: sign * learning_rate(count))
    return scale(sign * learning_rate)
