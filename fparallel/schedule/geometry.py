"""What a collective does to one tensor, as shapes: the blocks a rank sends, and how it joins what it gets.

A (local) tensor is viewed as (A, n, B), row-major: B elements inside the factor that the collective works on,
A outside it. The members of a group are ordered as `Mesh.group(axes, coords)` lists them: by their digits,
the last axis fastest. Pieces may be uneven or empty; every shape here is exact, without padding.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fparallel.factors import Factor, align, axis_atoms, chunk_sizes, piece, refine_axes, split_factor
from fparallel.layout import COMBINE, Layout, identity, typed
from fparallel.mesh import Axis, Mesh, axes_text
from fparallel.schedule.local_ops import narrow
from fparallel.schedule.segment import Narrowing

Coords = Mapping[str, int]
View = tuple[int, tuple[int, ...], int]


@dataclass(frozen=True)
class AllToAll:
    """The blocks of one rank in an all_to_all.

    Attributes:
      split: (A, sizes, B) of the input: its block for member j is [:, sizes[:j] ... + sizes[j], :].
      concat: (A, sizes, B) of the output: what member j sent is [:, sizes[:j] ... + sizes[j], :].
    """

    split: View
    concat: View

    def send_shape(self, member: int) -> tuple[int, int, int]:
        outer, sizes, inner = self.split
        return outer, sizes[member], inner

    def recv_shape(self, member: int) -> tuple[int, int, int]:
        """The shape in which to join the block of `member`; its elements stay in the order of sending."""
        outer, sizes, inner = self.concat
        return outer, sizes[member], inner


# ---------------------------------------------------------------- axes of a factor


def find_axes(axes: Sequence[Axis], part: Sequence[Axis]) -> int | None:
    """The position of `part` as a contiguous piece of `axes`."""
    part, count = tuple(part), len(part)
    starts = range(len(axes) - count + 1)
    return next((i for i in starts if tuple(axes[i : i + count]) == part), None)


def _locate(layout: Layout, axes: tuple[Axis, ...]) -> tuple[int, list[Factor], int]:
    """(dim, its factors, position of the one whose axes end with `axes`), after splitting a factor if needed.

    A factor that is fully sharded is written together with the next one, so `axes` may stand in the middle of
    a list: 8@dp*tp is (2@dp 4@tp), and gathering dp from it leaves (2 4@tp).
    """
    for d, dim in enumerate(layout.dims):
        for i, factor in enumerate(dim):
            atoms = axis_atoms(factor.axes, axes)
            held = refine_axes(factor.size, factor.axes, atoms)
            wanted = refine_axes(0, axes, atoms)
            at = find_axes(held, wanted)
            if at is None:
                continue
            end = at + len(wanted)
            parts: tuple[Factor, ...] | None = (Factor(factor.size, held),)
            if end < len(held):
                rest = chunk_sizes(factor.size, held[:end])[0]
                parts = None
                if factor.size % rest == 0:
                    parts = split_factor(Factor(factor.size, held), factor.size // rest)
            if parts is not None and find_axes(parts[0].axes, wanted) == len(parts[0].axes) - len(wanted):
                return d, [*dim[:i], *parts, *dim[i + 1 :]], i
    raise AssertionError(f"no factor of {typed(None, layout)} ends with the axes {axes_text(axes)}")


def _view(layout: Layout, axes: tuple[Axis, ...], coords: Coords) -> View:
    dim, factors, at = _locate(layout, axes)
    wanted = len(refine_axes(0, axes, axis_atoms(factors[at].axes, axes)))
    split = len(factors[at].axes) - wanted
    major, minor = factors[at].axes[:split], factors[at].axes[split:]
    local = layout.local_shape(coords)
    outer = math.prod(local[:dim]) * math.prod(f.piece(coords)[1] for f in factors[:at])
    inner = math.prod(f.piece(coords)[1] for f in factors[at + 1 :]) * math.prod(local[dim + 1 :])
    return outer, chunk_sizes(piece(factors[at].size, major, coords)[1], minor), inner


# ---------------------------------------------------------------- the three shapes


def gather_geometry(in_layout: Layout, axes: tuple[Axis, ...], coords: Coords) -> View:
    """How an all_gather joins shards on the rank at `coords`.

    Member j's shard is viewed as (A, sizes[j], B); the result, viewed as (A, sum(sizes), B), is their
    concatenation along the middle in group order.
    """
    return _view(in_layout, tuple(axes), coords)


def scatter_geometry(out_layout: Layout, axes: tuple[Axis, ...], coords: Coords) -> View:
    """How a reduce_scatter cuts the input of the rank at `coords`.

    The input is viewed as (A, sum(sizes), B); member j gets the reduction of the piece of sizes[j] at its
    place.
    """
    return _view(out_layout, tuple(axes), coords)


def all_to_all_geometry(
    in_layout: Layout, out_layout: Layout, axes: tuple[Axis, ...], coords: Coords
) -> AllToAll:
    """How an all_to_all moves `axes` from the end of one factor's axes to the end of another's.

    The block that goes to member j has j's piece of the factor that becomes sharded, and this rank's piece of
    the factor that becomes whole.
    """
    axes = tuple(axes)
    before: list[int] = []
    after: list[int] = []
    split = concat = -1
    split_axes: tuple[Axis, ...] = ()
    concat_axes: tuple[Axis, ...] = ()
    for a, b in zip(in_layout.dims, out_layout.dims, strict=True):
        pair = align(a, b)
        if pair is None:
            raise AssertionError(f"all_to_all from {in_layout} to {out_layout}: a dim has no common factors")
        for x, y in zip(*pair, strict=True):
            atoms = axis_atoms(x.axes, y.axes, axes)
            old, new = refine_axes(x.size, x.axes, atoms), refine_axes(y.size, y.axes, atoms)
            moved = refine_axes(0, axes, atoms)
            if old == new + moved:
                concat, concat_axes = len(before), old[len(new) :]
            elif new == old + moved:
                split, split_axes = len(before), new[len(old) :]
            before.append(x.piece(coords)[1])
            after.append(y.piece(coords)[1])
    if split < 0 or concat < 0:
        raise AssertionError(f"no all_to_all over {axes_text(axes)} leads from {in_layout} to {out_layout}")

    def view(local: list[int], at: int, over: tuple[Axis, ...]) -> View:
        return math.prod(local[:at]), chunk_sizes(local[at], over), math.prod(local[at + 1 :])

    return AllToAll(view(before, split, split_axes), view(after, concat, concat_axes))


def member_coords(axes: Sequence[Axis], coords: Coords) -> list[dict[str, int]]:
    """The coordinates of the members of the group of `coords` along `axes`, in group order."""
    result = []
    for digits in itertools.product(*(range(axis.size) for axis in axes)):
        at = dict(coords)
        for axis, digit in zip(axes, digits, strict=True):
            at[axis.name] += (digit - axis.digit(at)) * (axis.total // (axis.pre * axis.size))
        result.append(at)
    return result


def permute_sources(
    in_layout: Layout, out_layout: Layout, axes: tuple[Axis, ...], coords: Coords
) -> tuple[int, ...] | None:
    """For each member of the group the member whose shard it takes (maybe its own), by position in the group.

    Every shard is taken exactly once: the result is a permutation, the same on every member. None if there is
    none.
    """
    members = member_coords(axes, coords)
    has: list[tuple[tuple[int, int], ...]] = [()] * len(members)
    needs: list[tuple[tuple[int, int], ...]] = [()] * len(members)
    for a, b in zip(in_layout.dims, out_layout.dims, strict=True):
        pair = align(a, b)
        if pair is None:
            return None
        for x, y in zip(*pair, strict=True):
            has = [(*part, x.piece(at)) for part, at in zip(has, members, strict=True)]
            needs = [(*part, y.piece(at)) for part, at in zip(needs, members, strict=True)]
    holders: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for j, part in enumerate(has):
        if part != needs[j]:
            holders.setdefault(part, []).append(j)
    sources = []
    for j, part in enumerate(needs):
        if has[j] == part:
            sources.append(j)
        elif holders.get(part):
            sources.append(holders[part].pop(0))
        else:
            return None
    return tuple(sources)


# ---------------------------------------------------------------- reference


@functools.lru_cache(maxsize=4096)
def _groups(axes: tuple[Axis, ...], mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    return tuple(mesh.group(axes, coords) for coords in mesh.rank_coords)


@functools.lru_cache(maxsize=4096)
def _views(layout: Layout, axes: tuple[Axis, ...], mesh: Mesh) -> tuple[View, ...]:
    return tuple(_view(layout, axes, coords) for coords in mesh.rank_coords)


@functools.lru_cache(maxsize=4096)
def _exchanges(src: Layout, dst: Layout, axes: tuple[Axis, ...], mesh: Mesh) -> tuple[AllToAll, ...]:
    return tuple(all_to_all_geometry(src, dst, axes, coords) for coords in mesh.rank_coords)


@functools.lru_cache(maxsize=4096)
def _sources(src: Layout, dst: Layout, axes: tuple[Axis, ...], mesh: Mesh) -> tuple[int, ...]:
    """The rank whose shard each rank takes in a permute."""
    result = []
    for rank, coords in enumerate(mesh.rank_coords):
        sources, group = permute_sources(src, dst, axes, coords), _groups(axes, mesh)[rank]
        if sources is None:
            raise AssertionError(f"{dst} is no permutation of the shards of {src}")
        result.append(group[sources[group.index(rank)]])
    return tuple(result)


def apply(
    kind: str,
    axes: Sequence[Axis],
    reduce: str,
    in_layout: Layout,
    out_layout: Layout,
    mesh: Mesh,
    shards: Sequence[Tensor],
) -> list[Tensor]:
    """Runs one collective (or the local steps `slice` and `mask`) on the shards of all ranks of the mesh.

    Reductions add in absolute rank order. The results share no storage with each other or with the inputs.

    Args:
      reduce: "sum", "max" or "min" where the step reduces or masks.
      shards: one tensor per rank, of shape in_layout.local_shape(coords of the rank).

    Returns:
      One tensor per rank, of shape out_layout.local_shape(coords of the rank).
    """
    axes = tuple(axes)
    groups, coords = _groups(axes, mesh), mesh.rank_coords
    if kind == "all_gather":
        views = _views(in_layout, axes, mesh)
        results = [_gather(views[r], [shards[i] for i in groups[r]]) for r in range(mesh.size)]
    elif kind == "reduce_scatter":
        views, sums = _views(out_layout, axes, mesh), _sums(groups, reduce, shards)
        results = [_part(views[r], sums[r], groups[r].index(r)).clone() for r in range(mesh.size)]
    elif kind == "all_reduce":
        results = [total.clone() for total in _sums(groups, reduce, shards)]
    elif kind == "all_to_all":
        moves = _exchanges(in_layout, out_layout, axes, mesh)
        results = [_exchange(moves, groups[r], r, shards) for r in range(mesh.size)]
    elif kind == "permute":
        results = [shards[i].clone() for i in _sources(in_layout, out_layout, axes, mesh)]
    elif kind == "slice":
        how = Narrowing(in_layout, out_layout)
        results = [narrow(x, how.resolve(at)).clone() for x, at in zip(shards, coords, strict=True)]
    elif kind == "mask":
        results = [
            torch.full_like(x, identity(reduce, x.dtype)) if any(a.digit(at) for a in axes) else x.clone()
            for x, at in zip(shards, coords, strict=True)
        ]
    else:
        raise AssertionError(f"no collective {kind!r}")
    return [x.reshape(out_layout.local_shape(at)) for x, at in zip(results, coords, strict=True)]


def _gather(view: View, shards: list[Tensor]) -> Tensor:
    outer, sizes, inner = view
    return torch.cat([x.reshape(outer, n, inner) for x, n in zip(shards, sizes, strict=True)], dim=1)


def _part(view: View, x: Tensor, member: int) -> Tensor:
    outer, sizes, inner = view
    return x.reshape(outer, sum(sizes), inner).narrow(1, sum(sizes[:member]), sizes[member])


def _exchange(
    moves: tuple[AllToAll, ...], group: tuple[int, ...], rank: int, shards: Sequence[Tensor]
) -> Tensor:
    me = group.index(rank)
    blocks = [_part(moves[r].split, shards[r], me) for r in group]
    return torch.cat([x.reshape(moves[rank].recv_shape(j)) for j, x in enumerate(blocks)], dim=1)


def _sums(groups: tuple[tuple[int, ...], ...], reduce: str, shards: Sequence[Tensor]) -> list[Tensor]:
    """The reduction over the group of each rank, in ascending rank."""
    combine, totals = COMBINE[reduce], {}
    for group in groups:
        ranks = tuple(sorted(group))
        if ranks not in totals:
            totals[ranks] = functools.reduce(combine, (shards[r] for r in ranks))
    return [totals[tuple(sorted(group))] for group in groups]
