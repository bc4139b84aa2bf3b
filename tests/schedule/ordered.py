"""Schedules of instructions from the rows of a pipeline order: every task a Run, every step between ranks a Send."""

from __future__ import annotations

import torch

from fparallel.layout import parse
from fparallel.mesh import Mesh
from fparallel.schedule import Buffer, Free, Instr, Program, Recv, Run, Schedule, Segment, Send, Wait
from fparallel.schedule.tasks import Cost, Plan, Task, plan_times, unit_cost


def from_plan(plan: Plan, cost: Cost = unit_cost, *, agreed: bool = True) -> Schedule:
    """F of stage s makes act.s+1 from act.s, B makes grad.s from grad.s+1, and what runs last adds to the weights.

    With `agreed`, all ranks send and receive in the order in which the tasks end at these costs, which must not be 0.
    Else a rank receives right before the task that needs the value, in the order of its own row.
    """
    mesh = Mesh((plan.ranks,), ("pp",))
    pp, layout = mesh.axis("pp"), parse("f32[4]", mesh)[1]
    value = (torch.float32, layout)
    segments = {
        name: Segment(name, (value,) * ins, (value,), (), (), flops=1, fingerprint=f"{i:012x}")
        for i, (name, ins) in enumerate((("F", 1), ("B", 2), ("W", 2)))
    }
    buffers: dict[str, Buffer] = {}
    instrs: list[list[Instr]] = [[] for _ in range(plan.ranks)]
    arguments: list[list[str]] = [[] for _ in range(plan.ranks)]
    results: list[list[str]] = [[] for _ in range(plan.ranks)]
    held: list[dict[str, int]] = [
        {} for _ in range(plan.ranks)
    ]  # per rank, how often a value is still to be read

    def buffer(name: str, kind: str = "temp") -> str:
        return buffers.setdefault(name, Buffer(name, torch.float32, layout, kind)).name

    def reads(task: Task) -> tuple[str, ...]:
        act, grad = f"act.{task.stage}.{task.micro}", f"grad.{task.stage + 1}.{task.micro}"
        if task.kind != "F" and task.stage + 1 == plan.stages:
            grad = f"act.{plan.stages}.{task.micro}"
        return (act,) if task.kind == "F" else (act, grad)

    def writes(task: Task) -> str:
        if task.kind == "F":
            return buffer(f"act.{task.stage + 1}.{task.micro}")
        if task.kind == "B":
            return buffer(f"grad.{task.stage}.{task.micro}", "result" if task.stage == 0 else "temp")
        return buffer(f"weight.{task.stage}.{task.micro}", "result")

    for rank, row in enumerate(plan.rows):
        for task in row:
            for name in reads(task):
                held[rank][name] = held[rank].get(name, 0) + 1
            if task.kind == "F" and task.stage == 0:
                arguments[rank].append(buffer(reads(task)[0], "argument"))
            if buffers[writes(task)].kind == "result":
                results[rank].append(writes(task))

    def target(task: Task) -> int | None:
        """The other rank that needs what a task makes."""
        stage = task.stage + {"F": 1, "B": -1, "W": 0}[task.kind]
        if task.kind == "W" or not 0 <= stage < plan.stages or plan.place[stage] == plan.place[task.stage]:
            return None
        return plan.place[stage]

    done = plan_times(plan, cost)
    came: list[set[str]] = [set() for _ in range(plan.ranks)]
    for task in sorted(done, key=lambda task: done[task][1]):
        rank = plan.place[task.stage]
        mine, out = instrs[rank], writes(task)
        for name in reads(task):
            maker = _maker(name, plan.stages)
            if maker is None or plan.place[maker.stage] == rank or name in came[rank]:
                continue
            came[rank].add(name)
            if not agreed:
                mine.append(Recv(pp, plan.place[maker.stage], (name,)))
            mine.append(Wait((name,)))
        mine.append(Run(task.kind, reads(task), (out,), str(task)))
        for name in reads(task):
            held[rank][name] -= 1
            if not held[rank][name] and buffers[name].kind == "temp":
                mine.append(Free((name,)))
        other = target(task)
        if other is not None:
            mine.append(Send(pp, other, (out,)))
            if agreed:
                instrs[other].append(Recv(pp, rank, (out,)))
    for mine in instrs:
        sent = [name for instr in mine if isinstance(instr, Send) for name in instr.ins]
        mine += [Wait(tuple(sent)), Free(tuple(sent))] if sent else []
    programs = [
        Program((("pp", rank),), tuple(arguments[rank]), tuple(results[rank]), frozenset(), tuple(mine))
        for rank, mine in enumerate(instrs)
    ]
    return Schedule(mesh, buffers, segments, tuple(programs))


def _maker(name: str, stages: int) -> Task | None:
    kind, stage, micro = name.split(".")
    if kind == "grad":
        return Task("B", int(stage), int(micro))
    return Task("F", int(stage) - 1, int(micro)) if int(stage) else None
