"""From a traced program and the plans of its leaves to a verified schedule."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fparallel.compiler.block_calls import gradient_hints
from fparallel.compiler.build import build
from fparallel.compiler.choice import Candidate
from fparallel.compiler.context import Context, Decision, Roles
from fparallel.compiler.early import early_collectives
from fparallel.compiler.free_values import FreeChoice
from fparallel.compiler.graph import (
    ACCUMULATE,
    CONSTRAIN,
    MARK_GRADS,
    Graph,
    Node,
    Program,
    Value,
    map_values,
)
from fparallel.compiler.local import Item, Local
from fparallel.compiler.local import Roles as Placement
from fparallel.compiler.maps import fuse_maps
from fparallel.compiler.partition import Partitioner
from fparallel.compiler.pipeline import Projection
from fparallel.compiler.pipeline_programs import programs
from fparallel.compiler.rules import find_rule
from fparallel.compiler.stages import Pipeline
from fparallel.layout import Layout, mesh_atoms, same
from fparallel.mesh import Mesh
from fparallel.rules import LeafPlan
from fparallel.schedule.cluster import Cluster
from fparallel.schedule.ir import Schedule
from fparallel.staging import Staging


@dataclass
class LoweredProgram:
    """A schedule (before its passes), its constants, where each output lies, and what the compiler decided.

    Attributes:
      order: how the tasks of a pipeline's loop are ordered; "" without one.
      candidates: the orders that pipeline="auto" chose from, the fastest first.
    """

    schedule: Schedule
    constants: dict[str, torch.Tensor]
    out_layouts: list[Layout]
    out_homes: list[int | None]
    decisions: list[Decision]
    order: str = ""
    candidates: list[Candidate] = field(default_factory=list)


def lower_program(
    program: Program,
    mesh: Mesh,
    inputs: Sequence[LeafPlan],
    wanted: Sequence[Layout | None],
    names: Sequence[str],
    donated: Sequence[bool],
    same_place: Sequence[int | None],
    constrain: Callable[[Any, tuple[int, ...]], Layout],
    staging: Staging | None = None,
    out_homes: Sequence[int | str | None] = (),
    *,
    cluster: Cluster | None = None,
    budgeted: bool = False,
    chosen: Candidate | None = None,
) -> LoweredProgram:
    """Lowers a program whose inputs lie as planned.

    Args:
      inputs: the plan of each flattened argument.
      wanted: per flattened output its layout, or None to leave it as it comes out (pending sums reduced).
      names: the paths of the outputs, for messages.
      donated, same_place: see `build`.
      constrain: the layout of a sharding constraint for a shape.
      staging: how the program is cut into the stages of a pipeline. The `home` of each of `inputs` is settled here.
      out_homes: per output the pipeline rank that it goes to, None for all, "any" where it comes out. What
        replaces an argument goes where that lies.
      cluster: what the ranks of a pipeline can do, if that is known.
      budgeted: whether pipeline="auto" chooses among orders that hold less too.
      chosen: what pipeline="auto" stands for, where that is known.
    """
    fuse_maps(program)
    graph = program.graph
    atoms = mesh_atoms(mesh, _named_layouts(program, inputs, wanted, names, constrain))

    @functools.cache
    def atomic(layout: Layout) -> Layout:
        split = layout.split_axes(atoms)
        return Layout.of(split.dims, split.unreduced)

    pipeline = None
    if staging is not None:
        pipeline = Pipeline(
            mesh.axis(staging.axis),
            staging.order if chosen is None else chosen.order,
            {},
            staging.lengths(inputs),
            staging.given,
            cluster=cluster,
            budgeted=budgeted,
            chosen=chosen,
        )
    context = Context(mesh, atoms, program, lambda spec, shape: atomic(constrain(spec, shape)), pipeline)
    roles = Roles()
    partitioner = Partitioner(context, roles)
    arguments = []
    params: dict[str, LeafPlan] = {}
    for value, plan in zip(graph.inputs, inputs, strict=True):
        value.name = plan.path
        storage, compute = atomic(plan.storage), atomic(plan.compute)
        is_param = plan.role == "params"
        local = Local(plan.dtype, storage, plan.path, pinned=is_param, static=is_param)
        arguments.append(local)
        if pipeline is not None and plan.layer is not None:
            pipeline.layer_of[local] = (plan.layer.list, plan.layer.index)
        partitioner.env[value] = [local]
        if is_param:
            params[plan.path] = plan
            roles.gradient[value] = atomic(plan.gradient)
            if not same(storage, compute):
                roles.compute[value] = compute
            if plan.reduced_early:
                roles.reduced_early.add(value)

    def by_path(path: str, shape: tuple[int, ...]) -> Layout | None:
        for known, plan in params.items():
            if (known == path or known.endswith("." + path)) and plan.shape == shape:
                return atomic(plan.gradient)
        return None

    roles.gradient_by_path = by_path
    leaves = {value for value, plan in zip(graph.inputs, inputs, strict=True) if plan.role == "params"}
    restate_static(graph, leaves)
    for node in graph.nodes:
        if node.target == ACCUMULATE:
            body = program.loops[node.args[3]].graph
            inside = zip(body.inputs, node.args[0], strict=False)
            restate_static(body, {inner for inner, outer in inside if outer in leaves})
    partitioner.hints.update(gradient_hints(graph, _gradient_wishes(graph, inputs, atomic)))
    partitioner.run(graph)
    results = [
        partitioner.result(value, None if layout is None else atomic(layout), name)
        for value, layout, name in zip(graph.outputs, wanted, names, strict=True)
    ]
    items = early_collectives(partitioner.items, arguments)
    homes: list[int | None] = [None] * len(results)
    place = None
    if pipeline is not None:
        place = _projection(pipeline, mesh, inputs, arguments, results, same_place, out_homes, homes)
        context.decisions += map(_of_free_value, pipeline.free_choices)
    built = build(context, items, arguments, results, donated, same_place, place)
    lowered = LoweredProgram(
        built.schedule, built.constants, [local.layout for local in results], homes, context.decisions
    )
    if pipeline is not None and pipeline.cut is not None:
        lowered.order = str(pipeline.chosen or pipeline.order)
        lowered.candidates = pipeline.candidates
    return lowered


def _of_free_value(choice: FreeChoice) -> Decision:
    value, kinds = choice.value, () if choice.stage is None else ("send",)
    moved = 0.0 if choice.stage is None else float(value.nbytes * (len(choice.ranks) - 1))
    layout = value.layout
    return Decision(value.name, layout, layout, value.dtype, moved, choice.cause, choice.source, kinds)


def _projection(
    pipeline: Pipeline,
    mesh: Mesh,
    inputs: Sequence[LeafPlan],
    arguments: Sequence[Local],
    results: Sequence[Local],
    same_place: Sequence[int | None],
    wanted: Sequence[int | str | None],
    homes: list[int | None],
) -> Callable[[list[Item]], Placement]:
    """Settles where the arguments lie; gives what places the items, which notes where the outputs lie in `homes`."""
    by_path: dict[str, int] = {}
    for plan, local in zip(inputs, arguments, strict=True):
        if plan.home is not None:
            plan.home = by_path[plan.path] = pipeline.home(local, plan.home)
    for plan in inputs:
        if plan.home is not None and plan.mirrors:
            plan.home = by_path[plan.mirrors]
    lie = {local: plan.home for local, plan in zip(arguments, inputs, strict=True)}
    wishes = [wish if at is None else inputs[at].home for at, wish in zip(same_place, wanted, strict=True)]

    def place(items: list[Item]) -> Placement:
        projection = Projection(pipeline, mesh, items, lie, results, wishes)
        homes[:] = projection.out_homes
        return programs(projection)

    return place


def _named_layouts(
    program: Program,
    inputs: Sequence[LeafPlan],
    wanted: Sequence[Layout | None],
    names: Sequence[str],
    constrain: Callable[[Any, tuple[int, ...]], Layout],
) -> dict[Layout, str]:
    """Every layout that was asked for, with the first leaf or constraint that asks for it."""
    named: dict[Layout, str] = {}
    for plan in inputs:
        for layout in (plan.storage, plan.compute, plan.gradient):
            named.setdefault(layout, plan.path)
    for name, wish in zip(names, wanted, strict=True):
        if wish is not None:
            named.setdefault(wish, name)
    inner = (part.graph for parts in (program.blocks, program.loops) for part in parts)
    for graph in (program.graph, *inner):
        for node in graph.nodes:
            if node.target == CONSTRAIN:
                layout = constrain(program.constraints[node.args[1]], node.args[0].shape)
                named.setdefault(layout, f"the constraint at {node.source}")
    return named


def restate_static(graph: Graph, params: set[Value]) -> None:
    """The backward makes views and casts of parameters again, so that a forward's gathered weight need not live on.

    t = transpose(w)  # F                  t = transpose(w)   # F
    y = x @ t         # F                  y = x @ t          # F
    dx = dy @ t.T     # B                  t2 = transpose(w)  # B
                                           dx = dy @ t2.T     # B
    """
    maker: dict[Value, Node] = {}
    static = set(params)
    again: dict[Value, Value] = {}
    nodes: list[Node] = []

    def restate(value: Value) -> Value:
        node = maker.get(value)
        if node is None:
            return value
        if value not in again:
            copy = Node(
                node.target, node.op, map_values(restate, node.args), node.kwargs, [], node.source, "B"
            )
            again[value] = Value(value.shape, value.dtype, value.name, copy)
            copy.outs = [again[value]]
            nodes.append(copy)
        return again[value]

    for node in graph.nodes:
        if node.phase == "B":
            node.args, node.kwargs = map_values(restate, node.args), map_values(restate, node.kwargs)
        elif node.inputs and all(value in static for value in node.inputs) and len(node.outs) == 1:
            rule = find_rule(node)
            if rule is not None and (rule.view or node.target == "aten._to_copy.default"):
                static.add(node.outs[0])
                maker[node.outs[0]] = node
        nodes.append(node)
    graph.nodes = nodes
    graph.drop_dead()


def _gradient_wishes(
    graph: Any, inputs: Sequence[LeafPlan], atomic: Callable[[Layout], Layout]
) -> dict[Value, Layout]:
    """Inside autograd a parameter's cotangent is best laid out as the parameter is computed with."""
    compute = {value: atomic(plan.compute) for value, plan in zip(graph.inputs, inputs, strict=True)}
    wishes: dict[Value, Layout] = {}
    for node in graph.nodes:
        if node.target == MARK_GRADS:
            for grad, leaf in zip(node.args[0], node.args[1], strict=True):
                if leaf in compute:
                    wishes[grad] = compute[leaf]
    return wishes
