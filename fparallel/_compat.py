"""Everything that fparallel takes from the private parts of torch, in one place.

torch 2.11 to 2.15 must work; what differs between them is decided here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.utils._pytree as _torch_pytree

__all__ = ["register_torch_pytree"]


def register_torch_pytree(
    cls: type,
    flatten: Callable[[Any], tuple[Sequence[Any], Any, Sequence[str]]],
    unflatten: Callable[[Any, Iterable[Any]], Any],
) -> None:
    """Make ``cls`` a node for torch's own pytrees, so that ``torch.func`` and ``make_fx`` see into it.

    Args:
        cls: the class to register.
        flatten: instance to ``(children, context, names of the children)``; the context must be comparable.
        unflatten: ``(context, children)`` to an instance (optree's argument order, not torch's).
    """

    def children_and_context(instance: Any) -> tuple[list[Any], Any]:
        children, context, _ = flatten(instance)
        return list(children), context

    def children_with_keys(instance: Any) -> tuple[list[tuple[Any, Any]], Any]:
        children, context, names = flatten(instance)
        keys = map(_torch_pytree.GetAttrKey, names)
        return list(zip(keys, children, strict=True)), context

    _torch_pytree.register_pytree_node(
        cls,
        children_and_context,
        lambda children, context: unflatten(context, children),
        flatten_with_keys_fn=children_with_keys,
    )
