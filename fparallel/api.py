"""fp.jit: ties the compiler, the schedule and the runtime together."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fparallel import tree
from fparallel.arguments import Arguments, Binder
from fparallel.array import Array, ShapeDtypeStruct
from fparallel.budget import lower_within
from fparallel.compiled import Compiled
from fparallel.compiler.choice import Candidate
from fparallel.compiler.lower import LoweredProgram, lower_program
from fparallel.compiler.trace import trace
from fparallel.errors import ShardingError, TraceError
from fparallel.explain import explain_leaf, replicated_text
from fparallel.logical import LogicalSpec
from fparallel.mesh import Mesh
from fparallel.planning import Planner, check_means, check_strict, same_places, warn_undonated
from fparallel.rules import LeafPlan, Rules
from fparallel.schedule.cluster import Cluster
from fparallel.schedule.ir import Schedule
from fparallel.schedule.memory import MemoryReport, memory
from fparallel.schedule.passes import run_passes
from fparallel.sharding import sharding_of
from fparallel.staging import Staging

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
    staging: Staging | None = None

    def role(self, home: int | None) -> tuple[tuple[str, int], ...]:
        """The coordinates of what lies on a rank of the pipeline axis; () where it lies on all."""
        return () if home is None or self.staging is None else ((self.staging.axis, home),)

    def holds(self, rank: int, home: int | None) -> bool:
        """Whether a rank holds what lies on a rank of the pipeline axis (None: on all)."""
        coords = self.jitted.mesh.coords(rank)
        return all(coords[axis] == at for axis, at in self.role(home))

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


def _uncollected(method: Callable) -> Callable:
    """Tracing and lowering make many objects that all live on: Python's collector would look through them in vain."""

    @functools.wraps(method)
    def run(*args: Any) -> Any:
        was = gc.isenabled()
        gc.disable()
        try:
            return method(*args)
        finally:
            if was:
                gc.enable()

    return run


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
    pipeline: str | None = None
    cluster: Cluster | None = None
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

    @_uncollected
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

    @_uncollected
    def lower_traced(self, traced: Traced) -> Lowered:
        if self.memory_budget is None:
            lowered = self.lower_as(traced, self.pipeline)
        else:
            lowered = lower_within(self, traced, self.memory_budget)
        warn_undonated(lowered.plans, lowered.donated, same_places(traced))
        check_means(traced.program, lowered.plans, strict=self.strict)
        lowered.schedule.verify(memory_budget=self.memory_budget)
        return lowered

    def lower_as(self, traced: Traced, pipeline: str | None, chosen: Candidate | None = None) -> Lowered:
        """The schedule, not verified, with an order of the pipeline's tasks; `chosen`: what "auto" stands for."""
        planner = Planner(self.name, self.mesh, self.rules, self.in_shardings, self.out_shardings)
        plans, same_place = planner.input_plans(traced.arguments), same_places(traced)
        out_plans = planner.output_plans(traced, plans, same_place)
        planner.check_rules(traced)
        wanted = planner.wanted(traced, plans, out_plans, same_place)
        donated = self.binder.donated(traced.arguments)
        staging = planner.staging(traced, plans, out_plans, pipeline)
        staged = any(plan.layer is not None for plan in plans)  # if so, outputs lie where they come out
        out_homes = ["any" if staged or plan.home is None else plan.home for plan in out_plans]
        lowered = lower_program(
            traced.program,
            self.mesh,
            plans,
            wanted,
            traced.out_paths,
            donated,
            same_place,
            planner.constraint,
            staging,
            out_homes,
            cluster=self.cluster,
            budgeted=self.memory_budget is not None,
            chosen=chosen,
        )
        if self.strict:
            check_strict(lowered)
        schedule = run_passes(lowered.schedule, off=self.passes_off, memory_budget=self.memory_budget)
        return Lowered(self, traced, plans, out_plans, lowered, schedule, donated, staging)


def _check_returned_once(name: str, tensors: Sequence[Tensor], paths: Sequence[str]) -> None:
    seen: dict[int, str] = {}
    for tensor, path in zip(tensors, paths, strict=True):
        first = seen.setdefault(id(tensor), path)
        if first != path:
            raise TraceError(
                f"{name} returns one tensor at two paths, {first} and {path}",
                fix="return it once, or return x.clone() at the second path",
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
    pipeline: str | None = None,
    cluster: Cluster | None = None,
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
      memory_budget: bytes per rank that the schedule's named buffers may take. What would be gathered again (parameters
        under ZeRO-3, say) is kept instead as far as it leaves room, and parameters are gathered ahead of their use;
        pipeline="auto" takes the fastest order that fits. If nothing fits, the error names the least that would do.
        If None, parameters are gathered one unit ahead, and nothing is kept.
      pipeline: the order in which the stages of a pipeline run micro-batches, where rules put the layers of a list on
        a mesh axis: "1f1b" (if None), "gpipe", "interleaved" or "interleaved:3" (chunks a rank), "zb_h1", "zb_v",
        "auto" (the fastest for what the stages cost, within `memory_budget`), or one registered with `register_order`.
      cluster: what the ranks can do, such as `fparallel calibrate` measures: the layers are cut into stages of equal
        time on it, and "auto" goes by it. If None, a byte of memory counts as 16 floating point operations.
      strict: an error for every reshard that communicates and was not asked for, and for a plain result that the mean
        over micro-batches does not give (else a warning); plain arguments are compared across ranks at every step.
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
            pipeline=pipeline,
            cluster=cluster,
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
        pipeline,
        cluster,
    )


def eval_shape(fun: Callable, *args: Any, **kwargs: Any) -> Any:
    """The outputs of fun as a tree of ShapeDtypeStruct, without computing anything."""
    return jit(fun).trace(*args, **kwargs).out_shapes()
