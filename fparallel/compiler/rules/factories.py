"""Ops whose result depends on no data: constants, ranges, keyed draws. Every shard makes its own part."""

from __future__ import annotations

from typing import Any

from fparallel.compiler.graph import Node
from fparallel.compiler.rules.registry import Factors, LocalCall, Placed, Rule, argument, rule
from fparallel.layout import Layout
from fparallel.schedule.segment import LocalShape, Runs


def _device(node: Node) -> str:
    return str(node.kwargs.get("device") or "cpu")


@rule(
    "aten.full.default",
    "aten.zeros.default",
    "aten.ones.default",
    "aten.empty.memory_format",
    "aten.scalar_tensor.default",
    "aten.full_like.default",
    "aten.zeros_like.default",
    "aten.ones_like.default",
    "aten.empty_like.default",
    "aten.new_zeros.default",
    "aten.new_ones.default",
    "aten.new_full.default",
    "aten.new_empty.default",
    "aten.empty_strided.default",
    "aten.new_empty_strided.default",
    "aten.zero.default",
    "aten.fill.Scalar",
)
def constant(node: Node) -> Rule:
    factors = Factors()
    out = factors.dims(node.outs[0].shape)
    value = fill_value(node)

    def local(placed: Placed) -> LocalCall:
        kwargs = {"dtype": node.outs[0].dtype, "device": _device(node)}
        return "aten.full.default", (LocalShape(placed.outs[0]), value), kwargs

    ins = [
        out if v.shape == node.outs[0].shape else tuple((factors.new(s),) for s in v.shape)
        for v in node.inputs
    ]
    return Rule(factors.sizes, ins, [out], local=local, factory=True)


def fill_value(node: Node) -> Any:
    """The value of a constant factory (zeros for uninitialised memory, so that results are defined)."""
    name = node.target
    if "full" in name or "fill" in name:
        return argument(node, "fill_value", argument(node, "value"))
    if "scalar_tensor" in name:
        return node.args[0]
    return 1 if "ones" in name else 0


_CONSTANT = (
    "aten.full.",
    "aten.zeros",
    "aten.full_like.",
    "aten.new_zeros.",
    "aten.new_full.",
    "aten.zero.",
    "aten.fill.Scalar",
)


def is_zeros(node: Node) -> bool:
    """Whether a node makes a tensor of zeros."""
    return node.target.startswith(_CONSTANT) and fill_value(node) == 0


@rule("aten.arange.default", "aten.arange.start", "aten.arange.start_step")
def arange(node: Node) -> Rule:
    start, step = 0, 1
    if node.target != "aten.arange.default":
        start = node.args[0]
    if node.target == "aten.arange.start_step" and len(node.args) > 2:
        step = node.args[2]

    def local(placed: Placed) -> LocalCall:
        if not placed.outs[0].sharded_axes:
            return node.target, node.args, node.kwargs
        runs = Runs(placed.outs[0])
        return "local.arange", (runs, start, step, node.outs[0].dtype, _device(node)), {}

    return Rule([node.outs[0].shape[0]], [], [((0,),)], local=local, factory=True)


@rule(
    "aten.eye.default",
    "aten.eye.m",
    "aten.linspace.default",
    "aten.logspace.default",
    "aten.tril_indices.default",
    "aten.triu_indices.default",
    "aten.hann_window.default",
    "aten.hamming_window.default",
)
def whole_constant(node: Node) -> Rule:
    factors = Factors()
    out = factors.dims(node.outs[0].shape)
    return Rule(factors.sizes, [], [out], locked=set(range(len(factors.sizes))), factory=True)


@rule("fparallel.random.default")
def random_draw(node: Node) -> Rule:
    """A counter-based draw: a shard draws exactly its own positions of the global array."""
    key, kind, shape, dtype, low, high = node.args
    factors = Factors()
    out = factors.dims(node.outs[0].shape)
    whole = tuple((factors.new(s),) for s in key.shape)

    def local(placed: Placed) -> LocalCall:
        if not placed.outs[0].sharded_axes:
            return node.target, node.args, node.kwargs
        return (
            "local.random",
            (key, kind, list(shape), dtype, low, high, Runs(Layout(placed.outs[0].dims))),
            {},
        )

    return Rule(
        factors.sizes, [whole], [out], locked={f for d in whole for f in d}, local=local, factory=True
    )


@rule("fparallel.fold_in.default", "fparallel.split.default")
def key_op(node: Node) -> Rule:
    factors = Factors()
    ins = [tuple((factors.new(s),) for s in v.shape) for v in node.inputs]
    outs = [tuple((factors.new(s),) for s in v.shape) for v in node.outs]
    return Rule(factors.sizes, ins, outs, locked=set(range(len(factors.sizes))))
