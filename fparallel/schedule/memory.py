"""What a schedule holds in memory: exact live bytes of the named buffers, and what they are for.

A buffer takes memory from the instruction that writes it (collectives and receives: that issues it) until
it is freed. An output that runs in place takes over the memory of its input. What a segment or a transport
allocates for itself while it runs is not counted here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fparallel.schedule.ir import TIERS, Collective, Free, Instr, Program, Recv, Run, Schedule, overwritten
from fparallel.schedule.text import bytes_text, instr_text

CAUSES = (
    "parameters",
    "optimizer state",
    "batch",
    "other arguments",
    "constants",
    "gathered parameters",
    "kept parameters",
    "activations",
    "gradients",
    "communication",
    "results",
)


def live_bytes(schedule: Schedule, rank: int, memory: str = "device") -> list[int]:
    """The bytes that a rank holds at every instruction: with its outputs, for a `free` after it.

    The peak of a program is the largest of them, or what its arguments take if it has no instructions.
    """
    return list(_live(schedule, schedule.program(rank), schedule.mesh.coords(rank), memory))


def _live(schedule: Schedule, program: Program, coords: dict[str, int], memory: str) -> Iterator[int]:
    sizes: dict[str, int] = {}

    def size(name: str) -> int:
        if name not in sizes:
            buffer = schedule.buffers[name]
            sizes[name] = buffer.local_bytes(coords) if buffer.memory == memory else 0
        return sizes[name]

    total = sum(size(name) for name in program.arguments)
    for instr in program.instrs:
        if isinstance(instr, Free):
            total -= sum(size(name) for name in instr.bufs)
        else:
            total += sum(size(name) for name in instr.writes) - sum(size(name) for name in overwritten(instr))
        yield total


@dataclass(frozen=True)
class RankMemory:
    """The peak of one rank in one tier.

    Attributes:
      ranks: how many ranks run the same program; none of them has a higher peak.
      instruction: the number of the first instruction at the peak; None if it is at the start.
      by_cause: bytes per entry of `CAUSES` at that instruction.
      kept: the most bytes of gathered parameters that wait for another use during any run, at the peak or elsewhere.
    """

    rank: int
    coords: dict[str, int]
    ranks: int
    tier: str
    peak: int
    instruction: int | None
    text: str
    by_cause: dict[str, int]
    kept: int


@dataclass(frozen=True)
class MemoryReport:
    """The peak per role and tier, on the rank of each role that holds most. Prints as a table."""

    rows: tuple[RankMemory, ...]

    def peak(self, tier: str = "device") -> int:
        """The largest peak of any rank, in bytes."""
        return max((row.peak for row in self.rows if row.tier == tier), default=0)

    def __str__(self) -> str:
        causes = [cause for cause in CAUSES if any(row.by_cause[cause] for row in self.rows)]
        kept = any(row.kept for row in self.rows)
        table = [["rank", "tier", "peak", *causes, *["kept at most"] * kept, "peak at"]]
        for row in self.rows:
            at = " ".join(f"{axis}={c}" for axis, c in row.coords.items())
            others = f" and {row.ranks - 1} more" if row.ranks > 1 else ""
            where = "start" if row.instruction is None else f"{row.instruction:04d}  {row.text}"
            parts = [bytes_text(row.by_cause[cause]) for cause in causes] + [bytes_text(row.kept)] * kept
            table.append([f"{row.rank} ({at}){others}", row.tier, bytes_text(row.peak), *parts, where])
        wide = [max(map(len, column)) for column in zip(*table, strict=True)]
        last = len(wide) - 1
        return "".join(
            "  ".join(
                cell.rjust(w) if 1 < n < last else cell.ljust(w)
                for n, (cell, w) in enumerate(zip(line, wide, strict=True))
            ).rstrip()
            + "\n"
            for line in table
        )


@dataclass(frozen=True)
class Peak:
    """The most bytes that any rank holds in a tier: the rank, and the number of the instruction (None: the start)."""

    nbytes: int
    rank: int
    instruction: int | None


def highest_peak(schedule: Schedule, tier: str = "device") -> Peak:
    """The peak of the rank that holds most."""
    peaks = []
    for program in schedule.programs:
        rank = schedule.first_rank(program)
        coords = schedule.mesh.coords(rank)
        start = sum(_in_tier(schedule, name, coords, tier) for name in program.arguments)
        live = list(_live(schedule, program, coords, tier))
        peak = max([start, *live])
        peaks.append(Peak(peak, rank, None if peak == start else live.index(peak)))
    return max(peaks, key=lambda peak: peak.nbytes)


def memory(schedule: Schedule) -> MemoryReport:
    """Predicts the peak of every role and memory tier that the schedule uses, by cause."""
    tiers = [t for t in TIERS if t == "device" or any(b.memory == t for b in schedule.buffers.values())]
    rows = []
    for program in schedule.programs:
        rank = schedule.first_rank(program)
        count = len(schedule.ranks(program))
        for tier in tiers:
            rows.append(_row(schedule, program, rank, count, tier))
    return MemoryReport(tuple(rows))


def rank_memory(schedule: Schedule, rank: int, tier: str = "device") -> RankMemory:
    """The peak of one rank: lower than its role's where its parts of uneven tensors are smaller."""
    return _row(schedule, schedule.program(rank), rank, 1, tier)


def _row(schedule: Schedule, program: Program, rank: int, count: int, tier: str) -> RankMemory:
    coords = schedule.mesh.coords(rank)
    causes = dict(_causes(schedule, program))
    start = sum(_in_tier(schedule, name, coords, tier) for name in program.arguments)
    live = list(_live(schedule, program, coords, tier))
    peak = max([start, *live])
    number = None if peak == start else live.index(peak)
    alive = set(program.arguments)
    for instr in program.instrs[: 0 if number is None else number + 1]:
        _advance(alive, instr)
    by_cause = dict.fromkeys(CAUSES, 0)
    waiting = _waiting(program, causes)
    for name in alive:
        kept = number is not None and any(begin < number < end for begin, end in waiting.get(name, ()))
        by_cause["kept parameters" if kept else causes[name]] += _in_tier(schedule, name, coords, tier)
    sizes = {name: _in_tier(schedule, name, coords, tier) for name in waiting}
    text = "" if number is None else instr_text(program.instrs[number])
    return RankMemory(
        rank, coords, count, tier, peak, number, text, by_cause, _most_kept(program, waiting, sizes)
    )


Spans = dict[str, list[tuple[int, int]]]


def _waiting(program: Program, causes: Mapping[str, str]) -> Spans:
    """The pairs of instructions between which a gathered parameter waits, from one that reads it to the next."""
    last: dict[str, int] = {}
    spans: Spans = {}
    for number, instr in enumerate(program.instrs):
        for name in instr.reads:
            if causes[name] == "gathered parameters":
                if name in last:
                    spans.setdefault(name, []).append((last[name], number))
                last[name] = number
    return spans


def _most_kept(program: Program, waiting: Spans, sizes: Mapping[str, int]) -> int:
    """The most bytes that wait at any run."""
    change = [0] * (len(program.instrs) + 1)
    for name, spans in waiting.items():
        for begin, end in spans:
            change[begin + 1] += sizes[name]
            change[end] -= sizes[name]
    held = itertools.accumulate(change)
    return max(
        (n for n, instr in zip(held, program.instrs, strict=False) if isinstance(instr, Run)), default=0
    )


def _in_tier(schedule: Schedule, name: str, coords: dict[str, int], tier: str) -> int:
    buffer = schedule.buffers[name]
    return buffer.local_bytes(coords) if buffer.memory == tier else 0


def _advance(alive: set[str], instr: Instr) -> None:
    if isinstance(instr, Free):
        alive.difference_update(instr.bufs)
    else:
        alive.update(instr.writes)
        alive.difference_update(overwritten(instr))


def _causes(schedule: Schedule, program: Program) -> Iterator[tuple[str, str]]:
    """(buffer, cause) of every buffer of a program, from its path and from what it is made of.

    An argument is what its path says: `params`, `opt_state` or `batch`. A gradient has `grad` or `grads` in
    its path, or is what a collective makes of one. What is made of parameters alone, gathered or cast, is a
    gathered parameter; where it waits between two uses, `_row` counts it as kept.
    """
    causes: dict[str, str] = {}
    for name in program.arguments:
        causes[name] = _argument_cause(name) if schedule.buffers[name].kind == "argument" else "constants"
    for instr in program.instrs:
        sources = {causes[name] for name in instr.reads}
        over = {out: causes[instr.ins[i]] for out, i in instr.inplace} if isinstance(instr, Run) else {}
        own = bool(sources & {"parameters", "gathered parameters"}) and sources <= {
            "parameters",
            "gathered parameters",
            "constants",
        }
        for position, name in enumerate(instr.writes):
            if position in over:
                causes[name] = over[position]
            elif {"grad", "grads"} & set(name.split("@")[0].split(".")):
                causes[name] = "gradients"
            elif schedule.buffers[name].kind == "result":
                causes[name] = "results"
            elif own and (isinstance(instr, Run) or instr.op == "all_gather"):
                causes[name] = "gathered parameters"
            elif sources == {"gradients"} and isinstance(instr, Collective):
                causes[name] = "gradients"
            else:
                causes[name] = "communication" if isinstance(instr, (Collective, Recv)) else "activations"
    yield from causes.items()


def _argument_cause(name: str) -> str:
    keys = name.split(".")
    for key, cause in (("opt_state", "optimizer state"), ("params", "parameters"), ("batch", "batch")):
        if key in keys:
            return cause
    return "other arguments"
