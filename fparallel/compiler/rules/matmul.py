"""Matrix products: "m k, k n -> m n" and its batched and biased forms."""

from __future__ import annotations

from typing import Any

from fparallel.compiler.graph import Node
from fparallel.compiler.rules.pointwise import broadcast_dims
from fparallel.compiler.rules.registry import Factors, Rule, rule


@rule("aten.mm.default")
def mm(node: Node) -> Rule:
    (m, k), (_, n) = (v.shape for v in node.inputs)
    return Rule([m, k, n], [((0,), (1,)), ((1,), (2,))], [((0,), (2,))], reduce={1: "sum"}, flops=2 * m * k * n)


@rule("aten.bmm.default")
def bmm(node: Node) -> Rule:
    (b, m, k), (_, _, n) = (v.shape for v in node.inputs)
    return Rule(
        [b, m, k, n], [((0,), (1,), (2,)), ((0,), (2,), (3,))], [((0,), (1,), (3,))], reduce={2: "sum"}, flops=2 * b * m * k * n
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
        factors.sizes, [broadcast_dims(out, bias.shape, node.outs[0].shape), (*lead, (m,), (k,)), (*lead, (k,), (n,))], [out],
        reduce={k: "sum"}, expand={k: _addmm}, flops=flops,
    )  # fmt: skip


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


@rule("aten.convolution.default")
def convolution(node: Node) -> Rule:
    """Shards over the batch only; channels and space are whole."""
    return _convolution(node, 2)


def _convolution(node: Node, operands: int) -> Rule:
    factors = Factors()
    batch = factors.new(node.inputs[0].shape[0])
    ins = [tuple((factors.new(s),) for s in v.shape) for v in node.inputs]
    ins[0] = ((batch,), *ins[0][1:])
    outs = [((batch,), *((factors.new(s),) for s in node.outs[0].shape[1:]))]
    x, w, out = node.inputs[0], node.inputs[1], node.outs[0]
    flops = 2 * out.numel * (w.numel // max(1, w.shape[0]))
    if x.shape[0] == 0 or len(x.shape) < 3 or node.args[6]:  # transposed convolutions keep the batch dim as well
        flops = 2 * x.numel * (w.numel // max(1, w.shape[0]))
    return Rule(factors.sizes, ins, outs, locked=set(range(len(factors.sizes))) - {batch}, flops=flops)


@rule("aten.convolution_backward.default")
def convolution_backward(node: Node) -> Rule:
    """Over the batch: the gradients of weight and bias are sums."""
    grad, x, w = node.inputs
    factors = Factors()
    batch = factors.new(x.shape[0])

    def dims(shape: tuple[int, ...], batched: bool) -> tuple[tuple[int, ...], ...]:
        rest = tuple((factors.new(s),) for s in (shape[1:] if batched else shape))
        return ((batch,), *rest) if batched else rest

    ins = [dims(grad.shape, True), dims(x.shape, True), dims(w.shape, False)]
    mask = node.args[-1]
    outs = [dims(x.shape, True), dims(w.shape, False), dims((grad.shape[1],), False)]
    outs = [o if keep else () for o, keep in zip(outs, mask, strict=True)]
    flops = 4 * grad.numel * (w.numel // max(1, w.shape[0]))
    return Rule(factors.sizes, ins, outs, reduce={batch: "sum"}, locked=set(range(len(factors.sizes))) - {batch}, flops=flops)

