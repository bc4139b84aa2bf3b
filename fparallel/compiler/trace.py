"""Tracing: runs a pure function on fake tensors of global shape and records every ATen op.

Plain PyTorch autograd runs inside, so custom `autograd.Function`s, `torch.func` transforms and views are all captured.
In-place writes to temporaries are functionalized in a second pass. Blocks and per-leaf maps are traced once per
signature and stay calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fparallel import random
from fparallel._compat import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    current_backward_sequence,
    forward_sequence,
    fresh_fake,
)
from fparallel.compiler.blocks import BlockTracing
from fparallel.compiler.graph import (
    BlockGraph,
    Graph,
    LoopGraph,
    MapGraph,
    Node,
    Program,
    ShardMapGraph,
    Value,
    map_values,
)
from fparallel.compiler.loops import LoopTracing
from fparallel.compiler.shard_maps import ShardMapTracing
from fparallel.compiler.sources import explain, user_line, variable_of
from fparallel.errors import FparallelError, TraceError
from fparallel.layout import Layout, typed
from fparallel.recorder import recording

_CONSTANT_LIMIT = 64 * 2**20
_DEVICE = torch.ops.prim.device.default


class Tracer(TorchDispatchMode):
    """Records the ATen ops that run under it as a Graph."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is ever compiled, and the guard costs 20 us an op

    def __init__(self, recorder: StepRecorder, lift: Callable[[Tensor], Value | None] | None = None) -> None:
        super().__init__()
        self.recorder = recorder
        self.graph = Graph([])
        self.lift = lift
        self.mutates = False
        self.known: dict[int, tuple[Value, Tensor]] = {}
        self.input_fakes: list[Tensor] = []
        self.lines: dict[int, str] = {}

    def add_input(self, fake: Tensor, name: str) -> Value:
        value = Value(tuple(fake.shape), fake.dtype, name)
        self.graph.inputs.append(value)
        self.known[id(fake)] = (value, fake)
        self.input_fakes.append(fake)
        return value

    def value(self, tensor: Tensor) -> Value:
        """The Value of a tensor met while tracing: known, lifted from the caller's trace, or a constant."""
        found = self.known.get(id(tensor))
        if found is not None:
            return found[0]
        if isinstance(tensor, FakeTensor):
            value = self.lift(tensor) if self.lift else None
            if value is None:
                raise TraceError(
                    f"a tensor of shape {tuple(tensor.shape)} leaked into this trace from another one",
                    fix="keep no tensors between calls of a jitted function: pass them as arguments and return them",
                    where=user_line(),
                )
        else:
            self.recorder.check_constant(tensor)
            value = Value(tuple(tensor.shape), tensor.dtype, f"const{len(self.graph.constants)}")
            self.graph.constants[value] = tensor
        self.known[id(tensor)] = (value, tensor)
        return value

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # autograd asks for it 60 times a layer
        kwargs = kwargs or {}
        if self.recorder.tracer is not self:
            return func(*args, **kwargs)
        namespace = func.namespace
        if namespace == "prim" or func is torch.ops.aten.is_pinned.default:
            return func(*args, **kwargs)
        if func._schema.name == "aten::_local_scalar_dense":
            _refuse_value_read()
        if namespace == "prims":  # torch's own reference implementations: the ATen ops that they stand for
            with self:
                return func.impl_aten(*args, **kwargs)
        if namespace not in ("fparallel",) and torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), "CompositeImplicitAutograd"
        ):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if func is torch.ops.aten.lift_fresh.default and not isinstance(args[0], FakeTensor):
            result = func(*args, **kwargs)
            self.known[id(result)] = (self.value(args[0]), result)
            return result
        source = self.source()
        if func._schema.is_mutable:
            self._refuse_write_outside(func, args, source)
        if random.is_stateful_random(func) and _draws(func, args, kwargs):
            raise TraceError(
                f"{func} draws from torch's global random state, which is not a function of the step's arguments",
                fix="draw with fp.random.normal(key, ...), or run it inside `with fp.random.use(key):`",
                where=source,
            )
        try:
            out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise TraceError(
                f"{func} has a result whose value or shape depends on data",
                fix="keep shapes and branches independent of data: use torch.where, masks, or fixed sizes",
                where=source,
            ) from error
        except Exception:
            # where an operand comes from another trace, that is the cause: asking for its Value says so
            _map_tensors(self.value, [*args, *kwargs.values()])
            raise
        self.record(func, args, kwargs, out, source)
        return out

    def source(self) -> str:
        if self.recorder.replay_source:
            return self.recorder.replay_source
        sequence = current_backward_sequence()
        if sequence is not None:
            return self.lines.get(sequence, "")
        line = user_line()
        self.lines[forward_sequence() - 1] = line
        return line

    def record(self, func: Any, args: tuple, kwargs: dict, out: Any, source: str) -> None:
        if func in _ALIASES and isinstance(args[0], Tensor):
            value = self.value(args[0])
            self.known[id(out)] = (value, out)
            return
        to_value = self.value
        recorded_args = tuple(_map_tensors(to_value, a) for a in args)
        recorded_kwargs = {k: _map_tensors(to_value, v) for k, v in kwargs.items()}
        if func._schema.is_mutable:
            self.mutates = True
        if func is torch.ops.aten._efficientzerotensor.default:
            func = (
                torch.ops.aten.zeros.default
            )  # what forward-mode AD leaves unmade must be memory in a schedule
        node = Node(str(func), func, recorded_args, recorded_kwargs, [], source, self.recorder.phase)
        for result in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(result, Tensor):
                if result.layout is not torch.strided:
                    raise TraceError(
                        f"{func} makes a sparse tensor",
                        fix="use dense tensors: sparse=False, or x.to_dense()",
                        where=source,
                    )
                value = Value(tuple(result.shape), result.dtype, node=node)
                if id(result) not in self.known or not func._schema.is_mutable:
                    self.known[id(result)] = (value, result)
            else:
                value = Value((), torch.float32, node=node)
            node.outs.append(value)
        self.graph.nodes.append(node)

    def record_opaque(self, op: Any, args: tuple, like: Sequence[Value], outs: Sequence[Tensor]) -> None:
        """Records one op whose results `outs`, fresh fakes, have the shapes and dtypes of `like`."""
        recorded = tuple(_map_tensors(self.value, arg) for arg in args)
        node = Node(str(op), op, recorded, {}, [], self.source(), self.recorder.phase)
        node.outs = [Value(value.shape, value.dtype, node=node) for value in like]
        for out, value in zip(outs, node.outs, strict=True):
            self.known[id(out)] = (value, out)
        self.graph.nodes.append(node)

    def capture(self, fn: Callable, fakes: Sequence[Tensor], names: Sequence[str]) -> Graph:
        """Runs fn(*fakes), which returns a flat list of tensors, and gives the functional graph of it."""
        for fake, name in zip(fakes, names, strict=True):
            self.add_input(fake, name)
        outer, self.recorder.tracer = self.recorder.tracer, self
        try:
            with torch.autograd.set_multithreading_enabled(False), self:
                outs = fn(*fakes)
                self.graph.outputs = [self.value(out) for out in outs]
        finally:
            self.recorder.tracer = outer
        if self.mutates:
            self._check_inputs_unmutated()
            return self._functionalize(self.input_fakes, [value.name for value in self.graph.inputs])
        self.graph.share_views()
        return self.graph

    def _refuse_write_outside(self, func: Any, args: tuple, source: str) -> None:
        """A tensor that is not fake exists outside of the trace: it must be refused before it is written."""
        for arg, spec in zip(args, func._schema.arguments, strict=False):
            written = spec.alias_info is not None and spec.alias_info.is_write
            if written and isinstance(arg, Tensor) and not isinstance(arg, FakeTensor):
                raise TraceError(
                    f"{func} writes in place into {variable_of(arg)}, a tensor that the function closes over",
                    fix="a step is pure: pass the tensor as an argument, compute a new one and return it",
                    where=source,
                )

    def _check_inputs_unmutated(self) -> None:
        root: dict[Value, Value] = {value: value for value in [*self.graph.inputs, *self.graph.constants]}
        for node in self.graph.nodes:
            schema = node.op._schema
            for arg, spec in zip(node.args, schema.arguments, strict=False):
                if not isinstance(arg, Value) or spec.alias_info is None or arg not in root:
                    continue
                if spec.alias_info.is_write:
                    what = "closes over" if root[arg] in self.graph.constants else "receives"
                    raise TraceError(
                        f"{node.target} writes in place into {root[arg].name}, a tensor that the function {what}",
                        fix="a step is pure: compute a new tensor and return it (donate_argnums reuses the memory)",
                        where=node.source,
                    )
                for out in node.outs:
                    root[out] = root[arg]

    def _functionalize(self, fakes: Sequence[Tensor], names: Sequence[str]) -> Graph:
        graph = self.graph
        again = Tracer(self.recorder, self.lift)

        def replay(*xs: Tensor) -> list[Tensor]:
            env: dict[Value, Any] = dict(zip(graph.inputs, xs, strict=True))
            env.update(graph.constants)
            for node in graph.nodes:
                self.recorder.phase = node.phase
                self.recorder.replay_source = node.source or " "
                out = node.op(
                    *map_values(env.__getitem__, node.args), **map_values(env.__getitem__, node.kwargs)
                )
                for value, result in zip(
                    node.outs, out if isinstance(out, (list, tuple)) else (out,), strict=True
                ):
                    env[value] = result
            return [env[value] for value in graph.outputs]

        phase = self.recorder.phase
        try:
            with torch.no_grad():
                result = again.capture(torch.func.functionalize(replay), list(fakes), names)
        finally:
            self.recorder.phase, self.recorder.replay_source = phase, ""
        if again.mutates:
            bad = next(node for node in result.nodes if node.op._schema.is_mutable)
            raise TraceError(
                f"{bad.target} writes in place in a way that cannot be made functional",
                fix="compute a new tensor instead",
                where=bad.source,
            )
        return result


def _draws(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether a random op really draws: attention kernels are marked random, but only their dropout is."""
    for i, spec in enumerate(func._schema.arguments):
        if spec.name == "dropout_p":
            value = args[i] if i < len(args) else kwargs.get("dropout_p", spec.default_value)
            return bool(value)
    return True


def _refuse_value_read() -> None:
    raise TraceError(
        "the step reads the value of a traced tensor (.item(), float(), bool(), or an `if` on it)",
        fix="keep the value a tensor: use torch.where instead of `if`, and return it instead of reading it",
        where=user_line(),
    )


def _map_tensors(f: Callable[[Tensor], Any], arg: Any) -> Any:
    if isinstance(arg, Tensor):
        return f(arg)
    if isinstance(arg, list) and arg and isinstance(arg[0], Value):
        return arg  # a column of Values already
    if isinstance(arg, (list, tuple)):
        return type(arg)(_map_tensors(f, item) for item in arg)
    return arg


_ALIASES = {
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.lift_fresh.default,
}


class StepRecorder(BlockTracing, LoopTracing, ShardMapTracing):
    """The recorder of one trace: the current tracer, blocks, loops, maps and constraints."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.tracer: Tracer | None = None
        self.phase = "F"
        self.blocks: list[BlockGraph] = []
        self.maps: list[MapGraph] = []
        self.loops: list[LoopGraph] = []
        self.shard_maps: list[ShardMapGraph] = []
        self.constraints: list[Any] = []
        self.constant_bytes = 0
        self.replay_source = ""

    def new_tracer(self, lift: Callable[[Tensor], Value | None] | None = None) -> Tracer:
        return Tracer(self, lift)

    def fake(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return fresh_fake(self.fake_mode, [(tuple(shape), dtype)], self.device)[0]

    def emit(self, op: Any, args: tuple, like: Sequence[Value]) -> list[Tensor]:
        """Records one opaque op with results of the shapes of `like`, and gives their fakes; no dispatch."""
        assert self.tracer is not None
        outs: list[Tensor] = list(fresh_fake(self.fake_mode, [(v.shape, v.dtype) for v in like], self.device))
        self.tracer.record_opaque(op, args, like, outs)
        return outs

    def check_constant(self, tensor: Tensor) -> None:
        if tensor.requires_grad:
            name = variable_of(tensor)
            raise TraceError(
                f"the step closes over {name}, a {tuple(tensor.shape)} tensor that requires grad",
                fix="pass it as an argument (its gradient would be lost), or close over tensor.detach()",
                where=user_line(),
            )
        self.constant_bytes += tensor.numel() * tensor.dtype.itemsize
        if self.constant_bytes > _CONSTANT_LIMIT:
            raise TraceError(
                f"the step closes over {self.constant_bytes / 2**20:.0f} MiB of tensors, which every rank would hold",
                fix="pass large tensors as arguments, so that rules can shard them",
                where=user_line(),
            )

    @contextlib.contextmanager
    def untraced(self) -> Iterator[None]:
        outer, self.tracer = self.tracer, None
        try:
            yield
        finally:
            self.tracer = outer

    @contextlib.contextmanager
    def backward_phase(self) -> Iterator[None]:
        outer, self.phase = self.phase, "B"
        try:
            yield
        finally:
            self.phase = outer

    def enter_grad(self, leaves: list[Tensor]) -> list[Tensor]:
        """New fakes that stand for the same values, so that autograd starts at them."""
        assert self.tracer is not None
        values = list(map(self.tracer.value, leaves))
        fakes = fresh_fake(self.fake_mode, [(value.shape, value.dtype) for value in values], self.device)
        for fake, value in zip(fakes, values, strict=True):
            self.tracer.known[id(fake)] = (value, fake)
        return list(fakes)

    def mark_grads(self, grads: list[Tensor], leaves: list[Tensor], paths: list[str]) -> list[Tensor]:
        assert self.tracer is not None
        values = list(map(self.tracer.value, grads))
        return self.emit(torch.ops.fparallel.mark_grads.default, (values, leaves, paths), values)

    def sum_squares(self, leaves: list[Tensor], dtype: torch.dtype) -> Tensor:
        return self.emit(torch.ops.fparallel.sum_squares.default, (leaves,), [Value((), dtype)])[0]

    def constrain(self, x: Tensor, spec: Any) -> Tensor:
        self.constraints.append(spec)
        return torch.ops.fparallel.constrain(x, len(self.constraints) - 1)

    def stage_boundary(self, x: Tensor) -> Tensor:
        return torch.ops.fparallel.stage_boundary(x)


def trace(
    fn: Callable, avals: Sequence[tuple[tuple[int, ...], torch.dtype]], names: Sequence[str], device: str
) -> tuple[Program, Any]:
    """Traces `fn`, a function of flat tensors that returns (flat tensors, anything); gives (Program, that anything).

    Raises:
      TraceError: the function is not pure, reads values, branches on data, ...
    """
    recorder = StepRecorder(device)
    extra: list[Any] = []

    def run(*fakes: Tensor) -> list[Tensor]:
        outs, aux = fn(*fakes)
        extra.append(aux)
        return outs

    fakes = fresh_fake(recorder.fake_mode, avals, device)
    with recording(recorder), recorder.fake_mode, torch.random.fork_rng(devices=[]):
        try:
            graph = recorder.new_tracer().capture(run, fakes, names)
        except FparallelError:
            raise
        except Exception as error:
            raise explain(error) from error
    _refuse_complex(graph)
    graph.drop_dead()
    parts = recorder.blocks, recorder.maps, recorder.constraints, recorder.loops, recorder.shard_maps
    return Program(graph, *parts), extra[0]


def _refuse_complex(graph: Graph) -> None:
    for value in graph.outputs:
        if value.dtype.is_complex:
            raise TraceError(
                f"the step returns a complex tensor, {typed(value.dtype, Layout.replicated(value.shape))}",
                fix="return torch.view_as_real(x), or its real and imaginary parts",
                where=value.node.source if value.node else None,
            )
