"""One collective in place of several."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field

from fparallel.schedule.ir import Collective, Free, Instr, Program, Run, Schedule, overwritten
from fparallel.schedule.passes.placement import apply_moves, place_frees

PARTS = 8  # a step's collectives of one kind should make about so many buckets
LEAST_DELAYED = 1e6  # bytes: below it, what a collective costs whatever its size weighs more than a delay


def bucket(schedule: Schedule, max_bytes: float = 25e6) -> Schedule:
    """Merges collectives of one kind, axes, reduction and dtype into one of at most `max_bytes`.

    An earlier collective is delayed to the place of a later one if nothing in between reads its outputs or
    overwrites its inputs. A bucket that holds an eighth of all that collectives of its kind move (but at least
    1 MB) is delayed past no run: it goes out as soon as it can, so that little is left to move after the last
    run that it could overlap with, and little memory is needed in which sums arrive. Gathers of arguments
    (parameters at rest) are delayed past no run either: they merge if the same run needs them. A collective
    that is larger than `max_bytes` by itself stays alone. The size is that of the whole tensors on a rank,
    outside of the collective's own sharding. 25 MB is the default of torch's DistributedDataParallel.

    Before::

        run B2 <b>                (y, w) -> d, g2
        reduce_scatter[dp sum]    g2 -> g2@shard
        run B1 <b>                (d, w) -> e, g1
        reduce_scatter[dp sum]    g1 -> g1@shard
        free                      y, d, e
        wait                      g2@shard, g1@shard
        free                      g2, g1
        run update <u>            (s, g2@shard, g1@shard) -> s'<=s
        free                      g2@shard, g1@shard

    After::

        run B2 <b>                (y, w) -> d, g2
        run B1 <b>                (d, w) -> e, g1
        reduce_scatter[dp sum]    g2, g1 -> g2@shard, g1@shard
        free                      y, d, e
        wait                      g2@shard, g1@shard
        free                      g2, g1
        run update <u>            (s, g2@shard, g1@shard) -> s'<=s
        free                      g2@shard, g1@shard

    Order of steps between roles: kept. A collective whose group spans several programs is left alone,
    because what stands in between may differ from program to program.
    """
    return apply_moves(schedule, functools.partial(merge, max_bytes=max_bytes))


def merge(schedule: Schedule, program: Program, instrs: list[Instr], *, max_bytes: float) -> list[Instr]:
    """The move of `bucket`."""
    kinds = _Kinds(schedule, program)
    enough = kinds.enough(instrs)
    while True:  # a merge may move what kept others apart
        merged = _merge_once(kinds, instrs, max_bytes, enough)
        if merged is instrs:
            return list(map(_shortened, merged))
        instrs = merged


@dataclass(eq=False)
class _Key:
    """What collectives of one bucket have in common, an object for each; `gathers`: they gather arguments."""

    gathers: bool


class _Kinds:
    """The key and the size of every collective that may be merged, by id of the instruction."""

    def __init__(self, schedule: Schedule, program: Program) -> None:
        self.schedule = schedule
        self.arguments = frozenset(program.arguments)
        self.known: dict[object, _Key] = {}
        self.of: dict[int, tuple[_Key, int]] = {}
        self.holds: list[Instr] = []  # so that an id stays its instruction's

    def enough(self, instrs: list[Instr]) -> dict[_Key, float]:
        """Finds all kinds; gives for each the bytes from which a bucket had better go out than wait for more."""
        moved: dict[_Key, float] = {}
        for instr in instrs:
            if isinstance(instr, Collective) and not self.schedule.crosses_roles(instr):
                key, size = self._find(instr)
                moved[key] = moved.get(key, 0) + size
        return {key: max(LEAST_DELAYED, nbytes / PARTS) for key, nbytes in moved.items()}

    def _find(self, instr: Collective) -> tuple[_Key, int]:
        buffers = self.schedule.buffers
        gathers = instr.kind == "all_gather" and self.arguments.issuperset(instr.ins)
        dtype = buffers[instr.ins[0]].dtype
        key = (instr.kind, instr.axes, instr.reduce, instr.sources, dtype, gathers, instr.inplace)
        read = sum([buffers[name].nbytes for name in instr.ins])
        size = read if instr.inplace else max(read, sum([buffers[name].nbytes for name in instr.outs]))
        return self._keep(instr, self.known.setdefault(key, _Key(gathers)), size)

    def join(self, steps: list[Collective]) -> Collective:
        joined = _join(steps)
        self._keep(joined, self.of[id(steps[0])][0], sum(self.of[id(step)][1] for step in steps))
        return joined

    def _keep(self, instr: Collective, key: _Key, size: int) -> tuple[_Key, int]:
        self.holds.append(instr)
        self.of[id(instr)] = key, size
        return key, size


@dataclass
class _Bucket:
    """Members so far, by position; with `enough` bytes it is delayed past no run.

    `frees` are the frees of its inputs since the last member.
    """

    key: _Key
    members: list[int]
    nbytes: float
    enough: float
    frees: list[tuple[int, str]] = field(default_factory=list)


class _Buckets:
    """All buckets of a program; of each key the last one may be open."""

    def __init__(self) -> None:
        self.all: list[_Bucket] = []
        self.open: dict[_Key, _Bucket] = {}
        self.writer: dict[str, _Bucket] = {}
        self.readers: dict[str, list[_Bucket]] = {}
        self.late: list[tuple[int, str]] = []  # frees that stand before the bucket that reads the buffer

    def close(self, bucket: _Bucket | None) -> None:
        if bucket is not None and self.open.get(bucket.key) is bucket:
            del self.open[bucket.key]

    def see(self, i: int, instr: Instr) -> None:
        """Closes what cannot, or should not, be delayed past an instruction."""
        names = instr.bufs if isinstance(instr, Free) else instr.reads
        if not self.writer.keys().isdisjoint(names):
            for name in names:
                self.close(self.writer.get(name))
        if isinstance(instr, Free):
            for name in names:
                for group in self.readers.get(name, ()):
                    group.frees.append((i, name))
        if not isinstance(instr, Run):
            return
        for name in overwritten(instr):
            for group in self.readers.get(name, ()):
                self.close(group)
        for group in [g for g in self.open.values() if g.key.gathers or g.nbytes >= g.enough]:
            self.close(group)

    def add(self, i: int, instr: Collective, key: _Key, size: int, enough: float, max_bytes: float) -> None:
        group = self.open.get(key)
        if group is None or group.nbytes + size > max_bytes:
            group = self.open[key] = _Bucket(key, [], 0, enough)
            self.all.append(group)
        self.late += group.frees
        group.frees.clear()
        group.members.append(i)
        group.nbytes += size
        for name in instr.ins:
            self.readers.setdefault(name, []).append(group)
        self.writer.update(dict.fromkeys(instr.outs, group))


def _merge_once(
    kinds: _Kinds, instrs: list[Instr], max_bytes: float, enough: dict[_Key, float]
) -> list[Instr]:
    buckets = _Buckets()
    for i, instr in enumerate(instrs):
        buckets.see(i, instr)
        found = kinds.of.get(id(instr))
        if found is not None:
            assert isinstance(instr, Collective)
            buckets.add(i, instr, *found, enough[found[0]], max_bytes)
    groups = [group.members for group in buckets.all if len(group.members) > 1]
    return _merged(kinds, instrs, groups, buckets.late) if groups else instrs


def _merged(
    kinds: _Kinds, instrs: list[Instr], buckets: list[list[int]], late: list[tuple[int, str]]
) -> list[Instr]:
    merged: list[Instr | None] = list(instrs)
    for members in buckets:
        for i in members:
            merged[i] = None
        steps = [instr for i in members if isinstance(instr := instrs[i], Collective)]
        merged[members[-1]] = kinds.join(steps)
    moved: dict[int, set[str]] = {}
    for i, name in late:
        moved.setdefault(i, set()).add(name)
    for i, names in moved.items():
        free = merged[i]
        assert isinstance(free, Free)
        merged[i] = dataclasses.replace(free, bufs=tuple(name for name in free.bufs if name not in names))
    kept = [
        instr for instr in merged if instr is not None and not (isinstance(instr, Free) and not instr.bufs)
    ]
    return place_frees(kept, [name for _, name in late]) if late else kept


def _join(steps: list[Collective]) -> Collective:
    causes = dict.fromkeys(cause for step in steps for cause in step.cause.split("; ") if cause)
    return dataclasses.replace(
        steps[0],
        ins=tuple(name for step in steps for name in step.ins),
        outs=tuple(name for step in steps for name in step.outs),
        cause="; ".join(causes),
        source=next((step.source for step in steps if step.source), ""),
    )


def _shortened(instr: Instr) -> Instr:
    """A bucket of many tensors names three causes."""
    if not isinstance(instr, Collective) or len(causes := instr.cause.split("; ")) <= 4:
        return instr
    return dataclasses.replace(instr, cause="; ".join([*causes[:3], f"and {len(causes) - 3} more"]))
