"""The schedule: an explicit list, per role in the mesh, of compute, communication and memory steps.

Semantics. Instructions issue in program order. A `Run` executes in order on the compute stream. A collective, `Send`
or `Recv` executes in issue order on the queue of its communicator (its group of ranks) and is a rendezvous; what it
writes may be read, and what it reads may be freed or overwritten, only after a `Wait` on one of its outputs (for a
`Send`: on one of its inputs). `Free` ends the life of a buffer.

A buffer is written at most once in a program; its name means the same global value in every program.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, TypeGuard

import torch

from fparallel._compat import cached_property
from fparallel.layout import Layout, typed
from fparallel.mesh import Axis, Mesh, merge_axes
from fparallel.schedule.segment import Segment

if TYPE_CHECKING:
    from fparallel.schedule.cluster import Cluster
    from fparallel.schedule.simulate import Simulation

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute")
REDUCING = ("reduce_scatter", "all_reduce")
KINDS = ("argument", "constant", "temp", "result")
TIERS = ("device", "pinned_host", "nvme")


@dataclass(frozen=True)
class Buffer:
    """A named value, one part of it on every rank of a role.

    Attributes:
      kind: "argument", "constant", "temp" or "result" (an output of the step that is not an argument).
      memory: "device", "pinned_host" or "nvme".
    """

    name: str
    dtype: torch.dtype
    layout: Layout
    kind: str = "temp"
    memory: str = "device"

    @cached_property
    def nbytes(self) -> int:
        """Bytes on the fullest rank."""
        return self.layout.max_local_numel * self.dtype.itemsize

    def local_bytes(self, coords: dict[str, int]) -> int:
        numel = 1
        for size in self.layout.local_shape(coords):
            numel *= size
        return numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name}: {typed(self.dtype, self.layout)}"


@dataclass(frozen=True)
class Run:
    """Runs a segment. `inplace` pairs (position in outs, position in ins) share storage: the input dies."""

    segment: str
    ins: tuple[str, ...]
    outs: tuple[str, ...]
    label: str = ""
    inplace: tuple[tuple[int, int], ...] = ()
    cause: str = ""

    op = "run"
    stream = "compute"

    @property
    def reads(self) -> tuple[str, ...]:
        return self.ins

    @property
    def writes(self) -> tuple[str, ...]:
        return self.outs


@dataclass(frozen=True)
class Collective:
    """A collective over mesh (sub-)axes of one or several tensors (a bucket, all of one dtype).

    What happens to each tensor follows from the layouts of its two buffers: an all_gather removes `axes` from the end
    of one factor's axes, a reduce_scatter turns unreduced axes into the last axes of a factor, an all_reduce removes
    unreduced axes, an all_to_all moves axes from the end of one factor to the end of another, a permute exchanges
    whole shards. `reduce` is "sum", "max", "min" or "" (nothing is reduced). `inplace` (an all_reduce only): the
    outputs take over the storage of the inputs, which die. `sources` (a permute only): the shards move and the layout
    stays; the member at position j of the group takes the shard of the member at sources[j], or nothing if that is -1:
    what its output holds is undefined. Without `sources` the members take what the layout of the output says.
    """

    kind: str
    axes: tuple[Axis, ...]
    ins: tuple[str, ...]
    outs: tuple[str, ...]
    reduce: str = ""
    cause: str = ""
    source: str = ""
    inplace: bool = False
    sources: tuple[int, ...] = ()

    @property
    def op(self) -> str:
        return self.kind

    @property
    def stream(self) -> str:
        return "comm:" + "*".join(map(str, self.axes))

    @property
    def reads(self) -> tuple[str, ...]:
        return self.ins

    @property
    def writes(self) -> tuple[str, ...]:
        return self.outs


@dataclass(frozen=True)
class Send:
    """Sends buffers to the rank with coordinate `peer` along `axis` (all other coordinates equal)."""

    axis: Axis
    peer: int
    ins: tuple[str, ...]
    cause: str = ""

    op = "send"

    @property
    def stream(self) -> str:
        return f"p2p:{self.axis}"

    @property
    def reads(self) -> tuple[str, ...]:
        return self.ins

    writes: tuple[str, ...] = field(default=(), init=False, repr=False)


@dataclass(frozen=True)
class Recv:
    """Receives buffers from the rank with coordinate `peer` along `axis`."""

    axis: Axis
    peer: int
    outs: tuple[str, ...]
    cause: str = ""

    op = "recv"

    @property
    def stream(self) -> str:
        return f"p2p:{self.axis}"

    @property
    def writes(self) -> tuple[str, ...]:
        return self.outs

    reads: tuple[str, ...] = field(default=(), init=False, repr=False)


@dataclass(frozen=True)
class Wait:
    """Blocks until every pending step on each of the buffers is done.

    A buffer stands for the collective or `Recv` that writes it, or for the `Send`s that read it. One output of a bucket
    stands for the whole bucket; naming several is the same.
    """

    bufs: tuple[str, ...]
    cause: str = ""

    op = "wait"
    stream = "compute"
    reads: tuple[str, ...] = field(default=(), init=False, repr=False)
    writes: tuple[str, ...] = field(default=(), init=False, repr=False)


@dataclass(frozen=True)
class Free:
    """Ends the life of buffers."""

    bufs: tuple[str, ...]
    cause: str = ""

    op = "free"
    stream = "compute"
    reads: tuple[str, ...] = field(default=(), init=False, repr=False)
    writes: tuple[str, ...] = field(default=(), init=False, repr=False)


Instr = Run | Collective | Send | Recv | Wait | Free


def is_async(instr: Instr) -> TypeGuard[Collective | Send | Recv]:
    """Whether the step is still pending after it has been issued."""
    return isinstance(instr, (Collective, Send, Recv))


def wait_names(instr: Collective | Send | Recv) -> tuple[str, ...]:
    """The buffers of which a `Wait` on any one completes the step."""
    return instr.ins if isinstance(instr, Send) else instr.outs


def overwritten(instr: Instr) -> tuple[str, ...]:
    """The inputs whose storage a step gives to its outputs."""
    if isinstance(instr, Run):
        return tuple(instr.ins[i] for _, i in instr.inplace)
    return instr.ins if isinstance(instr, Collective) and instr.inplace else ()


def communicator(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """Axes in a canonical order and form: equal for two collectives exactly if their groups have the same ranks."""
    return merge_axes(sorted((a for a in axes if a.size > 1), key=lambda a: (a.name, a.pre)))


@dataclass(frozen=True)
class Program:
    """The steps of one role: all ranks whose coordinates include `role` (a pipeline coordinate; () for all ranks).

    Attributes:
      arguments: buffers that are live at the start, in the order of the step's flattened arguments, then constants.
      results: buffers of the step's flattened outputs; live at the end. A result may be an argument passed through.
      donated: arguments that end their life inside the program.
    """

    role: tuple[tuple[str, int], ...]
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    donated: frozenset[str]
    instrs: tuple[Instr, ...]

    def __len__(self) -> int:
        return len(self.instrs)

    @property
    def role_text(self) -> str:
        """`pp=1`, or nothing if all ranks run the program."""
        return " ".join(f"{axis}={at}" for axis, at in self.role)


@dataclass(frozen=True)
class Schedule:
    """A verified-before-run parallel program: see the module docstring for its semantics."""

    mesh: Mesh
    buffers: dict[str, Buffer]
    segments: dict[str, Segment]
    programs: tuple[Program, ...]

    def program(self, rank: int) -> Program:
        """The program of one rank."""
        coords = self.mesh.coords(rank)
        for program in self.programs:
            if all(coords[axis] == at for axis, at in program.role):
                return program
        raise AssertionError(f"no program for rank {rank}")

    def ranks(self, program: Program) -> list[int]:
        """The ranks of a role."""
        role = program.role
        return [r for r, coords in enumerate(self.mesh.rank_coords) if all(coords[a] == at for a, at in role)]

    def first_rank(self, program: Program) -> int:
        """The first rank of a role. It holds the largest part of every buffer (see `layout.piece`)."""
        return self.mesh.rank({**dict.fromkeys(self.mesh.names, 0), **dict(program.role)})

    @cached_property
    def role_axes(self) -> tuple[str, ...]:
        """The axes along which ranks do not all run one program or send to each other."""
        names = {axis for program in self.programs for axis, _ in program.role}
        for program in self.programs:
            names |= {instr.axis.name for instr in program.instrs if isinstance(instr, (Send, Recv))}
        return tuple(name for name in self.mesh.names if name in names)

    def crosses_roles(self, instr: Instr) -> bool:
        """Whether the members of the step's group may run different programs."""
        if isinstance(instr, Collective):
            return any(axis.name in self.role_axes for axis in instr.axes)
        return isinstance(instr, (Send, Recv))

    def collectives(
        self, op: str | None = None, axis: str | None = None, *, rank: int = 0
    ) -> Iterator[Collective]:
        """The collectives of a rank's program, filtered by kind and by the name of a mesh axis that they span."""
        for instr in self.program(rank).instrs:
            if not isinstance(instr, Collective) or op not in (None, instr.kind):
                continue
            if axis is None or any(a.name == axis for a in instr.axes):
                yield instr

    def count(self, op: str | None = None, axis: str | None = None, *, rank: int = 0) -> int:
        """Number of instructions of a kind (`run`, `send`, ...; None: any collective) in the program of a rank."""
        if op is None or op in COLLECTIVES:
            return sum(1 for _ in self.collectives(op, axis, rank=rank))
        return sum(
            1
            for instr in self.program(rank).instrs
            if instr.op == op and (not isinstance(instr, (Send, Recv)) or axis in (None, instr.axis.name))
        )

    def bytes(self, op: str | None = None, axis: str | None = None, *, rank: int = 0) -> int | float:
        """Payload that a rank sends in a step, in bytes, without padding.

        For n ranks in the group and s bytes of the tensor on one rank outside the collective's own sharding:
        all_gather, reduce_scatter and all_to_all s(n-1)/n, all_reduce 2s(n-1)/n, a permute with sources s times the
        share of members that another one takes from; a send s.

        Args:
          op: a kind of collective, or "send"; None for all.
          axis: the name of a mesh axis that they span; None for all.
          rank: whose program it is; where there is a pipeline, ranks differ.
        """
        total = sum((self.payload(instr) for instr in self.collectives(op, axis, rank=rank)), Fraction(0))
        if op in (None, "send"):
            sends = (instr for instr in self.program(rank).instrs if isinstance(instr, Send))
            total += sum(
                (self.payload(instr) for instr in sends if axis in (None, instr.axis.name)), Fraction(0)
            )
        return int(total) if total.denominator == 1 else float(total)

    def payload(self, instr: Collective | Send) -> Fraction:
        """Bytes sent by one rank (the average over its group)."""
        n = 1
        for axis in instr.axes if isinstance(instr, Collective) else ():
            n *= axis.size
        total = Fraction(0)
        outs = instr.outs if isinstance(instr, Collective) else instr.ins
        for src, dst in zip(instr.ins, outs, strict=True):
            whole = self.buffers[dst if instr.op == "all_gather" else src]
            size = Fraction(1)
            for dim in whole.layout.dims:
                for factor in dim:
                    size *= Fraction(factor.size, factor.num_shards)
            size *= whole.dtype.itemsize
            if isinstance(instr, Collective):
                moved = sum(1 for at, source in enumerate(instr.sources) if source not in (-1, at))
                share = Fraction(moved if instr.sources else n - 1, n)
                size = size * share * (2 if instr.kind == "all_reduce" else 1)
            total += size
        return total

    @cached_property
    def text(self) -> str:
        from fparallel.schedule.text import schedule_text

        return schedule_text(self)

    def __str__(self) -> str:
        return self.text

    def draw(self, path: str | os.PathLike[str], cluster: Cluster | None = None) -> None:
        """Draws ranks by time to a file: `.html` to explore, `.png`, `.json` for Perfetto, `.txt`; see draw.py.

        Args:
          path: where to write; its suffix says what.
          cluster: what to simulate on (see `simulate`); None: every run takes one slot, all else no time.
        """
        from fparallel.schedule.draw import draw

        draw(self, path, cluster)

    def table(self, width: int | None = None) -> str:
        """Roles by time slots as text, a cell per stage and micro-batch: `F0 F1 B0 B1`, idle slots as dots.

        `width` is that of the terminal, in columns: a longer table is broken into parts.
        """
        from fparallel.schedule.drawing.table import table

        return table(self, width)

    def verify(self, *, memory_budget: int | None = None) -> None:
        """Raises ScheduleError, naming rank and instruction, unless the schedule is safe to run; see verify.py."""
        from fparallel.schedule.verify import verify

        verify(self, memory_budget=memory_budget)

    def simulate(self, cluster: Cluster) -> Simulation:
        """Predicts the time of a step on a cluster, and where it goes; see simulate.py."""
        from fparallel.schedule.simulate import simulate

        return simulate(self, cluster)
