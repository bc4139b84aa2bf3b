"""Pytrees: flatten, map, dotted paths, and the dataclasses that are nodes of them.

A tree is built of lists, tuples, named tuples, dicts and classes decorated with :func:`dataclass`. Anything
else is a leaf: a tensor, a number, an ``fp.Array``, a ``ShapeDtypeStruct``, a ``P``. ``None`` is a node
without leaves, and the keys of a dict are visited sorted, as in JAX.

A path joins keys with dots: ``params.blocks.3.up``. The path of a tree that is itself a leaf is ``""``.
"""

from __future__ import annotations

import functools
import typing
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import optree
from optree import PyTreeSpec

from fparallel.annotations import REGISTRY, known_logical_names, specs_of_structure
from fparallel.errors import TreeError
from fparallel.logical import VARIADIC, LogicalDim, LogicalSpec, parse_logical
from fparallel.nodes import NAMESPACE, TrainState, dataclass, is_node_class, static

__all__ = [
    "LogicalDim",
    "LogicalSpec",
    "PyTreeSpec",
    "TrainState",
    "dataclass",
    "flatten",
    "flatten_with_path",
    "is_node_class",
    "join_path",
    "known_logical_names",
    "leaves",
    "logical_specs",
    "map",
    "map_with_path",
    "match_prefix",
    "parse_logical",
    "paths",
    "reduce",
    "static",
    "structure",
    "unflatten",
    "unflatten_dotted",
]

_MISSING: Any = object()
_builtin_map = map
_LEAF_TYPES: weakref.WeakSet[type] = weakref.WeakSet()  # types already found to be no undecorated subclass

IsLeaf = Callable[[Any], bool] | None


# ---- flatten and unflatten -----------------------------------------------------------------------


def flatten(tree: Any, is_leaf: IsLeaf = None) -> tuple[list[Any], PyTreeSpec]:
    """The leaves of a tree and its structure.

    Args:
        tree: any pytree.
        is_leaf: says of a subtree that it is a leaf; asked of every node.

    Raises:
        TreeError: a value is of an undecorated subclass of a registered class, a static field cannot be
            hashed, or an annotation of a registered class cannot be resolved.
    """
    found, treedef = optree.tree_flatten(tree, is_leaf, namespace=NAMESPACE)
    for kind in set(_builtin_map(type, found)):
        if kind not in _LEAF_TYPES:
            _check_leaf_type(kind)
    return found, treedef


def unflatten(treedef: PyTreeSpec, leaves: Iterable[Any]) -> Any:
    """The tree of this structure with these leaves. No ``__init__`` or ``__post_init__`` runs.

    Raises:
        TreeError: the number of leaves is another one.
    """
    given = list(leaves)
    if len(given) != treedef.num_leaves:
        raise TreeError(
            f"a structure of {treedef.num_leaves} leaves was given {len(given)}",
            fix="unflatten with the leaves, or as many as the leaves, of the tree that was flattened",
        )
    return treedef.unflatten(given)


def leaves(tree: Any, is_leaf: IsLeaf = None) -> list[Any]:
    """The leaves of a tree, in order."""
    return flatten(tree, is_leaf)[0]


def structure(tree: Any, is_leaf: IsLeaf = None) -> PyTreeSpec:
    """The structure of a tree: hashable, and equal to that of a tree of the same nodes and static fields."""
    return flatten(tree, is_leaf)[1]


def flatten_with_path(tree: Any, is_leaf: IsLeaf = None) -> tuple[list[str], list[Any], PyTreeSpec]:
    """The dotted path of every leaf, the leaves, and the structure.

    Raises:
        TreeError: two leaves have one path, as in ``{"a.b": 1, "a": {"b": 2}}``.
    """
    found, treedef = flatten(tree, is_leaf)
    return paths(treedef), found, treedef


def paths(treedef: PyTreeSpec) -> list[str]:
    """The dotted path of every leaf of a structure."""
    return list(_paths(treedef))


@functools.lru_cache(maxsize=512)
def _paths(treedef: PyTreeSpec) -> tuple[str, ...]:
    dotted = _paths_below(treedef, {})
    if len(set(dotted)) != len(dotted):
        twice = next(path for i, path in enumerate(dotted) if path in dotted[:i])
        raise TreeError(
            "two leaves of a tree have the same path",
            fix="rename a dict key: a key that holds a dot reads like a nested dict, and 1 reads like '1'",
            where=twice,
        )
    return dotted


def _paths_below(node: PyTreeSpec, known: dict[PyTreeSpec, tuple[str, ...]]) -> tuple[str, ...]:
    """The paths of the leaves below a node; equal nodes, such as the layers of a model, are walked once."""
    if node.is_leaf():
        return ("",)
    if node not in known:
        found: list[str] = []
        for key, child in zip(_builtin_map(str, _keys(node)), node.children(), strict=True):
            below = _paths_below(child, known)
            found += [f"{key}.{path}" if key and path else key or path for path in below]
        known[node] = tuple(found)
    return known[node]


def join_path(*parts: Any) -> str:
    """Keys, indices and paths joined with dots; empty ones are left out.

    >>> join_path("state", "params.blocks", 3, "up")
    'state.params.blocks.3.up'
    """
    return ".".join(filter(None, _builtin_map(str, parts)))


def _check_leaf_type(kind: type) -> None:
    base = next((k for k in kind.__mro__ if k in REGISTRY), kind)
    if base is not kind:
        raise TreeError(
            f"{kind.__qualname__} is an undecorated subclass of {base.__qualname__}, a node of pytrees",
            fix=f"decorate {kind.__qualname__} with @fp.dataclass",
        )
    _LEAF_TYPES.add(kind)


# ---- map and reduce ------------------------------------------------------------------------------


def map(f: Callable[..., Any], tree: Any, *rest: Any, is_leaf: IsLeaf = None) -> Any:
    """The tree of ``f(leaf, *leaves_of_rest)``.

    Args:
        f: called once per leaf of ``tree``, in order.
        tree: gives the structure of the result.
        rest: trees of the same structure; where ``tree`` has a leaf, they may have a subtree.
        is_leaf: as in :func:`flatten`; asked about ``tree`` only.

    Raises:
        TreeError: one of ``rest`` has another structure; names the path.
    """
    first, treedef = flatten(tree, is_leaf)
    return treedef.unflatten(_builtin_map(f, first, *(_up_to(treedef, other) for other in rest)))


def map_with_path(f: Callable[..., Any], tree: Any, *rest: Any, is_leaf: IsLeaf = None) -> Any:
    """The tree of ``f(path, leaf, *leaves_of_rest)``; otherwise as :func:`map`."""
    dotted, first, treedef = flatten_with_path(tree, is_leaf)
    return treedef.unflatten(_builtin_map(f, dotted, first, *(_up_to(treedef, other) for other in rest)))


def reduce(
    f: Callable[[Any, Any], Any], tree: Any, initial: Any = _MISSING, *, is_leaf: IsLeaf = None
) -> Any:
    """``f`` folded over the leaves from the left, starting with ``initial`` if it is given.

    Raises:
        TreeError: the tree has no leaves and there is no ``initial``.
    """
    found = leaves(tree, is_leaf)
    if initial is not _MISSING:
        return functools.reduce(f, found, initial)
    if not found:
        raise TreeError("a tree without leaves has nothing to reduce", fix="pass a value to start with")
    return functools.reduce(f, found)


def match_prefix(prefix_tree: Any, full_tree: Any, is_leaf: IsLeaf = None) -> list[Any]:
    """For each leaf of a tree the leaf of a prefix of it that stands at or above it.

    ``match_prefix({"a": 1, "b": 2}, {"a": [x, y], "b": z})`` is ``[1, 1, 2]``.

    Args:
        prefix_tree: has the structure of ``full_tree``, with leaves in place of some subtrees.
        full_tree: the tree to cover.
        is_leaf: asked about ``prefix_tree`` only, for leaves that would otherwise be nodes (``None``, say).

    Raises:
        TreeError: it is no prefix; names the path.
    """
    found, treedef = flatten(prefix_tree, is_leaf)
    subtrees = _up_to(treedef, full_tree, "the prefix")
    return [leaf for leaf, subtree in zip(found, subtrees, strict=True) for _ in leaves(subtree)]


def _up_to(treedef: PyTreeSpec, tree: Any, expected: str = "the first tree") -> list[Any]:
    try:
        return treedef.flatten_up_to(tree)
    except ValueError as error:
        mismatch = _mismatch(treedef, tree, expected, ())
        if mismatch is None:
            raise TreeError(f"two trees differ: {error}", fix="pass trees of one structure") from error
        raise mismatch from None


def _mismatch(treedef: PyTreeSpec, tree: Any, expected: str, path: tuple[Any, ...]) -> TreeError | None:
    """What stops ``tree`` from having ``treedef`` as a prefix, searched from the root."""
    if treedef.is_leaf():
        return None
    ours = optree.tree_structure(tree, lambda x: x is not tree, namespace=NAMESPACE)
    theirs = typing.cast(PyTreeSpec, treedef.one_level())
    if ours != theirs:
        return TreeError(
            f"two trees differ: {expected} has {_describe(theirs)}, the other {_describe(ours, type(tree))}",
            fix="pass trees of one structure; a static field is part of it",
            where=join_path(*path) or "the root",
        )
    children = optree.tree_flatten_one_level(tree, namespace=NAMESPACE)[0]
    below = zip(treedef.children(), children, _keys(theirs), strict=True)
    return next((e for d, c, k in below if (e := _mismatch(d, c, expected, (*path, k))) is not None), None)


def _keys(node: PyTreeSpec) -> list[Any]:
    """The key of each child: the name of a field, a dict key or an index."""
    cls = node.type
    if cls is not None and optree.is_namedtuple_class(cls):
        return list(optree.namedtuple_fields(cls))
    if cls is not None and optree.is_structseq_class(cls):
        return list(optree.structseq_fields(cls))
    return node.entries()


def _describe(one_level: PyTreeSpec, leaf_type: type = object) -> str:
    kind = one_level.type
    if kind is None:
        return f"a leaf of type {leaf_type.__qualname__}"
    if kind is type(None):
        return "None"
    entries = _keys(one_level)
    if kind in (list, tuple):
        return f"a {kind.__name__} of {len(entries)}"
    shown = ", ".join(str(e) for e in entries[:8]) + (", ..." if len(entries) > 8 else "")
    statics = ""
    if kind in REGISTRY and REGISTRY[kind].statics:
        instance = one_level.unflatten([None] * len(entries))
        statics = "; static " + ", ".join(f"{n}={getattr(instance, n)!r}" for n in REGISTRY[kind].statics)
    return f"a {kind.__qualname__} of {{{shown}}}{statics}"


# ---- dotted dictionaries -------------------------------------------------------------------------


def unflatten_dotted(flat: Mapping[str, Any]) -> Any:
    """The nested tree of a mapping from dotted paths, such as the state dict of an ``nn.Module``.

    Keys are split at dots. Where all keys of a node are integers it is a list, with ``None`` (no leaves) at
    the indices that do not occur, so that :func:`flatten_with_path` gives the same paths back; else a dict.

    >>> unflatten_dotted({"wte": 1, "h.0.w": 2, "h.1.w": 3})
    {'wte': 1, 'h': [{'w': 2}, {'w': 3}]}

    Raises:
        TreeError: a key is no string, or is the path of a leaf and of a node at once.
    """
    root: dict[str, Any] = {}
    nodes: list[dict[str, Any]] = [root]
    inner: dict[str, dict[str, Any]] = {"": root}
    for path, value in flat.items():
        if not isinstance(path, str):
            raise TreeError(f"the key {path!r} is no dotted path", fix="use strings, such as 'blocks.3.up'")
        parent, prefix = root, ""
        *above, last = path.split(".")
        for part in above:
            prefix = f"{prefix}.{part}"
            if prefix not in inner:
                if part in parent:
                    raise _leaf_and_node(prefix[1:])
                nodes.append(inner.setdefault(prefix, parent.setdefault(part, {})))
            parent = inner[prefix]
        if f"{prefix}.{last}" in inner:
            raise _leaf_and_node(path)
        parent[last] = value
    return _lists_for_integer_keys(root, {id(node) for node in nodes})


def _lists_for_integer_keys(node: Any, nodes: set[int]) -> Any:
    if id(node) not in nodes:
        return node  # a value of the mapping, be it a dict itself
    built = {key: _lists_for_integer_keys(child, nodes) for key, child in node.items()}
    if not built or not all(key.isdecimal() and str(int(key)) == key for key in built):
        return built
    return [built.get(str(i)) for i in range(max(_builtin_map(int, built)) + 1)]


def _leaf_and_node(path: str) -> TreeError:
    return TreeError("one path is that of a leaf and of a node", fix="rename one of the two keys", where=path)


# ---- logical axes --------------------------------------------------------------------------------


def logical_specs(tree: Any, is_leaf: IsLeaf = None) -> list[LogicalSpec | None]:
    """For each leaf the logical axes that annotations give it, in the order of :func:`flatten`.

    ``None`` where no annotation names anything and no list above the leaf has a logical index. Names are
    found by the class of each value, so a field annotated ``Any`` or as a base class loses none. A leaf with
    ``ndim`` or ``shape`` (or a Python number) gets as many unnamed dims as a variadic annotation leaves it;
    other leaves, such as partition specs, keep ``VARIADIC``. That the dims fit the leaf is not checked here.
    """
    found, treedef = flatten(tree, is_leaf)
    ready, open_ = _specs(treedef)
    specs = list(ready)
    for i, candidates in open_:
        ndim = _ndim(found[i])
        if ndim is not None:
            specs[i] = next((s for s in candidates if s.fits(ndim)), candidates[0]).for_ndim(ndim)
    return specs


@functools.lru_cache(maxsize=512)
def _specs(
    treedef: PyTreeSpec,
) -> tuple[tuple[LogicalSpec | None, ...], tuple[tuple[int, tuple[LogicalSpec, ...]], ...]]:
    """The first spec of each leaf, and all specs of the leaves for which the number of dims decides."""
    candidates = specs_of_structure(treedef)
    first = tuple(c[0] if c else None for c in candidates)
    open_ = tuple((i, c) for i, c in enumerate(candidates) if len(c) > 1 or (c and VARIADIC in c[0].dims))
    return first, open_


def _ndim(leaf: Any) -> int | None:
    if isinstance(leaf, (bool, int, float, complex)):
        return 0
    ndim = getattr(leaf, "ndim", None)
    if ndim is None and (shape := getattr(leaf, "shape", None)) is not None:
        return len(shape)
    return ndim
