"""What every drawing shows: per role its steps in time, in rows, and its memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fparallel._compat import cached_property
from fparallel.schedule.drawing.groups import Group, groups
from fparallel.schedule.drawing.kinds import kind_of, micro_of
from fparallel.schedule.drawing.timeline import Event, in_slots
from fparallel.schedule.ir import Free, Instr, Program, Run, Schedule, Wait, is_async, wait_names
from fparallel.schedule.memory import live_bytes
from fparallel.schedule.text import instr_text

SLOTS, SECONDS = "slots", "s"


@dataclass(frozen=True)
class Box:
    """A step in time.

    Attributes:
      number: of the instruction.
      row: its place in `Lane.rows`.
      nbytes: what a communication step moves (in or out, the larger), a run writes, a free gives back; on this rank.
      issued: when the rank gets to it; a communication step may start later.
    """

    number: int
    instr: Instr
    kind: str
    micro: int | None
    row: int
    issued: float
    start: float
    end: float
    nbytes: int
    cause: str
    source: str

    @cached_property
    def text(self) -> str:
        return instr_text(self.instr)

    @property
    def label(self) -> str:
        """The longest name that a box may bear."""
        return self.instr.label or self.instr.segment if isinstance(self.instr, Run) else self.instr.op


@dataclass(frozen=True)
class Lane:
    """A role, seen on its first rank.

    Attributes:
      rows: names of its rows: "compute", then one per communication stream, more if steps of one overlap.
      boxes: one per instruction, in program order.
      groups: of its runs; see `groups.py`.
      held: device bytes before the first instruction.
      live: device bytes from every instruction on, as in `memory.live_bytes`.
    """

    rank: int
    title: str
    rows: tuple[str, ...]
    boxes: tuple[Box, ...]
    groups: tuple[Group, ...]
    held: int
    live: tuple[int, ...]

    @property
    def peak(self) -> int:
        return max([self.held, *self.live])

    @property
    def busy(self) -> float:
        return sum(box.end - box.start for box in self.boxes if isinstance(box.instr, Run))

    def spans(self) -> list[tuple[str, float, float]]:
        """(name, start, end) of the groups that have several runs."""
        return [
            (group.text, self.boxes[group.numbers[0]].start, self.boxes[group.numbers[-1]].end)
            for group in self.groups
            if len(group.numbers) > 1
        ]

    def memory(self) -> list[tuple[float, int]]:
        """(time, device bytes from then on), of the steps at which they change."""
        points = [(0.0, self.held)]
        for box, live in zip(self.boxes, self.live, strict=True):
            if live != points[-1][1]:
                points.append((box.issued, live))
        return points


@dataclass(frozen=True)
class Chart:
    """A drawing before it is drawn. `unit` is "slots" (every run takes one) or "s"."""

    mesh: str
    unit: str
    end: float
    lanes: tuple[Lane, ...]


def chart(schedule: Schedule, events: Iterable[Event] | None = None) -> Chart:
    """Lays out a schedule in time.

    Args:
      schedule: the schedule.
      events: when its steps ran, in seconds, on the first rank of every role. Steps that are not among them take no
        time. None: every run takes one slot, all else no time.
    """
    unit = SLOTS if events is None else SECONDS
    spans: dict[int, dict[int, Event]] = {}
    for event in in_slots(schedule) if events is None else events:
        spans.setdefault(event.rank, {})[event.number] = event
    lanes = tuple(
        _lane(schedule, program, spans.get(schedule.first_rank(program), {})) for program in schedule.programs
    )
    end = max((box.end for lane in lanes for box in lane.boxes), default=0.0)
    return Chart(str(schedule.mesh), unit, float(end), lanes)


def _lane(schedule: Schedule, program: Program, events: dict[int, Event]) -> Lane:
    rank = schedule.first_rank(program)
    coords = schedule.mesh.coords(rank)
    spans = _spans(program, events)
    rows, places = _rows(program, spans)
    boxes = []
    for number, (instr, (issued, start, end)) in enumerate(zip(program.instrs, spans, strict=True)):
        names = [instr.bufs] if isinstance(instr, Free) else [instr.writes]
        if is_async(instr):
            names.append(instr.reads)
        sizes = [sum(schedule.buffers[name].local_bytes(coords) for name in each) for each in names]
        boxes.append(
            Box(
                number,
                instr,
                kind_of(instr, program),
                micro_of(instr),
                places[number],
                issued,
                start,
                end,
                max(sizes),
                instr.cause,
                _source(schedule, instr),
            )
        )
    at = " ".join(f"{axis}={c}" for axis, c in coords.items())
    others = len(schedule.ranks(program)) - 1
    title = f"rank {rank} ({at})" + (f" and {others} more" if others else "")
    held = sum(
        schedule.buffers[name].local_bytes(coords)
        for name in program.arguments
        if schedule.buffers[name].memory == "device"
    )
    live = tuple(live_bytes(schedule, rank))
    return Lane(rank, title, rows, tuple(boxes), tuple(groups(program)), held, live)


def _spans(program: Program, events: dict[int, Event]) -> list[tuple[float, float, float]]:
    """(issue, start, end) of every instruction.

    A wait lasts from when the rank gets to it until what it waits for is over, whatever its event says; a free is
    a moment.
    """
    clock = 0.0
    over: dict[str, float] = {}
    spans = []
    for number, instr in enumerate(program.instrs):
        event = events.get(number)
        issued = clock
        start, end = (clock, clock) if event is None else (float(event.start), float(event.end))
        if isinstance(instr, Run):
            issued = start
            clock = max(clock, end)
        elif isinstance(instr, Wait):
            start = clock
            clock = end = max([clock, *(over.get(name, clock) for name in instr.bufs)])
        elif isinstance(instr, Free):
            start = end = clock
        else:
            for name in wait_names(instr):
                over[name] = max(end, over.get(name, end))
        spans.append((issued, start, end))
    return spans


def _rows(program: Program, spans: Sequence[tuple[float, float, float]]) -> tuple[tuple[str, ...], list[int]]:
    """The rows of a role, and the row of every instruction: one per stream, more where its steps overlap."""
    streams: dict[str, list[int]] = {"compute": []}
    for number, instr in enumerate(program.instrs):
        streams.setdefault(instr.stream, []).append(number)
    slack = 1e-9 * max((end for _, _, end in spans), default=0.0)
    rows: list[str] = []
    places = [0] * len(program.instrs)
    for stream, numbers in streams.items():
        ends: list[float] = [0.0]
        first = len(rows)
        if stream != "compute":
            for number in sorted(numbers, key=lambda n: spans[n][1:]):
                _, start, end = spans[number]
                free = next((k for k, until in enumerate(ends) if until <= start + slack), len(ends))
                ends[free:] = [end, *ends[free + 1 :]]
                places[number] = first + free
        rows += [stream if k == 0 else f"{stream} ({k + 1})" for k in range(len(ends))]
    return tuple(rows), places


def _source(schedule: Schedule, instr: Instr) -> str:
    """The user's lines that a step comes from: the first and the last few of a segment's."""
    if not isinstance(instr, Run):
        return getattr(instr, "source", "")
    segment = schedule.segments.get(instr.segment)
    lines = list(dict.fromkeys(op.source for op in segment.ops if op.source)) if segment else []
    return ", ".join(lines if len(lines) <= 4 else [*lines[:2], "...", *lines[-2:]])
