"""Where the time of a step goes, instruction by instruction.

A step of a bound program returns before what it started has arrived; the time of an instruction is therefore
taken from its start to the start of the next one. Beside the wall time stands the CPU time of the thread that
runs the program: with one thread a rank, what a quiet machine would take, communication left out.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Sequence
from typing import Any

from fparallel.runtime.executor import Executor
from fparallel.schedule.ir import Collective, Free, Run, Wait

__all__ = ["InstructionTimes"]

_ROWS = 30


class InstructionTimes:
    """Measures the program of this process's first rank, from its making on.

    Args:
      executor: its steps are replaced by timed ones.
    """

    def __init__(self, executor: Executor) -> None:
        (bound, *_) = executor._bound
        self.instrs: Sequence[Any] = bound.program.instrs
        self.starts: list[tuple[float, float]] = []
        self.waited_for = {number: [self.instrs[n] for n in joined] for number, joined in bound.joins.items()}
        bound.steps = [self._timed(step) for step in bound.steps]

    def _timed(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        starts, wall, cpu = self.starts, time.perf_counter, time.thread_time

        def timed(slots: Any) -> Any:
            starts.append((wall(), cpu()))
            return step(slots)

        return timed

    def table(self, steps: int) -> str:
        """Milliseconds a step, by kind of instruction and by segment."""
        width = len(self.instrs) + 1
        wall: dict[str, float] = collections.defaultdict(float)
        cpu: dict[str, float] = collections.defaultdict(float)
        counts: dict[str, int] = collections.defaultdict(int)
        for at in range(0, len(self.starts), width):
            starts = self.starts[at : at + width]
            for number, instr in enumerate(self.instrs):
                name = self._name(number, instr)
                wall[name] += starts[number + 1][0] - starts[number][0]
                cpu[name] += starts[number + 1][1] - starts[number][1]
                counts[name] += 1
        totals = [sum(x.values()) / steps * 1e3 for x in (wall, cpu)]
        lines = [f"{len(self.instrs)} instructions, ms a step\n       wall        CPU  times  what"]
        lines.append(f"{totals[0]:11.2f}{totals[1]:11.2f}         all")
        names = sorted(wall, key=wall.__getitem__, reverse=True)
        for name in names[:_ROWS]:
            each = f"{wall[name] / steps * 1e3:11.2f}{cpu[name] / steps * 1e3:11.2f}"
            lines.append(f"{each}  {counts[name] // steps:4d} x  {name}")
        rest = names[_ROWS:]
        if rest:
            left = [sum(x[name] for name in rest) / steps * 1e3 for x in (wall, cpu)]
            times = sum(counts[name] for name in rest) // steps
            lines.append(f"{left[0]:11.2f}{left[1]:11.2f}  {times:4d} x  {len(rest)} others")
        return "\n".join(lines) + "\n"

    def _name(self, number: int, instr: Any) -> str:
        if isinstance(instr, Run):
            return f"run {instr.segment}"
        if isinstance(instr, Collective):
            return f"issue {instr.kind}"
        if isinstance(instr, Wait):
            kinds = sorted({other.op for other in self.waited_for[number]})
            return f"wait for {', '.join(kinds) or 'nothing'}"
        return "free" if isinstance(instr, Free) else instr.op
