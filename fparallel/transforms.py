"""What users call inside a step: grad, value_and_grad, block, with_sharding_constraint.

Un-jitted, everything here is plain PyTorch on plain tensors. Under `fp.jit` a recorder is active (see
`compiler/trace.py`), and the same calls leave their structure in the traced program.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fparallel import tree
from fparallel._compat import functorch_active
from fparallel.errors import TraceError
from fparallel.mean import Weighted
from fparallel.recorder import Recorder, current_recorder, grad_depth


@dataclass(frozen=True, eq=False)
class Differentiates:
    """What a function that `grad` or `value_and_grad` returned is, for those who call it on parts of a batch."""

    fun: Callable
    argnums: int | Sequence[int]
    has_aux: bool
    with_value: bool
    made: list[Callable] = field(default_factory=list)

    def loss(self, out: Any) -> Any:
        """The value to differentiate, in what `fun` returned."""
        return out[0] if self.has_aux and isinstance(out, tuple) and out else out


def differentiates(fn: Callable) -> Differentiates | None:
    """What `fn` differentiates; None if it was not made by `grad` or `value_and_grad`, or is wrapped in more."""
    found = getattr(fn, _DIFFERENTIATES, None)
    return found if found is not None and found.made[0] is fn else None


def _says(fn: Callable, what: Differentiates) -> Callable:
    what.made.append(fn)  # functools.wraps copies attributes to wrappers, of which this does not speak
    setattr(fn, _DIFFERENTIATES, what)
    return fn


_DIFFERENTIATES = "_fparallel_differentiates"


def grad(fun: Callable, argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Callable:
    """The gradient function of a scalar function: `grad(f)(x)` has the structure of x.

    With `has_aux` the function returns (value, aux) and its gradient function (grads, aux), as in JAX.
    """
    inner = value_and_grad(fun, argnums, has_aux)

    @functools.wraps(fun)
    def grad_fun(*args: Any, **kwargs: Any) -> Any:
        value, grads = inner(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return _says(grad_fun, Differentiates(fun, argnums, has_aux, with_value=False))


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

    return _says(value_and_grad_fun, Differentiates(fun, argnums, has_aux, with_value=True))


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
    value = out.value() if isinstance(out, Weighted) else out
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
    depth = grad_depth.get()
    nested = depth > 0 or (torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves))
    recorder = current_recorder()
    token = grad_depth.set(depth + 1)
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
        grad_depth.reset(token)
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
        if recorder is not None and not functorch_active() and grad_depth.get() <= 1:
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


class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, recorder: Recorder) -> Tensor:
        return recorder.stage_boundary(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, x: Tensor, recorder: Recorder) -> tuple[Tensor, int | None]:
        return _Boundary.apply(x, recorder), in_dims[0]


def stage_boundary(x: Any) -> Any:
    """Cuts a pipeline by hand: what depends on `x` (a tensor, or every leaf of a tree) is of the next stage, or later.

    The identity in value, and without effect on a mesh that has no axis `pp`. Where a loop has boundaries, they alone
    cut it, and rules that put layers on the axis say nothing. With more of them than stages, neighbours share a stage.
    """
    recorder = current_recorder()
    if recorder is None:
        return x
    return tree.map(lambda leaf: _Boundary.apply(leaf, recorder) if isinstance(leaf, Tensor) else leaf, x)
