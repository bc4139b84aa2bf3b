"""Ways to break a schedule. Each gives a broken one, or None if it cannot break this one."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence

import torch

from fparallel.factors import Factor
from fparallel.layout import Layout
from fparallel.mesh import Mesh
from fparallel.schedule import (
    Buffer,
    Collective,
    Free,
    Instr,
    Program,
    Recv,
    Run,
    Schedule,
    Segment,
    Send,
    Wait,
)
from fparallel.schedule.ir import communicator, is_async, wait_names

Broken = Schedule | None


def with_instrs(schedule: Schedule, index: int, instrs: Sequence[Instr]) -> Schedule:
    programs = list(schedule.programs)
    programs[index] = dataclasses.replace(programs[index], instrs=tuple(instrs))
    return dataclasses.replace(schedule, programs=tuple(programs))


def pick(
    rng: random.Random, schedule: Schedule, wanted: Callable[[Program, int, Instr], bool]
) -> tuple[int, int] | None:
    """(program, instruction) of a random instruction."""
    found = [
        (p, i)
        for p, program in enumerate(schedule.programs)
        for i, instr in enumerate(program.instrs)
        if wanted(program, i, instr)
    ]
    return rng.choice(found) if found else None


def isolate(schedule: Schedule, rank: int) -> Schedule:
    """The same schedule with a program of its own, the last one, for one rank."""
    coords = schedule.mesh.coords(rank)
    programs: list[Program] = []
    own: Program | None = None
    for program in schedule.programs:
        if any(coords[axis] != at for axis, at in program.role):
            programs.append(program)
            continue
        role = program.role
        for axis in (name for name in schedule.mesh.names if name not in dict(program.role)):
            others = [at for at in range(schedule.mesh.shape[axis]) if at != coords[axis]]
            programs += [dataclasses.replace(program, role=(*role, (axis, at))) for at in others]
            role = (*role, (axis, coords[axis]))
        own = dataclasses.replace(program, role=role)
    assert own is not None
    return dataclasses.replace(schedule, programs=(*programs, own))


def last_use(program: Program, name: str) -> int:
    return max((i for i, instr in enumerate(program.instrs) if name in instr.reads), default=-1)


# ---------------------------------------------------------------- one program


def dropped_wait(rng: random.Random, schedule: Schedule) -> Broken:
    at = pick(rng, schedule, lambda p, i, instr: isinstance(instr, Wait))
    if at is None:
        return None
    instrs = schedule.programs[at[0]].instrs
    return with_instrs(schedule, at[0], [*instrs[: at[1]], *instrs[at[1] + 1 :]])


def wait_after_use(rng: random.Random, schedule: Schedule) -> Broken:
    def used_later(program: Program, i: int, instr: Instr) -> bool:
        return isinstance(instr, Wait) and any(last_use(program, name) > i for name in instr.bufs)

    at = pick(rng, schedule, used_later)
    if at is None:
        return None
    program = schedule.programs[at[0]]
    wait = program.instrs[at[1]]
    assert isinstance(wait, Wait)
    to = max(last_use(program, name) for name in wait.bufs)
    moved = [*program.instrs[: at[1]], *program.instrs[at[1] + 1 : to + 1], wait, *program.instrs[to + 1 :]]
    return with_instrs(schedule, at[0], moved)


def double_free(rng: random.Random, schedule: Schedule) -> Broken:
    at = pick(rng, schedule, lambda p, i, instr: isinstance(instr, Free))
    if at is None:
        return None
    instrs = schedule.programs[at[0]].instrs
    free = instrs[at[1]]
    assert isinstance(free, Free)
    to = rng.randint(at[1] + 1, len(instrs))
    again = Free((rng.choice(free.bufs),))
    return with_instrs(schedule, at[0], [*instrs[:to], again, *instrs[to:]])


def use_after_free(rng: random.Random, schedule: Schedule) -> Broken:
    """A free that comes before the last use."""
    found = []
    for p, program in enumerate(schedule.programs):
        for i, instr in enumerate(program.instrs):
            if isinstance(instr, Free):
                found += [
                    (p, i, name, last_use(program, name))
                    for name in instr.bufs
                    if last_use(program, name) >= 0
                ]
    if not found:
        return None
    p, i, name, use = rng.choice(found)
    instrs = list(schedule.programs[p].instrs)
    instrs[i] = Free(tuple(other for other in instrs[i].bufs if other != name))  # type: ignore[union-attr]
    return with_instrs(schedule, p, [*instrs[:use], Free((name,)), *instrs[use:]])


def dropped_free(rng: random.Random, schedule: Schedule) -> Broken:
    at = pick(rng, schedule, lambda p, i, instr: isinstance(instr, Free))
    if at is None:
        return None
    instrs = schedule.programs[at[0]].instrs
    return with_instrs(schedule, at[0], [*instrs[: at[1]], *instrs[at[1] + 1 :]])


def free_of_unwritten(rng: random.Random, schedule: Schedule) -> Broken:
    at = pick(
        rng, schedule, lambda p, i, instr: any(schedule.buffers[n].kind == "temp" for n in instr.writes)
    )
    if at is None:
        return None
    instrs = schedule.programs[at[0]].instrs
    to = rng.randint(0, at[1])
    free = Free((next(n for n in instrs[at[1]].writes if schedule.buffers[n].kind == "temp"),))
    return with_instrs(schedule, at[0], [*instrs[:to], free, *instrs[to:]])


def read_before_write(rng: random.Random, schedule: Schedule) -> Broken:
    """The producer of a value, gone."""

    def needed(program: Program, i: int, instr: Instr) -> bool:
        return not is_async(instr) and any(last_use(program, name) > i for name in instr.writes)

    at = pick(rng, schedule, needed)
    if at is None:
        return None
    instrs = schedule.programs[at[0]].instrs
    return with_instrs(schedule, at[0], [*instrs[: at[1]], *instrs[at[1] + 1 :]])


def double_write(rng: random.Random, schedule: Schedule) -> Broken:
    at = pick(rng, schedule, lambda p, i, instr: isinstance(instr, Run) and bool(instr.outs))
    if at is None:
        return None
    instrs = schedule.programs[at[0]].instrs
    name = instrs[at[1]].writes[0]
    made, fill = _filler(schedule, (name,))
    to = rng.randint(at[1] + 1, len(instrs))
    return with_instrs(made, at[0], [*instrs[:to], fill, *instrs[to:]])


def missing_result(rng: random.Random, schedule: Schedule) -> Broken:
    """A result that is never written, or is overwritten by the last run."""
    p = rng.randrange(len(schedule.programs))
    program = schedule.programs[p]
    written = [name for name in program.results if schedule.buffers[name].kind == "result"]
    if written and rng.random() < 0.5:
        made, run = _overwriter(schedule, rng.choice(written))
        instrs = program.instrs
        return with_instrs(made, p, [*instrs, run, Free(run.outs)])
    ghost = Buffer("ghost", torch.float32, Layout.replicated((2,)), "result")
    programs = list(schedule.programs)
    programs[p] = dataclasses.replace(program, results=(*program.results, "ghost"))
    return dataclasses.replace(
        schedule, buffers={**schedule.buffers, "ghost": ghost}, programs=tuple(programs)
    )


def result_freed(rng: random.Random, schedule: Schedule) -> Broken:
    p = rng.randrange(len(schedule.programs))
    program = schedule.programs[p]
    written = [name for name in program.results if schedule.buffers[name].kind == "result"]
    return with_instrs(schedule, p, [*program.instrs, Free((rng.choice(written),))]) if written else None


def _overwriter(schedule: Schedule, name: str) -> tuple[Schedule, Run]:
    """A run that takes the storage of a buffer for a new one."""
    buffer = schedule.buffers[name]
    out = dataclasses.replace(buffer, name=f"{name}~", kind="temp")
    value = ((buffer.dtype, buffer.layout),)
    segment = Segment(f"overwrite.{len(schedule.segments)}", value, value, (), (), 0, "0" * 12)
    made = dataclasses.replace(
        schedule,
        buffers={**schedule.buffers, out.name: out},
        segments={**schedule.segments, segment.name: segment},
    )
    return made, Run(segment.name, (name,), (out.name,), "overwrite", ((0, 0),))


def _filler(schedule: Schedule, names: tuple[str, ...]) -> tuple[Schedule, Run]:
    """A run that writes buffers out of nothing."""
    outs = tuple((schedule.buffers[name].dtype, schedule.buffers[name].layout) for name in names)
    segment = Segment(f"fill.{len(schedule.segments)}", (), outs, (), (), 0, "0" * 12)
    return dataclasses.replace(schedule, segments={**schedule.segments, segment.name: segment}), Run(
        segment.name, (), names, "fill"
    )


def overwritten_argument(rng: random.Random, schedule: Schedule) -> Broken:
    p = rng.randrange(len(schedule.programs))
    program = schedule.programs[p]
    kept = [name for name in program.arguments if name not in program.donated]
    if not kept:
        return None
    made, run = _overwriter(schedule, rng.choice(kept))
    to = rng.randint(0, len(program.instrs))
    return with_instrs(made, p, [*program.instrs[:to], run, *program.instrs[to:]])


def freed_argument(rng: random.Random, schedule: Schedule) -> Broken:
    p = rng.randrange(len(schedule.programs))
    program = schedule.programs[p]
    kept = [name for name in program.arguments if name not in program.donated]
    if not kept:
        return None
    to = rng.randint(0, len(program.instrs))
    return with_instrs(schedule, p, [*program.instrs[:to], Free((rng.choice(kept),)), *program.instrs[to:]])


def overwritten_in_flight(rng: random.Random, schedule: Schedule) -> Broken:
    def on_temp(program: Program, i: int, instr: Instr) -> bool:
        return is_async(instr) and any(schedule.buffers[name].kind == "temp" for name in instr.reads)

    at = pick(rng, schedule, on_temp)
    if at is None:
        return None
    instrs = schedule.programs[at[0]].instrs
    name = rng.choice([n for n in instrs[at[1]].reads if schedule.buffers[n].kind == "temp"])
    made, run = _overwriter(schedule, name)
    to = at[1] + 1
    return with_instrs(made, at[0], [*instrs[:to], run, *instrs[to:]])


def wait_for_nothing(rng: random.Random, schedule: Schedule) -> Broken:
    at = pick(rng, schedule, lambda p, i, instr: isinstance(instr, Wait))
    if at is None:
        return None
    instrs = schedule.programs[at[0]].instrs
    to = at[1] + 1
    return with_instrs(schedule, at[0], [*instrs[:to], instrs[at[1]], *instrs[to:]])


# ---------------------------------------------------------------- types


def wrong_shape(rng: random.Random, schedule: Schedule) -> Broken:
    return _retyped_buffer(rng, schedule, lambda b: dataclasses.replace(b, layout=_thicker(b.layout)))


def wrong_dtype(rng: random.Random, schedule: Schedule) -> Broken:
    return _retyped_buffer(rng, schedule, lambda b: dataclasses.replace(b, dtype=torch.float64))


def _thicker(layout: Layout) -> Layout:
    return Layout(((Factor(2),), *layout.dims), layout.unreduced)


def _retyped_buffer(rng: random.Random, schedule: Schedule, change: Callable[[Buffer], Buffer]) -> Broken:
    """One buffer of another type than the steps on it expect (sends and receives expect none)."""
    typed = sorted({
        name
        for program in schedule.programs
        for instr in program.instrs
        if isinstance(instr, (Run, Collective))
        for name in (*instr.reads, *instr.writes)
    })  # fmt: skip
    if not typed:
        return None
    name = rng.choice(typed)
    return dataclasses.replace(schedule, buffers={**schedule.buffers, name: change(schedule.buffers[name])})


def _changed_collective(
    rng: random.Random, schedule: Schedule, change: Callable[[Collective], Collective | None]
) -> Broken:
    at = pick(rng, schedule, lambda p, i, instr: isinstance(instr, Collective) and change(instr) is not None)
    if at is None:
        return None
    instrs = list(schedule.programs[at[0]].instrs)
    changed = change(instrs[at[1]])  # type: ignore[arg-type]
    assert changed is not None
    instrs[at[1]] = changed
    return with_instrs(schedule, at[0], instrs)


def wrong_axes(rng: random.Random, schedule: Schedule) -> Broken:
    def change(step: Collective) -> Collective | None:
        shape = schedule.mesh.shape
        others = [n for n in shape if shape[n] > 1 and n not in {axis.name for axis in step.axes}]
        return dataclasses.replace(step, axes=(schedule.mesh.axis(others[0]),)) if others else None

    return _changed_collective(rng, schedule, change)


def wrong_reduce(rng: random.Random, schedule: Schedule) -> Broken:
    other = {"sum": "max", "max": "min", "min": "sum"}
    return _changed_collective(
        rng,
        schedule,
        lambda step: dataclasses.replace(step, reduce=other[step.reduce]) if step.reduce else None,
    )


def wrong_kind(rng: random.Random, schedule: Schedule) -> Broken:
    other = {"all_gather": "all_to_all", "reduce_scatter": "all_reduce", "all_reduce": "reduce_scatter"}
    return _changed_collective(
        rng,
        schedule,
        lambda step: dataclasses.replace(step, kind=other[step.kind]) if step.kind in other else None,
    )


# ---------------------------------------------------------------- one rank against the others


def _common(rng: random.Random, schedule: Schedule) -> tuple[Schedule, int] | None:
    """A schedule with one rank of its own, which is in a group with ranks that run another program."""
    if schedule.mesh.size == 1:
        return None
    made = isolate(schedule, rng.randrange(schedule.mesh.size))
    return made, len(made.programs) - 1


def dropped_collective_on_one_rank(rng: random.Random, schedule: Schedule) -> Broken:
    """A run makes up what the other ranks communicate."""
    common = _common(rng, schedule)
    if common is None:
        return None
    made, own = common
    at = pick(
        rng,
        made,
        lambda p, i, instr: p is made.programs[own] and isinstance(instr, Collective) and _size(instr) > 1,
    )
    if at is None:
        return None
    program = made.programs[own]
    step = program.instrs[at[1]]
    made, fill = _filler(made, step.writes)
    return with_instrs(made, own, _replaced(program, at[1], fill))


def _size(step: Collective) -> int:
    size = 1
    for axis in step.axes:
        size *= axis.size
    return size


def _replaced(program: Program, at: int, fill: Run | None) -> list[Instr]:
    """The instructions with a communication step and its wait replaced."""
    step = program.instrs[at]
    assert isinstance(step, (Collective, Send, Recv))
    waited = set(wait_names(step))
    instrs: list[Instr] = []
    done = False
    for i, instr in enumerate(program.instrs):
        if i == at:
            instrs += [fill] if fill is not None else []
        elif i > at and not done and isinstance(instr, Wait) and waited & set(instr.bufs):
            done = True
            left = tuple(name for name in instr.bufs if name not in waited)
            instrs += [Wait(left)] if left else []
        else:
            instrs.append(instr)
    return instrs


def swapped_collectives_on_one_rank(rng: random.Random, schedule: Schedule) -> Broken:
    """Two collectives of a group, each in the other's place."""
    common = _common(rng, schedule)
    if common is None:
        return None
    made, own = common
    program = made.programs[own]
    found = []
    for i, first in enumerate(program.instrs):
        if not isinstance(first, Collective) or _size(first) == 1:
            continue
        ready = set(program.arguments).union(*(instr.writes for instr in program.instrs[:i]))
        pending = set(first.outs)
        for j in range(i + 1, len(program.instrs)):
            other = program.instrs[j]
            if isinstance(other, Wait) and pending & set(other.bufs):
                break
            same_group = isinstance(other, Collective) and communicator(other.axes) == communicator(
                first.axes
            )
            if same_group and ready.issuperset(other.ins):
                found.append((i, j))
    if not found:
        return None
    i, j = rng.choice(found)
    instrs = list(program.instrs)
    instrs[i], instrs[j] = instrs[j], instrs[i]
    return with_instrs(made, own, instrs)


def _retyped_rank(
    rng: random.Random,
    schedule: Schedule,
    change: Callable[[torch.dtype, Layout], tuple[torch.dtype, Layout]],
) -> Broken:
    """One rank works on values of another type throughout."""
    common = _common(rng, schedule)
    if common is None:
        return None
    made, own = common
    program = made.programs[own]
    if not any(isinstance(i, Collective) and _size(i) > 1 for i in program.instrs):
        return None
    buffers, segments = dict(made.buffers), dict(made.segments)
    new: dict[str, str] = {}
    for name in [*program.arguments, *(n for i in program.instrs for n in i.writes)]:
        old = buffers[name]
        dtype, layout = change(old.dtype, old.layout)
        new[name] = name if (dtype, layout) == (old.dtype, old.layout) else f"{name}~"
        buffers[new[name]] = dataclasses.replace(old, name=new[name], dtype=dtype, layout=layout)
    instrs: list[Instr] = []
    for instr in program.instrs:
        fields = {
            f: tuple(new[n] for n in getattr(instr, f)) for f in ("ins", "outs", "bufs") if hasattr(instr, f)
        }
        if isinstance(instr, Run):
            old_segment = segments[instr.segment]
            ins, outs = (
                tuple(change(*v) for v in values) for values in (old_segment.inputs, old_segment.outputs)
            )
            segment = dataclasses.replace(old_segment, name=f"{old_segment.name}~", inputs=ins, outputs=outs)
            segments[segment.name] = segment
            fields["segment"] = segment.name
        elif isinstance(instr, Collective) and instr.reduce:
            fields["reduce"] = change(torch.float32, Layout((), ((instr.axes[0], instr.reduce),)))[
                1
            ].unreduced[0][1]
        instrs.append(dataclasses.replace(instr, **fields))
    renamed = Program(
        program.role,
        tuple(new[name] for name in program.arguments),
        tuple(new[name] for name in program.results),
        frozenset(new[name] for name in program.donated),
        tuple(instrs),
    )
    programs = (*made.programs[:own], renamed)
    return dataclasses.replace(made, buffers=buffers, segments=segments, programs=programs)


def shape_on_one_rank(rng: random.Random, schedule: Schedule) -> Broken:
    return _retyped_rank(rng, schedule, lambda dtype, layout: (dtype, _thicker(layout)))


def dtype_on_one_rank(rng: random.Random, schedule: Schedule) -> Broken:
    return _retyped_rank(rng, schedule, lambda dtype, layout: (torch.float64, layout))


def reduce_on_one_rank(rng: random.Random, schedule: Schedule) -> Broken:
    """Another reduction, in the step and in the layouts."""
    other = {"sum": "max", "max": "min", "min": "sum"}
    if not any(isinstance(i, Collective) and i.reduce for p in schedule.programs for i in p.instrs):
        return None

    def change(dtype: torch.dtype, layout: Layout) -> tuple[torch.dtype, Layout]:
        return dtype, Layout(layout.dims, tuple((axis, other[r]) for axis, r in layout.unreduced))

    return _retyped_rank(rng, schedule, change)


# ---------------------------------------------------------------- sends and receives


def missing_recv(rng: random.Random, schedule: Schedule) -> Broken:
    at = pick(rng, schedule, lambda p, i, instr: isinstance(instr, Recv))
    if at is None:
        return None
    program = schedule.programs[at[0]]
    made, fill = _filler(schedule, program.instrs[at[1]].writes)
    return with_instrs(made, at[0], _replaced(program, at[1], fill))


def missing_send(rng: random.Random, schedule: Schedule) -> Broken:
    at = pick(rng, schedule, lambda p, i, instr: isinstance(instr, Send))
    return (
        None if at is None else with_instrs(schedule, at[0], _replaced(schedule.programs[at[0]], at[1], None))
    )


def swapped_sends(rng: random.Random, schedule: Schedule) -> Broken:
    """What one rank sends to another, in another order (the values are of equal type)."""
    found = []
    for p, program in enumerate(schedule.programs):
        sends = [i for i, instr in enumerate(program.instrs) if isinstance(instr, Send)]
        found += [
            (p, i, j)
            for i in sends
            for j in sends
            if i < j and program.instrs[i].peer == program.instrs[j].peer
        ]  # type: ignore[union-attr]
    if not found:
        return None
    p, i, j = rng.choice(found)
    instrs = list(schedule.programs[p].instrs)
    late = instrs[i]
    assert isinstance(late, Send)
    # the earlier send goes right behind the later one; its wait and the frees of its buffers to the end
    moved, tail = [], []
    for k, instr in enumerate(instrs):
        if k == i:
            continue
        if isinstance(instr, (Wait, Free)) and i < k and set(instr.bufs) & set(late.ins):
            left = tuple(name for name in instr.bufs if name not in late.ins)
            tail.append(dataclasses.replace(instr, bufs=late.ins))
            moved += [dataclasses.replace(instr, bufs=left)] if left else []
        else:
            moved.append(instr)
        if k == j:
            moved.append(late)
    return with_instrs(schedule, p, [*moved, *tail])


def ring(size: int, *, blocking_safe: bool) -> Schedule:
    """Every rank sends to the next and receives from the one before; safe if one of them receives first."""
    mesh = Mesh((size,), ("pp",))
    axis = mesh.axis("pp")
    buffers, programs = {}, []
    value = Layout.replicated((4,))
    for rank in range(size):
        buffers[f"x{rank}"] = Buffer(f"x{rank}", torch.float32, value, "argument")
    segments = {"f": Segment("f", ((torch.float32, value),), ((torch.float32, value),), (), (), 0, "0" * 12)}
    for rank in range(size):
        after, before = (rank + 1) % size, (rank - 1) % size
        buffers[f"y{rank}"] = Buffer(f"y{rank}", torch.float32, value)
    for rank in range(size):
        after, before = (rank + 1) % size, (rank - 1) % size
        make = Run("f", (f"x{rank}",), (f"y{rank}",))
        send, recv = Send(axis, after, (f"y{rank}",)), Recv(axis, before, (f"y{before}",))
        steps = (recv, send) if rank == 0 and blocking_safe else (send, recv)
        ends = (Wait((f"y{rank}", f"y{before}")), Free((f"y{rank}", f"y{before}")))
        programs.append(Program((("pp", rank),), (f"x{rank}",), (), frozenset(), (make, *steps, *ends)))
    return Schedule(mesh, buffers, segments, tuple(programs))


def crossed_groups(*, waits_at_once: bool) -> Schedule:
    """Two ranks reduce over dp, then tp, and two over tp, then dp: each group by itself is consistent."""
    mesh = Mesh((2, 2), ("dp", "tp"))
    dp, tp = mesh.axis("dp"), mesh.axis("tp")
    buffers, programs = {}, []
    for name, axis in (("a", dp), ("b", tp)):
        buffers[name] = Buffer(name, torch.float32, Layout.of([], [(axis, "sum")]), "argument")
        buffers[f"{name}.sum"] = Buffer(f"{name}.sum", torch.float32, Layout.of([]), "result")
    for coords in mesh.rank_coords:
        steps = [
            Collective("all_reduce", (axis,), (n,), (f"{n}.sum",), "sum")
            for n, axis in (("a", dp), ("b", tp))
        ]
        if coords["dp"] != coords["tp"]:
            steps.reverse()
        waits = [Wait(step.outs) for step in steps]
        order = [steps[0], waits[0], steps[1], waits[1]] if waits_at_once else [*steps, *waits]
        programs.append(
            Program(tuple(coords.items()), ("a", "b"), ("a.sum", "b.sum"), frozenset(), tuple(order))
        )
    return Schedule(mesh, buffers, {}, tuple(programs))
