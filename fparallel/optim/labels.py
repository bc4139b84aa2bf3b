"""Labelling the leaves of a tree, taking those with a label out, and putting them back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from fparallel import tree
from fparallel.errors import TreeError
from fparallel.optim.errors import OptimError

__all__ = ["MaskedNode", "labels_per_leaf", "replace", "select"]


class MaskedNode(NamedTuple):
    """Stands where a leaf was left out: a node without leaves, so the other leaves keep their paths."""


def labels_per_leaf(labels: Any, target: Any, *, name: str) -> tuple[list[str], list[Any]]:
    """The dotted path and the label of every leaf of ``target``.

    Args:
        labels: a tree that is ``target`` cut short: it has the same nodes from the root down, and each of its
            leaves labels everything under the node or leaf of ``target`` in its place. Or a function from
            ``target`` to one. Labels are Python values: they are read while tracing, not at run time.
        target: the parameters, or updates of their structure.
        name: what to call ``labels`` in an error.

    Raises:
        OptimError: if ``labels`` does not fit ``target``.
    """
    leaves = tree.leaves(labels)
    if (
        callable(labels) and leaves and leaves[0] is labels
    ):  # a function; a registered class may be callable too
        labels = labels(target)
    paths = tree.paths(tree.structure(target))
    try:
        return paths, tree.match_prefix(labels, target)
    except TreeError as error:
        raise OptimError(
            f"{name} does not have the structure of the parameters: {error.message}",
            fix=f"give {name} the nodes of the parameters from the root down (it may stop early), or a "
            "function: lambda params: fp.tree.map_with_path(lambda path, leaf: ..., params)",
            where=error.where,
        ) from None


def select(target: Any, keep: Sequence[bool]) -> Any:
    """``target`` with a :class:`MaskedNode` in place of the leaves not to keep."""
    leaves, treedef = tree.flatten(target)
    if len(leaves) != len(keep):
        raise OptimError(
            f"the updates have {len(leaves)} leaves where the parameters have {len(keep)}",
            fix="give updates, state and params the same structure",
        )
    selected = [leaf if kept else MaskedNode() for leaf, kept in zip(leaves, keep, strict=True)]
    return tree.unflatten(treedef, selected)


def replace(target: Any, keep: Sequence[bool], selected: Any) -> Any:
    """The inverse of :func:`select`: ``target`` with the kept leaves taken from ``selected``."""
    leaves, treedef = tree.flatten(target)
    new = iter(tree.leaves(selected))
    merged = [next(new) if kept else leaf for leaf, kept in zip(leaves, keep, strict=True)]
    return tree.unflatten(treedef, merged)
