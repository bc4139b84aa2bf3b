"""A transformation on some of the leaves."""

from __future__ import annotations

from collections.abc import Callable

from fparallel.optim.base import GradientTransformation, Tree
from fparallel.optim.errors import OptimError
from fparallel.optim.labels import labels_per_leaf, replace, select
from fparallel.tree import dataclass

__all__ = ["MaskedState", "masked"]


@dataclass
class MaskedState:
    """``inner_state``: the state of the inner transformation, a ``MaskedNode`` for each leaf left out."""

    inner_state: Tree


def masked(inner: GradientTransformation, mask: Tree | Callable[[Tree], Tree]) -> GradientTransformation:
    """Applies ``inner`` to the leaves where ``mask`` is true and passes the other updates on unchanged.

    For ``inner`` the leaves left out do not exist, so it holds no state for them. Unchanged does not mean
    zero: a gradient that is passed on unchanged is added to its parameter unless something later in the chain
    scales it. To freeze parameters use ``masked(set_to_zero(), frozen)``, or ``multi_transform``.

    Args:
        inner: the transformation to apply.
        mask: a tree of bools with the structure of the parameters or of a part from the root (a prefix), or a
            function to one: from the parameters if ``update`` is given them, else from the updates.

    Raises:
        OptimError: if ``mask`` does not fit the parameters, or holds anything but bools.

    >>> import torch
    >>> from fparallel.optim import scale
    >>> tx = masked(scale(-1.0), {"encoder": False, "head": True})
    >>> grads = {"encoder": [torch.tensor(1.0), torch.tensor(2.0)], "head": torch.tensor(3.0)}
    >>> tx.update(grads, tx.init(grads))[0]
    {'encoder': [tensor(1.), tensor(2.)], 'head': tensor(-3.)}
    """

    def kept(target: Tree) -> list[bool]:
        paths, mask_leaves = labels_per_leaf(mask, target, name="the mask")
        for path, leaf in zip(paths, mask_leaves, strict=True):
            if not isinstance(leaf, bool):
                raise OptimError(
                    f"a mask is known before anything runs: expected True or False, got {leaf!r}",
                    fix="use Python bools; to choose by data, write a transformation with torch.where",
                    where=path,
                )
        return mask_leaves

    def init_fn(params: Tree) -> MaskedState:
        return MaskedState(inner_state=inner.init(select(params, kept(params))))

    def update_fn(updates: Tree, state: MaskedState, params: Tree | None = None) -> tuple[Tree, Tree]:
        keep = kept(updates if params is None else params)
        selected_params = None if params is None else select(params, keep)
        selected, inner_state = inner.update(select(updates, keep), state.inner_state, selected_params)
        return replace(updates, keep, selected), MaskedState(inner_state=inner_state)

    return GradientTransformation(init_fn, update_fn)
