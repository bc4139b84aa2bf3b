"""Builds programs: local items become runs of segments, collectives and named buffers.

A block lowers to a template (run, collective, run, ...) made once and instantiated per call. Ops between two
collectives that depend on each other make one segment.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fparallel.compiler.context import Context, Template
from fparallel.compiler.grouping import Other, group, retake_views
from fparallel.compiler.local import (
    At,
    Call,
    Comm,
    Local,
    Op,
    Packed,
    Step,
    Transfer,
    drop_dead,
    map_locals,
)
from fparallel.compiler.memory import Halves, Split, halve, split
from fparallel.schedule.ir import Buffer, Collective, Instr, Recv, Run, Send
from fparallel.schedule.segment import LocalOp, Ref, Segment, Work


@dataclass(eq=False)
class Piece:
    """A segment and the Locals that it reads and gives out; `micro`, `task`: what it is of, in a loop."""

    segment: Segment
    ins: list[Local]
    outs: list[Local]
    micro: int | None = None
    task: At | None = None


@dataclass
class Plan:
    """Pieces, collectives and block calls in the order in which they issue."""

    steps: list[Piece | Other] = field(default_factory=list)


# Of their first operand they read as many rows as they give out.
_PICKS = ("aten.embedding.default", "aten.gather.default", "aten.index_select.default", "local.embedding")


def work_of(op: Op) -> Work | None:
    """What an op costs on the fullest rank: it reads every operand and writes every result once."""
    outs = [out for out in op.outs if out is not None]
    if op.view or not outs:
        return None
    written = sum(out.nbytes for out in outs)
    sizes = [value.nbytes for value in op.inputs]
    if op.target in _PICKS:
        sizes[0] = min(sizes[0], written)
    return Work(op.flops, sum(sizes) + written, outs[0].dtype)


def _collective(comms: Sequence[Comm], name: Callable[[Local], str]) -> Collective:
    """One collective on the tensors of all `comms`, which are alike."""
    first = comms[0]
    ins, outs = tuple(name(comm.src) for comm in comms), tuple(name(comm.dst) for comm in comms)
    cause = "; ".join(dict.fromkeys(comm.cause for comm in comms if comm.cause))
    source = next((comm.source for comm in comms if comm.source), "")
    return Collective(first.kind, first.axes, ins, outs, first.reduce, cause, source, sources=first.sources)


class Builder:
    """Makes the schedule of one program."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.segments: dict[str, Segment] = dict(context.map_bodies)
        self.buffers: dict[str, Buffer] = {}
        self.instrs: list[Instr] = []
        self.names: dict[Local, str] = {}
        self.templates: dict[int, tuple[Split, Plan, Plan]] = {}
        self.halves: dict[int, tuple[Halves, Plan, Plan]] = {}
        self.unread: dict[tuple[int, bool, str], frozenset[int]] = {}
        self.counts: dict[str, Any] = {}
        self.numbers: dict[str, int] = {}  # by label, how many segments have it
        self.alike: dict[Any, Segment] = {}  # segments of micro-batches by what they are
        self.call_numbers: dict[tuple[int, int], int] = {}

    # -------------------------------------------------------------- segments

    def plan(self, items: Sequence[Step], results: Iterable[Local], label: str) -> Plan:
        """Groups ops into segments between the collectives and calls that need them."""
        wanted = set(results)
        groups = retake_views(group(items))
        last_reader: dict[Local, int] = {}
        for i, step in enumerate(groups):
            for op in step if isinstance(step, list) else [step]:
                last_reader.update(dict.fromkeys(op.inputs, i))
        plan = Plan()
        for i, step in enumerate(groups):
            if not isinstance(step, list):
                plan.steps.append(step)
                continue
            outs = [
                out
                for op in step
                for out in op.outs
                if out is not None and (out in wanted or last_reader.get(out, i) > i)
            ]
            if outs:
                plan.steps.append(self.piece(drop_dead(step, outs), outs, label))
        return plan

    def piece(self, ops: Sequence[Op], outs: list[Local], label: str) -> Piece:
        """One segment of consecutive ops. Results that would share memory with an input or another are copied."""
        task = ops[0].task
        defined = {out for op in ops for out in op.outs if out is not None}
        ins = list(dict.fromkeys(value for op in ops for value in op.inputs if value not in defined))
        index = {value: i for i, value in enumerate(ins)}
        counter = itertools.count(len(ins))
        root: dict[Local, Local] = {value: value for value in ins}
        local_ops = []
        for op in ops:
            for out in op.outs:
                if out is not None:
                    index[out] = next(counter)
                    root[out] = root[op.inputs[0]] if op.view and op.inputs else out

            def ref(arg: Any) -> Any:
                return map_locals(lambda value: Ref(index[value]), arg)

            local_ops.append(
                LocalOp(
                    op.target,
                    tuple(ref(a) for a in op.args),
                    tuple(None if o is None else index[o] for o in op.outs),
                    tuple((k, ref(v)) for k, v in op.kwargs.items()),
                    op.source,
                    work_of(op),
                )
            )
        results, taken = [], set(ins)
        for out in outs:
            if root[out] in taken:
                copy = next(counter)
                work = Work(0, 2 * out.nbytes, out.dtype)
                local_ops.append(LocalOp("local.own", (Ref(index[out]),), (copy,), work=work))
                results.append(copy)
            else:
                taken.add(root[out])
                results.append(index[out])
        if task is not None:
            label = f"{task.kind}.stage{task.stage}"
        number = self.numbers.get(label, 0)
        segment = Segment(
            f"{label}.{number}",
            tuple((v.dtype, v.layout) for v in ins),
            tuple((v.dtype, v.layout) for v in outs),
            tuple(local_ops),
            tuple(results),
            sum(op.flops for op in ops),
        )
        micros = {op.micro for op in ops if op.task is None} - {None}
        micro = task.micro if task is not None else micros.pop() if len(micros) == 1 else None
        if micro is not None:  # another micro-batch may have had the same
            sources = tuple(op.source for op in local_ops)
            key = (segment.inputs, segment.outputs, segment.fingerprint, sources)
            segment = self.alike.setdefault(key, segment)
        if segment.name not in self.segments:
            self.numbers[label] = number + 1
            self.segments[segment.name] = segment
        return Piece(segment, ins, outs, micro, task)

    def find_unread(self, call: Call) -> None:
        """What a call does not read need not be gathered for it."""
        block = call.block
        key = (id(block), call.backward, call.half)
        if key not in self.unread:
            parts = split(block)
            items, results = parts.forward, [*block.outputs, *parts.residuals]
            if call.backward:
                items, results = parts.backward, block.grads
            if call.half:
                halves = halve(block)
                items = halves.first if call.half == "B" else halves.second
                results = halves.given(call.half) + (halves.carried if call.half == "B" else [])
            read = {value for item in items for value in item.inputs}.union(results)
            formal = block.inputs + (block.tangents if call.backward else [])
            self.unread[key] = frozenset(i for i, value in enumerate(formal) if value not in read)
        call.unread = self.unread[key]

    def backward(self, template: Template, half: str) -> tuple[Plan, list[Local], list[Local]]:
        """The plan of a backward or of a half of it; what it reads of what came before; what it leaves for W."""
        parts, _, whole = self.template(template)
        if not half:
            return whole, parts.residuals, []
        if id(template) not in self.halves:
            halves = halve(template)
            name = f"{template.name}{template.index}"
            first = self.plan(halves.first, [*halves.given("B"), *halves.carried], f"B.{name}")
            self.halves[id(template)] = (
                halves,
                first,
                self.plan(halves.second, halves.given("W"), f"W.{name}"),
            )
        halves, first, second = self.halves[id(template)]
        if half == "B":
            return first, parts.residuals, [*halves.carried, *halves.given("B")]
        return second, [*parts.residuals, *halves.carried, *halves.given("B")], []

    def template(self, template: Template) -> tuple[Split, Plan, Plan]:
        key = id(template)
        if key not in self.templates:
            parts = split(template)
            forward = self.plan(
                parts.forward, [*template.outputs, *parts.residuals], f"F.{template.name}{template.index}"
            )
            backward = self.plan(parts.backward, template.grads, f"B.{template.name}{template.index}")
            self.templates[key] = (parts, forward, backward)
        return self.templates[key]

    # -------------------------------------------------------------- instructions

    def name(self, local: Local, base: str, kind: str = "temp") -> str:
        """The buffer of a Local, made at first sight."""
        if local in self.names:
            return self.names[local]
        name = local.name or base
        if name in self.buffers:
            number = next(i for i in itertools.count(1) if f"{name}~{i}" not in self.buffers)
            name = f"{name}~{number}"
        self.names[local] = name
        self.buffers[name] = Buffer(name, local.dtype, local.layout, kind)
        return name

    def emit(self, plan: Plan, names: dict[Local, str], prefix: str, label: str) -> None:
        """Issues the steps of a plan; `names` maps Locals to buffers and grows."""

        def name(local: Local) -> str:
            if local in names:
                return names[local]
            if local in self.names:
                return self.names[local]
            base = (
                f"{prefix}.{local.name}"
                if local.name and prefix
                else local.name or f"{prefix or 't'}.{len(names)}"
            )
            fresh = base
            for i in itertools.count(1):
                if fresh not in self.buffers:
                    break
                fresh = f"{base}~{i}"
            self.buffers[fresh] = Buffer(fresh, local.dtype, local.layout)
            names[local] = fresh
            return fresh

        for step in plan.steps:
            if isinstance(step, Piece):
                ins = tuple(name(value) for value in step.ins)
                outs = tuple(name(value) for value in step.outs)
                named = label or step.segment.name
                if step.task is not None:
                    named = f"{step.task.kind} stage{step.task.stage}.mb{step.task.micro}"
                elif step.micro is not None and not label:
                    named += f" mb{step.micro}"
                self.instrs.append(Run(step.segment.name, ins, outs, named))
            elif isinstance(step, (Comm, Packed)):
                self.instrs.append(_collective(step.comms if isinstance(step, Packed) else [step], name))
            elif isinstance(step, Transfer):
                values = tuple(name(value) for value in step.values)
                made = Send if step.kind == "send" else Recv
                self.instrs.append(made(step.axis, step.peer, values, step.cause))
            else:
                self.call(step, name)

    def call(self, call: Call, name: Any) -> None:
        """Instantiates a block's forward or backward."""
        template: Template = call.block
        parts, forward, _ = self.template(template)
        saved = call.saved
        key = (id(template), saved.index if saved.like is None else saved.like)
        if key not in self.call_numbers:
            self.call_numbers[key] = next(self.counts.setdefault(f"calls {template.name}", itertools.count()))
        prefix = f"{template.name}.{self.call_numbers[key]}"
        if saved.micro is not None:
            prefix += f".mb{saved.micro}"
        formal = template.inputs + (template.tangents if call.backward else [])
        pairs = enumerate(zip(formal, call.ins, strict=True))
        inner = {own: name(value) for i, (own, value) in pairs if i not in call.unread}
        names: dict[Local, str] = call.saved.names  # type: ignore[assignment]
        left: list[Local] = []
        if call.backward:
            plan, earlier, left = self.backward(template, call.half)
            grads = halve(template).given(call.half) if call.half else template.grads
            for value in [*earlier, *template.outputs]:
                if value in names:
                    inner.setdefault(value, names[value])
            results = list(zip(grads, call.outs, strict=True))
            label = f"{call.half or 'B'} {prefix}"
        else:
            results = list(zip(template.outputs, call.outs, strict=True))
            plan, label = forward, f"F {prefix}"
        passed = []
        for formal_out, actual in results:
            if formal_out in inner:
                passed.append((formal_out, actual))
            elif formal_out not in inner:
                inner[formal_out] = name(actual)
        self.emit(plan, inner, prefix, label)
        for formal_out, actual in passed:
            self.copy(inner[formal_out], actual, name(actual), label)
        if not call.backward:
            left = [*parts.residuals, *template.outputs]
        for value in left:
            names[value] = inner[value]

    def copy(self, src: str, local: Local, dst: str, label: str) -> None:
        """A block output that is one of its inputs, or the same as another output, gets a buffer of its own."""
        key = f"copy.{self.buffers[src].dtype}.{local.layout}"
        if key not in self.segments:
            value = (local.dtype, local.layout)
            work = Work(0, 2 * local.nbytes, local.dtype)
            self.segments[key] = Segment(
                key, (value,), (value,), (LocalOp("local.own", (Ref(0),), (1,), work=work),), (1,)
            )
        self.instrs.append(Run(key, (src,), (dst,), label))
