"""Schedules as text: printed, parsed back, diffed, and seen from one rank.

    program pp=1  # ranks 2-3
      arguments  state.params.blocks.{0..3}.{up,down}, batch.x
      0012  all_gather[dp]             params.blocks.2.up -> params.blocks.2.up@full    4.2 MB  # why
      0013  recv[pp 0]                 act.s1.mb0                                       1.0 MB
      0014  wait                       params.blocks.2.up@full
      0015  run F block.2 mb0 <mlp.F>  (act.s1.mb0, params.blocks.2.up@full) -> act.2.mb0, res.2.mb0
      0016  free                       params.blocks.2.up@full

`a{b,c}d` and `a{0..3}` stand for the names that they expand to (see names.py); `out<=in` is an output that
takes the storage of an input. A cause is followed by `## file.py:12` where there is a source line. Numbers,
bytes and ranks are comments.
"""

from __future__ import annotations

import bisect
import dataclasses
import difflib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch

from fparallel.layout import Layout, dtype_text
from fparallel.schedule.ir import KINDS, Collective, Instr, Program, Recv, Run, Schedule, Send
from fparallel.schedule.names import BANNED_CAUSE, BANNED_LABEL, escape, names_text
from fparallel.schedule.parse import parse_instr, parse_schedule
from fparallel.schedule.segment import Segment

__all__ = ["bytes_text", "diff", "instr_text", "parse_instr", "parse_schedule", "rank_text", "schedule_text"]


# ---------------------------------------------------------------- instructions


def _typed(dtype: torch.dtype, layout: Layout) -> str:
    """Like `layout.typed`, but sub-axes are not joined, so that it parses to an equal value."""
    dims = []
    for dim in layout.dims:
        factors = [f"{f.size}@{'*'.join(map(str, f.axes))}" if f.axes else str(f.size) for f in dim]
        dims.append(factors[0] if len(factors) == 1 else "(" + " ".join(factors) + ")")
    pending = ", ".join(f"{axis}:{reduction}" for axis, reduction in layout.unreduced)
    return f"{dtype_text(dtype)}[{','.join(dims)}]" + (f"{{unreduced: {pending}}}" if pending else "")


def _outs_text(run: Run) -> str:
    if not run.inplace:
        return names_text(run.outs)
    over = {out: position for out, position in run.inplace}
    times = Counter(run.ins) if over else Counter()
    parts: list[str] = []
    plain: list[str] = []
    for i, out in enumerate(run.outs):
        if i not in over:
            plain.append(out)
            continue
        if plain:
            parts.append(names_text(plain))
            plain = []
        source = run.ins[over[i]]
        parts.append(f"{escape(out)}<={escape(source) if times[source] == 1 else f'({over[i]})'}")
    return ", ".join(parts + ([names_text(plain)] if plain else []))


def _head_body(instr: Instr) -> tuple[str, str]:
    if isinstance(instr, Run):
        label = escape(instr.label, BANNED_LABEL) + " " if instr.label else ""
        ins = names_text(instr.ins) if instr.ins else ""
        return f"run {label}<{escape(instr.segment)}>", f"({ins}) -> {_outs_text(instr)}"
    if isinstance(instr, Collective):
        reduce = f" {instr.reduce}" if instr.reduce else ""
        place = " in place" if instr.inplace else ""
        sources = f" from {','.join(map(str, instr.sources))}" if instr.sources else ""
        head = f"{instr.kind}[{'*'.join(map(str, instr.axes))}{reduce}{sources}{place}]"
        return head, f"{names_text(instr.ins)} -> {names_text(instr.outs)}"
    if isinstance(instr, Send):
        return f"send[{instr.axis} {instr.peer}]", names_text(instr.ins)
    if isinstance(instr, Recv):
        return f"recv[{instr.axis} {instr.peer}]", names_text(instr.outs)
    return instr.op, names_text(instr.bufs)


def _comment(instr: Instr) -> str:
    cause = escape(instr.cause, BANNED_CAUSE) if instr.cause else ""
    source = getattr(instr, "source", "")
    if source:
        cause = f"{cause}  ## {escape(source, BANNED_CAUSE)}"
    return f"  # {cause}" if cause else ""


def bytes_text(count: float) -> str:
    """`4.2 MB`, with 1 MB = 1e6 bytes."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= size * 0.9995:
            return f"{count / size:.1f} {unit}"
    return f"{int(count)} B"


def instr_text(instr: Instr) -> str:
    """One instruction on one line, without number, bytes and cause."""
    head, body = _head_body(instr)
    return f"{head}  {body}"


def _lines(instrs: Sequence[Instr], nbytes: Callable[[str], int]) -> Iterator[str]:
    """Numbered, aligned lines; a communication step with the larger of the bytes going in and coming out."""
    parts = [_head_body(instr) for instr in instrs]
    talks = [isinstance(instr, (Collective, Send, Recv)) for instr in instrs]
    wide_head = min(max((len(head) for head, _ in parts), default=0), 28)
    bodies = (len(body) for (_, body), talk in zip(parts, talks, strict=True) if talk)
    wide_body = min(max(bodies, default=0), 64)
    for i, (instr, (head, body), talk) in enumerate(zip(instrs, parts, talks, strict=True)):
        line = f"  {i:04d}  {head:<{wide_head}}  {body}"
        if talk:
            size = bytes_text(max(sum(map(nbytes, instr.reads)), sum(map(nbytes, instr.writes))))
            line = f"{line:<{wide_head + wide_body + 10}}  {size:>8}"
        yield line + _comment(instr)


# ---------------------------------------------------------------- printing


def _span(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-3` or `ranks 0,2,4,6`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    shown = ",".join(map(str, ranks[:8]))
    return f"ranks {shown}" + (",..." if len(ranks) > 8 else "")


def _wrapped(title: str, text: str, width: int = 110) -> Iterator[str]:
    """`  title  a, b, c`, broken after commas."""
    line = f"  {title:<9}  "
    for word in text.split(", "):
        piece = word + ", "
        if len(line) + len(piece) > width and line.strip() and not line.endswith("  "):
            yield line.rstrip()
            line = " " * 13
        line += piece
    yield line.rstrip().removesuffix(",").rstrip()


def _program_lines(schedule: Schedule, program: Program) -> Iterator[str]:
    yield f"program {program.role_text}".rstrip() + f"  # {_span(schedule.ranks(program))}"
    for title, names in (
        ("arguments", program.arguments),
        ("donated", [name for name in program.arguments if name in program.donated]),
        ("results", program.results),
    ):
        if names:
            yield from _wrapped(title, names_text(names))
    yield from _lines(program.instrs, lambda name: _nbytes(schedule, name))


def _nbytes(schedule: Schedule, name: str) -> int:
    buffer = schedule.buffers.get(name)
    return buffer.nbytes if buffer is not None else 0


def _buffer_lines(schedule: Schedule) -> Iterator[str]:
    groups: dict[tuple[str, str, str], list[str]] = {}
    types: dict[tuple[torch.dtype, int], str] = {}
    for buffer in schedule.buffers.values():
        key = (buffer.dtype, id(buffer.layout))
        if key not in types:
            types[key] = _typed(buffer.dtype, buffer.layout)
        groups.setdefault((buffer.kind, buffer.memory, types[key]), []).append(buffer.name)
    for kind in KINDS:
        for (k, memory, text), names in groups.items():
            if k == kind:
                place = "" if memory == "device" else f" on {memory}"
                yield from _wrapped(f"{kind:<8}", f"{text}{place}:  {names_text(names)}")


def _segment_line(segment: Segment) -> str:
    ins = ", ".join(_typed(*value) for value in segment.inputs)
    outs = ", ".join(_typed(*value) for value in segment.outputs)
    return f"  <{escape(segment.name)}>  ({ins}) -> ({outs})  {segment.flops} flops  {segment.fingerprint}"


def schedule_text(schedule: Schedule) -> str:
    """The whole schedule: each distinct program, then buffers by type and segments by signature.

    `parse_schedule` reads it back to an equal value: of segments it has the fingerprints, not the ops.
    """
    lines = [f"schedule {schedule.mesh}"]
    for program in schedule.programs:
        lines.append("")
        lines += _program_lines(schedule, program)
    if schedule.buffers:
        lines += ["", "buffers", *_buffer_lines(schedule)]
    if schedule.segments:
        lines += ["", "segments", *map(_segment_line, schedule.segments.values())]
    return "\n".join(lines) + "\n"


def rank_text(schedule: Schedule, rank: int) -> str:
    """The program of one rank, with the bytes of that rank."""
    coords = schedule.mesh.coords(rank)
    at = " ".join(f"{axis}={c}" for axis, c in coords.items())

    def nbytes(name: str) -> int:
        buffer = schedule.buffers.get(name)
        return buffer.local_bytes(coords) if buffer is not None else 0

    return "\n".join([f"rank {rank}  ({at})", *_lines(schedule.program(rank).instrs, nbytes)]) + "\n"


# ---------------------------------------------------------------- diff


def diff(a: Schedule, b: Schedule) -> str:
    """What changes from `a` to `b`, aligned by instruction; empty if they are equal.

    Each line has its number in `a` and in `b`. Buffers and segments of only one of them are listed as well.
    """
    lines = [*_diff_texts("mesh", [f"  {a.mesh}"], [f"  {b.mesh}"])]
    old, new = ({program.role: program for program in schedule.programs} for schedule in (a, b))
    for role in dict.fromkeys([*old, *new]):
        empty = Program(role, (), (), frozenset(), ())
        lines += _diff_programs(a, b, old.get(role, empty), new.get(role, empty))
    lines += _diff_texts("buffers", list(_buffer_lines(a)), list(_buffer_lines(b)))
    lines += _diff_texts("segments", *([_segment_line(s) for s in x.segments.values()] for x in (a, b)))
    return "\n".join(lines) + "\n" if lines else ""


def _diff_texts(title: str, a: list[str], b: list[str]) -> list[str]:
    changed = [line for line in difflib.ndiff(a, b) if line[0] in "+-"] if a != b else []
    return [title, *changed] if changed else []


def _diff_programs(a: Schedule, b: Schedule, old: Program, new: Program, context: int = 2) -> list[str]:
    if old == new:
        return []
    heads = [
        list(_program_lines(schedule, dataclasses.replace(program, instrs=())))
        for schedule, program in ((a, old), (b, new))
    ]
    lines = [heads[0][0], *(line for line in difflib.ndiff(heads[0][1:], heads[1][1:]) if line[0] in "+-")]
    left, right = ([instr_text(i) + _comment(i) for i in program.instrs] for program in (old, new))
    return lines + _hunks(_aligned(left, right), context)


_Row = tuple[int | None, int | None, str]


def _aligned(left: list[str], right: list[str]) -> list[_Row]:
    """(number on the left, on the right, text) of all lines, by the longest common order of unique ones.

    Nearly every instruction of a program is unique: it writes buffers that no other does.
    """
    at = {text: j for j, text in enumerate(right)}
    pairs = [(i, at[text]) for i, text in enumerate(left) if text in at]
    tails: list[int] = []  # the smallest right number that ends an increasing run of each length
    ends: list[int] = []  # which pair that is
    before: list[int] = []
    for n, (_, j) in enumerate(pairs):
        length = bisect.bisect_left(tails, j)
        before.append(ends[length - 1] if length else -1)
        tails[length : length + 1] = [j]
        ends[length : length + 1] = [n]
    common: list[tuple[int, int]] = []
    n = ends[-1] if ends else -1
    while n >= 0:
        common.append(pairs[n])
        n = before[n]
    rows: list[_Row] = []
    i = j = 0
    for i2, j2 in [*reversed(common), (len(left), len(right))]:
        rows += [(k, None, left[k]) for k in range(i, i2)]
        rows += [(None, k, right[k]) for k in range(j, j2)]
        if i2 < len(left):
            rows.append((i2, j2, left[i2]))
        i, j = i2 + 1, j2 + 1
    return rows


def _hunks(rows: list[_Row], context: int) -> list[str]:
    """The rows that are on one side only, with some common rows around them."""
    shown: set[int] = set()
    for n, (i, j, _) in enumerate(rows):
        if i is None or j is None:
            shown.update(range(n - context, n + context + 1))
    lines = []
    for n, (i, j, text) in enumerate(rows):
        if n not in shown:
            continue
        if n - 1 not in shown or n == 0:
            lines.append("@@")
        sign = " " if i is not None and j is not None else "-" if j is None else "+"
        numbers = " ".join("    " if k is None else f"{k:04d}" for k in (i, j))
        lines.append(f"{sign} {numbers}  {text}")
    return lines
