"""Which stage of a pipeline runs what: a balanced cut of the levels of a loop's body into stages.

The levels (`levels.py`) are cut into stages so that the slowest stage is as fast as can be. What has no level, because
it depends on parameters alone, is made by each stage that needs it; so is what depends on the batch alone, where that
is cheaper than to send it (`free_values.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fparallel.compiler.builder import work_of
from fparallel.compiler.choice import Candidate, candidates
from fparallel.compiler.free_values import FreeChoice, FreeValues
from fparallel.compiler.levels import Levels, forward_items
from fparallel.compiler.local import Call, Comm, Item, Local, Op
from fparallel.compiler.memory import halve, split
from fparallel.errors import ShardingError
from fparallel.mesh import Axis
from fparallel.schedule.cluster import Cluster
from fparallel.schedule.costs import op_seconds
from fparallel.schedule.orders import balance, find_order, make_plan
from fparallel.schedule.tasks import Plan

FLOPS_PER_MEMORY_BYTE = 16.0
"""What a rank computes while it reads or writes a byte of its memory, where nothing else is known: float32 on an H100
20, on a CPU core 5."""


@dataclass
class Pipeline:
    """The pipeline of one lowering.

    Attributes:
      axis: the mesh axis of the stages.
      order: the name of the order, as in "1f1b" or "interleaved:3".
      layer_of: the list and the index of the layer of a parameter; learnt for what is made of parameters alone.
      levels, cut: by list the level of its first layer, and the stage of each level; None before the first loop.
      given: the pipeline rank of every layer, where arrays that lie somewhere decide it.
      homes: the pipeline rank of a parameter outside of layers, by its Local: where it is read first.
      roots: of what is made of parameters alone, these parameters.
      plans: by number of a loop the plan of its tasks.
      free_choices: what was decided on values that depend on the batch alone and that several ranks read.
      cluster: what the ranks can do, if that is known.
      costs: what computing a direction of a block takes.
      budgeted: whether "auto" looks for orders that hold less too.
      chosen: what "auto" stands for; None until the first loop decides.
      candidates: what it was chosen from, the fastest first.
    """

    axis: Axis
    order: str
    layer_of: dict[Local, tuple[str, int]]
    lengths: dict[str, int]
    given: dict[tuple[str, int], int] | None = None
    offsets: dict[str, int] | None = None
    cut: list[int] | None = None
    homes: dict[Local, int] = field(default_factory=dict)
    roots: dict[Local, frozenset[Local]] = field(default_factory=dict)
    plans: list[Plan] = field(default_factory=list)
    free_choices: list[FreeChoice] = field(default_factory=list)
    cluster: Cluster | None = None
    costs: dict[tuple[int, bool, str], float] = field(default_factory=dict)
    budgeted: bool = False
    chosen: Candidate | None = None
    candidates: list[Candidate] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        return self.axis.size

    def learn(self, items: Iterable[Item]) -> None:
        """Finds the layers, and the parameters, of what is made of parameters alone."""
        for item in items:
            if not item.inputs or not all(value.static for value in item.inputs):
                continue
            known = [self.layer_of[value] for value in item.inputs if value in self.layer_of]
            roots = frozenset[Local]().union(*(self.roots_of(value) for value in item.inputs))
            for out in item.outs:
                if out is not None and roots:
                    self.roots[out] = roots
                    if known:
                        self.layer_of.setdefault(out, known[-1])

    def roots_of(self, value: Local) -> frozenset[Local]:
        return self.roots.get(value) or frozenset([value] if value.pinned else [])

    def cost(self, item: Item) -> float:
        """What computing an item takes a rank: picoseconds on the cluster, else flops.

        A byte counts as `FLOPS_PER_MEMORY_BYTE`. Communication costs nothing, a direction of a block all that is in it.
        """
        if isinstance(item, Comm):
            return 0.0
        if isinstance(item, Op):
            work = work_of(item)
            if work is None:
                return 0.0
            if self.cluster is not None:
                return op_seconds(work, item.target, self.cluster) * 1e12
            return float(max(work.flops, work.nbytes * FLOPS_PER_MEMORY_BYTE))
        key = (id(item.block), item.backward, item.half)
        if key not in self.costs:
            parts = split(item.block)
            inside = parts.backward if item.backward else parts.forward
            if item.half:
                inside = halve(item.block).first if item.half == "B" else halve(item.block).second
            self.costs[key] = sum(map(self.cost, inside))
        return self.costs[key]

    def choose(self, items: Sequence[Item], micros: int, where: str, param_of: Mapping[Local, Local]) -> None:
        """Turns the order "auto" into the fastest of all orders for what the tasks of this loop cost.

        Nothing changes where an order was chosen before.
        """
        if self.order != "auto" or self.cut is not None or self.chosen is not None:
            return
        self.learn(items)
        levels = Levels(self, items, where, param_of).run()
        num = 1 + max((level for level in levels if level is not None), default=-1)
        forward = forward_items(items)
        costs = {kind: [0.0] * num for kind in "FBW"}
        for item, level in zip(items, levels, strict=True):
            if level is None:
                continue
            late = (
                sum(map(self.cost, halve(item.block).second))
                if isinstance(item, Call) and item.backward
                else 0.0
            )
            costs["F" if id(item) in forward else "B"][level] += self.cost(item) - late
            costs["W"][level] += late
        self.candidates = candidates(self.ranks, micros, costs, budgeted=self.budgeted)
        if self.candidates:
            self.chosen = self.candidates[0]
            self.order = self.chosen.order

    def assign(
        self,
        items: Sequence[Item],
        micros: int,
        where: str,
        param_of: Mapping[Local, Local],
        formals: Sequence[Local],
        results: Sequence[Local],
    ) -> list[int | None]:
        """The stage of every item of a loop's body, None for what each stage makes as it needs it.

        A plan for the loop's tasks is appended to `plans`.

        Args:
          param_of: the parameter of every gradient among the results.
          formals: what a micro-batch brings in. results: what goes out.
        """
        self.learn(items)
        found = Levels(self, items, where, param_of)
        levels = found.run()
        plan = make_plan(self.order, self.ranks, micros)
        rows = self.chosen.rows if self.chosen is not None else None
        if rows is not None and sum(map(len, rows)) == sum(map(len, plan.rows)):
            plan = dataclasses.replace(plan, rows=rows)
        self.plans.append(plan)
        if not any(level is not None for level in levels):
            return levels
        kinds = found.free(), found.forward, frozenset(formals), frozenset(results)
        if self.cut is None:
            self.cut = self._cut(items, levels, where)
            once = FreeValues(items, self._staged(levels), plan.place, *kinds).run()
            if once:  # the work of what is made once counts, at the first level of its stage
                at = [
                    self.cut.index(once[id(i)]) if id(i) in once else n
                    for i, n in zip(items, levels, strict=True)
                ]
                self.cut = self._cut(items, at, where)
        stages = self._staged(levels)
        values = FreeValues(items, stages, plan.place, *kinds)
        once = values.run()
        self.free_choices += values.choices(once)
        stages = [once.get(id(item), stage) for item, stage in zip(items, stages, strict=True)]
        for item, stage in zip(items, stages, strict=True):
            if stage is not None:
                for root in (root for value in item.inputs for root in self.roots_of(value)):
                    self.homes.setdefault(root, plan.place[stage])
        return stages

    def _staged(self, levels: Sequence[int | None]) -> list[int | None]:
        assert self.cut is not None
        return [None if level is None else self.cut[level] for level in levels]

    def home(self, local: Local, default: int) -> int:
        """The pipeline rank of a parameter."""
        layer = self.layer_of.get(local)
        if layer is None or self.cut is None or self.offsets is None:
            return self.homes.get(local, default)
        order, chunks = find_order(self.order, self.ranks)
        return order.place(self.ranks, chunks)[self.cut[self.offsets[layer[0]] + layer[1]]]

    def _cut(self, items: Sequence[Item], levels: Sequence[int | None], where: str) -> list[int]:
        _, chunks = find_order(self.order, self.ranks)
        stages = self.ranks * chunks
        assert self.offsets is not None
        num = max((level for level in levels if level is not None), default=-1) + 1
        num = max([num, *(self.offsets[name] + self.lengths[name] for name in self.offsets if name)])
        costs = [0.0] * num
        for item, level in zip(items, levels, strict=True):
            if level is not None:
                costs[level] += self.cost(item)
        if num < stages:
            what = "stage_boundary calls make" if "" in self.offsets else "layers on the axis make"
            raise ShardingError(
                f"{num} level{'s' * (num != 1)} of {what} no {stages} stages ({self.axis.name}={self.ranks}"
                + (f", {chunks} chunks a rank)" if chunks > 1 else ")"),
                fix=f"use a smaller {self.axis.name} axis or fewer chunks, or cut the model into more layers",
                where=where,
            )
        return balance(costs, stages)
