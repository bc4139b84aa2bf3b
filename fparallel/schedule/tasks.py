"""The tasks of a pipeline: what each needs, when it runs, whether an order of them is possible."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from fparallel.errors import ScheduleError

KINDS = "FBW"


class Task(NamedTuple):
    """The forward "F", the backward "B" or the weight gradients "W" of a stage for a micro-batch."""

    kind: str
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro}"


Rows = list[list[Task]]
"""Per rank of the pipeline axis its tasks in order."""


@dataclass(frozen=True)
class Plan:
    """An order for given numbers.

    Attributes:
      place: the rank of each stage.
      rows: per rank its tasks.
      splits: whether the backward is split into B and W.
    """

    name: str
    ranks: int
    micros: int
    chunks: int
    place: list[int]
    rows: Rows
    splits: bool

    @property
    def stages(self) -> int:
        return len(self.place)


# ---------------------------------------------------------------- what depends on what, and when


def needs(task: Task, stages: int) -> list[Task]:
    """The tasks that must have ended before one can start, if each stage feeds the next one."""
    kind, stage, micro = task
    if kind == "F":
        return [Task("F", stage - 1, micro)] if stage else []
    if kind == "W":
        return [Task("B", stage, micro)]
    later = [Task("B", stage + 1, micro)] if stage + 1 < stages else []
    return [Task("F", stage, micro), *later]


Cost = Callable[[Task], float]
Needs = Callable[[Task], Iterable[Task]]


def unit_cost(task: Task) -> float:
    return 1.0


def times(
    rows: Rows, need: Needs, cost: Cost = unit_cost
) -> tuple[dict[Task, tuple[float, float]], list[int]]:
    """(start, end) of every task, if every rank runs its tasks in order as soon as their needs have ended.

    Also, per rank, how many of its tasks can start at all: less than it has where tasks wait in a circle.
    """
    done: dict[Task, tuple[float, float]] = {}
    at, clock = [0] * len(rows), [0.0] * len(rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                task = row[at[rank]]
                before = list(need(task))
                if any(other not in done for other in before):
                    break
                start = max([clock[rank], *(done[other][1] for other in before)])
                clock[rank] = start + cost(task)
                done[task] = start, clock[rank]
                at[rank] += 1
                moved = True
    return done, at


def plan_times(plan: Plan, cost: Cost = unit_cost) -> dict[Task, tuple[float, float]]:
    """(start, end) of every task of a checked plan, if sending takes no time."""
    return times(plan.rows, lambda task: needs(task, plan.stages), cost)[0]


def idle_fraction(plan: Plan, cost: Cost = unit_cost) -> float:
    """The part of (ranks x time of the step) in which no rank runs anything."""
    done = plan_times(plan, cost)
    end = max(stop for _, stop in done.values())
    busy = sum(cost(task) for row in plan.rows for task in row)
    return 1 - busy / (end * plan.ranks)


def in_flight(plan: Plan, rank: int) -> int:
    """The most micro-batches, summed over its stages, of which a rank has run F and not yet the last backward task."""
    last = "W" if plan.splits else "B"
    now = most = 0
    for task in plan.rows[rank]:
        now += (task.kind == "F") - (task.kind == last)
        most = max(most, now)
    return most


# ---------------------------------------------------------------- checking


def check(plan: Plan) -> None:
    """Raises ScheduleError unless every task is run once, on the rank of its stage, and in a possible order.

    Micro-batches may come in any order; but the weights' gradients are added up in the order of the tasks.
    """
    kinds = KINDS if plan.splits else "FB"
    wanted = [set[Task]() for _ in range(plan.ranks)]
    for stage, rank in enumerate(plan.place):
        wanted[rank].update(Task(k, stage, m) for k in kinds for m in range(plan.micros))
    if len(plan.rows) != plan.ranks:
        raise ScheduleError(
            f"the order {plan.name} gives {len(plan.rows)} rows for {plan.ranks} ranks",
            fix="give a list of tasks for every rank",
        )
    for rank, row in enumerate(plan.rows):
        seen: set[Task] = set()
        for at, task in enumerate(row):
            if task not in wanted[rank]:
                why = "is no task of this rank"
                if task.kind == "W" and not plan.splits:
                    why = "is a W, but the order is registered without splits=True"
                _refuse(plan, rank, at, f"{task} {why}", "run the tasks of the rank's own stages")
            if task in seen:
                _refuse(plan, rank, at, f"{task} is run twice", "run every task once")
            seen.add(task)
        missing = sorted(wanted[rank] - seen, key=lambda t: (t.micro, KINDS.index(t.kind), t.stage))
        if missing:
            shown = ", ".join(map(str, missing[:6])) + (", ..." if len(missing) > 6 else "")
            _refuse(
                plan,
                rank,
                None,
                f"{shown} {'are' if len(missing) > 1 else 'is'} not run",
                "run every task once",
            )
    done, at_most = times(plan.rows, lambda task: needs(task, plan.stages))
    stuck = [rank for rank, row in enumerate(plan.rows) if at_most[rank] < len(row)]
    if stuck:
        rank = next((r for r in stuck if _own_fault(plan, r, at_most[r], done)), stuck[0])
        task = plan.rows[rank][at_most[rank]]
        waits = [other for other in needs(task, plan.stages) if other not in done]
        _refuse(
            plan,
            rank,
            at_most[rank],
            f"{task} waits for {', '.join(map(str, waits))}, which cannot have run by then",
            "run F before B before W, and let no two ranks wait for each other",
        )


def _own_fault(plan: Plan, rank: int, at: int, done: dict[Task, tuple[float, float]]) -> bool:
    """Whether a task waits for one that stands later in its own row."""
    later = set(plan.rows[rank][at:])
    return any(other in later for other in needs(plan.rows[rank][at], plan.stages) if other not in done)


def _refuse(plan: Plan, rank: int, at: int | None, what: str, fix: str) -> None:
    raise ScheduleError(
        f"the order {plan.name} for {plan.ranks} ranks, {plan.micros} micro-batches and {plan.chunks} "
        f"chunk{'s' * (plan.chunks > 1)} a rank: {what}, rank {rank}\n{grid(plan, (rank, at))}",
        fix=fix,
    )


def grid(plan: Plan, bad: tuple[int, int | None] | None = None) -> str:
    """The tasks of every rank over time, a slot each; idle slots are dots. `bad` (rank, position in its row) is marked.

    What can never start stands at the end of its row.
    """
    done, at_most = times(plan.rows, lambda task: needs(task, plan.stages))
    end = int(max((stop for _, stop in done.values()), default=0))
    lines = []
    for rank, row in enumerate(plan.rows):
        cells = ["."] * end
        for task in row[: at_most[rank]]:
            cells[int(done[task][0])] = str(task)
        cells += [str(task) for task in row[at_most[rank] :]]
        if bad is not None and bad[0] == rank and bad[1] is not None:
            task = row[bad[1]]
            place = int(done[task][0]) if bad[1] < at_most[rank] else end + bad[1] - at_most[rank]
            cells[place] = f">{task}<"
        lines.append(cells)
    wide = max((len(cell) for line in lines for cell in line), default=1)
    mark = bad[0] if bad is not None else None
    return "\n".join(
        f"{'>' if rank == mark else ' '} rank {rank}  " + " ".join(cell.ljust(wide) for cell in line).rstrip()
        for rank, line in enumerate(lines)
    )
