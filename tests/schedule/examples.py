"""Schedules written as a few lines of text, and those in the docstrings of passes.

Names say what the buffers are: `w*`, `s*` and `*@shard` are sharded over dp, `g1`, `g2` ... are unreduced
over dp, all else is replicated. What is read before it is written is an argument, donated if it is freed or
overwritten; what is left at the end is a result.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable

import torch

from fparallel.layout import parse
from fparallel.mesh import Mesh
from fparallel.schedule import Buffer, Free, Instr, Program, Run, Schedule, Segment
from fparallel.schedule.ir import overwritten
from fparallel.schedule.text import parse_instr


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines() if line.strip()]


def layout_text(name: str) -> str:
    if re.fullmatch(r"g\d*", name):
        return "[8,4]{unreduced: dp:sum}"
    sharded = name.endswith("@shard") or (re.match(r"[ws]\d*'?$", name) is not None)
    return "[8@dp,4]" if sharded else "[8,4]"


def example(text: str, like: str | None = None, mesh: Mesh | None = None) -> Schedule:
    """The schedule with these instructions for all ranks; arguments and results are those of `like`."""
    mesh = Mesh((2,), ("dp",)) if mesh is None else mesh
    instrs = [parse_instr(line, mesh) for line in lines(text)]
    arguments, donated, results = _ends([parse_instr(line, mesh) for line in lines(like or text)])
    names = dict.fromkeys(arguments)
    for instr in instrs:
        names |= dict.fromkeys((*instr.reads, *instr.writes))
    buffers = {}
    for name in names:
        kind = "argument" if name in arguments else "result" if name in results else "temp"
        buffers[name] = Buffer(name, torch.float32, parse(layout_text(name), mesh)[1], kind)
    segments = {}
    for instr in instrs:
        if isinstance(instr, Run):
            ins, outs = (
                tuple((buffers[n].dtype, buffers[n].layout) for n in names)
                for names in (instr.ins, instr.outs)
            )
            segments[instr.segment] = Segment(instr.segment, ins, outs, (), (), 0, "0" * 12)
    program = Program((), tuple(arguments), tuple(results), frozenset(donated), tuple(instrs))
    return Schedule(mesh, buffers, segments, (program,))


def _ends(instrs: list[Instr]) -> tuple[list[str], list[str], list[str]]:
    arguments: dict[str, None] = {}
    written: dict[str, None] = {}
    ended: set[str] = set()
    for instr in instrs:
        arguments |= dict.fromkeys(name for name in instr.reads if name not in written)
        written |= dict.fromkeys(instr.writes)
        ended |= set(overwritten(instr)) | set(instr.bufs if isinstance(instr, Free) else ())
    return list(arguments), [n for n in arguments if n in ended], [n for n in written if n not in ended]


def docstring_example(run: Callable[..., Schedule]) -> tuple[Schedule, Schedule]:
    """The schedules before and after in the docstring of a pass."""
    doc = inspect.cleandoc(run.__doc__ or "")
    before, after = (
        textwrap.dedent(re.search(rf"{title}::\n\n((?:    .*\n|\n)+)", doc + "\n").group(1))  # type: ignore[union-attr]
        for title in ("Before", "After")
    )
    return example(before, like=after), example(after)


def instr_lines(schedule: Schedule) -> str:
    """The instructions of the first program, numbered and aligned."""
    from fparallel.schedule.text import schedule_text

    found = re.findall(r"^  \d{4}  .*$", schedule_text(schedule), flags=re.MULTILINE)
    return "\n".join(line[8:] for line in found)
