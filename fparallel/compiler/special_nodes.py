"""Partitioning the nodes that are not ops: marks of gradients, sharding constraints, a tree's sum of squares."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fparallel.compiler.context import Lazy
from fparallel.compiler.graph import Node, Value
from fparallel.compiler.local import BOUNDARY, Local, Op
from fparallel.errors import ShardingError
from fparallel.factors import atoms_of
from fparallel.layout import Layout, same
from fparallel.schedule.segment import IsFirst

if TYPE_CHECKING:
    from fparallel.compiler.partition import Partitioner


def mark_grads(p: Partitioner, node: Node) -> None:
    """Gradients leave autograd here: each pending sum is reduced once, into the layout that the rules give it."""
    grads, leaves, paths = node.args
    for grad, leaf, path, out in zip(grads, leaves, paths, node.outs, strict=True):
        if p.in_loop and leaf not in p.roles.reduced_early and _only_pends(p, grad, leaf):
            p.env[out] = p.env[grad]
            continue
        layout = p.roles.gradient.get(leaf) or p.roles.gradient_by_path(path, leaf.shape)
        made = p.get(grad, layout or p.lies(leaf), cause=f"gradient of {path}", source=node.source, phase="B")
        p.env[out] = [made]


def _only_pends(p: Partitioner, grad: Value, leaf: Value) -> bool:
    """Whether a gradient lies as its parameter does, but for sums that are pending: its sum over micro-batches may."""
    entry = p.env[grad]
    if isinstance(entry, Lazy):
        return False
    local = entry[0]
    compute = p.roles.compute.get(leaf) or p.lies(leaf)
    return same(Layout(local.layout.dims), compute) and all(op == "sum" for _, op in local.layout.unreduced)


def constrain(p: Partitioner, node: Node) -> None:
    value, index = node.args
    layout = p.context.constrain(p.context.program.constraints[index], value.shape)
    made = p.get(value, layout, cause="sharding constraint", source=node.source, phase=node.phase)
    p.env[node.outs[0]] = [made]


def stage_boundary(p: Partitioner, node: Node) -> None:
    """A copy by name: of the next stage of a pipeline, or nothing without one."""
    (value,) = node.args
    if p.block:
        raise ShardingError(
            f"a stage boundary inside the block {p.block}, which lies on one stage as a whole",
            fix="put fp.stage_boundary between blocks",
            where=node.source,
        )
    if p.context.pipeline is None:
        p.env[node.outs[0]] = p.env[value]
        return
    local = p.get(value, p.lies(value), cause="stage boundary", source=node.source, phase=node.phase)
    made = Local(local.dtype, local.layout)
    p.items.append(Op(BOUNDARY, (local,), {}, [made], node.source, node.phase, view=True))
    p.env[node.outs[0]] = [made]


def sum_squares(p: Partitioner, node: Node) -> None:
    """Every rank sums what it holds and is counted for; one all-reduce over all axes that shard any leaf."""
    leaves = node.args[0]
    locals_ = []
    for value in leaves:
        lazy = isinstance(p.env[value], Lazy)
        layout = p.lies(value) if lazy else Layout(p.versions(value)[0].layout.dims)
        locals_.append(p.get(value, layout, cause="sum of squares", source=node.source, phase=node.phase))
    atoms = p.context.atoms
    held = [{atom for axis in x.layout.sharded_axes for atom in atoms_of(axis, atoms)} for x in locals_]
    axes = sorted(set().union(*held), key=lambda a: (a.name, a.pre))
    counted = [IsFirst(tuple(a for a in axes if a not in mine)) for mine in held]
    out = node.outs[0]
    made = Local(out.dtype, Layout.of((), [(a, "sum") for a in axes]))
    flops = sum(2 * x.layout.max_local_numel for x in locals_)
    p.items.append(
        Op(
            "local.sum_squares",
            (locals_, counted, out.dtype, p.context.mesh.device),
            {},
            [made],
            node.source,
            node.phase,
            flops=flops,
        )
    )
    p.env[out] = [made]
