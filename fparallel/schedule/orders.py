"""Pipeline orders: small pure functions from (ranks, micro-batches, chunks) to what each rank runs, in which order.

A model is cut into stages; every rank of the pipeline axis holds one stage or several (chunks). A task is the forward
F or the backward B of one stage for one micro-batch; an order that splits the backward runs its halves B (gradient of
the stage's input) and W (gradients of its weights). Registering one's own::

    @fp.register_order("all forwards first")
    def mine(ranks: int, micros: int, chunks: int) -> list[list[fp.Task]]:
        return [
            [fp.Task("F", rank, m) for m in range(micros)] + [fp.Task("B", rank, m) for m in range(micros)]
            for rank in range(ranks)
        ]
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fparallel.errors import ScheduleError
from fparallel.schedule.tasks import KINDS, Plan, Rows, Task, check, needs

Make = Callable[[int, int, int], Rows]
Place = Callable[[int, int], list[int]]


def round_robin(ranks: int, chunks: int) -> list[int]:
    """The rank of every stage, if stage s lies on rank s modulo the number of ranks."""
    return [stage % ranks for stage in range(ranks * chunks)]


def vee(ranks: int, chunks: int) -> list[int]:
    """The rank of every stage, if the stages go down the ranks and up again: the last lies where the first does."""
    down = list(range(ranks))
    return [rank for chunk in range(chunks) for rank in (down if chunk % 2 == 0 else down[::-1])]


@dataclass(frozen=True)
class Order:
    """A registered order; see `register_order`."""

    name: str
    make: Make
    place: Place
    chunks: int | None
    splits: bool


ORDERS: dict[str, Order] = {}


def register_order(
    name: str, *, place: Place = round_robin, chunks: int | None = 1, splits: bool = False
) -> Callable[[Make], Make]:
    """Registers a function (ranks, micro-batches, chunks) -> per rank its tasks, for `fp.jit(..., pipeline=name)`.

    Args:
      name: for `pipeline=`; one that is there already is replaced.
      place: (ranks, chunks) -> the rank of every stage.
      chunks: the stages that a rank holds; None if any number will do, as in `pipeline="name:3"`.
      splits: whether the order runs B and W instead of whole backwards.
    """

    def register(make: Make) -> Make:
        ORDERS[name] = Order(name, make, place, chunks, splits)
        return make

    return register


def find_order(text: str, ranks: int) -> tuple[Order, int]:
    """The order named by "1f1b" or "interleaved:3", and its chunks (2 if any number will do and none is named).

    Raises:
      ScheduleError: there is no such order, or it cannot have so many chunks.
    """
    name, colon, number = text.partition(":")
    if name not in ORDERS:
        near = difflib.get_close_matches(name, ORDERS, 1)
        raise ScheduleError(
            f"there is no pipeline order {name!r}"
            + (f"; did you mean {near[0]!r}?" if near else ".")
            + f" The orders are {', '.join(ORDERS)}",
            fix="name one of them, or register yours with fp.register_order",
        )
    order = ORDERS[name]
    if colon and not (number.isdigit() and int(number) > 0):
        raise ScheduleError(
            f"pipeline={text!r}: {number!r} is no number of chunks", fix=f'write "{name}:2", say'
        )
    chunks = int(number) if colon else (2 if order.chunks is None else order.chunks)
    if order.chunks is not None and chunks != order.chunks:
        raise ScheduleError(
            f"pipeline={text!r}: the order {name} needs {order.chunks} chunk{'s' * (order.chunks > 1)} a rank, "
            f"{order.chunks * ranks} stages on {ranks} ranks, not {chunks}",
            fix=f'write pipeline="{name}"',
        )
    return order, chunks


def make_plan(text: str, ranks: int, micros: int) -> Plan:
    """The checked tasks of an order."""
    order, chunks = find_order(text, ranks)
    place = order.place(ranks, chunks)
    rows = [[Task(*task) for task in row] for row in order.make(ranks, micros, chunks)]
    plan = Plan(order.name, ranks, micros, chunks, place, rows, order.splits)
    check(plan)
    return plan


# ---------------------------------------------------------------- the orders


@register_order("gpipe")
def gpipe(ranks: int, micros: int, chunks: int) -> Rows:
    """All forwards, then all backwards (Huang et al. 2019)."""
    return [
        [Task("F", rank, m) for m in range(micros)] + [Task("B", rank, m) for m in range(micros)]
        for rank in range(ranks)
    ]


@register_order("1f1b")
def one_f_one_b(ranks: int, micros: int, chunks: int) -> Rows:
    """One forward, one backward (Narayanan et al. 2019): stage s holds at most ranks - s micro-batches."""
    rows = []
    for rank in range(ranks):
        warm = min(ranks - 1 - rank, micros)
        row = [Task("F", rank, m) for m in range(warm)]
        for m in range(micros - warm):
            row += [Task("F", rank, warm + m), Task("B", rank, m)]
        rows.append(row + [Task("B", rank, m) for m in range(micros - warm, micros)])
    return rows


@register_order("interleaved", chunks=None)
def interleaved(ranks: int, micros: int, chunks: int) -> Rows:
    """1F1B over several chunks a rank (Narayanan et al. 2021), in rounds of about as many micro-batches as ranks."""
    rounds = max(1, micros // ranks)
    small, more = divmod(micros, rounds)
    sizes = [small + (i < more) for i in range(rounds)]
    forward: list[tuple[int, int]] = []
    backward: list[tuple[int, int]] = []
    first = 0
    for size in sizes:
        window = range(first, first + size)
        forward += [(c, m) for c in range(chunks) for m in window]
        backward += [(c, m) for c in reversed(range(chunks)) for m in window]
        first += size
    rows = []
    for rank in range(ranks):
        warm = (chunks - 1) * sizes[0] + (2 if chunks > 1 else 1) * (ranks - 1 - rank)
        warm = min(warm, len(forward))
        f = [Task("F", c * ranks + rank, m) for c, m in forward]
        b = [Task("B", c * ranks + rank, m) for c, m in backward]
        row = f[:warm]
        for i in range(len(f) - warm):
            row += [f[warm + i], b[i]]
        rows.append(row + b[len(f) - warm :])
    return rows


@register_order("zb_h1", splits=True)
def zb_h1(ranks: int, micros: int, chunks: int) -> Rows:
    """1F1B whose bubbles are filled with weight gradients, within 1F1B's memory of the first rank (Qi et al. 2023)."""
    counts = [dict.fromkeys(KINDS, 0) for _ in range(ranks)]
    done: set[Task] = set()
    rows: Rows = [[] for _ in range(ranks)]
    while any(count["W"] < micros for count in counts):
        chosen = [
            (rank, task) for rank in range(ranks) if (task := _next(rank, ranks, micros, counts[rank], done))
        ]
        for rank, task in chosen:
            rows[rank].append(task)
            counts[rank][task.kind] += 1
            done.add(task)
    return rows


def _next(rank: int, ranks: int, micros: int, count: dict[str, int], done: set[Task]) -> Task | None:
    """In a slot of time a rank runs what it can: F before B before W, as far as memory allows."""
    for kind in "FBW":
        task = Task(kind, rank, count[kind])
        if task.micro == micros or not done.issuperset(needs(task, ranks)):
            continue
        full = count["F"] - count["B"] >= ranks - rank or count["F"] - count["W"] >= ranks
        if kind == "F" and full:
            continue
        return task
    return None


@register_order("zb_v", place=vee, chunks=2, splits=True)
def zb_v(ranks: int, micros: int, chunks: int) -> Rows:
    """Two chunks in a V, so that the rank of the first stage has the last one too (Qi et al. 2024)."""
    wanted, micros = micros, max(micros, 2 * ranks - 1)
    rows = []
    for rank in range(ranks):
        row: list[Task] = []
        count: dict[tuple[str, int], int] = {}
        down, up = rank, 2 * ranks - 1 - rank

        def run(
            kinds: str, stage: int, row: list[Task] = row, count: dict[tuple[str, int], int] = count
        ) -> None:
            for kind in kinds:
                m = count.get((kind, stage), 0)
                if m < micros:
                    row.append(Task(kind, stage, m))
                    count[kind, stage] = m + 1

        def ran(kind: str, stage: int, count: dict[tuple[str, int], int] = count) -> int:
            return count.get((kind, stage), 0)

        for _ in range(2 * (ranks - rank) - 1):
            run("F", down)
        for _ in range(rank):
            run("F", up)
            run("F", down)
        for _ in range(ranks - rank):
            run("F", up)
            run("BW", up)
        while ran("F", up) < ran("F", down) or ran("F", down) < micros:
            run("F", down)
            run("BW", down)
            run("F", up)
            run("BW", up)
        for _ in range(rank):
            run("B", down)
            run("B", up)
        for _ in range(ranks - rank):
            run("BW", down)
        for stage in (up, down):
            while ran("W", stage) < ran("B", stage):
                run("W", stage)
        rows.append([task for task in row if task.micro < wanted])
    return rows


def balance(costs: Sequence[float], stages: int) -> list[int]:
    """The stage of every layer: contiguous, none empty, the slowest stage as fast as can be.

    Among the cuts with that bottleneck the one of the least sum of squares. Costs [1, 7, 2, 3] over 3 stages have the
    bottleneck 7; five equal layers over 4 stages 2.

    Raises:
      ScheduleError: there are fewer layers than stages.
    """
    if len(costs) < stages:
        raise ScheduleError(
            f"{len(costs)} layer{'s' * (len(costs) != 1)} cannot make {stages} stages",
            fix="use a smaller pipeline axis or fewer chunks, or more layers",
        )
    num = len(costs)
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    # best[k][i]: (bottleneck, sum of squares) of the first i layers over k stages, and where the last stage begins
    best: list[list[tuple[float, float, int]]] = [
        [(float("inf"), 0.0, 0)] * (num + 1) for _ in range(stages + 1)
    ]
    best[0][0] = (0.0, 0.0, 0)
    for k in range(1, stages + 1):
        for i in range(k, num - (stages - k) + 1):
            best[k][i] = min(
                (max(worst, total[i] - total[j]), squares + (total[i] - total[j]) ** 2, j)
                for j in range(k - 1, i)
                for worst, squares, _ in [best[k - 1][j]]
            )
    result = [0] * num
    end = num
    for k in range(stages, 0, -1):
        begin = best[k][end][2]
        result[begin:end] = [k - 1] * (end - begin)
        end = begin
    return result
