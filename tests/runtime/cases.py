"""Random collectives and schedules, from a seed: the simulated and the real transports run the same ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fparallel.factors import Factor
from fparallel.layout import Layout
from fparallel.mesh import Axis, Mesh, make_mesh
from fparallel.schedule import COLLECTIVES, Buffer, Collective, Free, Program, Schedule, Wait
from fparallel.schedule.geometry import apply, permute_sources

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
SIZES = (0, 1, 2, 3, 4, 5, 7, 8, 12)


def mesh_of(sizes: Sequence[int]) -> Mesh:
    return make_mesh(sizes, ("dp", "pp", "tp")[: len(sizes)], kind="simulated")


@dataclass(frozen=True)
class Case:
    """A bucket of tensors that one collective takes from `ins` to `outs`."""

    mesh: Mesh
    kind: str
    axes: tuple[Axis, ...]
    reduce: str
    dtype: torch.dtype
    ins: tuple[Layout, ...]
    outs: tuple[Layout, ...]
    seed: int

    def shards(self) -> list[list[Tensor]]:
        """Per tensor the shard of every rank: unrelated random values, not parts of one tensor."""
        generator = torch.Generator().manual_seed(self.seed)
        return [
            [random_tensor(at.local_shape(c), self.dtype, generator) for c in self.coords] for at in self.ins
        ]

    @property
    def coords(self) -> tuple[dict[str, int], ...]:
        return self.mesh.rank_coords

    def expected(self) -> list[list[Tensor]]:
        """Per tensor the result of every rank, by the reference geometry."""
        return [
            apply(self.kind, self.axes, self.reduce, src, dst, self.mesh, shards)
            for src, dst, shards in zip(self.ins, self.outs, self.shards(), strict=True)
        ]

    def schedule(self) -> Schedule:
        """The collective, its wait, and the death of its inputs."""
        buffers = {f"x{i}": Buffer(f"x{i}", self.dtype, at, "argument") for i, at in enumerate(self.ins)}
        buffers |= {f"y{i}": Buffer(f"y{i}", self.dtype, at, "result") for i, at in enumerate(self.outs)}
        xs = tuple(f"x{i}" for i in range(len(self.ins)))
        ys = tuple(f"y{i}" for i in range(len(self.ins)))
        instrs = (Collective(self.kind, self.axes, xs, ys, self.reduce), Wait(ys), Free(xs))
        return Schedule(self.mesh, buffers, {}, (Program((), xs, ys, frozenset(xs), instrs),))


def random_tensor(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if not dtype.is_floating_point:
        return torch.randint(0, 100, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def random_case(mesh: Mesh, seed: int, *, kind: str | None = None, numel: int = 0) -> Case:
    """A random collective on the mesh; at least `numel` elements per tensor where that is asked for."""
    while True:
        rng = random.Random(seed)
        found = _attempt(mesh, rng, kind or rng.choice(COLLECTIVES), seed, numel)
        if found is not None:
            return found
        seed += 1_000_003


def _attempt(mesh: Mesh, rng: random.Random, kind: str, seed: int, numel: int) -> Case | None:
    digits = []
    for name, size in mesh.shape.items():
        if size == 4 and rng.random() < 0.4:
            digits += [Axis(name, 2, 1, 4), Axis(name, 2, 2, 4)]
        elif size > 1:
            digits.append(Axis(name, size))
    rng.shuffle(digits)
    count = rng.randint(1, len(digits))
    axes, rest = tuple(digits[:count]), digits[count:]
    reduce = rng.choice(("sum", "max", "min")) if "reduce" in kind else ""
    ins, outs = [], []
    for _ in range(rng.randint(1, 3)):
        pair = _pair(kind, axes, rest, reduce, rng, numel)
        if pair is None or not _moves(kind, axes, *pair):
            return None
        if kind == "permute" and any(permute_sources(*pair, axes, at) is None for at in mesh.rank_coords):
            return None
        ins.append(pair[0])
        outs.append(pair[1])
    dtype = rng.choice(DTYPES)
    return Case(mesh, kind, axes, reduce, dtype, tuple(ins), tuple(outs), seed)


def _moves(kind: str, axes: tuple[Axis, ...], src: Layout, dst: Layout) -> bool:
    """Whether the axes are still there after normalisation, which drops them from empty dims."""
    before = kind in ("reduce_scatter", "all_reduce") or set(axes) <= set(src.sharded_axes)
    return before and (kind in ("all_gather", "all_reduce") or set(axes) <= set(dst.sharded_axes))


def _pair(
    kind: str, axes: tuple[Axis, ...], rest: list[Axis], reduce: str, rng: random.Random, numel: int
) -> tuple[Layout, Layout] | None:
    """The layouts of one tensor before and after."""
    sizes = [[rng.choice(SIZES) for _ in range(rng.randint(1, 2))] for _ in range(rng.randint(1, 3))]
    if numel:
        sizes = [[rng.choice((1, 2)) for _ in dim] for dim in sizes]
        sizes[0][0] = numel + rng.randint(0, 5)
    places = [(d, f) for d, dim in enumerate(sizes) for f in range(len(dim))]
    held: dict[tuple[int, int], list[Axis]] = {place: [] for place in places}
    for axis in rest:
        if rng.random() < 0.5:
            held[rng.choice(places)].append(axis)

    def layout(moved: dict[tuple[int, int], tuple[Axis, ...]], unreduced: tuple[Axis, ...] = ()) -> Layout:
        dims = [
            [Factor(size, (*held[d, f], *moved.get((d, f), ()))) for f, size in enumerate(dim)]
            for d, dim in enumerate(sizes)
        ]
        return Layout.of(dims, [(axis, reduce) for axis in unreduced])

    at, other = rng.choice(places), rng.choice(places)
    if kind == "all_gather":
        return layout({at: axes}), layout({})
    if kind == "reduce_scatter":
        return layout({}, axes), layout({at: axes})
    if kind == "all_reduce":
        return layout({}, axes), layout({})
    if kind == "all_to_all":
        if at == other or sizes[at[0]][at[1]] < 2 or sizes[other[0]][other[1]] < 2:
            return None  # nothing moves, or the axes of the two factors cannot be told apart
        return layout({at: axes}), layout({other: axes})
    if len(axes) < 2:
        return None
    if at == other:
        return layout({at: axes}), layout({at: (axes[-1], *axes[:-1])})
    return layout({at: axes[:1], other: axes[1:]}), layout({at: axes[1:], other: axes[:1]})
