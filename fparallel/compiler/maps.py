"""Per-leaf maps (an optimizer's update): neighbouring maps are fused into one body per leaf, which runs elementwise."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from fparallel.compiler import propagate
from fparallel.compiler.context import Lazy
from fparallel.compiler.graph import MAP, Graph, MapGraph, Node, Program, Value, map_values
from fparallel.compiler.local import Local, Op
from fparallel.compiler.rules import Rule, find_rule
from fparallel.compiler.rules.factories import fill_value
from fparallel.layout import Layout
from fparallel.recorder import Stage
from fparallel.schedule.segment import AdamW, LocalOp, Operand, Ref, Segment

if TYPE_CHECKING:
    from fparallel.compiler.partition import Partitioner


# ---------------------------------------------------------------- fusing


def fuse_maps(program: Program) -> None:
    """Joins a map with the map that reads its results, so that one pass over each leaf does both.

    u = map scale(g; c)            u, m' = map scale+adam(g, m; c, b)
    v, m' = map adam(u, m; b)
    """
    graph = program.graph
    maps = [node for node in graph.nodes if node.target == MAP]
    made = {out for node in maps for out in node.outs}
    position = {id(node): i for i, node in enumerate(graph.nodes)}
    readers: dict[Value, list[Node]] = {}
    for node in graph.nodes:
        for value in node.inputs:
            if value in made:
                readers.setdefault(value, []).append(node)
    at = 0
    while at < len(maps):
        later = maps[at]
        earlier = _fusible(program, later, maps, position, readers)
        if earlier is None:
            at += 1
            continue
        fused = _fuse(program, earlier, later, readers, position)
        position |= dict.fromkeys((id(earlier), id(fused)), position[id(later)])
        maps[at] = fused
        maps.remove(earlier)
        at = 0
    graph.count_uses()


def _columns(program: Program, node: Node) -> list[list[Value]]:
    record: MapGraph = program.maps[node.args[2]]
    num = len(record.body_of)
    return [node.args[0][c * num : (c + 1) * num] for c in range(record.num_trees)]


def _results(program: Program, node: Node) -> list[list[Value]]:
    record: MapGraph = program.maps[node.args[2]]
    num = len(record.body_of)
    return [node.outs[c * num : (c + 1) * num] for c in range(record.num_outs)]


def _fusible(
    program: Program,
    later: Node,
    maps: list[Node],
    position: dict[int, int],
    readers: dict[Value, list[Node]],
) -> Node | None:
    here = position[id(later)]
    columns = _columns(program, later)
    for earlier in maps:
        if position[id(earlier)] >= here:
            continue
        results = _results(program, earlier)
        if not any(column == result for column in columns for result in results):
            continue
        own = set(earlier.outs)
        if any(value in own for value in later.args[1]):
            continue
        if any(position[id(r)] < here for out in earlier.outs for r in readers.get(out, ())):
            continue
        if any(value in own and column not in results for column in columns for value in column):
            continue
        return earlier
    return None


def _fuse(
    program: Program, earlier: Node, later: Node, readers: dict[Value, list[Node]], position: dict[int, int]
) -> Node:
    a: MapGraph = program.maps[earlier.args[2]]
    b: MapGraph = program.maps[later.args[2]]
    a_columns, a_results, b_columns = (
        _columns(program, earlier),
        _results(program, earlier),
        _columns(program, later),
    )
    outputs = set(program.graph.outputs)
    here = position[id(later)]
    kept = [
        k
        for k, column in enumerate(a_results)
        if any(out in outputs or any(position[id(r)] != here for r in readers.get(out, ())) for out in column)
    ]
    columns = list(a_columns)
    source: list[tuple[str, int]] = []
    for column in b_columns:
        if column in a_results:
            source.append(("result", a_results.index(column)))
        elif column in columns:
            source.append(("leaf", columns.index(column)))
        else:
            source.append(("leaf", len(columns)))
            columns.append(column)
    bodies: dict[tuple[int, int], int] = {}
    graphs: list[Graph] = []
    for pair in zip(a.body_of, b.body_of, strict=True):
        if pair not in bodies:
            bodies[pair] = len(graphs)
            graphs.append(_join(a, b, pair, columns, source, kept, len(earlier.args[1]), len(later.args[1])))
    body_of = [bodies[pair] for pair in zip(a.body_of, b.body_of, strict=True)]
    stages, in_roles, out_roles = _joined_stages(a, b, source, kept)
    record = MapGraph(
        f"{a.name}+{b.name}",
        graphs,
        body_of,
        len(columns),
        len(kept) + b.num_outs,
        stages,
        in_roles,
        out_roles,
    )
    program.maps.append(record)
    outs = [out for k in kept for out in a_results[k]] + later.outs
    args = (
        [v for column in columns for v in column],
        [*earlier.args[1], *later.args[1]],
        len(program.maps) - 1,
    )
    fused = Node(MAP, later.op, args, {}, outs, later.source, later.phase)
    for out in outs:
        out.node = fused
    program.graph.nodes = [
        fused if node is later else node for node in program.graph.nodes if node is not earlier
    ]
    return fused


def _joined_stages(
    a: MapGraph, b: MapGraph, source: list[tuple[str, int]], kept: list[int]
) -> tuple[tuple[tuple[Stage, int], ...], tuple[str, ...], tuple[str, ...]]:
    """The stages of both, if every tree has one role throughout; else none."""
    if not a.stages or not b.stages:
        return (), (), ()
    ins = list(a.in_roles)
    for (kind, k), role in zip(source, b.in_roles, strict=True):
        known = a.out_roles[k] if kind == "result" else ins[k] if k < len(ins) else None
        if known is None and role not in ins:
            ins.append(role)
        elif known != role:
            return (), (), ()
    return a.stages + b.stages, tuple(ins), tuple(a.out_roles[k] for k in kept) + b.out_roles


def adamw_kernel(record: MapGraph) -> AdamW | None:
    """The fused kernel that a map is: [scale,] adam, [decay,] scale, apply over exactly u, mu, nu and p."""
    names = [stage.name for stage, _ in record.stages]
    body = names[1:] if names[:1] == ["scale"] else names
    if body not in (["adam", "scale", "apply"], ["adam", "decay", "scale", "apply"]):
        return None
    if sorted(record.in_roles) != ["mu", "nu", "p", "u"] or sorted(record.out_roles) != ["mu", "nu", "p"]:
        return None
    given: dict[str, Any] = {}
    at = record.num_trees
    for i, (stage, num_shared) in enumerate(record.stages):
        constants = dict(stage.constants)
        if stage.name == "scale":
            given["clip" if i == 0 else "step_size"] = Operand(at) if num_shared else constants["factor"]
        elif stage.name == "adam":
            given |= {"correct1": Operand(at), "correct2": Operand(at + 1)} | constants
        elif stage.name == "decay":
            if num_shared:
                return None
            given |= constants
        at += num_shared
    ins = tuple(record.in_roles.index(role) for role in ("u", "mu", "nu", "p"))
    outs = tuple(record.out_roles.index(role) for role in ("mu", "nu", "p"))
    return AdamW(ins=ins, outs=outs, **given)


def _join(
    a: MapGraph,
    b: MapGraph,
    pair: tuple[int, int],
    columns: list[list[Value]],
    source: list[tuple[str, int]],
    kept: list[int],
    a_shared: int,
    b_shared: int,
) -> Graph:
    first, second = clone_graph(a.bodies[pair[0]]), clone_graph(b.bodies[pair[1]])
    leaves = list(first.inputs[: a.num_trees])
    substitute: dict[Value, Value] = {}
    for value, (kind, k) in zip(second.inputs[: b.num_trees], source, strict=True):
        if kind == "result":
            substitute[value] = first.outputs[k]
        else:
            if k == len(leaves):
                leaves.append(value)
            substitute[value] = leaves[k]
    assert len(leaves) == len(columns)
    shared = first.inputs[a.num_trees :] + second.inputs[b.num_trees :]
    assert len(shared) == a_shared + b_shared

    def swap(value: Value) -> Value:
        return substitute.get(value, value)

    nodes = list(first.nodes)
    for node in second.nodes:
        node.args, node.kwargs = map_values(swap, node.args), map_values(swap, node.kwargs)
        nodes.append(node)
    outputs = [first.outputs[k] for k in kept] + [swap(value) for value in second.outputs]
    graph = Graph(leaves + shared, nodes, outputs, {**first.constants, **second.constants})
    graph.count_uses()
    return graph


def clone_graph(graph: Graph) -> Graph:
    """A copy with its own Values and Nodes."""
    copy: dict[Value, Value] = {}

    def fresh(value: Value, node: Node | None = None) -> Value:
        copy[value] = Value(value.shape, value.dtype, value.name, node)
        copy[value].num_uses = value.num_uses
        return copy[value]

    inputs = [fresh(value) for value in graph.inputs]
    constants = {fresh(value): tensor for value, tensor in graph.constants.items()}
    nodes = []
    for node in graph.nodes:
        args, kwargs = map_values(copy.__getitem__, node.args), map_values(copy.__getitem__, node.kwargs)
        new = Node(node.target, node.op, args, kwargs, [], node.source, node.phase)
        new.outs = [fresh(out, new) for out in node.outs]
        nodes.append(new)
    return Graph(inputs, nodes, [copy[value] for value in graph.outputs], constants)


# ---------------------------------------------------------------- lowering


def lower_map(p: Partitioner, node: Node) -> None:
    """Every leaf gets one elementwise local op in the layout that its operands agree on; other bodies are inlined."""
    record: MapGraph = p.context.program.maps[node.args[2]]
    num = len(record.body_of)
    flat, shared = node.args[0], node.args[1]
    names = [_elementwise_name(p, record, body) for body in record.bodies]
    common: list[Local] | None = None
    for i, which in enumerate(record.body_of):
        row = [flat[c * num + i] for c in range(record.num_trees)]
        outs = [node.outs[k * num + i] for k in range(record.num_outs)]
        p.in_update = any(value in p.after_grad for value in [*row, *shared])
        if p.in_update:
            p.after_grad.update(outs)
            node.phase = "U"
        name = names[which]
        if name is None or all(isinstance(p.env[value], Lazy) for value in row):
            _inline(p, clone_graph(record.bodies[which]), [*row, *shared], outs)
            continue
        if common is None:
            whole, cause = Layout.replicated(()), f"{name} reads it for every leaf"
            common = [p.get(x, whole, cause=cause, source=node.source, phase=node.phase) for x in shared]
        _emit_row(p, node, name, record.bodies[which], row, common, outs)


def _inline(p: Partitioner, graph: Graph, inputs: list[Value], outs: list[Value]) -> None:
    in_update = p.in_update
    for inner, outer in zip(graph.inputs, inputs, strict=True):
        p.env[inner] = p.env[outer]
        if outer in p.roles.compute:
            p.roles.compute[inner] = p.roles.compute[outer]
        if outer in p.after_grad or in_update:
            p.after_grad.add(inner)
    p.run(graph)
    for inner, outer in zip(graph.outputs, outs, strict=True):
        p.env[outer] = p.env[inner]


def _emit_row(
    p: Partitioner,
    node: Node,
    name: str,
    body: Graph,
    row: list[Value],
    common: list[Local],
    outs: list[Value],
) -> None:
    shape = row[0].shape
    operands = p.operands(row)
    key = (name, shape, tuple(operands))
    choice = p.context.map_choices.get(key)
    if choice is None:
        dims = tuple((d,) for d in range(len(shape)))
        rule = Rule(list(shape), [dims] * len(row), [dims] * len(outs), elementwise=True)
        choice = propagate.choose(rule, operands, float(sum(out.nbytes for out in outs)))
        p.context.map_choices[key] = choice
    locals_ = [
        p.get(
            value, layout, cause=f"{name} works where its operands lie", source=node.source, phase=node.phase
        )
        for value, layout in zip(row, choice.ins, strict=True)
    ]
    made = [Local(out.dtype, layout) for out, layout in zip(outs, choice.outs, strict=True)]
    flops = len(body.nodes) * made[0].layout.max_local_numel
    p.items.append(
        Op(f"map.{name}", (*locals_, *common), {}, list(made), node.source, node.phase, flops=flops)
    )
    for value, local in zip(outs, made, strict=True):
        p.env[value] = [local]


def _elementwise_name(p: Partitioner, record: MapGraph, body: Graph) -> str | None:
    """The name of the body's segment, or None if it is not elementwise over one leaf shape."""
    shape = body.inputs[0].shape
    if any(value.shape != shape for value in [*body.inputs[: record.num_trees], *body.outputs]):
        return None
    if any(value.shape != () for value in body.inputs[record.num_trees :]) or body.constants:
        return None
    for node in body.nodes:
        rule = find_rule(node)
        if rule is None or not (rule.elementwise or rule.factory) or node.target.startswith("fparallel."):
            return None
        if any(value.shape not in (shape, ()) for value in [*node.inputs, *node.outs]):
            return None
    segment = _body_segment(record.name, body)
    name = f"{record.name}.{segment.fingerprint[:6]}"
    p.context.map_bodies.setdefault(
        name,
        Segment(
            name,
            segment.inputs,
            segment.outputs,
            segment.ops,
            segment.results,
            segment.flops,
            segment.fingerprint,
            adamw_kernel(record),
        ),
    )
    return name


def _body_segment(name: str, body: Graph) -> Segment:
    index = {value: i for i, value in enumerate(body.inputs)}
    counter = itertools.count(len(index))
    ops = []
    leaf = Ref(0)
    shape = body.inputs[0].shape
    for node in body.nodes:
        for out in node.outs:
            index[out] = next(counter)
        rule = find_rule(node)
        assert rule is not None

        def ref(arg: Any) -> Any:
            return map_values(lambda value: Ref(index[value]), arg)

        outs = tuple(index[out] for out in node.outs)
        if rule.factory:
            out = node.outs[0]
            args: tuple[Any, ...] = (
                leaf if out.shape == shape else Ref(next(iter(index.values()))),
                fill_value(node),
            )
            if out.shape == shape:
                ops.append(
                    LocalOp("aten.full_like.default", args, outs, (("dtype", out.dtype),), node.source)
                )
                continue
            device = str(node.kwargs.get("device") or "cpu")
            ops.append(
                LocalOp(
                    "aten.full.default",
                    ([], fill_value(node)),
                    outs,
                    (("dtype", out.dtype), ("device", device)),
                    node.source,
                )
            )
            continue
        kwargs = tuple((k, ref(v)) for k, v in node.kwargs.items())
        ops.append(LocalOp(node.target, tuple(ref(a) for a in node.args), outs, kwargs, node.source))
    signature = tuple((v.dtype, Layout.replicated(v.shape)) for v in body.inputs)
    results = tuple((v.dtype, Layout.replicated(v.shape)) for v in body.outputs)
    return Segment(
        name,
        signature,
        results,
        tuple(ops),
        tuple(index[v] for v in body.outputs),
        len(ops) * body.inputs[0].numel,
    )
