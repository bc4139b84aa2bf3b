"""Pointwise ops: every dim is a factor of its own, broadcast dims are whole."""

from __future__ import annotations

import torch

from fparallel.compiler.graph import Node
from fparallel.compiler.rules.registry import Dims, Factors, Rule, rule

_BOTH, _EITHER, _FIRST = [frozenset((0, 1))], [frozenset((0,)), frozenset((1,))], [frozenset((0,))]
_LINEAR = {
    "aten.add.Tensor": _BOTH,
    "aten.sub.Tensor": _BOTH,
    "aten.rsub.Tensor": _BOTH,
    "aten.mul.Tensor": _EITHER,
    "aten.div.Tensor": _FIRST,
    "aten.neg.default": _FIRST,
    "aten.mul.Scalar": _FIRST,
    "aten.div.Scalar": _FIRST,
    "aten.clone.default": _FIRST,
    "aten.where.self": [frozenset((1, 2))],
}


def broadcast_dims(factors: Dims, shape: tuple[int, ...], out_shape: tuple[int, ...]) -> Dims:
    """The dims of an operand of `shape` that broadcasts to `out_shape`, whose dims are `factors`."""
    skip = len(out_shape) - len(shape)
    return tuple(factors[skip + i] if size == out_shape[skip + i] else () for i, size in enumerate(shape))


def pointwise(node: Node) -> Rule | None:
    """All tensor operands broadcast to the result."""
    out_shape = node.outs[0].shape
    if any(out.shape != out_shape for out in node.outs) or not node.inputs:
        return None
    factors = Factors()
    dims = factors.dims(out_shape)
    for value in node.inputs:
        if len(value.shape) > len(out_shape):
            return None
        for size, out in zip(reversed(value.shape), reversed(out_shape), strict=False):
            if size not in (1, out):
                return None
    ins = [broadcast_dims(dims, value.shape, out_shape) for value in node.inputs]
    linear = _LINEAR.get(node.target, ())
    if node.target == "aten._to_copy.default" and _keeps_sums(node):
        linear = _FIRST
    if node.target == "aten.where.self":
        linear = linear if len(node.inputs) == 3 else ()
    if (
        node.target in ("aten.add.Tensor", "aten.sub.Tensor", "aten.rsub.Tensor", "aten.mul.Tensor")
        and len(node.inputs) == 1
    ):
        linear = _FIRST if node.target == "aten.mul.Tensor" else ()
    return Rule(factors.sizes, ins, [dims] * len(node.outs), linear=linear, elementwise=True)


def _keeps_sums(node: Node) -> bool:
    """A cast commutes with a sum (up to rounding) between float dtypes that do not get narrower."""
    src, dst = node.inputs[0].dtype, node.outs[0].dtype
    return src.is_floating_point and dst.is_floating_point and dst.itemsize >= src.itemsize


rule(
    "aten._to_copy.default",
    "aten.clone.default",
    "aten.masked_fill.Scalar",
    "aten.masked_fill.Tensor",
    "aten.gelu_backward.default",
    "aten.silu_backward.default",
    "aten.sigmoid_backward.default",
    "aten.tanh_backward.default",
    "aten.threshold_backward.default",
    "aten.elu_backward.default",
    "aten.hardtanh_backward.default",
    "aten.leaky_relu_backward.default",
    "aten.softplus_backward.default",
    "aten.log_sigmoid_backward.default",
    "aten.nan_to_num.default",
    "aten.where.self",
    "aten.where.ScalarSelf",
    "aten.where.ScalarOther",
    "aten.lift_fresh_copy.default",
    "aten.copy.default",
)(pointwise)


@rule("aten._conj.default", "aten._neg_view.default", "aten._conj_physical.default")
def refuse_lazy_bits(node: Node) -> Rule | None:
    return pointwise(node) if node.inputs[0].dtype != torch.complex64 else None
