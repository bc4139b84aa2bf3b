"""Embedding, gather, scatter, index and the losses that pick by index."""

from __future__ import annotations

import math
from typing import Any

import torch

from fparallel.compiler.graph import Node, Value
from fparallel.compiler.rules.factories import is_zeros
from fparallel.compiler.rules.pointwise import broadcast_dims
from fparallel.compiler.rules.registry import (
    Dims,
    Factors,
    LocalCall,
    Placed,
    Rule,
    argument,
    rule,
)
from fparallel.layout import Layout
from fparallel.schedule.segment import Runs


def _rows(placed: Placed, dim_layout: Layout, dim: int) -> Runs:
    return Runs(Layout((dim_layout.dims[dim],)))


@rule("aten.embedding.default")
def embedding(node: Node) -> Rule:
    """Sharded over the vocabulary: every rank looks up the rows it holds, an unreduced sum."""
    weight, index = node.inputs
    factors = Factors()
    vocab, embed = factors.new(weight.shape[0]), factors.new(weight.shape[1])
    idx = factors.dims(index.shape)

    def local(placed: Placed) -> LocalCall:
        if placed.axes[vocab]:
            return "local.embedding", (weight, index, _rows(placed, placed.ins[0], 0)), {}
        return node.target, (weight, index), {}

    return Rule(
        factors.sizes, [((vocab,), (embed,)), idx], [(*idx, (embed,))], reduce={vocab: "sum"}, local=local
    )


@rule("aten.embedding_dense_backward.default")
def embedding_backward(node: Node) -> Rule:
    grad, index = node.inputs
    num, padding, scale = node.args[2], node.args[3], node.args[4]
    factors = Factors()
    vocab, embed = factors.new(num), factors.new(grad.shape[-1])
    idx = factors.dims(index.shape)

    def local(placed: Placed) -> LocalCall:
        if placed.axes[vocab]:
            return "local.embedding_backward", (grad, index, _rows(placed, placed.outs[0], 0), padding), {}
        return node.target, node.args, {}

    locked = {f for d in idx for f in d} | {vocab} if scale else set()
    return Rule(
        factors.sizes,
        [(*idx, (embed,)), idx],
        [((vocab,), (embed,))],
        reduce=dict.fromkeys([f for d in idx for f in d], "sum"),
        locked=locked,
        local=local,
    )


@rule("aten.gather.default")
def gather(node: Node) -> Rule:
    """Dims other than `dim` shard where both agree; along a sharded `dim` it picks by comparison."""
    src, index = node.inputs
    dim = node.args[1] % max(1, len(src.shape))
    factors = Factors()
    out = factors.dims(index.shape)
    if not src.shape or len(src.shape) != len(index.shape):  # an empty index may have any rank
        return Rule(
            factors.sizes,
            [tuple((factors.new(s),) for s in src.shape), out],
            [out],
            locked=set(range(len(factors.sizes))),
        )
    along = factors.new(src.shape[dim])
    ins: list[tuple[int, ...]] = []
    locked = set()
    for d, size in enumerate(src.shape):
        if d == dim:
            ins.append((along,))
        elif size == index.shape[d]:
            ins.append(out[d])
        else:
            ins.append((factors.new(size),))
            locked |= {ins[-1][0], out[d][0]}

    def expansion(src: Any, dim: int, index: Any, **kwargs: Any) -> Any:
        dim %= src.dim()
        for d in range(src.dim()):
            src = src if d == dim else src.narrow(d, 0, index.shape[d])
        classes = torch.arange(src.shape[dim], device=src.device)
        hit = index.unsqueeze(dim + 1) == classes.reshape(
            [-1 if d == dim + 1 else 1 for d in range(src.dim() + 1)]
        )
        picked = torch.where(hit, src.unsqueeze(dim), torch.zeros((), dtype=src.dtype, device=src.device))
        return picked.sum(dim + 1).to(src.dtype)

    few = src.dtype.is_floating_point and index.shape[dim] <= 4
    expand = {along: expansion} if few and along not in locked else {}
    if not expand:
        locked.add(along)
    return Rule(factors.sizes, [tuple(ins), out], [out], locked=locked, expand=expand)


@rule(
    "aten.scatter.src",
    "aten.scatter.value",
    "aten.scatter_add.default",
    "aten.scatter_reduce.two",
    "aten.scatter.reduce",
    "aten.scatter.value_reduce",
)
def scatter(node: Node) -> Rule:
    """Dims other than `dim` shard where all operands agree, in scatter_add also `dim`: each adds its own."""
    shape, dim, rest = node.outs[0].shape, node.args[1], node.inputs[1:]
    factors = Factors()
    out = factors.dims(shape)
    if any(len(value.shape) != len(shape) for value in rest) or not shape:  # an empty index may have any rank
        own = [tuple((factors.new(size),) for size in value.shape) for value in rest]
        return Rule(factors.sizes, [out, *own], [out], locked=set(range(len(factors.sizes))))
    dim %= len(shape)
    adds = node.target == "aten.scatter_add.default"
    locked = set() if adds else {out[dim][0]}
    for value in rest:
        locked |= {out[d][0] for d, size in enumerate(value.shape) if size != shape[d] and d != dim}
    ins: list[Dims] = [out]
    for value in rest:
        agree = [size == shape[d] and d != dim for d, size in enumerate(value.shape)]
        dims: Dims = tuple(out[d] if agree[d] else (factors.new(size),) for d, size in enumerate(value.shape))
        ins.append(dims)
        locked |= {f for own_dim in dims for f in own_dim if f >= len(shape)}

    def local(placed: Placed) -> LocalCall:
        if not adds or not placed.axes[out[dim][0]]:
            return node.target, node.args, node.kwargs
        return "local.scatter_add", (node.args[0], dim, *rest, Runs(Layout((placed.outs[0].dims[dim],)))), {}

    return Rule(factors.sizes, ins, [out], locked=locked, local=local)


@rule("aten.index_reduce.default")
def index_reduce(node: Node) -> Rule:
    """Dims other than `dim` shard."""
    x, dim, index, source = node.args[:4]
    factors = Factors()
    out = factors.dims(x.shape)
    picked = factors.new(index.numel)
    if not x.shape:
        return Rule(
            factors.sizes,
            [(), tuple((picked,) for _ in index.shape), tuple((picked,) for _ in source.shape)],
            [()],
            locked={picked},
        )
    dim %= len(x.shape)
    source_dims = tuple((picked,) if d == dim else out[d] for d in range(len(source.shape)))
    ins: list[Dims] = [out, tuple((picked,) for _ in index.shape), source_dims]
    return Rule(factors.sizes, ins, [out], locked={out[dim][0], picked})


@rule("aten.index_select.default")
def index_select(node: Node) -> Rule:
    src, index = node.inputs
    if not src.shape:
        return Rule([max(1, index.numel)], [(), tuple((0,) for _ in index.shape)], [()], locked={0})
    dim = node.args[1] % len(src.shape)
    factors = Factors()
    dims = list(factors.dims(src.shape))
    picked = factors.new(index.numel)
    locked = {dims[dim][0]}
    out = list(dims)
    out[dim] = (picked,)
    return Rule(
        factors.sizes, [tuple(dims), tuple((picked,) for _ in index.shape)], [tuple(out)], locked=locked
    )


class _Indexed:
    """The factors of x[indices]: index tensors broadcast to common dims, which stand where the first stood.

    Along an indexed dim that is sharded every rank picks what it holds, an unreduced sum. An index that
    counts along the whole of its dim (`logits[arange(T), y]`) is the same factor in source and result.
    """

    def __init__(self, x: Value, indices: list[Value | None]) -> None:
        self.indices = [*indices, *[None] * (len(x.shape) - len(indices))]
        given = [v for v in self.indices if v is not None]
        self.shape = tuple(torch.broadcast_shapes(*(v.shape for v in given)))
        self.factors = Factors()
        self.common = self.factors.dims(self.shape)
        self.indexed = [d for d, v in enumerate(self.indices) if v is not None]
        self.own: dict[int, int] = {}  # indexed dims that are factors of their own
        taken: set[int] = set()
        dims: list[tuple[int, ...]] = []
        for d, size in enumerate(x.shape):
            value = self.indices[d]
            counted = None if value is None else _counts_along(value, size)
            at = None if counted is None or value is None else counted + len(self.shape) - len(value.shape)
            if at is not None and self.shape[at] == size and at not in taken:
                taken.add(at)
                dims.append(self.common[at])
                continue
            dims.append((self.factors.new(size),))
            if value is not None:
                self.own[d] = dims[-1][0]
        self.x: Dims = tuple(dims)
        first, last = self.indexed[0], self.indexed[-1]
        rest = [dims[d] for d in range(len(dims)) if d not in self.indexed]
        self.lead = first if self.indexed == list(range(first, last + 1)) else 0
        self.picked: Dims = (*rest[: self.lead], *self.common, *rest[self.lead :])
        self.ins: list[Dims] = [broadcast_dims(self.common, v.shape, self.shape) for v in given]

    def local_args(self, layout: Layout) -> tuple[list[Any], list[int], list[Any]] | None:
        """(indices, sizes, runs) per dim of x for local.index(_put); None if no indexed dim is sharded."""
        runs = [
            Runs(Layout((dim,))) if d in self.indexed and any(f.axes for f in dim) else None
            for d, dim in enumerate(layout.dims)
        ]
        return (list(self.indices), list(layout.shape), runs) if any(runs) else None


def _counts_along(value: Value, size: int) -> int | None:
    """The dim along which an index is 0, 1, ..., size-1 (broadcast over its other dims), or None."""
    node = value.node
    if node is None:
        return None
    if node.target.startswith("aten.arange."):
        start = node.args[0] if node.target != "aten.arange.default" else 0
        step = node.args[2] if node.target == "aten.arange.start_step" and len(node.args) > 2 else 1
        return 0 if (start, step) == (0, 1) and value.shape == (size,) else None
    if node.target in (
        "aten.unsqueeze.default",
        "aten.view.default",
        "aten._to_copy.default",
        "aten.clone.default",
        "aten.expand.default",
    ):
        before = _counts_along(node.args[0], size)
        if before is None:
            return None
        if node.target == "aten.expand.default":
            return before + len(value.shape) - len(node.args[0].shape)
        if (
            node.target in ("aten.unsqueeze.default", "aten.view.default")
            and node.args[0].numel == value.numel == size
        ):
            return next((d for d, n in enumerate(value.shape) if n == size), None)
        return before if value.shape == node.args[0].shape else None
    return None


def _by_mask(indices: list[Any]) -> bool:
    return any(isinstance(i, Value) and i.dtype in (torch.bool, torch.uint8) for i in indices)


@rule("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index_tensor(node: Node) -> Rule | None:
    """Dims of the source without an index stay as they are; see `_Indexed` for the others."""
    x, indices = node.args[0], list(node.args[1])
    if _by_mask(indices):
        return None
    at = _Indexed(x, indices)

    def local(placed: Placed) -> LocalCall:
        args = at.local_args(placed.ins[0])
        if args is None:
            return node.target, node.args, node.kwargs
        return "local.index", (x, *args, at.lead), {}

    own = set(at.own.values())
    sums = not (x.dtype == torch.bool or x.dtype.is_complex)
    return Rule(
        at.factors.sizes,
        [at.x, *at.ins],
        [at.picked],
        reduce=dict.fromkeys(own, "sum") if sums else {},
        locked=set() if sums else own,
        local=local,
    )


@rule("aten.index_put.default", "aten._unsafe_index_put.default")
def index_put(node: Node) -> Rule | None:
    """Dims without an index shard. With accumulate so do indexed dims, and positions: an unreduced sum."""
    x, indices, values = node.args[0], list(node.args[1]), node.args[2]
    accumulate = bool(argument(node, "accumulate"))
    if _by_mask(indices):
        return None
    at = _Indexed(x, indices)
    shape = tuple(math.prod(at.factors.sizes[f] for f in d) for d in at.picked)
    ins = [at.x, *at.ins, broadcast_dims(at.picked, values.shape, shape)]
    positions = {f for d in at.common for f in d} - {f for d in at.x for f in d}
    if not accumulate:
        return Rule(
            at.factors.sizes,
            ins,
            [at.x],
            locked=positions | set(at.own.values()) | {f for d in at.common for f in d},
        )

    def local(placed: Placed) -> LocalCall:
        args = at.local_args(placed.outs[0])
        if args is None:
            return node.target, node.args, node.kwargs
        return "local.index_put", (x, values, *args, at.lead), {}

    def expansion(x: Any, indices: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        return x + torch.ops.aten.index_put.default(torch.zeros_like(x), indices, values, True)

    zeros = x.node is not None and is_zeros(x.node)  # then every rank may start from them
    return Rule(
        at.factors.sizes,
        ins,
        [at.x],
        reduce=dict.fromkeys(positions, "sum"),
        local=local,
        expand={} if zeros else dict.fromkeys(positions, expansion),
    )


@rule("aten.nll_loss_forward.default")
def nll_loss(node: Node) -> Rule | None:
    """Sharded over examples or classes it becomes a masked pick: no logits are gathered."""
    logp = node.inputs[0]
    if len(logp.shape) != 2:
        return None
    factors = Factors()
    n, c = factors.new(logp.shape[0]), factors.new(logp.shape[1])
    weight, reduction = node.args[2], node.args[3]
    ins = [((n,), (c,)), ((n,),)] + ([((c,),)] if weight is not None else [])
    out = ((n,),) if reduction == 0 else ()
    expand: dict[int, Any] = {c: _nll_loss}
    if reduction != 0:
        expand[n] = _nll_loss
    return Rule(factors.sizes, ins, [out, ()], expand=expand)


def _nll_pick(logp: Any, target: Any, weight: Any, ignore: int) -> tuple[Any, Any, Any]:
    classes = torch.arange(logp.shape[1], device=logp.device)
    hit = (target.unsqueeze(1) == classes) & (target != ignore).unsqueeze(1)
    zero = torch.zeros((), dtype=logp.dtype, device=logp.device)
    if weight is None:
        per_example = (target != ignore).to(logp.dtype)
        scaled = logp
    else:
        per_example = torch.where(hit, weight.unsqueeze(0), zero).sum(1)
        scaled = logp * weight
    return torch.where(hit, scaled, zero).sum(1), per_example, hit


def _nll_loss(logp: Any, target: Any, weight: Any, reduction: int, ignore: int) -> Any:
    picked, per_example, _ = _nll_pick(logp, target, weight, ignore)
    if reduction == 0:
        return -picked, logp.new_zeros(())
    total = per_example.sum()
    loss = -picked.sum()
    return (loss / total if reduction == 1 else loss), total


@rule("aten.nll_loss_backward.default")
def nll_loss_backward(node: Node) -> Rule | None:
    grad, logp, _, weight = node.args[:4]
    if len(logp.shape) != 2:
        return None
    factors = Factors()
    n, c = factors.new(logp.shape[0]), factors.new(logp.shape[1])
    grad_dims = ((n,),) if len(grad.shape) else ()
    ins = [grad_dims, ((n,), (c,)), ((n,),)] + ([((c,),)] if weight is not None else []) + [()]
    return Rule(factors.sizes, ins, [((n,), (c,))], expand={c: _nll_loss_backward})


def _nll_loss_backward(
    grad: Any, logp: Any, target: Any, weight: Any, reduction: int, ignore: int, total: Any
) -> Any:
    classes = torch.arange(logp.shape[1], device=logp.device)
    hit = (target.unsqueeze(1) == classes) & (target != ignore).unsqueeze(1)
    scale = -grad / total if reduction == 1 else -grad
    scale = scale.unsqueeze(1) if scale.dim() else scale
    full = scale.expand(logp.shape) if weight is None else scale * weight
    return torch.where(hit, full, torch.zeros((), dtype=logp.dtype, device=logp.device))
