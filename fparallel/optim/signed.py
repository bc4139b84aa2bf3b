"""The rescaling of Lion: only the sign of an interpolated momentum."""

from __future__ import annotations

import torch
from torch import Tensor

from fparallel.optim.base import GradientTransformation, Tree
from fparallel.optim.leaves import is_optimized, map_leaves_to, wide, zeros_like
from fparallel.tree import dataclass

__all__ = ["ScaleByLionState", "scale_by_lion"]


@dataclass
class ScaleByLionState:
    """``mu``: the decaying mean of the gradients, like the parameters in structure, shapes and dtypes."""

    mu: Tree


def scale_by_lion(b1: float = 0.9, b2: float = 0.99) -> GradientTransformation:
    r"""Rescales updates by Lion: the sign of gradient and momentum, mixed.

    .. math::
        u_t &= \operatorname{sign}\left(\beta_1 m_{t-1} + (1 - \beta_1) g_t\right) \\
        m_t &= \beta_2 m_{t-1} + (1 - \beta_2) g_t, \qquad m_0 = 0

    Args:
        b1: the share :math:`\beta_1` of the momentum in the update.
        b2: the decay :math:`\beta_2` of the momentum.

    The defaults are those of the paper and of optax; torch has no Lion. Every entry of an update is -1, 0 or
    1, and the state is half of Adam's. Unlike optax's, it holds no step count: the formula does not use one.

    References:
        Chen et al., Symbolic Discovery of Optimization Algorithms, `arXiv:2302.06675
        <https://arxiv.org/abs/2302.06675>`_, algorithm 2.

    >>> import torch
    >>> tx = scale_by_lion()
    >>> state = tx.init([torch.zeros(3)])
    >>> updates, state = tx.update([torch.tensor([5.0, 0.0, -0.1])], state)
    >>> updates
    [tensor([ 1.,  0., -1.])]
    >>> state.mu
    [tensor([ 0.0500,  0.0000, -0.0010])]
    """

    def lion_leaf(g: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        if not is_optimized(g, m):
            return g, m
        x, mu = wide(g), wide(m)
        update = torch.sign(b1 * mu + (1 - b1) * x)
        return update.to(torch.promote_types(g.dtype, m.dtype)), (b2 * mu + (1 - b2) * x).to(m.dtype)

    def init_fn(params: Tree) -> ScaleByLionState:
        return ScaleByLionState(mu=zeros_like(params))

    def update_fn(updates: Tree, state: ScaleByLionState, params: Tree | None = None) -> tuple[Tree, Tree]:
        updates, mu = map_leaves_to(2, lion_leaf, updates, state.mu)
        return updates, ScaleByLionState(mu=mu)

    return GradientTransformation(init_fn, update_fn)
