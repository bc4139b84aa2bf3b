"""The protocol: a gradient transformation is a pair of pure functions, and states are pytrees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fparallel.leaf_maps import map_leaves
from fparallel.optim.leaves import zeros_like
from fparallel.recorder import Stage
from fparallel.tree import dataclass

__all__ = [
    "EmptyState",
    "GradientTransformation",
    "ScalarOrSchedule",
    "Schedule",
    "Tree",
    "apply_updates",
    "identity",
    "set_to_zero",
    "stateless",
]

Tree = Any  # a pytree of tensors
Schedule = Callable[[Any], Tensor]  # step count (int or 0-d tensor) -> 0-d tensor
ScalarOrSchedule = float | Tensor | Schedule


class UpdateFn(Protocol):
    """``update(updates, state, params=None) -> (updates, state)``."""

    def __call__(self, updates: Tree, state: Tree, params: Tree | None = None, /) -> tuple[Tree, Tree]: ...


class GradientTransformation(NamedTuple):
    """A pair of pure functions that turns gradients into updates.

    Attributes:
        init: ``init(params) -> state``.
        update: ``update(updates, state, params=None) -> (updates, state)``. ``updates`` are the gradients, or
            what the transformation before this one made of them, and have the structure of ``params``.

    Nothing is changed in place. The update is added to the parameters by :func:`apply_updates`, so it points
    downhill: the minus sign is put in by ``scale_by_learning_rate``.

    >>> import torch
    >>> from fparallel.optim import apply_updates, sgd
    >>> tx = sgd(0.1)
    >>> params = {"w": torch.tensor([1.0, 2.0])}
    >>> state = tx.init(params)
    >>> updates, state = tx.update({"w": torch.tensor([10.0, -10.0])}, state, params)
    >>> apply_updates(params, updates)
    {'w': tensor([0., 3.])}
    """

    init: Callable[[Tree], Tree]
    update: UpdateFn


@dataclass
class EmptyState:
    """The state of a transformation that remembers nothing."""


def stateless(update: Callable[[Tree, Tree | None], Tree]) -> GradientTransformation:
    """The transformation ``updates -> update(updates, params)``, with an :class:`EmptyState`.

    >>> import torch
    >>> from fparallel import tree
    >>> tx = stateless(lambda updates, params: tree.map(torch.sign, updates))
    >>> tx.update([torch.tensor(-3.0)], tx.init([torch.tensor(0.0)]))[0]
    [tensor(-1.)]
    """

    def init_fn(params: Tree) -> EmptyState:
        return EmptyState()

    def update_fn(updates: Tree, state: Tree, params: Tree | None = None) -> tuple[Tree, Tree]:
        return update(updates, params), state

    return GradientTransformation(init_fn, update_fn)


def identity() -> GradientTransformation:
    """Leaves every update as it is.

    >>> import torch
    >>> tx = identity()
    >>> tx.update([torch.tensor(2.0)], tx.init([torch.tensor(0.0)]))[0]
    [tensor(2.)]
    """
    return stateless(lambda updates, params: updates)


def set_to_zero() -> GradientTransformation:
    """Makes every update zero, which freezes the parameters it is used on.

    Inside ``multi_transform`` this is how parameters are frozen. It keeps no state for them.

    >>> import torch
    >>> tx = set_to_zero()
    >>> tx.update([torch.tensor(2.0)], tx.init([torch.tensor(0.0)]))[0]
    [tensor(0.)]
    """
    return stateless(lambda updates, params: zeros_like(updates))


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """``params + updates``, leaf by leaf, each in the dtype of its parameter.

    Args:
        params: a pytree of tensors.
        updates: a pytree of the same structure, as returned by ``update``. Its leaves may have a wider dtype
            (float32 updates of bfloat16 parameters are added in float32 and rounded once).

    Returns:
        The new parameters; ``params`` is not modified. An integer parameter gets its update cast to its own
        dtype, so a zero update leaves it exactly as it was, whatever its size.

    >>> import torch
    >>> apply_updates({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([-0.5, 0.5])})
    {'w': tensor([0.5000, 2.5000])}
    """
    return map_leaves(_add, params, updates, stage=Stage("apply", ("p", "u"), ("p",)))


def _add(param: Tensor, update: Tensor) -> Tensor:
    if not (param.is_floating_point() or param.is_complex()):
        return param + update.to(param.dtype)  # through a float, integers above 2**24 would change
    return torch.add(param, update).to(param.dtype)
