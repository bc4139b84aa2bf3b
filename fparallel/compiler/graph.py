"""The traced program: SSA graphs of ATen ops with global shapes, one for the step and one per distinct block."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from fparallel.layout import Layout, typed
from fparallel.mesh import Mesh
from fparallel.recorder import Stage
from fparallel.shard_specs import Dims

CALL, CALL_BACKWARD = "fparallel.call.default", "fparallel.call_backward.default"
MARK_GRADS, MAP = "fparallel.mark_grads.default", "fparallel.map.default"
CONSTRAIN, SUM_SQUARES = "fparallel.constrain.default", "fparallel.sum_squares.default"
ACCUMULATE, SHARD_MAP = "fparallel.accumulate.default", "fparallel.shard_map.default"
STAGE_BOUNDARY = "fparallel.stage_boundary.default"

_ids = itertools.count()


class Value:
    """One tensor of a graph, with its global shape."""

    __slots__ = ("dtype", "id", "name", "node", "num_uses", "shape")

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, name: str = "", node: Node | None = None
    ) -> None:
        self.id = next(_ids)
        self.shape = shape
        self.dtype = dtype
        self.name = name
        self.node = node
        self.num_uses = 0

    @property
    def numel(self) -> int:
        result = 1
        for size in self.shape:
            result *= size
        return result

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name or f'%{self.id}'}: {typed(self.dtype, Layout.replicated(self.shape))}"

    __repr__ = __str__


class Node:
    """One op. `args` and `kwargs` hold Values (possibly in lists) and constants; `outs` the results, None if unused."""

    __slots__ = ("_inputs", "args", "kwargs", "op", "outs", "phase", "source", "target")

    def __init__(
        self,
        target: str,
        op: Any,
        args: tuple,
        kwargs: dict[str, Any],
        outs: list[Value],
        source: str,
        phase: str,
    ) -> None:
        self.target = target
        self.op = op
        self.args = args
        self.kwargs = kwargs
        self.outs = outs
        self.source = source
        self.phase = phase
        self._inputs: tuple[Any, Any, list[Value]] | None = None

    @property
    def inputs(self) -> list[Value]:
        """All Values among the arguments, in order, with repetitions."""
        if self._inputs is None or self._inputs[0] is not self.args or self._inputs[1] is not self.kwargs:
            self._inputs = (self.args, self.kwargs, _collect(self.args, []) + _collect(self.kwargs, []))
        return self._inputs[2]

    def __str__(self) -> str:
        outs, args = ", ".join(map(str, self.outs)), ", ".join(map(_text, self.args))
        return f"{outs} = {self.target}({args})  # {self.phase} {self.source}"

    __repr__ = __str__


def _text(arg: Any) -> str:
    if isinstance(arg, Value):
        return arg.name or f"%{arg.id}"
    if isinstance(arg, (list, tuple)):
        return "[" + ", ".join(map(_text, arg)) + "]"
    return str(arg)


def _collect(arg: Any, into: list[Value]) -> list[Value]:
    if isinstance(arg, Value):
        into.append(arg)
    elif isinstance(arg, (list, tuple)):
        for item in arg:
            _collect(item, into)
    elif isinstance(arg, dict):
        for item in arg.values():
            _collect(item, into)
    return into


def values_of(arg: Any) -> Iterator[Value]:
    """All Values in a nest of lists, tuples and dicts."""
    if isinstance(arg, Value):
        yield arg
    elif isinstance(arg, (list, tuple)):
        for item in arg:
            yield from values_of(item)
    elif isinstance(arg, dict):
        for item in arg.values():
            yield from values_of(item)


def map_values(f: Callable[[Value], Any], arg: Any) -> Any:
    """The same nest with every Value v replaced by f(v)."""
    if isinstance(arg, Value):
        return f(arg)
    if isinstance(arg, (list, tuple)):
        return type(arg)(map_values(f, item) for item in arg)
    if isinstance(arg, dict):
        return {key: map_values(f, item) for key, item in arg.items()}
    return arg


def is_view(node: Node) -> bool:
    schema = getattr(node.op, "_schema", None)
    if schema is None or len(node.outs) != 1 or not schema.arguments:
        return False
    alias = schema.arguments[0].alias_info
    return alias is not None and not alias.is_write


def _frozen(arg: Any) -> Any:
    if isinstance(arg, (list, tuple)):
        return tuple(map(_frozen, arg))
    if isinstance(arg, dict):
        return tuple((key, _frozen(item)) for key, item in arg.items())
    return arg


@dataclass
class Graph:
    """Straight-line SSA with global shapes. `constants` are closed-over tensors, in graph as Values."""

    inputs: list[Value]
    nodes: list[Node] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    constants: dict[Value, torch.Tensor] = field(default_factory=dict)

    def share_views(self) -> None:
        """Equal views of one value in one phase become one, so that what is moved to take them is moved once."""
        seen: dict[Any, Value] = {}
        same: dict[Value, Value] = {}
        kept = []
        for node in self.nodes:
            if any(value in same for value in node.inputs):
                node.args, node.kwargs = (
                    map_values(lambda v: same.get(v, v), arg) for arg in (node.args, node.kwargs)
                )
            if is_view(node):
                key = (node.target, node.phase, _frozen(node.args), _frozen(node.kwargs))
                first = seen.setdefault(key, node.outs[0])
                if first is not node.outs[0]:
                    same[node.outs[0]] = first
                    continue
            kept.append(node)
        self.nodes = kept
        self.outputs = [same.get(value, value) for value in self.outputs]

    def drop_dead(self) -> None:
        """Removes nodes whose results nothing reads, and counts the uses of every value."""
        live = set(self.outputs)
        kept = []
        for node in reversed(self.nodes):
            if any(out in live for out in node.outs):
                live.update(node.inputs)
                kept.append(node)
        self.nodes = kept[::-1]
        self.constants = {value: t for value, t in self.constants.items() if value in live}
        self.count_uses()

    def count_uses(self) -> None:
        for value in itertools.chain(self.inputs, self.constants, *(node.outs for node in self.nodes)):
            value.num_uses = 0
        for node in self.nodes:
            for value in node.inputs:
                value.num_uses += 1
        for value in self.outputs:
            value.num_uses += 1

    def __str__(self) -> str:
        lines = [f"inputs {', '.join(map(str, self.inputs))}", *map(str, self.nodes)]
        return "\n".join([*lines, f"outputs {', '.join(map(str, self.outputs))}"])


@dataclass
class BlockGraph:
    """A block traced once: ONE joint graph, (inputs, tangents) -> (outputs, gradients).

    Attributes:
      graph: its inputs are the block's tensors, then one tangent per differentiable output; its outputs are the
        block's outputs, then one gradient per differentiated input.
      num_forward: how many of the graph's nodes belong to the forward pass (they come first).
      grad_inputs, tangent_outputs: which inputs have gradients, which outputs have tangents.
    """

    name: str
    graph: Graph
    num_inputs: int
    num_outputs: int
    num_forward: int
    grad_inputs: tuple[int, ...]
    tangent_outputs: tuple[int, ...]

    @property
    def inputs(self) -> list[Value]:
        return self.graph.inputs[: self.num_inputs]

    @property
    def tangents(self) -> list[Value]:
        return self.graph.inputs[self.num_inputs :]

    @property
    def outputs(self) -> list[Value]:
        return self.graph.outputs[: self.num_outputs]

    @property
    def grads(self) -> list[Value]:
        return self.graph.outputs[self.num_outputs :]


@dataclass
class MapGraph:
    """A per-leaf function over many leaves: `bodies[k]` is traced once per leaf signature.

    Attributes:
      bodies: graphs of (leaf of tree 0, leaf of tree 1, ..., shared...) -> results.
      body_of: per leaf which body it uses.
      num_trees, num_outs: how many trees go in and come out.
      stages: what the function is made of, each with its number of shared tensors; () if that is not known.
      in_roles, out_roles: what each tree that goes in or comes out is to the stages.
    """

    name: str
    bodies: list[Graph]
    body_of: list[int]
    num_trees: int
    num_outs: int
    stages: tuple[tuple[Stage, int], ...] = ()
    in_roles: tuple[str, ...] = ()
    out_roles: tuple[str, ...] = ()


@dataclass
class LoopGraph:
    """A body that runs once for each micro-batch, traced once.

    Attributes:
      graph: its inputs are what passes whole, then the parts of the batch, then the keys of the micro-batch.
      num, group: micro-batches, and neighbouring rows that stay together.
      num_whole, num_batch: of the inputs.
      kinds: per output "sum", added up over micro-batches, or "rows", put in the order of the batch.
      means: per output its name if it is a plain value of which the micro-batches' mean is taken, or "".
    """

    name: str
    graph: Graph
    num: int
    group: int
    num_whole: int
    num_batch: int
    kinds: list[str]
    means: list[str]


@dataclass
class ShardMapGraph:
    """A function on one rank's shards, or its backward, traced once.

    Attributes:
      graph: with the shapes of shards.
      in_dims, out_dims: per input and result the mesh axes that shard each dim of the whole; a 0-d shard may be a
        whole of one dim.
      backward: whether results are cotangents, of which sums over ranks may stay pending.
    """

    name: str
    mesh: Mesh
    graph: Graph
    in_dims: list[Dims]
    out_dims: list[Dims]
    backward: bool = False


@dataclass
class Program:
    """A traced step: its graph and those of its blocks, loops, per-leaf maps and shard_maps, and its constraints.

    No layout has been chosen yet.
    """

    graph: Graph
    blocks: list[BlockGraph]
    maps: list[MapGraph]
    constraints: list[Any]
    loops: list[LoopGraph] = field(default_factory=list)
    shard_maps: list[ShardMapGraph] = field(default_factory=list)
    grad_paths: dict[Value, str] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [f"step\n{self.graph}"]
        parts += [f"loop {i} {loop.name} x {loop.num}\n{loop.graph}" for i, loop in enumerate(self.loops)]
        parts += [f"shard_map {i} {m.name}\n{m.graph}" for i, m in enumerate(self.shard_maps)]
        parts += [f"block {i} {block.name}\n{block.graph}" for i, block in enumerate(self.blocks)]
        parts += [
            f"map {i} {m.name} body {k}\n{body}"
            for i, m in enumerate(self.maps)
            for k, body in enumerate(m.bodies)
        ]
        return "\n\n".join(parts)


def has_gradients(program: Program) -> bool:
    """Whether a step differentiates anything."""
    return _has(program, MARK_GRADS)


def has_boundaries(program: Program) -> bool:
    """Whether a step is cut by hand into stages."""
    return _has(program, STAGE_BOUNDARY)


def _has(program: Program, target: str) -> bool:
    graphs = [program.graph, *(loop.graph for loop in program.loops)]
    return any(node.target == target for graph in graphs for node in graph.nodes)
