"""When steps happen if every run takes one slot and all else no time: the picture of a schedule by itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

from fparallel.errors import ScheduleError
from fparallel.schedule.ir import Instr, Program, Run, Schedule, Wait, is_async, wait_names
from fparallel.schedule.rendezvous import Event as Meeting
from fparallel.schedule.rendezvous import Key, Rank, classes
from fparallel.schedule.text import instr_text


class Event(Protocol):
    """When a step ran: what `draw` needs of an event of a simulation.

    Attributes:
      rank: the first rank of the role.
      number: of the instruction in the role's program.
      start, end: on one clock for all ranks.
    """

    @property
    def rank(self) -> int: ...
    @property
    def number(self) -> int: ...
    @property
    def stream(self) -> str: ...
    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...


@dataclass(frozen=True)
class SlotEvent:
    """A step in whole slots."""

    rank: int
    number: int
    stream: str
    start: int
    end: int


def one_slot(program: Program, number: int) -> int:
    return 1


def in_slots(schedule: Schedule, cost: Callable[[Program, int], int] = one_slot) -> tuple[SlotEvent, ...]:
    """Every step of every role, on its first rank, with runs of `cost(program, number)` slots and free communication.

    A communication step starts when all members of its group have issued it and the steps before it on the
    queue of its communicator are done; a `Wait` holds the rank until then.

    Raises:
      ScheduleError: ranks wait for each other for ever.
    """
    lines = [_Line(rank, cost) for rank in classes(schedule, _fail)]
    arrived: dict[Key, int] = {}
    ready = deque(range(len(lines)))
    while ready:
        line = lines[ready.popleft()]
        while line.at < len(line.instrs):
            meeting = line.step()
            if line.stuck:
                break
            heads = [meeting] if meeting is not None and len(line.queues[meeting.queue]) == 1 else []
            while heads:
                head = heads.pop()
                arrived[head.key] = arrived.get(head.key, 0) + 1
                if arrived[head.key] == len(head.members):
                    ready.extend(head.members)
                    heads += _meet([lines[member] for member in head.members], head)
    for line in lines:
        if line.at < len(line.instrs):
            raise ScheduleError(
                f"the schedule never ends: a rank waits for ever at {line.at:04d} {instr_text(line.instrs[line.at])}",
                fix="schedule.verify() names the ranks that wait for each other",
            )
    first = {schedule.first_rank(program) for program in schedule.programs}
    events = []
    for line in lines:
        rank = schedule.mesh.rank(line.rank.coords)
        if rank in first:
            events += [SlotEvent(rank, n, line.instrs[n].stream, *line.spans[n]) for n in sorted(line.spans)]
    return tuple(events)


def _fail(coords: dict[str, int], number: int | None, problem: str, fix: str) -> NoReturn:
    at = " ".join(f"{axis}={c}" for axis, c in coords.items())
    where = "" if number is None else f", instruction {number:04d}"
    raise ScheduleError(f"({at}){where}\n  {problem}", fix=fix)


@dataclass
class _Line:
    """One rank on its way through its program.

    Attributes:
      clock: when its compute stream is free.
      spans: (start, end) of the steps that have happened, by number.
      queues: the meetings that it has issued, by queue, each with the clock at its issue.
      last: when the last meeting of a queue was over.
    """

    rank: Rank
    cost: Callable[[Program, int], int]
    at: int = 0
    clock: int = 0
    stuck: bool = False
    spans: dict[int, tuple[int, int]] = field(default_factory=dict)
    pending: dict[str, list[int]] = field(default_factory=dict)
    queues: dict[Key, deque[tuple[Meeting, int]]] = field(default_factory=dict)
    last: dict[Key, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.meetings = {event.number: event for event in self.rank.events}

    @property
    def instrs(self) -> tuple[Instr, ...]:
        return self.rank.program.instrs

    def step(self) -> Meeting | None:
        """One instruction, unless it is a wait for what has not happened; a meeting if it issues one."""
        number, instr = self.at, self.instrs[self.at]
        meeting = self.meetings.get(number)
        start = self.clock
        if isinstance(instr, Run):
            self.clock += self.cost(self.rank.program, number)
        elif isinstance(instr, Wait):
            awaited = [n for name in instr.bufs for n in self.pending.get(name, ())]
            self.stuck = not self.spans.keys() >= set(awaited)
            if self.stuck:
                return None
            self.clock = max([self.clock, *(self.spans[n][1] for n in awaited)])
        elif is_async(instr):
            for name in wait_names(instr):
                self.pending.setdefault(name, []).append(number)
        if meeting is None:
            self.spans[number] = (start, self.clock)
        else:
            self.queues.setdefault(meeting.queue, deque()).append((meeting, self.clock))
        self.at += 1
        return meeting


def _meet(lines: list[_Line], meeting: Meeting) -> list[Meeting]:
    """Lets a meeting happen that heads the queue of all its members; returns what heads their queues then."""
    issued = [line.queues[meeting.queue].popleft() for line in lines]
    when = max(
        max(clock, line.last.get(meeting.queue, 0)) for line, (_, clock) in zip(lines, issued, strict=True)
    )
    heads = []
    for line, (own, _) in zip(lines, issued, strict=True):
        line.spans[own.number] = (when, when)
        line.last[meeting.queue] = when
        if line.queues[meeting.queue]:
            heads.append(line.queues[meeting.queue][0][0])
    return heads
