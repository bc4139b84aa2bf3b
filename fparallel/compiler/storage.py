"""Which outputs of a run are written over one of its inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from fparallel.layout import same
from fparallel.schedule.ir import Buffer, Instr, Run
from fparallel.schedule.segment import SUMS, Segment


def results_in_place(
    instrs: Sequence[Instr],
    buffers: dict[str, Buffer],
    arguments: Sequence[str],
    results: Sequence[str],
    donated: frozenset[str],
    same_place: Sequence[int | None],
) -> list[Instr]:
    """Lets a result take over the memory of the donated argument that it replaces, where nothing reads that later."""
    returned = set(results)
    last_read: dict[str, int] = {}
    maker: dict[str, int] = {}
    for i, instr in enumerate(instrs):
        for name in instr.reads:
            last_read[name] = i
        for name in instr.writes:
            maker[name] = i
    pairs: dict[int, list[tuple[int, int]]] = {}
    positions: dict[int, tuple[dict[str, int], dict[str, int]]] = {}
    for result, place in zip(results, same_place, strict=True):
        if place is None or arguments[place] not in donated or result not in maker:
            continue
        argument, at = arguments[place], maker[result]
        instr = instrs[at]
        if not isinstance(instr, Run) or last_read.get(argument) != at or argument in returned:
            continue
        if at not in positions:
            positions[at] = tuple({n: k for k, n in enumerate(names)} for names in (instr.outs, instr.ins))  # type: ignore[assignment]
        outs, ins = positions[at]
        if buffers[argument].dtype != buffers[result].dtype or not same(
            buffers[argument].layout, buffers[result].layout
        ):
            continue
        pairs.setdefault(at, []).append((outs[result], ins[argument]))
    return [
        dataclasses.replace(instr, inplace=tuple(pairs[i]))
        if i in pairs and isinstance(instr, Run)
        else instr
        for i, instr in enumerate(instrs)
    ]


def sums_in_place(
    instrs: Sequence[Instr], buffers: dict[str, Buffer], segments: dict[str, Segment]
) -> list[Instr]:
    """Lets a sum over micro-batches stay where it is when a term is added, if nothing else reads what it was."""
    last_read = {name: i for i, instr in enumerate(instrs) for name in instr.reads}
    sums = {name: pairs for name, segment in segments.items() if (pairs := _sums(segment))}
    made: list[Instr] = []
    for i, instr in enumerate(instrs):
        if isinstance(instr, Run) and instr.segment in sums:
            free = [
                (out, into)
                for out, into in sums[instr.segment]
                if last_read[instr.ins[into]] == i
                and instr.ins.count(instr.ins[into]) == 1
                and buffers[instr.ins[into]].kind == "temp"
                and buffers[instr.ins[into]].dtype == buffers[instr.outs[out]].dtype
            ]
            instr = dataclasses.replace(instr, inplace=(*instr.inplace, *free))
        made.append(instr)
    return made


def _sums(segment: Segment) -> list[tuple[int, int]]:
    """(position in outputs, position in inputs) of every sum over micro-batches that a segment adds a term to."""
    return [
        (segment.results.index(op.outs[0]), op.args[0].index)
        for op in segment.ops
        if op.target in SUMS and op.outs[0] in segment.results and op.args[0].index < len(segment.inputs)
    ]
