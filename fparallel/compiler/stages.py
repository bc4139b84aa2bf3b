"""Which stage of a pipeline runs what: levels of a loop's body by dataflow, then a balanced cut into stages.

Every layer of the lists that the rules put on the pipeline axis is a level. What reads a layer's parameters is of its
level; other ops follow their activations: a forward op is of the highest level of what it reads, and one that reads
none but parameters and the batch (an embedding) of the lowest level that reads it; a backward op is of the level of
the forward values that it reads or, without any, of the lowest level of the cotangents that it reads; but what leads
to the gradient of a layer's parameter is not of a lower level than the layer's. What depends on
the batch alone or on parameters alone has no level: each stage that needs it makes it. `stage_boundary` makes levels by
hand. The levels are then cut into stages so that the slowest stage is as fast as can be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from fparallel.compiler.choice import Candidate, candidates
from fparallel.compiler.local import BOUNDARY, Call, Comm, Item, Local, Op
from fparallel.compiler.memory import halve, split
from fparallel.errors import ShardingError
from fparallel.mesh import Axis
from fparallel.schedule.orders import balance, find_order, make_plan
from fparallel.schedule.tasks import Plan

FREE, PARAM, ACTIVATION = "free", "param", "activation"


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

    def flops(self, item: Item) -> int:
        """Of one rank."""
        if isinstance(item, Op):
            return item.flops
        if isinstance(item, Comm):
            return 0
        parts = split(item.block)
        inside = parts.backward if item.backward else parts.forward
        if item.half:
            inside = halve(item.block).first if item.half == "B" else halve(item.block).second
        return sum(self.flops(inner) for inner in inside)

    def choose(self, items: Sequence[Item], micros: int, where: str, param_of: Mapping[Local, Local]) -> None:
        """Turns the order "auto" into the fastest of all orders for what the tasks of this loop cost.

        Nothing changes where an order was chosen before.
        """
        if self.order != "auto" or self.cut is not None or self.chosen is not None:
            return
        self.learn(items)
        levels = _Levels(self, items, where, param_of).run()
        num = 1 + max((level for level in levels if level is not None), default=-1)
        forward = forward_items(items)
        costs = {kind: [0.0] * num for kind in "FBW"}
        for item, level in zip(items, levels, strict=True):
            if level is None:
                continue
            late = (
                sum(map(self.flops, halve(item.block).second))
                if isinstance(item, Call) and item.backward
                else 0
            )
            costs["F" if id(item) in forward else "B"][level] += self.flops(item) - late
            costs["W"][level] += late
        self.candidates = candidates(self.ranks, micros, costs, budgeted=self.budgeted)
        if self.candidates:
            self.chosen = self.candidates[0]
            self.order = self.chosen.order

    def assign(
        self, items: Sequence[Item], micros: int, where: str, param_of: Mapping[Local, Local]
    ) -> list[int | None]:
        """The stage of every item of a loop's body, None for what each stage makes as it needs it.

        A plan for the loop's tasks is appended to `plans`.

        Args:
          param_of: the parameter of every gradient among the results.
        """
        self.learn(items)
        levels = _Levels(self, items, where, param_of).run()
        plan = make_plan(self.order, self.ranks, micros)
        rows = self.chosen.rows if self.chosen is not None else None
        if rows is not None and sum(map(len, rows)) == sum(map(len, plan.rows)):
            plan = dataclasses.replace(plan, rows=rows)
        self.plans.append(plan)
        if not any(level is not None for level in levels):
            return levels
        if self.cut is None:
            self.cut = self._cut(items, levels, where)
        stages = [None if level is None else self.cut[level] for level in levels]
        for item, stage in zip(items, stages, strict=True):
            if stage is not None:
                for root in (root for value in item.inputs for root in self.roots_of(value)):
                    self.homes.setdefault(root, plan.place[stage])
        return stages

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
                costs[level] += self.flops(item)
        if num < stages:
            what = "stage_boundary calls make" if "" in self.offsets else "layers on the axis make"
            raise ShardingError(
                f"{num} level{'s' * (num != 1)} of {what} no {stages} stages ({self.axis.name}={self.ranks}"
                + (f", {chunks} chunks a rank)" if chunks > 1 else ")"),
                fix=f"use a smaller {self.axis.name} axis or fewer chunks, or cut the model into more layers",
                where=where,
            )
        return balance(costs, stages)


class _Levels:
    """Finds the level of every item of a body; see the module docstring."""

    def __init__(
        self, pipeline: Pipeline, items: Sequence[Item], where: str, param_of: Mapping[Local, Local]
    ) -> None:
        self.pipeline, self.items, self.where, self.param_of = pipeline, items, where, param_of
        self.kind: dict[Local, str] = {}
        self.level: dict[int, int] = {}  # of an item, by id
        self.maker: dict[Local, Item] = {out: item for item in items for out in item.outs if out is not None}
        self.anchor: dict[Local, int] = {}  # the level of a layer's parameter, or of what is made of it
        self.boundaries = any(isinstance(item, Op) and item.target == BOUNDARY for item in items)
        self.has_backward = {id(item.saved) for item in items if isinstance(item, Call) and item.backward}
        self.forward_of: dict[int, Item] = {}
        self.least: dict[Local, int] = {}  # the highest layer to whose parameters' gradients a value leads
        self.highest = 0
        self.forward = forward_items(items)

    def run(self) -> list[int | None]:
        if not any(map(self._reads_params, self.items)):
            return [None] * len(self.items)
        if not self.pipeline.offsets:
            self.pipeline.offsets = {"": 0} if self.boundaries else self._offsets()
        if not self.pipeline.offsets:
            self._undeclared()
        for item in self.items:
            self._sort(item)
        for item in self.items:
            if self._is_forward(item) and self._active(item):
                self._forward(item)
        self._lowest_readers()
        self.highest = max(self.level.values(), default=0)  # the backward begins there
        self._highest_gradients()
        for item in self.items:
            if not self._is_forward(item) and self._active(item):
                self._backward(item)
        return [self.level.get(id(item)) if self._active(item) else None for item in self.items]

    def _reads_params(self, item: Item) -> bool:
        return any(value.pinned or value in self.pipeline.layer_of for value in item.inputs)

    def _undeclared(self) -> NoReturn:
        axis = self.pipeline.axis
        raise ShardingError(
            f"the loop reads no layer that lies on the pipeline axis {axis.name}={axis.size}",
            fix=f'annotate the list of blocks, Annotated[list[Block], "layers"], with fp.Rules(layers="{axis.name}"), '
            "or cut with fp.stage_boundary(x)",
            where=self.where,
        )

    def _offsets(self) -> dict[str, int]:
        """The first level of every list of layers, in the order in which the forward reads the lists."""
        offsets: dict[str, int] = {}
        at = 0
        for item in self.items:
            for value in item.inputs:
                layer = self.pipeline.layer_of.get(value)
                if layer is not None and layer[0] not in offsets:
                    offsets[layer[0]] = at
                    at += self.pipeline.lengths[layer[0]]
        return offsets

    # ------------------------------------------------------------ what has a level

    def _kind(self, value: Local) -> str:
        known = self.kind.get(value)
        if known is not None:
            return known
        return PARAM if value.pinned or value in self.pipeline.layer_of else FREE

    def _anchor(self, value: Local) -> int | None:
        layer = self.pipeline.layer_of.get(value)
        if layer is not None and not self.boundaries:
            assert self.pipeline.offsets is not None
            return self.pipeline.offsets.get(layer[0], 0) + layer[1]
        return self.anchor.get(value)

    def _sort(self, item: Item) -> None:
        """Free, of parameters alone, or an activation."""
        kinds = [self._kind(value) for value in item.inputs]
        static = all(value.static or kind == PARAM for value, kind in zip(item.inputs, kinds, strict=True))
        kind = FREE
        if ACTIVATION in kinds or (
            isinstance(item, Call) and (item.backward or id(item.saved) in self.has_backward)
        ):
            kind = ACTIVATION
        elif PARAM in kinds:
            kind = PARAM if static else ACTIVATION
        if isinstance(item, Op) and item.target == BOUNDARY:
            kind = ACTIVATION
        for out in item.outs:
            if out is not None:
                self.kind[out] = kind
        if kind == PARAM:
            anchors = [at for value in item.inputs if (at := self._anchor(value)) is not None]
            for out in item.outs:
                if anchors and out is not None:
                    self.anchor[out] = max(anchors)
        if isinstance(item, Call) and not item.backward:
            self.forward_of[id(item.saved)] = item

    def _active(self, item: Item) -> bool:
        return any(self.kind.get(out) == ACTIVATION for out in item.outs if out is not None)

    def _is_forward(self, item: Item) -> bool:
        return id(item) in self.forward

    def _of(self, values: Iterable[Local], chosen: Callable[[Item], bool]) -> list[int]:
        """The known levels of the activations among values whose makers are chosen."""
        found = []
        for value in values:
            maker = self.maker.get(value)
            if maker is not None and id(maker) in self.level and chosen(maker):
                found.append(self.level[id(maker)])
        return found

    def _anchors(self, item: Item) -> list[int]:
        return [at for value in item.inputs if (at := self._anchor(value)) is not None]

    # ------------------------------------------------------------ levels

    def _forward(self, item: Item) -> None:
        found = self._of(item.inputs, self._is_forward) + self._anchors(item)
        if isinstance(item, Op) and item.target == BOUNDARY:
            self.level[id(item)] = max(found, default=0) + 1
        elif found:
            self.level[id(item)] = max(found)
        elif self.boundaries and any(self.kind.get(v) == ACTIVATION for v in item.inputs):
            self.level[id(item)] = 0

    def _lowest_readers(self) -> None:
        """Forward ops that no level reaches: the lowest level that reads them, the first if none does."""
        lowest: dict[Local, int] = {}
        for item in reversed(self.items):
            if not (self._is_forward(item) and self._active(item)):
                continue
            if id(item) not in self.level:
                readers = [lowest[out] for out in item.outs if out in lowest]
                self.level[id(item)] = min(readers, default=0)
            for value in item.inputs:
                lowest[value] = min(lowest.get(value, self.level[id(item)]), self.level[id(item)])

    def _highest_gradients(self) -> None:
        for grad, param in self.param_of.items():
            at = self._anchor(param)
            if at is not None:
                self.least[grad] = at
        for item in reversed(self.items):
            found = [self.least[out] for out in item.outs if out is not None and out in self.least]
            if found and not self._is_forward(item):
                for value in item.inputs:
                    self.least[value] = max(*found, self.least.get(value, 0))

    def _backward(self, item: Item) -> None:
        cotangents = self._of(item.inputs, lambda maker: not self._is_forward(maker))
        primals = self._of(item.inputs, self._is_forward)
        anchors = self._anchors(item)
        if isinstance(item, Call):
            level = self.level[id(self.forward_of[id(item.saved)])]
        elif primals or anchors:
            level = max(primals + anchors)
        else:
            level = min(cotangents, default=self.highest)
        level = max([level, *(self.least[out] for out in item.outs if out is not None and out in self.least)])
        self.level[id(item)] = min([level, *cotangents])


def forward_items(items: Sequence[Item]) -> set[int]:
    """The ids of the items of the forward, and of those that it depends on (it may itself take gradients)."""
    read: set[Local] = set()
    found: set[int] = set()
    for item in reversed(items):
        backward = item.phase in ("B", "U") or (isinstance(item, Call) and item.backward)
        if not backward or any(out in read for out in item.outs):
            found.add(id(item))
            read.update(item.inputs)
    return found
