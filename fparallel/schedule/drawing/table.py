"""A schedule as a text table: ranks down, time across, one cell per stage and micro-batch."""

from __future__ import annotations

from collections.abc import Iterator

from fparallel.schedule.drawing.groups import groups
from fparallel.schedule.drawing.kinds import STYLES
from fparallel.schedule.drawing.timeline import in_slots
from fparallel.schedule.ir import Program, Schedule


def table(schedule: Schedule, width: int | None = None) -> str:
    """Roles by time slots. A slot holds what a stage does to one micro-batch; communication takes no time.

        slot              0  1  2  3
        rank 0 (pp=0)    F0 F1 B0 B1   idle 0 of 4

    Args:
      schedule: the schedule.
      width: columns of the terminal; a longer table is broken into parts. None: it is not broken.
    """
    cells: dict[int, dict[int, str]] = {}  # first rank of a role -> slot -> cell
    first: dict[int, dict[int, str]] = {}
    for program in schedule.programs:
        rank = schedule.first_rank(program)
        cells[rank] = {}
        first[rank] = {group.numbers[0]: group.text for group in groups(program)}

    def cost(program: Program, number: int) -> int:
        return int(number in first[schedule.first_rank(program)])

    for event in in_slots(schedule, cost):
        if event.end > event.start and event.number in first[event.rank]:
            cells[event.rank][event.start] = first[event.rank][event.number]
    slots = 1 + max((slot for row in cells.values() for slot in row), default=-1)
    titles = {rank: _title(schedule, rank) for rank in cells}
    wide = max(map(len, ["slot", *titles.values()]))
    each = max(map(len, [str(slots - 1), *(cell for row in cells.values() for cell in row.values())]))
    idle = {rank: f"   idle {slots - len(row)} of {slots}" for rank, row in cells.items()}
    fit = slots
    if width is not None:
        fit = max(1, (width - wide - 2 - max(map(len, idle.values()))) // (each + 1))
    lines: list[str] = []
    for begin in range(0, max(slots, 1), max(fit, 1)):
        part = range(begin, min(begin + fit, slots))
        last = begin + fit >= slots
        lines += [""] if lines else []
        lines.append(f"{'slot':<{wide}} " + "".join(f" {slot:>{each}}" for slot in part))
        for rank, row in cells.items():
            line = f"{titles[rank]:<{wide}} " + "".join(f" {row.get(slot, '.'):>{each}}" for slot in part)
            lines.append(line + (idle[rank] if last else ""))
    used = {cell for row in cells.values() for cell in row.values()}
    return "\n".join(line.rstrip() for line in [*lines, *_legend(used)]) + "\n"


def _title(schedule: Schedule, rank: int) -> str:
    at = " ".join(f"{axis}={c}" for axis, c in schedule.mesh.coords(rank).items())
    return f"rank {rank} ({at})"


def _legend(cells: set[str]) -> Iterator[str]:
    letters = {cell[0] for cell in cells}
    shown = [f"{style.letter} {style.title}" for style in STYLES.values() if style.letter in letters]
    if shown:
        numbers = "; the number is the micro-batch" if any(len(cell) > 1 for cell in cells) else ""
        yield ""
        yield ", ".join([*shown, ". idle"]) + numbers
