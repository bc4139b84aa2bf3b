"""How the results of one micro-batch become those of the whole batch: sums, means and rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fparallel import tree
from fparallel.errors import TraceError
from fparallel.mean import Mean, MeanSum, Weighted

if TYPE_CHECKING:
    from fparallel.microbatches import Accumulated

SUM, ROWS = "sum", "rows"  # how a result of the body becomes one of the loop


class Whole:
    """A result that is added up as it is, whatever its shape: the loss, a gradient, a weight.

    Attributes:
      plain: whether it is a plain loss that has been divided by the number of micro-batches.
    """

    def __init__(self, tensor: Tensor, *, plain: bool = False) -> None:
        self.tensor, self.plain = tensor, plain


def parts_of(out: Any) -> tuple[list[Any], Any]:
    return tree.flatten(out, lambda x: isinstance(x, (Whole, Weighted)))


def tensors_of(out: Any) -> list[Tensor]:
    """The tensors of a result, in the order of `Result.flatten`."""
    found: list[Tensor] = []
    for leaf in parts_of(out)[0]:
        if isinstance(leaf, Whole):
            found.append(leaf.tensor)
        elif isinstance(leaf, Weighted):
            found += [torch.as_tensor(x) for _, mean in leaf.weighted() for x in (mean.sum, mean.weight)]
        elif isinstance(leaf, Tensor):
            found.append(leaf)
    return found


class Result:
    """How the results of one micro-batch become those of the whole batch."""

    def __init__(self, loop: Accumulated, fn: Callable) -> None:
        self.loop, self.fn = loop, fn
        self.kinds: list[str] = []
        self.means: list[str] = []
        self.leaves: list[Any] = []
        self.treedef: Any = None

    def flatten(self, out: Any) -> list[Tensor]:
        """The tensors to add up or to put in order, means already divided by their number."""
        self.leaves, self.treedef = parts_of(out)
        tensors = tensors_of(out)
        per_example = self._per_example(tensors)
        self.kinds, self.means, flat = [], [], iter(zip(tensors, per_example, strict=True))
        found: list[Tensor] = []
        for path, leaf in zip(tree.paths(self.treedef), self.leaves, strict=True):
            if isinstance(leaf, Weighted):
                for tensor, _ in itertools.islice(flat, 2 * len(leaf.weighted())):
                    found.append(tensor.to(torch.int64) if tensor.dtype == torch.bool else tensor)
                    self.kinds.append(SUM)
                    self.means.append("")
            elif isinstance(leaf, (Whole, Tensor)):
                tensor, rows = next(flat)
                self.kinds.append(ROWS if rows else SUM)
                self.means.append("" if rows else self._mean(path, leaf))
                found.append(tensor if rows or isinstance(leaf, Whole) else self._reduced(tensor))
        return found

    def _mean(self, path: str, leaf: Whole | Tensor) -> str:
        """The name of a result of which the mean over micro-batches is taken, or ""."""
        if self.loop.num == 1 or self.loop.reduction == "sum":
            return ""
        if isinstance(leaf, Whole) and not leaf.plain:
            return ""
        return path or "its result"

    def _reduced(self, tensor: Tensor) -> Tensor:
        loop = self.loop
        if loop.reduction == "sum":
            return tensor.to(torch.int64) if tensor.dtype == torch.bool else tensor
        if loop.num == 1:
            return tensor
        if not tensor.dtype.is_floating_point:
            raise TraceError(
                f"{loop.name} returns a {tensor.dtype} tensor of shape {list(tensor.shape)} for each micro-batch, "
                "which has no mean",
                fix='return fp.Mean(sum, count), or make it float, or use reduction="sum"',
            )
        return tensor / loop.num

    def _per_example(self, tensors: Sequence[Tensor]) -> list[bool]:
        """Which tensors have a row for each row of the micro-batch: those whose rows grow with it."""
        rows = self.loop.rows // self.loop.num
        single = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        if not any(x.dim() and x.shape[0] == rows for x in single):
            return [False] * len(tensors)
        try:
            shapes = self.loop.shapes(self.fn, 2 * rows)
        except Exception as error:
            raise TraceError(
                f"{self.loop.name} returns a tensor with {rows} rows, as many as a micro-batch has; whether they are "
                f"the rows of the batch cannot be told, because it does not run on {2 * rows} rows: {error}",
                fix="return fp.Mean or scalars, or let the function take a batch of any size",
            ) from error
        own = {id(x) for x in single}
        return [
            id(x) in own and bool(x.dim()) and x.shape[0] == rows and shape[:1] == (2 * rows,)
            for x, shape in zip(tensors, shapes, strict=True)
        ]

    def unflatten(self, outs: Sequence[Tensor]) -> Any:
        flat = iter(outs)
        leaves: list[Any] = []
        for leaf in self.leaves:
            if isinstance(leaf, Weighted):
                terms = tuple((c, Mean(next(flat), next(flat))) for c, _ in leaf.weighted())
                leaves.append(terms[0][1] if isinstance(leaf, Mean) else MeanSum(terms))
            elif isinstance(leaf, (Whole, Tensor)):
                leaves.append(next(flat))
            elif isinstance(leaf, (int, float)) and not isinstance(leaf, bool):
                leaves.append(leaf if self.loop.reduction == "mean" else leaf * self.loop.num)
            else:
                leaves.append(leaf)
        return tree.unflatten(self.treedef, leaves)
