"""Decoupled weight decay."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fparallel.leaf_maps import map_leaves
from fparallel.optim.base import GradientTransformation, Tree, stateless
from fparallel.optim.errors import OptimError
from fparallel.optim.leaves import is_optimized, wide
from fparallel.optim.masking import masked
from fparallel.recorder import Stage

__all__ = ["add_decayed_weights"]


def add_decayed_weights(
    weight_decay: float | Tensor = 0.0, mask: Tree | Callable[[Tree], Tree] | None = None
) -> GradientTransformation:
    r"""Adds a multiple of the parameters to the updates: :math:`u + \lambda\,\theta`.

    After ``scale_by_adam`` and before ``scale_by_learning_rate`` this is the decoupled weight decay of AdamW;
    before ``trace`` or ``scale_by_adam`` it is the L2 penalty of ``torch.optim.SGD`` and
    ``torch.optim.Adam``.

    Args:
        weight_decay: :math:`\lambda`, a number or a 0-d tensor.
        mask: a tree of bools with the structure of the parameters or of a part from the root (a prefix), or a
            function from the parameters to one: which leaves are decayed. ``None``: all.

    Raises:
        OptimError: in ``update``, if it is called without the parameters.

    References:
        Loshchilov and Hutter, Decoupled Weight Decay Regularization, `arXiv:1711.05101
        <https://arxiv.org/abs/1711.05101>`_.

    >>> import torch
    >>> params = {"bias": torch.tensor([10.0]), "kernel": torch.tensor([[10.0]])}
    >>> grads = {"bias": torch.tensor([1.0]), "kernel": torch.tensor([[1.0]])}
    >>> tx = add_decayed_weights(0.1, mask={"bias": False, "kernel": True})
    >>> tx.update(grads, tx.init(params), params)[0]
    {'bias': tensor([1.]), 'kernel': tensor([[2.]])}
    """

    stage = None
    if not isinstance(weight_decay, Tensor):
        stage = Stage("decay", ("u", "p"), ("u",), (("weight_decay", float(weight_decay)),))

    def update(updates: Tree, params: Tree | None) -> Tree:
        if params is None:
            raise OptimError(
                "weight decay needs the parameters, and update was called without them",
                fix="call tx.update(grads, state, params)",
            )
        return map_leaves(_add_decayed, updates, params, shared=(weight_decay,), stage=stage)

    tx = stateless(update)
    return tx if mask is None else masked(tx, mask)


def _add_decayed(update: Tensor, param: Tensor, weight_decay: float | Tensor) -> Tensor:
    if not is_optimized(update, param):
        return update
    decayed = wide(update) + weight_decay * wide(param)
    return decayed.to(torch.promote_types(update.dtype, param.dtype))
