"""The time of a step on a cluster, and where it goes.

Every class of ranks (see rendezvous.py) has a compute stream, on which runs execute in program order, and one queue
per communicator. A step between ranks is ready when it is issued: what stands before it in the program has run. It
starts when it heads its queue on all members and all are ready, and a wait blocks the compute stream until its steps
are done. The streams of NCCL do the same. Ranks of a class do the same at the same time, so one stands for all, and
the cost does not grow with the axes over which all ranks run one program.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from dataclasses import dataclass, field
from typing import NoReturn

from fparallel._compat import cached_property
from fparallel.errors import ScheduleError
from fparallel.schedule import rendezvous
from fparallel.schedule.cluster import Cluster
from fparallel.schedule.costs import collective_seconds, run_seconds, segment_seconds, send_seconds
from fparallel.schedule.ir import TIERS, Collective, Recv, Run, Schedule, Send, Wait, wait_names
from fparallel.schedule.memory import live_bytes
from fparallel.schedule.rendezvous import Key, Rank, classes
from fparallel.schedule.text import bytes_text, instr_text


@dataclass(frozen=True)
class Event:
    """A run, or a collective, send or receive, on one class of ranks.

    Attributes:
      rank: the first rank of the class.
      number: of the instruction in its program.
      stream: "compute", "comm:AXES" or "p2p:AXIS". A rank has one p2p queue per peer, so events on p2p may overlap.
      start, end: seconds from the start of the step.
    """

    rank: int
    number: int
    stream: str
    start: float
    end: float


@dataclass(frozen=True)
class Role:
    """Where the time of a class of ranks goes: compute + exposed + bubble * (time of the step) is all of it.

    Attributes:
      rank: its first rank.
      text: its coordinates, such as "pp=1"; nothing if all ranks are one class.
      ranks: how many it has.
      compute: seconds of runs.
      exposed: seconds that collectives keep the compute stream from working.
      bubble: the fraction of the step that the compute stream idles for other classes: it waits for sends and
        receives, for the others to join a collective, and, at its end, for the end of the step.
      peak: bytes by memory tier, as `lowered.memory()` predicts them.
    """

    rank: int
    text: str
    ranks: int
    compute: float
    exposed: float
    bubble: float
    peak: dict[str, int]


@dataclass(frozen=True)
class Simulation:
    """A step on a cluster. Prints as a table with one row per class of ranks.

    Attributes:
      time: seconds of the step.
      events: what ran, in order of time.
      roles: one row per class of ranks, in order of their first rank.
    """

    cluster: Cluster
    time: float
    events: tuple[Event, ...] = field(repr=False)
    roles: tuple[Role, ...]

    @cached_property
    def exposed(self) -> dict[int, float]:
        """Seconds of exposed communication by the first rank of a role; see `Role`."""
        return {role.rank: role.exposed for role in self.roles}

    @cached_property
    def bubble(self) -> dict[int, float]:
        """The fraction of the step that a role idles for others, by its first rank; see `Role`."""
        return {role.rank: role.bubble for role in self.roles}

    @property
    def bubble_fraction(self) -> float:
        """Of all ranks together."""
        return sum(role.bubble for role in self.roles) / len(self.roles)

    @cached_property
    def peak(self) -> dict[int, dict[str, int]]:
        """Peak bytes by the first rank of a role and memory tier."""
        return {role.rank: role.peak for role in self.roles}

    def __str__(self) -> str:
        tiers = list(self.roles[0].peak)
        table = [["rank", "compute", "exposed", "bubble", *(f"peak {tier}" for tier in tiers)]]
        for role in self.roles:
            rank = f"{role.rank} ({role.text})" if role.text else str(role.rank)
            rank += f" and {role.ranks - 1} more" if role.ranks > 1 else ""
            cells = [seconds_text(role.compute), seconds_text(role.exposed), f"{role.bubble:.1%}"]
            table.append([rank, *cells, *(bytes_text(role.peak[tier]) for tier in tiers)])
        wide = [max(map(len, column)) for column in zip(*table, strict=True)]
        rows = [
            "  ".join(
                [line[0].ljust(wide[0]), *(c.rjust(w) for c, w in zip(line[1:], wide[1:], strict=True))]
            )
            for line in table
        ]
        head = f"{seconds_text(self.time)} a step on {self.cluster.name}, bubble {self.bubble_fraction:.1%}"
        most = max(role.peak["device"] for role in self.roles)
        if most > self.cluster.memory:
            head += (
                f"; does not fit: {bytes_text(most)} in {bytes_text(self.cluster.memory)} of device memory"
            )
        return "\n".join([head, *rows])


def seconds_text(seconds: float) -> str:
    """`4.20 ms`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size * 0.9995:
            return f"{seconds / size:.2f} {unit}"
    return f"{seconds * 1e6:.2f} us"


def simulate(schedule: Schedule, cluster: Cluster) -> Simulation:
    """Predicts a step of a verified schedule.

    Without `cluster.overlap` a step between ranks takes its time from the compute stream of its members, at the latest
    at the wait for it. Where ranks share `cluster.cores`, everything takes as much longer as they are too few for.

    Raises:
      ScheduleError: it cannot end, because a step between ranks never happens.
    """
    engine = _Engine(schedule, cluster)
    engine.go()
    time = max((line.end for line in engine.lines), default=0.0)
    stretch = _stretch(engine, time)
    time *= stretch
    tiers = [t for t in TIERS if t == "device" or any(b.memory == t for b in schedule.buffers.values())]
    roles = []
    for line in engine.lines:
        rank = line.number
        idle = line.bubble * stretch + (time - line.clock * stretch)
        coords = " ".join(f"{axis}={line.rank.coords[axis]}" for axis in schedule.role_axes)
        peak = {tier: _peak(schedule, line.rank, rank, tier) for tier in tiers}
        roles.append(
            Role(
                rank=rank,
                text=coords,
                ranks=schedule.mesh.size // len(engine.lines),
                compute=line.compute * stretch,
                exposed=line.exposed * stretch,
                bubble=idle / time if time else 0.0,
                peak=peak,
            )
        )
    events = sorted(engine.events, key=lambda event: (event.start, event.rank, event.number))
    if stretch > 1:
        events = [dataclasses.replace(e, start=e.start * stretch, end=e.end * stretch) for e in events]
    return Simulation(cluster, time, tuple(events), tuple(roles))


def _stretch(engine: _Engine, time: float) -> float:
    """How much longer a step takes because ranks share cores: these cannot do more than one second each a second."""
    cluster, mesh = engine.cluster, engine.schedule.mesh
    if cluster.cores is None or not time:
        return 1.0
    nodes = math.ceil(mesh.size / cluster.ranks_per_node)
    busy = sum(line.compute + line.exchange for line in engine.lines) * (mesh.size / len(engine.lines))
    return max(1.0, busy / (nodes * cluster.cores) / time)


def _peak(schedule: Schedule, rank: Rank, number: int, tier: str) -> int:
    arguments = [schedule.buffers[name] for name in rank.program.arguments]
    start = sum(buffer.local_bytes(rank.coords) for buffer in arguments if buffer.memory == tier)
    return max([start, *live_bytes(schedule, number, tier)])


@dataclass(frozen=True)
class _Step:
    """A step between ranks that has happened; `ready`: from when on this class could have started."""

    ready: float
    start: float
    end: float
    is_pair: bool


@dataclass
class _Line:
    """One class of ranks: where its program stands, and its compute stream.

    Attributes:
      number: of its first rank.
      clock: the end of what the compute stream has done.
      end: of everything so far.
      queues: steps with other classes that wait for them, each with when it was issued.
      free: when the last step of a queue ended.
      pending: by name what a wait for it waits for.
      owed: what communication still takes from the compute stream.
      exchange: what it takes from it in all.
    """

    rank: Rank
    number: int
    at: int = 0
    clock: float = 0.0
    end: float = 0.0
    compute: float = 0.0
    exposed: float = 0.0
    bubble: float = 0.0
    queues: dict[Key, deque[tuple[rendezvous.Event, float]]] = field(default_factory=dict)
    free: dict[Key, float] = field(default_factory=dict)
    pending: dict[str, list[int]] = field(default_factory=dict)
    steps: dict[int, _Step] = field(default_factory=dict)
    owed: dict[int, float] = field(default_factory=dict)
    exchange: float = 0.0

    def wait(self, awaited: list[int]) -> None:
        """Goes on when these steps are done.

        The wait is for the step that ends last: for others while they have not joined it, and all of it if it is a
        send or a receive.
        """
        last = max((self.steps[number] for number in awaited), key=lambda step: step.end)
        if last.end > self.clock:
            begin = self.clock if last.is_pair else max(self.clock, last.ready)
            stop = last.end if last.is_pair else last.start
            idle = max(0.0, stop - begin)
            self.bubble += idle
            self.exposed += last.end - self.clock - idle
        until = max(last.end, self.clock + sum(self.owed.pop(number, 0.0) for number in awaited))
        self.exposed += until - max(last.end, self.clock)
        self.clock = until


class _Engine:
    """Runs all lines. Each goes on until it waits for a step that some member has not issued.

    Times are sums and maxima of costs along the order of the programs and queues, so the order in which lines are
    looked at does not matter, and no cost that shrinks makes the step longer.
    """

    def __init__(self, schedule: Schedule, cluster: Cluster) -> None:
        self.schedule, self.cluster = schedule, cluster
        self.events: list[Event] = []
        self.segments: dict[str, float] = {}
        self.arrived: dict[Key, int] = {}
        self.lines = [_Line(rank, schedule.mesh.rank(rank.coords)) for rank in classes(schedule, self._fail)]

    def go(self) -> None:
        ready = deque(self.lines)
        while ready:
            line = ready.popleft()
            events = {event.number: event for event in line.rank.events}
            instrs = line.rank.program.instrs
            while line.at < len(instrs):
                instr = instrs[line.at]
                if isinstance(instr, Run):
                    self._run(line, instr)
                elif isinstance(instr, Wait):
                    awaited = [n for name in instr.bufs for n in line.pending.get(name, ())]
                    if not all(number in line.steps for number in awaited):
                        break
                    for name in instr.bufs:
                        line.pending.pop(name, None)
                    if awaited:
                        line.wait(awaited)
                        line.end = max(line.end, line.clock)
                elif isinstance(instr, (Collective, Send, Recv)):
                    for name in wait_names(instr):
                        line.pending.setdefault(name, []).append(line.at)
                    if line.at in events:
                        ready.extend(self._issue(line, events[line.at]))
                    else:
                        assert isinstance(instr, Collective)
                        self._inside(line, instr)
                line.at += 1
        self._check_ended()

    def _run(self, line: _Line, run: Run) -> None:
        if run.segment not in self.segments:
            segment = self.schedule.segments[run.segment]
            self.segments[run.segment] = segment_seconds(segment, self.cluster)
        seconds = run_seconds(self.schedule, run, self.segments[run.segment], self.cluster)
        self.events.append(Event(line.number, line.at, run.stream, line.clock, line.clock + seconds))
        line.compute += seconds
        line.clock += seconds
        line.end = max(line.end, line.clock)

    def _inside(self, line: _Line, instr: Collective) -> None:
        """A collective inside the class: all members are ready when one is."""
        queue: Key = (instr.stream,)
        start = max(line.clock, line.free.get(queue, 0.0))
        seconds = collective_seconds(self.schedule, instr, self.cluster)
        self._happen(line, line.at, queue, start, start, seconds)

    def _issue(self, line: _Line, event: rendezvous.Event) -> list[_Line]:
        """Queues a step with other classes; returns whose steps have happened by that."""
        queue = line.queues.setdefault(event.queue, deque())
        queue.append((event, line.clock))
        heads = [event] if len(queue) == 1 else []
        moved: dict[int, _Line] = {}
        while heads:
            head = heads.pop()
            self.arrived[head.key] = self.arrived.get(head.key, 0) + 1
            if self.arrived[head.key] < len(head.members):
                continue
            members = [self.lines[member] for member in head.members]
            issued = [member.queues[head.queue].popleft() for member in members]
            ready = [
                max(at, member.free.get(head.queue, 0.0))
                for member, (_, at) in zip(members, issued, strict=True)
            ]
            numbers = [own.number for own, _ in issued]
            start, seconds = max(ready), self._seconds(members, numbers)
            for member, number, since in zip(members, numbers, ready, strict=True):
                self._happen(member, number, head.queue, since, start, seconds)
                moved[member.rank.index] = member
                rest = member.queues[head.queue]
                if rest:
                    heads.append(rest[0][0])
        return list(moved.values())

    def _seconds(self, members: list[_Line], numbers: list[int]) -> float:
        """The cost of a step with these members, each of which has it under a number of its own."""
        costs = []
        for line, number in zip(members, numbers, strict=True):
            instr = line.rank.program.instrs[number]
            if isinstance(instr, Collective):
                costs.append(collective_seconds(self.schedule, instr, self.cluster))
            elif isinstance(instr, Send):
                sender, receiver = (member.number for member in members)
                costs.append(send_seconds(self.schedule, instr, sender, receiver, self.cluster))
        return max(costs, default=0.0)

    def _happen(
        self, line: _Line, number: int, queue: Key, ready: float, start: float, seconds: float
    ) -> None:
        instr = line.rank.program.instrs[number]
        end = start + seconds
        line.free[queue] = end
        line.steps[number] = _Step(ready, start, end, isinstance(instr, (Send, Recv)))
        line.end = max(line.end, end)
        if not self.cluster.overlap:
            line.owed[number] = seconds
            line.exchange += seconds
        self.events.append(Event(line.number, number, instr.stream, start, end))

    def _check_ended(self) -> None:
        for line in self.lines:
            waiting = line.at < len(line.rank.program.instrs)
            if waiting:
                self._fail(
                    line.rank.coords,
                    line.at,
                    "the step never ends: what this waits for never happens",
                    "schedule.verify() names the ranks that wait for each other",
                )
            for queue in line.queues.values():
                if queue:
                    self._fail(
                        line.rank.coords,
                        queue[0][0].number,
                        "the step never happens: not all members of its group issue it",
                        "schedule.verify() names what does not match",
                    )

    def _fail(self, coords: dict[str, int], number: int | None, problem: str, fix: str) -> NoReturn:
        at = " ".join(f"{axis}={c}" for axis, c in coords.items())
        rank = self.schedule.mesh.rank(coords)
        where = f"rank {rank} ({at})"
        if number is not None:
            instr = self.schedule.program(rank).instrs[number]
            where += f", instruction {number:04d}  {instr_text(instr)}"
        raise ScheduleError(f"{where}\n  {problem}", fix=fix)
