"""From one local program to one per pipeline rank: who holds what, who runs what, and what is sent.

The other mesh axes are one program for all ranks; along the pipeline axis every rank has its own. A value lies on some
of the pipeline ranks. A task's items run on the rank of its stage, any other item wherever all that it reads lies; what
no rank needs is dropped. Where a rank needs a value that it does not hold, the value is sent to it. Small values that
outlive a loop (a loss, a sum of squares) are added up over the axis by an all-reduce instead, in which a rank without a
part takes part with zero, and lie on every rank then.

`pipeline_programs.py` then writes the ranks' programs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fparallel.compiler.joins import Bundle, Join, bundles, by_joins
from fparallel.compiler.local import At, Call, Comm, Item, Local, Op, map_locals
from fparallel.compiler.stages import Pipeline
from fparallel.layout import Layout
from fparallel.mesh import Mesh
from fparallel.schedule.tasks import Task

SMALL = 1024  # elements of a value that is all-reduced over the axis rather than sent

Ranks = frozenset[int]


@dataclass(eq=False)
class Placed:
    """An item, the pipeline ranks that could run it, and those that do."""

    item: Item | Join
    could: Ranks
    index: int
    ranks: Ranks = frozenset()

    @property
    def task(self) -> At | None:
        return None if isinstance(self.item, Join) else self.item.task


@dataclass
class Sent:
    """Values that one pipeline rank sends to another, at the end of a task or between loops."""

    source: int
    target: int
    values: list[Local] = field(default_factory=list)
    task: Task | None = None

    @property
    def cause(self) -> str:
        text = f"pipeline rank {self.source} to {self.target}"
        if self.task is None:
            return text
        return f"{text}, {self.task.kind} stage {self.task.stage} of micro-batch {self.task.micro}"


class Projection:
    """Places the items of a program on the pipeline ranks."""

    def __init__(
        self,
        pipeline: Pipeline,
        mesh: Mesh,
        items: Sequence[Item],
        homes: Mapping[Local, int | None],
        results: Sequence[Local],
        wanted: Sequence[int | str | None],
    ) -> None:
        """`homes`: per argument its pipeline rank, None for all. `wanted`: the same per result, "any" as it comes."""
        self.pipeline, self.mesh = pipeline, mesh
        self.all: Ranks = frozenset(range(pipeline.ranks))
        self.at: dict[Local, Ranks] = {
            local: self.all if home is None else frozenset([home]) for local, home in homes.items()
        }
        self.arguments = list(homes)
        self.homes = homes
        self.runs: dict[int, Ranks] = {}  # of a block's call outside of loops
        self.returning = {id(item.saved) for item in items if isinstance(item, Call) and item.backward}
        self.placed: list[Placed] = []
        self.maker: dict[Local, Placed] = {}
        self.partial: dict[Local, dict[int, list[Local]]] = {}
        self.joined: dict[Local, Local] = {}
        self.flows_to = self._flows_to(items, zip(results, wanted, strict=True))
        for item in items:
            self._place(item)
        self.results = [self._result(local, wish) for local, wish in zip(results, wanted, strict=True)]
        self.out_homes = [
            self._out_home(local, wish) for local, wish in zip(self.results, wanted, strict=True)
        ]
        self.placed = by_joins(self.placed, self.maker)
        for index, placed in enumerate(self.placed):
            placed.index = index
        self.sent: dict[int, list[Sent]] = {}  # by index of the item that makes the values; -1 for arguments
        self._demand()
        self.bundles: dict[int, list[Bundle]] = bundles(self.placed, self.maker)  # before which item they go

    # ------------------------------------------------------------ where items can run

    def _lies(self, local: Local) -> Ranks:
        return self.at.get(local, self.all)

    def _put(self, item: Item | Join, could: Ranks) -> None:
        placed = Placed(item, could, len(self.placed))
        self.placed.append(placed)
        for out in item.outs:
            if out is not None:
                self.at[out] = could
                self.maker[out] = placed

    def _place(self, item: Item) -> None:
        at = item.task
        if at is not None:
            item = _renamed(item, self._whole)
            place = self.pipeline.plans[at.loop].place
            self._put(item, self.all if at.stage is None else frozenset([place[at.stage]]))
            return
        item = _renamed(item, lambda value: self.joined.get(value, value))
        common = self.all.intersection(*map(self._lies, item.inputs))
        if isinstance(item, Op) and item.target == "local.sum_squares":
            whole = _renamed(item, self._whole)
            assert isinstance(whole, Op)
            if not self.all.intersection(*map(self._lies, whole.inputs)):
                self._sum_squares(whole)
                return
        if isinstance(item, Comm) and item.src in self.partial and _sums(item):
            self._join(self.partial[item.src], item)
            return
        if not common and self._adds(item):
            self._add_partial(item)
            return
        item = _renamed(item, self._whole)
        common = self.all.intersection(*map(self._lies, item.inputs)) or self._where_arguments_lie(item)
        if isinstance(item, Call) and id(item.saved) in self.runs:  # a backward runs where its forward did
            common = self.runs[id(item.saved)]
        if not common:
            item = _renamed(item, lambda value: self._everywhere(value) if _is_small(value) else value)
            common = self.all.intersection(*map(self._lies, item.inputs))
        if not common:
            wish = next((self.flows_to[out] for out in item.outs if out in self.flows_to), None)
            if wish is None or not any(wish in self._lies(value) for value in item.inputs):
                held = (value for value in item.inputs if self._lies(value) != self.all)
                wish = min(self._lies(max(held, key=lambda value: value.nbytes)))
            common = frozenset([wish])
        if isinstance(item, Call) and id(item.saved) in self.returning:
            common = self.runs.setdefault(id(item.saved), frozenset([min(common)]))
        self._put(item, common)

    def _where_arguments_lie(self, item: Item) -> Ranks:
        """Where an op that reads layers' parameters runs: what else it reads is sent there."""
        held = [
            self.at[value] for value in item.inputs if value in self.homes and self.homes[value] is not None
        ]
        return frozenset(held[0]).intersection(*held) if held else frozenset()

    def _flows_to(
        self, items: Sequence[Item], wishes: Iterable[tuple[Local, int | str | None]]
    ) -> dict[Local, int]:
        """The rank on which a value outside of loops ends: that of a result, or of an argument read beside it."""
        ends = {local: wish for local, wish in wishes if isinstance(wish, int)}
        for item in reversed(items):
            if item.task is not None:
                continue
            arguments = [v for v in item.inputs if v in self.at and not _is_small(v)]
            found = [ends[out] for out in item.outs if out is not None and out in ends]
            found += [min(self.at[v]) for v in arguments if self.at[v] != self.all]
            if found:
                for value in item.inputs:
                    ends.setdefault(value, found[0])
        return ends

    def _whole(self, value: Local) -> Local:
        """The value itself, not a sum that is spread over the axis."""
        if value in self.joined:
            return self.joined[value]
        return self._everywhere(value) if value in self.partial else value

    def _everywhere(self, value: Local) -> Local:
        """A small value on every rank."""
        if value in self.joined:
            return self.joined[value]
        if value not in self.partial and self._lies(value) == self.all:
            return value
        parts = self.partial.get(value) or {min(self._lies(value)): [value]}
        maker = self.maker.get(value)
        comm = maker.item if maker is not None else None
        if (
            isinstance(comm, Comm) and comm.task is None and _sums(comm)
        ):  # one all-reduce over all axes, not two
            made = Local(value.dtype, value.layout, value.name)
            self._join({min(self._lies(value)): [comm.src]}, replace(comm, dst=made))
            self.joined[value] = made
            return made
        made = Local(value.dtype, value.layout, f"{value.name}@all" if value.name else "")
        cause = f"every {self.pipeline.axis.name} rank reads it"
        self._join(parts, Comm("all_reduce", (), value, made, "sum", cause, "", "U"))
        self.joined[value] = made
        return made

    def _join(self, parts: dict[int, list[Local]], comm: Comm) -> None:
        axis = self.pipeline.axis
        src = comm.src
        partial = Local(src.dtype, Layout.of(src.layout.dims, [*src.layout.unreduced, (axis, "sum")]))
        self._put(Join(parts, partial, replace(comm, src=partial, axes=(*comm.axes, axis))), self.all)

    def _sum_squares(self, op: Op) -> None:
        """Every pipeline rank sums the leaves that it holds; a leaf on several counts on the first."""
        leaves, counted, dtype, device = op.args
        out = op.outs[0]
        assert out is not None
        parts: dict[int, list[Local]] = {}
        for rank in sorted(self.all):
            mine = [i for i, leaf in enumerate(leaves) if min(self._lies(leaf)) == rank]
            if mine:
                part = Local(out.dtype, out.layout)
                args = ([leaves[i] for i in mine], [counted[i] for i in mine], dtype, device)
                flops = sum(2 * leaves[i].layout.max_local_numel for i in mine)
                self._put(replace(op, args=args, outs=[part], flops=flops), frozenset([rank]))
                parts[rank] = [part]
        self.partial[out] = parts

    def _adds(self, item: Item) -> bool:
        """Whether an op adds two small values, wherever they lie."""
        return (
            isinstance(item, Op)
            and item.target == "aten.add.Tensor"
            and len(item.args) == 2
            and not item.kwargs
            and len(item.inputs) == 2
            and all(
                x.layout == item.inputs[0].layout and x.dtype == item.inputs[0].dtype for x in item.inputs
            )
            and all(_is_small(x) for x in item.inputs)
        )

    def _add_partial(self, item: Item) -> None:
        parts: dict[int, list[Local]] = {}
        for value in item.inputs:
            for rank, values in (self.partial.get(value) or {min(self._lies(value)): [value]}).items():
                parts.setdefault(rank, []).extend(values)
        (out,) = item.outs
        assert out is not None
        self.partial[out] = parts

    # ------------------------------------------------------------ results

    def _result(self, local: Local, wish: int | str | None) -> Local:
        local = self._whole(local)
        if wish in (None, "any") and _is_small(local):
            return self._everywhere(local)
        return local

    def _out_home(self, local: Local, wish: int | str | None) -> int | None:
        if wish == "any":
            return None if self._lies(local) == self.all else min(self._lies(local))
        assert not isinstance(wish, str)
        return wish

    # ------------------------------------------------------------ who runs what

    def _demand(self) -> None:
        """From the results back: the ranks that run each item, and what has to be sent."""
        need: dict[Local, set[int]] = {}
        for local, home in zip(self.results, self.out_homes, strict=True):
            need.setdefault(local, set()).update(self.all if home is None else [home])
        for placed in reversed(self.placed):
            item = placed.item
            ranks = set[int]().union(*(need.get(out, ()) for out in item.outs if out is not None))
            if not ranks:
                continue
            if isinstance(item, Join):
                placed.ranks = self.all
                for rank, values in item.parts.items():
                    for value in values:
                        need.setdefault(value, set()).add(rank)
                continue
            inside = ranks & placed.could
            source = min(inside or placed.could)
            for out in item.outs:
                if out is not None:
                    self._send(placed.index, out, source, need.get(out, set()) - placed.could)
            placed.ranks = frozenset(inside | ({source} if ranks - placed.could else set()))
            for value in item.inputs:
                need.setdefault(value, set()).update(placed.ranks)
        for local in self.arguments:
            self._send(-1, local, min(self.at[local]), need.get(local, set()) - self.at[local])

    def _send(self, index: int, value: Local, source: int, targets: set[int]) -> None:
        sends = self.sent.setdefault(index, []) if targets else []
        for target in sorted(targets):
            found = next((s for s in sends if s.target == target and s.source == source), None)
            if found is None:
                found = Sent(source, target)
                sends.append(found)
            found.values.append(value)


def _sums(comm: Comm) -> bool:
    return comm.kind == "all_reduce" and comm.reduce == "sum"


def _is_small(value: Local) -> bool:
    return value.layout.max_local_numel <= SMALL and str(value.dtype) != "torch.bool"


def _renamed(item: Item, rename: Any) -> Item:
    """The item itself, or a copy that reads other values."""
    if all(rename(value) is value for value in item.inputs):
        return item
    if isinstance(item, Comm):
        return replace(item, src=rename(item.src))
    if isinstance(item, Op):
        return replace(item, args=map_locals(rename, item.args), kwargs=map_locals(rename, item.kwargs))
    return replace(item, ins=[rename(value) for value in item.ins])
