"""Partitioning functions under `fp.shard_map`: every op runs on the rank's shards, every collective is the user's.

A value that differs between the ranks of axes A has a layout over A with the shard's local shape. How it is named as a
whole does not matter between collectives; by default it is the ranks' values along the first dim: `f32[3,4]` on each of
two tp ranks is `f32[6@tp,4]`, and a number is `f32[2@tp]`. A change of name moves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from fparallel.compiler.context import Lazy
from fparallel.compiler.expand import expand_node
from fparallel.compiler.graph import Graph, Node, ShardMapGraph, Value, is_view, map_values, values_of
from fparallel.compiler.local import Comm, Local, Op
from fparallel.compiler.rules import Placed, find_rule
from fparallel.compiler.varying import AXIS_INDEX, COLLECTIVE
from fparallel.errors import ShardingError
from fparallel.factors import Factor
from fparallel.layout import Layout, same
from fparallel.mesh import Axis
from fparallel.region import ALL_GATHER, ALL_TO_ALL, ANY_ONE, MASK, PPERMUTE, PSUM, PSUM_SCATTER, PVARY
from fparallel.schedule.segment import IsFirst, IsMember, LocalShape, Runs

if TYPE_CHECKING:
    from fparallel.compiler.partition import Partitioner


def shard_map(p: Partitioner, node: Node) -> None:
    """Partitions one call of a function under shard_map, or of its backward."""
    xs, index = node.args
    mapped = p.context.program.shard_maps[index]
    if mapped.mesh != p.context.mesh:
        raise ShardingError(
            f"fp.shard_map of {mapped.name} is over the mesh {mapped.mesh}, the step runs on {p.context.mesh}",
            fix="give fp.shard_map and fp.jit the same mesh",
            where=node.source,
        )
    body = _Body(p, mapped, node)
    for inner, outer, dims in zip(mapped.graph.inputs, xs, mapped.in_dims, strict=True):
        body.env[inner] = body.input(outer, body.layout(dims, outer.shape))
    body.run(mapped.graph)
    for outer, value, dims in zip(node.outs, mapped.graph.outputs, mapped.out_dims, strict=True):
        p.env[outer] = [body.result(value, body.layout(dims, outer.shape))]


class _Body:
    """The local program of one call. `env` holds what each value of the graph is on the ranks."""

    def __init__(self, p: Partitioner, mapped: ShardMapGraph, node: Node) -> None:
        self.p, self.mapped, self.node, self.phase = p, mapped, node, node.phase
        self.mesh = mapped.mesh
        self.env: dict[Value, Local] = {}
        self.sums: dict[Value, Local] = {}  # of a psum's result: the same before it is summed

    # -------------------------------------------------------------- layouts

    def layout(
        self, dims: Sequence[Sequence[str]], shape: Sequence[int], pending: Iterable[str] = ()
    ) -> Layout:
        made = Layout.of(
            [(Factor(size, self.axes(names)),) for size, names in zip(shape, dims, strict=True)],
            [(axis, "sum") for axis in self.axes(pending)],
        )
        split = made.split_axes(self.p.context.atoms)
        return Layout.of(split.dims, split.unreduced)

    def axes(self, names: Iterable[str]) -> tuple[Axis, ...]:
        return tuple(self.mesh.axis(name) for name in names)

    def size(self, names: Iterable[str]) -> int:
        return math.prod(self.mesh.shape[name] for name in names)

    def ordered(self, names: Iterable[str]) -> tuple[str, ...]:
        held = set(names)
        return tuple(name for name in self.mesh.names if name in held)

    def stacked(
        self,
        shape: Sequence[int],
        names: Iterable[str],
        cut: dict[int, Sequence[str]] | None = None,
        pending: Iterable[str] = (),
    ) -> Layout:
        """Shards of a local shape over axes along the first dim, and over those in `cut` along others (last)."""
        shape, names = list(shape) or [1] * bool(names or cut or pending), tuple(names)
        dims: list[tuple[str, ...]] = [()] * len(shape)
        if names:
            dims[0] = names
        for dim, more in (cut or {}).items():
            dims[dim] = (*dims[dim], *more)
        return self.layout(dims, [n * self.size(d) for n, d in zip(shape, dims, strict=True)], pending)

    def differs(self, local: Local) -> tuple[str, ...]:
        return self.ordered(axis.name for axis in local.layout.sharded_axes)

    # -------------------------------------------------------------- values

    def input(self, value: Value, layout: Layout) -> Local:
        entry = self.p.env[value]
        if not isinstance(entry, Lazy):
            for version in entry:  # a parameter at rest may lie as it is wanted, and need not be gathered
                if same(version.layout, layout):
                    return version
        node, cause = self.node, f"into {self.mapped.name}"
        return self.p.get(value, layout, cause=cause, source=node.source, phase=node.phase)

    def named(self, local: Local, layout: Layout) -> Local:
        """The same shards as those of another layout with as many elements."""
        if same(local.layout, layout):
            return local
        made = Local(local.dtype, layout, static=local.static)
        self.op("local.reshape", (local, LocalShape(layout)), {}, [made], self.node, view=True)
        return made

    def result(self, value: Value, layout: Layout) -> Local:
        local = self.env[value]
        if self.mapped.backward and value in self.sums:
            local = self.sums[value]
            layout = Layout.of(layout.dims, local.layout.unreduced)
        return self.named(local, layout)

    def op(
        self,
        target: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outs: list[Local],
        node: Node,
        *,
        view: bool = False,
        flops: int = 0,
    ) -> None:
        self.p.items.append(
            Op(target, args, kwargs, list(outs), node.source or self.node.source, self.phase, view, flops)
        )

    # -------------------------------------------------------------- ops

    def run(self, graph: Graph) -> None:
        for value, tensor in graph.constants.items():
            self.env[value] = self.p.context.constant(value, tensor)
        for node in graph.nodes:
            if node.target == COLLECTIVE:
                self.collective(node)
            elif node.target == AXIS_INDEX:
                self.axis_index(node)
            else:
                self.compute(node)

    def compute(self, node: Node) -> None:
        rule = find_rule(node)
        if rule is None:
            expanded = expand_node(node, None, self.mesh.device)
            if expanded is not None:
                self.env.update({i: self.env[o] for i, o in zip(expanded.inputs, node.inputs, strict=True)})
                self.run(expanded)
                self.env.update({o: self.env[i] for i, o in zip(expanded.outputs, node.outs, strict=True)})
                return
            target, args, kwargs = node.target, node.args, node.kwargs
        else:
            ins, outs = (tuple(Layout.replicated(v.shape) for v in vs) for vs in (node.inputs, node.outs))
            target, args, kwargs = rule.local(Placed(node, ins, outs, ((),) * len(rule.sizes)))
        used = dict.fromkeys(values_of((args, kwargs)))
        locals_ = {value: self.operand(value, node) for value in used}
        names = self.ordered(name for value in used for name in self.differs(self.env[value]))
        static = all(local.static for local in locals_.values())
        made: list[Local] = []
        numbers: list[tuple[Value, Local]] = []
        for value in node.outs:
            if names and not value.shape:
                made.append(Local(value.dtype, Layout.replicated(()), static=static))
                numbers.append((value, made[-1]))
            else:
                made.append(Local(value.dtype, self.stacked(value.shape, names), static=static))
                self.env[value] = made[-1]
        args, kwargs = (map_values(locals_.__getitem__, arg) for arg in (args, kwargs))
        view = rule.view if rule is not None else is_view(node)
        self.op(target, args, kwargs, made, node, view=view, flops=rule.flops if rule else 0)
        for value, number in numbers:
            self.env[value] = Local(value.dtype, self.stacked((), names), static=static)
            self.op("local.as_vector", (number,), {}, [self.env[value]], node)

    def operand(self, value: Value, node: Node) -> Local:
        """The local tensor that an op takes: of a number that differs, which is kept as a vector, the 0-d view."""
        local = self.env[value]
        if value.shape or not local.layout.dims:
            return local
        made = Local(value.dtype, Layout.replicated(()), static=local.static)
        self.op("local.reshape", (local, []), {}, [made], node, view=True)
        return made

    def axis_index(self, node: Node) -> None:
        names, _ = node.args
        out = node.outs[0]
        ranks = self.layout((names,), (self.size(names),))
        self.env[out] = Local(out.dtype, ranks)
        self.op("local.arange", (Runs(ranks), 0, 1, out.dtype, self.mesh.device), {}, [self.env[out]], node)

    # -------------------------------------------------------------- collectives

    def collective(self, node: Node) -> None:
        x, kind, names, params = node.args
        out = node.outs[0]
        names = [name for name in names if self.mesh.shape[name] > 1]
        local = self.env[x]
        if kind in (PVARY, ANY_ONE) or (not names and params != [-1]):
            self.env[out] = local
            return
        over = self.differs(local)
        rest = [name for name in over if name not in names]
        axes = self.axes(names)
        if kind == MASK:
            held = self.named(local, self.stacked(x.shape, self.ordered([*over, *names])))
            self.env[out] = self.masked(held, IsFirst(axes), node)
        elif kind == PSUM:
            src = self.named(local, self.stacked(x.shape, rest, pending=names))
            self.sums[out] = src
            self.env[out] = self.comm("all_reduce", axes, src, Layout(src.layout.dims), node, reduce="sum")
        elif kind == ALL_GATHER:
            _, dim = params
            src = self.named(local, self.stacked(x.shape, rest, {dim: names}))
            self.env[out] = self.comm("all_gather", axes, src, self.stacked(out.shape, rest), node)
        elif kind == PSUM_SCATTER:
            _, dim = params
            src = self.named(local, self.stacked(x.shape, rest, pending=names))
            dst = self.stacked(out.shape, rest, {dim: names})
            self.env[out] = self.comm("reduce_scatter", axes, src, dst, node, reduce="sum")
        elif kind == ALL_TO_ALL:
            _, split, concat = params
            src = self.named(local, self.stacked(x.shape, rest, {concat: names}))
            dst = self.stacked(out.shape, rest, {split: names})
            self.env[out] = self.comm("all_to_all", axes, src, dst, node)
        else:
            assert kind == PPERMUTE, kind
            self.permute(local, tuple(params), axes, node)

    def permute(self, local: Local, sources: tuple[int, ...], axes: tuple[Axis, ...], node: Node) -> None:
        x, out = node.args[0], node.outs[0]
        over = self.differs(local)
        if not {axis.name for axis in axes} <= set(over):
            local = self.named(local, self.stacked(x.shape, self.ordered([*over, *(a.name for a in axes)])))
        if any(source not in (-1, at) for at, source in enumerate(sources)):
            local = self.comm("permute", axes, local, local.layout, node, sources=sources)
        if -1 in sources:
            positions = tuple(at for at, source in enumerate(sources) if source != -1)
            local = self.masked(local, IsMember(axes, positions), node)
        self.env[out] = local

    def masked(self, local: Local, keep: IsFirst | IsMember, node: Node) -> Local:
        made = Local(local.dtype, local.layout)
        self.op("local.keep_on_first", (local, keep), {}, [made], node, view=True)
        return made

    def comm(
        self,
        kind: str,
        axes: tuple[Axis, ...],
        src: Local,
        layout: Layout,
        node: Node,
        *,
        reduce: str = "",
        sources: tuple[int, ...] = (),
    ) -> Local:
        made = Local(src.dtype, layout)
        cause = f"{node.args[1]} in {self.mapped.name}"
        source = node.source or self.node.source
        self.p.items.append(Comm(kind, axes, src, made, reduce, cause, source, self.phase, sources=sources))
        return made
