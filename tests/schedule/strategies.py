"""Random valid schedules.

    @given(random_schedules())        runs and collectives on random layouts, one program for all ranks
    @given(training_schedules())      a ZeRO-3 step: gathers, forward, backward, reduce-scatters, an update
    in place @given(pipeline_schedules())      the same over pipeline stages, with sends and receives

Sizes are drawn by hypothesis, so that failures shrink; the rest comes from a seed.
"""

from __future__ import annotations

import math
import random

import torch
from hypothesis import strategies as st

from fparallel.factors import Factor
from fparallel.layout import Layout
from fparallel.mesh import Axis, Mesh
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
from fparallel.schedule.ir import is_async, overwritten, wait_names

NAMES = (
    "state.params.blocks.{}.up",
    "state.params.blocks.{}.down",
    "state.opt_state.mu.{}",
    "batch.x{}",
    "odd # {}, (x)",
)
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.int64)


def segment_of(
    schedule_segments: dict[str, Segment], ins: list[Buffer], outs: list[Buffer], name: str = "seg"
) -> str:
    """The name of a segment with this signature, added if there is none."""
    inputs = tuple((b.dtype, b.layout) for b in ins)
    outputs = tuple((b.dtype, b.layout) for b in outs)
    for known in schedule_segments.values():
        if (known.inputs, known.outputs) == (inputs, outputs) and known.name.startswith(name):
            return known.name
    name = f"{name}.{len(schedule_segments)}"
    schedule_segments[name] = Segment(
        name, inputs, outputs, (), (), 8 * len(name), f"{len(schedule_segments):012x}"
    )
    return name


class Builder:
    """One program under construction."""

    def __init__(
        self, mesh: Mesh, buffers: dict[str, Buffer] | None = None, segments: dict[str, Segment] | None = None
    ):
        self.mesh = mesh
        self.buffers = {} if buffers is None else buffers
        self.segments = {} if segments is None else segments
        self.arguments: list[str] = []
        self.donated: list[str] = []
        self.results: list[str] = []
        self.instrs: list[Instr] = []
        self.stage = 0

    def buffer(
        self, name: str, layout: Layout, kind: str = "temp", dtype: torch.dtype = torch.float32
    ) -> str:
        self.buffers[name] = Buffer(name, dtype, layout, kind)
        return name

    def argument(
        self,
        name: str,
        layout: Layout,
        *,
        donated: bool = False,
        kind: str = "argument",
        dtype: torch.dtype = torch.float32,
    ) -> str:
        self.arguments.append(self.buffer(name, layout, kind, dtype))
        if donated:
            self.donated.append(name)
        return name

    def run(
        self,
        ins: list[str],
        outs: dict[str, Layout],
        label: str = "",
        inplace: tuple[tuple[int, int], ...] = (),
        results: tuple[str, ...] = (),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        kinds = ["result" if name in results else "temp" for name in outs]
        made = [self.buffer(name, outs[name], kind, dtype) for name, kind in zip(outs, kinds, strict=True)]
        self.results += [name for name in outs if name in results]
        seg = segment_of(self.segments, [self.buffers[n] for n in ins], [self.buffers[n] for n in made])
        self.instrs.append(Run(seg, tuple(ins), tuple(made), label, inplace))

    def collective(
        self, kind: str, axes: tuple[Axis, ...], source: str, out: str, layout: Layout, reduce: str = ""
    ) -> None:
        self.buffer(out, layout, dtype=self.buffers[source].dtype)
        self.instrs.append(
            Collective(kind, axes, (source,), (out,), reduce, f"{kind} of {source}", "step.py:7")
        )

    def program(self, role: tuple[tuple[str, int], ...] = ()) -> Program:
        results = tuple(dict.fromkeys(self.results))
        return Program(role, tuple(self.arguments), results, frozenset(self.donated), tuple(self.instrs))

    def schedule(self) -> Schedule:
        return Schedule(self.mesh, self.buffers, self.segments, (self.program(),))


# ---------------------------------------------------------------- random layouts and collectives


def random_mesh(rng: random.Random, max_axes: int = 3, max_ranks: int = 12) -> Mesh:
    names = rng.sample(["dp", "pp", "tp"], rng.randint(1, max_axes))
    sizes: list[int] = []
    for _ in names:
        sizes.append(rng.choice([n for n in (1, 2, 2, 3, 4) if n * math.prod(sizes) <= max_ranks]))
    return Mesh(tuple(sizes), tuple(names))


def _pieces(rng: random.Random, mesh: Mesh) -> list[Axis]:
    pieces = []
    for name, size in mesh.shape.items():
        if size == 4 and rng.random() < 0.4:
            pieces += [Axis(name, 2, 1, 4), Axis(name, 2, 2, 4)]
        else:
            pieces.append(Axis(name, size))
    rng.shuffle(pieces)
    return pieces


def random_layout(rng: random.Random, mesh: Mesh, *, unreduced: bool = True) -> Layout:
    """Up to two dims of up to two factors; every (sub-)axis on some factor, unreduced or replicated."""
    dims = [
        [rng.choice([1, 2, 3, 4, 5, 8, 12]) for _ in range(rng.choice([1, 1, 2]))]
        for _ in range(rng.randint(0, 2))
    ]
    places = [(d, f) for d, dim in enumerate(dims) for f in range(len(dim))]
    axes: dict[tuple[int, int], list[Axis]] = {place: [] for place in places}
    pending = []
    reduction = rng.choice(["sum", "max", "min"])
    for axis in _pieces(rng, mesh):
        choice = rng.random()
        if choice < 0.5 and places:
            axes[rng.choice(places)].append(axis)
        elif choice < 0.75 and unreduced:
            pending.append((axis, reduction))
    factors = [[Factor(size, tuple(axes[d, f])) for f, size in enumerate(dim)] for d, dim in enumerate(dims)]
    return Layout.of(factors, pending)


def collectives_from(layout: Layout) -> list[tuple[str, tuple[Axis, ...], str, Layout]]:
    """(kind, axes, reduce, layout afterwards) of collectives that are legal on a layout."""
    found = []
    places = [(d, f) for d, dim in enumerate(layout.dims) for f in range(len(dim))]

    def axes_at(where: Layout, place: tuple[int, int]) -> tuple[Axis, ...]:
        return where.dims[place[0]][place[1]].axes

    def changed(
        *changes: tuple[tuple[int, int], tuple[Axis, ...]], pending: object = layout.unreduced
    ) -> Layout:
        dims = [list(dim) for dim in layout.dims]
        for (d, f), axes in changes:
            dims[d][f] = Factor(dims[d][f].size, axes)
        return Layout.of(dims, pending)  # type: ignore[arg-type]

    for place in places:
        held = axes_at(layout, place)
        for start in range(len(held)):
            moved, rest = held[start:], held[:start]
            found.append(("all_gather", moved, "", changed((place, rest))))
            for other in places:
                if other != place:
                    after = changed((place, rest), (other, axes_at(layout, other) + moved))
                    found.append(("all_to_all", moved, "", after))
    for axis, reduction in layout.unreduced:
        left = tuple(pair for pair in layout.unreduced if pair[0] != axis)
        found.append(("all_reduce", (axis,), reduction, Layout(layout.dims, left)))
        for place in places:
            after = changed((place, (*axes_at(layout, place), axis)), pending=left)
            found.append(("reduce_scatter", (axis,), reduction, after))
    return found


# ---------------------------------------------------------------- schedules


def random_raw(rng: random.Random, num_steps: int) -> Schedule:
    """Runs and collectives in program order, without waits and frees."""
    mesh = random_mesh(rng)
    b = Builder(mesh)
    for i in range(rng.randint(1, 4)):
        kind = rng.choice(["argument", "argument", "argument", "constant"])
        name = rng.choice(NAMES).format(i)
        donated = kind == "argument" and rng.random() < 0.5
        layout = random_layout(rng, mesh, unreduced=False)
        b.argument(name, layout, donated=donated, kind=kind, dtype=rng.choice(DTYPES))
    pool = list(b.arguments)
    for i in range(num_steps):
        source = rng.choice(pool)
        options = collectives_from(b.buffers[source].layout) if rng.random() < 0.7 else []
        if options:
            kind, axes, reduce, layout = rng.choice(options)
            b.collective(kind, axes, source, f"c.{i}@{kind}", layout, reduce)
            pool.append(f"c.{i}@{kind}")
            continue
        ins = rng.sample(pool, min(len(pool), rng.randint(0, 3)))
        outs = {f"v.{i}.{j}": random_layout(rng, mesh) for j in range(rng.randint(1, 2))}
        free = [n for n in ins if b.buffers[n].kind == "temp" or n in b.donated]
        dtype = rng.choice(DTYPES)
        inplace: tuple[tuple[int, int], ...] = ()
        if free and rng.random() < 0.4:
            dead = rng.choice(free)
            outs[f"v.{i}.0"] = b.buffers[dead].layout
            dtype = b.buffers[dead].dtype
            inplace = ((0, ins.index(dead)),)
            pool.remove(dead)
        b.run(ins, outs, f"step {i}", inplace, dtype=dtype)
        pool += outs
    chosen = rng.sample(pool, rng.randint(1, len(pool)))
    for name in chosen:
        if b.buffers[name].kind == "temp":
            b.buffer(name, b.buffers[name].layout, "result", b.buffers[name].dtype)
        if b.buffers[name].kind != "constant":
            b.results.append(name)
    return b.schedule()


def training_raw(rng: random.Random, num_blocks: int) -> Schedule:
    """A step with parameters sharded over dp and tp, a norm over everything, updates in place."""
    dp, tp = rng.choice([2, 3, 4]), rng.choice([1, 2])
    mesh = Mesh((dp, tp), ("dp", "tp"))
    b = Builder(mesh)
    _training(rng, b, range(num_blocks), first=True, last=True)
    return b.schedule()


def _training(
    rng: random.Random, b: Builder, blocks: range, *, first: bool, last: bool, micro: int = 1
) -> None:
    """Forward and backward of some blocks; activations come from and go to other stages."""
    dp, tp = b.mesh.axis("dp"), b.mesh.axis("tp")
    batch = Layout.of([[Factor(12, (dp,))], [Factor(8)]])
    partial = Layout.of([[Factor(12, (dp,))], [Factor(8)]], [(tp, "sum")])
    shapes = {}
    for k in blocks:
        rows = rng.choice([8, 8, 16])
        shapes[k] = (
            Layout.of([[Factor(rows, (tp,))], [Factor(8, (dp,))]]),
            Layout.of([[Factor(rows, (tp,))], [Factor(8)]]),
            Layout.of([[Factor(rows, (tp,))], [Factor(8)]], [(dp, "sum")]),
        )
        b.argument(f"state.params.blocks.{k}.w", shapes[k][0], donated=True)
    at = blocks[0]
    for m in range(micro):
        if first:
            b.argument(f"batch.x.mb{m}", batch)
            at_name = f"batch.x.mb{m}"
        else:
            at_name = b.buffer(f"act.{at}.mb{m}", batch)
            b.instrs.append(Recv(b.mesh.axis("pp"), b.stage - 1, (at_name,)))
        for k in blocks:
            full = f"params.blocks.{k}.w@full.f{m}"
            b.collective("all_gather", (dp,), f"state.params.blocks.{k}.w", full, shapes[k][1])
            if tp.size > 1:
                b.run([at_name, full], {f"part.{k}.mb{m}": partial}, f"F block.{k} mb{m}")
                b.collective("all_reduce", (tp,), f"part.{k}.mb{m}", f"act.{k + 1}.mb{m}", batch, "sum")
            else:
                b.run([at_name, full], {f"act.{k + 1}.mb{m}": batch}, f"F block.{k} mb{m}")
            at_name = f"act.{k + 1}.mb{m}"
        if not last:
            b.instrs.append(Send(b.mesh.axis("pp"), b.stage + 1, (at_name,)))
    end = blocks[-1] + 1
    for m in reversed(range(micro)):
        if last:
            b.run([f"act.{end}.mb{m}"], {f"dact.{end}.mb{m}": batch}, f"B loss mb{m}")
        else:
            b.buffer(f"dact.{end}.mb{m}", batch)
            b.instrs.append(Recv(b.mesh.axis("pp"), b.stage + 1, (f"dact.{end}.mb{m}",)))
        for k in reversed(blocks):
            full = f"params.blocks.{k}.w@full.b{m}"
            b.collective("all_gather", (dp,), f"state.params.blocks.{k}.w", full, shapes[k][1])
            source = f"act.{k}.mb{m}" if (k > blocks[0] or not first) else f"batch.x.mb{m}"
            outs = {f"dact.{k}.mb{m}": batch, f"grads.blocks.{k}.w.mb{m}": shapes[k][2]}
            b.run([source, full, f"dact.{k + 1}.mb{m}"], outs, f"B block.{k} mb{m}")
            grad = f"grads.blocks.{k}.w.mb{m}"
            b.collective("reduce_scatter", (dp,), grad, f"{grad}@shard", shapes[k][0], "sum")
        if not first:
            b.instrs.append(Send(b.mesh.axis("pp"), b.stage - 1, (f"dact.{blocks[0]}.mb{m}",)))
    scalar = Layout.replicated(())
    axes = tuple(
        axis for axis in (dp, tp, *([b.mesh.axis("pp")] if "pp" in b.mesh.names else [])) if axis.size > 1
    )
    grads = [f"grads.blocks.{k}.w.mb{m}@shard" for k in blocks for m in range(micro)]
    b.run(grads, {"norm.partial": Layout.of([], [(axis, "sum") for axis in axes])}, "norm")
    b.collective("all_reduce", axes, "norm.partial", "norm", scalar, "sum")
    for k in blocks:
        own = [f"grads.blocks.{k}.w.mb{m}@shard" for m in range(micro)]
        new = f"new.params.blocks.{k}.w"
        b.run(
            [f"state.params.blocks.{k}.w", *own, "norm"],
            {new: shapes[k][0]},
            f"update {k}",
            ((0, 0),),
            (new,),
        )


def pipeline_raw(rng: random.Random, num_stages: int, num_micro: int) -> Schedule:
    """One program per stage: all forward, then all backward, then one norm over the whole mesh."""
    sizes = {"pp": num_stages, "dp": 2, "tp": rng.choice([1, 2])}
    order = rng.sample(list(sizes), 3)
    mesh = Mesh(tuple(sizes[name] for name in order), tuple(order))
    buffers: dict[str, Buffer] = {}
    segments: dict[str, Segment] = {}
    programs = []
    for stage in range(num_stages):
        b = Builder(mesh, buffers, segments)
        b.stage = stage
        blocks = range(2 * stage, 2 * stage + 2)
        _training(rng, b, blocks, first=stage == 0, last=stage == num_stages - 1, micro=num_micro)
        programs.append(b.program((("pp", stage),)))
    return Schedule(mesh, buffers, segments, tuple(programs))


# ---------------------------------------------------------------- waits and frees


def with_waits_and_frees(rng: random.Random, schedule: Schedule) -> Schedule:
    """Places waits and frees anywhere that is legal."""
    programs = []
    for program in schedule.programs:
        instrs = _decorated(rng, program)
        programs.append(
            Program(program.role, program.arguments, program.results, program.donated, tuple(instrs))
        )
    return Schedule(schedule.mesh, schedule.buffers, schedule.segments, tuple(programs))


def _decorated(rng: random.Random, program: Program) -> list[Instr]:
    last: dict[str, int] = {name: -1 for name in program.donated}
    for i, instr in enumerate(program.instrs):
        last.update(dict.fromkeys((*instr.reads, *instr.writes), i))
    keep = set(program.results) | (set(program.arguments) - program.donated)
    pending: list[Collective | Send | Recv] = []
    freeable: list[str] = []
    result: list[Instr] = []

    def join(steps: list[Collective | Send | Recv]) -> None:
        for step in steps:
            if step in pending:
                # one output stands for the whole bucket
                names = wait_names(step)
                result.append(Wait(tuple(names) if rng.random() < 0.7 else names[:1]))
                done = set(result[-1].bufs)  # type: ignore[union-attr]
                pending[:] = [other for other in pending if not done & set(wait_names(other))]

    def using(name: str) -> list[Collective | Send | Recv]:
        return [step for step in pending if name in step.reads + step.writes]

    def free(names: list[str]) -> None:
        for name in names:
            join(using(name))
        if names:
            result.append(Free(tuple(names)))
            freeable[:] = [name for name in freeable if name not in names]

    for i, instr in enumerate(program.instrs):
        for name in instr.reads:
            join([step for step in pending if name in step.writes])
        for name in overwritten(instr):
            join(using(name))
        result.append(instr)
        if is_async(instr):
            pending.append(instr)
        gone = set(overwritten(instr))
        freeable += [name for name, at in last.items() if at == i and name not in keep and name not in gone]
        while pending and rng.random() < 0.3:
            join([rng.choice(pending)])
        if freeable and rng.random() < 0.6:
            free(rng.sample(freeable, rng.randint(1, len(freeable))))
    join(list(pending))
    freeable += [name for name, at in last.items() if at == -1 and name not in keep]
    free(list(freeable))
    return result


_seeds = st.integers(0, 2**32 - 1).map(random.Random)


@st.composite
def random_schedules(draw: st.DrawFn, *, raw: bool = False, max_steps: int = 14) -> Schedule:
    """A valid schedule with one program for all ranks; `raw`: without waits and frees."""
    rng = draw(_seeds)
    schedule = random_raw(rng, draw(st.integers(1, max_steps)))
    return schedule if raw else with_waits_and_frees(rng, schedule)


@st.composite
def training_schedules(draw: st.DrawFn, *, raw: bool = False) -> Schedule:
    """A valid ZeRO-3 training step; `raw`: without waits and frees."""
    rng = draw(_seeds)
    schedule = training_raw(rng, draw(st.integers(1, 4)))
    return schedule if raw else with_waits_and_frees(rng, schedule)


@st.composite
def pipeline_schedules(draw: st.DrawFn, *, raw: bool = False) -> Schedule:
    """A valid pipelined training step of two or three stages; `raw`: without waits and frees."""
    rng = draw(_seeds)
    schedule = pipeline_raw(rng, draw(st.integers(2, 3)), draw(st.integers(1, 3)))
    return schedule if raw else with_waits_and_frees(rng, schedule)


def any_schedules(*, raw: bool = False) -> st.SearchStrategy[Schedule]:
    """Any of them."""
    return st.one_of(random_schedules(raw=raw), training_schedules(raw=raw), pipeline_schedules(raw=raw))
