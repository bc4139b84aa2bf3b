"""Blocks and per-leaf maps inside a trace: traced once per signature, then one opaque call each."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fparallel import random, tree
from fparallel.compiler.graph import BlockGraph, Graph, MapGraph, Value
from fparallel.errors import TraceError
from fparallel.recorder import Stage, current_recorder, recording

if TYPE_CHECKING:
    from fparallel.compiler.trace import Tracer


class BlockTracing:
    """The part of a recorder that traces blocks and maps."""

    device: str
    phase: str
    tracer: Tracer | None
    blocks: list[BlockGraph]
    maps: list[MapGraph]
    fake: Callable[..., Tensor]
    emit: Callable[..., list[Tensor]]
    new_tracer: Callable[..., Tracer]

    def __init__(self) -> None:
        self._block_cache: dict[Any, _Block] = {}
        self._body_cache: dict[Any, tuple[Graph, bool]] = {}
        self._keep_alive: list[Any] = []

    # -------------------------------------------------------------- blocks

    def call_block(self, fn: Callable, name: str, args: tuple, kwargs: dict) -> Any:
        """One call of a block: traces it if its signature is new, and records the call."""
        leaves, treedef = tree.flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        statics = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        scope_key = random.block_scope()
        if scope_key is not None:
            tensors.append(scope_key)
        needs_grad = tuple(torch.is_grad_enabled() and x.requires_grad for x in tensors)
        avals = tuple((tuple(x.shape), x.dtype) for x in tensors)
        key = (self._code_key(fn), treedef, statics, avals, needs_grad, len(tensors) - statics.count(None))
        try:
            block = self._block_cache.get(key)
        except TypeError as error:
            bad = next(s for s in statics if getattr(s, "__hash__", None) is None)
            raise TraceError(
                f"the block {name} got an unhashable argument of type {type(bad).__name__}",
                fix="pass tensors, numbers, strings or frozen dataclasses to blocks",
            ) from error
        if block is None:
            block = _trace_block(self, fn, name, treedef, leaves, tensors, needs_grad)
            self._block_cache[key] = block
        xs = tensors + block.lifted
        if any(torch.is_grad_enabled() and x.requires_grad for x in xs):
            outs = _BlockCall.apply(self, block, *xs)
        else:
            outs = self.emit(_OPS.call.default, (xs, block.index), [*block.graph.outputs, _TOKEN])[:-1]
        results = list(block.static_outs)
        for position, out in zip(block.tensor_outs, outs, strict=True):
            results[position] = out
        return tree.unflatten(block.out_treedef, results)

    def _code_key(self, fn: Any) -> Any:
        """What decides a function's trace besides its arguments: code, closure, defaults and plain globals."""
        if isinstance(fn, functools.partial):
            return (
                "partial",
                self._code_key(fn.func),
                self._describe(fn.args),
                self._describe(tuple(sorted(fn.keywords.items()))),
            )
        if isinstance(fn, types.MethodType):
            return ("method", self._code_key(fn.__func__), self._describe(fn.__self__))
        if not isinstance(fn, types.FunctionType):
            return self._describe_object(fn)
        cells = []
        for cell in fn.__closure__ or ():
            with contextlib.suppress(ValueError):
                cells.append(cell.cell_contents)
        plain = tuple(
            (name, fn.__globals__[name])
            for name in fn.__code__.co_names
            if isinstance(fn.__globals__.get(name), (bool, int, float, str))
        )
        return (fn.__code__, self._describe(tuple(cells)), self._describe(fn.__defaults__ or ()), plain)

    def _describe(self, value: Any) -> Any:
        if isinstance(value, (bool, int, float, str, bytes, type(None), torch.dtype)):
            return (type(value), value)
        if isinstance(value, tuple):
            return tuple(self._describe(item) for item in value)
        if isinstance(value, types.FunctionType):
            return (id(value), fn_code(value))
        return self._describe_object(value)

    def _describe_object(self, value: Any) -> Any:
        self._keep_alive.append(value)
        return ("object", id(value))

    # -------------------------------------------------------------- maps

    def map_leaves(
        self, fn: Callable, columns: list[list[Tensor]], shared: list[Any], stage: Stage | None = None
    ) -> tuple[list[list[Tensor]], bool]:
        """Records one call for all leaves; gives the results per leaf, and whether fn returns tuples."""
        shared_tensors = [s for s in shared if isinstance(s, Tensor)]
        bodies: list[Graph] = []
        index: dict[Any, int] = {}
        body_of, is_tuple = [], False
        common = (self._code_key(fn), tuple((s.dtype if isinstance(s, Tensor) else s) for s in shared))
        assert self.tracer is not None
        values = [list(map(self.tracer.value, column)) for column in columns]
        for row, known in zip(zip(*columns, strict=True), zip(*values, strict=True), strict=True):
            avals = tuple([(value.shape, value.dtype) for value in known])
            if avals not in index:
                key = (common, avals)
                if key not in self._body_cache:
                    self._body_cache[key] = self._trace_body(fn, row, shared)
                body, is_tuple = self._body_cache[key]
                index[avals] = len(bodies)
                bodies.append(body)
            body_of.append(index[avals])
        num_outs = len(bodies[0].outputs)
        stages = ((stage, len(shared_tensors)),) if stage else ()
        roles = (stage.ins, stage.outs) if stage else ((), ())
        name = getattr(fn, "__name__", "map").strip("<>")
        self.maps.append(MapGraph(name, bodies, body_of, len(columns), num_outs, stages, *roles))
        flat = [value for column in values for value in column]
        num = len(body_of)
        like = [bodies[b].outputs[k] for k in range(num_outs) for b in body_of]
        outs = self.emit(_OPS.map.default, (flat, shared_tensors, len(self.maps) - 1), like)
        return [[outs[k * num + i] for k in range(num_outs)] for i in range(num)], is_tuple

    def _trace_body(self, fn: Callable, row: Sequence[Tensor], shared: list[Any]) -> tuple[Graph, bool]:
        fakes = [self.fake(x.shape, x.dtype) for x in row]
        scalars = [self.fake(s.shape, s.dtype) for s in shared if isinstance(s, Tensor)]
        result: list[bool] = []

        def run(*flat: Tensor) -> list[Tensor]:
            rest = iter(flat[len(row) :])
            out = fn(*flat[: len(row)], *(next(rest) if isinstance(s, Tensor) else s for s in shared))
            result.append(isinstance(out, tuple))
            return list(out) if isinstance(out, tuple) else [out]

        def refuse(tensor: Tensor) -> Value | None:
            raise TraceError(
                "a function mapped over leaves closes over a traced tensor",
                fix="pass it through shared=(...)",
            )

        names = [f"leaf{i}" for i in range(len(row))] + [f"shared{i}" for i in range(len(scalars))]
        graph = self.new_tracer(refuse).capture(run, fakes + scalars, names)
        graph.drop_dead()
        return graph, result[0]


def fn_code(fn: types.FunctionType) -> types.CodeType:
    return fn.__code__


class _Block:
    """A traced block: its index in the program, and how its results go back into a tree."""

    def __init__(
        self, index: int, graph: BlockGraph, lifted: list[Tensor], out_treedef: Any, outs: list[Any]
    ) -> None:
        self.index = index
        self.graph = graph
        self.lifted = lifted
        self.out_treedef = out_treedef
        self.tensor_outs = [i for i, out in enumerate(outs) if isinstance(out, Tensor)]
        self.static_outs = [None if isinstance(out, Tensor) else out for out in outs]


def capture_joint(recorder: Any, tracer: Any, joint: Callable, fakes: Sequence[Tensor]) -> Graph:
    """The graph of a body's forward and backward together; the recorder goes on in the phase that it was in."""
    phase = recorder.phase
    try:
        with recording(current_recorder()):
            graph = tracer.capture(joint, fakes, [f"in{i}" for i in range(len(fakes))])
    finally:
        recorder.phase = phase
    graph.drop_dead()
    return graph


class Substitute(TorchFunctionMode):
    """Replaces tensors by others wherever a torch function takes them."""

    def __init__(self, replacement: dict[int, Tensor]) -> None:
        super().__init__()
        self.replacement = replacement

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return func(*self._swap(args), **self._swap(kwargs or {}))

    def _swap(self, arg: Any) -> Any:
        if isinstance(arg, Tensor):
            return self.replacement.get(id(arg), arg)
        if isinstance(arg, dict):
            return {k: self._swap(v) for k, v in arg.items()}
        if type(arg) in (list, tuple):
            return type(arg)(self._swap(item) for item in arg)
        return arg


def _trace_block(
    recorder: BlockTracing,
    fn: Callable,
    name: str,
    treedef: Any,
    leaves: list[Any],
    tensors: list[Tensor],
    needs_grad: tuple[bool, ...],
) -> _Block:
    """Traces a block's joint graph; tensors that it closes over become inputs."""
    lifted: list[Tensor] = []
    for _ in range(2):
        pending: list[Tensor] = []
        block = _trace_joint(recorder, fn, name, treedef, leaves, tensors, needs_grad, lifted, pending)
        if not pending:
            recorder.blocks.append(block[0])
            return _Block(len(recorder.blocks) - 1, block[0], lifted, block[1], block[2])
        lifted = lifted + [x for i, x in enumerate(pending) if all(x is not y for y in pending[:i])]
    raise TraceError(
        f"the block {name} uses a tensor from outside that cannot be lifted to an argument",
        fix="pass the tensor to the block as an argument",
    )


def _trace_joint(
    recorder: BlockTracing,
    fn: Callable,
    name: str,
    treedef: Any,
    leaves: list[Any],
    tensors: list[Tensor],
    needs_grad: tuple[bool, ...],
    lifted: list[Tensor],
    pending: list[Tensor],
) -> tuple[BlockGraph, Any, list[Any]]:
    flags = [*needs_grad, *(torch.is_grad_enabled() and x.requires_grad for x in lifted)]
    fakes = [recorder.fake(x.shape, x.dtype) for x in [*tensors, *lifted]]
    num_leaves = sum(isinstance(leaf, Tensor) for leaf in leaves)
    found: dict[str, Any] = {}

    def lift(tensor: Tensor) -> Value:
        pending.append(tensor)
        return Value(tuple(tensor.shape), tensor.dtype, "lifted")

    tracer = recorder.new_tracer(lift)

    def joint(*flat: Tensor) -> list[Tensor]:
        recorder.phase = "F"
        xs = [x.detach().requires_grad_() if flag else x for x, flag in zip(flat, flags, strict=True)]
        own = iter(xs)
        args, kwargs = tree.unflatten(
            treedef, [next(own) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        )
        scope = random.use(xs[num_leaves]) if num_leaves < len(tensors) else contextlib.nullcontext()
        swap = Substitute({id(old): new for old, new in zip(lifted, xs[len(tensors) :], strict=True)})
        with torch.enable_grad(), scope, swap if lifted else contextlib.nullcontext():
            result = fn(*args, **kwargs)
        for node in tracer.graph.nodes:
            node.phase = "F"  # a gradient that the block itself takes is part of its forward
        outs, found["treedef"] = tree.flatten(result)
        found["outs"] = outs
        tensor_outs = [out for out in outs if isinstance(out, Tensor)]
        found["tangents"] = tuple(i for i, out in enumerate(tensor_outs) if out.requires_grad)
        primals = [tensor_outs[i] for i in found["tangents"]]
        recorder.phase, recorder.tracer = "B", None
        tangents = [recorder.fake(out.shape, out.dtype) for out in primals]
        recorder.tracer = tracer
        for i, tangent in enumerate(tangents):
            tracer.add_input(tangent, f"tangent{i}")
        wanted = [x for x, flag in zip(xs, flags, strict=True) if flag]
        grads: Sequence[Tensor | None] = [None] * len(wanted)
        if primals and wanted:
            grads = torch.autograd.grad(primals, wanted, tangents, allow_unused=True)
        whole = [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, grads, strict=True)]
        return [out.detach() for out in tensor_outs] + [g.detach() for g in whole]

    graph = capture_joint(recorder, tracer, joint, fakes)
    num_forward = max((i + 1 for i, node in enumerate(graph.nodes) if node.phase == "F"), default=0)
    grad_inputs = tuple(i for i, flag in enumerate(flags) if flag)
    num_outs = len(graph.outputs) - len(grad_inputs)
    joint_graph = BlockGraph(name, graph, len(fakes), num_outs, num_forward, grad_inputs, found["tangents"])
    return joint_graph, found["treedef"], found["outs"]


class _BlockCall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recorder: BlockTracing, block: _Block, *xs: Tensor) -> tuple[Tensor, ...]:
        outs = recorder.emit(_OPS.call.default, (list(xs), block.index), [*block.graph.outputs, _TOKEN])
        ctx.recorder, ctx.block = recorder, block
        ctx.save_for_backward(*xs, outs[-1])
        ctx.set_materialize_grads(False)
        graph = block.graph
        ctx.mark_non_differentiable(*(o for i, o in enumerate(outs[:-1]) if i not in graph.tangent_outputs))
        return tuple(outs[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        graph: BlockGraph = ctx.block.graph
        *xs, token = ctx.saved_tensors
        tangents = []
        for i in graph.tangent_outputs:
            value = graph.outputs[i]
            grad = grads[i]
            tangents.append(
                torch.zeros(value.shape, dtype=value.dtype, device=token.device) if grad is None else grad
            )
        args = (xs, token, tangents, ctx.block.index)
        found = iter(ctx.recorder.emit(_OPS.call_backward.default, args, graph.grads))
        return (
            None,
            None,
            *(next(found) if i in graph.grad_inputs else None for i in range(graph.num_inputs)),
        )


# ---------------------------------------------------------------- the opaque ops

_OPS = torch.ops.fparallel
_TOKEN = Value((), torch.uint8, "token")

_library = torch.library.Library("fparallel", "FRAGMENT")


def _refuse(*args: Any) -> Any:
    raise AssertionError("this operator only occurs in traces")


def define_opaque(schema: str, fake: Callable) -> None:
    name = schema.split("(")[0]
    _library.define(schema)
    _library.impl(name, _refuse, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fparallel::{name}", fake, lib=_library)


def _empties(values: Sequence[Value]) -> list[Tensor]:
    recorder: Any = current_recorder()
    return [torch.empty(v.shape, dtype=v.dtype, device=recorder.device) for v in values]


def _call_fake(xs: list[Tensor], block: int) -> list[Tensor]:
    recorder: Any = current_recorder()
    token = torch.empty((), dtype=torch.uint8, device=recorder.device)
    return [*_empties(recorder.blocks[block].outputs), token]


def _call_backward_fake(xs: list[Tensor], token: Tensor, tangents: list[Tensor], block: int) -> list[Tensor]:
    recorder: Any = current_recorder()
    return _empties(recorder.blocks[block].grads)


def _map_fake(leaves: list[Tensor], shared: list[Tensor], index: int) -> list[Tensor]:
    recorder: Any = current_recorder()
    graph: MapGraph = recorder.maps[index]
    return _empties([graph.bodies[b].outputs[k] for k in range(graph.num_outs) for b in graph.body_of])


define_opaque("call(Tensor[] xs, int block) -> Tensor[]", _call_fake)
define_opaque(
    "call_backward(Tensor[] xs, Tensor token, Tensor[] tangents, int block) -> Tensor[]", _call_backward_fake
)
define_opaque("map(Tensor[] leaves, Tensor[] shared, int index) -> Tensor[]", _map_fake)
define_opaque(
    "mark_grads(Tensor[] grads, Tensor[] leaves, str[] paths) -> Tensor[]",
    lambda grads, leaves, paths: [torch.empty_like(g) for g in grads],
)
define_opaque("constrain(Tensor x, int spec) -> Tensor", lambda x, spec: torch.empty_like(x))
define_opaque("stage_boundary(Tensor x) -> Tensor", torch.empty_like)
define_opaque("accumulate(Tensor[] whole, Tensor[] batch, Tensor[] keys, int loop) -> Tensor[]", _refuse)
