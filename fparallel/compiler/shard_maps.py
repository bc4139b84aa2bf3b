"""Tracing `fp.shard_map`: the function once for one rank's shards, forward and backward together, then one node each.

Autograd runs inside, on one rank's tensors; see `region.Region` for how that gives the gradients of whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fparallel._compat import FakeTensor, functorch_active, unwrapped, without_functorch
from fparallel.compiler.blocks import capture_joint, define_opaque
from fparallel.compiler.graph import Graph, Node, ShardMapGraph, Value, is_view, map_values
from fparallel.compiler.sources import user_line
from fparallel.compiler.varying import Varying, given
from fparallel.errors import TraceError
from fparallel.mesh import Mesh
from fparallel.recorder import current_recorder, recording
from fparallel.region import NOWHERE, Meeting, Region, ShardMapCall, current_region, entered
from fparallel.shard_specs import Axes, Dims, axes_in, global_shape, local_shape

if TYPE_CHECKING:
    from fparallel.compiler.trace import Tracer


@dataclass(eq=False)
class Traced:
    """A function under shard_map, traced for the shapes of its shards.

    Attributes:
      forward: the index of its graph: inputs to results, then residuals.
      backward: of its graph: those inputs in `reads`, residuals, cotangents of `tangents` to cotangents of `grads`.
      lifted: tensors that it closes over, inputs after its own.
    """

    call: ShardMapCall
    lifted: list[Tensor]
    out_like: list[Value]
    num_results: int
    forward: int = -1
    backward: int = -1
    reads: list[int] = field(default_factory=list)
    tangents: list[int] = field(default_factory=list)
    grads: list[int] = field(default_factory=list)
    grad_like: list[Value] = field(default_factory=list)


class ShardMapTracing:
    """The part of a recorder that traces `fp.shard_map`."""

    device: str
    phase: str
    tracer: Tracer | None
    shard_maps: list[ShardMapGraph]
    fake: Callable[..., Tensor]
    emit: Callable[..., list[Tensor]]
    new_tracer: Callable[..., Tracer]

    def shard_map(self, call: ShardMapCall, xs: list[Tensor]) -> list[Tensor]:
        """Records a call, and gives its results."""
        flags = [torch.is_grad_enabled() and x.requires_grad for x in xs]
        with without_functorch():
            traced = _trace(self, call, [(tuple(x.shape), x.dtype) for x in xs], flags)
        return self.run_traced(traced, [*xs, *traced.lifted])[: traced.num_results]

    def run_traced(self, traced: Traced, xs: list[Tensor]) -> list[Tensor]:
        """The results and residuals."""
        if functorch_active() or (torch.is_grad_enabled() and any(x.requires_grad for x in xs)):
            return list(_Forward.apply(self, traced, *xs))
        return self.emit(torch.ops.fparallel.shard_map.default, (xs, traced.forward), traced.out_like)


# ---------------------------------------------------------------- the region


class TracedRegion(Region):
    """One rank, on fake tensors of a trace."""

    def __init__(self, call: ShardMapCall, recorder: ShardMapTracing, tracer: Tracer) -> None:
        super().__init__(call.name, call.mesh)
        self.recorder, self.tracer = recorder, tracer
        self.values = Varying(tracer.graph)
        self.lifted: list[tuple[Tensor, Tensor]] = []  # from outside, and the input for it
        self.replaced: dict[int, Tensor] = {}

    def varying(self, x: Tensor) -> tuple[Axes, Axes]:
        known = self.tracer.known.get(id(unwrapped(x)))
        return self.values.of(known[0]) if known else (NOWHERE, NOWHERE)

    def own(self, x: Tensor) -> Tensor:
        """The tensor, or the input that stands for it if it comes from outside."""
        if id(x) in self.replaced:
            return self.replaced[id(x)]
        inner = unwrapped(x)
        if not isinstance(inner, FakeTensor) or id(inner) in self.tracer.known:
            return x
        fake = self.recorder.fake(x.shape, x.dtype)
        fake.requires_grad_(x.requires_grad and torch.is_grad_enabled())
        self.tracer.add_input(fake, f"closed{len(self.lifted)}")
        self.lifted.append((x, fake))
        self.replaced[id(x)] = fake
        return fake

    lift = own

    def axis_index(self, axes: tuple[str, ...]) -> Tensor:
        return torch.ops.fparallel.axis_index(list(axes), self.recorder.device)


# ---------------------------------------------------------------- tracing


def _trace(
    recorder: ShardMapTracing,
    call: ShardMapCall,
    avals: Sequence[tuple[tuple[int, ...], torch.dtype]],
    flags: Sequence[bool],
) -> Traced:
    """Traces a call on whole tensors of these shapes; those with a flag are differentiated."""

    def refuse(tensor: Tensor) -> Value:
        raise TraceError(
            f"{call.name} uses a tensor of shape {tuple(tensor.shape)} from outside of fp.shard_map",
            fix="pass it as an argument, with the spec fp.P() if every rank needs the whole",
            where=user_line(),
        )

    tracer = recorder.new_tracer(refuse)
    region = TracedRegion(call, recorder, tracer)
    shapes = [local_shape(s, d, call.mesh, call.name) for (s, _), d in zip(avals, call.in_dims, strict=True)]
    fakes = [recorder.fake(shape, dtype) for shape, (_, dtype) in zip(shapes, avals, strict=True)]
    found: dict[str, list[int]] = {}

    def joint(*flat: Tensor) -> list[Tensor]:
        recorder.phase = "F"
        for x, dims in zip(flat, call.in_dims, strict=True):
            region.values.give(tracer.known[id(x)][0], axes_in(dims))
        xs = [x.detach().requires_grad_() if flag else x for x, flag in zip(flat, flags, strict=True)]
        with torch.enable_grad(), recording(None), entered(region), Meeting(region):
            outs = region.leave(call, call.body(xs))
        xs += [inner for _, inner in region.lifted]
        found["grads"] = [i for i, x in enumerate(xs) if x.requires_grad]
        found["tangents"] = [i for i, out in enumerate(outs) if out.requires_grad]
        primals = [outs[i] for i in found["tangents"]]
        recorder.phase = "B"
        tangents = [recorder.fake(out.shape, out.dtype) for out in primals]
        for i, tangent in zip(found["tangents"], tangents, strict=True):
            region.values.give(tracer.add_input(tangent, f"tangent{i}"), axes_in(call.out_dims()[i]))
        wanted = [xs[i] for i in found["grads"]]
        grads: Sequence[Tensor | None] = [None] * len(wanted)
        if primals and wanted:
            grads = torch.autograd.grad(primals, wanted, tangents, allow_unused=True)
        whole = [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, grads, strict=True)]
        for x, grad in zip(wanted, whole, strict=True):
            region.check_cotangent(grad, region.varying(x)[0], "a tensor")
        return [out.detach() for out in outs] + [g.detach() for g in whole]

    graph = capture_joint(recorder, tracer, joint, fakes)
    return _split(recorder, call, graph, region, found)


def _split(
    recorder: ShardMapTracing,
    call: ShardMapCall,
    graph: Graph,
    region: TracedRegion,
    found: dict[str, list[int]],
) -> Traced:
    """The forward and the backward graph of a joint one."""
    num_inputs, num_results = len(call.in_dims) + len(region.lifted), len(call.out_dims())
    inputs, tangents = graph.inputs[:num_inputs], graph.inputs[num_inputs:]
    results, grads = graph.outputs[:num_results], graph.outputs[num_results:]
    in_dims = [*call.in_dims, *(((),) * outer.dim() for outer, _ in region.lifted)]
    tangent_dims = [call.out_dims()[i] for i in found["tangents"]]
    dims = dict(zip([*inputs, *tangents], [*in_dims, *tangent_dims], strict=True))
    varying = given(graph, {value: axes_in(d) for value, d in dims.items()})
    nodes = _Backward(graph, set(grads))
    residuals = [value for value in nodes.read if value not in dims and value not in graph.constants]
    for value in residuals:  # the ranks' values along the first dim
        axes = tuple(axis for axis in call.mesh.names if axis in varying.of(value)[1])
        dims[value] = (axes, *[()] * (len(value.shape) - 1)) if axes or value.shape else ()
    out_dims = [*call.out_dims(), *(dims[value] for value in residuals)]
    forward = Graph(inputs, nodes.forward, [*results, *residuals], graph.constants)
    forward.drop_dead()

    made = Traced(
        call,
        [outer for outer, _ in region.lifted],
        [_whole(value, d, call.mesh) for value, d in zip(forward.outputs, out_dims, strict=True)],
        num_results,
        tangents=found["tangents"],
        grads=found["grads"],
    )
    maps = recorder.shard_maps
    made.forward = len(maps)
    maps.append(ShardMapGraph(call.name, call.mesh, forward, in_dims, out_dims))
    if grads:
        made.reads = [i for i, value in enumerate(inputs) if value in nodes.read]
        given_back = [inputs[i] for i in made.reads] + residuals + tangents
        grad_dims = [in_dims[i] for i in made.grads]
        made.grad_like = [_whole(value, d, call.mesh) for value, d in zip(grads, grad_dims, strict=True)]
        backward = Graph(given_back, nodes.nodes, grads, graph.constants)
        backward.drop_dead()
        back_dims = [dims[value] for value in given_back]
        made.backward = len(maps)
        name = f"{call.name} backward"
        maps.append(ShardMapGraph(name, call.mesh, backward, back_dims, grad_dims, backward=True))
    return made


def whole_shape(value: Value, dims: Dims, mesh: Mesh) -> tuple[int, ...]:
    """The shape of the whole of a shard; that of 0-d ones that differ has one dim."""
    return tuple(global_shape(value.shape if len(value.shape) == len(dims) else (1,), dims, mesh))


def _whole(value: Value, dims: Dims, mesh: Mesh) -> Value:
    return Value(whole_shape(value, dims, mesh), value.dtype)


class _Backward:
    """The nodes of a joint graph that only its gradients need, with views of what the forward has taken again.

    Attributes:
      forward, nodes: the nodes of each.
      read: what the backward reads of the forward.
    """

    def __init__(self, graph: Graph, grads: set[Value]) -> None:
        self.forward = [node for node in graph.nodes if node.phase != "B"]
        self.nodes: list[Node] = []
        self.maker = {out: node for node in self.forward for out in node.outs}
        self.again: dict[Value, Value] = {}
        self.read: dict[Value, None] = {}
        made: set[Value] = set()
        for node in graph.nodes:
            if node.phase == "B":
                made.update(node.outs)
        for node in graph.nodes:
            if node.phase == "B":
                self._fetch_all(node, made)
                self.nodes.append(node)
        self.read.update(dict.fromkeys(value for value in grads if value not in made))

    def _fetch_all(self, node: Node, made: set[Value]) -> None:
        def get(value: Value) -> Value:
            return value if value in made else self._fetch(value)

        node.args, node.kwargs = map_values(get, node.args), map_values(get, node.kwargs)

    def _fetch(self, value: Value) -> Value:
        node = self.maker.get(value)
        if node is None or not is_view(node):
            self.read[value] = None
            return value
        if value not in self.again:
            args, kwargs = map_values(self._fetch, node.args), map_values(self._fetch, node.kwargs)
            copy = Node(node.target, node.op, args, kwargs, [], node.source, "B")
            copy.outs = [Value(value.shape, value.dtype, value.name, copy)]
            self.again[value] = copy.outs[0]
            self.nodes.append(copy)
        return self.again[value]


# ---------------------------------------------------------------- in autograd


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(recorder: ShardMapTracing, traced: Traced, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            recorder.emit(torch.ops.fparallel.shard_map.default, (list(xs), traced.forward), traced.out_like)
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        ctx.recorder, ctx.traced, *xs = inputs
        traced: Traced = ctx.traced
        ctx.num = len(xs)
        ctx.save_for_backward(*xs, *output[traced.num_results :])
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(o for i, o in enumerate(output) if i not in traced.tangents))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        traced: Traced = ctx.traced
        saved = ctx.saved_tensors
        tangents = []
        for i in traced.tangents:
            like = traced.out_like[i]
            grad = grads[i]
            if grad is None:
                grad = torch.zeros(like.shape, dtype=like.dtype, device=ctx.recorder.device)
            tangents.append(grad)
        made = iter(_Pullback.apply(ctx.recorder, traced, ctx.num, *saved, *tangents))
        return (None, None, *(next(made) if i in traced.grads else None for i in range(ctx.num)))


class _Pullback(torch.autograd.Function):
    """From (inputs, residuals, cotangents of results) to cotangents of inputs."""

    @staticmethod
    def forward(recorder: ShardMapTracing, traced: Traced, num: int, *given: Tensor) -> tuple[Tensor, ...]:
        xs = [*(given[i] for i in traced.reads), *given[num:]]
        return tuple(
            recorder.emit(torch.ops.fparallel.shard_map.default, (xs, traced.backward), traced.grad_like)
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        ctx.recorder, ctx.traced, ctx.num, *given = inputs
        ctx.save_for_backward(*given)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        """Traces the pullback as a function on shards of its own, which makes the forward again."""
        recorder: ShardMapTracing = ctx.recorder
        traced: Traced = ctx.traced
        num, given = ctx.num, ctx.saved_tensors
        first = len(given) - len(traced.tangents)
        xs = [*given[:num], *given[first:]]
        call = _pullback_call(recorder, traced)
        with without_functorch():
            flags = [x.dtype.is_floating_point for x in xs]
            again = _trace(recorder, call, [(tuple(x.shape), x.dtype) for x in xs], flags)
        made = recorder.run_traced(again, xs)
        residuals = made[again.num_results :]
        tangents = [cotangents[i] for i in again.tangents]
        back = iter(_Pullback.apply(recorder, again, len(xs), *xs, *residuals, *tangents))
        found = [next(back) if i in again.grads else None for i in range(len(xs))]
        return (None, None, None, *found[:num], *[None] * (first - num), *found[num:])


def _pullback_call(recorder: ShardMapTracing, traced: Traced) -> ShardMapCall:
    call = traced.call
    graph = recorder.shard_maps[traced.forward]
    num = len(graph.in_dims)
    tangent_dims = [graph.out_dims[i] for i in traced.tangents]

    def body(flat: list[Tensor]) -> list[Tensor]:
        region = current_region()
        assert isinstance(region, TracedRegion)
        xs = [
            x.detach().requires_grad_() if i in traced.grads and not x.requires_grad else x
            for i, x in enumerate(flat[:num])
        ]
        own = len(call.in_dims)
        region.replaced |= {id(outer): x for outer, x in zip(traced.lifted, xs[own:], strict=True)}
        outs = region.leave(call, call.body(xs[:own]))
        primals = [outs[i] for i in traced.tangents]
        wanted = [xs[i] for i in traced.grads]
        grads = torch.autograd.grad(primals, wanted, flat[num:], allow_unused=True, create_graph=True)
        return [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, grads, strict=True)]

    return ShardMapCall(
        f"{call.name} backward",
        call.mesh,
        body,
        [*graph.in_dims, *tangent_dims],
        lambda: [graph.in_dims[i] for i in traced.grads],
        check=False,
    )


def _fake(xs: list[Tensor], index: int) -> list[Tensor]:
    recorder: Any = current_recorder()
    mapped: ShardMapGraph = recorder.shard_maps[index]
    return [
        torch.empty(whole_shape(value, dims, mapped.mesh), dtype=value.dtype, device=recorder.device)
        for value, dims in zip(mapped.graph.outputs, mapped.out_dims, strict=True)
    ]


define_opaque("shard_map(Tensor[] xs, int index) -> Tensor[]", _fake)
