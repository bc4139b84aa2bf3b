"""Parts of a dim: split, slice, cat and their gradients.

The sizes of the parts have a largest common unit, and the dim is (number of units, unit). The units must be whole,
the unit may be sharded: of a fused projection to queries, keys and values, every rank holds some heads of each.
"""

from __future__ import annotations

import math
from typing import Any

from fparallel.compiler.graph import Node
from fparallel.compiler.rules.registry import Dims, Factors, LocalCall, Placed, Rule, rule
from fparallel.schedule.segment import LocalShape

_LINEAR = [frozenset((0,))]


class _Cut:
    """The factors of a dim of `total` that is cut at multiples of `unit`."""

    def __init__(self, factors: Factors, unit: int) -> None:
        self.factors, self.unit = factors, unit
        self.shared = factors.new(unit) if unit > 1 else None
        self.locked: set[int] = set()

    def dim(self, size: int) -> tuple[int, ...]:
        """The factors of a part of `size`, or of the whole."""
        if self.shared is None or size % self.unit or size == 0:
            whole = self.factors.new(size)
            self.locked.add(whole)
            return (whole,)
        if size == self.unit:
            return (self.shared,)
        units = self.factors.new(size // self.unit)
        self.locked.add(units)
        return (units, self.shared)


def _dim_of(node: Node, position: int) -> int:
    dim = node.args[position] if len(node.args) > position else node.kwargs.get("dim", 0)
    return dim % max(1, len(node.outs[0].shape))


def _with(dims: Dims, at: int, dim: tuple[int, ...]) -> Dims:
    return (*dims[:at], dim, *dims[at + 1 :])


@rule(
    "aten.split.Tensor", "aten.split_with_sizes.default", "aten.chunk.default", "aten.tensor_split.sections"
)
def split(node: Node) -> Rule:
    dim, factors = _dim_of(node, 2), Factors()
    src = factors.dims(node.inputs[0].shape)
    sizes = [out.shape[dim] for out in node.outs]
    cut = _Cut(factors, math.gcd(*sizes))
    outs = [_with(src, dim, cut.dim(size)) for size in sizes]
    ins = [_with(src, dim, cut.dim(sum(sizes)))]

    def local(placed: Placed) -> LocalCall:
        if len(sizes) == 1:
            return _identity(placed)
        return "local.split", (placed.node.inputs[0], [LocalShape(out) for out in placed.outs], dim), {}

    return Rule(
        factors.sizes, ins, outs, locked=cut.locked, linear=_LINEAR, passes_any=True, local=local, view=True
    )


@rule("aten.cat.default")
def cat(node: Node) -> Rule:
    dim, factors = _dim_of(node, 1), Factors()
    whole = factors.dims(node.outs[0].shape)
    joined = [value for value in node.inputs if len(value.shape) == len(whole)]
    cut = _Cut(factors, math.gcd(*(value.shape[dim] for value in joined)))
    ins: list[Dims] = []
    for value in node.inputs:
        if len(value.shape) == len(whole):
            ins.append(_with(whole, dim, cut.dim(value.shape[dim])))
        else:  # torch lets an empty 1-d tensor join anything
            ins.append(tuple((factors.new(size),) for size in value.shape))
            cut.locked |= {d[0] for d in ins[-1]}
    out = _with(whole, dim, cut.dim(node.outs[0].shape[dim]))
    return Rule(factors.sizes, ins, [out], locked=cut.locked, linear=[frozenset(range(len(ins)))])


def _bounds(size: int, start: Any, end: Any) -> tuple[int, int]:
    """(first, length) of x[start:end] along a dim of `size`."""
    first, last, _ = slice(start, end).indices(size)
    return first, max(0, last - first)


@rule("aten.slice.Tensor")
def slice_(node: Node) -> Rule:
    value, dim = node.inputs[0], _dim_of(node, 1)
    given = list(node.args[2:])
    start, end, step = given + [None, None, 1][len(given) :]
    first, length = _bounds(value.shape[dim], start, end)
    factors = Factors()
    src = factors.dims(value.shape)
    if step == 1 and length == value.shape[dim]:
        return Rule(factors.sizes, [src], [src], linear=_LINEAR, passes_any=True, local=_identity, view=True)
    unit = math.gcd(value.shape[dim], first, length) if step == 1 else 1
    cut = _Cut(factors, unit)
    ins, outs = (
        [_with(src, dim, cut.dim(value.shape[dim]))],
        [_with(src, dim, cut.dim(node.outs[0].shape[dim]))],
    )
    made = Rule(factors.sizes, ins, outs, locked=cut.locked, linear=_LINEAR, passes_any=True, view=True)
    if cut.shared is not None and length:

        def local(placed: Placed) -> LocalCall:
            shape = LocalShape(placed.outs[0])
            return "local.part", (placed.node.inputs[0], shape, dim, first // unit, length // unit), {}

        made.local = local
    return made


def _identity(placed: Placed) -> LocalCall:
    return "local.reshape", (placed.node.inputs[0], LocalShape(placed.outs[0])), {}


@rule("aten.slice_backward.default")
def slice_backward(node: Node) -> Rule:
    grad, shape, dim, start, end, step = node.args
    dim %= len(shape)
    first, length = _bounds(shape[dim], start, end)
    factors = Factors()
    src = factors.dims(grad.shape)
    unit = math.gcd(shape[dim], first, length) if step == 1 and length else 1
    cut = _Cut(factors, unit)
    ins, outs = [_with(src, dim, cut.dim(grad.shape[dim]))], [_with(src, dim, cut.dim(shape[dim]))]

    def local(placed: Placed) -> LocalCall:
        whole = LocalShape(placed.outs[0])
        if cut.shared is None:
            return node.target, (grad, whole, dim, start, end, step), {}
        return "local.part_backward", (grad, whole, dim, first // unit, length // unit), {}

    return Rule(factors.sizes, ins, outs, locked=cut.locked, linear=_LINEAR, local=local)
