"""What a collective moves: which part of each rank's tensor goes where, from the layouts alone.

Every collective is one pattern. Rank j wants its part under the output's layout, rank i holds its part under
the input's; both are products of intervals over the factors of the dims, so what i sends to j is the product
of the intersections: one `Cut` of i's tensor, one `Cut` of j's. A reducing collective adds what arrives, in
ascending rank.

    all_gather     i's whole shard         -> an interval of j's tensor
    reduce_scatter j's interval at i       -> j's whole shard, summed over i
    all_to_all     j's interval at i       -> i's interval at j
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fparallel._compat import cached_property
from fparallel.factors import Factor, align
from fparallel.layout import Layout
from fparallel.mesh import Axis, Mesh
from fparallel.schedule.ir import Collective, Schedule

COMBINE: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
CoordItems = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Cut:
    """A part of a local tensor: seen as `shape`, the intervals `cuts` of (dim, start, length)."""

    shape: tuple[int, ...]
    cuts: tuple[tuple[int, int, int], ...]
    numel: int

    def of(self, x: Tensor) -> Tensor:
        """The part, as a view of x where x allows it."""
        if not self.cuts:
            return x
        x = x.reshape(self.shape)
        for dim, start, length in self.cuts:
            x = x.narrow(dim, start, length)
        return x

    @cached_property
    def is_flat(self) -> bool:
        """Whether the part of a contiguous tensor is contiguous."""
        lead = min((dim for dim, _, _ in self.cuts), default=0)
        return len(self.cuts) <= 1 and math.prod(self.shape[:lead]) == 1


@dataclass(frozen=True)
class Move:
    """What one rank exchanges of one tensor.

    Attributes:
      sends: per member of the group, in its order, the part of this rank's input that it needs.
      recvs: per member, where what it sends lies in this rank's output.
    """

    sends: tuple[Cut | None, ...]
    recvs: tuple[Cut | None, ...]
    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]


@dataclass(frozen=True)
class Exchange:
    """One collective as one rank sees it.

    Attributes:
      members: the ranks of the group, ascending, this rank among them: the order of every sum.
      me: the position of this rank in `members`.
      kind, axes: of the collective.
      moves: per tensor of the bucket.
      signature: what all members must agree on.
    """

    members: tuple[int, ...]
    me: int
    kind: str
    axes: tuple[Axis, ...]
    moves: tuple[Move, ...]
    reduce: str
    dtype: torch.dtype
    signature: str


def exchange_of(instr: Collective, schedule: Schedule, rank: int) -> Exchange:
    """What `rank` exchanges in a collective of the schedule."""
    mesh = schedule.mesh
    members = tuple(sorted(mesh.group(instr.axes, mesh.coords(rank))))
    buffers = schedule.buffers
    if instr.sources:
        group = mesh.group(instr.axes, mesh.coords(rank))
        taken = tuple((group[source], group[to]) for to, source in enumerate(instr.sources) if source != -1)
        shapes = (buffers[name].layout.local_shape(mesh.coords(rank)) for name in instr.ins)
        moves = tuple(_pieces(shape, members, taken, rank) for shape in shapes)
    else:
        moves = tuple(
            _move(buffers[src].layout, buffers[dst].layout, bool(instr.reduce), mesh, members, rank)
            for src, dst in zip(instr.ins, instr.outs, strict=True)
        )
    axes = "*".join(map(str, instr.axes))
    tensors = "; ".join(f"{buffers[a]} -> {buffers[b]}" for a, b in zip(instr.ins, instr.outs, strict=True))
    sources = f"from {instr.sources} " if instr.sources else ""
    signature = f"{instr.kind}[{axes}] {instr.reduce} {sources}{tensors}"
    dtype = buffers[instr.outs[0]].dtype
    return Exchange(
        members, members.index(rank), instr.kind, instr.axes, moves, instr.reduce, dtype, signature
    )


def _pieces(
    shape: tuple[int, ...], members: tuple[int, ...], taken: tuple[tuple[int, int], ...], rank: int
) -> Move:
    """Whole tensors of one shape that move from rank to rank, by (from, to)."""
    numel = math.prod(shape)
    whole = Cut(shape, (), numel) if numel else None
    sends = tuple(whole if (rank, member) in taken else None for member in members)
    recvs = tuple(whole if (member, rank) in taken else None for member in members)
    return Move(sends, recvs, shape, shape)


@functools.lru_cache(maxsize=65536)
def _move(src: Layout, dst: Layout, reduces: bool, mesh: Mesh, members: tuple[int, ...], rank: int) -> Move:
    coords = [mesh.rank_coords[m] for m in members]
    mine = mesh.rank_coords[rank]
    sends = tuple(_sources(src, dst, reduces, coords, j)[members.index(rank)][0] for j in coords)
    recvs = tuple(pair[1] for pair in _sources(src, dst, reduces, coords, mine))
    return Move(sends, recvs, src.local_shape(mine), dst.local_shape(mine))


def _sources(
    src: Layout, dst: Layout, reduces: bool, coords: Sequence[dict[str, int]], to: dict[str, int]
) -> list[tuple[Cut | None, Cut | None]]:
    """Per member the (part of its input, part of the output) that the rank at `to` takes from it."""
    pairs: list[tuple[Cut | None, Cut | None]] = []
    own = _intersection(src, dst, tuple(to.items()), tuple(to.items()))
    taken = {own[1]} if own else set()
    for at in coords:
        pair = _intersection(src, dst, tuple(at.items()), tuple(to.items()))
        if pair is None or (not reduces and at != to and pair[1] in taken):
            pairs.append((None, None))  # nothing of it here, or a copy of what another member gives
            continue
        taken.add(pair[1])
        pairs.append(pair)
    return pairs


@functools.lru_cache(maxsize=65536)
def _factors(src: Layout, dst: Layout) -> tuple[tuple[Factor, Factor], ...]:
    """Both layouts over common factors."""
    pairs: list[tuple[Factor, Factor]] = []
    for before, after in zip(src.dims, dst.dims, strict=True):
        aligned = align(before, after)
        assert aligned is not None, f"{src} and {dst} have no common factors"
        pairs += zip(*aligned, strict=True)
    return tuple(pairs)


@functools.lru_cache(maxsize=65536)
def _intersection(src: Layout, dst: Layout, at: CoordItems, to: CoordItems) -> tuple[Cut, Cut] | None:
    """The part of the tensor that the rank `at` holds under `src` and the rank `to` under `dst`, in both."""
    if 0 in dst.shape:
        return None
    shapes: tuple[list[int], list[int]] = ([], [])
    cuts: tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]] = ([], [])
    numel = 1
    for position, (a, b) in enumerate(_factors(src, dst)):
        held, wanted = a.piece(dict(at)), b.piece(dict(to))
        start = max(held[0], wanted[0])
        length = min(sum(held), sum(wanted)) - start
        if length <= 0:
            return None
        numel *= length
        for (offset, size), shape, cut in zip((held, wanted), shapes, cuts, strict=True):
            shape.append(size)
            if size != length:
                cut.append((position, start - offset, length))
    return Cut(tuple(shapes[0]), tuple(cuts[0]), numel), Cut(tuple(shapes[1]), tuple(cuts[1]), numel)


def axis_peer(mesh: Mesh, axis: Axis, peer: int, rank: int) -> int:
    """The rank with coordinate `peer` along `axis`, all other coordinates those of `rank`."""
    return mesh.group((axis,), mesh.coords(rank))[peer]


def deliver(exchange: Exchange, tensor: int, parts: Sequence[Tensor | None], out: Tensor) -> None:
    """Writes what the members gave (in the order of `members`) of one tensor into this rank's output."""
    taken = [
        (cut.of(out), part)
        for cut, part in zip(exchange.moves[tensor].recvs, parts, strict=True)
        if cut and part is not None
    ]
    if not exchange.reduce:
        for target, part in taken:
            target.copy_(part.reshape(target.shape))
    elif taken:
        target = taken[0][0]
        first, *others = (part.reshape(target.shape) for _, part in taken)
        if not others:
            target.copy_(first)
        for part in others:
            COMBINE[exchange.reduce](first, part, out=target)
            first = target
