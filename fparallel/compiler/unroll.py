"""Unrolling loops over micro-batches: a body is partitioned once and copied for each micro-batch.

Sums over micro-batches are taken as soon as their next term is there, so that one term is alive at a time. What a
body makes of arguments alone that are no parameters (a global weight, say) is made once; what it makes of
parameters (a gathered weight, a transpose) is made for each micro-batch and freed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from fparallel.compiler.block_calls import gradient_hints
from fparallel.compiler.context import Lazy, Roles
from fparallel.compiler.graph import MARK_GRADS, LoopGraph, Node, Value
from fparallel.compiler.local import At, Call, Comm, Item, Local, Op, Saved, drop_dead, map_locals
from fparallel.compiler.loop_tasks import halve_calls, spread
from fparallel.errors import ShardingError
from fparallel.layout import Layout, typed
from fparallel.microbatch_results import ROWS
from fparallel.microbatches import wide
from fparallel.schedule.orders import find_order
from fparallel.schedule.segment import ADD

if TYPE_CHECKING:
    from fparallel.compiler.partition import Partitioner

SMALL = 1024  # elements of a term that may wait with others for its turn
_ATEN = torch.ops.aten


def accumulate(p: Partitioner, node: Node) -> None:
    """Partitions a loop: its body once, then all micro-batches in order."""
    whole, batch, keys, index = node.args
    loop = p.context.program.loops[index]
    _check_rows(p, node, loop, batch)
    body, leaf_of = _body(p, loop, whole)
    inner_parts = loop.graph.inputs[loop.num_whole : loop.num_whole + loop.num_batch]
    inner_keys = loop.graph.inputs[loop.num_whole + loop.num_batch :]
    formals: list[Local] = []
    results: list[Local] = []
    copies: _Copies | None = None
    rows: dict[int, list[Local]] = {k: [] for k, kind in enumerate(loop.kinds) if kind == ROWS}
    begin = len(p.items)
    for m in range(loop.num):
        given = [_part(p, node, loop, value, m) for value in batch] + [
            _emit(p, node, torch.ops.fparallel.fold_in.int, (key, m), (2,), torch.int64) for key in keys
        ]
        actual = [_own(p, node, value, m) for value in given]
        if copies is None:
            for inner, local in zip([*inner_parts, *inner_keys], actual, strict=True):
                formals.append(Local(local.dtype, local.layout, inner.name))
                body.env[inner] = [formals[-1]]
            body.run(loop.graph)
            results = [
                _result(body, value, kind) for value, kind in zip(loop.graph.outputs, loop.kinds, strict=True)
            ]
            items = drop_dead(body.items, results)
            param_of = {
                local: entry[0]
                for value, local in zip(loop.graph.outputs, results, strict=True)
                if value in leaf_of and isinstance(entry := p.env[leaf_of[value][0]], list)
            }
            copies = _Copies(p, items, results, formals, set(rows), node.source, loop.num, param_of)
        made = copies.run(m, actual)
        for k in rows:
            rows[k].append(made[k])
    assert copies is not None
    copies.finish(begin)
    for k, (out, value) in enumerate(zip(node.outs, loop.graph.outputs, strict=True)):
        if k in rows:
            _in_order(p, node, loop, out, rows[k])
        else:
            _finish(p, node, out, copies.total(k), leaf_of.get(value))


# ---------------------------------------------------------------- the body


def _body(
    p: Partitioner, loop: LoopGraph, whole: Sequence[Value]
) -> tuple[Partitioner, dict[Value, tuple[Value, str]]]:
    """A partitioner with what passes whole in it, and per gradient among the results its leaf outside and its path."""
    body = p.fresh()
    body.in_loop = True
    body.roles = Roles(gradient_by_path=p.roles.gradient_by_path)
    outer_of: dict[Value, Value] = {}
    for inner, outer in zip(loop.graph.inputs, whole, strict=False):
        entry = p.env[outer]
        if isinstance(entry, Lazy):
            entry = [p.get(outer, p.lies(outer), cause=f"into {loop.name}")]
        body.env[inner] = list(entry)
        inner.name = outer.name
        outer_of[inner] = outer
        for mine, theirs in ((body.roles.compute, p.roles.compute), (body.roles.gradient, p.roles.gradient)):
            if outer in theirs:
                mine[inner] = theirs[outer]
        if outer in p.roles.reduced_early:
            body.roles.reduced_early.add(inner)
    wishes: dict[Value, Layout] = {}
    grads: dict[Value, tuple[Value, str]] = {}
    for node in loop.graph.nodes:
        if node.target != MARK_GRADS:
            continue
        for grad, leaf, path, out in zip(*node.args, node.outs, strict=True):
            if leaf in outer_of:
                grads[out] = (outer_of[leaf], path)
                wishes[grad] = body.roles.compute.get(leaf) or p.lies(outer_of[leaf])
    body.hints.update(gradient_hints(loop.graph, wishes))
    return body, grads


def _result(body: Partitioner, value: Value, kind: str) -> Local:
    """A result of the body: a term of a sum may itself be a pending sum over ranks."""
    entry = body.env[value]
    if kind != ROWS and not isinstance(entry, Lazy):
        local = entry[0]
        if all(op == "sum" for _, op in local.layout.unreduced):
            return local
    return body.get(value, body.lies(value), cause="result of a micro-batch", phase="B")


class _Copies:
    """Copies of a body's items, one set for each micro-batch.

    Attributes:
      terms: per result the values of the body that it is the sum of.
      totals: per result and such value the sum so far.
    """

    def __init__(
        self,
        p: Partitioner,
        items: Sequence[Item],
        results: Sequence[Local],
        formals: Sequence[Local],
        rows: set[int],
        source: str,
        num: int,
        param_of: Mapping[Local, Local],
    ) -> None:
        self.p, self.results, self.formals, self.source = p, results, formals, source
        self.totals: dict[tuple[int, Local], Local] = {}
        self.once: dict[Local, Local] = {}
        self.rows = rows
        self.pipeline = p.context.pipeline
        self.terms = {k: [local] for k, local in enumerate(results)}
        self.at: dict[int, At | None] = {}
        if self.pipeline is not None:
            self.pipeline.choose(items, num, source, param_of)
            splits = find_order(self.pipeline.order, self.pipeline.ranks)[0].splits
            stages = self.pipeline.assign(items, num, source, param_of, formals, results)
            items, stages = halve_calls(items, stages, 0 if splits else 1)
            items, self.terms, self.at = spread(
                items, stages, self.terms, rows, len(self.pipeline.plans) - 1, splits
            )
        self.items = items
        self.readers: dict[Local, list[int]] = {}
        for k, locals_ in self.terms.items():
            for local in locals_:
                self.readers.setdefault(local, []).append(k)
        self.waiting: dict[tuple[int, Local], dict[int, tuple[Local, str]]] = {}
        variant = set(formals)
        self.invariant: set[int] = set()
        for item in items:
            depends = isinstance(item, Call) or any(value in variant or value.static for value in item.inputs)
            if depends or not item.inputs:
                variant.update(out for out in item.outs if out is not None)
            else:
                self.invariant.add(id(item))

    def run(self, m: int, actual: Sequence[Local]) -> list[Local]:
        """Emits the items of micro-batch m and adds up its results; gives these."""
        now: dict[Local, Local] = {**self.once, **dict(zip(self.formals, actual, strict=True))}
        saved: dict[int, Saved] = {}
        made = {out for item in self.items for out in item.outs if out is not None}
        for local in self.readers.keys() - made:
            self.add(m, local, now, "F", None)
        for item in self.items:
            if id(item) not in self.invariant:
                self.copy(item, m, now, saved)
            elif m == 0:
                self.once.update(self.copy(item, m, now, saved))
            for out in item.outs:
                if out in self.readers:
                    assert out is not None
                    self.add(m, out, now, item.phase, self.at.get(id(item)))
        return [now.get(local, local) for local in self.results]

    def copy(
        self, item: Item, m: int, now: dict[Local, Local], saved: dict[int, Saved]
    ) -> dict[Local, Local]:
        def get(local: Local) -> Local:
            return now.get(local, local)

        outs = [
            None
            if out is None
            else Local(out.dtype, out.layout, out.name, pinned=out.pinned, static=out.static)
            for out in item.outs
        ]
        at = self.at.get(id(item))
        task = at._replace(micro=m) if at is not None else None
        if isinstance(item, Op):
            args, kwargs = map_locals(get, item.args), map_locals(get, item.kwargs)
            new: Item = replace(item, args=args, kwargs=kwargs, outs=outs, micro=m, task=task)
        elif isinstance(item, Comm):
            assert outs[0] is not None
            new = replace(item, src=get(item.src), dst=outs[0], task=task)
        else:
            if id(item.saved) not in saved:
                saved[id(item.saved)] = Saved(item.block.calls, micro=m, like=item.saved.index)
                item.block.calls += 1
            new = replace(
                item,
                ins=[get(value) for value in item.ins],
                outs=[out for out in outs if out is not None],
                saved=saved[id(item.saved)],
                task=task,
            )
        self.p.items.append(new)
        mapped = {
            old: out for old, out in zip(item.outs, outs, strict=True) if old is not None and out is not None
        }
        now.update(mapped)
        return mapped

    def add(self, m: int, local: Local, now: dict[Local, Local], phase: str, at: At | None) -> None:
        """Adds a term of micro-batch m to the sums that read it."""
        for k in self.readers[local]:
            if k in self.rows:
                continue
            if self.micros(at) is None:
                self.add_term((k, local), now.get(local, local), m, phase, at)
            else:
                self.waiting.setdefault((k, local), {})[m] = now.get(local, local), phase

    def micros(self, at: At | None) -> list[int] | None:
        """The order in which a rank of a pipeline runs the micro-batches of a task; None if it is the usual one."""
        if at is None or at.stage is None or self.pipeline is None:
            return None
        plan = self.pipeline.plans[at.loop]
        row = plan.rows[plan.place[at.stage]]
        found = [task.micro for task in row if (task.kind, task.stage) == (at.kind, at.stage)]
        return None if found == sorted(found) else found

    def add_term(self, key: tuple[int, Local], term: Local, m: int, phase: str, at: At | None) -> None:
        task = at._replace(micro=m) if at is not None else None
        if key not in self.totals:
            self.totals[key] = _cast(self.p, term, wide(term.dtype), self.source, task)
            return
        before = self.totals[key]
        total, large = Local(before.dtype, term.layout), term.layout.max_local_numel > SMALL
        args = (before, term)
        self.p.items.append(Op(ADD, args, {}, [total], self.source, phase, at_once=large, micro=m, task=task))
        self.totals[key] = total

    def finish(self, begin: int) -> None:
        """Adds what had to wait for its turn, and marks what every stage of a pipeline makes for itself."""
        makers = {out: item for item in self.items for out in item.outs}
        for key, terms in self.waiting.items():
            at = self.at[id(makers[key[1]])]
            for m in self.micros(at) or ():
                term, phase = terms[m]
                self.add_term(key, term, m, phase, at)
        if self.pipeline is not None:
            floating = At(len(self.pipeline.plans) - 1)
            for item in self.p.items[begin:]:
                item.task = item.task or floating

    def total(self, k: int) -> Local:
        """The sum of a result over all micro-batches."""
        first, *rest = (self.totals[k, local] for local in self.terms[k])
        for other in rest:
            made = Local(first.dtype, first.layout)
            self.p.items.append(Op("aten.add.Tensor", (first, other), {}, [made], self.source, "B"))
            first = made
        return first


# ---------------------------------------------------------------- into and out of the loop


def _emit(
    p: Partitioner, node: Node, op: Any, args: tuple, shape: tuple[int, ...], dtype: torch.dtype
) -> Value:
    """Partitions one more op, as if the program had it here."""
    made = Node(str(op), op, args, {}, [], node.source, "S")  # a phase, and so a segment, of its own
    made.outs = [Value(shape, dtype, node=made)]
    made.outs[0].num_uses = 1
    p.node(made)
    return made.outs[0]


def _part(p: Partitioner, node: Node, loop: LoopGraph, x: Value, m: int) -> Value:
    """`microbatches.microbatch`, in ops."""
    rows, rest, num, group = x.shape[0], x.shape[1:], loop.num, loop.group
    cut = (rows // (num * group), num, *((group,) if group > 1 else ()), *rest)
    seen = _emit(p, node, _ATEN.view.default, (x, list(cut)), cut, x.dtype)
    left = (cut[0], *cut[2:])
    part = _emit(p, node, _ATEN.select.int, (seen, 1, m), left, x.dtype)
    if group == 1:
        return part
    return _emit(p, node, _ATEN.view.default, (part, [rows // num, *rest]), (rows // num, *rest), x.dtype)


def _own(p: Partitioner, node: Node, value: Value, m: int) -> Local:
    """An input of a micro-batch in memory of its own, so that the segments of all micro-batches are the same."""
    local = p.get(value, p.lies(value), cause=f"micro-batch {m}", source=node.source, phase="S")
    made = Local(local.dtype, local.layout, f"{value.name}.mb{m}" if value.name else "")
    p.items.append(Op("local.own", (local,), {}, [made], node.source, "S", micro=m))
    return made


def _in_order(p: Partitioner, node: Node, loop: LoopGraph, out: Value, parts: Sequence[Local]) -> None:
    """`microbatches.in_batch_order`, in ops."""
    rows, rest, group = out.shape[0] // loop.num, out.shape[1:], loop.group
    cut = (rows // group, 1, group, *rest)
    values = []
    for part in parts:
        value = Value((rows, *rest), out.dtype)
        value.num_uses = 1
        p.env[value] = [part]
        values.append(_emit(p, node, _ATEN.view.default, (value, list(cut)), cut, out.dtype))
    joined = (cut[0], loop.num, *cut[2:])
    whole = _emit(p, node, _ATEN.cat.default, (values, 1), joined, out.dtype)
    p.env[out] = p.env[_emit(p, node, _ATEN.view.default, (whole, list(out.shape)), out.shape, out.dtype)]


def _finish(p: Partitioner, node: Node, out: Value, total: Local, leaf: tuple[Value, str] | None) -> None:
    """A sum over all micro-batches as a result of the loop; a gradient in the layout that the rules give it."""
    value = Value(out.shape, total.dtype)
    p.env[value] = [total]
    if leaf is not None:
        at, path = leaf
        layout = p.roles.gradient.get(at) or p.roles.gradient_by_path(path, at.shape)
        total = p.get(value, layout or p.lies(at), cause=f"gradient of {path}", source=node.source, phase="B")
        p.after_grad.add(out)
    p.env[out] = [_cast(p, total, out.dtype, node.source)]


def _cast(p: Partitioner, local: Local, dtype: torch.dtype, source: str, task: At | None = None) -> Local:
    if local.dtype == dtype:
        return local
    made = Local(dtype, local.layout)
    p.items.append(Op("aten._to_copy.default", (local,), {"dtype": dtype}, [made], source, "B", task=task))
    return made


def _check_rows(p: Partitioner, node: Node, loop: LoopGraph, batch: Sequence[Value]) -> None:
    for value in batch:
        layout = p.lies(value)
        shards = 1
        for factor in layout.dims[0]:
            shards *= factor.num_shards
        unit = loop.num * loop.group * shards
        if value.shape[0] % unit:
            below = value.shape[0] // unit * unit
            near = f"{below} or {below + unit}" if below else str(unit)
            raise ShardingError(
                f"{value.name or 'a batch argument'} is {typed(value.dtype, layout)}: its {value.shape[0]} rows do not "
                f"make {loop.num} micro-batches"
                + (f" of whole groups of {loop.group}" if loop.group > 1 else "")
                + f" on each of {shards} ranks",
                fix=f"use a batch of {near} rows, or another num_microbatches",
                where=node.source,
            )
