"""Checks the programs against each other: groups issue the same collectives, sends match receives."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from fparallel.layout import same
from fparallel.mesh import Axis, axes_text
from fparallel.schedule.ir import Buffer, Collective, Schedule
from fparallel.schedule.rendezvous import Fail, Key, Rank
from fparallel.schedule.text import instr_text


def check_agreement(schedule: Schedule, ranks: list[Rank], fail: Fail) -> None:
    """Calls `fail` for the first step that does not match its partners'."""
    lines: dict[Key, dict[int, list[int]]] = {}
    for rank in ranks:
        for event in rank.events:
            line = lines.setdefault(event.key[:-1], {member: [] for member in event.members})
            line[rank.index].append(event.number)
    for key, line in lines.items():
        if key[0] == "pair":
            (source, sends), (target, recvs) = line.items()
            _check_pair(schedule, ranks[source], ranks[target], sends, recvs, fail)
        else:
            axes = key[1]
            assert isinstance(axes, tuple)
            _check_group(schedule, ranks, axes, line, fail)


def _buffers(schedule: Schedule, names: tuple[str, ...]) -> list[Buffer]:
    return [schedule.buffers[name] for name in names]


def _tensor_difference(mine: list[Buffer], theirs: list[Buffer]) -> str | None:
    if len(mine) != len(theirs):
        return "shape"
    for a, b in zip(mine, theirs, strict=True):
        if a.dtype != b.dtype:
            return "dtype"
        if not same(a.layout, b.layout):
            return "shape"
    for a, b in zip(mine, theirs, strict=True):
        if a.name != b.name:
            return "buffer"
    return None


def _difference(schedule: Schedule, a: Collective | None, b: Collective | None) -> str | None:
    """In what two members' collectives differ."""
    if a is None or b is None:
        return "number"
    if a is b:
        return None
    for what, x, y in (
        ("op", a.kind, b.kind),
        ("axes", a.axes, b.axes),
        ("reduce op", a.reduce, b.reduce),
        ("sources", a.sources, b.sources),
    ):
        if x != y:
            return what
    return _tensor_difference(_buffers(schedule, a.ins), _buffers(schedule, b.ins)) or _tensor_difference(
        _buffers(schedule, a.outs), _buffers(schedule, b.outs)
    )


def _first(differences: Iterable[str | None]) -> tuple[int, str] | None:
    """The position of the first difference, and what it is."""
    return next(((at, what) for at, what in enumerate(differences) if what is not None), None)


def _check_group(
    schedule: Schedule, ranks: list[Rank], axes: tuple[Axis, ...], members: dict[int, list[int]], fail: Fail
) -> None:
    name = axes_text(axes)
    order = sorted(members)
    first, ours = ranks[order[0]], members[order[0]]
    for other, theirs in ((ranks[index], members[index]) for index in order[1:]):
        if other.program is first.program:
            continue
        found = _first(
            _difference(schedule, first.collective(a), other.collective(b))
            for a, b in itertools.zip_longest(ours, theirs)
        )
        if found is None:
            continue
        at, what = found
        if len(ours) != len(theirs):
            more, fewer = (first, other) if len(ours) > len(theirs) else (other, first)
            few, many = sorted((len(ours), len(theirs)))
            fail(
                more.coords,
                members[more.index][at],
                f"missing collective: {_who(schedule, fewer)} issues {few} collectives over {name}, this rank "
                f"{many}; they differ from here on",
                "issue the same collectives on every member of a group",
            )
        fail(
            other.coords,
            theirs[at],
            f"group disagrees on {what}: collective number {at + 1} over {name} is, on "
            f"{_who(schedule, first)}, {ours[at]:04d} {_line(schedule, first.collective(ours[at]))}",
            "issue the same collectives in the same order on every member of a group",
        )


def _check_pair(
    schedule: Schedule, source: Rank, target: Rank, sends: list[int], recvs: list[int], fail: Fail
) -> None:
    def difference(s: int | None, r: int | None) -> str | None:
        if s is None or r is None:
            return "number"
        mine = _buffers(schedule, source.program.instrs[s].reads)
        what = _tensor_difference(mine, _buffers(schedule, target.program.instrs[r].writes))
        if what is None and any(a.local_bytes(source.coords) != a.local_bytes(target.coords) for a in mine):
            return "bytes"
        return what

    found = _first(difference(s, r) for s, r in itertools.zip_longest(sends, recvs))
    if found is None:
        return
    at, what = found
    counts = (
        f"{len(sends)} sends from {_who(schedule, source)} to {_who(schedule, target)}, {len(recvs)} receives"
    )
    if len(sends) > len(recvs):
        fail(
            source.coords,
            sends[at],
            f"missing recv: {counts}; they differ from here on",
            "receive once per send, in the same order",
        )
    if len(sends) < len(recvs):
        fail(
            target.coords,
            recvs[at],
            f"missing send: {counts}; they differ from here on",
            "send once per receive, in the same order",
        )
    mine = ", ".join(map(str, _buffers(schedule, source.program.instrs[sends[at]].reads)))
    theirs = ", ".join(map(str, _buffers(schedule, target.program.instrs[recvs[at]].writes)))
    fail(
        target.coords,
        recvs[at],
        f"send and recv disagree on {what}: {_who(schedule, source)} sends {mine} with {sends[at]:04d}, "
        f"received here as {theirs}",
        "receive what is sent, in the same order",
    )


def _line(schedule: Schedule, instr: Collective | None) -> str:
    assert instr is not None
    types = ", ".join(str(schedule.buffers[name]) for name in (instr.ins[0], instr.outs[0]))
    return f"{instr_text(instr)} ({types})"


def _who(schedule: Schedule, rank: Rank) -> str:
    at = " ".join(f"{axis}={c}" for axis, c in rank.coords.items())
    return f"rank {schedule.mesh.rank(rank.coords)} ({at})"
