"""What the values of a loop's body depend on, and which of their dims are rows of the batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fparallel.compiler.graph import CALL, Graph, LoopGraph, Node, Program, Value
from fparallel.compiler.rules import Rule, find_rule

Parts = tuple[
    tuple[int, bool], ...
]  # of a dim: sizes, major first, each with whether it is the rows of the batch

NLL_LOSSES = ("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
IGNORED = -100  # torch's default `ignore_index`: of labels that nobody set to it there are none


@dataclass(frozen=True)
class Facts:
    """What is known of a value.

    Attributes:
      batch, params: whether it depends on the contents of the batch, on parameters.
      dims: the parts of each dim, for what depends on the batch and on no parameter.
      reduced: whether rows of the batch have been reduced on the way to it.
      ignored: whether a condition on the batch has set some of it to the label that torch's losses ignore.
    """

    batch: bool = False
    params: bool = False
    dims: tuple[Parts, ...] = ()
    reduced: bool = False
    ignored: bool = False

    @property
    def counts(self) -> bool:
        """Whether it is made by a reduction over the rows of the batch, such as a number of unmasked tokens."""
        rows = any(is_rows for parts in self.dims for _, is_rows in parts)
        return self.batch and not self.params and self.reduced and not rows


CONSTANT = Facts()


def _plain(shape: Sequence[int]) -> tuple[Parts, ...]:
    return tuple(((size, False),) for size in shape)


class BatchFacts:
    """The facts of a loop's body and of the blocks that it calls.

    Attributes:
      of: by Value of the body.
      inside: of a call of a block, by Value of the block.
    """

    def __init__(self, program: Program, loop: LoopGraph, params: set[Value]) -> None:
        """`params`: the inputs of the body that are parameters."""
        self.program = program
        self.blocks: dict[tuple[int, tuple[Facts, ...]], dict[Value, Facts]] = {}
        self.inside: dict[int, dict[Value, Facts]] = {}  # by id of the calling node
        parts = loop.graph.inputs[loop.num_whole : loop.num_whole + loop.num_batch]
        self.of: dict[Value, Facts] = {value: Facts(params=True) for value in params}
        for value in parts:
            rows, *rest = value.shape
            self.of[value] = Facts(batch=True, dims=(((rows, True),), *_plain(rest)))
        self._run(loop.graph, loop.graph.nodes, self.of)

    def _run(self, graph: Graph, nodes: Sequence[Node], facts: dict[Value, Facts]) -> None:
        losses = [node for node in nodes if node.target in NLL_LOSSES]
        for node in nodes:
            given = [facts.get(value, CONSTANT) for value in node.inputs]
            made: Sequence[Facts]
            if node.target == CALL:
                made = self._call(node, facts)
            elif _looks_in_vain(node, losses, facts):
                made = [CONSTANT]
            else:
                made = _facts(node, given)
                if any(f.ignored for f in given) or _sets_ignored(graph, node, given):
                    made = [replace(f, ignored=True) for f in made]
            facts.update(zip(node.outs, made, strict=True))

    def _call(self, node: Node, facts: dict[Value, Facts]) -> list[Facts]:
        values, index = node.args
        block = self.program.blocks[index]
        given = tuple(
            facts.get(value, Facts(dims=_plain(value.shape))) if isinstance(value, Value) else CONSTANT
            for value in values
        )
        key = (index, given)
        if key not in self.blocks:
            inside = self.blocks[key] = dict(zip(block.inputs, given, strict=True))
            self._run(block.graph, block.graph.nodes[: block.num_forward], inside)
        self.inside[id(node)] = self.blocks[key]
        outs = [self.blocks[key].get(value, CONSTANT) for value in block.outputs]
        return [*outs, Facts(batch=True, params=True)]


def _facts(node: Node, given: Sequence[Facts]) -> list[Facts]:
    batch, params = any(f.batch for f in given), any(f.params for f in given)
    if not batch or params:
        return [Facts(batch, params)] * len(node.outs)
    rule = find_rule(node)
    if rule is not None:
        return _through(rule, node, given)
    single = all(out is not None and out.numel == 1 for out in node.outs)
    return [Facts(batch=True, params=not single, reduced=single)] * len(node.outs)


def _through(rule: Rule, node: Node, given: Sequence[Facts]) -> list[Facts]:
    """What an op of the batch alone gives."""
    if rule.factory:
        return [CONSTANT] * len(node.outs)
    parts: dict[int, Parts] = {}
    for facts, value, dims in zip(given, node.inputs, rule.ins, strict=True):
        held = facts.dims or _plain(value.shape)
        for of_dim, factors in zip(held, dims, strict=True):
            for factor, its in _cut(of_dim, [(f, rule.sizes[f]) for f in factors]):
                if factor not in parts or not any(rows for _, rows in parts[factor]):
                    parts[factor] = its
    made = []
    for dims in rule.outs:
        kept = {factor for dim in dims for factor in dim}
        gone = any(rows for factor, its in parts.items() if factor not in kept for _, rows in its)
        out = tuple(
            tuple(part for f in dim for part in parts.get(f, ((rule.sizes[f], False),))) for dim in dims
        )
        reduced = any(facts.reduced for facts in given) or (gone and not rule.view)
        made.append(Facts(batch=True, dims=out, reduced=reduced))
    return made


def _cut(parts: Parts, factors: Sequence[tuple[int, int]]) -> Iterator[tuple[int, Parts]]:
    """The parts of a dim for each of its factors (number, size), major first."""
    if len(factors) == 1:
        yield factors[0][0], parts
        return
    left = list(parts)
    for number, size in factors:
        taken: list[tuple[int, bool]] = []
        product = 1
        while left and product < size:
            taken.append(left.pop(0))
            product *= taken[-1][0]
        if product != size:  # the factors cut a part: any of them may be rows
            rows = any(is_rows for _, is_rows in parts)
            yield from ((number, ((size, rows),)) for number, size in factors)
            return
        yield number, tuple(taken) or ((size, False),)


# ---------------------------------------------------------------- labels that a loss ignores


def ignores(node: Node, facts: Mapping[Value, Facts]) -> bool:
    """Whether a mean by aten.nll_loss_forward is divided by a number that depends on the labels.

    Labels hold torch's default `ignore_index` where the step sets it: there is no telling what else comes in.
    """
    labels, weight, reduction, ignored = node.args[1:5]
    if reduction != 1:
        return False
    return weight is not None or ignored != IGNORED or facts.get(labels, CONSTANT).ignored


def _sets_ignored(graph: Graph, node: Node, given: Sequence[Facts]) -> bool:
    """Whether a condition on the batch chooses where the label to ignore stands."""
    if node.target.split(".")[1] not in ("where", "masked_fill", "index_put", "index_fill", "scatter"):
        return False
    numbers = list(node.args)
    for value in node.inputs:
        if value in graph.constants and value.numel == 1:
            numbers.append(graph.constants[value].item())
        elif value.node is not None and not value.node.inputs:
            numbers += value.node.args
    return any(f.batch for f in given) and any(isinstance(n, (int, float)) and n == IGNORED for n in numbers)


def _looks_in_vain(node: Node, losses: Sequence[Node], facts: Mapping[Value, Facts]) -> bool:
    """Whether a loss (cross entropy with label smoothing) looks for labels to ignore, of which there are none."""
    if node.target != "aten.eq.Scalar" or node.args[1] != IGNORED:
        return False
    return any(
        loss.args[2] is None and loss.source == node.source and not ignores(loss, facts) for loss in losses
    )
