"""What users call inside a step: grad, value_and_grad, Mean, block, with_sharding_constraint, map_leaves.

Un-jitted, everything here is plain PyTorch on plain tensors. Under `fp.jit` a recorder is active (see
`compiler/trace.py`), and the same calls leave their structure in the traced program.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fparallel import tree
from fparallel._compat import functorch_active
from fparallel.errors import TraceError


@dataclass(frozen=True)
class Stage:
    """What a mapped function is, for the update to be run by one fused kernel: the function stays its meaning.

    Attributes:
      name: "scale", "adam", "decay" or "apply".
      ins, outs: the role of each tree that goes in and comes out: "u" (the update), "mu", "nu", "p" (the parameter).
      constants: its Python numbers.
    """

    name: str
    ins: tuple[str, ...]
    outs: tuple[str, ...]
    constants: tuple[tuple[str, float], ...] = ()


class Recorder(Protocol):
    """What a tracer offers to the functions of this module."""

    def enter_grad(self, leaves: list[Tensor]) -> list[Tensor]: ...
    def mark_grads(self, grads: list[Tensor], leaves: list[Tensor], paths: list[str]) -> list[Tensor]: ...
    def backward_phase(self) -> contextlib.AbstractContextManager[None]: ...
    def call_block(self, fn: Callable, name: str, args: tuple, kwargs: dict) -> Any: ...
    def map_leaves(
        self, fn: Callable, leaves: list[list[Tensor]], shared: list[Any], stage: Stage | None
    ) -> tuple[list[list[Tensor]], bool]: ...
    def constrain(self, x: Tensor, spec: Any) -> Tensor: ...


_recorder: contextvars.ContextVar[Recorder | None] = contextvars.ContextVar(
    "fparallel_recorder", default=None
)
_grad_depth: contextvars.ContextVar[int] = contextvars.ContextVar("fparallel_grad_depth", default=0)


def current_recorder() -> Recorder | None:
    return _recorder.get()


@contextlib.contextmanager
def recording(recorder: Recorder | None) -> Iterator[None]:
    """Makes `recorder` the current one; None suspends recording."""
    token = _recorder.set(recorder)
    depth = _grad_depth.set(0)
    try:
        yield
    finally:
        _grad_depth.reset(depth)
        _recorder.reset(token)


# ---------------------------------------------------------------- Mean


class _Weighted:
    """Arithmetic that Mean and sums of Means share."""

    def weighted(self) -> tuple[tuple[float, Mean], ...]:
        """The Means with their factors."""
        raise NotImplementedError

    def value(self) -> Tensor:
        """The 0-d value: every term divided once by its own weight, 0/0 being 0."""
        parts = [mean.ratio() if scale == 1 else mean.ratio() * scale for scale, mean in self.weighted()]
        return functools.reduce(torch.add, parts)

    def __add__(self, other: Any) -> MeanSum:
        if not isinstance(other, _Weighted):
            return NotImplemented
        return MeanSum(self.weighted() + other.weighted())

    def __radd__(self, other: Any) -> Any:
        return self if isinstance(other, (int, float)) and other == 0 else NotImplemented

    def __mul__(self, scale: float) -> MeanSum:
        if not isinstance(scale, (int, float)):
            return NotImplemented
        return MeanSum(tuple((s * scale, m) for s, m in self.weighted()))

    __rmul__ = __mul__

    def __float__(self) -> float:
        return float(self.value())

    def item(self) -> float:
        return float(self)


@tree.dataclass
class Mean(_Weighted):
    """A weighted mean over everything, whoever holds it: `sum / weight`, divided once by the global weight.

    Legal as a loss, as an aux value and as a metric. `sum` is differentiated, `weight` is not; where the weight is 0
    the value is 0 with zero gradient. `Mean + c * Mean` keeps each denominator.

    Attributes:
      sum: 0-d float tensor, the weighted sum over all examples or tokens.
      weight: 0-d tensor, the sum of the weights (e.g. the number of unmasked tokens).

    >>> float(Mean(torch.tensor(92.0, dtype=torch.float64), torch.tensor(10)))
    9.2
    """

    sum: Any
    weight: Any

    def weighted(self) -> tuple[tuple[float, Mean], ...]:
        return ((1.0, self),)

    def ratio(self) -> Tensor:
        total = torch.as_tensor(self.sum)
        weight = torch.as_tensor(self.weight).detach().to(total.dtype)
        empty = weight == 0
        return total / torch.where(empty, torch.ones_like(weight), weight) * (~empty).to(total.dtype)


@tree.dataclass
class MeanSum(_Weighted):
    """A weighted sum of Means, each with its own denominator. Made by adding and scaling Means."""

    terms: Any

    def weighted(self) -> tuple[tuple[float, Mean], ...]:
        return self.terms


# ---------------------------------------------------------------- gradients


def grad(fun: Callable, argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Callable:
    """The gradient function of a scalar function: `grad(f)(x)` has the structure of x.

    With `has_aux` the function returns (value, aux) and its gradient function (grads, aux), as in JAX.
    """
    inner = value_and_grad(fun, argnums, has_aux)

    @functools.wraps(fun)
    def grad_fun(*args: Any, **kwargs: Any) -> Any:
        value, grads = inner(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return grad_fun


def value_and_grad(fun: Callable, argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Callable:
    """A function that returns `(value, grads)`, or `((value, aux), grads)`: JAX's order.

    Args:
      fun: returns a 0-d float tensor or an `fp.Mean`; with `has_aux` a pair of that and anything.
      argnums: which positional argument(s) to differentiate: trees of float tensors.

    A leaf that the value does not depend on has a zero gradient. Nested use differentiates twice.

    Raises:
      TraceError: the value is no float scalar, or a differentiated leaf is not a float tensor.
    """

    @functools.wraps(fun)
    def value_and_grad_fun(*args: Any, **kwargs: Any) -> Any:
        nums = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        for num in nums:
            if not -len(args) <= num < len(args):
                raise TraceError(
                    f"argnums={argnums} for a call with {len(args)} positional arguments",
                    fix="differentiate positional arguments that are passed",
                )
        selected = tuple(args[num] for num in nums)
        paths, leaves, treedef = tree.flatten_with_path(selected if len(nums) > 1 else selected[0])
        for path, leaf in zip(paths, leaves, strict=True):
            if not isinstance(leaf, Tensor) or not leaf.dtype.is_floating_point:
                found = (
                    f"a {leaf.dtype} tensor"
                    if isinstance(leaf, Tensor)
                    else f"{type(leaf).__name__} {leaf!r}"
                )
                raise TraceError(
                    f"cannot differentiate with respect to the leaf {path or '(the argument)'}: it is {found}",
                    fix="differentiate float leaves only: pass the others in another argument, or as fp.static fields",
                )

        def evaluate(xs: list[Tensor]) -> tuple[Tensor, Any]:
            replaced = tree.unflatten(treedef, xs)
            full = list(args)
            for num, value in zip(nums, replaced if len(nums) > 1 else (replaced,), strict=True):
                full[num] = value
            return _scalar_loss(fun, fun(*full, **kwargs), has_aux)

        value, aux, grads = _differentiate(evaluate, leaves, paths)
        grads = tree.unflatten(treedef, grads)
        return ((value, aux) if has_aux else value), grads

    return value_and_grad_fun


def _scalar_loss(fun: Callable, out: Any, has_aux: bool) -> tuple[Tensor, Any]:
    name = getattr(fun, "__name__", "the function")
    aux = None
    if has_aux:
        if not isinstance(out, tuple) or len(out) != 2:
            raise TraceError(
                f"{name} returned {type(out).__name__}, expected (value, aux)",
                fix="return a pair, or drop has_aux",
            )
        out, aux = out
    value = out.value() if isinstance(out, _Weighted) else out
    if not isinstance(value, Tensor) or value.dim() != 0 or not value.dtype.is_floating_point:
        found = (
            f"{value.dtype} of shape {tuple(value.shape)}"
            if isinstance(value, Tensor)
            else type(value).__name__
        )
        raise TraceError(
            f"{name} returned {found}, expected a 0-d float tensor or fp.Mean as the value to differentiate",
            fix="return a scalar such as loss.mean(), or fp.Mean(sum, weight)"
            + ("" if has_aux else "; use has_aux=True for more"),
        )
    return value, aux


def _differentiate(
    evaluate: Callable[[list[Tensor]], tuple[Tensor, Any]], leaves: list[Tensor], paths: list[str]
) -> tuple[Tensor, Any, list[Tensor]]:
    if functorch_active():
        grads, (value, aux) = torch.func.grad(lambda xs: _with_value(evaluate(xs)), has_aux=True)(leaves)
        return value, aux, grads
    depth = _grad_depth.get()
    nested = depth > 0 or (torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves))
    recorder = current_recorder()
    token = _grad_depth.set(depth + 1)
    try:
        with torch.enable_grad():
            if nested:
                xs = [
                    leaf.view_as(leaf) if leaf.requires_grad else leaf.detach().requires_grad_()
                    for leaf in leaves
                ]
            elif recorder is not None:
                xs = [x.requires_grad_() for x in recorder.enter_grad(leaves)]
            else:
                xs = [leaf.detach().requires_grad_() for leaf in leaves]
            value, aux = evaluate(xs)
            with recorder.backward_phase() if recorder is not None else contextlib.nullcontext():
                found: Sequence[Tensor | None] = [None] * len(xs)
                if value.requires_grad and xs:
                    found = torch.autograd.grad(value, xs, allow_unused=True, create_graph=nested)
                grads = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]
    finally:
        _grad_depth.reset(token)
    if nested:
        return value, aux, grads
    value, aux, grads = value.detach(), _detach(aux), [g.detach() if g.requires_grad else g for g in grads]
    if recorder is not None and grads:
        grads = recorder.mark_grads(grads, leaves, paths)
    return value, aux, grads


def _with_value(result: tuple[Tensor, Any]) -> tuple[Tensor, tuple[Tensor, Any]]:
    value, aux = result
    return value, (value, aux)


def _detach(aux: Any) -> Any:
    return tree.map(lambda x: x.detach() if isinstance(x, Tensor) else x, aux)


# ---------------------------------------------------------------- blocks


def block(fn: Callable | None = None, *, name: str | None = None) -> Callable:
    """Declares a repeated unit of a model, e.g. one transformer layer.

    Under `fp.jit` a block is traced, sharded and compiled once per distinct signature and then called, so compile
    time does not grow with depth; it is also the unit in which ZeRO-3 gathers parameters. Un-jitted it is `fn`.

    Args:
      fn: a pure function of trees of tensors and hashable values.
      name: how the schedule names it; by default the function's name.
    """
    if fn is None:
        return functools.partial(block, name=name)
    label = name or str(getattr(fn, "__name__", "block"))

    @functools.wraps(fn)
    def block_fn(*args: Any, **kwargs: Any) -> Any:
        from fparallel import random

        recorder = current_recorder()
        if recorder is not None and not functorch_active() and _grad_depth.get() <= 1:
            return recorder.call_block(fn, label, args, kwargs)
        key = random.block_scope()
        if key is None:
            return fn(*args, **kwargs)
        with random.use(key):
            return fn(*args, **kwargs)

    return block_fn


# ---------------------------------------------------------------- sharding constraints


class _Constrain(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, spec: Any, recorder: Recorder) -> Tensor:
        return recorder.constrain(x, spec)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, ctx.spec, ctx.recorder = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Constrain.apply(grad, ctx.spec, ctx.recorder), None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple, x: Tensor, spec: Any, recorder: Recorder
    ) -> tuple[Tensor, int | None]:
        return x, in_dims[0]  # the constraint speaks of the unbatched value


def with_sharding_constraint(x: Any, spec: Any) -> Any:
    """Says how `x` (a tensor, or every leaf of a tree) is sharded here; reshards if needed. The identity in value.

    Args:
      spec: a `P` of mesh axes, or a string of logical names such as "batch seq embed", which the rules map to mesh
        axes. Dims that are omitted, None, or named by no rule are replicated. The gradient gets the same constraint.
    """
    recorder = current_recorder()
    if recorder is None:
        return x
    return tree.map(
        lambda leaf: _Constrain.apply(leaf, spec, recorder) if isinstance(leaf, Tensor) else leaf, x
    )


# ---------------------------------------------------------------- over all leaves


def map_leaves(fn: Callable, *trees: Any, shared: Sequence[Any] = (), stage: Stage | None = None) -> Any:
    """Maps a per-leaf function over trees: `fn(leaf, leaf2, ..., *shared)`.

    Like `fp.tree.map`, but under `fp.jit` the function is traced once per distinct leaf signature, not once per leaf,
    and runs fused over all leaves. All trees have the structure of the first.

    Args:
      fn: pure; returns a tensor or a tuple of tensors. Elementwise functions run fused.
      shared: 0-d tensors or Python numbers that every leaf uses.
      stage: what the function is, if a fused kernel may run it.

    Returns:
      A tree, or a tuple of trees if fn returns a tuple.
    """
    leaves, treedef = tree.flatten(trees[0])
    columns = [leaves]
    for other in trees[1:]:
        rest, rest_def = tree.flatten(other)
        if rest_def != treedef:
            raise TraceError(
                "map_leaves got trees of different structures", fix="pass trees of one structure"
            )
        columns.append(rest)
    recorder = current_recorder()
    tensors = [x for column in columns for x in column]
    if (
        recorder is not None
        and leaves
        and all(isinstance(x, Tensor) for x in tensors)
        and not functorch_active()
        and not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))
    ):
        rows, is_tuple = recorder.map_leaves(fn, columns, list(shared), stage)
    else:
        outs = [fn(*row, *shared) for row in zip(*columns, strict=True)]
        is_tuple = bool(outs) and isinstance(outs[0], tuple)
        rows = [list(out) if is_tuple else [out] for out in outs]
    if not rows:
        return trees[0]
    results = tuple(tree.unflatten(treedef, [row[i] for row in rows]) for i in range(len(rows[0])))
    return results if is_tuple else results[0]


def sum_squares(values: Any) -> Tensor:
    """The sum of the squares of all elements of all float leaves, as a 0-d tensor (0 for an empty tree).

    A replicated or shared leaf counts once, whatever the mesh. The sum is taken in the widest dtype of the leaves, at
    least float32.
    """
    leaves = [x for x in tree.leaves(values) if isinstance(x, Tensor) and x.dtype.is_floating_point]
    if not leaves:
        return torch.zeros(())
    if functorch_active() or (torch.is_grad_enabled() and any(x.requires_grad for x in leaves)):
        dtype = sum_squares_dtype(leaves)
        return torch.stack([x.to(dtype).square().sum() for x in leaves]).sum()
    return torch.ops.fparallel.sum_squares(leaves)


def sum_squares_dtype(leaves: Sequence[Tensor]) -> torch.dtype:
    return functools.reduce(torch.promote_types, (x.dtype for x in leaves), torch.float32)


_library = torch.library.Library("fparallel", "FRAGMENT")
_library.define("sum_squares(Tensor[] xs) -> Tensor")


def _sum_squares(xs: list[Tensor]) -> Tensor:
    dtype = sum_squares_dtype(xs)
    total = torch.zeros((), dtype=dtype, device=xs[0].device)
    for x in xs:
        flat = x.reshape(-1).to(dtype)
        total = total + torch.dot(flat, flat)
    return total


def _sum_squares_fake(xs: list[Tensor]) -> Tensor:
    return xs[0].new_empty((), dtype=sum_squares_dtype(xs))


_library.impl("sum_squares", _sum_squares, "CompositeExplicitAutograd")
torch.library.register_fake("fparallel::sum_squares", _sum_squares_fake, lib=_library)
