"""Which orders of a pipeline's tasks there are for a loop, and how long each takes with what the stages cost."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fparallel.schedule.auto import best_rows
from fparallel.schedule.orders import balance, find_order, make_plan
from fparallel.schedule.tasks import Rows, Task, needs, plan_times, times

FASTEST = ("1f1b", "interleaved", "zb_h1", "zb_v")
"""The named orders that can be the fastest. gpipe takes the time of 1f1b and holds more."""


@dataclass(frozen=True)
class Candidate:
    """An order that a loop could run.

    Attributes:
      order: as in `fp.jit(..., pipeline=order)`; "auto" for one that is made for the costs of the loop.
      time: of the step, in the unit of the costs; sending takes no time.
      rows: per rank its tasks, where the order is made for the costs.
      in_flight: the most micro-batches that a rank holds at once, where the order is made for a bound on them.
    """

    order: str
    time: float
    rows: Rows | None = None
    in_flight: int | None = None

    def __str__(self) -> str:
        if self.in_flight is None:
            return self.order
        return (
            f"{self.order} with at most {self.in_flight} micro-batch{'es' * (self.in_flight > 1)} in flight"
        )


def candidates(
    ranks: int, micros: int, costs: Mapping[str, Sequence[float]], *, budgeted: bool
) -> list[Candidate]:
    """The orders that are possible for a loop, the fastest first.

    Args:
      costs: by kind of task ("F", "B", "W") what every level costs, in units of which one is nothing.
      budgeted: whether bytes are bounded. If not, orders of one stage a rank keep no more micro-batches than 1f1b does
        on its first rank. If so, gpipe counts too, and orders for several bounds from one micro-batch up to all.
    """
    found: list[Candidate] = []
    levels = len(costs["F"])
    for name in (*FASTEST, "gpipe") if budgeted else FASTEST:
        order, chunks = find_order(name, ranks)
        if levels < ranks * chunks:
            continue
        cut = balance([sum(costs[kind][i] for kind in "FBW") for i in range(levels)], ranks * chunks)
        cost = _TaskCosts(costs, cut, order.splits)
        plan = make_plan(name, ranks, micros)
        found.append(Candidate(name, max(end for _, end in plan_times(plan, cost).values())))
        if name == "zb_h1":
            found += _made(ranks, micros, cost, _bounds(ranks, micros) if budgeted else [ranks])
    return sorted(found, key=lambda one: one.time)


def _bounds(ranks: int, micros: int) -> list[int]:
    """From one micro-batch up to all, about twice as many each time, with the number of ranks among them."""
    doubled = itertools.takewhile(lambda n: n < micros, (2**i for i in itertools.count()))
    return sorted({*doubled, min(ranks, micros), micros})


def _made(ranks: int, micros: int, cost: _TaskCosts, bounds: Sequence[int]) -> Iterator[Candidate]:
    known: list[Rows] = []
    for bound in bounds:
        rows = best_rows(ranks, micros, cost, in_flight=[bound] * ranks)
        if rows not in known:
            known.append(rows)
            end = max(stop for _, stop in times(rows, lambda task: needs(task, ranks), cost)[0].values())
            yield Candidate("auto", end, rows, bound)


class _TaskCosts:
    """What a task costs, from what its levels do; one more, so that none is free."""

    def __init__(self, costs: Mapping[str, Sequence[float]], cut: Sequence[int], splits: bool) -> None:
        self.costs = {kind: [1.0] * (max(cut) + 1) for kind in "FBW"}
        for kind, values in costs.items():
            for stage, value in zip(cut, values, strict=True):
                self.costs[kind if splits or kind == "F" else "B"][stage] += value

    def __call__(self, task: Task) -> float:
        return self.costs[task.kind][task.stage]
