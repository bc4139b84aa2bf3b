"""What lowering asks of the user's declarations: where each argument, constraint and output lies, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fparallel import tree
from fparallel.arguments import Arguments
from fparallel.array import Array, ShapeDtypeStruct
from fparallel.compiler.graph import Program, has_boundaries, has_gradients
from fparallel.compiler.lower import LoweredProgram
from fparallel.compiler.uneven_means import uneven_means
from fparallel.errors import ShardingError, TraceError
from fparallel.layout import Layout, typed
from fparallel.logical import LogicalSpec, names_of
from fparallel.mesh import Mesh
from fparallel.rules import LeafPlan, Rules, glob_matches, is_under
from fparallel.schedule.orders import find_order
from fparallel.sharding import LayoutSharding, NamedSharding, PartitionSpec, spec_layout, warn
from fparallel.staging import Staging

if TYPE_CHECKING:
    from fparallel.api import Traced

MEAN_FIX = "return fp.Mean(total, weight)"


@dataclass(frozen=True)
class Planner:
    """The rules and explicit shardings of one jitted function."""

    name: str
    mesh: Mesh
    rules: Rules | None
    in_shardings: Any
    out_shardings: Any
    used_globs: set[str] = field(default_factory=set)

    def input_plans(self, arguments: Arguments) -> list[LeafPlan]:
        """How every argument leaf lies: in_shardings, rules, or as it comes."""
        mesh = self.mesh
        if self.rules is not None:
            plans = self.rules.plan(
                arguments.paths,
                arguments.leaves,
                arguments.specs,
                mesh,
                batch_paths=arguments.batch_paths,
                used_globs=self.used_globs,
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

    def output_plans(
        self, traced: Traced, plans: list[LeafPlan], same_place: list[int | None]
    ) -> list[LeafPlan]:
        """How the rules would have every output leaf lie; one that replaces an argument has the argument's plan."""
        leaves = [ShapeDtypeStruct(*aval) for aval in traced.out_avals]
        if self.rules is not None:
            rest = [i for i, place in enumerate(same_place) if place is None]
            if any(is_under(traced.out_paths[i], self.rules.opt_state_component) for i in rest):
                rest = list(range(len(leaves)))  # what mirrors parameters is planned together with them
            planned = self.rules.plan(
                [traced.out_paths[i] for i in rest],
                [leaves[i] for i in rest],
                [traced.out_specs[i] for i in rest],
                self.mesh,
                used_globs=self.used_globs,
            )
            found = dict(zip(rest, planned, strict=True))
            return [
                found[i] if i in found or place is None else plans[place].at(path)
                for i, (path, place) in enumerate(zip(traced.out_paths, same_place, strict=True))
            ]
        replicated = []
        for path, leaf in zip(traced.out_paths, leaves, strict=True):
            layout = Layout.replicated(leaf.shape)
            replicated.append(LeafPlan(path, leaf.shape, leaf.dtype, layout, layout, layout))
        return replicated

    def _given(self, sharding: Any, shape: tuple[int, ...], path: str) -> Layout:
        if isinstance(sharding, PartitionSpec):
            return spec_layout(sharding, shape, self.mesh, path)
        if sharding.mesh != self.mesh:
            raise ShardingError(
                f"{path}: a sharding on the mesh {sharding.mesh}, the step runs on {self.mesh}",
                fix="use one mesh",
            )
        return sharding.layout(shape, path)

    def wanted(
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

    def check_rules(self, traced: Traced) -> None:
        """Every rule and glob means something here; to be asked once all leaves are planned."""
        if self.rules is None:
            return
        specs = {spec for spec in traced.out_specs + traced.arguments.specs if spec}
        known = {name for spec in specs for name in spec.names}
        for spec in traced.program.constraints:
            if isinstance(spec, str):
                known |= names_of(tree.parse_logical(spec))
        has_activations = bool(traced.program.constraints) or "batch" in traced.arguments.names
        self.rules.check_names(self.mesh, known, has_activations=has_activations)
        if not self.rules.globs:
            return
        paths = traced.arguments.paths + traced.out_paths
        components = {part for path in paths for part in path.split(".")}
        for pattern in self.rules.globs:
            absent = {"params", "opt_state", "batch", "state", "key"} - components
            if pattern in self.used_globs or any(glob_matches(pattern, path) for path in traced.out_paths):
                continue
            if pattern.split(".")[0] not in absent:
                raise ShardingError(
                    f"the glob {pattern!r} matches no leaf of {self.name}",
                    fix="mend or remove it; the paths are "
                    + ", ".join(paths[:6])
                    + (", ..." if len(paths) > 6 else ""),
                )

    def staging(
        self, traced: Traced, plans: list[LeafPlan], out_plans: list[LeafPlan], order: str | None
    ) -> Staging | None:
        """How the function is cut into the stages of a pipeline; the leaves' pipeline ranks are noted in the plans."""
        if order is not None:
            find_order(order, self.mesh.size)
        learns, cut = has_gradients(traced.program), has_boundaries(traced.program)
        staging = Staging.of(
            [*plans, *out_plans], self.mesh, order, None if learns else traced.arguments.leaves
        )
        if staging is None:
            return None
        layered = any(plan.layer for plan in [*plans, *out_plans])
        if not layered and not cut:
            used = {axis.name for plan in plans for axis in plan.storage.sharded_axes}
            if learns and staging.axis not in used:
                raise ShardingError(
                    f"{self.name}: nothing lies on the mesh axis {staging.axis}={staging.ranks}",
                    fix=f'give the index of a list of layers to it, Annotated[list[Block], "layers"] with '
                    f'fp.Rules(layers="{staging.axis}"), or cut with fp.stage_boundary(x)',
                )
            return None
        self._check_free(staging.axis, [*plans, *out_plans])
        for some in (plans, out_plans):
            if cut or any(plan.layer is not None for plan in some):
                staging.settle(some)
        if staging.given:
            for plan, leaf in zip(plans, traced.arguments.leaves, strict=True):
                if plan.home is not None and isinstance(leaf, Array) and leaf.home is not None:
                    plan.home = leaf.home
        return staging

    def _check_free(self, axis: str, plans: Sequence[LeafPlan]) -> None:
        """The axis of the stages shards nothing."""
        names = self.rules.names if self.rules is not None else {}
        lists = {name for leaf in plans if leaf.layer is not None for name in [leaf.layer.name]}
        for name, axes in names.items():
            if name not in lists and axis in ((axes,) if isinstance(axes, str) else axes or ()):
                raise ShardingError(
                    f"the rule {name}={axes!r} shards over {axis}, on which the stages of the pipeline lie",
                    fix=f"shard over another axis, or take the layers off {axis}",
                )
        for plan in plans:
            for layout in (plan.storage, plan.compute, plan.gradient):
                if any(used.name == axis for used in layout.sharded_axes):
                    raise ShardingError(
                        f"{plan.path} is {typed(plan.dtype, layout)}, and the stages of the pipeline lie on {axis}",
                        fix=f"shard it over another axis, or take the layers off {axis}",
                    )

    def constraint(self, spec: Any, shape: tuple[int, ...]) -> Layout:
        """The layout that a with_sharding_constraint asks for."""
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


def same_places(traced: Traced) -> list[int | None]:
    """Per output leaf the argument leaf that it replaces: outputs with the structure of an argument."""
    arguments = traced.arguments
    starts, position = [], 0
    for treedef in arguments.treedefs:
        starts.append(position)
        position += treedef.num_leaves
    avals, out_avals = arguments.avals(), traced.out_avals
    result: list[int | None] = [None] * len(out_avals)
    taken: set[int] = set()
    parts = traced.out_treedef.children() if traced.out_treedef.type is tuple else [traced.out_treedef]
    offset = 0
    for part in parts:
        for i, treedef in enumerate(arguments.treedefs):
            leaves = range(starts[i], starts[i] + treedef.num_leaves)
            if i in taken or part != treedef or not treedef.num_leaves:
                continue
            pairs = list(zip(range(offset, offset + treedef.num_leaves), leaves, strict=True))
            if all(out_avals[o] == avals[a] for o, a in pairs):
                taken.add(i)
                for o, a in pairs:
                    result[o] = a
                break
        offset += part.num_leaves
    return result


def warn_undonated(
    plans: Sequence[LeafPlan], donated: Sequence[bool], same_place: Sequence[int | None]
) -> None:
    replaced = {place for place in same_place if place is not None}
    lost = [plan.path for i, plan in enumerate(plans) if donated[i] and i not in replaced]
    if lost and any(donated) and len(lost) == sum(donated):
        warn(
            f"donated, but no output takes the place of {', '.join(lost[:4])}{', ...' if len(lost) > 4 else ''}",
            "donate an argument whose structure, shapes and dtypes an output has",
        )


def check_means(program: Program, plans: Sequence[LeafPlan], *, strict: bool) -> None:
    """A listed warning, an error under `strict`, for plain results that the mean over micro-batches does not give."""
    params = {v for v, plan in zip(program.graph.inputs, plans, strict=True) if plan.role == "params"}
    found = uneven_means(program, params)
    if found and strict:
        where = ", ".join(dict.fromkeys(mean.source for mean in found))
        raise TraceError("strict: " + "\n".join(map(str, found)), fix=MEAN_FIX, where=where)
    if found:
        warn("\n".join(map(str, found)), MEAN_FIX)


def check_strict(lowered: LoweredProgram) -> None:
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
