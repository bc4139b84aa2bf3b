"""The rescaling of Adam: each entry by its own root mean square."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from fparallel.optim.base import GradientTransformation, Tree
from fparallel.optim.leaves import is_optimized, map_leaves_to, wide, zeros_like
from fparallel.optim.scaling import new_count
from fparallel.recorder import Stage
from fparallel.tree import dataclass

__all__ = ["ScaleByAdamState", "scale_by_adam"]


@dataclass
class ScaleByAdamState:
    """The state of :func:`scale_by_adam`.

    ``count`` is the number of updates made, a 0-d int64 tensor. ``mu`` and ``nu`` are the decaying means of
    the gradients and of their squares; they start with the structure, shapes and dtypes of the parameters.
    """

    count: Int[Tensor, ""]
    mu: Tree
    nu: Tree


def scale_by_adam(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, eps_root: float = 0.0
) -> GradientTransformation:
    r"""Rescales updates by Adam: the mean gradient over the root of its mean square, both bias-corrected.

    At step :math:`t = 1, 2, \ldots`, with :math:`m_0 = v_0 = 0`,

    .. math::
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g_t \\
        v_t &= \beta_2 v_{t-1} + (1 - \beta_2) g_t^2 \\
        u_t &= \frac{m_t / (1 - \beta_1^t)}{\sqrt{v_t / (1 - \beta_2^t) + \bar\varepsilon} + \varepsilon}

    Args:
        b1: the decay :math:`\beta_1` of the mean.
        b2: the decay :math:`\beta_2` of the mean square.
        eps: :math:`\varepsilon`, outside of the root, as in the paper, torch and optax.
        eps_root: :math:`\bar\varepsilon`, inside of the root; only needed to differentiate through the
            update.

    The defaults are those of the paper, of torch and of optax. The bias corrections are computed in float64
    (optax: float32). A moment keeps the dtype it has in the state; the update has the promoted dtype of
    gradient and moment.

    References:
        Kingma and Ba, Adam: A Method for Stochastic Optimization, `arXiv:1412.6980
        <https://arxiv.org/abs/1412.6980>`_, algorithm 1.

    The first update has size 1, whatever the size of the gradient (far above ``eps``):

    >>> import torch
    >>> tx = scale_by_adam()
    >>> state = tx.init({"w": torch.zeros(2)})
    >>> updates, state = tx.update({"w": torch.tensor([1e-3, -1e3])}, state)
    >>> updates["w"]
    tensor([ 1.0000, -1.0000])
    >>> int(state.count)
    1
    """

    def adam_leaf(g: Tensor, m: Tensor, v: Tensor, correct1: Tensor, correct2: Tensor) -> tuple[Tensor, ...]:
        if not is_optimized(g, m, v):
            return g, m, v
        x = wide(g)
        mu = b1 * wide(m) + (1 - b1) * x
        nu = b2 * wide(v) + (1 - b2) * (x * x)
        mean_square = nu / correct2 + eps_root if eps_root else nu / correct2
        update = (mu / correct1) / (torch.sqrt(mean_square) + eps)
        return update.to(torch.promote_types(g.dtype, m.dtype)), mu.to(m.dtype), nu.to(v.dtype)

    roles = ("u", "mu", "nu")
    stage = None if eps_root else Stage("adam", roles, roles, (("b1", b1), ("b2", b2), ("eps", eps)))

    def init_fn(params: Tree) -> ScaleByAdamState:
        return ScaleByAdamState(count=new_count(), mu=zeros_like(params), nu=zeros_like(params))

    def update_fn(updates: Tree, state: ScaleByAdamState, params: Tree | None = None) -> tuple[Tree, Tree]:
        count = state.count + 1
        t = count.to(torch.float64)
        corrections = (1 - b1**t, 1 - b2**t)
        updates, mu, nu = map_leaves_to(
            3, adam_leaf, updates, state.mu, state.nu, shared=corrections, stage=stage
        )
        return updates, ScaleByAdamState(count=count, mu=mu, nu=nu)

    return GradientTransformation(init_fn, update_fn)
