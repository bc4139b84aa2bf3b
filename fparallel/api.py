"""fp.jit: ties the compiler, the schedule and the runtime together."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fparallel import tree
from fparallel.arguments import Arguments, Binder
from fparallel.array import Array, ShapeDtypeStruct, put
from fparallel.compiler.lower import LoweredProgram, lower_program
from fparallel.compiler.trace import trace
from fparallel.errors import ExecutionError, ShardingError, TraceError
from fparallel.explain import explain_leaf, replicated_text
from fparallel.layout import Layout, same, typed
from fparallel.logical import LogicalSpec, names_of
from fparallel.mesh import Mesh
from fparallel.runtime.run import Runner
from fparallel.schedule.ir import Schedule
from fparallel.schedule.memory import MemoryReport, memory
from fparallel.schedule.passes import run_passes
from fparallel.sharding import (
    LayoutSharding,
    LeafPlan,
    NamedSharding,
    PartitionSpec,
    Rules,
    sharding_of,
    spec_layout,
    warn,
)

_ONE = Mesh((1,), ("device",), "simulated")


@dataclass
class Traced:
    """A traced function: its program of ATen ops with global shapes (`str()` prints it), and its outputs."""

    jitted: Jitted
    arguments: Arguments
    program: Any
    out_treedef: Any
    out_avals: list[tuple[tuple[int, ...], torch.dtype]]
    out_specs: list[LogicalSpec | None]

    @property
    def out_paths(self) -> list[str]:
        return tree.paths(self.out_treedef)

    def out_shapes(self) -> Any:
        """The outputs as a tree of ShapeDtypeStruct."""
        return tree.unflatten(self.out_treedef, [ShapeDtypeStruct(*aval) for aval in self.out_avals])

    def __str__(self) -> str:
        return str(self.program)

    def lower(self) -> Lowered:
        """Chooses layouts and writes the schedule; nothing runs."""
        return self.jitted.lower_traced(self)


@dataclass
class Lowered:
    """A step as a schedule: explicit, printable, verified. Nothing has run."""

    jitted: Jitted
    traced: Traced
    plans: list[LeafPlan]
    out_plans: list[LeafPlan]
    program: LoweredProgram
    schedule: Schedule
    donated: list[bool]

    def memory(self) -> MemoryReport:
        """The peak of named buffers per rank and tier, by cause, from exact liveness."""
        return memory(self.schedule)

    def explain(self, path: str) -> str:
        """The layouts of a leaf, and every collective that touches it, each with its cause and source line."""
        return explain_leaf(path, self.plans + self.out_plans, self.schedule, self.program.decisions)

    def replicated(self) -> str:
        """What no rule names, with its bytes."""
        return replicated_text(self.plans)

    def compile(self, *, transport: Any = None, check: bool = False) -> Compiled:
        """Binds the schedule to the ranks of the mesh.

        Args:
          transport: moves tensors between ranks; by default that of the mesh's kind.
          check: overwrite freed memory, so that a mistake shows (slower).
        """
        return Compiled(self, transport, check)

    def __str__(self) -> str:
        return str(self.schedule)


class Compiled:
    """A step bound to its ranks."""

    def __init__(self, lowered: Lowered, transport: Any = None, check: bool = False) -> None:
        self.lowered = lowered
        jitted = lowered.jitted
        self.runner = Runner(
            lowered.schedule,
            lowered.program.constants,
            compile=jitted.compile,
            transport=transport,
            check=check,
        )
        self.calls = 0

    @property
    def shardings(self) -> tuple[Any, Any]:
        """The shardings of the arguments (by path) and of the outputs (as their tree)."""
        low = self.lowered
        mesh = low.jitted.mesh
        ins = {plan.path: sharding_of(plan.storage, mesh) for plan in low.plans}
        outs = [sharding_of(layout, mesh) for layout in low.program.out_layouts]
        return ins, tree.unflatten(low.traced.out_treedef, outs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.lowered.jitted.binder.bind(args, kwargs))

    def run(self, arguments: Arguments) -> Any:
        low = self.lowered
        mesh = low.jitted.mesh
        self.runner.check_equal_on_ranks(arguments.paths, arguments.leaves, always=low.jitted.strict)
        shards: list[list[Tensor | None]] = [[] for _ in self.runner.ranks]
        for plan, leaf, donated in zip(low.plans, arguments.leaves, low.donated, strict=True):
            held = self._place(plan, leaf, donated)
            for position, rank in enumerate(self.runner.ranks):
                shards[position].append(held[rank])
        outs = self.runner(shards)
        arrays: list[Any] = []
        for i, (layout, (_, dtype)) in enumerate(
            zip(low.program.out_layouts, low.traced.out_avals, strict=True)
        ):
            parts = {rank: outs[position][i] for position, rank in enumerate(self.runner.ranks)}
            arrays.append(
                Array(mesh, layout, dtype, parts) if low.jitted.distributed else parts[self.runner.ranks[0]]
            )
        if self.calls == 0:
            self._check_finite(arrays)
        self.calls += 1
        return tree.unflatten(low.traced.out_treedef, arrays)

    def _place(self, plan: LeafPlan, leaf: Any, donated: bool) -> dict[int, Tensor]:
        mesh = self.lowered.jitted.mesh
        if isinstance(leaf, ShapeDtypeStruct):
            raise ExecutionError(
                f"{plan.path} is a ShapeDtypeStruct", fix="lower with shapes, run with arrays"
            )
        if not isinstance(leaf, Array):
            if (
                not donated
                and not plan.storage.sharded_axes
                and str(leaf.device) == mesh.device
                and leaf.is_contiguous()
            ):
                return dict.fromkeys(self.runner.ranks, leaf)
            return put(leaf, mesh, plan.storage).shards
        if leaf.mesh != mesh:
            raise ShardingError(
                f"{plan.path} lies on the mesh {leaf.mesh}, the step runs on {mesh}",
                fix="use one mesh, or move the array with fp.device_put",
            )
        if not same(leaf.layout, plan.storage):
            raise ShardingError(
                f"{plan.path} arrives as {leaf.text}, the step expects {typed(plan.dtype, plan.storage)}",
                fix="make it with a function under the same rules, or move it with fp.device_put",
            )
        return leaf.take() if donated else leaf.shards

    def _check_finite(self, arrays: Sequence[Any]) -> None:
        """The first call names what is not finite, instead of training on it."""
        paths = self.lowered.traced.out_paths
        for path, leaf in zip(paths, arrays, strict=True):
            if leaf.dtype.is_floating_point and tuple(leaf.shape) == ():
                value = float(leaf)
                if math.isnan(value):
                    raise ExecutionError(
                        f"the first call of {self.lowered.jitted.name} returned NaN at {path or 'its result'}",
                        fix="look for NaN in the arguments, a 0/0, a log of a negative number; lower the learning rate",
                    )


@dataclass
class Jitted:
    """A function under fp.jit; see `jit`."""

    fun: Callable
    mesh: Mesh
    rules: Rules | None
    in_shardings: Any
    out_shardings: Any
    binder: Binder
    memory_budget: int | None
    strict: bool
    compile: str
    distributed: bool
    passes_off: tuple[str, ...] = ()
    cache: dict[Any, Compiled] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.binder.name

    def __post_init__(self) -> None:
        functools.update_wrapper(self, self.fun, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = self._bind(args, kwargs)
        key = self._key(arguments)
        compiled = self.cache.get(key)
        if compiled is None:
            compiled = self.cache[key] = self._trace(arguments).lower().compile()
        return compiled.run(arguments)

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """Traces the function for these arguments (or ShapeDtypeStructs)."""
        return self._trace(self._bind(args, kwargs))

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """The schedule for these arguments (or ShapeDtypeStructs); nothing runs."""
        return self.trace(*args, **kwargs).lower()

    def shardings(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """The shardings of arguments and outputs; see `Compiled.shardings`."""
        low = self.lower(*args, **kwargs)
        ins = {plan.path: sharding_of(plan.storage, self.mesh) for plan in low.plans}
        outs = [sharding_of(layout, self.mesh) for layout in low.program.out_layouts]
        return ins, tree.unflatten(low.traced.out_treedef, outs)

    def _bind(self, args: tuple, kwargs: dict[str, Any]) -> Arguments:
        """The arguments; without a mesh, the step runs on the device where they lie."""
        arguments = self.binder.bind(args, kwargs)
        if not self.distributed:
            tensors = [leaf for leaf in arguments.leaves if isinstance(leaf, Tensor) and leaf.dim()]
            devices = {leaf.device.type for leaf in tensors} - {"meta"}
            if len(devices) > 1:
                raise TraceError(
                    f"{self.name} got tensors on {' and '.join(sorted(devices))}",
                    fix="put all arguments on one device, or give a mesh",
                )
            device = devices.pop() if devices else "cpu"
            if device != self.mesh.device:
                self.mesh = Mesh(_ONE.sizes, _ONE.names, _ONE.kind, device)
        return arguments

    def _key(self, arguments: Arguments) -> Any:
        placed = None
        if self.rules is None and self.in_shardings is None:
            placed = tuple(leaf.layout if isinstance(leaf, Array) else None for leaf in arguments.leaves)
        return (
            self.mesh.device,
            arguments.statics,
            tuple(arguments.keys),
            tuple(arguments.treedefs),
            arguments.avals(),
            placed,
        )

    def _trace(self, arguments: Arguments) -> Traced:
        found: list[Any] = []

        def flat(*leaves: Tensor) -> tuple[list[Tensor], Any]:
            out = arguments.call(self.fun, leaves)
            paths, outs, treedef = tree.flatten_with_path(out)
            tensors = []
            for path, leaf in zip(paths, outs, strict=True):
                if isinstance(leaf, (bool, int, float)):
                    leaf = torch.full((), leaf, device=self.mesh.device)
                if not isinstance(leaf, Tensor):
                    raise TraceError(
                        f"{self.name} returned {type(leaf).__name__} {str(leaf)[:40]!r} "
                        f"at {path or 'its result'}, expected a tensor",
                        fix="return tensors and numbers in trees; make other values fp.static fields",
                    )
                tensors.append(leaf)
            _check_returned_once(self.name, tensors, paths)
            found.append(tree.logical_specs(out))
            return tensors, treedef

        program, treedef = trace(flat, arguments.avals(), arguments.paths, self.mesh.device)
        avals = [(value.shape, value.dtype) for value in program.graph.outputs]
        return Traced(self, arguments, program, treedef, avals, found[-1])

    # -------------------------------------------------------------- lowering

    def lower_traced(self, traced: Traced) -> Lowered:
        arguments, mesh = traced.arguments, self.mesh
        used: set[str] = set()
        plans = self._input_plans(arguments, used)
        out_plans = self._output_plans(traced, used)
        self._check_rules(traced, used)
        same_place = self._same_places(traced, plans, out_plans)
        wanted = self._wanted(traced, plans, out_plans, same_place)
        donated = self.binder.donated(arguments)
        _warn_undonated(plans, donated, same_place)
        lowered = lower_program(
            traced.program, mesh, plans, wanted, traced.out_paths, donated, same_place, self._constraint
        )
        if self.strict:
            _check_strict(lowered)
        schedule = run_passes(lowered.schedule, off=self.passes_off, memory_budget=self.memory_budget)
        schedule.verify(memory_budget=self.memory_budget)
        return Lowered(self, traced, plans, out_plans, lowered, schedule, donated)

    def _input_plans(self, arguments: Arguments, used: set[str]) -> list[LeafPlan]:
        mesh = self.mesh
        if self.rules is not None:
            plans = self.rules.plan(
                arguments.paths,
                arguments.leaves,
                arguments.specs(),
                mesh,
                batch_paths=arguments.batch_paths,
                used_globs=used,
            )
        else:
            plans = []
            for path, leaf in zip(arguments.paths, arguments.leaves, strict=True):
                layout = (
                    leaf.layout
                    if isinstance(leaf, Array) and self.in_shardings is None
                    else Layout.replicated(leaf.shape)
                )
                plans.append(LeafPlan(path, tuple(leaf.shape), leaf.dtype, layout, layout, layout))
        if self.in_shardings is not None:
            prefix = (
                self.in_shardings
                if isinstance(self.in_shardings, tuple) and not isinstance(self.in_shardings, PartitionSpec)
                else (self.in_shardings,) * len(arguments.values)
            )
            if len(prefix) != len(arguments.values):
                raise ShardingError(
                    f"in_shardings has {len(prefix)} entries, {self.name} takes {len(arguments.values)} arguments",
                    fix="give one entry per argument",
                )
            given = [
                s
                for p, v in zip(prefix, arguments.values, strict=True)
                for s in tree.match_prefix(p, v, is_leaf=_is_sharding)
            ]
            for plan, sharding in zip(plans, given, strict=True):
                if sharding is not None:
                    plan.storage = plan.compute = plan.gradient = self._given(sharding, plan.shape, plan.path)
                    plan.cause, plan.named = "in_shardings", True
        return plans

    def _output_plans(self, traced: Traced, used: set[str]) -> list[LeafPlan]:
        leaves = [ShapeDtypeStruct(*aval) for aval in traced.out_avals]
        if self.rules is not None:
            return self.rules.plan(traced.out_paths, leaves, traced.out_specs, self.mesh, used_globs=used)
        plans = []
        for path, leaf in zip(traced.out_paths, leaves, strict=True):
            layout = Layout.replicated(leaf.shape)
            plans.append(LeafPlan(path, leaf.shape, leaf.dtype, layout, layout, layout))
        return plans

    def _given(self, sharding: Any, shape: tuple[int, ...], path: str) -> Layout:
        if isinstance(sharding, PartitionSpec):
            return spec_layout(sharding, shape, self.mesh, path)
        if sharding.mesh != self.mesh:
            raise ShardingError(
                f"{path}: a sharding on the mesh {sharding.mesh}, the step runs on {self.mesh}",
                fix="use one mesh",
            )
        return sharding.layout(shape, path)

    def _wanted(
        self, traced: Traced, plans: list[LeafPlan], out_plans: list[LeafPlan], same_place: list[int | None]
    ) -> list[Layout | None]:
        """The layout of each output: out_shardings, the argument that it replaces, a rule, or as it comes out."""
        wanted: list[Layout | None] = []
        for plan, place in zip(out_plans, same_place, strict=True):
            if place is not None:
                wanted.append(plans[place].storage)
            elif plan.named or plan.role:
                wanted.append(plan.storage)
            else:
                wanted.append(None)
        if self.out_shardings is not None:
            shapes = traced.out_shapes()
            given = tree.match_prefix(self.out_shardings, shapes, is_leaf=_is_sharding)
            for i, (sharding, plan) in enumerate(zip(given, out_plans, strict=True)):
                if sharding is not None:
                    wanted[i] = self._given(sharding, plan.shape, plan.path)
        return wanted

    def _same_places(
        self, traced: Traced, plans: list[LeafPlan], out_plans: list[LeafPlan]
    ) -> list[int | None]:
        """Per output leaf the argument leaf that it replaces: outputs with the structure of an argument."""
        arguments = traced.arguments
        starts, position = [], 0
        for treedef in arguments.treedefs:
            starts.append(position)
            position += treedef.num_leaves
        result: list[int | None] = [None] * len(out_plans)
        taken: set[int] = set()
        parts = traced.out_treedef.children() if traced.out_treedef.type is tuple else [traced.out_treedef]
        offset = 0
        for part in parts:
            for i, treedef in enumerate(arguments.treedefs):
                leaves = range(starts[i], starts[i] + treedef.num_leaves)
                if i in taken or part != treedef or not treedef.num_leaves:
                    continue
                pairs = list(zip(range(offset, offset + treedef.num_leaves), leaves, strict=True))
                if all(
                    out_plans[o].shape == plans[a].shape and out_plans[o].dtype == plans[a].dtype
                    for o, a in pairs
                ):
                    taken.add(i)
                    for o, a in pairs:
                        result[o] = a
                    break
            offset += part.num_leaves
        return result

    def _check_rules(self, traced: Traced, used: set[str]) -> None:
        if self.rules is None:
            return
        known = {name for spec in traced.out_specs + traced.arguments.specs() if spec for name in spec.names}
        for spec in traced.program.constraints:
            if isinstance(spec, str):
                known |= names_of(tree.parse_logical(spec))
        has_activations = bool(traced.program.constraints) or "batch" in traced.arguments.names
        self.rules.check_names(self.mesh, known, has_activations=has_activations)
        paths = traced.arguments.paths + traced.out_paths
        components = {part for path in paths for part in path.split(".")}
        for pattern in self.rules.globs:
            absent = {"params", "opt_state", "batch", "state", "key"} - components
            if pattern not in used and pattern.split(".")[0] not in absent:
                raise ShardingError(
                    f"the glob {pattern!r} matches no leaf of {self.name}",
                    fix="mend or remove it; the paths are "
                    + ", ".join(paths[:6])
                    + (", ..." if len(paths) > 6 else ""),
                )

    def _constraint(self, spec: Any, shape: tuple[int, ...]) -> Layout:
        path = f"with_sharding_constraint({spec!r})"
        if isinstance(spec, PartitionSpec):
            return spec_layout(spec, shape, self.mesh, path)
        if isinstance(spec, NamedSharding | LayoutSharding):
            return self._given(spec, shape, path)
        if not isinstance(spec, str):
            raise ShardingError(
                f"{path}: {type(spec).__name__} is no sharding",
                fix='pass a P(...) or logical names such as "batch seq embed"',
            )
        if self.rules is None:
            return Layout.replicated(shape)
        return self.rules.logical_layout(LogicalSpec(tree.parse_logical(spec)), shape, self.mesh, path)


def _is_sharding(x: Any) -> bool:
    return x is None or isinstance(x, PartitionSpec | NamedSharding | LayoutSharding)


def _check_returned_once(name: str, tensors: Sequence[Tensor], paths: Sequence[str]) -> None:
    seen: dict[int, str] = {}
    for tensor, path in zip(tensors, paths, strict=True):
        first = seen.setdefault(id(tensor), path)
        if first != path:
            raise TraceError(
                f"{name} returns one tensor at two paths, {first} and {path}",
                fix="return it once, or return x.clone() at the second path",
            )


def _warn_undonated(
    plans: Sequence[LeafPlan], donated: Sequence[bool], same_place: Sequence[int | None]
) -> None:
    replaced = {place for place in same_place if place is not None}
    lost = [plan.path for i, plan in enumerate(plans) if donated[i] and i not in replaced]
    if lost and any(donated) and len(lost) == sum(donated):
        warn(
            f"donated, but no output takes the place of {', '.join(lost[:4])}{', ...' if len(lost) > 4 else ''}",
            "donate an argument whose structure, shapes and dtypes an output has",
        )


def _check_strict(lowered: LoweredProgram) -> None:
    """Every reshard that no rule, constraint or gradient asks for is an error."""
    asked = ("storage -> compute", "gradient of", "sharding constraint", "output ", "sum of squares")
    bad = [
        d
        for d in lowered.decisions
        if not d.cause.startswith(asked)
        and any(k in ("all_gather", "all_to_all", "permute") for k in d.kinds)
    ]
    if bad:
        lines = [
            f"  {typed(d.dtype, d.src)} -> {typed(d.dtype, d.dst)}  {d.nbytes:.0f} B  {d.cause}  at {d.source}"
            for d in bad
        ]
        raise ShardingError(
            "strict: the compiler would have to insert reshards\n" + "\n".join(lines),
            fix="add fp.with_sharding_constraint where a reshard is meant, change the rules, or drop strict=True",
        )


def jit(
    fun: Callable | None = None,
    *,
    mesh: Mesh | None = None,
    rules: Rules | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    memory_budget: int | None = None,
    strict: bool = False,
    compile: str = "eager",
) -> Any:
    """Compiles a pure function written for one device into a parallel program on a mesh.

    Args:
      fun: a pure function of trees of arrays; returns a tree of tensors.
      mesh: where it runs; None is one device, and plain tensors come out.
      rules: how leaves are sharded, by logical axis name and by path; see `Rules`.
      in_shardings, out_shardings: tree prefixes of P or NamedSharding, one per argument; they beat the rules.
      donate_argnums: arguments whose memory the outputs may take over; reading a donated array raises.
      static_argnums, static_argnames: hashable arguments that are part of the program.
      memory_budget: bytes per rank that the schedule's named buffers may take.
      strict: an error for every reshard that communicates and was not asked for; plain arguments are compared
        across ranks at every step.
      compile: "eager" or "inductor": how the segments of local compute run.

    Returns:
      A callable with `.trace`, `.lower` and `.shardings`.

    Raises:
      FparallelError: anything wrong with the function, rules or arguments, before any rank computes.
    """
    if fun is None:
        return functools.partial(
            jit,
            mesh=mesh,
            rules=rules,
            in_shardings=in_shardings,
            out_shardings=out_shardings,
            donate_argnums=donate_argnums,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            memory_budget=memory_budget,
            strict=strict,
            compile=compile,
        )
    if compile not in ("eager", "inductor"):
        raise ShardingError(f"compile={compile!r}", fix='use "eager" or "inductor"')
    if mesh is None and (rules is not None or in_shardings is not None):
        raise ShardingError("rules or shardings without a mesh", fix="pass mesh=fp.make_mesh(...)")

    def several(value: Any) -> tuple:
        return (value,) if isinstance(value, (int, str)) else tuple(value)

    binder = Binder(fun, several(static_argnums), several(static_argnames), several(donate_argnums))
    return Jitted(
        fun,
        mesh or _ONE,
        rules,
        in_shardings,
        out_shardings,
        binder,
        memory_budget,
        strict,
        compile,
        mesh is not None,
    )


def eval_shape(fun: Callable, *args: Any, **kwargs: Any) -> Any:
    """The outputs of fun as a tree of ShapeDtypeStruct, without computing anything."""
    return jit(fun).trace(*args, **kwargs).out_shapes()
