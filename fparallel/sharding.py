"""Saying where one tensor lives: partition specs and shardings."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fparallel.errors import FparallelWarning, ShardingError, did_you_mean
from fparallel.factors import Factor
from fparallel.layout import Layout, typed
from fparallel.mesh import Axis, Mesh


class _Unconstrained:
    def __repr__(self) -> str:
        return "P.UNCONSTRAINED"


class PartitionSpec(tuple):
    """Which mesh axes shard each dim of a tensor: `P("dp", None, ("dp2", "tp"))`.

    Dims that are omitted or None are replicated; `P.UNCONSTRAINED` leaves a dim to the compiler. A leaf of a tree.
    """

    UNCONSTRAINED = _Unconstrained()

    def __new__(cls, *dims: str | tuple[str, ...] | _Unconstrained | None) -> PartitionSpec:
        normal = [d[0] if isinstance(d, tuple) and len(d) == 1 else None if d == () else d for d in dims]
        for dim in normal:
            names = dim if isinstance(dim, tuple) else (dim,)
            if not all(isinstance(n, str) or n is None or isinstance(n, _Unconstrained) for n in names):
                raise ShardingError(
                    f"P{dims!r} holds {dim!r}", fix="name mesh axes: strings, tuples of strings, or None"
                )
        while normal and normal[-1] is None:
            normal.pop()
        return super().__new__(cls, normal)

    def __repr__(self) -> str:
        return f"P({', '.join(map(repr, self))})"

    def __reduce__(self) -> Any:
        return (PartitionSpec, tuple(self))


P = PartitionSpec


def spec_layout(
    spec: PartitionSpec, shape: Sequence[int], mesh: Mesh, path: str, current: Layout | None = None
) -> Layout:
    """The layout of a spec for a tensor of `shape`; unconstrained dims stay as in `current`.

    Raises:
      ShardingError: an unknown mesh axis, an axis used twice, or a spec longer than the rank.
    """
    if len(spec) > len(shape):
        raise ShardingError(
            f"{path}: {spec} names {len(spec)} dims, the tensor {list(shape)} has {len(shape)}",
            fix=f"give at most {len(shape)} entries",
        )
    dims: list[tuple[Factor, ...]] = []
    for i, size in enumerate(shape):
        entry = spec[i] if i < len(spec) else None
        if isinstance(entry, _Unconstrained):
            dims.append(current.dims[i] if current else (Factor(size),))
            continue
        names = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
        dims.append((Factor(size, tuple(axis for name in names for axis in named_axes(name, mesh, path))),))
    layout = Layout.of(dims)
    check_axes_once(layout, path)
    return layout


def named_axes(name: str, mesh: Mesh, path: str) -> tuple[Axis, ...]:
    """The axis that `name` names in a mesh."""
    if name.split(":")[0] not in mesh.names:
        raise ShardingError(
            f"{path}: the mesh {mesh} has no axis {name!r}",
            fix=f"use one of its axes {', '.join(mesh.names)}{hint(name, mesh.names)}",
        )
    return (mesh.axis(name),)


def hint(name: str, known: Iterable[str]) -> str:
    """` (did you mean ...?)` or nothing."""
    text = did_you_mean(name, list(known))
    return f" ({text})" if text.startswith("did") else ""


def check_axes_once(layout: Layout, path: str) -> None:
    axes = list(layout.sharded_axes)
    twice = {b.name for i, b in enumerate(axes) if not all(a.independent(b) for a in axes[:i])}
    if twice:
        raise ShardingError(
            f"{path}: the axis {', '.join(sorted(twice))} shards two dims of one tensor, {typed(None, layout)}",
            fix="give each mesh axis to at most one dim: map one of the logical names to another axis or to None",
        )


@dataclass(frozen=True)
class NamedSharding:
    """A layout on a mesh: `NamedSharding(mesh, P("dp", None))`."""

    mesh: Mesh
    spec: PartitionSpec

    def layout(self, shape: Sequence[int], path: str = "array") -> Layout:
        return spec_layout(self.spec, shape, self.mesh, path)


@dataclass(frozen=True)
class LayoutSharding:
    """A layout that no PartitionSpec can write (factored dims, sub-axes), on a mesh."""

    mesh: Mesh
    fixed: Layout

    def layout(self, shape: Sequence[int], path: str = "array") -> Layout:
        return self.fixed

    def __repr__(self) -> str:
        return f"LayoutSharding({typed(None, self.fixed)})"


Sharding = NamedSharding | LayoutSharding


def sharding_of(layout: Layout, mesh: Mesh) -> Sharding:
    """The NamedSharding of a layout where a PartitionSpec can write it."""
    spec: list[Any] = []
    for dim in layout.dims:
        if len(dim) != 1 or not all(axis.whole for axis in dim[0].axes):
            return LayoutSharding(mesh, layout)
        names = tuple(axis.name for axis in dim[0].axes)
        spec.append(names if len(names) > 1 else names[0] if names else None)
    return NamedSharding(mesh, PartitionSpec(*spec))


def warn(message: str, fix: str) -> None:
    """A listed warning, with the fix in it."""
    warnings.warn(f"{message}\nFix: {fix}", FparallelWarning, stacklevel=3)
