"""Where waits and frees go; shared by the passes.

A pass that moves steps takes the waits out, moves the steps, and places every wait again as late as is
legal. Frees keep their place as long as it is legal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from fparallel.schedule.ir import (
    Collective,
    Free,
    Instr,
    Program,
    Recv,
    Run,
    Schedule,
    Send,
    Wait,
    communicator,
    is_async,
    overwritten,
    wait_names,
)


def map_programs(schedule: Schedule, change: Callable[[Program], Sequence[Instr]]) -> Schedule:
    """The schedule with the instructions of every program replaced."""
    programs = tuple(dataclasses.replace(p, instrs=tuple(change(p))) for p in schedule.programs)
    return dataclasses.replace(schedule, programs=programs)


# What a pass does to the instructions of a program, which have no waits: it may move, join, add and take away.
Move = Callable[[Schedule, Program, list[Instr]], list[Instr]]


def apply_moves(schedule: Schedule, *moves: Move) -> Schedule:
    """The schedule after several moves; every wait is then placed anew, as late as is legal."""

    def change(program: Program) -> list[Instr]:
        instrs = without_waits(program.instrs)
        for move in moves:
            instrs = move(schedule, program, instrs)
        return place_waits(instrs)

    return map_programs(schedule, change)


def without_waits(instrs: Iterable[Instr]) -> list[Instr]:
    return [instr for instr in instrs if not isinstance(instr, Wait)]


def place_waits(instrs: Iterable[Instr]) -> list[Instr]:
    """Adds every wait, as late as is legal, to instructions that have none.

    A step is waited for just before the first instruction that reads one of its outputs, or frees or
    overwrites one of its inputs or outputs; at the latest at the end.
    """
    placed: list[Instr] = []
    pending = _Pending()
    for instr in instrs:
        if isinstance(instr, Free):
            needed = {step for name in instr.bufs for step in pending.uses(name)}
        else:
            needed = {pending.writer[name] for name in instr.reads if name in pending.writer}
            needed.update(step for name in overwritten(instr) for step in pending.uses(name))
        if needed:
            placed.append(Wait(pending.complete(needed)))
        if is_async(instr):
            pending.issue(instr.reads, instr.writes, wait_names(instr))
        placed.append(instr)
    if pending.steps:
        placed.append(Wait(pending.complete(set(pending.steps))))
    return placed


class _Pending:
    """The communication steps that have been issued and not waited for, by the order of issue."""

    def __init__(self) -> None:
        self.count = 0
        self.steps: dict[int, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {}
        self.writer: dict[str, int] = {}
        self.readers: dict[str, set[int]] = {}
        self.waitable: dict[str, set[int]] = {}

    def issue(self, reads: tuple[str, ...], writes: tuple[str, ...], names: tuple[str, ...]) -> None:
        step = self.count
        self.count += 1
        self.steps[step] = (reads, writes, names)
        self.writer.update(dict.fromkeys(writes, step))
        for name in reads:
            self.readers.setdefault(name, set()).add(step)
        for name in names:
            self.waitable.setdefault(name, set()).add(step)

    def uses(self, name: str) -> set[int]:
        """The steps that read or write a buffer."""
        readers = self.readers.get(name, set())
        return readers | {self.writer[name]} if name in self.writer else readers

    def complete(self, steps: set[int]) -> tuple[str, ...]:
        """Ends the steps, and others that are waited for by the same names; returns the names to wait for."""
        names = tuple(dict.fromkeys(name for step in sorted(steps) for name in self.steps[step][2]))
        for step in {step for name in names for step in self.waitable.pop(name, set())} | steps:
            reads, writes, own = self.steps.pop(step)
            for name in writes:
                self.writer.pop(name, None)
            for name in reads:
                self.readers[name].discard(step)
            for name in own:
                self.waitable.get(name, set()).discard(step)
        return names


def live_device_bytes(schedule: Schedule, program: Program, instrs: Sequence[Instr]) -> list[int]:
    """Device bytes on the fullest rank: at the start, then at every instruction (for a free, after it)."""
    live = [sum(device_bytes(schedule, name) for name in program.arguments)]
    for instr in instrs:
        gone = instr.bufs if isinstance(instr, Free) else overwritten(instr)
        change = sum(device_bytes(schedule, name) for name in instr.writes)
        live.append(live[-1] + change - sum(device_bytes(schedule, name) for name in gone))
    return live


def device_bytes(schedule: Schedule, name: str) -> int:
    """Bytes of device memory on the fullest rank."""
    buffer = schedule.buffers[name]
    return buffer.nbytes if buffer.memory == "device" else 0


def drop_unused(schedule: Schedule, before: Schedule) -> Schedule:
    """Without the buffers that were used before, and are no more."""

    def used(some: Schedule) -> set[str]:
        names: set[str] = set()
        for program in some.programs:
            names.update(program.arguments, program.results)
            for instr in program.instrs:
                names.update(instr.bufs if isinstance(instr, (Free, Wait)) else (*instr.reads, *instr.writes))
        return names

    gone = used(before) - used(schedule)
    buffers = {name: buffer for name, buffer in schedule.buffers.items() if name not in gone}
    return dataclasses.replace(schedule, buffers=buffers)


def dying(program: Program, instrs: Sequence[Instr]) -> list[str]:
    """What a program of these instructions must free: temps and donated arguments, but for results and what is
    overwritten.
    """
    kept = set(program.results).union(*(overwritten(instr) for instr in instrs))
    names = [name for name in program.arguments if name in program.donated]
    names += [name for instr in instrs for name in instr.writes]
    return [name for name in dict.fromkeys(names) if name not in kept]


def queue_of(instr: Instr) -> object:
    """The communicator of a communication step."""
    if isinstance(instr, Collective):
        return communicator(instr.axes)
    if isinstance(instr, (Send, Recv)):
        return instr.axis, instr.peer
    return None


def place_frees(instrs: Sequence[Instr], names: Iterable[str]) -> list[Instr]:
    """Adds the frees of `names`, each as early as costs no overlap, to instructions without waits.

    A buffer is freed right after the last instruction that uses it. If communication still uses it then, it
    is freed when that step is waited for: before the first instruction that reads its output or, if that is
    earlier, before the next step on the same communicator that also holds on to buffers, with some run in
    between. So at most two batches of such steps hold memory at a time, and each overlaps with the runs up
    to the next.
    """
    last = dict.fromkeys(names, -1)
    for i, instr in enumerate(instrs):
        for name in (*instr.reads, *instr.writes):
            if name in last:
                last[name] = i
    waits = _wait_positions(instrs, frozenset(last))
    slot = {name: at + 1 for name, at in last.items()}
    for i, instr in enumerate(instrs):
        if i in waits:
            for name in (*instr.reads, *instr.writes):
                if name in slot:
                    slot[name] = max(slot[name], i + 1, waits[i])
    by_slot: dict[int, list[str]] = {}
    for name, at in slot.items():
        by_slot.setdefault(at, []).append(name)
    placed: list[Instr] = []
    for i in range(len(instrs) + 1):
        if i in by_slot:
            placed.append(Free(tuple(by_slot[i])))
        if i < len(instrs):
            placed.append(instrs[i])
    return placed


def _wait_positions(instrs: Sequence[Instr], names: frozenset[str]) -> dict[int, int]:
    """For every communication step the position of the instruction before which it is waited for."""
    waits: dict[int, int] = {}
    writer: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    batches: dict[
        object, tuple[int, list[int]]
    ] = {}  # communicator -> (runs before its last step, last steps)
    runs = 0
    for i, instr in enumerate(instrs):
        ended = instr.bufs if isinstance(instr, Free) else overwritten(instr)
        steps = {writer[name] for name in (*instr.reads, *ended) if name in writer}
        steps.update(step for name in ended for step in readers.get(name, ()))
        for step in steps:
            waits[step] = min(waits[step], i)
        runs += isinstance(instr, Run)
        if not is_async(instr):
            continue
        waits[i] = len(instrs)
        writer.update(dict.fromkeys(instr.writes, i))
        for name in instr.reads:
            readers.setdefault(name, []).append(i)
        if names.isdisjoint(instr.reads):
            continue
        before, batch = batches.get(queue_of(instr), (runs, []))
        if before < runs:
            for step in batch:
                waits[step] = min(waits[step], i)
            batch = []
        batches[queue_of(instr)] = (runs, [*batch, i])
    return waits
