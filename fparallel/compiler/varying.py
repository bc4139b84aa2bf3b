"""Which values of a function on one rank's shards vary over which mesh axes, op by op: see `Region.varying`."""

from __future__ import annotations

from collections.abc import Mapping

from fparallel.compiler.graph import Graph, Node, Value
from fparallel.region import NOWHERE, Step
from fparallel.shard_specs import Axes

COLLECTIVE, AXIS_INDEX = "fparallel.collective.default", "fparallel.axis_index.default"


class Varying:
    """The answers for a graph, which may grow."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.at = 0
        self.known: dict[Value, tuple[Axes, Axes]] = {}
        self.base: dict[Value, Value] = {}  # of a view; a write into a view is one into its base

    def give(self, value: Value, axes: Axes) -> None:
        """Says that an input varies over axes."""
        self.known[value] = axes, axes

    def of(self, value: Value) -> tuple[Axes, Axes]:
        """Over which axes a value varies, and over which it may differ."""
        while self.at < len(self.graph.nodes):
            self._add(self.graph.nodes[self.at])
            self.at += 1
        return self._read(value)

    def _read(self, value: Value) -> tuple[Axes, Axes]:
        return self.known.get(self.base.get(value, value), (NOWHERE, NOWHERE))

    def _add(self, node: Node) -> None:
        found = [self._read(value) for value in node.inputs]
        varies, differs = (NOWHERE.union(*(pair[k] for pair in found)) for k in (0, 1))
        if node.target == AXIS_INDEX:
            varies = differs = frozenset(node.args[0])
        elif node.target == COLLECTIVE:
            _, kind, axes, params = node.args
            varies, differs = Step(kind, tuple(axes), tuple(params)).varying(varies, differs)
        for out in node.outs:
            self.known[out] = varies, differs
        schema = getattr(node.op, "_schema", None)
        for arg, spec in zip(node.args, schema.arguments if schema else (), strict=False):
            if isinstance(arg, Value) and spec.alias_info is not None:
                base = self.base.get(arg, arg)
                if spec.alias_info.is_write:
                    self.known[base] = varies, differs
                self.base.update(dict.fromkeys(node.outs, base))


def given(graph: Graph, axes: Mapping[Value, Axes]) -> Varying:
    """The answers for a graph whose inputs vary over `axes`."""
    made = Varying(graph)
    for value, over in axes.items():
        made.give(value, over)
    return made
