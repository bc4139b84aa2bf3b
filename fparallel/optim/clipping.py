"""Clipping: of all entries by one common norm, or of every entry for itself."""

from __future__ import annotations

import torch
from torch import Tensor

from fparallel.leaf_maps import map_leaves, sum_squares
from fparallel.optim.base import GradientTransformation, Tree, stateless
from fparallel.optim.errors import OptimError
from fparallel.optim.leaves import is_optimized, scale_leaves

__all__ = ["clip", "clip_by_global_norm", "global_norm"]


def global_norm(updates: Tree) -> Tensor:
    r"""The Euclidean norm of all entries of all leaves, :math:`\sqrt{\sum_i u_i^2}`, as a 0-d tensor.

    It is the norm of the global arrays: under ``fp.jit`` an entry counts once, however many ranks hold it.

    >>> import torch
    >>> global_norm({"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])})
    tensor(5.)
    """
    return torch.sqrt(sum_squares(updates))


def clip_by_global_norm(max_norm: float) -> GradientTransformation:
    r"""Scales all updates by one coefficient so that their global norm is at most ``max_norm``.

    .. math::
        u \cdot \frac{c}{\max(\lVert u \rVert, c)}, \qquad c = \text{max\_norm}

    Below ``max_norm``, and for a norm of zero, the coefficient is exactly 1. The coefficient is that of
    optax; ``torch.nn.utils.clip_grad_norm_`` adds 1e-6 to the norm, so its result is shorter than
    ``max_norm`` by that. A norm of infinity gives, as in torch, the coefficient 0: finite entries become 0
    and infinite ones NaN; a NaN anywhere makes every entry NaN. Loss scaling skips such steps; without it
    they reach the parameters and show.

    Args:
        max_norm: the largest norm to let pass, positive.

    Raises:
        OptimError: if ``max_norm`` is not positive.

    References:
        Pascanu et al., On the difficulty of training Recurrent Neural Networks, `arXiv:1211.5063
        <https://arxiv.org/abs/1211.5063>`_, algorithm 1.

    >>> import torch
    >>> tx = clip_by_global_norm(1.0)
    >>> tx.update({"w": torch.tensor([[3.0, 0.0], [0.0, 4.0]])}, tx.init(None))[0]
    {'w': tensor([[0.6000, 0.0000],
            [0.0000, 0.8000]])}
    """
    _check_positive("max_norm", max_norm)

    def update(updates: Tree, params: Tree | None) -> Tree:
        norm = torch.clamp(global_norm(updates), min=max_norm)
        coefficient = torch.full_like(norm, max_norm) / norm  # number / tensor would multiply by a reciprocal
        return scale_leaves(updates, coefficient)

    return stateless(update)


def clip(max_delta: float) -> GradientTransformation:
    r"""Clips every entry to :math:`[-\text{max\_delta}, \text{max\_delta}]`. NaN stays NaN.

    Args:
        max_delta: the largest absolute value to let pass, positive.

    Raises:
        OptimError: if ``max_delta`` is not positive.

    >>> import torch
    >>> tx = clip(1.0)
    >>> tx.update([torch.tensor([0.5, -7.0])], tx.init(None))[0]
    [tensor([ 0.5000, -1.0000])]
    """
    _check_positive("max_delta", max_delta)

    def clip_leaf(u: Tensor) -> Tensor:
        return torch.clamp(u, -max_delta, max_delta) if is_optimized(u) else u

    return stateless(lambda updates, params: map_leaves(clip_leaf, updates))


def _check_positive(name: str, value: float) -> None:
    if not value > 0:
        raise OptimError(f"{name} must be positive, got {value}", fix=f"give {name} > 0, or do not clip")
