"""Views and data movement: a view regroups factors; whatever it cannot express must be whole."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

from fparallel.compiler.graph import Node
from fparallel.compiler.rules.registry import Dims, Factors, LocalCall, Placed, Rule, argument, rule
from fparallel.errors import RuleError
from fparallel.schedule.segment import LocalShape

_LINEAR = [frozenset((0,))]


def regroup_factors(
    src: tuple[int, ...], dst: tuple[int, ...], factors: Factors
) -> tuple[Dims, Dims, set[int]]:
    """Common factors of two shapes of equal numel: (dims of src, dims of dst, factors that must be whole)."""
    locked: set[int] = set()
    src_dims: list[tuple[int, ...]] = [()] * len(src)
    dst_dims: list[tuple[int, ...]] = [()] * len(dst)
    if math.prod(src) == 0:
        for dims, shape in ((src_dims, src), (dst_dims, dst)):
            for i, size in enumerate(shape):
                dims[i] = (factors.new(size),)
                locked.add(dims[i][0])
        return tuple(src_dims), tuple(dst_dims), locked
    i = j = 0
    while i < len(src) or j < len(dst):
        start_i, start_j = i, j
        left = src[i] if i < len(src) else 1
        right = dst[j] if j < len(dst) else 1
        i, j = min(i + 1, len(src)), min(j + 1, len(dst))
        while left != right:
            if left < right:
                left *= src[i]
                i += 1
            else:
                right *= dst[j]
                j += 1
        _group(src, dst, range(start_i, i), range(start_j, j), src_dims, dst_dims, factors, locked)
    return tuple(src_dims), tuple(dst_dims), locked


def _group(
    src: tuple[int, ...],
    dst: tuple[int, ...],
    src_range: range,
    dst_range: range,
    src_dims: list[tuple[int, ...]],
    dst_dims: list[tuple[int, ...]],
    factors: Factors,
    locked: set[int],
) -> None:
    from fparallel.factors import common_refinement

    a, b = [src[i] for i in src_range], [dst[j] for j in dst_range]
    chain = common_refinement(a or [1], b or [1])
    if chain is None:
        for dims, shape, where in ((src_dims, src, src_range), (dst_dims, dst, dst_range)):
            for i in where:
                if shape[i] > 1:
                    dims[i] = (factors.new(shape[i]),)
                    locked.add(dims[i][0])
        return
    ids = [factors.new(size) for size in chain]
    for dims, shape, where in ((src_dims, src, src_range), (dst_dims, dst, dst_range)):
        rest = iter(ids)
        for i in where:
            product, mine = 1, []
            while product < shape[i]:
                mine.append(next(rest))
                product *= factors.sizes[mine[-1]]
            dims[i] = tuple(mine)


@rule(
    "aten.view.default",
    "aten._unsafe_view.default",
    "aten.reshape.default",
    "aten._reshape_alias.default",
    "aten.unsqueeze.default",
    "aten.squeeze.default",
    "aten.squeeze.dim",
    "aten.squeeze.dims",
)
def view(node: Node) -> Rule:
    factors = Factors()
    src, dst, locked = regroup_factors(node.inputs[0].shape, node.outs[0].shape, factors)
    return Rule(
        factors.sizes, [src], [dst], locked=locked, linear=_LINEAR, passes_any=True, local=_reshape, view=True
    )


def _reshape(placed: Placed) -> LocalCall:
    return "local.reshape", (placed.node.inputs[0], LocalShape(placed.outs[0])), {}


def _permuted(node: Node, order: list[int], local: Any = None) -> Rule:
    factors = Factors()
    dims = factors.dims(node.inputs[0].shape)
    out = tuple(dims[d] for d in order)
    kwargs = {"local": local} if local else {}
    return Rule(factors.sizes, [dims], [out], linear=_LINEAR, passes_any=True, view=True, **kwargs)


@rule("aten.t.default")
def t(node: Node) -> Rule:
    return _permuted(node, list(range(len(node.inputs[0].shape)))[::-1])


@rule("aten.transpose.int", "aten.transpose_copy.int")
def transpose(node: Node) -> Rule:
    num = len(node.inputs[0].shape)
    order = list(range(num))
    if num:
        a, b = node.args[1] % num, node.args[2] % num
        order[a], order[b] = order[b], order[a]
    return _permuted(node, order)


@rule("aten.permute.default")
def permute(node: Node) -> Rule:
    num = len(node.inputs[0].shape)
    return _permuted(node, [d % num for d in node.args[1]])


@rule("aten.expand.default", "aten.expand_copy.default")
def expand(node: Node) -> Rule:
    """New and broadcast dims are factors of the result alone."""
    factors = Factors()
    out_shape, shape = node.outs[0].shape, node.inputs[0].shape
    out = factors.dims(out_shape)
    skip = len(out_shape) - len(shape)
    src = tuple(out[skip + i] if size == out_shape[skip + i] else () for i, size in enumerate(shape))
    return Rule(factors.sizes, [src], [out], linear=_LINEAR, passes_any=True, local=_expand, view=True)


def _expand(placed: Placed) -> LocalCall:
    return "aten.expand.default", (placed.node.inputs[0], LocalShape(placed.outs[0])), {}


def _dim_locked(
    node: Node, dims: set[int], *, view: bool = True, linear: bool = True, passes_any: bool = True
) -> Rule:
    """Same dims in and out but for `dims`, which must be whole and may change size."""
    factors = Factors()
    src = factors.dims(node.inputs[0].shape)
    locked = {src[d][0] for d in dims}
    out: list[tuple[int, ...]] = []
    for d, size in enumerate(node.outs[0].shape):
        if d in dims:
            out.append((factors.new(size),))
            locked.add(out[-1][0])
        else:
            out.append(src[d])
    return Rule(
        factors.sizes,
        [src],
        [tuple(out)] * len(node.outs),
        locked=locked,
        linear=_LINEAR if linear else (),
        passes_any=passes_any,
        view=view,
    )


@rule("aten.select.int")
def select(node: Node) -> Rule:
    factors = Factors()
    src = factors.dims(node.inputs[0].shape)
    dim = node.args[1] % len(src)
    out = tuple(d for i, d in enumerate(src) if i != dim)
    return Rule(factors.sizes, [src], [out], locked={src[dim][0]}, linear=_LINEAR, passes_any=True, view=True)


@rule("aten.unbind.int")
def unbind(node: Node) -> Rule:
    factors = Factors()
    src = factors.dims(node.inputs[0].shape)
    dim = (node.args[1] if len(node.args) > 1 else 0) % len(src)
    out = tuple(d for i, d in enumerate(src) if i != dim)
    return Rule(
        factors.sizes,
        [src],
        [out] * len(node.outs),
        locked={src[dim][0]},
        linear=_LINEAR,
        passes_any=True,
        view=True,
    )


@rule("aten.stack.default")
def stack(node: Node) -> Rule:
    factors = Factors()
    out = factors.dims(node.outs[0].shape)
    dim = (node.args[1] if len(node.args) > 1 else 0) % len(out)
    src = tuple(d for i, d in enumerate(out) if i != dim)
    num = len(node.inputs)
    return Rule(factors.sizes, [src] * num, [out], locked={out[dim][0]}, linear=[frozenset(range(num))])


@rule("aten.flip.default")
def flip(node: Node) -> Rule:
    num = len(node.inputs[0].shape)
    return _dim_locked_same(node, {d % num for d in node.args[1]})


@rule("aten.roll.default")
def roll(node: Node) -> Rule:
    num = len(node.inputs[0].shape)
    dims = node.args[2] if len(node.args) > 2 else []
    return _dim_locked_same(node, {d % num for d in dims} if dims else set(range(num)))


def _dim_locked_same(node: Node, dims: set[int]) -> Rule:
    factors = Factors()
    src = factors.dims(node.inputs[0].shape)
    return Rule(factors.sizes, [src], [src], locked={src[d][0] for d in dims}, linear=_LINEAR)


@rule("aten.constant_pad_nd.default")
def constant_pad(node: Node) -> Rule:
    num, pad = len(node.inputs[0].shape), node.args[1]
    dims = {num - 1 - i for i in range(len(pad) // 2) if pad[2 * i] or pad[2 * i + 1]}
    value = node.args[2] if len(node.args) > 2 else 0
    return _dim_locked(node, dims, view=False, linear=value == 0, passes_any=False)


@rule("aten.select_backward.default")
def select_backward(node: Node) -> Rule:
    _, shape, dim, index = node.args
    factors = Factors()
    out = factors.dims(shape)
    dim %= len(shape)
    src = tuple(d for i, d in enumerate(out) if i != dim)

    def local(placed: Placed) -> LocalCall:
        return node.target, (node.args[0], LocalShape(placed.outs[0]), dim, index), {}

    return Rule(factors.sizes, [src], [out], locked={out[dim][0]}, linear=_LINEAR, local=local)


@rule("aten.repeat.default")
def repeat(node: Node) -> Rule:
    """A repeated dim is (repeats, size): the size stays sharded, strided."""
    factors = Factors()
    shape, repeats = node.inputs[0].shape, node.args[1]
    src = factors.dims(shape)
    skip, out = len(repeats) - len(shape), []
    for i, times in enumerate(repeats):
        own = src[i - skip] if i >= skip else ()
        out.append(own if times == 1 else (factors.new(times), *own))
    locked = {f for dims in out for f in dims[:1] if f not in set(itertools.chain(*src))}
    return Rule(factors.sizes, [src], [tuple(out)], locked=locked, linear=_LINEAR)


@rule("aten.diagonal.default", "aten.diagonal_copy.default")
def diagonal(node: Node) -> Rule:
    factors, src, out, locked = _diagonal(node, node.inputs[0].shape, node.outs[0].shape)
    return Rule(factors.sizes, [src], [out], locked=locked, linear=_LINEAR, view=True)


@rule("aten.diagonal_scatter.default")
def diagonal_scatter(node: Node) -> Rule:
    factors, out, src, locked = _diagonal(node, node.inputs[0].shape, node.inputs[1].shape)
    return Rule(factors.sizes, [out, src], [out], locked=locked, linear=[frozenset((0, 1))])


@rule("aten.diagonal_backward.default")
def diagonal_backward(node: Node) -> Rule:
    shape = node.args[1]
    factors, out, src, locked = _diagonal(node, shape, node.inputs[0].shape)

    def local(placed: Placed) -> LocalCall:
        return node.target, (node.args[0], LocalShape(placed.outs[0]), *node.args[2:]), {}

    return Rule(factors.sizes, [src], [out], locked=locked, linear=_LINEAR, local=local)


def _diagonal(
    node: Node, shape: tuple[int, ...], diagonal: tuple[int, ...]
) -> tuple[Factors, Dims, Dims, set[int]]:
    """Factors of a tensor and of its diagonal over two dims, which are whole."""
    a, b = argument(node, "dim1") % len(shape), argument(node, "dim2") % len(shape)
    factors = Factors()
    full = factors.dims(shape)
    tail = factors.new(diagonal[-1])
    return (
        factors,
        full,
        (*(d for i, d in enumerate(full) if i not in (a, b)), (tail,)),
        {full[a][0], full[b][0], tail},
    )


@rule("aten.triu.default", "aten.tril.default")
def triangle(node: Node) -> Rule:
    """Where rows or columns are sharded it becomes a mask of global row and column numbers."""
    shape = node.inputs[0].shape
    upper = "triu" in node.target

    def expansion(x: Any, diagonal: int = 0) -> Any:
        rows = torch.arange(x.shape[-2], device=x.device).unsqueeze(1) + diagonal
        columns = torch.arange(x.shape[-1], device=x.device).unsqueeze(0)
        return torch.where(
            columns >= rows if upper else columns <= rows, x, torch.zeros((), dtype=x.dtype, device=x.device)
        )

    made = _dim_locked_same(node, {len(shape) - 1, len(shape) - 2})
    made.expand, made.locked = dict.fromkeys(made.locked, expansion), set()
    return made


@rule("aten.trace.default")
def trace(node: Node) -> Rule:
    shape = node.inputs[0].shape

    def expansion(x: Any) -> Any:
        rows = torch.arange(shape[0], device=x.device).unsqueeze(1)
        columns = torch.arange(shape[1], device=x.device).unsqueeze(0)
        return torch.where(rows == columns, x, torch.zeros((), dtype=x.dtype, device=x.device)).sum()

    return Rule(
        list(shape),
        [((0,), (1,))],
        [()],
        reduce={0: "sum", 1: "sum"},
        expand={0: expansion, 1: expansion},
        linear=_LINEAR,
    )


@rule("aten.as_strided.default")
def as_strided(node: Node) -> Rule:
    """Only of an argument, whole: other values have other strides in parts than on one device."""
    x, size, stride = node.args[:3]
    if x.node is not None:
        raise RuleError(
            "as_strided reads memory by strides, which a value that the compiler lays out does not have",
            fix="use unfold, view, transpose or index instead, or call as_strided on an argument of the step",
            where=node.source,
        )
    factors = Factors()
    ins = [tuple((factors.new(s),) for s in v.shape) for v in (x, node.outs[0])]
    offset = node.args[3] if len(node.args) > 3 else None

    def local(placed: Placed) -> LocalCall:
        return "local.as_strided", (x, size, stride, offset), {}

    return Rule(factors.sizes, ins[:1], ins[1:], locked=set(range(len(factors.sizes))), local=local)
