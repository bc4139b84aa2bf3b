"""Partitioning: walks the global graph and emits local ops and explicit collectives named by mesh axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fparallel.compiler import propagate
from fparallel.compiler.block_calls import call, call_backward
from fparallel.compiler.context import Context, Decision, Lazy, Roles, Template
from fparallel.compiler.expand import expand_node
from fparallel.compiler.graph import (
    ACCUMULATE,
    CALL,
    CALL_BACKWARD,
    CONSTRAIN,
    MAP,
    MARK_GRADS,
    SHARD_MAP,
    STAGE_BOUNDARY,
    SUM_SQUARES,
    Graph,
    Node,
    Value,
    map_values,
)
from fparallel.compiler.local import Comm, Item, Local, Op, Saved
from fparallel.compiler.maps import lower_map
from fparallel.compiler.propagate import Choice, Operand
from fparallel.compiler.reshard import cost, plan
from fparallel.compiler.rules import Placed, Rule, find_rule
from fparallel.compiler.shards import shard_map
from fparallel.compiler.special_nodes import constrain, mark_grads, stage_boundary, sum_squares
from fparallel.compiler.unroll import accumulate
from fparallel.errors import RuleError
from fparallel.layout import Layout, same, typed
from fparallel.schedule.segment import IsFirst, Narrowing


class Partitioner:
    """Turns one graph into local items. `env` maps each Value to the Locals that exist of it, or a Lazy."""

    def __init__(self, context: Context, roles: Roles | None = None) -> None:
        self.context = context
        self.roles = roles or Roles()
        self.items: list[Item] = []
        self.env: dict[Value, list[Local] | Lazy] = {}
        self.gathered: dict[tuple[Value, str], Local] = {}
        self.after_grad: set[Value] = set()
        self.hints: dict[Value, Layout] = {}
        self.in_update = False
        self.in_loop = False
        self.block = ""  # the block that this is the inside of
        self.saved: dict[Value, tuple[Template, Saved, list[Value]]] = {}

    def fresh(self) -> Partitioner:
        """A partitioner of the same lowering for another graph."""
        return Partitioner(self.context)

    # -------------------------------------------------------------- running a graph

    def run(self, graph: Graph) -> None:
        """Partitions all nodes of a graph whose inputs are already in `env`."""
        for value, tensor in graph.constants.items():
            self.env[value] = [self.context.constant(value, tensor)]
        for node in graph.nodes:
            self.node(node)

    def node(self, node: Node) -> None:
        self.in_update = any(value in self.after_grad for value in node.inputs)
        if self.in_update or node.target == MARK_GRADS:
            self.after_grad.update(node.outs)
            if node.phase == "F":
                node.phase = "U"
        special = SPECIAL.get(node.target)
        if special is not None:
            special(self, node)
            return
        rule = find_rule(node)
        if rule is None:
            self._without_rule(node)
            return
        if self._is_lazy(node, rule):
            for out in node.outs:
                self.env[out] = Lazy(node, rule)
            return
        if rule.factory and node.target != "fparallel.random.default":
            made = propagate.choose_for_output(rule, Layout.replicated(node.outs[0].shape))
            if made is not None:  # the operand of ones_like gives it a shape, and is not read
                self._emit_lazy(node, rule, made, node.phase)
                return
        out_bytes = float(sum(out.nbytes for out in node.outs))
        choice = propagate.choose(
            rule, self.operands(node.inputs), out_bytes, [self.hints.get(out) for out in node.outs]
        )
        if choice.expand is not None:
            expanded = expand_node(node, choice.expand, self.context.mesh.device)
            assert expanded is not None
            self._inline(node, expanded)
            return
        self._emit(node, rule, choice)

    def _is_lazy(self, node: Node, rule: Rule) -> bool:
        if rule.factory and not any(out.shape == () for out in node.outs):
            return node.target != "fparallel.random.default" or isinstance(
                self.env.get(node.args[0]), (list, Lazy)
            )
        if not node.inputs or all(out.shape == () for out in node.outs):
            return False
        return (
            (rule.elementwise or rule.view)
            and len(node.outs) == 1
            and all(isinstance(self.env.get(value), Lazy) or value.shape == () for value in node.inputs)
            and any(isinstance(self.env.get(value), Lazy) for value in node.inputs)
        )

    def operands(self, values: Sequence[Value]) -> list[Operand]:
        """What the choice of layouts asks of the operands of an op."""
        result = []
        for value in values:
            entry = self.env[value]
            layouts = () if isinstance(entry, Lazy) else tuple(v.layout for v in self.versions(value))
            pinned = not isinstance(entry, Lazy) and entry[0].pinned and not self.in_update
            result.append(Operand(layouts, value.numel, value.dtype.itemsize, pinned, value.num_uses <= 1))
        return result

    def versions(self, value: Value) -> list[Local]:
        """The forms in which a value can be read here: a parameter is read in its compute layout before the update."""
        entry = self.env[value]
        assert not isinstance(entry, Lazy)
        compute = self.roles.compute.get(value)
        if compute is None or self.in_update or same(compute, entry[0].layout):
            return entry
        return [self._virtual(value, compute)]

    def lies(self, value: Value) -> Layout:
        """How a value lies once its pending sums are reduced; what is made where it is needed lies on every rank."""
        entry = self.env[value]
        return Layout.replicated(value.shape) if isinstance(entry, Lazy) else Layout(entry[0].layout.dims)

    def _virtual(self, value: Value, compute: Layout) -> Local:
        key = (value, "virtual")
        if key not in self.gathered:
            self.gathered[key] = Local(value.dtype, compute, f"{value.name}@full", pinned=True, static=True)
        return self.gathered[key]

    def _emit(self, node: Node, rule: Rule, choice: Choice) -> None:
        values = node.inputs
        locals_ = [
            self.get(
                value, layout, cause=self._cause(node, value, layout), source=node.source, phase=node.phase
            )
            for value, layout in zip(values, choice.ins, strict=True)
        ]
        placed = Placed(node, choice.ins, choice.outs, choice.axes)
        target, args, kwargs = rule.local(placed)
        by_value = dict(zip(values, locals_, strict=True))
        static = all(x.static for x in locals_)
        pinned = bool(locals_) and locals_[0].pinned and (rule.view or node.target == "aten._to_copy.default")
        outs = [
            Local(out.dtype, layout, pinned=pinned, static=static)
            for out, layout in zip(node.outs, choice.outs, strict=True)
        ]
        flops = rule.flops
        for axes in choice.axes:
            for axis in axes:
                flops = -(-flops // axis.size)
        self.items.append(
            Op(
                target,
                map_values(by_value.__getitem__, args),
                map_values(by_value.__getitem__, kwargs),
                list(outs),
                node.source,
                node.phase,
                rule.view,
                flops,
            )
        )
        for value, out in zip(node.outs, outs, strict=True):
            self.env[value] = [out]

    def _cause(self, node: Node, value: Value, layout: Layout) -> str:
        entry = self.env[value]
        if not isinstance(entry, Lazy) and entry[0].layout.unreduced and not layout.unreduced:
            return f"{_short(node)} needs the whole {entry[0].layout.unreduced[0][1]}"
        return f"{_short(node)} wants it {layout}"

    def _without_rule(self, node: Node) -> None:
        decomposed = expand_node(node, None, self.context.mesh.device)
        if decomposed is not None:
            self._inline(node, decomposed)
            return
        for value in node.inputs:
            entry = self.env[value]
            if isinstance(entry, Lazy):
                continue
            layout = self.versions(value)[0].layout
            if layout.sharded_axes:
                raise RuleError(
                    f"the op {node.target} has no sharding rule, and its operand is {typed(value.dtype, layout)}",
                    fix=f'teach the compiler: fp.register_rule("{node.target}", "...", ...), or ask for the gather: '
                    "x = fp.with_sharding_constraint(x, fp.P()) before it",
                    where=node.source,
                )
        whole = [Layout.replicated(v.shape) for v in node.inputs]
        outs = [Layout.replicated(v.shape) for v in node.outs]
        self._emit(
            node, Rule([], [], []), Choice(tuple(whole), tuple(outs), (), None, "no rule: runs replicated")
        )

    def _inline(self, node: Node, graph: Graph) -> None:
        for inner, outer in zip(graph.inputs, node.inputs, strict=True):
            self.env[inner] = self.env[outer]
            if outer in self.roles.compute:
                self.roles.compute[inner] = self.roles.compute[outer]
            if outer in self.after_grad:
                self.after_grad.add(inner)
            inner.num_uses += max(0, outer.num_uses - 1)
        self.run(graph)
        for inner, outer in zip(graph.outputs, node.outs, strict=True):
            self.env[outer] = self.env[inner]

    # -------------------------------------------------------------- getting values in a layout

    def get(self, value: Value, layout: Layout, *, cause: str, source: str = "", phase: str = "F") -> Local:
        """The Local of a value in a layout, emitting what it takes to make it."""
        entry = self.env[value]
        if isinstance(entry, Lazy):
            return self._materialize(value, entry, layout, cause, source, phase)
        compute = self.roles.compute.get(value)
        if compute is not None and not self.in_update and not same(compute, entry[0].layout):
            return self._parameter(value, entry, compute, layout, cause, source, phase)
        for version in entry:
            if same(version.layout, layout):
                return version
        best = min(entry, key=lambda v: (cost(v.layout, layout, v.dtype.itemsize), entry.index(v)))
        result = self.reshard(best, layout, cause=cause, source=source, phase=phase)
        entry.append(result)
        return result

    def _parameter(
        self,
        value: Value,
        entry: list[Local],
        compute: Layout,
        layout: Layout,
        cause: str,
        source: str,
        phase: str,
    ) -> Local:
        """A parameter at rest in another layout than it computes in: gathered once per phase, never kept between."""
        key = (value, phase)
        if key not in self.gathered:
            full = self.reshard(entry[0], compute, cause="storage -> compute", source=source, phase=phase)
            full.name, full.pinned, full.static = f"{value.name}@full", True, True
            self.gathered[key] = full
        full = self.gathered[key]
        if same(full.layout, layout):
            return full
        return self.reshard(full, layout, cause=cause, source=source, phase=phase)

    def reshard(self, src: Local, layout: Layout, *, cause: str, source: str = "", phase: str = "F") -> Local:
        """Emits the cheapest steps from one layout to another."""
        now = src
        steps = plan(src.layout, layout)
        if not steps:
            return src
        for step in steps:
            nxt = Local(src.dtype, step.dst, pinned=now.pinned, static=now.static)
            if step.kind == "slice":
                self.items.append(
                    Op(
                        "local.narrow",
                        (now, Narrowing(step.src, step.dst)),
                        {},
                        [nxt],
                        source,
                        phase,
                        view=True,
                    )
                )
            elif step.kind == "mask":
                self.items.append(
                    Op("local.keep_on_first", (now, IsFirst(step.axes)), {}, [nxt], source, phase, view=True)
                )
            else:
                self.items.append(Comm(step.kind, step.axes, now, nxt, step.reduce, cause, source, phase))
            now = nxt
        moved = cost(src.layout, layout, src.dtype.itemsize)
        if moved:
            kinds = tuple(step.kind for step in steps)
            self.context.decisions.append(
                Decision(src.name, src.layout, layout, src.dtype, moved, cause, source, kinds)
            )
        return now

    def _materialize(
        self, value: Value, lazy: Lazy, layout: Layout, cause: str, source: str, phase: str
    ) -> Local:
        """Makes a lazy value in the wanted layout, its operands likewise; whole and cut where its rule cannot."""
        node, rule = lazy.node, lazy.rule
        value = node.outs[0]
        made = self.gathered.get((value, f"{layout}{phase}"))
        if made is not None:
            return made
        wanted = Layout(layout.dims)
        choice = propagate.choose_for_output(rule, wanted)
        if choice is None:
            choice = propagate.choose_for_output(rule, Layout.replicated(value.shape))
            if choice is None:
                raise AssertionError(f"no way to make {node}")
        self._emit_lazy(node, rule, choice, phase)
        entry = self.env[value]
        assert not isinstance(entry, Lazy)
        self.env[value] = lazy
        result = entry[0]
        if not same(result.layout, layout):
            result = self.reshard(result, layout, cause=cause, source=source, phase=phase)
        self.gathered[(value, f"{layout}{phase}")] = result
        return result

    def _emit_lazy(self, node: Node, rule: Rule, choice: Choice, phase: str) -> None:
        if rule.factory and node.target != "fparallel.random.default":
            placed = Placed(node, choice.ins, choice.outs, choice.axes)
            target, args, kwargs = rule.local(placed)
            if node.inputs and target == node.target:
                raise AssertionError(f"a factory that reads its operand: {node}")
            out = Local(node.outs[0].dtype, choice.outs[0], static=True)
            self.items.append(Op(target, args, kwargs, [out], node.source, phase))
            self.env[node.outs[0]] = [out]
            return
        before = node.phase
        node.phase = phase
        try:
            self._emit(node, rule, choice)
        finally:
            node.phase = before

    # -------------------------------------------------------------- results

    def result(self, value: Value, layout: Layout | None, name: str) -> Local:
        """An output of the program in its wanted layout, or as it lies (with pending sums reduced)."""
        self.in_update = True
        return self.get(value, layout or self.lies(value), cause=f"output {name}", phase="U")


def _short(node: Node) -> str:
    return node.target.removeprefix("aten.").removesuffix(".default")


SPECIAL: dict[str, Callable[[Partitioner, Node], None]] = {
    MARK_GRADS: mark_grads,
    CONSTRAIN: constrain,
    SUM_SQUARES: sum_squares,
    STAGE_BOUNDARY: stage_boundary,
    CALL: call,
    CALL_BACKWARD: call_backward,
    MAP: lower_map,
    ACCUMULATE: accumulate,
    SHARD_MAP: shard_map,
}
