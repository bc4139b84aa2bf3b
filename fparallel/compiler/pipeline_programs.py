"""The program of every pipeline rank: its tasks, what it makes for them, what it sends and receives, in one order.

Sends and receives stand in one order that all ranks agree on: that in which what is sent gets ready when the order of
the pipeline is played with the tasks' own costs. So no two ranks wait for each other, however sends are carried out.
What other ranks wait for leaves as soon as it is made: the gradient for the stage before, ahead of the weight gradients
of the same task.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fparallel.compiler.local import At, Call, Comm, Item, Local, Op, Role, Roles, Step, Transfer
from fparallel.compiler.pipeline import Join, Placed, Sent
from fparallel.errors import ScheduleError
from fparallel.schedule.tasks import Task, times

if TYPE_CHECKING:
    from fparallel.compiler.pipeline import Projection

Key = tuple[float, int, int, int]


def programs(projection: Projection) -> Roles:
    """The program of every pipeline rank."""
    pipeline = projection.pipeline
    loops = [_Loop(projection, number) for number in range(len(pipeline.plans))]
    loops = sorted((loop for loop in loops if loop.tasks), key=lambda loop: loop.first)
    roles = []
    for rank in sorted(projection.all):
        held = [rank in projection.at[local] for local in projection.arguments]
        given = [home in (None, rank) for home in projection.out_homes]
        at = ((pipeline.axis.name, rank),)
        roles.append(Role(at, _Emitter(projection, rank, loops).items, held, given))
    return Roles(roles, projection.results)


class _Loop:
    """The tasks of a loop, with their costs and times."""

    def __init__(self, projection: Projection, number: int) -> None:
        self.plan = projection.pipeline.plans[number]
        self.tasks: dict[Task, list[Placed]] = {}
        for placed in projection.placed:
            at = placed.task
            if placed.ranks and at is not None and at.loop == number and at.stage is not None:
                self.tasks.setdefault(Task(at.kind, at.stage, at.micro), []).append(placed)
        if not self.tasks:
            return
        self.first = min(placed.index for items in self.tasks.values() for placed in items)
        task_of = {id(placed): task for task, items in self.tasks.items() for placed in items}
        need: dict[Task, set[Task]] = {}
        costs: dict[Task, float] = {}
        for task, items in self.tasks.items():
            makers = _makers(projection, items)
            need[task] = {task_of[id(maker)] for maker in makers if id(maker) in task_of} - {task}
            costs[task] = sum(projection.pipeline.cost(p.item) for p in items if not isinstance(p.item, Join))
        least = max(costs.values()) * 1e-6 + 1.0
        done, at_most = times(
            self.plan.rows, lambda task: need.get(task, ()), lambda task: costs.get(task, 0.0) + least
        )
        for rank, row in enumerate(self.plan.rows):
            if at_most[rank] < len(row):
                task = row[at_most[rank]]
                missing = ", ".join(str(other) for other in need[task] if other not in done)
                raise ScheduleError(
                    f"the order {self.plan.name} runs {task} before {missing}, whose results it reads",
                    fix="run the backwards of a stage after its forwards, later stages first",
                )
        self.times = done
        self.sent: dict[Task, list[tuple[Key, Sent]]] = {}
        self.indices: set[int] = set()
        self._pack(projection, task_of)

    def _pack(self, projection: Projection, task_of: Mapping[int, Task]) -> None:
        """What a task gives to one rank goes together, when the last of it is made."""
        packed: dict[Task, dict[int, Sent]] = {}
        for index, sends in projection.sent.items():
            task = task_of.get(id(projection.placed[index])) if index >= 0 else None
            if task is None:
                continue
            self.indices.add(index)
            for sent in sends:
                known = packed.setdefault(task, {}).setdefault(
                    sent.target, Sent(sent.source, sent.target, task=task)
                )
                known.values.extend(sent.values)
        for task, by_target in packed.items():
            self.tasks[task] = items = weights_last(self.tasks[task])
            ready = self._ready(projection, task, items)
            for target, sent in by_target.items():
                last = max(items.index(projection.maker[value]) for value in sent.values)
                self.sent.setdefault(task, []).append(((ready[last], 0, items[last].index, target), sent))

    def _ready(self, projection: Projection, task: Task, items: Sequence[Placed]) -> list[float]:
        """When each of a task's items has run: after the start of the task, and by its end."""
        start, end = self.times[task]
        costs = [0 if isinstance(p.item, Join) else projection.pipeline.cost(p.item) + 1 for p in items]
        total = sum(costs) or 1
        least, rate = math.nextafter(start, math.inf), (end - start) / total
        return [min(max(least, start + rate * done), end) for done in itertools.accumulate(costs)]

    def events(self, rank: int) -> list[Task | Sent]:
        """The tasks of a rank and what it sends and receives, in an order that all ranks share."""
        events: list[tuple[Key, Task | Sent]] = [
            ((self.times[task][0], 1, 0, 0), task) for task in self.plan.rows[rank] if task in self.tasks
        ]
        for pairs in self.sent.values():
            events += [pair for pair in pairs if rank in (pair[1].source, pair[1].target)]
        return [event for _, event in sorted(events, key=lambda event: event[0])]


class _Emitter:
    """Writes the program of one pipeline rank."""

    def __init__(self, projection: Projection, rank: int, loops: Sequence[_Loop]) -> None:
        self.projection, self.rank = projection, rank
        self.axis = projection.pipeline.axis
        self.items: list[Step] = []
        self.emitted: set[int] = set()
        self.in_loops = {index for loop in loops for index in loop.indices}
        position = -1
        for loop in loops:
            self._outside(position, loop.first)
            position = loop.first
            for task, sends in _by_task(loop.events(rank), rank):
                if task is None:
                    for sent in sends:
                        self._transfer(sent)
                else:
                    self._task(loop.tasks[task], sends)
        self._outside(position, len(projection.placed))
        for value, home in zip(projection.results, projection.out_homes, strict=True):
            maker = projection.maker.get(value)
            if maker is not None and home in (None, rank):
                self._emit(maker, None)

    def _task(self, items: Sequence[Placed], transfers: Sequence[Sent]) -> None:
        """A task; what other ranks wait for leaves as soon as it is made, in the order of `transfers`."""
        left = list(transfers)

        def transfer(task: At | None) -> None:
            while left and (left[0].target == self.rank or self._is_made(left[0])):
                self._transfer(left.pop(0), task)

        transfer(None)
        for placed in items:
            self._emit(placed, placed.task)
            transfer(placed.task)

    def _is_made(self, sent: Sent) -> bool:
        return all(self.projection.maker[value].index in self.emitted for value in sent.values)

    def _outside(self, begin: int, end: int) -> None:
        """What stands between loops, in the program's order."""
        for index in range(begin, end):
            self._join(index)
            if index >= 0:
                placed = self.projection.placed[index]
                item = placed.item
                outside = placed.task is None or (isinstance(item, Comm) and item.early)
                if outside and not isinstance(item, Join):
                    self._emit(placed, None)
            if index not in self.in_loops:
                for sent in self.projection.sent.get(index, ()):
                    self._transfer(sent)
        self._join(end)

    def _join(self, index: int) -> None:
        """Issues the bundles of joins that stand before an item."""
        for bundle in self.projection.bundles.get(index, ()):
            if self.emitted.issuperset(bundle.indices):
                continue
            self.emitted.update(bundle.indices)
            for value in (value for join in bundle.joins for value in join.parts.get(self.rank, ())):
                maker = self.projection.maker.get(value)
                if maker is not None and _floats(maker):
                    self._emit(maker, None)
            self.items += bundle.steps(self.rank, self.projection.mesh.device)

    def _transfer(self, sent: Sent, task: At | None = None) -> None:
        if sent.source == self.rank:
            for value in sent.values:
                maker = self.projection.maker.get(value)
                if maker is not None:
                    self._emit(maker, None)
            self.items.append(Transfer("send", self.axis, sent.target, sent.values, sent.cause, task=task))
        elif sent.target == self.rank:
            self.items.append(Transfer("recv", self.axis, sent.source, sent.values, sent.cause))

    def _emit(self, placed: Placed, task: At | None) -> None:
        """An item, and before it what every stage makes for itself, if it is not there yet."""
        left = [(placed, False)]
        while left:
            now, ready = left.pop()
            if now.index in self.emitted or self.rank not in now.ranks:
                continue
            if not ready:
                left.append((now, True))
                makers = [self.projection.maker.get(value) for value in now.item.inputs]
                left += [(maker, False) for maker in reversed(makers) if maker is not None and _floats(maker)]
                continue
            self.emitted.add(now.index)
            item = now.item
            assert not isinstance(item, Join), "a join is issued with its bundle"
            self.items.append(_in_task(item, task) if _floats(now) else item)


def weights_last(items: Sequence[Placed]) -> list[Placed]:
    """The items of a task, those halves of block backwards last that no other block waits for, and what reads them."""
    late: set[Local] = set()
    first: list[Placed] = []
    second: list[Placed] = []
    for placed in items:
        item = placed.item
        waits = (isinstance(item, Call) and item.half == "W") or any(value in late for value in item.inputs)
        (second if waits else first).append(placed)
        if waits:
            late.update(out for out in item.outs if out is not None)
    return first + second


def _by_task(events: Sequence[Task | Sent], rank: int) -> Iterator[tuple[Task | None, list[Sent]]]:
    """A rank's tasks, each with the transfers up to the last that the task itself sends; the others between them."""
    sends: list[Sent] = []
    task: Task | None = None
    for event in [*events, None]:
        if isinstance(event, Sent):
            sends.append(event)
            continue
        own = 1 + max((i for i, sent in enumerate(sends) if sent.source == rank), default=-1)
        cut = own if task is not None else 0
        if task is not None:
            yield task, sends[:cut]
        if sends[cut:]:
            yield None, sends[cut:]
        task, sends = event, []


def _in_task(item: Item, task: At | None) -> Item:
    """What every stage makes for itself, as a part of the task that needs it first."""
    if task is None or not isinstance(item, Op):
        return replace(item, task=task)
    return replace(item, task=task, phase="F" if task.kind == "F" else "B")


def _makers(projection: Projection, items: Sequence[Placed]) -> list[Placed]:
    """What makes the values that items read, also through what every stage makes for itself."""
    left = [value for placed in items for value in placed.item.inputs]
    found: dict[int, Placed] = {}
    for value in left:
        maker = projection.maker.get(value)
        if maker is not None and maker.index not in found:
            found[maker.index] = maker
            if _floats(maker):
                left.extend(maker.item.inputs)
    return list(found.values())


def _floats(placed: Placed) -> bool:
    """Whether every stage that needs an item runs it, when it needs it."""
    return placed.task is not None and placed.task.stage is None
