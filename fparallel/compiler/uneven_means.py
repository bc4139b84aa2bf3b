"""Finds plain results of a loop over micro-batches that the mean over micro-batches does not give.

A masked mean, `(nll * mask).sum() / mask.sum()`, is divided by a number that differs from micro-batch to micro-batch:
the mean of such quotients is not the quotient of the whole batch. The fault is a denominator that comes from a
reduction over the rows of the batch and depends on no parameter, in a quotient of which the result is a linear
function. A norm within the model, or a mean per row, is none: the former passes through ops that are not linear, the
latter's denominators have the rows of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from fparallel.compiler.batch_facts import CONSTANT, NLL_LOSSES, BatchFacts, Facts, ignores
from fparallel.compiler.graph import (
    ACCUMULATE,
    CALL,
    MARK_GRADS,
    Graph,
    LoopGraph,
    Node,
    Program,
    Value,
    values_of,
)
from fparallel.compiler.rules import find_rule

_RECIPROCALS = ("aten.reciprocal.default", "aten.rsqrt.default")
_PRODUCTS = ("aten.mul.Tensor", "aten.dot.default")
_SUMS = ("aten.add.Tensor", "aten.sub.Tensor", "aten.rsub.Tensor", "aten.cat.default", "aten.stack.default")
_FIRST = (  # linear in the first operand, for what counts here
    "aten._to_copy.default",
    "aten.nan_to_num.default",
    "aten.masked_fill.Scalar",
)


@dataclass(frozen=True)
class UnevenMean:
    """A result that the mean over micro-batches does not give.

    Attributes:
      loop: the name of the accumulated function.
      result: the path of the result.
      num: micro-batches.
      source: the line of the division.
    """

    loop: str
    result: str
    num: int
    source: str

    def __str__(self) -> str:
        return (
            f"{self.loop}: {self.result} is divided at {self.source} by a number that depends on the micro-batch; "
            f"the mean over {self.num} micro-batches differs from the value of the whole batch, and so do gradients"
        )


def uneven_means(program: Program, params: set[Value]) -> list[UnevenMean]:
    """All of them, in the order of the results. `params`: the inputs of the program that are parameters."""
    found = []
    dependent = _dependent(program, params)
    for node in program.graph.nodes:
        if node.target != ACCUMULATE:
            continue
        loop = program.loops[node.args[3]]
        if not any(loop.means):
            continue
        inside = {i for i, outer in zip(loop.graph.inputs, node.args[0], strict=False) if outer in dependent}
        facts = BatchFacts(program, loop, inside | _differentiated(loop))
        body = _Frame(program, facts, facts.of, _makers(loop.graph))
        for name, value in zip(loop.means, loop.graph.outputs, strict=True):
            source = next(_divisions(body, value), None) if name else None
            if source is not None:
                found.append(UnevenMean(loop.name, name, loop.num, source))
    return found


def _dependent(program: Program, params: set[Value]) -> set[Value]:
    """What outside of loops depends on parameters."""
    found = set(params)
    for node in program.graph.nodes:
        if any(value in found for value in node.inputs):
            found.update(node.outs)
    return found


def _differentiated(loop: LoopGraph) -> set[Value]:
    marks = [node for node in loop.graph.nodes if node.target == MARK_GRADS]
    return {leaf for node in marks for leaf in values_of(node.args[1])}


@dataclass(eq=False)
class _Frame:
    """A body, or a call of a block in it.

    Attributes:
      maker: the node that makes a value.
      bind: per input of the block the value of the caller.
    """

    program: Program
    facts: BatchFacts
    of: Mapping[Value, Facts]
    maker: Mapping[Value, Node]
    bind: Mapping[Value, Value] = field(default_factory=dict)
    outer: _Frame | None = None

    def into(self, node: Node) -> _Frame:
        """The frame of a block that this one calls."""
        block = self.program.blocks[node.args[1]]
        bind = dict(zip(block.inputs, node.args[0], strict=True))
        of = self.facts.inside[id(node)]
        return _Frame(self.program, self.facts, of, _makers(block.graph), bind, self)


def _makers(graph: Graph) -> dict[Value, Node]:
    return {out: node for node in graph.nodes for out in node.outs if out is not None}


def _divisions(body: _Frame, result: Value) -> Iterator[str]:
    """The lines that divide, by what counts in the batch, something of which a result is a linear function."""
    left = [(body, result)]
    seen: set[tuple[_Frame, Value]] = set()
    calls: dict[tuple[_Frame, Node], _Frame] = {}
    while left:
        frame, value = left.pop()
        if (frame, value) in seen or not frame.of.get(value, CONSTANT).batch:
            continue
        seen.add((frame, value))
        node = frame.maker.get(value)
        if node is None:
            if frame.outer is not None:
                left.append((frame.outer, frame.bind[value]))
        elif node.target == CALL:
            if (frame, node) not in calls:
                calls[frame, node] = frame.into(node)
            outputs = body.program.blocks[node.args[1]].outputs
            left.append((calls[frame, node], outputs[node.outs.index(value)]))
        else:
            if _divides(node, frame.of):
                yield node.source
            left.extend((frame, operand) for operand in _linear_in(node, frame.of))


def _divides(node: Node, facts: Mapping[Value, Facts]) -> bool:
    if node.target in NLL_LOSSES:
        return ignores(node, facts)
    divisor = None
    if node.target == "aten.div.Tensor":
        divisor = node.args[1]
    elif node.target in _RECIPROCALS or (node.target == "aten.pow.Tensor_Scalar" and node.args[1] < 0):
        divisor = node.args[0]
    return isinstance(divisor, Value) and facts.get(divisor, CONSTANT).counts


def _linear_in(node: Node, facts: Mapping[Value, Facts]) -> list[Value]:
    """The operands of which a node is a linear function, each by itself; not those of products with parameters."""
    if node.target in _PRODUCTS:
        pairs = [(node.args[0], node.args[1]), (node.args[1], node.args[0])]
        return [x for x, other in pairs if isinstance(x, Value) and _weighs(other, facts)]
    if node.target == "aten.where.self":
        return [x for x in node.args[1:3] if isinstance(x, Value)]
    if node.target in _FIRST:
        return node.inputs[:1]
    if len(node.inputs) > 1 and node.target not in _SUMS:
        return []
    rule = find_rule(node)
    return [] if rule is None else [node.inputs[i] for i in frozenset[int]().union(*rule.linear)]


def _weighs(factor: object, facts: Mapping[Value, Facts]) -> bool:
    """Whether a factor of a product is a number or depends on the batch: a layer's scale is neither."""
    if not isinstance(factor, Value) or factor.numel == 1:
        return True
    found = facts.get(factor, CONSTANT)
    return found.batch or not found.params
