"""Checks that no ranks wait for each other in a circle."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from fparallel.schedule.ir import Collective, Recv, Send, Wait, wait_names
from fparallel.schedule.rendezvous import Event, Fail, Key, Rank
from fparallel.schedule.text import instr_text


def check_deadlock(ranks: list[Rank], fail: Fail) -> None:
    """Blocking issue is the stronger test: it keeps all of the program order, asynchronous issue a part."""
    stuck = simulate(ranks, blocking=True)
    if not stuck:
        return
    later = simulate(ranks, blocking=False)
    mode = "blocking and asynchronous" if later else "blocking"
    stuck = later or stuck
    circle = _circle(stuck)
    text = ""
    for index in circle:
        event = stuck[index]
        others = " and ".join(_at(ranks[m]) for m in _awaited(stuck, index))
        instr = instr_text(ranks[index].program.instrs[event.number])
        text += f"\n    {_at(ranks[index])} waits at {event.number:04d} {instr} for {others}"
    fail(
        ranks[circle[0]].coords,
        stuck[circle[0]].number,
        f"deadlock under {mode} issue, in a circle:{text}",
        "order the steps alike on all ranks, e.g. receive before sending on every other rank",
    )


def _at(rank: Rank) -> str:
    return "(" + " ".join(f"{axis}={c}" for axis, c in rank.coords.items()) + ")"


def _awaited(stuck: dict[int, Event], index: int) -> list[int]:
    """The members that the rank waits for, at the step that it waits for."""
    event = stuck[index]
    return [m for m in event.members if m != index and m in stuck and stuck[m].key != event.key]


def _circle(stuck: dict[int, Event]) -> list[int]:
    """Ranks of which each waits for the next, and the last for the first."""
    path: list[int] = []
    at = min(stuck)
    while at not in path:
        path.append(at)
        at = next(iter(_awaited(stuck, at)), at)
    return path[path.index(at) :]


def simulate(ranks: list[Rank], *, blocking: bool) -> dict[int, Event]:
    """Runs the steps between classes of ranks; returns, for every rank that is stuck, what it waits for.

    A step is issued to the queue of its communicator, and happens when it heads the queue on all its
    members. With blocking issue a rank goes on only then; else it goes on until it waits for the step.
    """
    lines = [_Line(list(_actions(rank, blocking))) for rank in ranks]
    arrived: dict[Key, int] = {}
    done: set[Key] = set()
    ready = deque(range(len(ranks)))
    while ready:
        line = lines[ready.popleft()]
        while line.at < len(line.actions):
            action = line.actions[line.at]
            if isinstance(action, Event):
                line.queues.setdefault(action.queue, deque()).append(action)
                heads = [action] if len(line.queues[action.queue]) == 1 else []
                while heads:
                    head = heads.pop()
                    arrived[head.key] = arrived.get(head.key, 0) + 1
                    if arrived[head.key] < len(head.members):
                        continue
                    done.add(head.key)  # it happens, and the next steps head the queues of its members
                    ready.extend(head.members)
                    for member in head.members:
                        queue = lines[member].queues[head.queue]
                        queue.popleft()
                        if queue:
                            heads.append(queue[0])
            elif not done.issuperset(event.key for event in action):
                break
            line.at += 1
    stuck = {}
    for index, line in enumerate(lines):
        if line.at < len(line.actions):
            action = line.actions[line.at]
            assert isinstance(action, tuple)
            event = next(event for event in action if event.key not in done)
            stuck[index] = line.queues[event.queue][0]
    return stuck


@dataclass
class _Line:
    """One rank of the simulation: its actions (steps issued, steps waited for), the next one, its queues."""

    actions: list[Event | tuple[Event, ...]]
    at: int = 0
    queues: dict[Key, deque[Event]] = field(default_factory=dict)


def _actions(rank: Rank, blocking: bool) -> Iterator[Event | tuple[Event, ...]]:
    if blocking:
        for event in rank.events:
            yield event
            yield (event,)
        return
    issued = {event.number: event for event in rank.events}
    pending: dict[str, list[Event]] = {}
    for number, instr in enumerate(rank.program.instrs):
        if number in issued:
            assert isinstance(instr, (Collective, Send, Recv))
            for name in wait_names(instr):
                pending.setdefault(name, []).append(issued[number])
            yield issued[number]
        elif isinstance(instr, Wait):
            awaited = tuple(event for name in instr.bufs for event in pending.pop(name, []))
            if awaited:
                yield awaited
