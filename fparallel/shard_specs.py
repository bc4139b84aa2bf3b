"""Specs of whole tensors in `fp.shard_map`, and the shapes of their shards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fparallel.errors import ShardingError
from fparallel.layout import typed
from fparallel.mesh import Mesh
from fparallel.sharding import PartitionSpec, spec_layout

Dims = tuple[tuple[str, ...], ...]  # per dim the mesh axes that shard it, major first
Axes = frozenset[str]


def check_spec(spec: Any, shape: Sequence[int], mesh: Mesh, path: str) -> Dims:
    """Per dim of a tensor the axes that a spec names.

    Raises:
      ShardingError: it is no spec of whole axes for this rank and mesh.
    """
    if not isinstance(spec, PartitionSpec):
        raise ShardingError(f"{path}: {spec!r} is no spec", fix="give an fp.P of mesh axes: fp.P('dp', None)")
    named = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    names = [name for entry in named for name in entry if name is not None]
    if not all(isinstance(name, str) and ":" not in name for name in names):
        raise ShardingError(
            f"{path}: {spec} in fp.shard_map", fix="name whole mesh axes, or None for a dim that is not cut"
        )
    spec_layout(spec, shape, mesh, path)
    dims = [tuple(name for name in entry if name is not None) for entry in named]
    return (*dims, *[()] * (len(shape) - len(dims)))


def local_shape(shape: Sequence[int], dims: Dims, mesh: Mesh, path: str) -> list[int]:
    """The shape of one rank's shard.

    Raises:
      ShardingError: a dim does not divide evenly.
    """
    made = []
    for dim, (size, axes) in enumerate(zip(shape, dims, strict=True)):
        shards = math.prod(mesh.shape[axis] for axis in axes)
        if size % shards:
            below = size // shards * shards
            near = f"{below} or {below + shards}" if below else str(shards)
            layout = spec_layout(PartitionSpec(*dims), shape, mesh, path)
            raise ShardingError(
                f"{path}: {typed(None, layout)} has uneven shards, dim {dim} of {size} over {shards} ranks; a "
                "function under fp.shard_map has one shape on all ranks",
                fix=f"make dim {dim} {near} long (pad it), or do not shard it",
            )
        made.append(size // shards)
    return made


def global_shape(shape: Sequence[int], dims: Dims, mesh: Mesh) -> list[int]:
    """The shape of the whole, from that of one rank's shard."""
    return [n * math.prod(mesh.shape[axis] for axis in axes) for n, axes in zip(shape, dims, strict=True)]


def axes_in(dims: Dims) -> Axes:
    return frozenset(axis for entry in dims for axis in entry)
