"""Momentum: a decaying sum of the updates."""

from __future__ import annotations

import torch
from torch import Tensor

from fparallel.optim.base import GradientTransformation, Tree
from fparallel.optim.leaves import is_optimized, map_leaves_to, wide, zeros_like
from fparallel.tree import dataclass

__all__ = ["TraceState", "trace"]


@dataclass
class TraceState:
    """``trace``: the decaying sum, like the parameters in structure, shapes and dtypes."""

    trace: Tree


def trace(decay: float, nesterov: bool = False) -> GradientTransformation:
    r"""Replaces the updates by their decaying sum.

    .. math::
        m_t = g_t + \text{decay} \cdot m_{t-1}, \qquad m_0 = 0

    and returns :math:`m_t`, or with ``nesterov`` the look-ahead :math:`g_t + \text{decay} \cdot m_t`. This is
    the momentum of ``torch.optim.SGD`` with ``dampening=0``, and optax's ``trace``. It is a sum, not a mean:
    at a constant gradient it grows to :math:`g / (1 - \text{decay})`.

    Args:
        decay: the share of the sum that is kept, in [0, 1).
        nesterov: whether to look one step ahead.

    References:
        Sutskever et al., On the importance of initialization and momentum in deep learning, 2013.

    >>> import torch
    >>> tx = trace(0.5)
    >>> state = tx.init([torch.tensor(0.0)])
    >>> for _ in range(3):
    ...     updates, state = tx.update([torch.tensor(1.0)], state)
    ...     print(updates)
    [tensor(1.)]
    [tensor(1.5000)]
    [tensor(1.7500)]
    """

    def trace_leaf(g: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        if not is_optimized(g, m):
            return g, m
        new = wide(g) + decay * wide(m)
        update = wide(g) + decay * new if nesterov else new
        return update.to(torch.promote_types(g.dtype, m.dtype)), new.to(m.dtype)

    def init_fn(params: Tree) -> TraceState:
        return TraceState(trace=zeros_like(params))

    def update_fn(updates: Tree, state: TraceState, params: Tree | None = None) -> tuple[Tree, Tree]:
        updates, new = map_leaves_to(2, trace_leaf, updates, state.trace)
        return updates, TraceState(trace=new)

    return GradientTransformation(init_fn, update_fn)
