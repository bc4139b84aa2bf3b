"""Pipeline orders made for given costs: list scheduling (Graham 1966) of F, B and W, one stage a rank.

Several greedy rules play the pipeline in time; the fastest of what they give and of the known orders is taken, so the
result is never slower than a known order that keeps the bound on micro-batches in flight.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from fparallel.errors import ScheduleError
from fparallel.schedule.orders import gpipe, one_f_one_b, register_order, zb_h1
from fparallel.schedule.tasks import KINDS, Cost, Rows, Task, needs, times, unit_cost

ROUNDING = 1e-9  # times that differ by no more, relatively, count as equal
F, B, W = range(3)
Table = list[list[list[float]]]
"""A number for every task: [kind][stage][micro-batch]."""


@dataclass(frozen=True)
class _Rule:
    """How a free rank chooses among the next F, B and W that it could run now.

    Attributes:
      kinds: the most urgent kind first; None if the longest remaining path decides.
      ahead: stage s of p runs at most `ahead` * (p - s) more forwards than backwards; None for any number.
      patient: a task is not begun if a more urgent one, whose needs are running, would have to wait for its end.
    """

    kinds: tuple[int, ...] | None
    ahead: int | None
    patient: bool


RULES = [
    _Rule(kinds, ahead, patient)
    for kinds, ahead, patient in itertools.product(
        ((B, F, W), (F, B, W), (B, W, F), None), (1, 2, None), (False, True)
    )
]


def best_rows(ranks: int, micros: int, cost: Cost, *, in_flight: Sequence[int] | None = None) -> Rows:
    """The fastest order that is found for these costs, if stage s lies on rank s and sending takes no time.

    The known orders 1f1b and gpipe, with W right after B, and zb_h1 are among those compared. Of equally fast ones that
    with the fewest micro-batches in flight is taken.

    Args:
      cost: the time of a task, in any unit: a finite number that is not negative.
      in_flight: per rank, the most micro-batches of which F has run and W has not; None for any number.

    Returns:
      per rank its tasks; every kind of task takes the micro-batches in their order.

    Raises:
      ScheduleError: no order keeps the bound, or the costs are no times.
    """
    bound = [micros] * ranks if in_flight is None else list(in_flight)
    if len(bound) != ranks or any(most < 1 for most in bound):
        raise ScheduleError(
            f"in_flight={bound} for {ranks} ranks and {micros} micro-batches: no order keeps it; the least bound that "
            f"works is {[1] * ranks}, one micro-batch on every rank",
            fix=f"give {ranks} numbers of at least 1",
        )
    costs = [[[cost(Task(kind, s, m)) for m in range(micros)] for s in range(ranks)] for kind in KINDS]
    for kind, stage, micro in itertools.product(range(3), range(ranks), range(micros)):
        time = costs[kind][stage][micro]
        if not (math.isfinite(time) and time >= 0):
            raise ScheduleError(
                f"the cost of {Task(KINDS[kind], stage, micro)} is {time}",
                fix="give a finite time that is not negative",
            )
    if not math.isfinite(sum(time for table in costs for row in table for time in row)):
        raise ScheduleError("the costs add up to infinity", fix="give the costs in a larger unit")
    seeds = [_split(one_f_one_b(ranks, micros, 1)), _split(gpipe(ranks, micros, 1)), zb_h1(ranks, micros, 1)]
    candidates = [
        rows for rows in seeds if all(n <= most for n, most in zip(peaks(rows), bound, strict=True))
    ]
    left = _remaining(costs, ranks, micros)
    for rule in RULES:
        candidates.append(_play(ranks, micros, costs, left, bound, rule))
    ends = [end_time(rows, costs) for rows in candidates]
    fastest = min(ends) * (1 + ROUNDING)
    return min(
        (rows for rows, end in zip(candidates, ends, strict=True) if end <= fastest),
        key=lambda rows: sum(peaks(rows)),
    )


def peaks(rows: Rows) -> list[int]:
    """Per rank, the most micro-batches of which F has run and W has not."""
    result = []
    for row in rows:
        held = itertools.accumulate((task.kind == "F") - (task.kind == "W") for task in row)
        result.append(max(held, default=0))
    return result


def end_time(rows: Rows, costs: Table) -> float:
    done, _ = times(
        rows,
        lambda task: needs(task, len(rows)),
        lambda task: costs[KINDS.index(task.kind)][task.stage][task.micro],
    )
    return max((end for _, end in done.values()), default=0.0)


def _split(rows: Rows) -> Rows:
    """W right after B."""
    return [
        [part for task in row for part in ([task, task._replace(kind="W")] if task.kind == "B" else [task])]
        for row in rows
    ]


def _remaining(costs: Table, ranks: int, micros: int) -> Table:
    """The time of the longest path from the start of every task to the end of the step.

    A path goes to a task that needs this one, or to the same kind of the next micro-batch on the same rank.
    """
    left = [[[0.0] * (micros + 1) for _ in range(ranks)] for _ in KINDS]
    for m in reversed(range(micros)):
        for s in range(ranks):
            left[W][s][m] = costs[W][s][m] + left[W][s][m + 1]
            later = [left[W][s][m], left[B][s][m + 1], left[B][s - 1][m] if s else 0.0]
            left[B][s][m] = costs[B][s][m] + max(later)
        for s in reversed(range(ranks)):
            later = [left[B][s][m], left[F][s][m + 1], left[F][s + 1][m] if s + 1 < ranks else 0.0]
            left[F][s][m] = costs[F][s][m] + max(later)
    return left


def _play(ranks: int, micros: int, costs: Table, left: Table, bound: list[int], rule: _Rule) -> Rows:
    """The rows of a rule: whenever a rank is free and something can run, it chooses.

    It always ends: of the first unfinished micro-batch some task can run, as a rank that has not run its F holds none.
    """
    unknown = math.inf
    ends = [[[unknown] * micros for _ in range(ranks)] for _ in KINDS]
    count = [[0, 0, 0] for _ in range(ranks)]  # how many of each kind a rank has begun
    free = [0.0] * ranks
    rows: Rows = [[] for _ in range(ranks)]
    caps = [micros if rule.ahead is None else rule.ahead * (ranks - s) for s in range(ranks)]

    def ready(kind: int, s: int) -> float:
        """When the next task of a kind can begin; infinite while that is not known."""
        f, b, w = count[s]
        m = count[s][kind]
        if m == micros:
            return unknown
        if kind == F:
            if f - w >= bound[s] or f - b >= caps[s]:
                return unknown
            return ends[F][s - 1][m] if s else 0.0
        if kind == W:
            return ends[B][s][m]
        later = ends[B][s + 1][m] if s + 1 < ranks else 0.0
        return max(ends[F][s][m], later)

    def choose(s: int, now: float) -> int | None:
        kinds: Sequence[int] = rule.kinds or sorted(range(3), key=lambda kind: -left[kind][s][count[s][kind]])
        soon = unknown  # when the first more urgent task can begin
        for kind in kinds:
            at = ready(kind, s)
            if at <= now:
                if rule.patient and now + costs[kind][s][count[s][kind]] > soon:
                    continue
                return kind
            soon = min(soon, at)
        return None

    now, tasks = 0.0, 3 * ranks * micros
    while tasks:
        moved = True
        while moved:  # a task that takes no time may let another rank begin at once
            moved = False
            for s in range(ranks):
                if free[s] > now:
                    continue
                kind = choose(s, now)
                if kind is None:
                    continue
                m = count[s][kind]
                rows[s].append(Task(KINDS[kind], s, m))
                free[s] = ends[kind][s][m] = now + costs[kind][s][m]
                count[s][kind] += 1
                tasks -= 1
                moved = moved or free[s] <= now
        now = min((time for time in free if time > now), default=now)
    return rows


@register_order("auto", splits=True)
def auto(ranks: int, micros: int, chunks: int) -> Rows:
    """The best order for equal costs; under `fp.jit` the best of all for what the step's tasks cost."""
    return best_rows(ranks, micros, unit_cost, in_flight=[ranks] * ranks)
