"""Building the schedule: the programs of all roles, their buffers, segments and constants."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from fparallel.compiler.builder import Builder
from fparallel.compiler.context import Context
from fparallel.compiler.local import (
    Call,
    Item,
    Local,
    Role,
    Roles,
    drop_dead,
)
from fparallel.compiler.storage import results_in_place, sums_in_place
from fparallel.compiler.sums import sums_where_made
from fparallel.schedule.ir import Buffer, Program, Run, Schedule


@dataclass
class Lowered:
    """A schedule and the tensors of its constants."""

    schedule: Schedule
    constants: dict[str, torch.Tensor]


def build(
    context: Context,
    items: Sequence[Item],
    arguments: Sequence[Local],
    results: Sequence[Local],
    donated: Sequence[bool],
    same_place: Sequence[int | None],
    place: Callable[[list[Item]], Roles] | None = None,
) -> Lowered:
    """The schedule of a partitioned program, with no waits and frees yet (the passes add them).

    Args:
      arguments, results: the Locals of the step's flattened arguments and outputs.
      donated: per argument.
      same_place: per result the argument whose memory it may take over, or None.
      place: divides the items among the ranks of a pipeline.
    """
    builder = Builder(context)
    for local in arguments:
        builder.name(local, local.name, "argument")
    for item in items:
        if isinstance(item, Call):
            builder.find_unread(item)
    items = drop_dead(items, results)
    given = {}
    for local, tensor in context.constants.items():
        given[builder.name(local, local.name, "constant")] = tensor
    everything = Role((), list(items), [True] * len(arguments), [True] * len(results))
    roles = place(items) if place is not None else Roles([everything], list(results))
    programs = [
        _program(builder, role, arguments, roles.results, donated, same_place, given) for role in roles.roles
    ]
    used = {name for program in programs for name in program.arguments}
    buffers = {n: b for n, b in builder.buffers.items() if b.kind != "constant" or n in used}
    for program in programs:
        for name in program.results:
            if buffers[name].kind == "temp":
                buffers[name] = dataclasses.replace(buffers[name], kind="result")
    run = {i.segment for program in programs for i in program.instrs if isinstance(i, Run)}
    segments = {n: s for n, s in builder.segments.items() if n in run or n in context.map_bodies}
    constants = {name: tensor for name, tensor in given.items() if name in used}
    return Lowered(Schedule(context.mesh, buffers, segments, tuple(programs)), constants)


def _program(
    builder: Builder,
    role: Role,
    arguments: Sequence[Local],
    results: Sequence[Local],
    donated: Sequence[bool],
    same_place: Sequence[int | None],
    constants: Mapping[str, torch.Tensor],
) -> Program:
    """The program of one role."""
    builder.instrs = []
    mine = {i: local for i, local in enumerate(results) if role.results[i]}
    builder.emit(builder.plan(role.items, mine.values(), "step"), builder.names, "", "")
    result_names = _results(builder, mine)
    read = {name for instr in builder.instrs for name in instr.reads} | set(result_names)
    held = [i for i, here in enumerate(role.arguments) if here]
    position = {at: i for i, at in enumerate(held)}
    names = [builder.names[arguments[i]] for i in held]
    donated_names = frozenset(name for i, name in zip(held, names, strict=True) if donated[i])
    places = [
        None if at is None else position.get(at)
        for at, here in zip(same_place, role.results, strict=True)
        if here
    ]
    instrs = sums_where_made(builder.instrs, builder.buffers, builder.segments, result_names)
    instrs = results_in_place(instrs, builder.buffers, names, result_names, donated_names, places)
    instrs = sums_in_place(instrs, builder.buffers, builder.segments)
    used = [name for name in constants if name in read]
    return Program(role.at, (*names, *used), tuple(result_names), donated_names, tuple(instrs))


def _results(builder: Builder, results: Mapping[int, Local]) -> list[str]:
    """The buffers of the outputs, each its own: a value returned twice, or a constant, is copied."""
    names: dict[str, None] = {}
    for i, local in results.items():
        name = builder.name(local, f"out.{i}")
        if name in names or builder.buffers[name].kind == "constant":
            fresh = f"out.{i}"
            builder.buffers[fresh] = Buffer(fresh, local.dtype, local.layout)
            builder.copy(name, local, fresh, "copy")
            name = fresh
        names[name] = None
    return list(names)
