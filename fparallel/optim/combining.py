"""One transformation after another."""

from __future__ import annotations

from fparallel.optim.base import GradientTransformation, Tree
from fparallel.optim.errors import OptimError

__all__ = ["chain"]


def chain(*transformations: GradientTransformation) -> GradientTransformation:
    """Applies transformations in order: the updates of one are the input of the next.

    Args:
        transformations: any number of them. Their states are a tuple in the same order.

    Raises:
        OptimError: in ``update``, if the state holds another number of states.

    >>> import torch
    >>> from fparallel.optim import clip, scale
    >>> tx = chain(clip(1.0), scale(-0.5))
    >>> tx.update([torch.tensor([0.5, 7.0])], tx.init([torch.zeros(2)]))[0]
    [tensor([-0.2500, -0.5000])]
    """

    def init_fn(params: Tree) -> tuple[Tree, ...]:
        return tuple(tx.init(params) for tx in transformations)

    def update_fn(
        updates: Tree, state: tuple[Tree, ...], params: Tree | None = None
    ) -> tuple[Tree, tuple[Tree, ...]]:
        if not isinstance(state, tuple) or len(state) != len(transformations):
            found = f"{len(state)} of them" if isinstance(state, tuple) else f"a {type(state).__name__}"
            raise OptimError(
                f"a chain of {len(transformations)} has a tuple of as many states, got {found}",
                fix="pass the state that this chain's init or update returned",
            )
        new_states = []
        for tx, tx_state in zip(transformations, state, strict=True):
            updates, new_state = tx.update(updates, tx_state, params)
            new_states.append(new_state)
        return updates, tuple(new_states)

    return GradientTransformation(init_fn, update_fn)
