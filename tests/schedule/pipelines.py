"""Pipelines written out: stages that take a given time, in the order of GPipe or of 1F1B."""

from __future__ import annotations

import dataclasses

from fparallel.mesh import Mesh
from fparallel.schedule import Free, Instr, Program, Recv, Run, Schedule, Send, Wait
from tests.runtime.schedules import Builder


def stages(order: str, num_stages: int, num_micro: int, forward: int, backward: int, dp: int = 1) -> Schedule:
    """A pipeline whose stages take `forward` and `backward` flops for a micro-batch, in order "gpipe" or "1f1b"."""
    b = Builder(Mesh((num_stages, dp), ("pp", "dp")))
    for name, flops in (("F", forward), ("B", backward)):
        b.segment(name, ["f32[4]"], ["f32[4]"], [], [])
        b.segments[name] = dataclasses.replace(b.segments[name], flops=flops)
    made = [_Stage(b, stage, num_stages, num_micro) for stage in range(num_stages)]
    schedule = b.schedule(*(stage.gpipe() if order == "gpipe" else stage.one_f_one_b() for stage in made))
    schedule.verify()
    return schedule


class _Stage:
    """One program: F of micro-batch m makes act.{stage + 1}.m of act.{stage}.m, B the gradient the other way."""

    def __init__(self, b: Builder, stage: int, num_stages: int, num_micro: int) -> None:
        self.b, self.stage, self.num_micro = b, stage, num_micro
        self.first, self.last = stage == 0, stage == num_stages - 1
        self.later = num_stages - 1 - stage
        self.pp = b.mesh.axis("pp")
        self.instrs: list[Instr] = []
        for m in range(num_micro):
            b.buffer(f"act.{stage}.{m}", "f32[4]", "argument" if self.first else "temp")
            b.buffer(f"grad.{stage}.{m}", "f32[4]", "result" if self.first else "temp")
            b.buffer(f"act.{num_stages}.{m}", "f32[4]")

    def gpipe(self) -> Program:
        for m in range(self.num_micro):
            self.expect(m)
            self.forward(m)
        for m in range(self.num_micro):
            self.backward(m)
        return self.program()

    def one_f_one_b(self) -> Program:
        """A receive is posted before the send that its sender issues later: both ends agree on the order."""
        warm = min(self.num_micro, self.later)
        for m in range(warm):
            self.expect(m)
            self.forward(m)
        self.expect(warm)
        for m in range(self.num_micro):
            if warm + m < self.num_micro:
                self.forward(warm + m)
                self.expect(warm + m + 1)
            self.backward(m)
        return self.program()

    def expect(self, m: int) -> None:
        if not self.first and m < self.num_micro:
            self.instrs.append(Recv(self.pp, self.stage - 1, (f"act.{self.stage}.{m}",)))

    def forward(self, m: int) -> None:
        source, out = f"act.{self.stage}.{m}", f"act.{self.stage + 1}.{m}"
        if not self.first:
            self.instrs.append(Wait((source,)))
        self.instrs.append(Run("F", (source,), (out,), f"F{m}"))
        if not self.last:
            self.instrs.append(Send(self.pp, self.stage + 1, (out,)))

    def backward(self, m: int) -> None:
        source, out = f"grad.{self.stage + 1}.{m}", f"grad.{self.stage}.{m}"
        if self.last:
            source = f"act.{self.stage + 1}.{m}"
        else:
            self.instrs += [Recv(self.pp, self.stage + 1, (source,)), Wait((source,))]
        self.instrs.append(Run("B", (source,), (out,), f"B{m}"))
        if not self.first:
            self.instrs.append(Send(self.pp, self.stage - 1, (out,)))

    def program(self) -> Program:
        """Waits for what was sent at the end, when nothing else is left to do."""
        sent = [name for instr in self.instrs if isinstance(instr, Send) for name in instr.ins]
        written = [name for instr in self.instrs for name in instr.writes]
        arguments = [f"act.0.{m}" for m in range(self.num_micro)] if self.first else []
        results = [f"grad.0.{m}" for m in range(self.num_micro)] if self.first else []
        temps = [name for name in written if name not in results]
        return self.b.program(
            tuple(arguments),
            tuple(results),
            [*self.instrs, Wait(tuple(sent)), Free(tuple(temps))],
            role=(("pp", self.stage),),
        )
