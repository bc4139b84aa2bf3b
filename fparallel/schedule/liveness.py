"""Checks one program by itself: every buffer is written once, live and waited for when used, and freed once.

A buffer is unwritten, live, or dead (freed, or its storage was given to another). While a communication
step is pending, its outputs may not be used at all and its inputs may only be read.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NoReturn

from fparallel.layout import Layout, same
from fparallel.schedule.ir import (
    Buffer,
    Collective,
    Free,
    Instr,
    Program,
    Recv,
    Run,
    Schedule,
    Send,
    Wait,
    is_async,
    wait_names,
)
from fparallel.schedule.legality import fault

# (number of the instruction or None, what is wrong, how to fix it)
Fail = Callable[[int | None, str, str], NoReturn]

WAIT_FIRST = "wait for the step before this instruction; the pass sink_waits places every wait"
LIVE_LONGER = "free or overwrite it after its last use; the pass early_free places every free"


def check_program(schedule: Schedule, program: Program, fail: Fail) -> None:
    """Calls `fail` at the first instruction that breaks a rule."""
    checker = _Checker(schedule, program, fail)
    for number, instr in enumerate(program.instrs):
        checker.step(number, instr)
    checker.end()


class _Checker:
    def __init__(self, schedule: Schedule, program: Program, fail: Fail) -> None:
        self.schedule, self.program, self.fail = schedule, program, fail
        self.buffers = schedule.buffers
        self.live: dict[str, int | None] = {}  # name -> the instruction that wrote it (None: an argument)
        self.dead: dict[str, tuple[int, str]] = {}  # name -> (instruction, "freed" or "overwritten")
        self.writing: dict[str, int] = {}  # name -> the pending step that writes it
        self.reading: dict[str, list[int]] = {}  # name -> the pending steps that read it
        self.waitable: dict[str, list[int]] = {}  # name -> the pending steps that a wait on it completes
        self.legal: set[tuple[object, ...]] = set()  # kinds of collectives between pairs of layouts
        self.results = frozenset(program.results)
        self.arguments = frozenset(program.arguments)
        for name in program.arguments:
            if self.buffer(None, name).kind not in ("argument", "constant"):
                fail(
                    None,
                    f"{name} is an argument of the program, but its kind is {self.buffers[name].kind}",
                    "give the buffer the kind argument or constant",
                )
            if name in self.live:
                fail(None, f"{name} is listed twice among the arguments", "list every argument once")
            self.live[name] = None
        for name in program.donated - self.arguments:
            fail(None, f"{name} is donated but is no argument of the program", "donate arguments only")

    def buffer(self, number: int | None, name: str) -> Buffer:
        found = self.buffers.get(name)
        if found is None:
            self.fail(number, f"unknown buffer: {name} is not in schedule.buffers", "add a Buffer for it")
        return found

    def text(self, number: int) -> str:
        return f"{self.program.instrs[number].op} {number:04d}"

    # ------------------------------------------------------------ one instruction

    def step(self, number: int, instr: Instr) -> None:
        if isinstance(instr, Wait):
            self.wait(number, instr)
        elif isinstance(instr, Free):
            for name in instr.bufs:
                self.end_life(number, name, "freed")
        else:
            for name in instr.reads:
                self.read(number, name)
            if isinstance(instr, Run):
                self.run(number, instr)
            elif isinstance(instr, Collective):
                self.collective(number, instr)
            for name in instr.writes:
                self.write(number, name)
            if is_async(instr):
                self.issue(number, instr)

    def read(self, number: int, name: str) -> None:
        if name not in self.live:
            self.fail(number, *self.missing(number, name))
        if name in self.writing:
            self.fail(
                number,
                f"read in flight: {name} is written by {self.text(self.writing[name])}, which has not "
                "been waited for",
                WAIT_FIRST,
            )
        if self.buffers[name].memory != "device":
            self.fail(
                number,
                f"wrong memory: {name} rests on {self.buffers[name].memory}, a step reads device memory",
                "fetch it to the device first",
            )

    def missing(self, number: int, name: str) -> tuple[str, str]:
        self.buffer(number, name)
        if name in self.dead:
            at, how = self.dead[name]
            return f"use after {how}: {name} was {how} by {self.text(at)}", LIVE_LONGER
        return f"read before write: nothing has written {name}", "run the step that writes it first"

    def write(self, number: int, name: str) -> None:
        buffer = self.buffer(number, name)
        if name in self.live or name in self.dead:
            self.fail(
                number, f"double write: {name} has been written before", "give each value a name of its own"
            )
        received = buffer.kind == "argument" and name not in self.arguments  # another role's
        if buffer.kind not in ("temp", "result") and not received:
            self.fail(
                number,
                f"{buffer.kind} overwritten: {name} is no temp and no result",
                "write to a new buffer; to reuse the storage of a donated argument, run in place",
            )
        self.live[name] = number

    def issue(self, number: int, instr: Collective | Send | Recv) -> None:
        for name in instr.reads:
            self.reading.setdefault(name, []).append(number)
        for name in instr.writes:
            self.writing[name] = number
        for name in dict.fromkeys(wait_names(instr)):
            self.waitable.setdefault(name, []).append(number)

    def wait(self, number: int, instr: Wait) -> None:
        done: set[int] = set()
        for name in instr.bufs:
            if name not in self.waitable:
                self.buffer(number, name)
                self.fail(
                    number,
                    f"wait for nothing: no step is pending on {name}",
                    "wait once, after the step was issued",
                )
            done.update(self.waitable[name])
        for step in done:
            pending = self.program.instrs[step]
            assert isinstance(pending, (Collective, Send, Recv))
            for name in pending.writes:
                self.writing.pop(name, None)
            for name in pending.reads:
                _remove(self.reading, name, step)
            for name in dict.fromkeys(wait_names(pending)):
                _remove(self.waitable, name, step)

    def end_life(self, number: int, name: str, how: str) -> None:
        """`how` is "freed" or "overwritten"."""
        if name not in self.live:
            if how == "freed" and name in self.dead:
                at, before = self.dead[name]
                self.fail(number, f"double free: {name} was {before} by {self.text(at)}", "free it once")
            if how == "freed":
                self.buffer(number, name)
                self.fail(
                    number, f"free of an unwritten buffer: nothing has written {name}", "remove the free"
                )
            self.fail(number, *self.missing(number, name))
        buffer = self.buffers[name]
        if buffer.kind == "constant" or (name in self.arguments and name not in self.program.donated):
            self.fail(
                number,
                f"argument {how}: {name} is an argument that is not donated",
                "donate it, or leave it alone",
            )
        if how == "freed" and name in self.results:
            self.fail(number, f"result freed: {name} is a result of the program", "keep results to the end")
        steps = [self.writing[name]] if name in self.writing else self.reading.get(name, [])
        if steps:
            self.fail(
                number,
                f"{how} in flight: {name} is used by {self.text(steps[0])}, which has not been waited for",
                WAIT_FIRST,
            )
        del self.live[name]
        self.dead[name] = (number, how)

    # ------------------------------------------------------------ signatures

    def run(self, number: int, instr: Run) -> None:
        segment = self.schedule.segments.get(instr.segment)
        if segment is None:
            self.fail(
                number, f"unknown segment: {instr.segment} is not in schedule.segments", "add the segment"
            )
        for what, names, values in (
            ("ins", instr.ins, segment.inputs),
            ("outs", instr.outs, segment.outputs),
        ):
            if len(names) != len(values):
                self.fail(
                    number,
                    f"signature mismatch: {len(names)} {what} for the {len(values)} of {segment.name}",
                    f"its signature is {segment.signature}",
                )
            for name, (dtype, layout) in zip(names, values, strict=True):
                buffer = self.buffer(number, name)
                if buffer.dtype is dtype and buffer.layout is layout:
                    continue
                if buffer.dtype != dtype:
                    self.fail(
                        number,
                        f"wrong dtype: {buffer} in place of {dtype} {layout} of {segment.name}",
                        "convert it, or call a segment for its dtype",
                    )
                if buffer.layout != layout and not same(buffer.layout, layout):
                    self.fail(
                        number,
                        f"wrong shape: {buffer} in place of {layout} of {segment.name}",
                        "reshard it, or call a segment for its layout",
                    )
        taken: set[int] = set()
        times = Counter(instr.ins) if instr.inplace else Counter()
        for out, source in instr.inplace:
            if out >= len(instr.outs) or source >= len(instr.ins) or out in taken:
                self.fail(
                    number,
                    f"inplace pair ({out}, {source}) does not name an output and an input",
                    "pair (position in outs, position in ins), each output once",
                )
            taken.add(out)
            a, b = self.buffers[instr.outs[out]], self.buffers[instr.ins[source]]
            if a.dtype != b.dtype or not _same_shards(a.layout, b.layout):
                self.fail(
                    number, f"wrong shape: {a} cannot take the storage of {b}", "give it its own storage"
                )
            if times[b.name] > 1:
                self.fail(
                    number,
                    f"overwritten in use: {b.name} is overwritten and also another input of the run",
                    "do not run this in place",
                )
            self.end_life(number, b.name, "overwritten")

    def collective(self, number: int, instr: Collective) -> None:
        if len(instr.ins) != len(instr.outs) or not instr.ins:
            self.fail(
                number, f"{len(instr.ins)} ins for {len(instr.outs)} outs", "pair every input with an output"
            )
        first = self.buffers[instr.ins[0]]
        for source, target in zip(instr.ins, instr.outs, strict=True):
            a, b = self.buffers[source], self.buffer(number, target)
            if a.dtype != b.dtype or a.dtype != first.dtype:
                other = b if a.dtype == first.dtype else a
                self.fail(
                    number, f"wrong dtype: {other} in a step on {first}", "a bucket has one dtype throughout"
                )
            key = (instr.kind, instr.axes, instr.reduce, instr.sources, id(a.layout), id(b.layout))
            if key in self.legal:
                continue
            self.legal.add(key)
            problem = fault(instr.kind, instr.axes, instr.reduce, a.layout, b.layout, instr.sources)
            if problem is not None:
                self.fail(
                    number, f"{problem} ({source} -> {target})", "plan the step with the reshard planner"
                )
        if not instr.inplace:
            return
        if instr.kind != "all_reduce" or len(set(instr.ins)) < len(instr.ins):
            self.fail(
                number,
                f"in place: {instr.kind} of {', '.join(instr.ins)}",
                "only an all_reduce of tensors that differ can take the place of its inputs",
            )
        for name in instr.ins:
            self.end_life(number, name, "overwritten")

    # ------------------------------------------------------------ the end

    def end(self) -> None:
        for name in self.program.results:
            if name not in self.live:
                self.buffer(None, name)
                if name in self.dead:
                    number, how = self.dead[name]
                    self.fail(
                        number,
                        f"missing result: {name} is a result of the program, but was {how}",
                        "keep results to the end",
                    )
                self.fail(None, f"missing result: nothing writes {name}", "write every result")
        pending = sorted({step for steps in self.waitable.values() for step in steps})
        if pending:
            step = self.program.instrs[pending[0]]
            self.fail(
                pending[0],
                f"never waited for: the step on {_first(step.writes or step.reads)} is in flight "
                "at the end of the program",
                WAIT_FIRST,
            )
        for name, writer in self.live.items():
            kept = name in self.results or (name in self.arguments and name not in self.program.donated)
            if not kept:
                what = "a donated argument" if writer is None else "no result"
                self.fail(
                    writer,
                    f"leak: {name} is {what} and still live at the end of the program",
                    "free it after its last use; the pass early_free does",
                )


def _remove(steps: dict[str, list[int]], name: str, step: int) -> None:
    left = steps.get(name)
    if left and step in left:
        left.remove(step)
        if not left:
            del steps[name]


def _first(names: Iterable[str]) -> str:
    return next(iter(names), "nothing")


@functools.lru_cache(maxsize=65536)
def _same_shards(a: Layout, b: Layout) -> bool:
    """Whether every rank holds the same shape under both."""
    return a is b or same(a.drop_unreduced(), b.drop_unreduced())
