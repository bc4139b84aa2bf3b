"""Which layouts a collective may lead from and to.

| kind | the output's layout is the input's, but |
|---|---|
| all_gather | one factor's axes have lost `axes` from their end |
| reduce_scatter | `axes` are no longer unreduced, and end one factor's axes |
| all_reduce | `axes` are no longer unreduced |
| all_to_all | `axes` have moved from the end of one factor's axes to the end of another's |
| permute | some of `axes` on factors are replaced by others of `axes`, with equal pieces |
| permute with sources | nothing has changed; all pieces are equal |

Layouts are compared over common factors and digits of axes. Where a factor is uneven, different axes can
give equal pieces (1@dp*tp and 1@tp*dp); then what counts is that the members hold what each of them needs.
"""

from __future__ import annotations

import functools
import itertools
import math

from fparallel.factors import Factor, align, atoms_of, refine_axes
from fparallel.layout import Layout, same
from fparallel.mesh import Axis, axes_text
from fparallel.schedule.geometry import axis_atoms, member_coords
from fparallel.schedule.ir import REDUCING

Pair = tuple[int, Factor, Factor]


@functools.lru_cache(maxsize=65536)
def fault(
    kind: str, axes: tuple[Axis, ...], reduce: str, src: Layout, dst: Layout, sources: tuple[int, ...] = ()
) -> str | None:
    """What is wrong with a collective from `src` to `dst`; None if it is legal."""
    if sources:
        return _sources_fault(kind, axes, src, dst, sources)
    if (kind in REDUCING) != bool(reduce):
        return f"wrong reduce op: {kind} with the reduction {reduce!r}"
    if src.shape != dst.shape:
        return f"wrong shape: the global shape is {list(src.shape)} before and {list(dst.shape)} after"
    atoms = axis_atoms(src.sharded_axes, src.unreduced_axes, dst.sharded_axes, dst.unreduced_axes, axes)
    moved = tuple(part for axis in axes if axis.size > 1 for part in atoms_of(axis, atoms))
    if len(set(moved)) != len(moved):
        return f"wrong axes: {axes_text(axes)} names an axis twice"
    pending = _unreduced_fault(kind, moved, reduce, src, dst, atoms)
    if pending:
        return pending
    pairs: list[Pair] = []
    for dim, (a, b) in enumerate(zip(src.dims, dst.dims, strict=True)):
        aligned = align(a, b)
        if aligned is None:
            return f"wrong axes: dim {dim} has no common factors before and after"
        pairs += [(dim, x, y) for x, y in zip(*aligned, strict=True)]
    before = [refine_axes(x.size, x.axes, atoms) for _, x, _ in pairs]
    after = [refine_axes(y.size, y.axes, atoms) for _, _, y in pairs]
    changed = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    if _structure(kind, moved, pairs, before, after, changed):
        return None
    uneven = any(f.size % f.num_shards for _, x, y in pairs for f in (x, y))
    if uneven and _same_axes(kind, moved, src, dst, atoms) and _covered(kind, axes, pairs):
        return None
    return f"wrong axes: {kind}[{axes_text(axes)}] does not lead from {src} to {dst}"


def _sources_fault(
    kind: str, axes: tuple[Axis, ...], src: Layout, dst: Layout, sources: tuple[int, ...]
) -> str | None:
    size = math.prod(axis.size for axis in axes)
    taken = [source for source in sources if source != -1]
    if kind != "permute":
        return f"wrong sources: {kind} takes none"
    if len(sources) != size or len(set(taken)) != len(taken) or not set(taken) <= set(range(size)):
        return f"wrong sources: {list(sources)} for {size} members"
    if not same(src, dst):
        return f"wrong axes: a permute with sources does not lead from {src} to {dst}"
    if any(f.size % f.num_shards for dim in src.dims for f in dim):
        return f"wrong shape: a permute with sources of uneven shards, {src}"
    return None


def _unreduced_fault(
    kind: str,
    moved: tuple[Axis, ...],
    reduce: str,
    src: Layout,
    dst: Layout,
    atoms: dict[str, tuple[Axis, ...]],
) -> str | None:
    old, new = (
        {part: r for axis, r in layout.unreduced for part in atoms_of(axis, atoms)} for layout in (src, dst)
    )
    if kind not in REDUCING:
        return None if old == new else f"wrong axes: {kind} does not change what is unreduced, {src} -> {dst}"
    if any(axis not in old for axis in moved) or not moved:
        return f"wrong axes: {src} is not unreduced over {axes_text(moved)}"
    if any(old[axis] != reduce for axis in moved):
        return f"wrong reduce op: {reduce} of {src}"
    if {axis: r for axis, r in old.items() if axis not in moved} != new:
        return f"wrong axes: {kind}[{axes_text(moved)}] of {src} does not leave {dst} to be reduced"
    return None


def _structure(
    kind: str,
    moved: tuple[Axis, ...],
    pairs: list[Pair],
    before: list[tuple[Axis, ...]],
    after: list[tuple[Axis, ...]],
    changed: list[int],
) -> bool:
    """Whether exactly the axes that the kind changes have changed."""
    if kind == "all_reduce":
        return not changed
    if kind == "all_gather":
        return [before[i] for i in changed] == [after[i] + moved for i in changed] and len(changed) == bool(
            moved
        )
    if kind == "reduce_scatter":
        return [after[i] for i in changed] == [before[i] + moved for i in changed] and len(changed) == 1
    if kind == "all_to_all":
        lost = [i for i in changed if before[i] == after[i] + moved]
        gained = [i for i in changed if after[i] == before[i] + moved]
        return len(changed) == 2 and len(lost) == len(gained) == 1
    for i in changed:
        size, old, new = pairs[i][1].size, before[i], after[i]
        shards = math.prod(axis.size for axis in old)
        if shards != math.prod(axis.size for axis in new) or size % shards:
            return False
        prefix = _common(old, new)
        suffix = _common(old[prefix:][::-1], new[prefix:][::-1])
        exchanged = old[prefix : len(old) - suffix] + new[prefix : len(new) - suffix]
        if not set(exchanged) <= set(moved):
            return False
    return bool(changed)


def _common(a: tuple[Axis, ...], b: tuple[Axis, ...]) -> int:
    """The length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _same_axes(
    kind: str, moved: tuple[Axis, ...], src: Layout, dst: Layout, atoms: dict[str, tuple[Axis, ...]]
) -> bool:
    """Whether the axes on factors are those that the kind leaves, in whatever order and place."""
    old, new = ({p for a in layout.sharded_axes for p in atoms_of(a, atoms)} for layout in (src, dst))
    if kind == "all_gather":
        return old == new | set(moved) and not new & set(moved)
    if kind == "reduce_scatter":
        return new == old | set(moved) and not old & set(moved)
    if kind == "permute":
        return (old ^ new) <= set(moved)
    return old == new and (kind == "all_reduce" or set(moved) <= old)


def _covered(kind: str, axes: tuple[Axis, ...], pairs: list[Pair]) -> bool:
    """Whether the members of every group hold what each of them needs (all of it, if it is to be reduced)."""
    totals = {axis.name: axis.total for axis in axes}
    totals |= {axis.name: axis.total for _, x, y in pairs for axis in x.axes + y.axes}
    for digits in itertools.product(*(range(total) for total in totals.values())):
        coords = dict(zip(totals, digits, strict=True))
        need = [y.piece(coords) for _, _, y in pairs]
        found = set()
        for member in member_coords(axes, coords):
            part = []
            for (start, length), (_, x, _) in zip(need, pairs, strict=True):
                low, count = x.piece(member)
                first, last = max(start, low), min(start + length, low + count)
                part.append((first, max(0, last - first)))
            found.add(tuple(part))
        sizes = [math.prod(length for _, length in part) for part in found]
        whole = math.prod(length for _, length in need)
        if kind in REDUCING and any(size != whole for size in sizes):
            return False
        if sum(sizes) < whole:
            return False
    return True
