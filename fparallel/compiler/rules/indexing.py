"""Embedding, gather, scatter, index and the losses that pick by index."""

from __future__ import annotations

from typing import Any

import torch

from fparallel.compiler.graph import Node, Value
from fparallel.compiler.rules.pointwise import broadcast_dims
from fparallel.compiler.rules.registry import Factors, LocalCall, Placed, Rule, rule
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

    return Rule(factors.sizes, [((vocab,), (embed,)), idx], [(*idx, (embed,))], reduce={vocab: "sum"}, local=local)


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
        factors.sizes, [(*idx, (embed,)), idx], [((vocab,), (embed,))],
        reduce=dict.fromkeys([f for d in idx for f in d], "sum"), locked=locked, local=local,
    )  # fmt: skip


@rule("aten.gather.default")
def gather(node: Node) -> Rule:
    """Dims other than `dim` shard where source and index agree; along a sharded `dim` it picks by comparison."""
    src, index = node.inputs
    dim = node.args[1] % max(1, len(src.shape))
    factors = Factors()
    out = factors.dims(index.shape)
    if not src.shape or not index.shape:
        return Rule(factors.sizes, [tuple((factors.new(s),) for s in src.shape), out], [out], locked=set(range(len(factors.sizes))))
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
        classes = torch.arange(src.shape[dim], device=src.device)
        hit = index.unsqueeze(dim + 1) == classes.reshape([-1 if d == dim + 1 else 1 for d in range(src.dim() + 1)])
        picked = torch.where(hit, src.unsqueeze(dim), torch.zeros((), dtype=src.dtype, device=src.device))
        return picked.sum(dim + 1).to(src.dtype)

    expand = {along: expansion} if src.dtype.is_floating_point and index.shape[dim] <= 4 else {}
    if not expand:
        locked.add(along)
    return Rule(factors.sizes, [tuple(ins), out], [out], locked=locked, expand=expand)


@rule("aten.scatter.src", "aten.scatter.value", "aten.scatter_add.default", "aten.scatter_reduce.two", "aten.scatter.reduce",
      "aten.scatter.value_reduce")  # fmt: skip
def scatter(node: Node) -> Rule:
    """Dims other than `dim` shard where all operands agree."""
    dim = node.args[1]
    shape = node.outs[0].shape
    factors = Factors()
    if not shape:
        return Rule([], [()] * len(node.inputs), [()])
    dim %= len(shape)
    out = factors.dims(shape)
    locked = {out[dim][0]}
    for value in node.inputs[1:]:
        for d, size in enumerate(value.shape):
            if size != shape[d]:
                locked.add(out[d][0])
    ins = [out]
    for value in node.inputs[1:]:
        dims = tuple(
            out[d] if size == shape[d] and d != dim else (factors.new(size),) for d, size in enumerate(value.shape)
        )
        locked |= {f for d, size in zip(dims, value.shape, strict=True) for f in d if f >= len(shape)}
        ins.append(dims)
    return Rule(factors.sizes, ins, [out], locked=locked)


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
    return Rule(factors.sizes, [tuple(dims), tuple((picked,) for _ in index.shape)], [tuple(out)], locked=locked)


@rule("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index_tensor(node: Node) -> Rule | None:
    """Index tensors broadcast to common dims; dims of the source without an index stay sharded."""
    src, indices = node.args[0], list(node.args[1])
    if any(isinstance(i, Value) and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return None
    factors, ins_src, index_dims, out, locked = _index_factors(src, indices, node.outs[0].shape)
    ins = [ins_src] + [broadcast_dims(index_dims, v.shape, _index_shape(indices)) for v in indices if v is not None]
    return Rule(factors.sizes, ins, [out], locked=locked)


def _index_shape(indices: list[Value | None]) -> tuple[int, ...]:
    return tuple(torch.broadcast_shapes(*(v.shape for v in indices if v is not None)))


def _index_factors(src: Value, indices: list[Value | None], out_shape: tuple[int, ...]) -> Any:
    factors = Factors()
    src_dims = factors.dims(src.shape)
    indexed = [d for d, v in enumerate(indices) if v is not None]
    index_dims = factors.dims(_index_shape(indices))
    rest = [src_dims[d] for d in range(len(src.shape)) if d not in indexed]
    contiguous = indexed == list(range(indexed[0], indexed[-1] + 1))
    if contiguous:
        out = (*src_dims[: indexed[0]], *index_dims, *src_dims[indexed[-1] + 1 :])
    else:
        out = (*index_dims, *rest)
    locked = {src_dims[d][0] for d in indexed}
    return factors, src_dims, index_dims, tuple(out), locked


@rule("aten.index_put.default", "aten._unsafe_index_put.default")
def index_put(node: Node) -> Rule | None:
    """Dims without an index shard; with accumulate the positions may be sharded too: an unreduced sum."""
    src, indices, values = node.args[0], list(node.args[1]), node.args[2]
    if any(isinstance(i, Value) and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return None
    picked = (*src.shape,)
    factors, src_dims, index_dims, picked_dims, locked = _index_factors(src, indices, picked)
    shape = tuple(factors.sizes[d[0]] for d in picked_dims)
    ins = [src_dims] + [broadcast_dims(index_dims, v.shape, _index_shape(indices)) for v in indices if v is not None]
    ins.append(broadcast_dims(picked_dims, values.shape, shape))
    locked |= {d[0] for d in index_dims}
    return Rule(factors.sizes, ins, [src_dims], locked=locked)


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
    grad, logp, target, weight, reduction, ignore, total = node.args
    if len(logp.shape) != 2:
        return None
    factors = Factors()
    n, c = factors.new(logp.shape[0]), factors.new(logp.shape[1])
    grad_dims = ((n,),) if len(grad.shape) else ()
    ins = [grad_dims, ((n,), (c,)), ((n,),)] + ([((c,),)] if weight is not None else []) + [()]
    return Rule(factors.sizes, ins, [((n,), (c,))], expand={c: _nll_loss_backward})


def _nll_loss_backward(grad: Any, logp: Any, target: Any, weight: Any, reduction: int, ignore: int, total: Any) -> Any:
    classes = torch.arange(logp.shape[1], device=logp.device)
    hit = (target.unsqueeze(1) == classes) & (target != ignore).unsqueeze(1)
    scale = -grad / total if reduction == 1 else -grad
    scale = scale.unsqueeze(1) if scale.dim() else scale
    full = scale.expand(logp.shape) if weight is None else scale * weight
    return torch.where(hit, full, torch.zeros((), dtype=logp.dtype, device=logp.device))

