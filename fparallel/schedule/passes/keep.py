"""What has been gathered, kept for its next use."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fparallel.schedule.ir import Collective, Free, Instr, Program, Run, Schedule, overwritten
from fparallel.schedule.passes.placement import apply_moves, device_bytes, drop_unused, live_device_bytes


def keep(schedule: Schedule, memory_budget: float = math.inf) -> Schedule:
    """Keeps what has been gathered instead of gathering it again, as far as a memory budget allows.

    A gather repeats an earlier one of the same program if it gathers the same buffer over the same axes to the same
    layout; it is taken out, tensor by tensor, and the result of the earlier one lives on and is read in its place.
    (ZeRO-3 gathers a block's parameters for its forward and again for its backward, of every micro-batch.)

    A byte held saves a byte gathered, so what would be held over the fewest runs comes first, and is never given up
    for what would be held at the same time over more. So a larger budget keeps all that a smaller one does.

    Args:
      schedule: the schedule, with its frees where they should be (see early_free).
      memory_budget: at most this many bytes of device memory per rank, where the schedule does not hold more already.

    Before::

        all_gather[dp]  w1 -> w1@f
        wait            w1@f
        run F <f>       (x, w1@f) -> y
        free            w1@f
        run L <l>       (y) -> d
        all_gather[dp]  w1 -> w1@b
        wait            w1@b
        run B <b>       (x, y, w1@b, d) -> e
        free            w1@b, y, d

    After::

        all_gather[dp]  w1 -> w1@f                  # kept
        wait            w1@f
        run F <f>       (x, w1@f) -> y
        run L <l>       (y) -> d
        run B <b>       (x, y, w1@f, d) -> e
        free            w1@f, y, d

    Order of steps between roles: untouched. A gather whose group spans several programs is left alone, and so is one
    whose result is sent, is reduced over several programs, or is written over.
    """
    after = apply_moves(schedule, functools.partial(keep_gathered, memory_budget=memory_budget))
    return drop_unused(after, schedule)


@dataclass(frozen=True)
class _Repeat:
    """A gather of a tensor that has been gathered before.

    Attributes:
      at, position: the instruction, and the tensor's place in it.
      earlier: the buffer of the earlier one.
      since: the instruction that frees that buffer.
      nbytes: what it takes on the fullest rank.
      runs: how many runs it would be held for.
    """

    at: int
    position: int
    earlier: str
    since: int
    nbytes: int
    runs: int


def keep_gathered(
    schedule: Schedule, program: Program, instrs: list[Instr], *, memory_budget: float
) -> list[Instr]:
    """The move of `keep`."""
    while True:  # what is gathered of something kept may be kept in turn
        repeats = _repeats(schedule, program, instrs)
        chosen = [repeat for repeat in repeats if repeat.since > repeat.at]  # both live: costs nothing
        if not chosen:
            live = np.array(live_device_bytes(schedule, program, instrs))
            chosen = _affordable(repeats, live, memory_budget)
        if not chosen:
            return instrs
        instrs = _without(instrs, sorted(chosen, key=lambda repeat: (repeat.at, repeat.position)))


def _affordable(repeats: Sequence[_Repeat], live: np.ndarray, budget: float) -> list[_Repeat]:
    """Those that fit beside all that come before them, whether or not these fit.

    `live`: the bytes held at the start and at every instruction.
    """
    found = []
    for repeat in sorted(repeats, key=lambda repeat: (repeat.runs, repeat.at, repeat.position)):
        held = live[repeat.since + 1 : repeat.at + 1]
        held += repeat.nbytes
        if held.max() <= budget:
            found.append(repeat)
    return found


def _repeats(schedule: Schedule, program: Program, instrs: Sequence[Instr]) -> list[_Repeat]:
    """Every gather of a tensor that repeats an earlier one, in their order."""
    fixed = _fixed(schedule, instrs)
    freed = {name: i for i, instr in enumerate(instrs) if isinstance(instr, Free) for name in instr.bufs}
    runs = [0]
    for instr in instrs:
        runs.append(runs[-1] + isinstance(instr, Run))
    last: dict[object, tuple[str, int]] = {}  # what is gathered -> the buffer, and where it is freed
    found = []
    for i, instr in enumerate(instrs):
        if not isinstance(instr, Collective) or instr.kind != "all_gather" or schedule.crosses_roles(instr):
            continue
        for position, (source, out) in enumerate(zip(instr.ins, instr.outs, strict=True)):
            if out in fixed:
                continue
            key = (source, instr.axes, schedule.buffers[out].layout)
            end = freed.get(out, len(instrs))
            if key not in last or schedule.buffers[out].kind != "temp":
                last[key] = out, end
                continue
            earlier, since = last[key]
            held = runs[i] - runs[min(since, i)]
            found.append(_Repeat(i, position, earlier, since, device_bytes(schedule, out), held))
            last[key] = out, max(since, end)
    return found


def _fixed(schedule: Schedule, instrs: Sequence[Instr]) -> set[str]:
    """The buffers that must keep their names, or end by being written over."""
    names: set[str] = set()
    for instr in instrs:
        names.update(overwritten(instr))
        if schedule.crosses_roles(instr):
            names.update(instr.reads)
    return names


def _without(instrs: Sequence[Instr], repeats: Sequence[_Repeat]) -> list[Instr]:
    """The instructions without some gathers; what read their results reads those of the earlier ones."""
    instead: dict[str, str] = {}
    gone: set[tuple[int, int]] = set()
    for repeat in repeats:  # in their order: an earlier one may itself be gone
        instr = instrs[repeat.at]
        assert isinstance(instr, Collective)
        instead[instr.outs[repeat.position]] = instead.get(repeat.earlier, repeat.earlier)
        gone.add((repeat.at, repeat.position))
    held = frozenset(instead.values())
    ends = _ends(instrs, instead)
    made: list[Instr] = []
    for i, instr in enumerate(instrs):
        if isinstance(instr, Free):
            names = dict.fromkeys(instead.get(name, name) for name in instr.bufs)
            bufs = tuple(name for name in names if ends.get(name, i) == i)
            if bufs:
                made.append(dataclasses.replace(instr, bufs=bufs))
            continue
        if isinstance(instr, Collective) and instr.kind == "all_gather":
            left = [k for k in range(len(instr.outs)) if (i, k) not in gone]
            if not left:
                continue
            instr = _only(instr, left, kept=not held.isdisjoint(instr.outs))
        made.append(_renamed(instr, instead))
    return made


def _ends(instrs: Sequence[Instr], instead: Mapping[str, str]) -> dict[str, int]:
    """For every kept buffer the last free of it, or of one in whose place it is read; -1 if one is never freed."""
    freed = {name: i for i, instr in enumerate(instrs) if isinstance(instr, Free) for name in instr.bufs}
    ends: dict[str, int] = {}
    for name, kept in instead.items():
        both = freed.get(name, -1), freed.get(kept, -1)
        ends[kept] = -1 if -1 in (*both, ends.get(kept, 0)) else max(*both, ends.get(kept, 0))
    return ends


def _only(instr: Collective, left: Sequence[int], *, kept: bool) -> Collective:
    """A gather of some of its tensors."""
    cause = instr.cause
    if kept and "kept" not in cause.split("; "):
        cause = f"{cause}; kept" if cause else "kept"
    ins, outs = tuple(instr.ins[k] for k in left), tuple(instr.outs[k] for k in left)
    return dataclasses.replace(instr, ins=ins, outs=outs, cause=cause)


def _renamed(instr: Instr, instead: Mapping[str, str]) -> Instr:
    """The instruction, reading other buffers."""
    if isinstance(instr, (Run, Collective)) and not instead.keys().isdisjoint(instr.ins):
        return dataclasses.replace(instr, ins=tuple(instead.get(name, name) for name in instr.ins))
    return instr
