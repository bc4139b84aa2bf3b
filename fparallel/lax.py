"""Collectives for functions under `fp.shard_map`, written for one rank's shards: JAX's `jax.lax`, with its meaning.

`axis_name` is a mesh axis or a tuple of mesh axes, of which the last varies fastest. All of them can be
differentiated: where a tensor that is equal on all ranks of an axis meets one that is not, its cotangents are summed
over the axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fparallel import tree
from fparallel.errors import ShardingError
from fparallel.region import (
    ALL_GATHER,
    ALL_TO_ALL,
    PPERMUTE,
    PSUM,
    PSUM_SCATTER,
    Region,
    Step,
    axes_of,
    run_step,
)

__all__ = [
    "all_gather",
    "all_to_all",
    "axis_index",
    "axis_size",
    "pmean",
    "ppermute",
    "psum",
    "psum_scatter",
    "pvary",
]

AxisName = str | Sequence[str]


def psum(x: Any, axis_name: AxisName) -> Any:
    """The sum over the ranks along the axes, on each of them; of a tensor or every leaf of a tree.

    A Python number counts once for each rank; bools are counted as int64.
    """
    region, axes = axes_of("psum", axis_name)

    def total(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf * region.size(axes)
        leaf = leaf.to(torch.int64) if leaf.dtype == torch.bool else leaf
        return run_step(region, Step(PSUM, axes), leaf)

    return tree.map(total, x)


def pmean(x: Any, axis_name: AxisName) -> Any:
    """The mean over the ranks along the axes, on each of them; of a tensor or every leaf of a tree."""
    size = axis_size(axis_name)
    return tree.map(lambda total: total / size, psum(x, axis_name))


def pvary(x: Any, axis_name: AxisName) -> Any:
    """The same value, from here on one that may differ between ranks: its cotangents are summed over the axes.

    Where tensors that differ and ones that do not meet in an op, this happens by itself.
    """
    region, axes = axes_of("pvary", axis_name)
    return tree.map(lambda leaf: region.enter(leaf, axes) if isinstance(leaf, Tensor) else leaf, x)


def all_gather(x: Any, axis_name: AxisName, axis: int = 0, tiled: bool = False) -> Any:
    """The tensors of all ranks along the axes, on each of them: stacked along a new dim `axis` of that size.

    `tiled`: concatenated along the existing dim `axis` instead, `[n, ...]` to `[ranks * n, ...]`.
    """
    region, axes = axes_of("all_gather", axis_name)
    size = region.size(axes)

    def gather(leaf: Tensor) -> Tensor:
        dim = _dim("all_gather", region, leaf, axis, extra=not tiled)
        leaf = leaf if tiled else leaf.unsqueeze(dim)
        return run_step(region, Step(ALL_GATHER, axes, (size, dim)), leaf)

    return tree.map(gather, x)


def psum_scatter(x: Any, axis_name: AxisName, scatter_dimension: int = 0, tiled: bool = False) -> Any:
    """The sum over the ranks, of which each keeps its part along a dim; that dim, of one entry per rank, is dropped.

    `tiled`: the dim is cut into equal parts and stays, `[ranks * n, ...]` to `[n, ...]`.
    """
    region, axes = axes_of("psum_scatter", axis_name)
    size = region.size(axes)

    def scatter(leaf: Tensor) -> Tensor:
        dim = _dim("psum_scatter", region, leaf, scatter_dimension)
        _check_cut("psum_scatter", region, leaf, dim, size, tiled)
        made = run_step(region, Step(PSUM_SCATTER, axes, (size, dim)), leaf)
        return made if tiled else made.squeeze(dim)

    return tree.map(scatter, x)


def ppermute(x: Any, axis_name: AxisName, perm: Iterable[tuple[int, int]]) -> Any:
    """What each rank gets from another: `perm` is pairs (source, destination) of positions along the axes.

    A rank that is no destination gets zeros.
    """
    region, axes = axes_of("ppermute", axis_name)
    size = region.size(axes)
    sources = [-1] * size
    seen: set[int] = set()
    pairs = [(int(source), int(to)) for source, to in perm]
    for source, to in pairs:
        if not (0 <= source < size and 0 <= to < size) or source in seen or sources[to] >= 0:
            raise ShardingError(
                f"fp.lax.ppermute over {axis_name!r} of {size} ranks in {region.name}: {pairs}",
                fix=f"give pairs (source, destination) of 0..{size - 1}, each at most once a source and a destination",
            )
        seen.add(source)
        sources[to] = source
    step = Step(PPERMUTE, axes, tuple(sources))
    return tree.map(lambda leaf: run_step(region, step, leaf), x)


def all_to_all(x: Any, axis_name: AxisName, split_axis: int, concat_axis: int, tiled: bool = False) -> Any:
    """Rank i's part j along `split_axis` goes to rank j, which puts it at place i along `concat_axis`.

    The dim `split_axis`, of one entry per rank, is dropped, and a dim of that size put in at `concat_axis`. `tiled`:
    `split_axis` is cut into equal parts and `concat_axis` concatenated, and both dims stay.
    """
    region, axes = axes_of("all_to_all", axis_name)
    size = region.size(axes)

    def exchange(leaf: Tensor) -> Tensor:
        split = _dim("all_to_all", region, leaf, split_axis)
        concat = _dim("all_to_all", region, leaf, concat_axis)
        _check_cut("all_to_all", region, leaf, split, size, tiled)
        if tiled and split != concat:
            return run_step(region, Step(ALL_TO_ALL, axes, (size, split, concat)), leaf)
        if tiled:  # [.., size * n, ..] as [.., size, n, ..]
            shape = leaf.shape
            cut = leaf.reshape(*shape[:split], size, shape[split] // size, *shape[split + 1 :])
            return run_step(region, Step(ALL_TO_ALL, axes, (size, split, split + 1)), cut).reshape(shape)
        cut = leaf.movedim(split, 0).unsqueeze(1)
        made = run_step(region, Step(ALL_TO_ALL, axes, (size, 0, 1)), cut)
        return made.squeeze(0).movedim(0, concat)

    return tree.map(exchange, x)


def axis_index(axis_name: AxisName) -> Tensor:
    """The position of the rank along the axes, a 0-d int64 tensor."""
    region, axes = axes_of("axis_index", axis_name)
    return region.axis_index(axes)


def axis_size(axis_name: AxisName) -> int:
    """The number of ranks along the axes."""
    region, axes = axes_of("axis_size", axis_name)
    return region.size(axes)


def _dim(what: str, region: Region, x: Tensor, dim: int, *, extra: bool = False) -> int:
    ndim = x.dim() + extra
    if not -ndim <= dim < ndim:
        raise ShardingError(
            f"fp.lax.{what} along dim {dim} of a tensor of shape {list(x.shape)} in {region.name}",
            fix=f"use a dim of {-ndim}..{ndim - 1}" if ndim else "give it a dim: x[None], or tiled=False",
        )
    return dim % ndim


def _check_cut(what: str, region: Region, x: Tensor, dim: int, size: int, tiled: bool) -> None:
    if tiled and x.shape[dim] % size:
        below = x.shape[dim] // size * size
        near = f"{below} or {below + size}" if below else str(size)
        fix = f"make the dim {near} long"
    elif not tiled and x.shape[dim] != size:
        fix = f"make the dim {size} long, or use tiled=True to cut it into {size} parts"
    else:
        return
    raise ShardingError(
        f"fp.lax.{what} over {size} ranks cuts dim {dim} of a tensor of shape {list(x.shape)} in {region.name}",
        fix=fix,
    )
