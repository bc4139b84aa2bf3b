"""Which ops make one segment: what stands between the collectives, transfers and block calls that need it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from fparallel.compiler.local import Call, Comm, Local, Op, Packed, Step, Transfer, map_locals
from fparallel.compiler.memory import whole_view

Other = Comm | Call | Transfer | Packed


def group(items: Sequence[Step]) -> list[list[Op] | Other]:
    """Collectives, transfers and calls in order, between them lists of ops; an op precedes those that it can.

    The first op that reads what an early collective gives begins a new list: what stands before it need not wait.
    """
    groups: list[list[Op] | Other] = []
    pending: list[Op] = []
    made: set[Local] = set()
    early = {item.dst for item in items if isinstance(item, Comm) and item.early}
    for item in items:
        if pending and pending[-1].task is not None and item.task != pending[-1].task:
            groups.append(pending)  # a task of a pipeline is done before the next begins
            pending, made = [], set()
        if isinstance(item, Op):
            reads_early = bool(early) and not early.isdisjoint(item.inputs)
            early = set() if reads_early else early
            if pending and (reads_early or pending[-1].phase != item.phase):
                groups.append(pending)
                pending, made = [], set()
            pending.append(item)
            made.update(out for out in item.outs if out is not None)
            continue
        urgent = isinstance(item, Call) and any(op.at_once for op in pending)
        if pending and (urgent or any(value in made for value in item.inputs)):
            groups.append(pending)
            pending, made = [], set()
        groups.append(item)
    return [*groups, pending] if pending else groups


def retake_views(groups: list[list[Op] | Other]) -> list[list[Op] | Other]:
    """A segment that reads a view made in an earlier one takes it again of its base: views are not buffers."""
    views = {
        out: op
        for step in groups
        if isinstance(step, list)
        for op in step
        if whole_view(op)
        for out in op.outs
    }
    result: list[list[Op] | Other] = []
    for step in groups:
        if not isinstance(step, list) or all(views.keys().isdisjoint(op.inputs) for op in step):
            result.append(step)
            continue
        own = {out for op in step for out in op.outs}
        again: dict[Local, Local] = {}
        ops: list[Op] = []

        def fetch(
            value: Local, own: set = own, again: dict = again, ops: list = ops, first: Op = step[0]
        ) -> Local:
            if value in again:
                return again[value]
            op = views.get(value)
            if op is None or value in own:
                return value
            again[value] = Local(
                value.dtype, value.layout, value.name, pinned=value.pinned, static=value.static
            )
            ops.append(
                dataclasses.replace(
                    op,
                    args=map_locals(fetch, op.args),
                    outs=[again[value]],
                    phase=first.phase,
                    task=first.task,
                )
            )
            return again[value]

        for op in step:
            args, kwargs = map_locals(fetch, op.args), map_locals(fetch, op.kwargs)
            ops.append(dataclasses.replace(op, args=args, kwargs=kwargs))
        result.append(ops)
    return result
