"""What a step is to the eye: its kind, its micro-batch, and how that kind is drawn.

The colours are those of Okabe and Ito, "Color Universal Design" (2008), told apart by people of every kind of
colour vision. Two kinds that share a row differ in lightness or in hatching as well.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fparallel.schedule.ir import Collective, Free, Instr, Program, Recv, Run, Send, Wait, overwritten


@dataclass(frozen=True)
class Style:
    """How a kind is drawn.

    Attributes:
      title: what the legend says.
      letter: what stands before the micro-batch in a box; "" for steps that are not runs.
      colour, ink: `#rrggbb` of the box and of the text in it.
      hatch: "" or a pattern of matplotlib's: lines (/, \\, x) or dots.
    """

    title: str
    letter: str
    colour: str
    ink: str
    hatch: str = ""


STYLES = {
    "forward": Style("forward", "F", "#0072b2", "#ffffff"),
    "backward": Style("backward", "B", "#e69f00", "#000000"),
    "weight": Style("weight gradient", "W", "#009e73", "#000000", "\\\\"),
    "update": Style("update", "U", "#cc79a7", "#000000", "xx"),
    "other": Style("other compute", "x", "#dddddd", "#000000"),
    "collective": Style("collective", "", "#56b4e9", "#000000", "//"),
    "send": Style("send", "", "#d55e00", "#ffffff"),
    "recv": Style("receive", "", "#f0e442", "#000000"),
    "wait": Style("wait", "", "#ffffff", "#000000", ".."),
    "free": Style("free", "", "#000000", "#ffffff"),
}
IDLE = Style("idle", "", "#f4f4f4", "#000000")

_LETTER = re.compile(r"([FBW])(?![A-Za-z_])")
_MICRO = re.compile(r"(?<![A-Za-z])mb(\d+)")
_NUMBERED = re.compile(r"[FBW](\d+)(?!\w)")


def kind_of(instr: Instr, program: Program) -> str:
    """The key in `STYLES` of a step.

    A run labelled `F ...`, `B ...` or `W ...` is that; one that writes over an argument of the step is an update.
    """
    if isinstance(instr, Run):
        letter = _LETTER.match(instr.label)
        if letter:
            return {"F": "forward", "B": "backward", "W": "weight"}[letter.group(1)]
        over = set(overwritten(instr))
        return "update" if instr.label.startswith("update") or over & program.donated else "other"
    if isinstance(instr, Collective):
        return "collective"
    names = {Send: "send", Recv: "recv", Wait: "wait", Free: "free"}
    return names[type(instr)]


def micro_of(instr: Instr) -> int | None:
    """The N of the `mbN` in a run's label, or in the names of all buffers that a communication step moves.

    The label `F3` of the literature is the forward of micro-batch 3.
    """
    if isinstance(instr, Run):
        match = _MICRO.search(instr.label) or _NUMBERED.match(instr.label)
        return int(match.group(1)) if match else None
    matches = [_MICRO.search(name) for name in (*instr.reads, *instr.writes)]
    found = {int(match.group(1)) if match else None for match in matches}
    return found.pop() if len(found) == 1 else None
