"""The factors of one dim, and the mesh axes that shard them.

A dim is a chain of factors, major first; several axes on one factor split it nested, in order, each in ceil chunks
of the current piece. Different chains may say the same: here they are normalised, compared and regrouped.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from fparallel._compat import cached_property
from fparallel.mesh import Axis

Coords = Mapping[str, int]


@dataclass(frozen=True)
class Factor:
    """A factor of a dim: its size and the axes that shard it, major first."""

    size: int
    axes: tuple[Axis, ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.size, self.axes))

    def __reduce__(self) -> tuple:
        return Factor, (self.size, self.axes)

    @cached_property
    def num_shards(self) -> int:
        return math.prod(axis.size for axis in self.axes)

    def piece(self, coords: Coords) -> tuple[int, int]:
        """(start, length) of the interval that the rank at `coords` holds."""
        return piece(self.size, self.axes, coords)

    def __str__(self) -> str:
        axes = "*".join(map(str, compact(self.size, self.axes)))
        return f"{self.size}@{axes}" if axes else str(self.size)


Dim = tuple[Factor, ...]


def piece(size: int, axes: Sequence[Axis], coords: Coords) -> tuple[int, int]:
    """(start, length) of what nested ceil chunks of range(size) over `axes` give the rank at `coords`."""
    start, length = 0, size
    for axis in axes:
        chunk = -(-length // axis.size)
        offset = min(axis.digit(coords) * chunk, length)
        start, length = start + offset, min(chunk, length - offset)
    return start, length


def chunk_sizes(length: int, axes: Sequence[Axis]) -> tuple[int, ...]:
    """The lengths of all pieces of a piece of `length` split over `axes`, in group order."""
    sizes = [length]
    for axis in axes:
        split = []
        for size in sizes:
            chunk = -(-size // axis.size)
            split += [max(0, min(chunk, size - i * chunk)) for i in range(axis.size)]
        sizes = split
    return tuple(sizes)


def compact(size: int, axes: Sequence[Axis]) -> tuple[Axis, ...]:
    """`axes` with neighbouring digits of one axis joined where that keeps every piece of range(size).

    8@tp:(1)2*tp:(2)2 is 8@tp, with pieces of 2; but 5@tp:(1)2*tp:(2)2 has pieces of 2, 1, 1, 1 and 5@tp of 2,
    2, 1, 0.
    """
    merged: list[Axis] = []
    for axis in axes:
        last = merged[-1] if merged else None
        if last and last.name == axis.name and last.pre * last.size == axis.pre:
            joined = [*merged[:-1], Axis(last.name, last.size * axis.size, last.pre, last.total)]
            if chunk_sizes(size, joined) == chunk_sizes(size, [*merged, axis]):
                merged = joined
                continue
        merged.append(axis)
    return tuple(merged)


def axis_atoms(*lists: Sequence[Axis]) -> dict[str, tuple[Axis, ...]]:
    """Per axis name its digits, cut at every sub-axis boundary; names whose cuts do not nest are left out."""
    cuts: dict[str, set[int]] = {}
    totals: dict[str, int] = {}
    for axis in itertools.chain(*lists):
        cuts.setdefault(axis.name, {1, axis.total}).update((axis.pre, axis.pre * axis.size))
        totals[axis.name] = axis.total
    atoms = {}
    for name, bounds in cuts.items():
        chain = sorted(bounds)
        if len(chain) > 2 and not any(high % low for low, high in itertools.pairwise(chain)):
            total = totals[name]
            digits = itertools.pairwise(chain)
            atoms[name] = tuple(Axis(name, high // low, low, total) for low, high in digits)
    return atoms


def atoms_of(axis: Axis, atoms: Mapping[str, tuple[Axis, ...]]) -> tuple[Axis, ...]:
    """The sub-axes of `atoms` that make up `axis`."""
    last = axis.pre * axis.size
    parts = tuple(a for a in atoms.get(axis.name, (axis,)) if a.pre >= axis.pre and a.pre * a.size <= last)
    return parts if math.prod(a.size for a in parts) == axis.size else (axis,)


def refine_axes(size: int, axes: Sequence[Axis], atoms: Mapping[str, tuple[Axis, ...]]) -> tuple[Axis, ...]:
    """`axes` written as the sub-axes in `atoms`, except where that would change the pieces of range(size)."""
    result: tuple[Axis, ...] = ()
    for axis in axes:
        parts = atoms_of(axis, atoms)
        keeps = len(parts) == 1 or chunk_sizes(size, result + parts) == chunk_sizes(size, (*result, axis))
        result += parts if keeps else (axis,)
    return result


def normal_dim(factors: Iterable[Factor]) -> Dim:
    """The shortest chain of factors with the same index sets.

    An empty dim is one factor of 0. What shards factors of 1 (one rank has it, the others have nothing) says
    the same anywhere in the chain, and stands first.
    """
    ones: tuple[Axis, ...] = ()
    result: list[Factor] = []
    for factor in factors:
        if factor.size == 0:
            return (Factor(0),)
        axes = tuple(axis for axis in factor.axes if axis.size > 1)
        factor = Factor(factor.size, axes)
        if factor.size == 1:
            ones += axes
            continue
        if result and _joins(result[-1], factor):
            result[-1] = Factor(result[-1].size * factor.size, result[-1].axes + axes)
        else:
            result.append(factor)
    if ones:
        result.insert(0, Factor(1, ones))
    return tuple(result) or (Factor(1),)


def _joins(a: Factor, b: Factor) -> bool:
    """Whether (a b) has the index sets of the one factor that has the axes of both."""
    shards = a.num_shards
    if not b.axes and a.size % shards == 0:
        return True
    if b.axes and not a.axes:
        return False
    if a.size == shards:
        return True
    held = chunk_sizes(a.size, a.axes)
    if b.axes and max(held) > 1:
        return False
    return chunk_sizes(a.size * b.size, a.axes) == tuple(n * b.size for n in held)


def dim_runs(dim: Dim, coords: Coords) -> tuple[tuple[int, int, int], ...]:
    """The (start, count, stride) of each factor: index = sum((start + j) * stride), j < count."""
    stride, runs = 1, []
    for factor in reversed(dim):
        start, count = factor.piece(coords)
        runs.append((start, count, stride))
        stride *= factor.size
    return tuple(reversed(runs))


def dim_indices(dim: Dim, coords: Coords) -> torch.Tensor:
    """The global indices that the rank at `coords` holds of a dim, int64, in local order."""
    index = torch.zeros(1, dtype=torch.int64)
    for start, count, stride in dim_runs(dim, coords):
        step = (torch.arange(count) + start) * stride
        index = (index[:, None] + step[None, :]).reshape(-1)
    return index


# ---------------------------------------------------------------- equality and regrouping


def same_dim(a: Dim, b: Dim) -> bool:
    """Whether two dims give every rank the same indices."""
    if a == b:
        return True
    total = math.prod(f.size for f in a)
    if total != math.prod(f.size for f in b):
        return False
    if total == 0:
        return True
    totals = {axis.name: axis.total for f in a + b for axis in f.axes}
    digits = itertools.product(*map(range, totals.values()))
    ranks = (dict(zip(totals, at, strict=True)) for at in digits)
    pair = align(a, b)
    if pair is None:
        return all(torch.equal(dim_indices(a, coords), dim_indices(b, coords)) for coords in ranks)
    if all(compact(x.size, x.axes) == compact(y.size, y.axes) for x, y in zip(*pair, strict=True)):
        return True
    if all(f.size % f.num_shards == 0 for f in pair[0] + pair[1]):
        return False  # without empty or uneven pieces, other axes give other starts
    for coords in ranks:
        old, new = [f.piece(coords) for f in pair[0]], [f.piece(coords) for f in pair[1]]
        if old != new and (all(n for _, n in old) or all(n for _, n in new)):
            return False
    return True


def common_refinement(*chains: Sequence[int]) -> tuple[int, ...] | None:
    """The coarsest chain of factors that refines all of `chains` (equal products), or None.

    (6, 4) and (3, 8) give (3, 2, 4); (4, 6) and (3, 8) have none.
    """
    total = math.prod(chains[0])
    if total == 0:
        return tuple(chains[0]) if all(tuple(c) == tuple(chains[0]) for c in chains) else None
    bounds = {1, total}
    for chain in chains:
        product = 1
        for size in reversed(chain):
            product *= size
            bounds.add(product)
    ordered = sorted(bounds)
    if any(high % low for low, high in itertools.pairwise(ordered)):
        return None
    return tuple(high // low for low, high in reversed(list(itertools.pairwise(ordered))))


def align(a: Dim, b: Dim) -> tuple[Dim, Dim] | None:
    """Two dims of one size over one common chain of factors, or None if their shards do not allow it.

    `8@dp` and `(2 4@tp)` are `(2@dp 4)` and `(2 4@tp)`.
    """
    a, b = normal_dim(a), normal_dim(b)
    if len(a) == len(b) and all(x.size == y.size for x, y in zip(a, b, strict=True)):
        return a, b
    chain = common_refinement([f.size for f in a], [f.size for f in b])
    if chain is None:
        return None
    atoms = axis_atoms(*(f.axes for f in a + b))
    if atoms:
        a, b = (tuple(Factor(f.size, refine_axes(f.size, f.axes, atoms)) for f in dim) for dim in (a, b))
    if a[0].size == 1 or b[0].size == 1:
        chain = (1, *chain)
    left, right = regroup(a, chain, cut_axes=True), regroup(b, chain, cut_axes=True)
    return None if left is None or right is None else (left, right)


def regroup(dim: Dim, sizes: Sequence[int], *, cut_axes: bool = False) -> Dim | None:
    """`dim` over exactly the factors `sizes` (of its product), or None if its shards do not allow it.

    With `cut_axes` an axis may be cut in sub-axes: for a tp of 4, 8@tp over (2, 4) is (2@tp:(1)2 4@tp:(2)2).
    """
    if not any(f.axes for f in dim):
        return tuple(Factor(size) for size in sizes)
    if math.prod(sizes) == 0:
        return None
    ones = tuple(axis for f in dim for axis in f.axes if f.size == 1)
    left = [f for f in dim if f.size != 1]
    result = []
    for size in sizes:
        if size == 1:
            result.append(Factor(1, ones))
            ones = ()
            continue
        parts: list[Factor] = []
        need = size
        while need > 1:
            if not left:
                return None
            head = left.pop(0)
            if need % head.size == 0:
                parts.append(head)
                need //= head.size
                continue
            split = split_factor(head, need, cut_axes=cut_axes)
            if split is None:
                return None
            parts.append(split[0])
            left.insert(0, split[1])
            need = 1
        merged = normal_dim(parts)
        if len(merged) != 1:
            return None
        result.append(merged[0])
    return None if left or ones else tuple(result)


def split_factor(factor: Factor, major: int, *, cut_axes: bool = False) -> tuple[Factor, Factor] | None:
    """A factor as (major, rest) with the same index sets, or None; `cut_axes` as in `regroup`."""
    if major == 0 or factor.size % major:
        return None
    rest, shards = factor.size // major, 1
    if major % factor.num_shards == 0:
        return Factor(major, factor.axes), Factor(rest)
    for i, axis in enumerate(factor.axes):
        part, left_over = divmod(major, shards)
        shards *= axis.size
        divides = 1 < part < axis.size and not (left_over or axis.size % part or factor.size % shards)
        if cut_axes and divides:
            high = Axis(axis.name, part, axis.pre, axis.total)
            low = Axis(axis.name, axis.size // part, axis.pre * part, axis.total)
            before, after = factor.axes[:i], factor.axes[i + 1 :]
            return Factor(major, (*before, high)), Factor(rest, (low, *after))
        outer, inner = Factor(major, factor.axes[: i + 1]), Factor(rest, factor.axes[i + 1 :])
        if shards == major:
            return outer, inner
        if factor.size % shards and _joins(outer, inner):
            return outer, inner
    return None
