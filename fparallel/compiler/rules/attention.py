"""Fused attention: batch and heads shard, sequence and head dim are whole.

Grouped queries keep the heads of a group together: a query head is (kv head, group).
"""

from __future__ import annotations

from fparallel.compiler.graph import Node
from fparallel.compiler.rules.registry import Dims, Factors, Rule, argument, local_or_empty, rule


def _flops(node: Node) -> int:
    q, k = node.inputs[0], node.inputs[1]
    return 4 * q.numel * k.shape[2]


class _Heads:
    """Factors of q (B, H, T, E) and k, v (B, H or H/g, S, E): a query head is (kv head, group)."""

    def __init__(self, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> None:
        self.factors = Factors()
        new = self.factors.new
        self.batch = (new(q[0]),)
        kv_heads = max(1, k[1])
        self.kv = (new(k[1]),)
        self.heads = (*self.kv, new(q[1] // kv_heads)) if q[1] != k[1] else self.kv
        self.t, self.s, self.e, self.ev = (new(q[2]),), (new(k[2]),), (new(q[3]),), (new(v[3]),)
        self.locked = {self.t[0], self.s[0], self.e[0], self.ev[0]}
        self.q: Dims = (self.batch, self.heads, self.t, self.e)
        self.k: Dims = (self.batch, self.kv, self.s, self.e)
        self.v: Dims = (self.batch, self.kv, self.s, self.ev)
        self.out: Dims = (self.batch, self.heads, self.t, self.ev)
        self.lse: Dims = (self.batch, self.heads, self.t)

    def mask(self, shape: tuple[int, ...], full: tuple[int, ...]) -> Dims:
        own = {0: self.batch, 1: self.heads, 2: self.t, 3: self.s}
        skip = 4 - len(shape)
        return tuple(own[skip + i] if size == full[skip + i] else () for i, size in enumerate(shape))


@rule("aten._scaled_dot_product_flash_attention_for_cpu.default")
def flash_cpu(node: Node) -> Rule:
    q, k, v = (x.shape for x in node.inputs[:3])
    h = _Heads(q, k, v)
    ins = [h.q, h.k, h.v]
    if len(node.inputs) > 3:
        ins.append(h.mask(node.inputs[3].shape, (q[0], q[1], q[2], k[2])))
    return Rule(
        h.factors.sizes, ins, [h.out, h.lse], locked=h.locked, flops=_flops(node), local=local_or_empty
    )


@rule("aten._scaled_dot_product_flash_attention_for_cpu_backward.default")
def flash_cpu_backward(node: Node) -> Rule:
    _, q, k, v, _, _ = (x.shape for x in node.inputs[:6])
    h = _Heads(q, k, v)
    ins = [h.out, h.q, h.k, h.v, h.out, h.lse]
    if len(node.inputs) > 6:
        ins.append(h.mask(node.inputs[6].shape, (q[0], q[1], q[2], k[2])))
    return Rule(
        h.factors.sizes,
        ins,
        [h.q, h.k, h.v],
        reduce=_groups(h),
        locked=h.locked,
        flops=5 * node.inputs[1].numel * k[2],
        local=local_or_empty,
    )


def _groups(h: _Heads) -> dict[int, str]:
    return {f: "sum" for f in h.heads[1:]}


def _cuda_forward(node: Node) -> Rule:
    """Flash, memory-efficient and cuDNN attention: beside out and lse they return bookkeeping, whole."""
    q, k, v = (x.shape for x in node.inputs[:3])
    h = _Heads(q, k, v)
    ins: list[Dims] = [h.q, h.k, h.v]
    ins += [h.mask(x.shape, (q[0], q[1], q[2], k[2])) for x in node.inputs[3:]]
    outs: list[Dims] = [h.out]
    for out in node.outs[1:]:
        is_lse = len(out.shape) >= 3 and out.shape[:2] == (q[0], q[1])
        outs.append(
            (h.batch, h.heads, *(((h.factors.new(s),) if s != 1 else ()) for s in out.shape[2:]))
            if is_lse
            else tuple(() for _ in out.shape)
        )
    locked = set(range(len(h.factors.sizes))) - {*h.batch, *h.heads}
    return Rule(h.factors.sizes, ins, outs, locked=locked, flops=_flops(node), local=local_or_empty)


def _cuda_backward(node: Node) -> Rule:
    grad, q, k, v = (x.shape for x in node.inputs[:4])
    h = _Heads(q, k, v)
    ins: list[Dims] = [h.out, h.q, h.k, h.v]
    for x in node.inputs[4:]:
        if x.shape == grad:
            ins.append(h.out)
        elif len(x.shape) >= 3 and x.shape[:2] == (q[0], q[1]) and argument(node, "attn_bias") is not x:
            ins.append((h.batch, h.heads, *((h.factors.new(s),) if s != 1 else () for s in x.shape[2:])))
        elif len(x.shape) == 4:
            ins.append(h.mask(x.shape, (q[0], q[1], q[2], k[2])))
        else:
            ins.append(tuple(() for _ in x.shape))
    outs: list[Dims] = [h.q, h.k, h.v] + [tuple(() for _ in out.shape) for out in node.outs[3:]]
    locked = set(range(len(h.factors.sizes))) - {*h.batch, *h.heads}
    return Rule(
        h.factors.sizes,
        ins,
        outs,
        reduce=_groups(h),
        locked=locked,
        flops=5 * node.inputs[1].numel * k[2],
        local=local_or_empty,
    )


rule(
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
)(_cuda_forward)
rule(
    "aten._scaled_dot_product_flash_attention_backward.default",
    "aten._scaled_dot_product_efficient_attention_backward.default",
    "aten._scaled_dot_product_cudnn_attention_backward.default",
)(_cuda_backward)
