"""The reshard planner: how to get a tensor from one layout to another.

    f32[8@dp,4]                     ->  f32[8,4@dp]       all_to_all[dp]
    f32[8,4]{unreduced: dp:sum}     ->  f32[8@dp,4]       reduce_scatter[dp]
    f32[8@dp,4]{unreduced: tp:sum}  ->  f32[8,4]          all_reduce[tp], all_gather[dp]
    f32[8@dp*tp,4]                  ->  f32[8@tp*dp,4]    permute[dp*tp]

Both layouts are written over a common refinement of factors, so that a state is a list of axes per factor and
the set of unreduced axes. A step that shrinks the tensor comes before one that grows it; local steps are
free. Where axes stand in another order, the detour over a permutation of whole shards is compared with
gathering.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from fparallel.errors import LayoutError
from fparallel.factors import Factor, align, atoms_of, axis_atoms, compact, refine_axes, same_dim
from fparallel.layout import Layout, same
from fparallel.mesh import Axis, axes_text, merge_axes
from fparallel.schedule.geometry import find_axes

LOCAL = ("slice", "mask")
Unreduced = tuple[tuple[Axis, str], ...]


@dataclass(frozen=True)
class Step:
    """One step of a plan.

    Attributes:
      kind: slice and mask (local), all_gather, reduce_scatter, all_reduce, all_to_all or permute.
      axes: the mesh axes it works over, major first.
      src, dst: the layouts before and after.
      reduce: "sum", "max" or "min" for all_reduce, reduce_scatter and mask; "" for the others.
    """

    kind: str
    axes: tuple[Axis, ...]
    src: Layout
    dst: Layout
    reduce: str = ""

    @property
    def local(self) -> bool:
        """Whether it needs no communication."""
        return self.kind in LOCAL

    @property
    def payload(self) -> Fraction:
        """Elements that one rank sends, on average over its group and without padding."""
        if self.local:
            return Fraction(0)
        n = math.prod(axis.size for axis in self.axes)
        whole = self.dst if self.kind == "all_gather" else self.src
        factors = [f for dim in whole.dims for f in dim]
        size = Fraction(math.prod(f.size for f in factors), math.prod(f.num_shards for f in factors))
        return size * (n - 1) / n * (2 if self.kind == "all_reduce" else 1)

    def __str__(self) -> str:
        return f"{self.kind}[{axes_text(self.axes)}] {self.src} -> {self.dst}"


@functools.lru_cache(maxsize=65536)
def plan(src: Layout, dst: Layout) -> tuple[Step, ...]:
    """The steps that turn a tensor of layout `src` into one of layout `dst`; () if every rank has its part.

    The first step starts at `src`, each starts where the one before ends, the last ends at `dst`.

    Raises:
      LayoutError: the two layouts are of different shapes.
    """
    if src.shape != dst.shape:
        message = f"cannot reshard {src} to {dst}: their shapes differ"
        raise LayoutError(message, fix="reshape before resharding")
    if same(src, dst):
        return ()
    best = _greedy(src, dst)
    if any(step.kind == "all_gather" for step in best):
        best = min([best, *_over_permutes(src, dst)], key=_price)
    return best


@functools.lru_cache(maxsize=65536)
def cost(src: Layout, dst: Layout, itemsize: int = 1) -> float:
    """Payload of the plan in bytes: what one rank sends (on average) without padding; 0 if all is local."""
    return float(sum((step.payload for step in plan(src, dst)), Fraction(0)) * itemsize)


def _price(steps: Sequence[Step]) -> tuple[Fraction, int, int]:
    moved = [step.payload for step in steps if not step.local]
    return sum(moved, Fraction(0)), len(moved), len(steps)


# ---------------------------------------------------------------- state


@dataclass
class _Slot:
    """A factor of the common refinement: the axes it has now and the axes it should get.

    A dim whose two layouts have no common refinement is `hard`: its slots are the factors that it has now,
    and want nothing, so they are gathered until there is one.
    """

    dim: int
    size: int
    have: tuple[Axis, ...]
    want: tuple[Axis, ...]
    hard: bool

    @property
    def factor(self) -> Factor:
        """What it is now; sub-axes are joined where the pieces are even (and any factoring allows it)."""
        shards = math.prod(axis.size for axis in self.have)
        return Factor(self.size, self.have if self.size % shards else compact(self.size, self.have))

    @property
    def agreed(self) -> int:
        """Length of the common prefix of have and want."""
        return next((i for i, (a, b) in enumerate(zip(self.have, self.want, strict=False)) if a != b),
                    min(len(self.have), len(self.want)))  # fmt: skip

    @property
    def next(self) -> Axis | None:
        """The axis that could be appended."""
        at = self.agreed
        return self.want[at] if at == len(self.have) and at < len(self.want) else None


@dataclass
class _State:
    slots: list[_Slot]
    num_dims: int
    unreduced: Unreduced
    wanted: Unreduced

    @staticmethod
    def of(now: Layout, dst: Layout) -> _State:
        atoms = axis_atoms(now.sharded_axes, now.unreduced_axes, dst.sharded_axes, dst.unreduced_axes)
        slots: list[_Slot] = []
        old, new = now.split_axes(atoms).dims, dst.split_axes(atoms).dims
        for dim, (a, b) in enumerate(zip(old, new, strict=True)):
            pair = align(a, b)
            hard = pair is None
            have, want = pair if pair is not None else (a, tuple(Factor(f.size) for f in a))
            for x, y in zip(have, want, strict=True):
                alike = not hard and x.axes != y.axes and _same_pieces(x.size, x.axes, y.axes)
                slots.append(_Slot(dim, x.size, y.axes if alike else x.axes, y.axes, hard))
        atoms = axis_atoms(*(axes for slot in slots for axes in (slot.have, slot.want)), *atoms.values())
        for slot in slots:
            slot.have, slot.want = _cut(slot.size, slot.have, atoms), _cut(slot.size, slot.want, atoms)
        return _State(slots, len(now.dims), _split(now.unreduced, atoms), _split(dst.unreduced, atoms))

    def layout(self) -> Layout:
        dims: list[list[Factor]] = [[] for _ in range(self.num_dims)]
        for slot in self.slots:
            dims[slot.dim].append(slot.factor)
        return _layout(dims, self.unreduced)

    @property
    def done(self) -> bool:
        there = all(not slot.hard and slot.have == slot.want for slot in self.slots)
        return there and set(self.unreduced) == set(self.wanted)

    def is_free(self, axis: Axis) -> bool:
        """Whether the tensor is replicated along `axis`."""
        taken = itertools.chain(*(slot.have for slot in self.slots), (a for a, _ in self.unreduced))
        return not any(not axis.independent(other) for other in taken)


def _layout(dims: Sequence[Sequence[Factor]], unreduced: Unreduced) -> Layout:
    pending = []
    for reduction in sorted({r for _, r in unreduced}):
        held = sorted((a for a, r in unreduced if r == reduction), key=lambda a: (a.name, a.pre))
        pending += [(axis, reduction) for axis in merge_axes(held)]
    return Layout.of(dims, pending)


def _cut(size: int, axes: tuple[Axis, ...], atoms: dict[str, tuple[Axis, ...]]) -> tuple[Axis, ...]:
    """The axes as digits, where the pieces are even: there any factoring allows it."""
    return axes if size % math.prod(axis.size for axis in axes) else refine_axes(size, axes, atoms)


def _split(unreduced: Unreduced, atoms: dict[str, tuple[Axis, ...]]) -> Unreduced:
    return tuple((part, reduction) for axis, reduction in unreduced for part in atoms_of(axis, atoms))


def _same_pieces(size: int, a: tuple[Axis, ...], b: tuple[Axis, ...]) -> bool:
    """Whether two orders of the same axes cut range(size) alike, as 1@dp*tp and 1@tp*dp do."""
    if set(a) != set(b) or size % math.prod(axis.size for axis in a) == 0:
        return False
    return same_dim((Factor(size, a),), (Factor(size, b),))


# ---------------------------------------------------------------- greedy plan


def _greedy(src: Layout, dst: Layout) -> tuple[Step, ...]:
    """Local steps when they shrink, then reduce_scatter, all_to_all, all_reduce, then all_gather."""
    steps: list[Step] = []
    now, state = src, _State.of(src, dst)
    while not state.done:
        kind, axes, reduce = (
            _slice(state) or _reduce_scatter(state) or _all_to_all(state) or _all_reduce(state)
            or _all_gather(state) or _mask(state)
        )  # fmt: skip
        after = state.layout()
        steps.append(Step(kind, merge_axes(axes), now, after, reduce))
        now = after
        if any(slot.hard for slot in state.slots):
            state = _State.of(now, dst)
        if len(steps) > 1000:
            raise AssertionError(f"no end in sight from {src} to {dst}: {steps[-1]}")
    steps[-1] = Step(steps[-1].kind, steps[-1].axes, steps[-1].src, dst, steps[-1].reduce)
    return _merged(steps)


Move = tuple[str, tuple[Axis, ...], str]


def _slice(state: _State) -> Move | None:
    taken: list[Axis] = []
    for slot in state.slots:
        while (axis := slot.next) is not None and state.is_free(axis):
            slot.have += (axis,)
            taken.append(axis)
    return ("slice", tuple(taken), "") if taken else None


def _reduce_scatter(state: _State) -> Move | None:
    pending = dict(state.unreduced)
    for slot in state.slots:
        if slot.next in pending:
            reduce, axes = pending[slot.next], []
            while slot.next is not None and pending.get(slot.next) == reduce:
                axes.append(slot.next)
                slot.have += (slot.next,)
            state.unreduced = tuple(u for u in state.unreduced if u[0] not in axes)
            return "reduce_scatter", tuple(axes), reduce
    return None


def _movable(state: _State, source: _Slot) -> tuple[_Slot, tuple[Axis, ...]] | None:
    """Where the last axes of `source` can go next."""
    for target in state.slots:
        if target is source or target.next is None:
            continue
        for count in range(len(source.have) - source.agreed, 0, -1):
            axes = source.have[-count:]
            if target.want[target.agreed : target.agreed + count] == axes:
                return target, axes
    return None


def _all_to_all(state: _State) -> Move | None:
    for source in state.slots:
        found = _movable(state, source)
        if found is not None:
            target, axes = found
            source.have = source.have[: -len(axes)]
            target.have += axes
            return "all_to_all", axes, ""
    return None


def _all_reduce(state: _State) -> Move | None:
    surplus = [u for u in state.unreduced if u not in state.wanted]
    if not surplus:
        return None
    reduce = surplus[0][1]
    axes = tuple(axis for axis, r in surplus if r == reduce)
    state.unreduced = tuple(u for u in state.unreduced if u[0] not in axes)
    return "all_reduce", axes, reduce


def _all_gather(state: _State) -> Move | None:
    """Gathers the last axes of one factor; first where that lets something shrink or move."""
    slots = [slot for slot in state.slots if slot.agreed < len(slot.have)]
    if not slots:
        return None

    def rank(slot: _Slot) -> tuple[bool, int]:
        popped, then = slot.have[slot.agreed :], slot.want[slot.agreed : slot.agreed + 1]
        last = {other.have[-1] for other in state.slots if other.have and other is not slot}
        unlocks = any(axis in popped or axis in last or state.is_free(axis) for axis in then)
        unlocks = unlocks or any(other.next in popped for other in state.slots)
        return not unlocks, math.prod(axis.size for axis in popped)

    slot = min(slots, key=rank)
    axes: tuple[Axis, ...] = ()
    while slot.agreed < len(slot.have) and not (axes and (slot.hard or _movable(state, slot))):
        axes = (slot.have[-1], *axes)
        slot.have = slot.have[:-1]
    return "all_gather", axes, ""


def _mask(state: _State) -> Move:
    missing = [u for u in state.wanted if u not in state.unreduced]
    reduce = missing[0][1]
    axes = tuple(axis for axis, r in missing if r == reduce)
    state.unreduced += tuple((axis, reduce) for axis in axes)
    return "mask", axes, reduce


def _merged(steps: list[Step]) -> tuple[Step, ...]:
    """Joins neighbouring steps of one kind that are one step over more axes."""
    result: list[Step] = []
    for step in steps:
        last = result[-1] if result else None
        axes: tuple[Axis, ...] | None = None
        if last is not None and last.kind == step.kind and last.reduce == step.reduce:
            if step.kind in ("slice", "all_reduce", "mask"):
                axes = last.axes + step.axes
            elif step.kind == "all_gather" and _holds(last.src, step.axes + last.axes):
                axes = step.axes + last.axes
            elif step.kind == "reduce_scatter" and _holds(step.dst, last.axes + step.axes):
                axes = last.axes + step.axes
        if axes is None or last is None:
            result.append(step)
        else:
            result[-1] = Step(step.kind, merge_axes(axes), last.src, step.dst, step.reduce)
    return tuple(result)


def _holds(layout: Layout, axes: tuple[Axis, ...]) -> bool:
    """Whether one factor's axes end with `axes`."""
    for dim in layout.dims:
        for factor in dim:
            atoms = axis_atoms(factor.axes, axes)
            held, wanted = refine_axes(factor.size, factor.axes, atoms), refine_axes(0, axes, atoms)
            at = find_axes(held, wanted)
            if at is not None and at + len(wanted) == len(held):
                return True
    return False


# ---------------------------------------------------------------- permutations


def _over_permutes(src: Layout, dst: Layout) -> Iterator[tuple[Step, ...]]:
    """Plans that exchange whole shards: at once, or after shrinking to parts of dst and before gathering."""
    state = _State.of(src, dst)
    if any(slot.hard for slot in state.slots):
        return
    held = {axis for slot in state.slots for axis in slot.have}
    wanted = {axis for slot in state.slots for axis in slot.want}
    direct = [(slot.have, slot.want) for slot in state.slots]
    detour = []
    for slot in state.slots:
        new = tuple(a for a in slot.want if a not in slot.have)
        kept = tuple(a for a in slot.have if a in slot.want or a not in wanted)
        extra = tuple(a for a in slot.have if a not in wanted)
        detour.append((kept + new, slot.want + extra))
    for ends in (direct, detour) if direct != detour else (direct,):
        used = {axis for a, b in ends for axis in a + b}
        moved = {axis for a, b in ends if a != b for axis in a + b}
        if not moved or not all(a.independent(b) for a, b in itertools.combinations(used, 2)):
            continue
        pending = tuple(u for u in state.unreduced if u[0] not in held | wanted)
        low = _with_lists(state, [a for a, _ in ends], pending)
        high = _with_lists(state, [b for _, b in ends], pending)
        low, high = src if same(src, low) else low, dst if same(dst, high) else high
        if not _exchangeable(low, high):
            continue
        axes = merge_axes(sorted(moved, key=lambda axis: (axis.name, axis.pre)))
        yield (*_path(src, low), Step("permute", axes, low, high), *_path(high, dst))


def _path(src: Layout, dst: Layout) -> tuple[Step, ...]:
    return () if src == dst else _greedy(src, dst)


def _exchangeable(a: Layout, b: Layout) -> bool:
    """Whether every factor is cut alike by both layouts, or by each into as many equal parts."""
    for old, new in zip(a.dims, b.dims, strict=True):
        pair = align(old, new)
        if pair is None:
            return False
        for x, y in zip(*pair, strict=True):
            equal_parts = x.size % x.num_shards == 0 and x.num_shards == y.num_shards
            if not equal_parts and compact(x.size, x.axes) != compact(y.size, y.axes):
                return False
    return True


def _with_lists(state: _State, lists: list[tuple[Axis, ...]], unreduced: Unreduced) -> Layout:
    slots = [_Slot(s.dim, s.size, axes, s.want, s.hard) for s, axes in zip(state.slots, lists, strict=True)]
    return _State(slots, state.num_dims, unreduced, state.wanted).layout()
