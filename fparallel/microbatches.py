"""Micro-batches: a function over parts of the batch, one after the other, its results added up.

Un-jitted, `accumulate` is a Python loop. Under `fp.jit` its body is traced once and becomes one node of the
program (see `compiler/loops.py`), which the compiler unrolls.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fparallel import random, tree
from fparallel._compat import FakeTensorMode, functorch_active
from fparallel.errors import TraceError
from fparallel.mean import Mean, MeanSum, Weighted
from fparallel.microbatch_results import ROWS, Result, Whole, tensors_of
from fparallel.recorder import Loop, current_recorder, recording
from fparallel.transforms import Differentiates, differentiates, value_and_grad

REDUCTIONS = ("mean", "sum")


def accumulate(
    fn: Callable,
    *,
    num_microbatches: int,
    batch_argnums: int | Sequence[int] = (1,),
    reduction: str = "mean",
    group: int = 1,
) -> Callable:
    """`fn` over `num_microbatches` parts of the batch, with the result that it has for the whole batch.

    Micro-batch m is rows m, m + M, m + 2M, ... of the leading dim of every tensor in the batch arguments (with
    `group` g: groups of g neighbouring rows), so that a batch sharded over ranks is cut without communication. The
    other arguments pass whole, except that random keys (int64 of shape [2]) are folded with m, as is the key of an
    enclosing `fp.random.use`.

    Args:
      fn: what `fp.value_and_grad` or `fp.grad` returned, or a function without gradients. Its results become:
        the loss and the gradients, those of the whole batch: an `fp.Mean` is divided once by the weight of all
        micro-batches (0/0 is 0), a plain scalar goes by `reduction`;
        any other `fp.Mean`, the `fp.Mean` of all;
        a tensor with a row for each row of the batch, the rows in the order of the batch;
        any other float tensor, the mean or the sum over micro-batches; integers are only summed.
      num_microbatches: M. M times `group` divides the rows; times the ranks that shard them, too.
      batch_argnums: the positional arguments that are cut.
      reduction: "mean" weighs micro-batches equally, "sum" adds them up. Under `fp.jit` a plain result that is divided
        by what the batch holds (`(nll * mask).sum() / mask.sum()`) is a listed warning with "mean", an error if strict:
        it is not what the whole batch gives.
      group: neighbouring rows that stay together.

    Gradients of bfloat16 and float16 leaves are added in float32, in the order of the micro-batches, and rounded once.

    Raises:
      TraceError: the rows do not divide, or a result has no meaning over micro-batches.

    >>> loss = lambda w, x: Mean((w * x).sum(), (x > 0).sum())
    >>> x = torch.tensor([2.0, 40.0, 0.0, 50.0])
    >>> value, grad = accumulate(value_and_grad(loss), num_microbatches=2)(torch.tensor(1.0), x)
    >>> value, grad
    (tensor(30.6667), tensor(30.6667))
    """
    if reduction not in REDUCTIONS:
        raise TraceError(f"reduction={reduction!r}", fix='use "mean" or "sum"')
    for name, number in (("num_microbatches", num_microbatches), ("group", group)):
        if type(number) is not int or number < 1:
            raise TraceError(f"accumulate(..., {name}={number!r})", fix="use a whole number of at least 1")
    argnums = (batch_argnums,) if isinstance(batch_argnums, int) else tuple(batch_argnums)

    @functools.wraps(fn)
    def accumulated(*args: Any, **kwargs: Any) -> Any:
        return Accumulated(fn, args, kwargs, argnums, num_microbatches, group, reduction).run()

    return accumulated


def microbatch(x: Tensor, index: int, num: int, group: int) -> Tensor:
    """Part `index` of `num` of the rows of x: `[B, ...]` to `[B / num, ...]`."""
    rows, rest = x.shape[0], x.shape[1:]
    if group == 1:
        return x.view(rows // num, num, *rest).select(1, index)
    return x.view(rows // (num * group), num, group, *rest).select(1, index).flatten(0, 1)


def in_batch_order(parts: Sequence[Tensor], group: int) -> Tensor:
    """The inverse of `microbatch`: `[B / num, ...]` each to `[B, ...]`."""
    rows, rest = parts[0].shape[0], parts[0].shape[1:]
    cut = [part.reshape(rows // group, 1, group, *rest) for part in parts]
    return torch.cat(cut, 1).reshape(rows * len(parts), *rest)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a sum over micro-batches is kept."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _run(loop: Loop) -> list[Tensor]:
    """The loop in Python."""
    found: list[list[Tensor]] = []
    dtypes: list[torch.dtype] = []
    for m in range(loop.num):
        parts = [microbatch(x, m, loop.num, loop.group) for x in loop.batch]
        outs = loop.body(loop.whole, parts, [random.fold_in(key, m) for key in loop.keys])
        found = found or [[] for _ in outs]
        for seen, out, kind in zip(found, outs, loop.kinds(), strict=True):
            if kind == ROWS or not seen:
                seen.append(out if kind == ROWS else out.to(wide(out.dtype)))
            else:
                seen[0] = seen[0] + out
        dtypes = [out.dtype for out in outs]
    return [
        in_batch_order(seen, loop.group) if kind == ROWS else seen[0].to(dtype)
        for seen, kind, dtype in zip(found, loop.kinds(), dtypes, strict=True)
    ]


@tree.dataclass
class _Part:
    """What one micro-batch adds to the results of what is differentiated."""

    loss: Any
    aux: Any
    grads: Any


class Accumulated:
    """One call of an accumulated function."""

    def __init__(
        self,
        fn: Callable,
        args: tuple,
        kwargs: dict[str, Any],
        argnums: tuple[int, ...],
        num: int,
        group: int,
        reduction: str,
    ) -> None:
        self.name = getattr(fn, "__name__", "the function")
        self.fn, self.num, self.group, self.reduction = fn, num, group, reduction
        self.weights: list[Tensor] = []  # of all micro-batches, for each Mean in the loss
        for argnum in argnums:
            if not -len(args) <= argnum < len(args):
                raise TraceError(
                    f"accumulate cuts argument {argnum} of {self.name}, which was called with {len(args)}",
                    fix="pass the batch by position, and name its position in batch_argnums",
                )
        cut = {argnum % len(args) for argnum in argnums}
        paths, leaves, self.treedef = tree.flatten_with_path((args, kwargs))
        self.leaves = leaves
        self.kinds = [
            _kind(leaf, in_batch=path.startswith("0.") and int(path.split(".")[1]) in cut)
            for path, leaf in zip(paths, leaves, strict=True)
        ]
        self.rows = self._check_rows(paths)
        self.scope = random.loop_scope()  # the ambient key of micro-batch m is folded with m

    def _check_rows(self, paths: Sequence[str]) -> int:
        rows: dict[int, str] = {}
        for path, leaf, kind in zip(paths, self.leaves, self.kinds, strict=True):
            if kind == "batch":
                rows.setdefault(int(leaf.shape[0]), path.removeprefix("0."))
        if len(rows) > 1:
            (a, path_a), (b, path_b), *_ = rows.items()
            raise TraceError(
                f"the batch arguments of {self.name} differ in rows: {a} at argument {path_a}, {b} at {path_b}",
                fix="give every tensor of a batch argument one row per example, or pass it in another argument",
            )
        if not rows:
            raise TraceError(
                f"the batch arguments of {self.name} hold no tensor with rows to cut into micro-batches",
                fix="name the position of the batch in batch_argnums",
            )
        (number,) = rows
        unit = self.num * self.group
        if number % unit:
            below = number // unit * unit
            near = f"{below} or {below + unit}" if below else f"{unit}"
            groups = f" of whole groups of {self.group}" if self.group > 1 else ""
            raise TraceError(
                f"a batch of {number} rows does not make {self.num} equal micro-batches{groups}",
                fix=f"use a batch of {near} rows, or another num_microbatches",
            )
        return number

    def run(self) -> Any:
        spec = differentiates(self.fn)
        if spec is None:
            return self._loop(self.fn)
        made = self._loop(self._gradients(spec), self._weights(spec))
        value = (made.loss, made.aux) if spec.has_aux else made.loss
        if spec.with_value:
            return value, made.grads
        return (made.grads, made.aux) if spec.has_aux else made.grads

    # ------------------------------------------------------------ what is differentiated

    def _weights(self, spec: Differentiates) -> list[Tensor]:
        """The weight of all micro-batches, for each Mean in the loss."""
        weighted: list[bool] = []

        def weigh(*args: Any, **kwargs: Any) -> list[Whole]:
            with torch.no_grad():
                out = spec.loss(spec.fun(*args, **kwargs))
            weighted.append(isinstance(out, Weighted))
            if not isinstance(out, Weighted):
                return []
            weights = [torch.as_tensor(mean.weight).detach() for _, mean in out.weighted()]
            return [Whole(w.to(torch.int64) if w.dtype == torch.bool else w) for w in weights]

        self.shapes(weigh)
        return list(self._loop(weigh)) if weighted[-1] else []

    def _gradients(self, spec: Differentiates) -> Callable:
        """The function whose sum over micro-batches is loss, aux and gradients; it reads `self.weights`."""

        def part(*args: Any, **kwargs: Any) -> Any:
            def fun(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
                out = spec.fun(*args, **kwargs)
                loss, aux = spec.loss(out), out[1] if spec.has_aux else None
                if isinstance(loss, Weighted):
                    terms = zip(loss.weighted(), self.weights, strict=True)
                    return MeanSum(tuple((c, Mean(mean.sum, weight)) for (c, mean), weight in terms)), aux
                if isinstance(loss, Tensor) and self.reduction == "mean":
                    plain.append(True)
                    loss = loss / self.num
                return loss, aux

            plain: list[bool] = []
            (value, aux), grads = value_and_grad(fun, spec.argnums, has_aux=True)(*args, **kwargs)
            return _Part(Whole(value, plain=bool(plain)), aux, tree.map(Whole, grads))

        return part

    # ------------------------------------------------------------ the loop

    def _loop(self, fn: Callable, weights: Sequence[Tensor] = ()) -> Any:
        """The combined results of `fn` over all micro-batches; it finds `weights` in `self.weights`."""
        own = {
            kind: [x for x, k in zip(self.leaves, self.kinds, strict=True) if k == kind] for kind in _KINDS
        }
        keys = own["key"] + ([] if self.scope is None else [self.scope])
        whole = [*own["whole"], *weights]
        self.weights = list(weights)
        result = Result(self, fn)

        def body(whole: list[Tensor], parts: list[Tensor], keys: list[Tensor]) -> list[Tensor]:
            args, kwargs = self._arguments(whole, parts, keys)
            self.weights = whole[len(own["whole"]) :]
            with contextlib.nullcontext() if self.scope is None else random.use(keys[-1]):
                return result.flatten(fn(*args, **kwargs))

        loop = Loop(
            self.name,
            body,
            lambda: result.kinds,
            lambda: result.means,
            self.num,
            self.group,
            whole,
            own["batch"],
            keys,
        )
        recorder = current_recorder()
        tracked = torch.is_grad_enabled() and any(x.requires_grad for x in [*whole, *own["batch"]])
        if recorder is not None and not functorch_active() and not tracked:
            outs = recorder.accumulate(loop)
        else:
            outs = _run(loop)
        return result.unflatten(outs)

    def _arguments(self, whole: list[Tensor], parts: list[Tensor], keys: list[Tensor]) -> Any:
        streams = {"whole": iter(whole), "batch": iter(parts), "key": iter(keys)}
        leaves = [
            leaf if kind == "static" else next(streams[kind])
            for leaf, kind in zip(self.leaves, self.kinds, strict=True)
        ]
        return tree.unflatten(self.treedef, leaves)

    def shapes(self, fn: Callable, rows: int | None = None) -> list[tuple[int, ...]]:
        """The shapes of what `fn` returns for a micro-batch (of so many rows), with nothing computed."""
        rows = self.rows // self.num if rows is None else rows
        recorder = current_recorder()
        fake: Any = FakeTensorMode(allow_non_fake_inputs=True) if recorder is None else recorder.untraced()
        with recording(None), fake:
            fakes = [
                torch.empty(
                    (rows, *leaf.shape[1:]) if kind == "batch" else leaf.shape,
                    dtype=leaf.dtype,
                    device=leaf.device,
                )
                if isinstance(leaf, Tensor)
                else leaf
                for leaf, kind in zip(self.leaves, self.kinds, strict=True)
            ]
            args, kwargs = tree.unflatten(self.treedef, fakes)
            self.weights, weights = list(map(torch.empty_like, self.weights)), self.weights
            key = None if self.scope is None else torch.empty_like(self.scope)
            try:
                with contextlib.nullcontext() if key is None else random.use(key):
                    return [tuple(x.shape) for x in tensors_of(fn(*args, **kwargs))]
            finally:
                self.weights = weights


_KINDS = ("whole", "batch", "key", "static")


def _kind(leaf: Any, *, in_batch: bool) -> str:
    if not isinstance(leaf, Tensor):
        return "static"
    if in_batch:
        return "batch" if leaf.dim() else "whole"
    return "key" if leaf.dtype == torch.int64 and leaf.shape == (2,) else "whole"
