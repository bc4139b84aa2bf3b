"""Reductions, normalisations over a dim, and ops that need one dim whole."""

from __future__ import annotations

import math
from typing import Any

import torch

from fparallel.compiler.graph import Node
from fparallel.compiler.rules.registry import (
    Dims,
    Factors,
    LocalCall,
    Placed,
    Rule,
    argument,
    local_or_empty,
    rule,
)
from fparallel.schedule.segment import LocalSize

_FIRST = [frozenset((0,))]


def accurate(x: Any) -> Any:
    """Half precision is computed in float32, as torch's kernels do."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def reduced_dims(node: Node, dim: Any) -> list[int]:
    num = len(node.inputs[0].shape)
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return list(range(num))
    dims = [dim] if isinstance(dim, int) else list(dim)
    return [d % num for d in dims] if num else []


def _reduction(node: Node, dims: list[int], keepdim: bool, kind: str | None, **kwargs: Any) -> Rule:
    factors = Factors()
    src = factors.dims(node.inputs[0].shape)
    out: Dims = tuple(() if i in dims else d for i, d in enumerate(src) if keepdim or i not in dims)
    gone = {src[d][0] for d in dims}
    if kind is None:
        return Rule(factors.sizes, [src], [out] * len(node.outs), locked=gone, **kwargs)
    return Rule(factors.sizes, [src], [out] * len(node.outs), reduce=dict.fromkeys(gone, kind), **kwargs)


@rule("aten.sum.default", "aten.sum.dim_IntList")
def sum_(node: Node) -> Rule:
    return _reduction(
        node, reduced_dims(node, argument(node, "dim")), bool(argument(node, "keepdim")), "sum", linear=_FIRST
    )


@rule("aten.mean.default", "aten.mean.dim")
def mean(node: Node) -> Rule:
    """The mean divides by the global count: where a reduced dim is sharded it is a sum and a division."""
    dims, keepdim = reduced_dims(node, argument(node, "dim")), bool(argument(node, "keepdim"))
    count = math.prod(node.inputs[0].shape[d] for d in dims)

    def expansion(x: Any, *args: Any, **kwargs: Any) -> Any:
        dtype = kwargs.get("dtype") or x.dtype
        return (accurate(x.to(dtype)).sum(dims, keepdim) / count).to(dtype)

    made = _reduction(node, dims, keepdim, "sum", linear=_FIRST)
    made.expand = dict.fromkeys(made.reduce, expansion)
    return made


@rule("aten.amax.default", "aten.amin.default", "aten.max.default", "aten.min.default")
def extremum(node: Node) -> Rule:
    kind = "max" if "max" in node.target else "min"
    dims = reduced_dims(node, argument(node, "dim"))
    keepdim = bool(argument(node, "keepdim", False))
    value = node.inputs[0]

    def local(placed: Placed) -> LocalCall:
        if placed.ins[0].is_even or not dims:
            return node.target, node.args, node.kwargs
        return "local.extremum", (value, kind, dims, keepdim), {}

    return _reduction(node, dims, keepdim, kind, local=local)


@rule(
    "aten.any.default", "aten.any.dim", "aten.any.dims", "aten.all.default", "aten.all.dim", "aten.all.dims"
)
def logical(node: Node) -> Rule:
    kind = "max" if ".any." in node.target else "min"
    made = _reduction(
        node, reduced_dims(node, argument(node, "dim")), bool(argument(node, "keepdim", False)), kind
    )
    return made if node.outs[0].dtype == torch.bool else _locked_version(made)


def _locked_version(made: Rule) -> Rule:
    made.locked |= set(made.reduce)
    made.reduce = {}
    return made


@rule(
    "aten.max.dim",
    "aten.min.dim",
    "aten.argmax.default",
    "aten.argmin.default",
    "aten.prod.default",
    "aten.prod.dim_int",
    "aten.median.dim",
    "aten.nanmedian.dim",
    "aten.kthvalue.default",
    "aten.mode.default",
)
def whole_reduction(node: Node) -> Rule:
    return _reduction(
        node, reduced_dims(node, argument(node, "dim")), bool(argument(node, "keepdim", False)), None
    )


@rule("aten.linalg_vector_norm.default")
def vector_norm(node: Node) -> Rule:
    order = argument(node, "ord")
    dims, keepdim = reduced_dims(node, argument(node, "dim")), bool(argument(node, "keepdim"))
    made = _reduction(node, dims, keepdim, "sum")

    def expansion(x: Any, *args: Any, **kwargs: Any) -> Any:
        x = accurate(x.to(argument(node, "dtype") or x.dtype))
        if order in (float("inf"), float("-inf")):
            norm = x.abs().amax(dims, keepdim) if order > 0 else x.abs().amin(dims, keepdim)
        elif order == 0:
            norm = (x != 0).to(x.dtype).sum(dims, keepdim)
        else:
            norm = x.abs().pow(order).sum(dims, keepdim).pow(1 / order)
        return norm.to(node.outs[0].dtype)

    made.expand = dict.fromkeys(made.reduce, expansion)
    return made


@rule("aten.logsumexp.default")
def logsumexp(node: Node) -> Rule:
    dims, keepdim = reduced_dims(node, argument(node, "dim")), bool(argument(node, "keepdim"))
    made = _reduction(node, dims, keepdim, "sum")

    def expansion(x: Any, *args: Any, **kwargs: Any) -> Any:
        x = accurate(x)
        top = x.amax(dims, True)
        top = torch.where(top.isinf(), torch.zeros_like(top), top)
        total = (x - top).exp().sum(dims, keepdim).log()
        return (total + (top if keepdim else top.sum(dims))).to(node.outs[0].dtype)

    made.expand = dict.fromkeys(made.reduce, expansion)
    return made


def _along(node: Node, dims: set[int], expansion: Any = None, **kwargs: Any) -> Rule:
    """Same shape in and out, with `dims` whole, or expanded where they are sharded."""
    factors = Factors()
    out = factors.dims(node.outs[0].shape)
    special = {out[d][0] for d in dims}
    locked = set() if expansion else special
    expand = dict.fromkeys(special, expansion) if expansion else {}
    ins = [out for _ in node.inputs]
    return Rule(factors.sizes, ins, [out] * len(node.outs), locked=locked, expand=expand, **kwargs)


@rule("aten._softmax.default", "aten._log_softmax.default")
def softmax(node: Node) -> Rule:
    """Sharded along its dim: two small all-reduces, of the maximum and of the sum of exponentials."""
    dim = node.args[1] % max(1, len(node.inputs[0].shape))
    log = "log" in node.target

    def expansion(x: Any, *args: Any, **kwargs: Any) -> Any:
        x = accurate(x)
        shifted = x - x.amax(dim, keepdim=True)
        exp = shifted.exp()
        out = shifted - exp.sum(dim, keepdim=True).log() if log else exp / exp.sum(dim, keepdim=True)
        return out.to(node.outs[0].dtype)

    return _along(node, {dim} if node.inputs[0].shape else set(), expansion)


@rule("aten._softmax_backward_data.default", "aten._log_softmax_backward_data.default")
def softmax_backward(node: Node) -> Rule:
    dim = node.args[2] % max(1, len(node.inputs[0].shape))
    log = "log" in node.target

    def expansion(grad: Any, out: Any, *args: Any, **kwargs: Any) -> Any:
        grad, out = accurate(grad), accurate(out)
        if log:
            made = grad - out.exp() * grad.sum(dim, keepdim=True)
        else:
            made = out * (grad - (out * grad).sum(dim, keepdim=True))
        return made.to(node.outs[0].dtype)

    return _along(node, {dim} if node.inputs[0].shape else set(), expansion)


@rule(
    "aten.cumsum.default",
    "aten.cumprod.default",
    "aten.logcumsumexp.default",
    "aten.sort.default",
    "aten.sort.stable",
    "aten.argsort.default",
    "aten.cummax.default",
    "aten.cummin.default",
)
def scan(node: Node) -> Rule:
    dim = argument(node, "dim", -1)
    shape = node.inputs[0].shape
    return _along(
        node,
        {dim % len(shape)} if shape else set(),
        linear=_FIRST if node.target == "aten.cumsum.default" else (),
    )


@rule("aten.topk.default")
def topk(node: Node) -> Rule:
    factors = Factors()
    src = factors.dims(node.inputs[0].shape)
    if not src:
        return Rule([], [()], [(), ()])
    dim = argument(node, "dim", -1) % len(src)
    out = list(src)
    out[dim] = (factors.new(node.outs[0].shape[dim]),)
    return Rule(factors.sizes, [src], [tuple(out)] * 2, locked={src[dim][0], out[dim][0]})


@rule("aten.var.correction", "aten.std.correction", "aten.var_mean.correction")
def variance(node: Node) -> Rule:
    dims, keepdim = reduced_dims(node, argument(node, "dim")), bool(argument(node, "keepdim"))
    correction = argument(node, "correction")
    correction = 1 if correction is None else correction
    count = math.prod(node.inputs[0].shape[d] for d in dims)
    made = _reduction(node, dims, keepdim, "sum")

    def expansion(x: Any, *args: Any, **kwargs: Any) -> Any:
        x = accurate(x)
        center = x.sum(dims, True) / count
        var = (x - center).square().sum(dims, keepdim) / max(0, count - correction)
        dtype = node.outs[0].dtype
        if "var_mean" in node.target:
            return var.to(dtype), (center if keepdim else center.sum(dims)).to(dtype)
        return (var.sqrt() if "std" in node.target else var).to(dtype)

    made.expand = dict.fromkeys(made.reduce, expansion)
    return made


# ---------------------------------------------------------------- layer norm


def _norm_factors(node: Node, num_normalized: int) -> tuple[Factors, Dims, Dims, Dims]:
    factors = Factors()
    full = factors.dims(node.inputs[0].shape)
    lead, tail = full[: len(full) - num_normalized], full[len(full) - num_normalized :]
    return factors, full, lead, tail


@rule("aten.native_layer_norm.default")
def layer_norm(node: Node) -> Rule:
    _, shape, weight, bias, _ = node.args
    factors, full, lead, tail = _norm_factors(node, len(shape))
    stats = (*lead, *(() for _ in tail))
    stats = stats[: len(node.outs[1].shape)]
    dims = list(range(len(lead), len(full)))
    count = math.prod(shape)

    def expansion(x: Any, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
        x = accurate(x)
        mean = x.sum(dims, True) / count
        centered = x - mean
        rstd = (centered.square().sum(dims, True) / count + eps).rsqrt()
        out = centered * rstd
        out = out if weight is None else out * weight
        out = out if bias is None else out + bias
        return tuple(value.to(made.dtype) for value, made in zip((out, mean, rstd), node.outs, strict=True))

    ins = [full] + [tail for v in (weight, bias) if v is not None]
    return Rule(
        factors.sizes,
        ins,
        [full, stats, stats],
        expand=dict.fromkeys([f for d in tail for f in d], expansion),
    )


@rule("aten.native_layer_norm_backward.default")
def layer_norm_backward(node: Node) -> Rule:
    _, _, shape, mean, _, weight, bias, mask = node.args
    factors, full, lead, tail = _norm_factors(node, len(shape))
    stats = (*lead, *(() for _ in tail))[: len(mean.shape)]
    dims, leads = list(range(len(lead), len(full))), list(range(len(lead)))
    count = math.prod(shape)

    def expansion(
        grad: Any, x: Any, shape: Any, mean: Any, rstd: Any, weight: Any, bias: Any, mask: Any
    ) -> Any:
        dtypes = [value.dtype for value in (x, x if weight is None else weight, x if bias is None else bias)]
        grad, x, mean, rstd = accurate(grad), accurate(x), accurate(mean), accurate(rstd)
        hat = (x - mean) * rstd
        scaled = grad if weight is None else grad * weight
        inner = scaled.sum(dims, True) + hat * (scaled * hat).sum(dims, True)
        dx = (scaled - inner / count) * rstd
        zero = grad.new_zeros(())
        dw = (grad * hat).sum(leads) if leads else grad * hat
        db = grad.sum(leads) if leads else grad
        made = (value if keep else zero for value, keep in zip((dx, dw, db), mask, strict=True))
        return tuple(value.to(dtype) for value, dtype in zip(made, dtypes, strict=True))

    ins = [full, full, stats, stats] + [tail for v in (weight, bias) if v is not None]
    outs = [full if mask[0] else (), tail if mask[1] else (), tail if mask[2] else ()]
    return Rule(
        factors.sizes,
        ins,
        outs,
        reduce=dict.fromkeys([f for d in lead for f in d], "sum"),
        local=lambda placed: ("local.layer_norm_backward", placed.node.args, placed.node.kwargs),
        expand=dict.fromkeys([f for d in tail for f in d], expansion),
    )


@rule("aten._fused_rms_norm.default")
def rms_norm(node: Node) -> Rule:
    _, shape, weight, _ = node.args
    factors, full, lead, tail = _norm_factors(node, len(shape))
    stats = (*lead, *(() for _ in tail))[: len(node.outs[1].shape)]
    dims = list(range(len(lead), len(full)))
    count = math.prod(shape)

    def expansion(x: Any, shape: Any, weight: Any, eps: Any) -> Any:
        eps = torch.finfo(x.dtype).eps if eps is None else eps
        x = accurate(x)
        rstd = (x.square().sum(dims, True) / count + eps).rsqrt()
        out = x * rstd
        out = out if weight is None else out * weight
        return out.to(node.outs[0].dtype), rstd.to(node.outs[1].dtype)

    ins = [full] + [tail for v in (weight,) if v is not None]
    return Rule(
        factors.sizes, ins, [full, stats], expand=dict.fromkeys([f for d in tail for f in d], expansion)
    )


@rule("aten._fused_rms_norm_backward.default")
def rms_norm_backward(node: Node) -> Rule:
    _, _, shape, rstd, weight, mask = node.args
    factors, full, lead, tail = _norm_factors(node, len(shape))
    stats = (*lead, *(() for _ in tail))[: len(rstd.shape)]
    ins = [full, full, stats] + [tail for v in (weight,) if v is not None]
    outs = [full if mask[0] else (), tail if mask[1] else ()]
    dims, leads = list(range(len(lead), len(full))), list(range(len(lead)))
    count = math.prod(shape)

    def expansion(grad: Any, x: Any, shape: Any, rstd: Any, weight: Any, mask: Any) -> Any:
        dtypes = [x.dtype, x.dtype if weight is None else weight.dtype]
        grad, x, rstd = accurate(grad), accurate(x), accurate(rstd)
        hat = x * rstd
        scaled = grad if weight is None else grad * weight
        dx = (scaled - hat * (scaled * hat).sum(dims, True) / count) * rstd
        dw = (grad * hat).sum(leads) if leads else grad * hat
        zero = grad.new_zeros(())
        return (dx if mask[0] else zero).to(dtypes[0]), (dw if mask[1] else zero).to(dtypes[1])

    return Rule(
        factors.sizes,
        ins,
        outs,
        reduce=dict.fromkeys([f for d in lead for f in d], "sum"),
        expand=dict.fromkeys([f for d in tail for f in d], expansion),
    )


@rule("aten.native_group_norm.default")
def group_norm(node: Node) -> Rule:
    """Batch and groups shard; the channels of a group and space are whole."""
    x, weight, bias, num, channels, space, groups, eps = node.args
    factors = Factors()
    batch, group, channel = factors.new(num), factors.new(groups), factors.new(channels // groups)
    rest = tuple((factors.new(s),) for s in x.shape[2:])
    full = ((batch,), (group, channel), *rest)
    ins = [full] + [((group, channel),) for v in (weight, bias) if v is not None]

    def local(placed: Placed) -> LocalCall:
        args = (
            x,
            weight,
            bias,
            LocalSize(placed.ins[0], 0),
            LocalSize(placed.ins[0], 1),
            space,
            LocalSize(placed.outs[1], 1),
            eps,
        )
        return local_or_empty(placed, args)

    locked = {channel} | {f for (f,) in rest}
    return Rule(
        factors.sizes, ins, [full, ((batch,), (group,)), ((batch,), (group,))], locked=locked, local=local
    )
