"""Sums of small values over the pipeline axis, as few all-reduces as the program allows.

What several pipeline ranks hold a part of (a sum of squares), or one of them holds and all need (the loss), is added
up by an all-reduce. Each can be issued from where its last part is made to where its result is first read. Those that
can be issued at one place go as one collective. So that there is one, what reads the result of a join runs after all
that does not, what reads that of a join of such later still, and so on: a training step that clips by the global norm
meets once over the axis, with the loss and the norm, and once more only for what depends on that.

Where one of them is summed over further axes (the loss over the ranks of the batch), the others are summed over these
as well: all but the first rank along them give zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fparallel.compiler.local import Comm, Local, Op, Packed, Step
from fparallel.layout import Layout
from fparallel.mesh import Axis
from fparallel.schedule.segment import IsFirst, LocalShape

if TYPE_CHECKING:
    from fparallel.compiler.pipeline import Placed


@dataclass(eq=False)
class Join:
    """Adds up what the pipeline ranks hold: `parts` by rank; `out` lies on all of them."""

    parts: dict[int, list[Local]]
    partial: Local
    comm: Comm

    @property
    def inputs(self) -> list[Local]:
        return [value for values in self.parts.values() for value in values]

    @property
    def outs(self) -> list[Local]:
        return [self.comm.dst]


@dataclass(eq=False)
class Bundle:
    """Joins that are one all-reduce over `axes`.

    Attributes:
      indices: of the joins among the placed items.
      partials: per join the sum of a rank's parts; pending over all axes.
    """

    joins: list[Join]
    indices: list[int]
    axes: tuple[Axis, ...]
    partials: list[Local]

    def steps(self, rank: int, device: str) -> list[Step]:
        """What a pipeline rank runs: its parts added up, and the all-reduce."""
        ops: list[Step] = []
        comms = []
        for join, partial in zip(self.joins, self.partials, strict=True):
            ops += _added(join, partial, rank, device)
            if partial is not join.partial and join.parts.get(rank):
                missing = tuple(axis for axis in self.axes if axis not in join.comm.axes)
                args = (join.partial, IsFirst(missing))
                source = join.comm.source
                ops.append(Op("local.keep_on_first", args, {}, [partial], source, "U", view=True))
            comms.append(replace(join.comm, src=partial, axes=self.axes))
        return [*ops, Packed(comms) if len(comms) > 1 else comms[0]]


def _added(join: Join, partial: Local, rank: int, device: str) -> list[Step]:
    """Sums up the parts of a rank; without any, it gives zero."""
    parts, source = join.parts.get(rank, []), join.comm.source
    if not parts:
        kwargs: dict[str, Any] = {"dtype": partial.dtype, "device": device}
        shape = LocalShape(Layout(partial.layout.dims))
        return [Op("aten.full.default", (shape, 0), kwargs, [partial], source, "U")]
    if len(parts) == 1:
        return [Op("local.own", (parts[0],), {}, [join.partial], source, "U")]
    ops: list[Step] = []
    total = parts[0]
    for i, part in enumerate(parts[1:]):
        last = i == len(parts) - 2
        made = join.partial if last else Local(total.dtype, total.layout)
        ops.append(Op("aten.add.Tensor", (total, part), {}, [made], source, "U"))
        total = made
    return ops


def by_joins(placed: Sequence[Placed], maker: Mapping[Local, Placed]) -> list[Placed]:
    """The items in another order: what depends on joins as late as the loops allow, in the order of their number.

    ::

        n = join(sum(x))          s = sum(y)
        a = sqrt(n)               n = join(sum(x))
        s = sum(y)                m = join(s)
        m = join(s)               a = sqrt(n)
        return a, m               return a, m
    """
    loops = _loops(placed)
    level: dict[int, int] = {}  # by index, on how many joins, one of the other, an item depends
    for item in placed:
        if item.task is None:
            makers = [maker[value] for value in item.item.inputs if value in maker]
            found = [level.get(one.index, 0) + isinstance(one.item, Join) for one in makers]
            level[item.index] = max(found, default=0)
    latest: dict[int, float] = {}  # by index, the place before which an item is read
    at: dict[int, float] = {}
    for item in reversed(placed):
        here = latest.get(item.index, float(len(placed)))
        at[item.index] = item.index if not level.get(item.index) else here
        if item.task is not None:
            here = loops.get(item.task.loop, item.index)
        elif not level[item.index]:
            here = item.index
        for value in item.item.inputs:
            if value in maker:
                one = maker[value].index
                latest[one] = min(latest.get(one, here), here)

    def place(item: Placed) -> tuple[float, float, int]:
        if not level.get(item.index):
            return item.index, 0.0, item.index
        return at[item.index] - 0.5, level[item.index] + 0.5 * isinstance(item.item, Join), item.index

    return sorted(placed, key=place)


def bundles(placed: Sequence[Placed], maker: Mapping[Local, Placed]) -> dict[int, list[Bundle]]:
    """All joins that are needed, by the index of the item before which they are issued.

    The joins are taken by their latest place; each takes along what can be issued there as well. This gives the
    fewest (points that hit all of a set of intervals). A bundle is issued as soon as all its parts are made.
    """
    left = sorted(_windows(placed, maker), key=lambda window: (window.end, window.index))
    issued: dict[int, int] = {}  # by index of a join
    found: dict[int, list[Bundle]] = {}
    while left:
        first = left[0]
        axes = first.join.comm.axes
        taken: list[_Window] = []
        for window in left:
            if not window.after <= issued.keys():
                continue
            window.begin = max([window.begin, *(issued[index] for index in window.after)])
            union = _union(axes, window.join.comm.axes)
            if window.begin <= first.end and window.like(first) and _fits([*taken, window], union):
                taken.append(window)
                axes = union
        at = max(window.begin for window in taken)
        issued.update((window.index, at) for window in taken)
        joins, indices = [window.join for window in taken], [window.index for window in taken]
        partials = [_pending(join, axes) for join in joins]
        found.setdefault(at, []).append(Bundle(joins, indices, axes, partials))
        left = [window for window in left if window.index not in issued]
    return found


@dataclass(eq=False)
class _Window:
    """Where a join may be issued: before an item from `begin` to `end`, and not before the joins of `after`."""

    join: Join
    index: int
    begin: int
    end: int
    after: set[int]

    def like(self, other: _Window) -> bool:
        """Whether both can be parts of one collective."""
        mine, theirs = self.join.comm, other.join.comm
        return (mine.dst.dtype, mine.reduce, mine.early) == (theirs.dst.dtype, theirs.reduce, theirs.early)


def _windows(placed: Sequence[Placed], maker: Mapping[Local, Placed]) -> Iterable[_Window]:
    loops = _loops(placed)
    read: dict[Local, int] = {}
    for item in placed:
        if item.ranks:
            at = item.index if item.task is None else loops.get(item.task.loop, item.index)
            for value in item.item.inputs:
                read[value] = min(read.get(value, at), at)
    for item in placed:
        join = item.item
        if isinstance(join, Join) and item.ranks:
            makers = [maker[value] for value in join.inputs if value in maker]
            after = {one.index for one in makers if isinstance(one.item, Join)}
            begin = max((one.index + 1 for one in makers), default=0)
            yield _Window(join, item.index, begin, read.get(join.comm.dst, len(placed)), after)


def _loops(placed: Sequence[Placed]) -> dict[int, int]:
    """By loop the index of its first item with a stage: all its tasks run there."""
    loops: dict[int, int] = {}
    for item in placed:
        if item.task is not None and item.task.stage is not None:
            loops.setdefault(item.task.loop, item.index)
    return loops


def _union(first: tuple[Axis, ...], second: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """Both end with the pipeline axis."""
    return (*first[:-1], *(axis for axis in second if axis not in first), first[-1])


def _fits(windows: Sequence[_Window], axes: tuple[Axis, ...]) -> bool:
    """Whether all joins can be summed over the axes: no part of one twice, no value that lies along one."""
    names = [axis.name for axis in axes]
    if len(set(names)) < len(names):
        return False
    return all(_along(window.join).isdisjoint(names) for window in windows)


def _along(join: Join) -> set[str]:
    """The names of the axes that shard the value of a join, or over which it stays pending."""
    layout = join.partial.layout
    pending = [axis for axis, _ in layout.unreduced if axis not in join.comm.axes]
    return {axis.name for axis in (*layout.sharded_axes, *pending)}


def _pending(join: Join, axes: tuple[Axis, ...]) -> Local:
    """The partial sum of a join, pending over `axes`."""
    missing = [axis for axis in axes if axis not in join.comm.axes]
    if not missing:
        return join.partial
    layout = join.partial.layout
    unreduced = [*layout.unreduced, *((axis, "sum") for axis in missing)]
    return Local(join.partial.dtype, Layout.of(layout.dims, unreduced))
