"""What the per-leaf bodies of the optimizers share: which leaves they touch, and in which precision.

A body gets the corresponding leaves of several trees, and 0-d scalars that were computed once for all leaves.
Three rules keep dtypes as they are:

* arithmetic on float16 and bfloat16 leaves is done in float32 and rounded once, at the end (:func:`wide`),
  which is what fused optimizer kernels do, and which keeps an ``eps`` of 1e-8 from becoming zero in float16;
* what a body returns is cast explicitly: a moment keeps its dtype, and an update gets
  :func:`torch.promote_types` of the leaves it was made from. Without the cast a 0-d float64 scalar, such as a
  bias correction, would promote the leaves that are themselves 0-d;
* leaves that are not floating point (:func:`is_optimized`) pass through unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fparallel import tree
from fparallel.leaf_maps import map_leaves
from fparallel.optim.errors import OptimError
from fparallel.recorder import Stage

__all__ = ["is_optimized", "map_leaves_to", "scale_leaves", "scaled", "wide", "zeros_like"]


def is_optimized(*leaves: Tensor) -> bool:
    """Whether these corresponding leaves are real floating point, and not integers that only ride along.

    Raises:
        OptimError: for a complex leaf: squares and signs of the formulas are those of real numbers.
    """
    for leaf in leaves:
        if leaf.is_complex():
            raise OptimError(
                f"optimizers are defined for real leaves, got {leaf.dtype} of shape {tuple(leaf.shape)}",
                fix="keep torch.view_as_real(parameter) and call torch.view_as_complex in the model",
            )
    return all(leaf.is_floating_point() for leaf in leaves)


def wide(leaf: Tensor) -> Tensor:
    """A floating-point leaf in the dtype to compute in: float32, or its own if that is wider."""
    return leaf.float() if leaf.dtype.itemsize < 4 else leaf


def scaled(leaf: Tensor, factor: float | Tensor) -> Tensor:
    """``leaf * factor`` in the dtype of ``leaf``, rounded once."""
    if not is_optimized(leaf):
        return leaf
    return (wide(leaf) * factor).to(leaf.dtype)


def zeros_like(params: Any) -> Any:
    """A tree of zeros with the structure, shapes and dtypes of ``params``."""
    return map_leaves(_zeros_like, params)


def _zeros_like(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf)


def scale_leaves(updates: Any, factor: float | Tensor) -> Any:
    """Every leaf times a number or a 0-d tensor, each in its own dtype."""
    constants = () if isinstance(factor, Tensor) else (("factor", float(factor)),)
    return map_leaves(scaled, updates, shared=(factor,), stage=Stage("scale", ("u",), ("u",), constants))


def map_leaves_to(
    num_outputs: int, fn: Callable, *trees: Any, shared: Sequence[Any] = (), stage: Stage | None = None
) -> tuple[Any, ...]:
    """``map_leaves`` for a ``fn`` that returns ``num_outputs`` tensors: that many trees, even without a leaf.

    On a tree without leaves ``fn`` never runs, so nothing else says how many trees to return.
    """
    if not tree.leaves(trees[0]):
        return (trees[0],) * num_outputs
    return map_leaves(fn, *trees, shared=shared, stage=stage)
