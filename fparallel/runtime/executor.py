"""The executor: a schedule bound to a transport, then run step by step.

Everything that does not depend on tensor values is decided when an `Executor` is made: buffers become
positions in a list, segments become functions, groups become members, waits become the steps that they join.
A run is then one loop over closures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableSequence, Sequence
from typing import Any

import torch
from torch import Tensor

from fparallel.errors import ExecutionError
from fparallel.runtime.exchange import axis_peer, exchange_of
from fparallel.runtime.handshake import fingerprint, parts_of
from fparallel.runtime.segments import bind, failing_op
from fparallel.runtime.transport.base import Pending, Slots, Step, Task, Transport
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
    wait_names,
)
from fparallel.schedule.text import instr_text


class Executor:
    """Runs a schedule on the ranks of this process.

    Args:
      schedule: a verified schedule.
      transport: moves tensors between ranks; `transport.ranks` are the ranks of this process.
      constants: the global value of every buffer of kind "constant", by name.
      compile: "eager" or "inductor": how segments run.
      trace: record after every instruction, per rank, the bytes of the live named buffers (`live_bytes`:
        `schedule/memory.py` predicts it) and of the storages behind them (`storage_bytes`).
      check: find mistakes in a schedule at some cost: freed buffers are overwritten before they are dropped,
        and reading one that is not there is an error that names it.

    Raises:
      ExecutionError: the ranks of the job are about to run different programs, a constant is missing, or a
        segment calls an operator that does not exist.
    """

    def __init__(
        self,
        schedule: Schedule,
        transport: Transport,
        constants: Mapping[str, Tensor] | None = None,
        *,
        compile: str = "eager",
        trace: bool = False,
        check: bool = False,
    ) -> None:
        self.schedule, self.transport = schedule, transport
        self.ranks = tuple(transport.ranks)
        self.live_bytes: dict[int, list[int]] = {}
        self.storage_bytes: dict[int, list[int]] = {}
        if len(self.ranks) < schedule.mesh.size:
            parts = parts_of(schedule, constants or {})
            transport.handshake(fingerprint(parts), parts)
        transport.prepare(schedule)
        self._bound = [
            _BoundProgram(
                schedule, transport, rank, constants or {}, compile=compile, trace=trace, check=check
            )
            for rank in self.ranks
        ]
        self._checked = False

    @torch.no_grad()
    def run(self, arguments: Sequence[MutableSequence[Tensor | None]]) -> list[list[Tensor]]:
        """One step.

        Args:
          arguments: per rank of this process (`self.ranks`) the local tensors of its program's arguments, in
            their order, without constants. The entries of donated arguments are taken: they are set to None,
            so that their memory can be reused as soon as the program frees them; in-place writes go into
            those tensors.

        Returns:
          Per rank of this process the local tensors of the results, in their order.

        Raises:
          ExecutionError: an argument does not fit, or a step failed; the message names rank, instruction,
            buffers,
            peers and source line.
        """
        if not self._checked:
            for bound, given in zip(self._bound, arguments, strict=True):
                bound.check_arguments(given)
            self._checked = True
        tasks = [bound.start(given) for bound, given in zip(self._bound, arguments, strict=True)]
        self.transport.execute(tasks)
        results = []
        for bound, task in zip(self._bound, tasks, strict=True):
            results.append(bound.results(task.slots))
            self.live_bytes[bound.rank] = bound.live_bytes
            self.storage_bytes[bound.rank] = bound.storage_bytes
        return results


def _with_cause(instr: Instr) -> str:
    cause = getattr(instr, "cause", "")
    return instr_text(instr) + (f"  # {cause}" if cause else "")


class _BoundProgram:
    """The program of one rank as a list of closures over a list of buffers."""

    def __init__(
        self,
        schedule: Schedule,
        transport: Transport,
        rank: int,
        constants: Mapping[str, Tensor],
        *,
        compile: str,
        trace: bool,
        check: bool,
    ) -> None:
        self.schedule, self.transport, self.rank = schedule, transport, rank
        self.program: Program = schedule.program(rank)
        self.coords = schedule.mesh.coords(rank)
        self.compile, self.trace, self.check = compile, trace, check
        self.device = torch.device(schedule.mesh.device)
        self.live_bytes: list[int] = []
        self.storage_bytes: list[int] = []
        self.slot: dict[str, int] = {}
        self.pending: dict[int, Pending] = {}
        self.template: Slots = []
        self.inputs = []
        for name in self.program.arguments:
            at = self._slot(name)
            if schedule.buffers[name].kind == "constant":
                self.template[at] = self._constant(name, constants)
            else:
                self.inputs.append((at, name))
        self.donated = [i for i, (_, name) in enumerate(self.inputs) if name in self.program.donated]
        self.steps = self._bind()
        self.outputs = [self._slot(name) for name in self.program.results]

    # ------------------------------------------------------------ one run

    def check_arguments(self, given: Sequence[Tensor | None]) -> None:
        if len(given) != len(self.inputs):
            raise ExecutionError(
                f"rank {self.rank} got {len(given)} arguments for the {len(self.inputs)} of its program",
                fix="pass the local tensors of program.arguments, in their order, without constants",
            )
        for (_, name), tensor in zip(self.inputs, given, strict=True):
            buffer = self.schedule.buffers[name]
            expected = buffer.layout.local_shape(self.coords)
            if tensor is None or tuple(tensor.shape) != expected or tensor.dtype != buffer.dtype:
                found = "nothing" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
                raise ExecutionError(
                    f"rank {self.rank}: argument {buffer} is {buffer.dtype} {expected} here, found {found}",
                    fix="shard the argument as the schedule lays it out",
                )

    def start(self, given: MutableSequence[Tensor | None]) -> Task:
        slots = self.template.copy()
        for (at, _), tensor in zip(self.inputs, given, strict=True):
            slots[at] = tensor
        for i in self.donated:
            given[i] = None
        self.pending.clear()
        self.live_bytes, self.storage_bytes = [], []
        return Task(self.rank, self.steps, self.report, slots)

    def results(self, slots: Slots) -> list[Tensor]:
        return [slots[at] for at in self.outputs]  # type: ignore[misc]

    def report(self, number: int) -> str:
        """Where a rank stands: its coordinates, the instruction, its buffers, peers and source line."""
        coords = " ".join(f"{axis}={at}" for axis, at in self.coords.items())
        where = f"rank {self.rank}  ({coords})  "
        if number >= len(self.program.instrs):
            return where + "at the end of its program"
        instr = self.program.instrs[number]
        lines = [f"{where}{number:04d}  {_with_cause(instr)}"]
        if isinstance(instr, Wait):
            waited = [self.program.instrs[n] for n in self.joins[number]]
            lines += [f"    for {_with_cause(other)}" for other in waited]
            lines += [
                f"    at {other.source}" for other in waited if isinstance(other, Collective) and other.source
            ]
        peers = self._peers(number)
        if peers:
            lines.append(f"    peers: {', '.join(map(str, peers))}")
        buffers = (
            list(dict.fromkeys(instr.reads + instr.writes))
            if not isinstance(instr, (Wait, Free))
            else instr.bufs
        )
        lines += [
            f"    buffer {self.schedule.buffers[name]}"
            for name in buffers[:8]
            if name in self.schedule.buffers
        ]
        source = getattr(instr, "source", "")
        lines += [f"    at {source}"] if source else []
        return "\n".join(lines)

    def _peers(self, number: int) -> list[int]:
        mesh, instr = self.schedule.mesh, self.program.instrs[number]
        if isinstance(instr, Collective):
            return [r for r in mesh.group(instr.axes, self.coords) if r != self.rank]
        if isinstance(instr, (Send, Recv)):
            return [axis_peer(mesh, instr.axis, instr.peer, self.rank)]
        if isinstance(instr, Wait):
            return sorted({peer for other in self.joins[number] for peer in self._peers(other)})
        return []

    # ------------------------------------------------------------ binding

    def _slot(self, name: str) -> int:
        if name not in self.slot:
            self.slot[name] = len(self.template)
            self.template.append(None)
        return self.slot[name]

    def _constant(self, name: str, constants: Mapping[str, Tensor]) -> Tensor:
        if name not in constants:
            raise ExecutionError(
                f"the schedule's constant {name!r} was not given", fix="pass it in `constants`"
            )
        layout = self.schedule.buffers[name].layout
        value = constants[name].to(self.device)
        return value if layout.is_replicated else layout.shard(value, self.coords).contiguous()

    def _bind(self) -> list[Step]:
        steps: list[Step] = []
        self.joins: dict[int, tuple[int, ...]] = {}
        in_flight: dict[str, list[int]] = {}
        for number, instr in enumerate(self.program.instrs):
            if isinstance(instr, Run):
                step = self._run(instr)
            elif isinstance(instr, Wait):
                joined = sorted({n for name in instr.bufs for n in in_flight.pop(name, [])})
                self.joins[number] = tuple(joined)
                step = self._wait(joined)
            elif isinstance(instr, Free):
                step = self._free(instr)
            else:
                for name in wait_names(instr):
                    in_flight.setdefault(name, []).append(number)
                step = self._issue(number, instr)
            steps.append(self._checked_step(step, number) if self.check else step)
        if self.trace:
            steps = [self._traced(step) for step in steps]
        return [*steps, self._wait_all()]

    def _run(self, instr: Run) -> Step:
        segments = self.schedule.segments
        segment = segments[instr.segment]
        function = bind(segment, segments, self.coords, instr.inplace, compile=self.compile)
        ins = [self._slot(name) for name in instr.ins]
        outs = [self._slot(name) for name in instr.outs]
        dead = [ins[into] for _, into in instr.inplace]

        def run(slots: Slots) -> None:
            try:
                results = function(*[slots[i] for i in ins])
            except Exception as error:
                op = failing_op(segment, error.__traceback__)
                if op is None:
                    raise
                raise RuntimeError(f"{error}\n    in {op}") from error
            for at in dead:
                slots[at] = None
            for at, result in zip(outs, results):  # noqa: B905  (the verifier has compared their numbers)
                slots[at] = result

        return run

    def _issue(self, number: int, instr: Collective | Send | Recv) -> Step:
        transport, rank = self.transport, self.rank
        ins = [self._slot(name) for name in instr.reads]
        outs = [self._slot(name) for name in instr.writes]
        if isinstance(instr, Collective):
            issue = transport.collective(rank, exchange_of(instr, self.schedule, rank))
        else:
            peer = axis_peer(self.schedule.mesh, instr.axis, instr.peer, rank)
            buffers = [self.schedule.buffers[name] for name in wait_names(instr)]
            signature = "; ".join(f"{b.dtype} {b.layout.local_shape(self.coords)}" for b in buffers)
            one_way = transport.send if isinstance(instr, Send) else transport.recv
            issue = one_way(rank, peer, instr.axis, signature)
        new = []
        inplace = isinstance(instr, Collective) and instr.inplace
        for name in () if inplace else instr.writes:
            buffer = self.schedule.buffers[name]
            new.append((buffer.layout.local_shape(self.coords), buffer.dtype))
        pending, blocks, device, check = self.pending, transport.rendezvous, self.device, self.check

        def step(slots: Slots) -> Sequence[Pending] | None:
            given: Any = [slots[i] for i in ins]
            if inplace:
                given = made = [x.contiguous() for x in given]
                for at in ins:
                    slots[at] = None
            else:
                made = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in new]
                if check:
                    for tensor in made:
                        poison(tensor)
            for at, tensor in zip(outs, made, strict=True):
                slots[at] = tensor
            handle = issue(given, made)
            pending[number] = handle
            return (handle,) if blocks else None

        return step

    def _wait(self, joined: Sequence[int]) -> Step:
        pending = self.pending

        def wait(slots: Slots) -> Sequence[Pending] | None:
            return [pending.pop(n) for n in joined if n in pending]

        return wait

    def _wait_all(self) -> Step:
        pending = self.pending

        def wait(slots: Slots) -> Sequence[Pending] | None:
            left = list(pending.values())
            pending.clear()
            return left or None

        return wait

    def _free(self, instr: Free) -> Step:
        at = [self._slot(name) for name in instr.bufs]
        ours = self.program.donated.union(n for n in instr.bufs if self.schedule.buffers[n].kind == "temp")
        dead = [self._slot(name) for name in instr.bufs if name in ours] if self.check else []

        def free(slots: Slots) -> None:
            for i in dead:
                poison(slots[i])  # type: ignore[arg-type]
            for i in at:
                slots[i] = None

        return free

    def _checked_step(self, step: Step, number: int) -> Step:
        instr = self.program.instrs[number]
        reads = instr.bufs if isinstance(instr, (Wait, Free)) else instr.reads
        needed = [(self._slot(name), name) for name in reads]

        def checked(slots: Slots) -> Sequence[Pending] | None:
            for at, name in needed:
                if slots[at] is None:
                    raise ExecutionError(
                        f"buffer {name} was freed, overwritten in place, or never written\n"
                        f"{self.report(number)}",
                        fix="free a buffer after its last use; schedule.verify() finds this before the run",
                    )
            return step(slots)

        return checked

    def _traced(self, step: Step) -> Step:
        def traced(slots: Slots) -> Sequence[Pending] | None:
            waiting = step(slots)
            live = [x for x in slots if x is not None]
            storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in live}
            self.live_bytes.append(sum(x.nbytes for x in live))
            self.storage_bytes.append(sum(storages.values()))
            return waiting

        return traced


def poison(tensor: Tensor) -> None:
    """Overwrites a dead tensor, so that using it shows."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.fill_(math.nan)
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)
