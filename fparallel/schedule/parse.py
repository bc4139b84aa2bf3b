"""Reads a schedule from the text that `text.py` prints."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import unquote

import torch

from fparallel.errors import FparallelError, ScheduleError
from fparallel.layout import Layout, parse
from fparallel.mesh import Mesh
from fparallel.schedule.ir import (
    COLLECTIVES,
    KINDS,
    TIERS,
    Buffer,
    Collective,
    Free,
    Instr,
    Program,
    Recv,
    Run,
    Schedule,
    Send,
    Wait,
)
from fparallel.schedule.names import parse_names
from fparallel.schedule.segment import Segment

_INSTR = re.compile(r"^(?:\d+\s+)?(?P<op>[a-z_]+)(?:\[(?P<spec>[^\]]*)\])?\s+(?P<body>\S.*)$")
_RUN = re.compile(r"^(?P<label>[^<]*?)\s*<(?P<segment>[^<>]+)>\s+\((?P<ins>[^()]*)\) -> (?P<outs>.*)$")
_SIZE = re.compile(r"\s{2,}-?[\d.]+ (?:B|kB|MB|GB|TB)$")


def _error(where: str, line: str, why: str) -> ScheduleError:
    return ScheduleError(
        f"{where} cannot be read: {why}\n  {line.strip()}",
        fix="write it as `str(schedule)` prints it; fparallel/schedule/text.py describes the form",
    )


def parse_instr(text: str, mesh: Mesh) -> Instr:
    """Reads one instruction, with or without number, bytes and cause.

    Raises:
      ScheduleError: the text is no instruction.
    """
    try:
        return _instr(text, mesh)
    except (ValueError, KeyError, FparallelError) as error:
        raise _error("the instruction", text, str(error).partition("\n")[0]) from error


def _instr(text: str, mesh: Mesh) -> Instr:
    code, _, comment = text.partition("#")
    cause, _, source = comment.partition("##")
    cause, source = unquote(cause.strip()), unquote(source.strip())
    match = _INSTR.match(_SIZE.sub("", code.strip()))
    if match is None:
        raise ValueError("an instruction is written `op[axes]  buffers`")
    op, spec, body = match["op"], match["spec"], match["body"]
    if op == "run" and spec is None:
        return _run(body, cause)
    if op in ("wait", "free") and spec is None:
        return (Wait if op == "wait" else Free)(parse_names(body), cause)
    if op in ("send", "recv") and spec:
        axis, _, peer = spec.rpartition(" ")
        return (Send if op == "send" else Recv)(mesh.axis(axis), int(peer), parse_names(body), cause)
    if op in COLLECTIVES and spec is not None:
        inplace = spec.endswith(" in place")
        spec, _, given = spec.removesuffix(" in place").partition(" from ")
        axes, _, reduce = spec.partition(" ")
        sources = tuple(map(int, given.split(","))) if given else ()
        ins, arrow, outs = body.partition(" -> ")
        if not arrow:
            raise ValueError(f"{op} is written `{op}[axes]  inputs -> outputs`")
        names = parse_names(ins), parse_names(outs)
        return Collective(op, mesh.axes(axes), *names, reduce, cause, source, inplace, sources)
    raise ValueError(f"there is no instruction {op!r} of this form")


def _run(body: str, cause: str) -> Run:
    match = _RUN.match(body)
    if match is None:
        raise ValueError("a run is written `run label <segment>  (inputs) -> outputs`")
    ins = parse_names(match["ins"])
    outs: list[str] = []
    inplace: list[tuple[int, int]] = []
    for word in re.split(r",\s+", match["outs"].strip()):
        name, over, source = word.partition("<=")
        if over:
            position = int(source[1:-1]) if source.startswith("(") else ins.index(unquote(source))
            inplace.append((len(outs), position))
        outs += parse_names(name)
    return Run(unquote(match["segment"]), ins, tuple(outs), unquote(match["label"]), tuple(inplace), cause)


class _Reader:
    """What has been read so far, and the section that is being read."""

    def __init__(self) -> None:
        self.mesh: Mesh | None = None
        self.buffers: dict[str, Buffer] = {}
        self.segments: dict[str, Segment] = {}
        self.programs: list[Program] = []
        self.section = ""
        self.role: tuple[tuple[str, int], ...] = ()
        self.header: dict[str, tuple[str, ...]] = {}
        self.instrs: list[Instr] = []

    def line(self, line: str) -> None:
        word = line.split(maxsplit=1)[0]
        if self.mesh is None:
            if word != "schedule":
                raise ValueError("a schedule begins with `schedule (dp=2, tp=2)`")
            self.mesh = _mesh(line.partition("(")[2].rpartition(")")[0])
        elif not line.startswith(" "):
            self.end_section()
            if word not in ("program", "buffers", "segments"):
                raise ValueError(f"there is no section {word!r}")
            pairs = (item.partition("=") for item in line.partition("#")[0].split()[1:])
            self.section, self.role = word, tuple((axis, int(at)) for axis, _, at in pairs)
        elif self.section == "buffers":
            self.buffers |= {buffer.name: buffer for buffer in _buffers(line.strip(), self.mesh)}
        elif self.section == "segments":
            segment = _segment(line.strip(), self.mesh)
            self.segments[segment.name] = segment
        elif word in ("arguments", "donated", "results"):
            self.header[word] = parse_names(line.strip().removeprefix(word))
        else:
            self.instrs.append(_instr(line.strip(), self.mesh))

    def end_section(self) -> None:
        if self.section == "program":
            get = self.header.get
            donated = frozenset(get("donated", ()))
            program = Program(
                self.role, get("arguments", ()), get("results", ()), donated, tuple(self.instrs)
            )
            self.programs.append(program)
        self.header, self.instrs = {}, []


def parse_schedule(text: str) -> Schedule:
    """Reads what `schedule_text` writes.

    Segments come back without ops, with the fingerprint that is printed; the mesh comes back as an abstract
    one.

    Raises:
      ScheduleError: a line cannot be read; it is named.
    """
    reader = _Reader()
    for number, line in _logical_lines(text):
        try:
            reader.line(line)
        except (ValueError, KeyError, FparallelError) as error:
            raise _error(f"line {number} of the schedule", line, str(error).partition("\n")[0]) from error
    reader.end_section()
    if reader.mesh is None:
        raise _error("the schedule", text[:80], "it is empty")
    return Schedule(reader.mesh, reader.buffers, reader.segments, tuple(reader.programs))


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Numbered lines that are not empty; a line that ends with a comma is continued."""
    held, start = "", 0
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.rstrip()
        if not line:
            continue
        start = start if held else number
        held = f"{held} {line.strip()}" if held else line
        if line.endswith(",") and "#" not in line:
            continue
        yield start, held
        held = ""
    if held:
        yield start, held


def _mesh(text: str) -> Mesh:
    pairs = [item.partition("=") for item in filter(None, text.split(", "))]
    return Mesh(tuple(int(size) for _, _, size in pairs), tuple(name for name, _, _ in pairs))


_BUFFERS = re.compile(r"^(\w+)\s+(\w+\[[^\]]*\](?:\{[^}]*\})?)(?: on (\w+))?:\s+(.*)$")


def _buffers(line: str, mesh: Mesh) -> Iterator[Buffer]:
    match = _BUFFERS.match(line)
    if match is None or match[1] not in KINDS or (match[3] or "device") not in TIERS:
        raise ValueError("buffers are written `temp  f32[8,4@tp]:  a, b`")
    dtype, layout = _typed(match[2], mesh)
    for name in parse_names(match[4]):
        yield Buffer(name, dtype, layout, match[1], match[3] or "device")


_SEGMENT = re.compile(r"^<([^<>]+)>\s+\((.*)\) -> \((.*)\)\s\s(\d+) flops\s\s(\S+)$")


def _segment(line: str, mesh: Mesh) -> Segment:
    match = _SEGMENT.match(line)
    if match is None:
        raise ValueError("a segment is written `<name>  (f32[8]) -> (f32[8])  64 flops  0123456789ab`")
    ins, outs = (tuple(_typed(word, mesh) for word in _values(part)) for part in (match[2], match[3]))
    return Segment(unquote(match[1]), ins, outs, (), (), int(match[4]), match[5])


def _values(text: str) -> list[str]:
    """Splits `f32[8,4], f32[]{unreduced: dp:sum, tp:sum}` into its values."""
    return re.findall(r"\w+\[[^\]]*\](?:\{[^}]*\})?", text)


def _typed(text: str, mesh: Mesh) -> tuple[torch.dtype, Layout]:
    dtype, layout = parse(text, mesh)
    if dtype is None:
        raise ValueError(f"{text!r} names no dtype")
    return dtype, layout
