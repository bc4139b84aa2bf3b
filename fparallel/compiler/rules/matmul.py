"""Matrix products: "m k, k n -> m n" and its batched and biased forms."""

from __future__ import annotations

from typing import Any

import torch

from fparallel.compiler.graph import Node, Value
from fparallel.compiler.rules.pointwise import broadcast_dims
from fparallel.compiler.rules.registry import Dims, Factors, LocalCall, Placed, Rule, local_or_empty, rule
from fparallel.schedule.segment import LocalShape


@rule("aten.mm.default")
def mm(node: Node) -> Rule:
    (m, k), (_, n) = (v.shape for v in node.inputs)
    return Rule(
        [m, k, n], [((0,), (1,)), ((1,), (2,))], [((0,), (2,))], reduce={1: "sum"}, flops=2 * m * k * n
    )


@rule("aten.bmm.default")
def bmm(node: Node) -> Rule:
    (b, m, k), (_, _, n) = (v.shape for v in node.inputs)
    return Rule(
        [b, m, k, n],
        [((0,), (1,), (2,)), ((0,), (2,), (3,))],
        [((0,), (1,), (3,))],
        reduce={2: "sum"},
        flops=2 * b * m * k * n,
    )


@rule("aten.addmm.default", "aten.baddbmm.default")
def addmm(node: Node) -> Rule:
    """bias + a @ b. With k sharded it becomes a product and a sum, since the bias must be added once."""
    bias, a, b = node.inputs
    factors = Factors()
    batch = [factors.new(size) for size in a.shape[:-2]]
    m, k, n = factors.new(a.shape[-2]), factors.new(a.shape[-1]), factors.new(b.shape[-1])
    lead = tuple((f,) for f in batch)
    out = (*lead, (m,), (n,))
    flops = 2 * node.outs[0].numel * a.shape[-1]
    return Rule(
        factors.sizes,
        [broadcast_dims(out, bias.shape, node.outs[0].shape), (*lead, (m,), (k,)), (*lead, (k,), (n,))],
        [out],
        reduce={k: "sum"},
        expand={k: _addmm},
        flops=flops,
    )


def _addmm(bias: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    product = a @ b if a.dim() == 2 else a.bmm(b)
    product = product if alpha == 1 else product * alpha
    return product + (bias if beta == 1 else bias * beta)


@rule("aten.mv.default")
def mv(node: Node) -> Rule:
    m, k = node.inputs[0].shape
    return Rule([m, k], [((0,), (1,)), ((1,),)], [((0,),)], reduce={1: "sum"}, flops=2 * m * k)


@rule("aten.dot.default", "aten.vdot.default")
def dot(node: Node) -> Rule:
    (k,) = node.inputs[0].shape
    return Rule([k], [((0,),), ((0,),)], [()], reduce={0: "sum"}, flops=2 * k)


@rule("aten.addbmm.default")
def addbmm(node: Node) -> Rule:
    bias, a, b = node.inputs
    factors = Factors()
    batch, m, k, n = (factors.new(s) for s in (*a.shape, b.shape[-1]))
    out = ((m,), (n,))

    def expansion(bias: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Any:
        return bias * beta + a.bmm(b).sum(0) * alpha

    return Rule(
        factors.sizes,
        [broadcast_dims(out, bias.shape, node.outs[0].shape), ((batch,), (m,), (k,)), ((batch,), (k,), (n,))],
        [out],
        reduce={batch: "sum", k: "sum"},
        expand={batch: expansion, k: expansion},
        flops=2 * a.numel * b.shape[-1],
    )


class _Convolution:
    """The factors of x (n, i, ...), weight (o, i, ...) or, transposed, (i, o, ...), and result (n, o, ...).

    Space is whole; so are channels in groups.
    """

    def __init__(self, x: Value, weight: Value, out: Value, *, transposed: bool, groups: int) -> None:
        self.factors = Factors()
        self.n, self.i, self.o = (self.factors.new(s) for s in (x.shape[0], x.shape[1], out.shape[1]))
        self.locked = {self.i, self.o} if groups > 1 else set()
        first, second = (
            ((self.i, x.shape[1]), (self.o, out.shape[1]))
            if transposed
            else ((self.o, out.shape[1]), (self.i, x.shape[1]))
        )
        channels = tuple(
            (f if size == weight.shape[d] else self._whole(weight.shape[d]),)
            for d, (f, size) in enumerate((first, second))
        )
        self.x: Dims = ((self.n,), (self.i,), *self._space(x))
        self.out: Dims = ((self.n,), (self.o,), *self._space(out))
        self.weight: Dims = (*channels, *self._space(weight))
        self.flops = 2 * (x.numel if transposed else out.numel) * (weight.numel // max(1, weight.shape[0]))

    def _whole(self, size: int) -> int:
        f = self.factors.new(size)
        self.locked.add(f)
        return f

    def _space(self, value: Value) -> Dims:
        return tuple((self._whole(size),) for size in value.shape[2:])


@rule("aten.convolution.default")
def convolution(node: Node) -> Rule:
    """Shards over the batch and, without groups, channels: of the result freely, of the input as a sum."""
    x, weight, bias = node.args[:3]
    c = _Convolution(x, weight, node.outs[0], transposed=node.args[6], groups=node.args[8])

    def expansion(x: Any, weight: Any, bias: Any, *rest: Any) -> Any:
        return torch.ops.aten.convolution.default(x, weight, None, *rest) + bias.view(
            -1, *[1] * (x.dim() - 2)
        )

    return Rule(
        c.factors.sizes,
        [c.x, c.weight] + ([((c.o,),)] if bias is not None else []),
        [c.out],
        reduce={c.i: "sum"},
        expand={c.i: expansion} if bias is not None else {},
        locked=c.locked,
        flops=c.flops,
        local=local_or_empty,
    )


@rule("aten.convolution_backward.default")
def convolution_backward(node: Node) -> Rule:
    """The gradients of weight and bias are sums over the batch, that of x over the channels of the result."""
    grad, x, weight, bias_sizes = node.args[:4]
    mask = node.args[-1]
    c = _Convolution(x, weight, grad, transposed=node.args[7], groups=node.args[9])
    outs = [c.x, c.weight, ((c.o,),)]

    def local(placed: Placed) -> LocalCall:
        args = list(node.args)
        if mask[2] and bias_sizes:
            args[3] = LocalShape(placed.outs[2])
        return local_or_empty(placed, tuple(args))

    def expansion(grad: Any, x: Any, weight: Any, sizes: Any, *rest: Any) -> Any:
        gx, gw, _ = torch.ops.aten.convolution_backward.default(
            grad, x, weight, None, *rest[:-1], [*mask[:2], False]
        )
        return (
            gx,
            gw,
            grad.sum([0, *range(2, grad.dim())]),
        )  # the same on every rank, even one without channels of x

    return Rule(
        c.factors.sizes,
        [c.out, c.x, c.weight],
        [o if keep else () for o, keep in zip(outs, mask, strict=True)],
        reduce={c.n: "sum", c.o: "sum"},
        locked=c.locked,
        flops=2 * c.flops,
        local=local,
        expand={c.i: expansion} if mask[2] else {},
    )
