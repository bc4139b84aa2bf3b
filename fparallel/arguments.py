"""The arguments of a jitted function: named, flattened to leaves with paths, and checked before anything is traced."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fparallel import tree
from fparallel._compat import cached_property
from fparallel.array import Array, ShapeDtypeStruct
from fparallel.errors import TraceError
from fparallel.logical import LogicalSpec


@dataclass
class Arguments:
    """One call: its dynamic leaves with paths, and what is static.

    Attributes:
      names, positions: the name of every dynamic argument, and its position (or keyword).
      paths, leaves: all leaves, in order; `owner` gives for each the index of its argument.
      specs: the logical axes of each leaf, or None.
    """

    names: list[str]
    keys: list[int | str]
    values: list[Any]
    treedefs: list[Any]
    paths: list[str]
    leaves: list[Any]
    owner: list[int]
    statics: tuple[tuple[int | str, Any], ...]

    @cached_property
    def specs(self) -> list[LogicalSpec | None]:
        return [spec for value in self.values for spec in tree.logical_specs(value)]

    def avals(self) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        return tuple((tuple(leaf.shape), leaf.dtype) for leaf in self.leaves)

    @property
    def batch_paths(self) -> set[str]:
        return {path for path, own in zip(self.paths, self.owner, strict=True) if self.names[own] == "batch"}

    def call(self, fun: Callable, leaves: Sequence[Any]) -> Any:
        """Calls fun with the same structure and other leaves."""
        args: dict[int, Any] = {k: v for k, v in self.statics if isinstance(k, int)}
        kwargs: dict[str, Any] = {k: v for k, v in self.statics if isinstance(k, str)}
        rest = iter(leaves)
        for key, treedef in zip(self.keys, self.treedefs, strict=True):
            value = tree.unflatten(treedef, [next(rest) for _ in range(treedef.num_leaves)])
            (args if isinstance(key, int) else kwargs)[key] = value  # type: ignore[index]
        return fun(*(args[i] for i in range(len(args))), **kwargs)


class Binder:
    """Names, flattens and checks the arguments of calls of one function."""

    def __init__(
        self,
        fun: Callable,
        static_argnums: Sequence[int],
        static_argnames: Sequence[str],
        donate: Sequence[int],
    ) -> None:
        self.fun = fun
        self.name = getattr(fun, "__name__", type(fun).__name__)
        try:
            parameters = list(inspect.signature(fun).parameters.values())
        except (TypeError, ValueError):
            parameters = []
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self.positional = [p.name for p in positional]
        self.variadic = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
        self.takes_more = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        self.static_names = set(static_argnames) | {self._name(i) for i in static_argnums}
        self.donated_names = {self._name(i) for i in donate}
        known = {p.name for p in parameters}
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        for name in static_argnames:
            if name not in known and not takes_any:
                raise TraceError(
                    f"static_argnames={name!r}: {self.name} has no such argument",
                    fix=f"use one of {sorted(known)}",
                )

    def _name(self, i: int) -> str:
        if i < 0:
            i += len(self.positional)
        if i >= len(self.positional) and self.positional and not self.takes_more:
            raise TraceError(
                f"argument {i} of {self.name}: it takes {len(self.positional)}",
                fix="use the number of an argument",
            )
        return (
            self.positional[i] if i < len(self.positional) else f"{self.variadic}.{i - len(self.positional)}"
        )

    def bind(self, args: tuple, kwargs: dict[str, Any]) -> Arguments:
        """Flattens one call.

        Raises:
          TraceError: a leaf is no array, complex, sparse or quantized; or one tensor stands at two paths.
        """
        named: list[tuple[int | str, str, Any]] = [(i, self._name(i), value) for i, value in enumerate(args)]
        named += [(key, key, kwargs[key]) for key in sorted(kwargs)]
        statics, names, keys, values = [], [], [], []
        for key, name, value in named:
            if name in self.static_names:
                try:
                    hash(value)
                except TypeError as error:
                    raise TraceError(
                        f"the static argument {name} of {self.name} is unhashable: {type(value).__name__}",
                        fix="pass a frozen, hashable value",
                    ) from error
                statics.append((key, value))
            else:
                names.append(name)
                keys.append(key)
                values.append(value)
        result = Arguments(names, keys, values, [], [], [], [], tuple(statics))
        for i, (name, value) in enumerate(zip(names, values, strict=True)):
            paths, leaves, treedef = tree.flatten_with_path(value)
            result.treedefs.append(treedef)
            checked = [
                _leaf(leaf, tree.join_path(name, path), self.name)
                for path, leaf in zip(paths, leaves, strict=True)
            ]
            _check_distinct(leaves, [tree.join_path(name, path) for path in paths])
            result.paths += [tree.join_path(name, path) for path in paths]
            result.leaves += checked
            result.owner += [i] * len(leaves)
        return result

    def donated(self, arguments: Arguments) -> list[bool]:
        return [arguments.names[own] in self.donated_names for own in arguments.owner]


def _leaf(leaf: Any, path: str, fun: str) -> Any:
    if isinstance(leaf, (Array, ShapeDtypeStruct)):
        return leaf
    if isinstance(leaf, (bool, int, float)):
        return torch.as_tensor(leaf)
    if not isinstance(leaf, Tensor):
        if hasattr(leaf, "__array__"):
            return torch.as_tensor(leaf)
        raise TraceError(
            f"{path} is {type(leaf).__name__} {str(leaf)[:40]!r}, expected a tensor, an fp.Array or a number",
            fix=f"make it an array, an fp.static field, or a static argument of {fun} (static_argnames)",
        )
    kind = (
        "complex"
        if leaf.is_complex()
        else "sparse"
        if leaf.layout is not torch.strided
        else "quantized"
        if leaf.is_quantized
        else ""
    )
    if kind:
        raise TraceError(
            f"{path} is a {kind} tensor ({leaf.dtype}, {list(leaf.shape)}), expected a dense real one",
            fix={
                "complex": "pass torch.view_as_real(x)",
                "sparse": "pass x.to_dense()",
                "quantized": "pass x.dequantize()",
            }[kind],
        )
    if leaf.requires_grad:
        return leaf.detach()
    return leaf


def _check_distinct(leaves: Sequence[Any], paths: Sequence[str]) -> None:
    seen: dict[int, str] = {}
    for leaf, path in zip(leaves, paths, strict=True):
        if not isinstance(leaf, (Tensor, Array)):
            continue
        first = seen.setdefault(id(leaf), path)
        if first != path:
            raise TraceError(
                f"one tensor stands at two paths, {first} and {path}",
                fix="tie structurally: keep one leaf and use it twice in the function (or pass a clone)",
            )
