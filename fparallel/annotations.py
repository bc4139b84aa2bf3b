"""What the annotations of the registered dataclasses say about the leaves of a tree.

The annotations of a class are resolved once, when the class is decorated if that is possible and else when it
is first flattened, so that forward references work. Names are then read by walking a tree *structure* beside
the annotations: where a field is annotated as a base class or as ``Any``, the class of the value takes over.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin

import optree

from fparallel.errors import TreeError
from fparallel.logical import VARIADIC, LogicalDim, LogicalSpec, names_of, parse_jaxtyping, parse_logical

__all__ = ["REGISTRY", "Registered", "Scope", "known_logical_names", "specs_of_structure"]

Env = Mapping[TypeVar, "Hint"]
_SEQUENCES = (list, tuple, collections.deque)
_SCALARS = (bool, int, float, complex, str, bytes)
_UNANNOTATED: tuple[LogicalDim, ...] = (VARIADIC,)


class Hint(NamedTuple):
    """A type annotation, with the meaning of the type variables in it."""

    type: Any
    env: Env
    text: str | None = None  # of the Annotated around it


class Scope:
    """The names that are visible where a class is defined.

    Args:
        frame: the frame that executes the class statement's decorator.

    The frames are kept, not copies of their variables, because a function may define the class that an
    annotation names later on.
    """

    def __init__(self, frame: FrameType) -> None:
        self.globals = frame.f_globals
        self._frames = [frame]
        while not self._frames[-1].f_code.co_flags & 0x1:  # a class body or a module: not CO_OPTIMIZED
            outer = self._frames[-1].f_back
            if outer is None or outer.f_globals is not self.globals:
                break
            self._frames.append(outer)
        self._frames = [f for f in self._frames if f.f_locals is not self.globals]

    def locals(self) -> dict[str, Any]:
        """The local names, inner scopes last."""
        return {name: value for frame in reversed(self._frames) for name, value in frame.f_locals.items()}


class Registered:
    """A registered dataclass: its fields, and their annotations once resolved.

    Args:
        cls: the class.
        scope: the names visible where it was defined; dropped as soon as its annotations are resolved.
    """

    def __init__(self, cls: type, scope: Scope) -> None:
        fields = dataclasses.fields(cls)
        self.cls = cls
        self.children = tuple(f.name for f in fields if not f.metadata.get("static"))
        self.statics = tuple(f.name for f in fields if f.metadata.get("static"))
        self.owners = {name: _owner(cls, name) for name in self.children}
        self.hints: dict[str, Any] | None = None
        self.names: frozenset[str] = frozenset()
        self._annotations = {f.name: f.type for f in fields}
        self._scope: Scope | None = scope

    def resolve(self) -> None:
        """Read the annotations of all fields that are not static.

        Raises:
            TreeError: one names something that cannot be found, or its logical names cannot be read.
        """
        if self._scope is None:
            return
        hints: dict[str, Any] = {}
        names: frozenset[str] = frozenset()
        for name, owner in self.owners.items():
            inherited = REGISTRY.get(owner) if owner is not self.cls else None
            if inherited is not None and name in inherited.children:
                inherited.resolve()
                hints[name] = typing.cast(dict, inherited.hints)[name]
            else:
                hints[name] = self._evaluate(name, owner)
            try:
                names |= _names_in(hints[name])
            except TreeError as error:
                where = f"{self.cls.__qualname__}.{name}"
                raise TreeError(error.message, fix=error.fix, where=where) from None
        self.hints, self.names, self._scope = hints, names, None

    def _evaluate(self, name: str, owner: type) -> Any:
        assert self._scope is not None
        namespace = self._scope.globals if owner is self.cls else vars(sys.modules[owner.__module__])
        local = self._scope.locals()
        local[self.cls.__name__] = self.cls
        annotation = self._annotations[name]
        holder = type(name, (), {"__annotations__": {name: annotation}, "__module__": owner.__module__})
        try:
            return typing.get_type_hints(holder, namespace, local, include_extras=True)[name]
        except Exception as error:
            shown = annotation if isinstance(annotation, str) else repr(annotation)
            raise TreeError(
                f"the annotation of {self.cls.__qualname__}.{name}, {shown!r}, cannot be resolved: {error}",
                fix="import the names it uses at run time (not under TYPE_CHECKING), or define them in the "
                "module or in the function that defines the class",
                where=f"{self.cls.__module__}.{self.cls.__qualname__}.{name}",
            ) from error


REGISTRY: dict[type, Registered] = {}
"""Every class decorated with ``fp.dataclass``."""


def known_logical_names() -> set[str]:
    """The logical names in the annotations of all registered classes that can be resolved."""
    known: set[str] = set()
    for registered in list(REGISTRY.values()):
        try:
            registered.resolve()
        except TreeError:
            continue  # flattening an instance reports it
        known |= registered.names
    return known


def specs_of_structure(treedef: optree.PyTreeSpec) -> list[tuple[LogicalSpec, ...]]:
    """For each leaf of a structure the specs that its annotation allows, one per member of a union.

    There are none where nothing is named. The dims may hold ``VARIADIC``.
    """
    return list(_walk(treedef, Hint(Any, {}), ()))


def _walk(
    node: optree.PyTreeSpec, hint: Hint, index_axes: tuple[tuple[str, int, int], ...]
) -> Iterator[tuple[LogicalSpec, ...]]:
    if node.is_leaf():
        dims = dict.fromkeys(_dims(h) for h in _alternatives(hint))
        if index_axes or list(dims) != [_UNANNOTATED]:
            yield tuple(LogicalSpec(d, index_axes) for d in dims)
        else:
            yield ()
        return
    cls, children = node.type, node.children()
    if cls is None or not children:
        return
    hint = next((h for h in _alternatives(hint) if _describes(h.type, cls)), Hint(Any, {}))
    args = get_args(hint.type)
    if cls in REGISTRY:
        registered = REGISTRY[cls]
        registered.resolve()
        assert registered.hints is not None
        envs = _environments(cls, _arguments(cls, hint))
        for name, child in zip(node.entries(), children, strict=True):
            env = envs.get(registered.owners[name], {})
            yield from _walk(child, Hint(registered.hints[name], env), index_axes)
    elif cls in _SEQUENCES:
        axis = _index_axis(hint.text) if hint.text is not None else None
        known: dict[Any, list[tuple[LogicalSpec, ...]]] = {}
        for i, child in enumerate(children):
            inner = index_axes if axis is None else (*index_axes, (axis, i, len(children)))
            key = (id(_item(args, i)), child)  # the layers of a model have one structure: it is walked once
            if key not in known:
                known[key] = list(_walk(child, Hint(_item(args, i), hint.env), inner))
                yield from known[key]
            elif axis is None:
                yield from known[key]
            else:
                for specs in known[key]:
                    yield tuple(LogicalSpec(s.dims, inner + s.index_axes[len(inner) :]) for s in specs)
    else:
        value = args[1] if issubclass(cls, collections.abc.Mapping) and len(args) == 2 else Any
        for child in children:
            yield from _walk(child, Hint(value, hint.env), index_axes)


def _alternatives(hint: Hint) -> list[Hint]:
    """The hint without Annotated, aliases and type variables; one per member of a union."""
    kind, env, text = hint
    origin = get_origin(kind)
    if origin is Annotated:
        base, *metadata = get_args(kind)
        inner = next((m for m in metadata if isinstance(m, str)), None)
        return _alternatives(Hint(base, env, text if text is not None else inner))
    if origin is Union or origin is types.UnionType:
        members = (Hint(member, env, text) for member in get_args(kind) if member is not type(None))
        return [h for member in members for h in _alternatives(member)]
    if isinstance(kind, TypeVar):
        bound = env.get(kind)
        return _alternatives(
            Hint(Any, {}, text) if bound is None else bound._replace(text=text or bound.text)
        )
    unwrapped = _unwrap(kind)
    return [hint] if unwrapped is kind else _alternatives(Hint(unwrapped, env, text))


def _unwrap(kind: Any) -> Any:
    """What stands behind Final, NewType and ``type X = ...``."""
    if get_origin(kind) is typing.Final:
        return get_args(kind)[0]
    if hasattr(kind, "__supertype__"):
        return kind.__supertype__
    return kind.__value__ if type(kind).__name__ == "TypeAliasType" else kind


def _dims(hint: Hint) -> tuple[LogicalDim, ...]:
    """The dims of a leaf with this annotation."""
    if hint.text is not None and _may_be_array(hint.type):
        return parse_logical(hint.text)
    return parse_jaxtyping(hint.type.dim_str) if _is_jaxtyping(hint.type) else _UNANNOTATED


def _is_jaxtyping(kind: Any) -> bool:
    return isinstance(kind, type) and hasattr(kind, "dim_str") and hasattr(kind, "array_type")


def _may_be_array(kind: Any) -> bool:
    if kind in _SCALARS or get_origin(kind) is not None or kind in REGISTRY:
        return False
    return not (isinstance(kind, type) and issubclass(kind, (*_SEQUENCES, collections.abc.Mapping)))


def _is_sequence(kind: Any) -> bool:
    origin = get_origin(kind) or kind
    return origin in (*_SEQUENCES, collections.abc.Sequence, collections.abc.MutableSequence)


def _describes(kind: Any, cls: type) -> bool:
    """Whether an annotation is about values of class ``cls``; lists and tuples stand for each other."""
    if kind is Any or (_is_sequence(kind) and cls in _SEQUENCES):
        return True
    origin = get_origin(kind) or kind
    return isinstance(origin, type) and not _is_jaxtyping(origin) and issubclass(cls, origin)


def _item(args: tuple[Any, ...], index: int) -> Any:
    """The annotation of an item: of ``list[A]``, ``tuple[A, ...]`` or ``tuple[A, B]``."""
    if len(args) == 1 or (len(args) == 2 and args[1] is Ellipsis):
        return args[0]
    return args[index] if index < len(args) else Any


def _index_axis(text: str) -> str:
    dims = parse_logical(text)
    if len(dims) != 1 or len(dims[0]) != 1 or dims[0][0][0] is None:
        raise TreeError(
            f"{text!r} annotates a list, whose index is one logical axis, but it is not one name",
            fix='write one name, such as Annotated[list[Block], "layers"]',
        )
    return dims[0][0][0]


def _names_in(kind: Any) -> frozenset[str]:
    """The logical names written in an annotation, after checking that they can mean something."""
    if get_origin(kind) is Annotated:
        base, *metadata = get_args(kind)
        texts = [m for m in metadata if isinstance(m, str)]
        inner = _names_in(base)
        return inner | _names_in_text(texts, _alternatives(Hint(base, {}))) if texts else inner
    if _is_jaxtyping(kind):
        return names_of(parse_jaxtyping(kind.dim_str))
    unwrapped = _unwrap(kind)
    if unwrapped is not kind:
        return _names_in(unwrapped)
    return frozenset().union(*(_names_in(arg) for arg in get_args(kind)))


def _names_in_text(texts: list[str], bases: Iterable[Hint]) -> frozenset[str]:
    if len(texts) > 1:
        found = f"Annotated holds two texts, {texts[0]!r} and {texts[1]!r}"
        raise TreeError(found, fix="keep the one that holds the logical names")
    names: frozenset[str] = frozenset()
    for base in bases:
        if _is_sequence(base.type):
            names |= {_index_axis(texts[0])}
        elif _may_be_array(base.type):
            dims = parse_logical(texts[0])
            names |= names_of(dims)
            beside = _dims(base)
            if not LogicalSpec(dims).fits(len(beside)) and VARIADIC not in (*dims, *beside):
                raise TreeError(
                    f"{texts[0]!r} names {len(dims)} dims of an array annotated with {len(beside)}",
                    fix="name as many dims in both; factors of one dim stand in parentheses",
                )
        elif base.type not in _SCALARS:
            raise TreeError(
                f"{texts[0]!r} annotates {base.type!r}, and only a list or an array has logical axes",
                fix="annotate the list whose index it names, or the arrays inside",
            )
    return names


def _owner(cls: type, name: str) -> type:
    """The class in whose body a field is annotated."""
    fields = (vars(base).get("__dataclass_fields__", {}) for base in cls.__mro__)
    field = vars(cls)["__dataclass_fields__"][name]  # a subclass keeps the object that its base made
    return [k for k, known in zip(cls.__mro__, fields, strict=True) if known.get(name) is field][-1]


def _parameters(cls: type) -> tuple[TypeVar, ...]:
    return getattr(cls, "__parameters__", ())


def _arguments(cls: type, hint: Hint) -> Env:
    """What the type variables of ``cls`` mean in a field annotated ``hint``, such as ``Pair[Mlp]``."""
    origin = get_origin(hint.type)
    given = dict(zip(_parameters(origin), (Hint(arg, hint.env) for arg in get_args(hint.type)), strict=False))
    if not given or origin is cls:
        return given
    own: Env = {p: Hint(p, {}) for p in _parameters(cls)}
    passed = _environments(cls, own).get(origin, {})  # a value of a subclass: what it passes on to its base
    return {h.type: given[p] for p, h in passed.items() if isinstance(h.type, TypeVar) and p in given}


def _environments(cls: type, env: Env) -> dict[type, Env]:
    """What type variables mean in the body of ``cls`` and of each of its bases."""
    found: dict[type, Env] = {cls: env}
    bases = cls.__dict__.get("__orig_bases__", cls.__bases__)
    for base in bases:
        origin = get_origin(base) or base
        if isinstance(origin, type) and origin not in (typing.Generic, typing.Protocol, object):
            inner = dict(zip(_parameters(origin), (Hint(a, env) for a in get_args(base)), strict=False))
            for owner, meaning in _environments(origin, inner).items():
                found.setdefault(owner, meaning)
    return found
