"""Building the schedule: local items become runs of segments, collectives and named buffers.

A block lowers to a template (run, collective, run, ...) made once and instantiated per call. Ops between two
collectives that depend on each other make one segment.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fparallel.compiler.context import Context, Template
from fparallel.compiler.local import Call, Comm, Item, Local, Op, drop_dead, map_locals
from fparallel.compiler.memory import Split, split, whole_view
from fparallel.compiler.storage import results_in_place, sums_in_place
from fparallel.schedule.ir import Buffer, Collective, Instr, Program, Run, Schedule
from fparallel.schedule.segment import LocalOp, Ref, Segment


@dataclass(eq=False)
class Piece:
    """A segment and the Locals that it reads and gives out; `micro`: the micro-batch that it is of."""

    segment: Segment
    ins: list[Local]
    outs: list[Local]
    micro: int | None = None


@dataclass
class Plan:
    """Pieces, collectives and block calls in the order in which they issue."""

    steps: list[Piece | Comm | Call] = field(default_factory=list)


@dataclass
class Lowered:
    """A schedule and the tensors of its constants."""

    schedule: Schedule
    constants: dict[str, torch.Tensor]


def group(items: Sequence[Item]) -> list[list[Op] | Comm | Call]:
    """Collectives and calls in order, between them lists of ops; an op precedes the collectives that it can.

    The first op that reads what an early collective gives begins a new list: what stands before it need not wait.
    """
    groups: list[list[Op] | Comm | Call] = []
    pending: list[Op] = []
    made: set[Local] = set()
    early = {item.dst for item in items if isinstance(item, Comm) and item.early}
    for item in items:
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


def retake_views(groups: list[list[Op] | Comm | Call]) -> list[list[Op] | Comm | Call]:
    """A segment that reads a view made in an earlier one takes it again of its base: views are not buffers."""
    views = {
        out: op
        for step in groups
        if isinstance(step, list)
        for op in step
        if whole_view(op)
        for out in op.outs
    }
    result: list[list[Op] | Comm | Call] = []
    for step in groups:
        if not isinstance(step, list) or all(views.keys().isdisjoint(op.inputs) for op in step):
            result.append(step)
            continue
        own = {out for op in step for out in op.outs}
        again: dict[Local, Local] = {}
        ops: list[Op] = []

        def fetch(
            value: Local, own: set = own, again: dict = again, ops: list = ops, phase: str = step[0].phase
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
                dataclasses.replace(op, args=map_locals(fetch, op.args), outs=[again[value]], phase=phase)
            )
            return again[value]

        for op in step:
            args, kwargs = map_locals(fetch, op.args), map_locals(fetch, op.kwargs)
            ops.append(dataclasses.replace(op, args=args, kwargs=kwargs))
        result.append(ops)
    return result


class Builder:
    """Makes the schedule of one program."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.segments: dict[str, Segment] = dict(context.map_bodies)
        self.buffers: dict[str, Buffer] = {}
        self.instrs: list[Instr] = []
        self.names: dict[Local, str] = {}
        self.templates: dict[int, tuple[Split, Plan, Plan]] = {}
        self.unread: dict[tuple[int, bool], frozenset[int]] = {}
        self.counts: dict[str, Any] = {}
        self.numbers: dict[str, int] = {}  # by label, how many segments have it
        self.alike: dict[Any, Segment] = {}  # segments of micro-batches by what they are
        self.call_numbers: dict[tuple[int, int], int] = {}

    # -------------------------------------------------------------- segments

    def plan(self, items: Sequence[Item], results: Iterable[Local], label: str) -> Plan:
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
                )
            )
        results, taken = [], set(ins)
        for out in outs:
            if root[out] in taken:
                copy = next(counter)
                local_ops.append(LocalOp("local.own", (Ref(index[out]),), (copy,)))
                results.append(copy)
            else:
                taken.add(root[out])
                results.append(index[out])
        number = self.numbers.get(label, 0)
        segment = Segment(
            f"{label}.{number}",
            tuple((v.dtype, v.layout) for v in ins),
            tuple((v.dtype, v.layout) for v in outs),
            tuple(local_ops),
            tuple(results),
            sum(op.flops for op in ops),
        )
        micros = {op.micro for op in ops} - {None}
        micro = micros.pop() if len(micros) == 1 else None
        if micro is not None:  # another micro-batch may have had the same
            sources = tuple(op.source for op in local_ops)
            key = (segment.inputs, segment.outputs, segment.fingerprint, sources)
            segment = self.alike.setdefault(key, segment)
        if segment.name not in self.segments:
            self.numbers[label] = number + 1
            self.segments[segment.name] = segment
        return Piece(segment, ins, outs, micro)

    def find_unread(self, call: Call) -> None:
        """What a call does not read need not be gathered for it."""
        key = (id(call.block), call.backward)
        if key not in self.unread:
            parts = self.template(call.block)[0]
            items, results = (
                (parts.backward, call.block.grads) if call.backward else (parts.forward, call.block.outputs)
            )
            read = {value for item in items for value in item.inputs}.union(
                results, () if call.backward else parts.residuals
            )
            formal = call.block.inputs + (call.block.tangents if call.backward else [])
            self.unread[key] = frozenset(i for i, value in enumerate(formal) if value not in read)
        call.unread = self.unread[key]

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
                if step.micro is not None and not label:
                    named += f" mb{step.micro}"
                self.instrs.append(Run(step.segment.name, ins, outs, named))
            elif isinstance(step, Comm):
                src = name(step.src)
                self.instrs.append(
                    Collective(
                        step.kind,
                        step.axes,
                        (src,),
                        (name(step.dst),),
                        step.reduce,
                        step.cause,
                        step.source,
                        sources=step.sources,
                    )
                )
            else:
                self.call(step, name)

    def call(self, call: Call, name: Any) -> None:
        """Instantiates a block's forward or backward."""
        template: Template = call.block
        parts, forward, backward = self.template(template)
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
        if call.backward:
            for residual in parts.residuals:
                inner[residual] = names[residual]
            for formal_out in template.outputs:
                if formal_out in names:
                    inner.setdefault(formal_out, names[formal_out])
            results = list(zip(template.grads, call.outs, strict=True))
            plan, label = backward, f"B {prefix}"
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
            for value in [*parts.residuals, *template.outputs]:
                names[value] = inner[value]

    def copy(self, src: str, local: Local, dst: str, label: str) -> None:
        """A block output that is one of its inputs, or the same as another output, gets a buffer of its own."""
        key = f"copy.{self.buffers[src].dtype}.{local.layout}"
        if key not in self.segments:
            value = (local.dtype, local.layout)
            self.segments[key] = Segment(
                key, (value,), (value,), (LocalOp("local.own", (Ref(0),), (1,)),), (1,)
            )
        self.instrs.append(Run(key, (src,), (dst,), label))


def build(
    context: Context,
    items: Sequence[Item],
    arguments: Sequence[Local],
    results: Sequence[Local],
    donated: Sequence[bool],
    same_place: Sequence[int | None],
) -> Lowered:
    """The schedule of a partitioned program, with no waits and frees yet (the passes add them).

    Args:
      arguments, results: the Locals of the step's flattened arguments and outputs.
      donated: per argument.
      same_place: per result the argument whose memory it may take over, or None.
    """
    builder = Builder(context)
    for local in arguments:
        builder.name(local, local.name, "argument")
    for item in items:
        if isinstance(item, Call):
            builder.find_unread(item)
    items = drop_dead(items, results)
    constants = {}
    for local, tensor in context.constants.items():
        constants[builder.name(local, local.name, "constant")] = tensor
    plan = builder.plan(items, results, "step")
    builder.emit(plan, builder.names, "", "")
    result_names = _results(builder, results)
    used = {name for instr in builder.instrs for name in instr.reads} | set(result_names)
    constants = {name: tensor for name, tensor in constants.items() if name in used}
    argument_names = [builder.names[local] for local in arguments]
    buffers = {n: b for n, b in builder.buffers.items() if b.kind != "constant" or n in constants}
    donated_names = frozenset(name for name, flag in zip(argument_names, donated, strict=True) if flag)
    instrs = results_in_place(
        builder.instrs, buffers, argument_names, result_names, donated_names, same_place
    )
    instrs = sums_in_place(instrs, buffers, builder.segments)
    for name in result_names:
        if buffers[name].kind == "temp":
            buffers[name] = Buffer(name, buffers[name].dtype, buffers[name].layout, "result")
    program = Program((), (*argument_names, *constants), tuple(result_names), donated_names, tuple(instrs))
    used_segments = {i.segment for i in instrs if isinstance(i, Run)}
    segments = {n: s for n, s in builder.segments.items() if n in used_segments or n in context.map_bodies}
    return Lowered(Schedule(context.mesh, buffers, segments, (program,)), constants)


def _results(builder: Builder, results: Sequence[Local]) -> list[str]:
    """The buffers of the outputs, each its own: a value returned twice, or a constant, is copied."""
    names: dict[str, None] = {}
    for i, local in enumerate(results):
        name = builder.name(local, f"out.{i}")
        if name in names or builder.buffers[name].kind == "constant":
            fresh = f"out.{i}"
            builder.buffers[fresh] = Buffer(fresh, local.dtype, local.layout)
            builder.copy(name, local, fresh, "copy")
            name = fresh
        names[name] = None
    return list(names)
