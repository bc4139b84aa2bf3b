"""Values of a pipeline's loop that depend on the batch alone: made again by every rank that needs them, or sent.

Every rank of the pipeline axis holds the batch, so a mask that several stages read is made by each: that is cheaper
than to send it. What takes longer to make than to send (a matrix of distances, a feature made by large products) is
made once, on the stage that needs it first, and goes to the others with the rest that this stage gives them.

The choice is a minimum cut. Every such item is either copied, which costs its work on each further rank that needs it,
or made once; a value that is made once and read by what is copied, or by another stage, costs its bytes for each
further rank:

    source --inf--> v       a stage on another rank reads v
    j --inf--> v            the item j reads v
    v --send(v)--> i        the item i makes v
    i --work(i)--> sink

What the sink can still be reached from, once the flow is at its maximum, is made once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from fparallel.compiler.builder import work_of
from fparallel.compiler.local import Call, Comm, Item, Local
from fparallel.compiler.memory import split
from fparallel.compiler.propagate import FLOPS_PER_BYTE

# A rank reads and writes about 8 bytes of its memory in the time in which it sends one: an H100 does 3350 GB/s in its
# memory, 450 GB/s to its neighbours.
TOUCHED_PER_BYTE = 8.0
# What a value costs beside its bytes: another rank waits for it. Smaller gains are not worth that.
MESSAGE = 4096.0

INFINITE = math.inf


def work(item: Item) -> float:
    """What making an item once more costs, in bytes that could be sent in the same time."""
    if isinstance(item, Comm):
        return float(item.dst.nbytes)
    if isinstance(item, Call):
        return sum(map(work, split(item.block).forward))
    found = work_of(item)
    return 0.0 if found is None else max(found.flops / FLOPS_PER_BYTE, found.nbytes / TOUCHED_PER_BYTE)


@dataclass
class FreeChoice:
    """What was chosen for a value that several ranks read.

    Attributes:
      value: what they read.
      stage: the stage that makes it for all; None if each rank makes it for itself.
      ranks: the pipeline ranks that read it.
      work: of making it and all that leads to it once more, in bytes that could be sent in the same time.
      source: the line that makes it.
    """

    value: Local
    stage: int | None
    ranks: list[int]
    work: float
    source: str

    @property
    def cause(self) -> str:
        """What was chosen and why, in words."""
        of = f"{self.value.nbytes} B, as much work as sending {self.work:.0f} B"
        ranks = ", ".join(map(str, self.ranks))
        if self.stage is None:
            return f"depends on the batch alone: made by each of the pipeline ranks {ranks} ({of})"
        return f"depends on the batch alone: made on stage {self.stage}, sent to the others of {ranks} ({of})"


@dataclass
class _Use:
    """Who reads what an item makes, directly or through other free items: stages, and the ranks of these."""

    stages: set[int] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)


class FreeValues:
    """The items of a loop's body without a stage, and the stages of those that are made once."""

    def __init__(
        self,
        items: Sequence[Item],
        stages: Sequence[int | None],
        place: Sequence[int],
        free: AbstractSet[int],
        forward: AbstractSet[int],
        formals: AbstractSet[Local],
        results: AbstractSet[Local],
    ) -> None:
        """
        Args:
          stages: of the items, None for those without.
          place: the pipeline rank of every stage.
          free, forward: the ids of the items that depend on the batch alone, and of those of the forward.
          formals: what differs between micro-batches of what comes in.
          results: what goes out.
        """
        self.place, self.free, self.results = place, free, results
        self.stage_of = {id(item): stage for item, stage in zip(items, stages, strict=True)}
        self.maker = {out: item for item in items for out in item.outs if out is not None}
        self.readers: dict[Local, list[Item]] = {}
        for item in items:
            for value in item.inputs:
                self.readers.setdefault(value, []).append(item)
        varies = set(formals)
        self.movable: list[Item] = []  # free, and new for every micro-batch
        for item in items:
            if not item.inputs or not varies.isdisjoint(item.inputs):
                varies.update(out for out in item.outs if out is not None)
                if id(item) in free and item.inputs and id(item) in forward:
                    self.movable.append(item)
        self.use: dict[int, _Use] = {}
        for item in reversed(items):
            if self.stage_of[id(item)] is None:
                self.use[id(item)] = self._used(item)

    def _used(self, item: Item) -> _Use:
        use = _Use()
        for out in item.outs:
            if out in self.results:
                use.ranks.update(self.place)
            for reader in () if out is None else self.readers.get(out, ()):
                stage = self.stage_of[id(reader)]
                if stage is not None:
                    use.stages.add(stage)
                    use.ranks.add(self.place[stage])
                else:
                    use.stages |= self.use[id(reader)].stages
                    use.ranks |= self.use[id(reader)].ranks
        return use

    def ranks_of(self, item: Item) -> set[int]:
        """The pipeline ranks that run an item if none is made once."""
        stage = self.stage_of[id(item)]
        return self.use[id(item)].ranks if stage is None else {self.place[stage]}

    def home(self, item: Item) -> int:
        """The pipeline rank of the first stage that reads what an item makes."""
        return self.place[min(self.use[id(item)].stages, default=0)]

    def run(self) -> dict[int, int]:
        """By id of an item that is made once, its stage: the first that reads it."""
        once = self._made_once()
        chosen = {id(item) for item in once}
        group = {id(item): {id(item)} for item in once}
        for item in once:  # what is made once of what is made once stays on its stage
            for value in item.inputs:
                maker = self.maker.get(value)
                if maker is not None and id(maker) in chosen:
                    joined = group[id(item)] | group[id(maker)]
                    group.update(dict.fromkeys(joined, joined))
        first = {key: min(self.use[key].stages, default=0) for key in chosen}
        return {key: min(first[other] for other in group[key]) for key in chosen}

    def _made_once(self) -> list[Item]:
        several = [item for item in self.movable if len(self.use[id(item)].ranks) > 1]
        further = {id(item): len(self.use[id(item)].ranks) - 1 for item in several}
        if sum(work(item) * further[id(item)] for item in several) <= MESSAGE:
            return []
        edges: dict[Any, dict[Any, float]] = {}

        def edge(a: Any, b: Any, capacity: float) -> None:
            edges.setdefault(a, {})[b] = edges.get(a, {}).get(b, 0.0) + capacity
            edges.setdefault(b, {}).setdefault(a, 0.0)

        for item in several:
            edge(item, "sink", work(item) * further[id(item)])
            for out in item.outs:
                if out is None:
                    continue
                edge(out, item, (out.nbytes + MESSAGE) * further[id(item)])
                if out in self.results:
                    edge("source", out, INFINITE)
                for reader in self.readers.get(out, ()):
                    if id(reader) in further:
                        edge(reader, out, INFINITE)
                    elif not self.ranks_of(reader) <= {self.home(item)}:
                        edge("source", out, INFINITE)
        cut = _sink_side(edges)
        return [item for item in several if item in cut]

    def choices(self, once: Mapping[int, int]) -> Iterator[FreeChoice]:
        """What was chosen, by `run`: for every value that is sent, and for every other that several ranks read."""
        for item in self.movable:
            stage, ranks = once.get(id(item)), sorted(self.use[id(item)].ranks)
            for out in item.outs:
                readers = self.readers.get(out, ()) if out is not None else ()
                if stage is None:
                    told = any(self.stage_of[id(reader)] is not None for reader in readers)
                else:
                    told = any(id(r) not in once and self.ranks_of(r) - {self.place[stage]} for r in readers)
                if out is not None and told and len(ranks) > 1:
                    yield FreeChoice(out, stage, ranks, self._work(item, once), item.source)

    def _work(self, item: Item, once: Mapping[int, int]) -> float:
        """The work of an item and of what leads to it; of a copied one, without what is made once."""
        left, seen = [item], {id(item)}
        if id(item) not in once:
            seen.update(once)
        for now in left:
            makers = [self.maker[value] for value in now.inputs if value in self.maker]
            for maker in makers:
                if id(maker) not in seen and id(maker) in self.free:
                    seen.add(id(maker))
                    left.append(maker)
        return sum(map(work, left))


def _sink_side(edges: dict[Any, dict[Any, float]]) -> set[Any]:
    """The nodes on the sink's side of a minimum cut between "source" and "sink".

    By shortest augmenting paths (Edmonds, Karp, "Theoretical improvements in algorithmic efficiency for network flow
    problems", JACM 1972). Changes `edges`, the capacities.
    """
    while path := _path(edges):
        flow = min(edges[a][b] for a, b in path)
        for a, b in path:
            edges[a][b] -= flow
            edges[b][a] += flow
    reaches: dict[Any, None] = {"sink": None}
    left: list[Any] = ["sink"]
    for node in left:
        found = [other for other in edges.get(node, {}) if other not in reaches and edges[other][node] > 0]
        reaches.update(dict.fromkeys(found))
        left += found
    return set(reaches)


def _path(edges: dict[Any, dict[Any, float]]) -> list[tuple[Any, Any]]:
    """A shortest path with capacity from "source" to "sink", from its end; empty if there is none."""
    came: dict[Any, Any] = {"source": None}
    left: list[Any] = ["source"]
    for node in left:
        found = [other for other, room in edges.get(node, {}).items() if room > 0 and other not in came]
        came.update(dict.fromkeys(found, node))
        left += found
    path, at = [], "sink"
    while came.get(at) is not None:
        path.append((came[at], at))
        at = came[at]
    return path
