"""Where programs meet: the steps whose group spans several of them.

Ranks that differ only along axes that no role names run one program in lockstep, so one of them stands for
all. The ranks here are those of the mesh over `schedule.role_axes` alone, and the cost does not grow with
the other axes. A collective inside such a class of ranks always finds its partners.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from fparallel.mesh import Axis, Mesh
from fparallel.schedule.ir import Collective, Program, Recv, Schedule, Send, communicator

# (the coordinates of a rank, number of the instruction or None, what is wrong, how to fix it)
Fail = Callable[[dict[str, int], int | None, str, str], NoReturn]
Group = tuple[int, ...]
# Names a rendezvous: ("group", axes, members, position) or ("pair", sender, receiver, position); or a queue.
Key = tuple[object, ...]


@dataclass(frozen=True)
class Event:
    """A step between classes of ranks: its instruction, rendezvous, queue and members."""

    number: int
    key: Key
    queue: Key
    members: Group


@dataclass
class Rank:
    """A class of ranks, its program, and its steps with ranks of other classes."""

    index: int
    coords: dict[str, int]
    program: Program
    events: list[Event] = field(default_factory=list)

    def collective(self, number: int | None) -> Collective | None:
        instr = self.program.instrs[number] if number is not None else None
        assert instr is None or isinstance(instr, Collective)
        return instr


def classes(schedule: Schedule, fail: Fail) -> list[Rank]:
    """One rank for every coordinate along the role axes, with its steps with ranks of other classes."""
    mesh = _role_mesh(schedule)
    ranks = []
    for index, coords in enumerate(mesh.rank_coords):
        full = {**dict.fromkeys(schedule.mesh.names, 0), **coords}
        found = [p for p in schedule.programs if all(full.get(axis) == at for axis, at in p.role)]
        if len(found) != 1:
            fail(full, None, f"{len(found)} programs for this rank", "give every rank exactly one program")
        ranks.append(Rank(index, full, found[0]))
    if not mesh.names:
        return ranks
    for rank in ranks:
        counts: dict[Key, int] = {}
        for number, instr in enumerate(rank.program.instrs):
            if not schedule.crosses_roles(instr):
                continue
            if isinstance(instr, Collective):
                members = _group(mesh, instr.axes, rank.coords)
                queue: Key = ("group", communicator(instr.axes), tuple(sorted(members)))
                key = queue
            else:
                assert isinstance(instr, (Send, Recv))
                peer = _peer(mesh, rank, number, instr, fail)
                members = (rank.index, peer) if isinstance(instr, Send) else (peer, rank.index)
                queue, key = ("queue", *sorted(members)), ("pair", *members)
            counts[key] = counts.get(key, -1) + 1
            rank.events.append(Event(number, (*key, counts[key]), queue, members))
    return ranks


def _role_mesh(schedule: Schedule) -> Mesh:
    names = schedule.role_axes
    return Mesh(tuple(schedule.mesh.shape[name] for name in names), names)


def _group(mesh: Mesh, axes: tuple[Axis, ...], coords: dict[str, int]) -> Group:
    inside = tuple(axis for axis in axes if axis.name in mesh.names)
    return mesh.group(inside, coords)


def _peer(mesh: Mesh, rank: Rank, number: int, instr: Send | Recv, fail: Fail) -> int:
    if not 0 <= instr.peer < instr.axis.size:
        fail(
            rank.coords,
            number,
            f"wrong peer: {instr.axis} has no coordinate {instr.peer}",
            "use one that it has",
        )
    peer = mesh.group((instr.axis,), rank.coords)[instr.peer]
    if peer == rank.index:
        fail(rank.coords, number, f"wrong peer: the rank {instr.op}s to itself", "exchange with another rank")
    return peer
