"""Dataclasses that are nodes of pytrees: ``fp.dataclass``, ``fp.static``, ``fp.TrainState``."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import sys
import typing
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, TypeVar

import optree
import torch

from fparallel._compat import register_torch_pytree
from fparallel.annotations import REGISTRY, Registered, Scope
from fparallel.errors import TreeError, did_you_mean

__all__ = ["NAMESPACE", "TrainState", "dataclass", "is_node_class", "static"]

NAMESPACE = "fparallel"
"""The optree namespace in which the classes are registered."""

T = TypeVar("T")
_MISSING: Any = object()


def static(*, default: Any = _MISSING, default_factory: Callable[[], Any] = _MISSING) -> Any:
    """A field that is part of the structure of the tree, not a leaf: a size, a flag, a function.

    Its value must be hashable and comparable, for two trees with different values have different structures.
    """
    given = {"default": default, "default_factory": default_factory}
    given = {name: value for name, value in given.items() if value is not _MISSING}
    return dataclasses.field(metadata={"static": True}, **given)


@typing.dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, static))
def dataclass(
    cls: type[T] | None = None, /, *, eq: bool = True, kw_only: bool = False, repr: bool = True
) -> Any:
    """Make a class a frozen dataclass that is a node of pytrees, fparallel's and torch's.

    Fields are children; jaxtyping annotations name their logical axes; fields marked :func:`static` are part
    of the structure. ``None`` in a field has no leaves. The class gets a method ``replace(**changes)``.

    Args:
        cls: the class; absent in ``@fp.dataclass(...)``.
        eq, kw_only, repr: as in ``dataclasses.dataclass``.

    Raises:
        TreeError: the class is decorated already.

    >>> @dataclass
    ... class Mlp:
    ...     up: Any
    ...     gated: bool = static(default=False)
    >>> Mlp(up=1).replace(up=2)
    Mlp(up=2, gated=False)
    """
    frame = sys._getframe(1)

    def decorate(cls: type[T]) -> type[T]:
        if cls in REGISTRY:
            raise TreeError(f"the class {cls.__qualname__} is registered already", fix="decorate it once")
        return _register(dataclasses.dataclass(cls, frozen=True, eq=eq, kw_only=kw_only, repr=repr), frame)

    return decorate if cls is None else decorate(cls)


def _register(cls: type[T], frame: FrameType) -> type[T]:
    registered = REGISTRY[cls] = Registered(cls, Scope(frame))
    with contextlib.suppress(
        TreeError
    ):  # of what is defined later: tried again when an instance is flattened
        registered.resolve()
    if "replace" not in cls.__dict__ and "replace" not in registered.children + registered.statics:
        cls.replace = _replace  # type: ignore[attr-defined]
    flatten_node, flatten_present, unflatten_node, unflatten_present = _node_functions(registered)
    optree.register_pytree_node(
        typing.cast(Any, cls),
        flatten_node,
        unflatten_node,
        path_entry_type=optree.GetAttrEntry,
        namespace=NAMESPACE,
    )
    register_torch_pytree(cls, flatten_present, unflatten_present)
    return cls


def _node_functions(registered: Registered) -> tuple[Callable[..., Any], ...]:
    """How to take an instance apart and put it together, for optree and for torch.

    To torch ``None`` is a leaf, and one that ``torch.func`` refuses; so torch is not shown ``None`` fields.
    """
    cls, names, statics = registered.cls, registered.children, registered.statics
    children_of, statics_of = _getter(names), _getter(statics)
    has_dict = hasattr(object.__new__(cls), "__dict__")

    def flatten_node(instance: Any) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[str, ...]]:
        registered.resolve()
        values = statics_of(instance)
        if statics:
            _check_statics(registered, values)
        return children_of(instance), values, names

    def unflatten_node(values: tuple[Any, ...], children: Iterable[Any]) -> Any:
        instance: Any = object.__new__(cls)
        if has_dict:
            vars(instance).update(zip(names, children, strict=True))
            vars(instance).update(zip(statics, values, strict=True))
            return instance
        for name, value in (*zip(names, children, strict=True), *zip(statics, values, strict=True)):
            object.__setattr__(instance, name, value)
        return instance

    def flatten_present(instance: Any) -> tuple[list[Any], Any, list[str]]:
        children, values, _ = flatten_node(instance)
        present = tuple(child is not None for child in children)
        kept = [(n, c) for n, c in zip(names, children, strict=True) if c is not None]
        return [c for _, c in kept], (values, present), [n for n, _ in kept]

    def unflatten_present(context: Any, children: Iterable[Any]) -> Any:
        values, present = context
        rest = iter(children)
        return unflatten_node(values, [next(rest) if there else None for there in present])

    return flatten_node, flatten_present, unflatten_node, unflatten_present


def _getter(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) > 1:
        return operator.attrgetter(*names)
    if not names:
        return lambda instance: ()
    return lambda instance: (getattr(instance, names[0]),)


def _check_statics(registered: Registered, values: tuple[Any, ...]) -> None:
    for name, value in zip(registered.statics, values, strict=True):
        try:
            hash(value)
        except TypeError:
            reason = "cannot be hashed"
        else:
            if not isinstance(value, torch.Tensor):
                continue
            reason = "cannot be compared"
        field, kind = f"{registered.cls.__qualname__}.{name}", type(value).__qualname__
        raise TreeError(
            f"the static field {field} holds a value of type {kind}, which {reason}",
            fix="make it a tuple or another hashable value, or drop fp.static to make it a child",
            where=field,
        )


def _replace(self: T, **changes: Any) -> T:
    """A copy with some fields changed.

    Raises:
        TreeError: there is no such field.
    """
    known = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
    for name in changes:
        if name not in known:
            raise TreeError(
                f"{type(self).__qualname__} has no field {name!r}: {did_you_mean(name, known)}",
                fix=f"pass fields of {type(self).__qualname__} to replace()",
            )
    return dataclasses.replace(self, **changes)  # type: ignore[type-var]


_replace.__name__ = "replace"


def is_node_class(cls: type) -> bool:
    """Whether a class was decorated with :func:`dataclass`."""
    return cls in REGISTRY


@dataclass
class TrainState:
    """What a training step takes and returns.

    Attributes:
        step: the number of steps done.
        params: the tree of parameters; the leaves under this path have the role of parameters.
        opt_state: the state of the optimizer.
        key: an ``fp.random`` key, or ``None``.
    """

    step: Any
    params: Any
    opt_state: Any
    key: Any = None

    def replace(self, **changes: Any) -> TrainState:
        """A copy with some fields changed.

        Raises:
            TreeError: there is no such field.
        """
        return _replace(self, **changes)
