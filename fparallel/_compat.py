"""Everything that fparallel takes from the private parts of torch, or that differs between versions.

torch 2.11 to 2.15 and Python from 3.11 on must work; what differs is decided here and nowhere else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
import torch.utils._pytree as _torch_pytree
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import return_and_correct_aliasing

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "all_gather_single",
    "cached_property",
    "correct_aliasing",
    "current_backward_sequence",
    "decomposition",
    "forward_sequence",
    "fresh_fake",
    "functorch_active",
    "fused_adamw",
    "reduce_scatter_single",
    "register_torch_pytree",
    "returns_list",
    "unwrapped",
    "without_functorch",
]


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


def functorch_active() -> bool:
    """Whether a ``torch.func`` transform (grad, vmap, jvp, ...) is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def without_functorch() -> AbstractContextManager[Any]:
    """Suspends the ``torch.func`` transforms that are running."""
    return temporarily_clear_interpreter_stack()


def unwrapped(x: torch.Tensor) -> torch.Tensor:
    """The tensor inside the wrappers of ``torch.func`` transforms."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def correct_aliasing(func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """The results of a tensor subclass for an operator, those that alias an operand made to do so."""
    return return_and_correct_aliasing(func, args, kwargs, out)


def forward_sequence() -> int:
    """The sequence number that autograd will give to the next forward op."""
    return torch._C._autograd._get_sequence_nr()


def current_backward_sequence() -> int | None:
    """The sequence number of the forward op whose backward is running, if any."""
    node = torch._C._current_autograd_node()
    return node._sequence_nr() if node is not None else None


def returns_list(operator: Any) -> bool:
    """Whether an ATen operator returns one value that is a list of tensors (`aten.split.Tensor`)."""
    schema = getattr(operator, "_schema", None)
    return schema is not None and len(schema.returns) == 1 and "List" in str(schema.returns[0].type)


def decomposition(op: Any) -> Callable | None:
    """torch's own decomposition of an operator into simpler ones, if it has one."""
    from torch._decomp import decomposition_table

    return decomposition_table.get(op)


def fresh_fake(
    mode: FakeTensorMode, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]], device: str
) -> list[FakeTensor]:
    """New contiguous fake tensors, made without a dispatch each: a step may need ten thousand of them.

    The constructor's own work (some 20 attributes) is done once and its outcome copied. Fakes of one shape share a
    meta tensor's storage, which holds nothing, but each has a version counter of its own.
    """
    metas: dict[Any, torch.Tensor] = mode.__dict__.setdefault("_fparallel_metas", {})
    states: dict[str, tuple[dict[str, Any], torch.device]] = mode.__dict__.setdefault("_fparallel_states", {})
    fakes: list[FakeTensor] = []
    with torch._C._DisableTorchDispatch():
        if device not in states:
            first = FakeTensor(mode, torch.empty((), device="meta"), torch.device(device))
            states[device] = dict(first.__dict__), first.fake_device
        state, where = states[device]
        for key in shapes:
            meta = metas.get(key)
            if meta is None:
                meta = metas[key] = torch.empty(key[0], dtype=key[1], device="meta")
            fake = torch.Tensor._make_subclass(
                FakeTensor, meta.data, False, dispatch_device=True, device_for_backend_keys=where
            )
            torch._C._set_throw_on_mutable_data_ptr(fake)
            fake.__dict__.update(state)
            fakes.append(fake)
    return fakes


if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property as cached_property
else:

    class cached_property:
        """`functools.cached_property` as of Python 3.12: without the lock that costs more than most values."""

        def __init__(self, function: Callable) -> None:
            self.function, self.__doc__ = function, function.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self.name = name

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return self
            value = instance.__dict__[self.name] = self.function(instance)
            return value


# torch 2.13 renamed two collectives and warns about their old names.
all_gather_single = (
    getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor
)
reduce_scatter_single = (
    getattr(torch.distributed, "reduce_scatter_single", None) or torch.distributed.reduce_scatter_tensor
)


def fused_adamw(*args: Any, **settings: Any) -> None:
    """torch's fused AdamW over lists of (params, grads, means, mean squares, (), steps), in place."""
    torch._fused_adamw_(*args, **settings)
