"""Meshes: named axes over ranks, and the groups of ranks that they make.

A mesh gives every rank one coordinate per axis, the last axis varying fastest. The mesh (2, 2, 2) over ("dp",
"pp", "tp") therefore has the tp groups (0,1)(2,3)(4,5)(6,7), the pp groups (0,2)(1,3)(4,6)(5,7) and the dp
groups (0,4)(1,5)(2,6)(3,7).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fparallel._compat import cached_property
from fparallel.errors import MeshError, did_you_mean

KINDS = ("job", "simulated", "abstract")


@dataclass(frozen=True)
class Axis:
    """A mesh axis, or a sub-axis: the digit of a coordinate that has `size` values and follows `pre` others.

    A coordinate c of an axis of `total` ranks is read as digits, major first: the sub-axis `tp:(1)2` of a tp
    axis of 4 is the major digit `c // 2`, `tp:(2)2` the minor digit `c % 2`. A whole axis has pre == 1 and
    size == total.
    """

    name: str
    size: int
    pre: int = 1
    total: int = 0

    def __post_init__(self) -> None:
        if not self.total:
            object.__setattr__(self, "total", self.size)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.size, self.pre, self.total))

    def __reduce__(self) -> tuple:
        return Axis, (self.name, self.size, self.pre, self.total)

    @property
    def whole(self) -> bool:
        return self.size == self.total

    def digit(self, coords: Mapping[str, int]) -> int:
        """The coordinate along this (sub-)axis of the rank at `coords`."""
        return (coords[self.name] // (self.total // (self.pre * self.size))) % self.size

    def independent(self, other: Axis) -> bool:
        """Whether both digits can be chosen freely: those of tp:(1)2 and tp:(2)2, not of tp and tp:(2)2."""
        low, high = sorted((self, other), key=lambda axis: axis.pre)
        return self.name != other.name or (low != high and high.pre % (low.pre * low.size) == 0)

    def __str__(self) -> str:
        return self.name if self.whole else f"{self.name}:({self.pre}){self.size}"


def merge_axes(axes: Sequence[Axis]) -> tuple[Axis, ...]:
    """Joins neighbouring digits of one axis, major first: (tp:(1)2, tp:(2)2) is tp."""
    merged: list[Axis] = []
    for axis in axes:
        last = merged[-1] if merged else None
        if last and last.name == axis.name and last.pre * last.size == axis.pre:
            merged[-1] = Axis(last.name, last.size * axis.size, last.pre, last.total)
        else:
            merged.append(axis)
    return tuple(merged)


def axes_text(axes: Sequence[Axis]) -> str:
    """`dp*tp` for several axes, nested in that order."""
    return "*".join(str(axis) for axis in merge_axes(axes))


_AXIS = re.compile(r"^([A-Za-z_]\w*)(?::\((\d+)\)(\d+))?$")


@dataclass(frozen=True)
class Mesh:
    """Named axes over ranks. Made by `make_mesh`."""

    sizes: tuple[int, ...]
    names: tuple[str, ...]
    kind: str = field(default="abstract", compare=False)
    device: str = field(default="cpu", compare=False)

    @property
    def shape(self) -> dict[str, int]:
        return dict(zip(self.names, self.sizes, strict=True))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes)

    def axis(self, text: str) -> Axis:
        """The axis named `tp`, or the sub-axis written `tp:(1)2`."""
        match = _AXIS.match(text)
        name = match.group(1) if match else text
        if match is None or name not in self.names:
            raise MeshError(
                f"the mesh {self} has no axis {text!r}",
                fix=f"use one of its axes; {did_you_mean(name, self.names)}",
            )
        total = self.shape[name]
        if match.group(2) is None:
            return Axis(name, total)
        pre, size = int(match.group(2)), int(match.group(3))
        if pre * size == 0 or total % (pre * size):
            raise MeshError(
                f"{text!r} does not divide the axis {name} of {total} ranks",
                fix=f"write {name}:(PRE)SIZE, with PRE * SIZE a divisor of {total}",
            )
        return Axis(name, size, pre, total)

    def axes(self, text: str) -> tuple[Axis, ...]:
        return tuple(self.axis(part) for part in text.split("*")) if text else ()

    def coords(self, rank: int) -> dict[str, int]:
        """The coordinates of a rank, by axis name."""
        result = {}
        for name, size in zip(reversed(self.names), reversed(self.sizes), strict=True):
            rank, result[name] = divmod(rank, size)
        return {name: result[name] for name in self.names}

    def rank(self, coords: Mapping[str, int]) -> int:
        result = 0
        for name, size in zip(self.names, self.sizes, strict=True):
            result = result * size + coords[name]
        return result

    def group(self, axes: Sequence[Axis], coords: Mapping[str, int]) -> tuple[int, ...]:
        """The ranks that differ from `coords` only along `axes`, by their digits, the last axis fastest."""
        ranks = []
        for digits in itertools.product(*(range(axis.size) for axis in axes)):
            at = dict(coords)
            for axis, digit in zip(axes, digits, strict=True):
                stride = axis.total // (axis.pre * axis.size)
                at[axis.name] += (digit - axis.digit(at)) * stride
            ranks.append(self.rank(at))
        return tuple(ranks)

    def groups(self, axes: str | Iterable[str]) -> list[tuple[int, ...]]:
        """All groups along one axis (or several), each a tuple of ranks."""
        names = [axes] if isinstance(axes, str) else list(axes)
        along = tuple(axis for name in names for axis in self.axes(name))
        return sorted({self.group(along, self.coords(rank)) for rank in range(self.size)})

    @cached_property
    def rank_coords(self) -> tuple[dict[str, int], ...]:
        return tuple(self.coords(rank) for rank in range(self.size))

    def __str__(self) -> str:
        return "(" + ", ".join(f"{n}={s}" for n, s in zip(self.names, self.sizes, strict=True)) + ")"


def check_axes(sizes: Sequence[int], names: Sequence[str]) -> None:
    """Raises MeshError unless sizes and names describe a mesh."""
    if len(sizes) != len(names):
        raise MeshError(
            f"{len(sizes)} sizes {tuple(sizes)} for {len(names)} names {tuple(names)}",
            fix="give one size per name",
        )
    if len(set(names)) != len(names):
        raise MeshError(f"an axis name occurs twice in {tuple(names)}", fix="name every axis differently")
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*", name):
            fix = "use letters, digits and underscores, e.g. 'dp'"
            raise MeshError(f"{name!r} is not an axis name", fix=fix)
    for size, name in zip(sizes, names, strict=True):
        if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
            fix = "use a positive integer (or one -1 in a job's mesh)"
            raise MeshError(f"axis {name} has the size {size!r}", fix=fix)


def resolve_sizes(sizes: Sequence[int], names: Sequence[str], num_ranks: int) -> tuple[int, ...]:
    """Fills in one -1 and checks that the mesh has `num_ranks` ranks."""
    known = math.prod(size for size in sizes if size != -1)
    if list(sizes).count(-1) > 1:
        raise MeshError(f"more than one -1 in {tuple(sizes)}", fix="leave at most one size open")
    if -1 in sizes:
        if num_ranks % known:
            raise MeshError(
                f"{num_ranks} ranks do not divide by {known}, the other axes of {tuple(names)}",
                fix=f"start a multiple of {known} ranks",
            )
        return tuple(num_ranks // known if size == -1 else size for size in sizes)
    if known != num_ranks:
        shape = ", ".join(f"{n}={s}" for n, s in zip(names, sizes, strict=True))
        raise MeshError(
            f"the mesh ({shape}) has {known} ranks, the job has {num_ranks}",
            fix=f"start {known} ranks, change a size, or leave one size -1",
        )
    return tuple(sizes)


def make_mesh(
    sizes: Sequence[int], names: Sequence[str], *, kind: str = "job", device: str | None = None
) -> Mesh:
    """Makes a mesh of named axes.

    Args:
      sizes: ranks along each axis; the last axis varies fastest. In a job's mesh one size may be -1.
      names: one name per axis, e.g. ("dp", "pp", "tp").
      kind: "job" (the ranks of this job, from torchrun's environment; initialises or reuses the process
        group), "simulated" (all ranks inside this process) or "abstract" (plan only, any size).
      device: "cpu" or "cuda"; by default cuda where a job has it, else cpu.

    Raises:
      MeshError: sizes and names disagree, or the mesh does not have as many ranks as the job.
    """
    sizes, names = tuple(sizes), tuple(names)
    if kind not in KINDS:
        raise MeshError(f"there is no mesh kind {kind!r}", fix=f"use one of {', '.join(KINDS)}")
    check_axes(sizes, names)
    if kind == "job":
        from fparallel.runtime.transport.distributed import join_job

        num_ranks, device = join_job(device)
        return Mesh(resolve_sizes(sizes, names, num_ranks), names, kind, device)
    if -1 in sizes:
        raise MeshError(f"a {kind} mesh has no ranks to fill in the -1 of {sizes}", fix="give every size")
    return Mesh(sizes, names, kind, device or "cpu")
