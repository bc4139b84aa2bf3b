"""Choosing layouts: every op takes, per mesh axis, the factor assignment that moves the fewest bytes.

Choices are local, deterministic and made in program order. What is already laid out well stays: an aligned contraction
is always computed where its operands lie; weights never move when activations can; a pending sum passes through
linear ops with a single reader and is reduced once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fparallel.compiler.rules import Rule
from fparallel.factors import Factor, common_refinement, regroup
from fparallel.layout import Layout
from fparallel.mesh import Axis

FLOPS_PER_BYTE = 100.0
TINY = 1024
PIN_WEIGHT = 1000.0

Place = (
    int | str | None
)  # a part, "U" (unreduced), "X" (on factors that the rule cannot express), None (replicated)


@dataclass(frozen=True)
class Operand:
    """What is known of an operand: the layouts in which it already exists (none: it can be made in any)."""

    layouts: tuple[Layout, ...]
    numel: int
    itemsize: int
    pinned: bool = False
    single_use: bool = True


@dataclass(frozen=True)
class Choice:
    """The layouts of one op: what every operand must have, what the results get."""

    ins: tuple[Layout, ...]
    outs: tuple[Layout, ...]
    axes: tuple[tuple[Axis, ...], ...]
    expand: Callable | None
    cause: str


class _Parts:
    """The factors of a rule, cut finely enough to express the layouts of the operands."""

    def __init__(self, rule: Rule, operands: Sequence[Operand], hints: Sequence[Layout | None]) -> None:
        self.rule = rule
        self.chains: list[tuple[int, ...]] = [(size,) for size in rule.sizes]
        order = sorted(range(len(operands)), key=lambda i: -operands[i].numel)
        for i in order:
            for layout in operands[i].layouts:
                self._refine(layout, rule.ins[i])
        for hint, dims in zip(hints, rule.outs, strict=False):
            if hint is not None:
                self._refine(hint, dims)
        self.ids: list[range] = []
        self.sizes: list[int] = []
        for chain in self.chains:
            self.ids.append(range(len(self.sizes), len(self.sizes) + len(chain)))
            self.sizes.extend(chain)
        self.factor_of = [f for f, ids in enumerate(self.ids) for _ in ids]

    def _refine(self, layout: Layout, dims: Sequence[Sequence[int]]) -> None:
        for dim, factors in zip(layout.dims, dims, strict=True):
            if not factors or not any(f.axes for f in dim):
                continue
            chain = [size for f in factors for size in self.chains[f]]
            common = common_refinement(chain, [f.size for f in dim])
            if common is None or regroup(dim, common) is None:
                continue
            pieces, position = [], 0
            for f in factors:
                start, product = position, 1
                while product < self.rule.sizes[f]:
                    product *= common[position]
                    position += 1
                pieces.append(common[start:position] or (self.rule.sizes[f],))
            if any(len(p) > 1 and f in self.rule.locked for f, p in zip(factors, pieces, strict=True)):
                continue
            for f, p in zip(factors, pieces, strict=True):
                self.chains[f] = tuple(p)

    def parts(self, factors: Sequence[int]) -> list[int]:
        return [p for f in factors for p in self.ids[f]]

    def place(self, layout: Layout, dims: Sequence[Sequence[int]]) -> dict[Axis, Place]:
        """Where a layout puts each of its axes."""
        result: dict[Axis, Place] = dict.fromkeys(layout.unreduced_axes, "U")
        for dim, factors in zip(layout.dims, dims, strict=True):
            axes = [axis for f in dim for axis in f.axes]
            if not axes:
                continue
            parts = self.parts(factors)
            grouped = regroup(dim, [self.sizes[p] for p in parts]) if parts else None
            if grouped is None:
                result.update(dict.fromkeys(axes, "X"))
                continue
            for part, factor in zip(parts, grouped, strict=True):
                result.update(dict.fromkeys(factor.axes, part))
        return result

    def apart(self, part: int) -> list[int]:
        """The parts that never stand in one dim with `part`."""
        every = [self.parts(factors) for dims in (*self.rule.ins, *self.rule.outs) for factors in dims]
        together = {p for dim in every if part in dim for p in dim}
        return [p for p in range(len(self.sizes)) if p not in together]

    def order(self, layout: Layout, dims: Sequence[Sequence[int]]) -> dict[int, tuple[Axis, ...]]:
        result = {}
        for dim, factors in zip(layout.dims, dims, strict=True):
            parts = self.parts(factors)
            grouped = regroup(dim, [self.sizes[p] for p in parts]) if parts else None
            for part, factor in zip(parts, grouped or (), strict=False):
                if factor.axes:
                    result[part] = factor.axes
        return result


def _transition(now: Place, then: Place, nbytes: float, numel: int, n: int) -> float:
    """Bytes per rank to bring an operand from one place on an axis of n ranks to another."""
    if now == then:
        return 0.0
    if now is None:
        if then == "U":
            return 0.0 if numel <= TINY else 2.02 * nbytes * (n - 1) / n
        return 0.0
    if now == "U":
        return (2.0 if then is None else 1.0) * nbytes * (n - 1) / n
    if now == "X" or then in (None, "U"):
        return nbytes * (n - 1) * (1.1 if then == "U" else 1.0)
    return nbytes * (n - 1) / n


def choose(
    rule: Rule, operands: Sequence[Operand], out_bytes: float, hints: Sequence[Layout | None] = ()
) -> Choice:
    """Chooses layouts for one op; see the module docstring for the policy.

    Args:
      operands: per tensor operand what layouts it has.
      out_bytes: bytes of all results, whole.
      hints: per result a preferred layout (of the primal of a cotangent), or None.
    """
    parts = _Parts(rule, operands, hints)
    places = [
        [parts.place(layout, dims) for layout in op.layouts]
        for op, dims in zip(operands, rule.ins, strict=True)
    ]
    wishes = [parts.place(h, d) for h, d in zip(hints, rule.outs, strict=False) if h is not None]
    in_parts = [{p for f in dims for p in parts.parts(f)} for dims in rule.ins]
    out_parts = {p for dims in rule.outs for f in dims for p in parts.parts(f)}
    axes = sorted(
        {axis for versions in places for place in versions for axis in place}
        | {axis for wish in wishes for axis in wish},
        key=lambda axis: (axis.name, axis.pre, -axis.size),
    )
    assigned: dict[int, list[Axis]] = {}
    passing: dict[Axis, frozenset[int]] = {}
    causes = []
    for axis in axes:
        if any(_overlap(axis, other) for used in (*assigned.values(), passing) for other in used):
            continue
        apart = {
            p
            for q, used in assigned.items()
            if any(a.name == axis.name for a in used)
            for p in parts.apart(q)
        }
        joins = any(other.name == axis.name for other in passing)
        pick, group = _choose_axis(
            rule, operands, places, wishes, parts, in_parts, out_parts, axis, out_bytes, apart, joins
        )
        if isinstance(pick, int):
            assigned.setdefault(pick, []).append(axis)
        elif pick == "U":
            passing[axis] = group
        causes.append(
            f"{axis}: {'unreduced' if pick == 'U' else 'replicated' if pick is None else 'sharded'}"
        )
    _sort_axes(assigned, operands, rule, parts)
    return _layouts(rule, operands, parts, assigned, passing, "; ".join(causes))


def _overlap(a: Axis, b: Axis) -> bool:
    """Whether two (sub-)axes share a digit of the same mesh axis."""
    return a.name == b.name and a.pre < b.pre * b.size and b.pre < a.pre * a.size


def _choose_axis(
    rule: Rule,
    operands: Sequence[Operand],
    places: list[list[dict[Axis, Place]]],
    wishes: list[dict[Axis, Place]],
    parts: _Parts,
    in_parts: list[set[int]],
    out_parts: set[int],
    axis: Axis,
    out_bytes: float,
    apart: set[int],
    joins: bool,
) -> tuple[Place, frozenset[int]]:
    """The place of one axis.

    Args:
      apart: parts that would tear this axis from its other sub-axes.
      joins: whether another sub-axis of the same mesh axis stays unreduced, so that one reduction can do both.
    """
    n = axis.size
    states: list[list[Place]] = [[place.get(axis) for place in versions] for versions in places]

    def usable(places: Iterable[Place]) -> list[int]:
        return sorted({p for p in places if isinstance(p, int) and parts.factor_of[p] not in rule.locked})

    candidates: list[Place] = list(usable(s for versions in states for s in versions))
    wished = {wish.get(axis) for wish in wishes}
    firm = usable(wished)
    group = _passing_group(rule, operands, states)
    if firm:
        candidates = list(firm)
    else:
        candidates.append(None)
        if rule.flops:
            candidates = [c for c in candidates if c not in apart]
    if group is not None:
        candidates.append("U")
    best: tuple[float, int, Place] = (float("inf"), 0, None)
    for candidate in candidates:
        cost, aligned = 0.0, True
        for i, (op, versions) in enumerate(zip(operands, states, strict=True)):
            if not versions:
                continue
            target: Place = candidate if candidate in in_parts[i] else None
            if candidate == "U":
                target = "U" if i in (group or ()) else None
            moves = []
            for layout, now in zip(op.layouts, versions, strict=True):
                nbytes = layout.max_local_numel * op.itemsize
                moves.append(_transition(now, target, nbytes, 0 if joins else op.numel, n))
            move = min(moves)
            if isinstance(candidate, int) and candidate in in_parts[i] and target not in versions:
                aligned = False
            cost += move * (PIN_WEIGHT if op.pinned else 1.0)
        if isinstance(candidate, int):
            factor = parts.factor_of[candidate]
            if candidate not in out_parts and not aligned:
                cost += 2 * out_bytes * (n - 1) / n
            if factor in rule.expand:
                cost += 0.01 * out_bytes
            rank = 0 if candidate in out_parts else 1
            if candidate in wished:
                rank = -1
        else:
            cost += (rule.flops / FLOPS_PER_BYTE + 0.01 * out_bytes) * (n - 1) / n
            rank = 2 if candidate == "U" else 3
        if (cost, rank) < best[:2]:
            best = (cost, rank, candidate)
    return best[2], group or frozenset()


def _passing_group(
    rule: Rule, operands: Sequence[Operand], states: list[list[Place]]
) -> frozenset[int] | None:
    """The operands through which a pending sum can pass, or None."""
    pending = {i for i, versions in enumerate(states) if versions and all(v == "U" for v in versions)}
    if not pending:
        return None
    for i in pending:
        if not operands[i].single_use and operands[i].numel > TINY:
            return None
        kinds = {kind for _, kind in operands[i].layouts[0].unreduced}
        if kinds != {"sum"} and not rule.passes_any:
            return None
    if _largest_result(rule) > sum(operands[i].numel for i in pending):
        return None  # a broadcast: the sum is smaller before it
    for group in rule.linear:
        if pending <= group:
            return group
    return None


def _largest_result(rule: Rule) -> int:
    return max(
        (math.prod(rule.sizes[f] for factors in dims for f in factors) for dims in rule.outs), default=0
    )


def _sort_axes(
    assigned: dict[int, list[Axis]], operands: Sequence[Operand], rule: Rule, parts: _Parts
) -> None:
    """Several axes on one factor keep the order in which the largest operand has them."""
    if all(len(axes) < 2 for axes in assigned.values()):
        return
    orders = [
        (op.numel, parts.order(layout, dims))
        for op, dims in zip(operands, rule.ins, strict=True)
        for layout in op.layouts
    ]
    for part, axes in assigned.items():
        known = max(
            (order[part] for _, order in sorted(orders, key=lambda o: o[0]) if part in order),
            key=lambda seq: len(set(seq) & set(axes)),
            default=(),
        )
        rank = {axis: i for i, axis in enumerate(known)}
        axes.sort(key=lambda axis: (rank.get(axis, len(rank)), axis.name, axis.pre))


def _layouts(
    rule: Rule,
    operands: Sequence[Operand],
    parts: _Parts,
    assigned: dict[int, list[Axis]],
    passing: dict[Axis, frozenset[int]],
    cause: str,
) -> Choice:
    def dims(factor_dims: Sequence[Sequence[int]], shape: Sequence[int] | None = None) -> list[list[Factor]]:
        return [
            [Factor(parts.sizes[p], tuple(assigned.get(p, ()))) for p in parts.parts(factors)] or [Factor(1)]
            for factors in factor_dims
        ]

    def whole(layouts: Sequence[Layout], made: list[list[Factor]]) -> list[list[Factor]]:
        if not layouts:
            return made
        return [
            m if math.prod(f.size for f in m) == size else [Factor(size)]
            for m, size in zip(made, layouts[0].shape, strict=True)
        ]

    kind = "sum"
    for op in operands:
        if op.layouts and op.layouts[0].unreduced:
            kind = op.layouts[0].unreduced[0][1]
    ins = [
        Layout.of(
            whole(op.layouts, dims(rule.ins[i])), [(a, kind) for a, group in passing.items() if i in group]
        )
        for i, op in enumerate(operands)
    ]
    outs = []
    for factor_dims in rule.outs:
        own = {f for factors in factor_dims for f in factors}
        pending = [(axis, kind) for axis in passing]
        for f, reduction in rule.reduce.items():
            if f not in own:
                pending += [(axis, reduction) for p in parts.ids[f] for axis in assigned.get(p, ())]
        outs.append(Layout.of(dims(factor_dims), pending))
    axes = tuple(tuple(a for p in ids for a in assigned.get(p, ())) for ids in parts.ids)
    expand = next((fn for f, fn in rule.expand.items() if axes[f]), None)
    return Choice(tuple(ins), tuple(outs), axes, expand, cause)


def choose_for_output(rule: Rule, wanted: Layout) -> Choice | None:
    """The layouts that make the first result come out as `wanted`, or None if the rule cannot (lazy values)."""
    parts = _Parts(rule, [Operand((), 0, 1) for _ in rule.ins], [wanted])
    place = parts.place(wanted, rule.outs[0])
    if any(not isinstance(p, int) or parts.factor_of[p] in rule.locked for p in place.values()):
        return None
    assigned: dict[int, list[Axis]] = {p: list(axes) for p, axes in parts.order(wanted, rule.outs[0]).items()}
    made = _layouts(
        rule, [Operand((), 0, 1) for _ in rule.ins], parts, assigned, {}, "made where it is needed"
    )
    return None if made.expand or made.outs[0].unreduced else made
