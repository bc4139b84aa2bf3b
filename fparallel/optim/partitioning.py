"""Different transformations for different leaves."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

from fparallel.errors import FparallelWarning, did_you_mean
from fparallel.optim.base import GradientTransformation, Tree
from fparallel.optim.errors import OptimError
from fparallel.optim.labels import labels_per_leaf, replace, select
from fparallel.tree import dataclass

__all__ = ["MultiTransformState", "multi_transform"]


@dataclass
class MultiTransformState:
    """``inner_states``: the state per label, each with a ``MaskedNode`` for the leaves of others."""

    inner_states: dict[str, Tree]


def multi_transform(
    transforms: Mapping[str, GradientTransformation], param_labels: Tree | Callable[[Tree], Tree]
) -> GradientTransformation:
    """Partitions the leaves by label and applies to each part the transformation of its label.

    What is global in a transformation, such as the norm of ``clip_by_global_norm``, is over its own part
    only: chain the clipping before this transformation to clip by the norm of everything.

    Args:
        transforms: the transformation per label.
        param_labels: a tree of labels with the structure of the parameters or of a part from the root (a
            prefix), or a function to one: from the parameters if ``update`` is given them, else from the
            updates.

    Raises:
        OptimError: if a label has no transformation, or ``param_labels`` does not fit the parameters.

    Warns:
        FparallelWarning: in ``init``, for a transformation whose label no leaf has.

    Freezing by path:

    >>> import torch
    >>> from fparallel import tree
    >>> from fparallel.optim import set_to_zero, sgd
    >>> def labels(params):
    ...     def label(path, leaf):
    ...         return "frozen" if path.startswith("encoder") else "train"
    ...     return tree.map_with_path(label, params)
    >>> tx = multi_transform({"train": sgd(0.5), "frozen": set_to_zero()}, labels)
    >>> grads = {"encoder": {"w": torch.tensor(1.0)}, "head": torch.tensor(3.0)}
    >>> tx.update(grads, tx.init(grads))[0]
    {'encoder': {'w': tensor(0.)}, 'head': tensor(-1.5000)}
    """

    def labels_of(target: Tree) -> list[str]:
        paths, labels = labels_per_leaf(param_labels, target, name="param_labels")
        for path, label in zip(paths, labels, strict=True):
            if not isinstance(label, str) or label not in transforms:
                raise OptimError(
                    f"the label {label!r} has no transformation ({did_you_mean(str(label), transforms)})",
                    fix=f"add a transformation {label!r} to transforms, or change the label of this leaf",
                    where=path,
                )
        return labels

    def init_fn(params: Tree) -> MultiTransformState:
        labels = labels_of(params)
        for unused in sorted(set(transforms) - set(labels)):
            warnings.warn(
                f"no leaf has the label {unused!r}, so its transformation does nothing.\n"
                f"Fix: remove it from transforms, or label the leaves that it is for",
                FparallelWarning,
                stacklevel=2,
            )
        return MultiTransformState(
            inner_states={
                name: tx.init(select(params, [label == name for label in labels]))
                for name, tx in sorted(transforms.items())
            }
        )

    def update_fn(updates: Tree, state: MultiTransformState, params: Tree | None = None) -> tuple[Tree, Tree]:
        labels = labels_of(updates if params is None else params)
        inner_states, transformed = {}, updates
        for name, tx in sorted(transforms.items()):
            keep = [label == name for label in labels]
            selected_params = None if params is None else select(params, keep)
            selected, inner_states[name] = tx.update(
                select(updates, keep), state.inner_states[name], selected_params
            )
            transformed = replace(transformed, keep, selected)
        return transformed, MultiTransformState(inner_states=inner_states)

    return GradientTransformation(init_fn, update_fn)
