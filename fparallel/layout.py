"""Layouts: how the dims of a tensor factor, and which mesh axes shard each factor.

    f32[32@dp,256,(3 12@tp 64)]       dim 2 is 3*12*64, sharded over tp on the middle factor
    f32[4096,512]{unreduced: dp:sum}  each dp rank holds a partial sum

Several axes on one factor split it nested, in order (`8@dp*tp`), each in ceil chunks of the current piece, so
any size works: uneven, smaller than the axis, zero. What a rank holds of a dim is a product of intervals over
its factors.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from fparallel._compat import cached_property
from fparallel.errors import LayoutError
from fparallel.factors import (
    Coords,
    Dim,
    Factor,
    atoms_of,
    chunk_sizes,
    dim_indices,
    dim_runs,
    normal_dim,
    refine_axes,
    same_dim,
)
from fparallel.mesh import Axis, Mesh, merge_axes

COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}
REDUCTIONS = tuple(COMBINE)
_BITS = {  # torch cannot index these
    torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64,
}  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """Where the parts of one tensor lie. Make with `Layout.of`, which normalises."""

    dims: tuple[Dim, ...]
    unreduced: tuple[tuple[Axis, str], ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.dims, self.unreduced))

    def __reduce__(self) -> tuple:
        return Layout, (self.dims, self.unreduced)

    @staticmethod
    def of(dims: Iterable[Iterable[Factor]], unreduced: Iterable[tuple[Axis, str]] = ()) -> Layout:
        return _normal_layout(tuple(map(tuple, dims)), tuple(unreduced))

    @staticmethod
    def replicated(shape: Sequence[int]) -> Layout:
        return _replicated(tuple(shape))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return tuple(math.prod(f.size for f in dim) for dim in self.dims)

    @cached_property
    def sharded_axes(self) -> tuple[Axis, ...]:
        return tuple(axis for dim in self.dims for factor in dim for axis in factor.axes)

    @cached_property
    def unreduced_axes(self) -> tuple[Axis, ...]:
        return tuple(axis for axis, _ in self.unreduced)

    @property
    def is_replicated(self) -> bool:
        return not self.sharded_axes and not self.unreduced

    def local_shape(self, coords: Coords) -> tuple[int, ...]:
        """The shape that the rank at `coords` holds."""
        return tuple(math.prod(f.piece(coords)[1] for f in dim) for dim in self.dims)

    def local_factors(self, coords: Coords) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(f.piece(coords)[1] for f in dim) for dim in self.dims)

    @cached_property
    def max_local_numel(self) -> int:
        """Elements on the fullest rank."""
        return math.prod(
            chunk_sizes(f.size, f.axes)[0] if f.axes else f.size for dim in self.dims for f in dim
        )

    @cached_property
    def is_even(self) -> bool:
        """Whether every rank holds the same shape."""
        return all(f.size % f.num_shards == 0 for dim in self.dims for f in dim)

    def runs(self, coords: Coords) -> tuple[tuple[tuple[int, int, int], ...], ...]:
        """Per dim the (start, count, stride) of each factor; see `dim_runs`."""
        return tuple(dim_runs(dim, coords) for dim in self.dims)

    def indices(self, coords: Coords) -> list[torch.Tensor]:
        """Per dim the global indices that the rank at `coords` holds, int64, in local order."""
        return [dim_indices(dim, coords) for dim in self.dims]

    def shard(self, value: torch.Tensor, coords: Coords) -> torch.Tensor:
        """What the rank at `coords` holds of a global tensor (unreduced: the first rank has it all)."""
        for dim, index in enumerate(self.indices(coords)):
            if index.numel() != value.shape[dim] or self.dims[dim] != (Factor(value.shape[dim]),):
                bits = _BITS.get(value.dtype, value.dtype)
                value = value.view(bits).index_select(dim, index.to(value.device)).view(value.dtype)
        if any(axis.digit(coords) for axis in self.unreduced_axes):
            value = torch.full_like(value, identity(self.unreduced[0][1], value.dtype))
        return value

    def unshard(self, shards: Sequence[torch.Tensor], mesh: Mesh) -> torch.Tensor:
        """The global tensor from one shard per rank of the mesh."""
        if self.unreduced:
            return self._reduce_shards(shards, mesh)
        if not self.sharded_axes:
            return shards[0].clone()
        result = shards[0].new_empty(self.shape)
        bits = _BITS.get(result.dtype, result.dtype)
        for coords, shard in zip(mesh.rank_coords, shards, strict=True):
            index = torch.meshgrid(*(i.to(result.device) for i in self.indices(coords)), indexing="ij")
            result.view(bits)[index] = shard.view(bits)
        return result

    def _reduce_shards(self, shards: Sequence[torch.Tensor], mesh: Mesh) -> torch.Tensor:
        whole, axes = Layout(self.dims), self.unreduced_axes
        groups = [mesh.group(axes, coords) for coords in mesh.rank_coords]
        parts = [
            whole.unshard([shards[group[member]] for group in groups], mesh)
            for member in range(math.prod(axis.size for axis in axes))
        ]
        return functools.reduce(COMBINE[self.unreduced[0][1]], parts)

    def with_axes(self, dim: int, factor: int, axes: tuple[Axis, ...]) -> Layout:
        dims = [list(d) for d in self.dims]
        dims[dim][factor] = Factor(dims[dim][factor].size, axes)
        return Layout.of(dims, self.unreduced)

    def drop_unreduced(self) -> Layout:
        return Layout(self.dims)

    def split_axes(self, atoms: Mapping[str, tuple[Axis, ...]]) -> Layout:
        """The same layout with every axis written as the sub-axes that `atoms` gives for its name.

        An axis whose sub-axes would give other pieces (5@tp and 5@tp:(1)2*tp:(2)2 differ) stays as it is.
        """
        dims = [[Factor(f.size, refine_axes(f.size, f.axes, atoms)) for f in dim] for dim in self.dims]
        pending = tuple((a, r) for axis, r in self.unreduced for a in atoms_of(axis, atoms))
        return Layout(tuple(map(tuple, dims)), pending)

    def __str__(self) -> str:
        return typed(None, self)


@functools.lru_cache(maxsize=65536)
def _normal_layout(dims: tuple[tuple[Factor, ...], ...], unreduced: tuple[tuple[Axis, str], ...]) -> Layout:
    pending = sorted(((a, r) for a, r in unreduced if a.size > 1), key=lambda p: (p[0].name, p[0].pre))
    return Layout(tuple(normal_dim(dim) for dim in dims), tuple(pending))


@functools.lru_cache(maxsize=65536)
def _replicated(shape: tuple[int, ...]) -> Layout:
    return Layout(tuple((Factor(size),) for size in shape))


def mesh_atoms(mesh: Mesh, layouts: Iterable[Layout] | Mapping[Layout, str]) -> dict[str, tuple[Axis, ...]]:
    """Cuts every axis of the mesh at each sub-axis boundary that occurs in `layouts` (which may name their leaves).

    Raises:
      LayoutError: two boundaries of one axis do not nest.
    """
    cuts: dict[str, dict[int, Layout | None]] = {
        name: {1: None, size: None} for name, size in mesh.shape.items()
    }
    for layout in layouts:
        for axis in layout.sharded_axes + layout.unreduced_axes:
            for at in (axis.pre, axis.pre * axis.size):
                cuts[axis.name].setdefault(at, layout)
    atoms = {}
    for name, size in mesh.shape.items():
        chain = sorted(cuts[name])
        for low, high in itertools.pairwise(chain):
            if high % low:
                places = [_cut_text(cuts[name][at], layouts) for at in (low, high)]
                raise LayoutError(
                    f"the axis {name} of {size} is cut at {low} by {places[0]} and at {high} by {places[1]}, "
                    "which do not nest",
                    fix="use sizes of which each divides the next, or replicate one of the tensors",
                )
        digits = tuple(Axis(name, high // low, low, size) for low, high in itertools.pairwise(chain))
        atoms[name] = digits or (Axis(name, 1),)
    return atoms


def _cut_text(layout: Layout | None, names: Iterable[Layout] | Mapping[Layout, str]) -> str:
    assert layout is not None  # 1 and the size of the axis divide and are divided by everything
    name = names.get(layout) if isinstance(names, Mapping) else None
    return f"{name} {layout}" if name else str(layout)


def identity(reduction: str, dtype: torch.dtype) -> float | int | bool:
    """The value that leaves a reduction unchanged."""
    if reduction == "sum":
        return 0
    if dtype == torch.bool:
        return reduction == "min"
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    bound = float("inf") if dtype.is_floating_point else info.max
    low = float("-inf") if dtype.is_floating_point else info.min
    return bound if reduction == "min" else low


def same(a: Layout, b: Layout) -> bool:
    """Whether two layouts give every rank the same parts of the tensor."""
    return a is b or _same(a, b)


@functools.lru_cache(maxsize=65536)
def _same(a: Layout, b: Layout) -> bool:
    if a == b:
        return True
    if len(a.dims) != len(b.dims) or set(_flat(a.unreduced)) != set(_flat(b.unreduced)):
        return False
    return all(same_dim(x, y) for x, y in zip(a.dims, b.dims, strict=True))


def _flat(unreduced: tuple[tuple[Axis, str], ...]) -> list[tuple[Axis, str]]:
    by_reduction: dict[str, list[Axis]] = {}
    for axis, reduction in sorted(unreduced, key=lambda p: (p[0].name, p[0].pre)):
        by_reduction.setdefault(reduction, []).append(axis)
    return [(axis, r) for r, axes in by_reduction.items() for axis in merge_axes(axes)]


# ---------------------------------------------------------------- text

_DTYPES = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
    torch.bool: "bool", torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip
_DTYPE_OF = {name: dtype for dtype, name in _DTYPES.items()}


def dtype_text(dtype: torch.dtype) -> str:
    return _DTYPES.get(dtype, str(dtype).removeprefix("torch."))


def typed(dtype: torch.dtype | None, layout: Layout) -> str:
    """`f32[8@dp,(3 12@tp 64)]{unreduced: pp:sum}`; without a dtype the brackets alone."""
    dims = [str(dim[0]) if len(dim) == 1 else "(" + " ".join(map(str, dim)) + ")" for dim in layout.dims]
    text = (dtype_text(dtype) if dtype is not None else "") + "[" + ",".join(dims) + "]"
    if layout.unreduced:
        text += "{unreduced: " + ", ".join(f"{axis}:{r}" for axis, r in _flat(layout.unreduced)) + "}"
    return text


_TYPED = re.compile(r"^([a-z0-9_]*)\[(.*?)\](?:\{unreduced: (.*)\})?$")
_FACTOR = re.compile(r"^(\d+)(?:@(.+))?$")


def parse(text: str, mesh: Mesh) -> tuple[torch.dtype | None, Layout]:
    """Reads what `typed` writes."""
    match = _TYPED.match(text.strip())
    if not match:
        raise LayoutError(f"{text!r} is not a layout", fix="write it like f32[8@dp,4@tp]")
    name, body, pending = match.groups()
    if name and name not in _DTYPE_OF and not isinstance(getattr(torch, name, None), torch.dtype):
        raise LayoutError(f"{text!r} has the unknown dtype {name!r}", fix="use f32, f64, bf16, i64, ...")
    dtype = (_DTYPE_OF.get(name) or getattr(torch, name)) if name else None
    dims = []
    for part in _split_dims(body):
        factors = part[1:-1].split() if part.startswith("(") and part.endswith(")") else [part]
        dims.append(tuple(_parse_factor(f, mesh, text) for f in factors))
    unreduced = []
    for item in filter(None, (pending or "").split(", ")):
        axis, _, reduction = item.rpartition(":")
        unreduced.append((mesh.axis(axis), reduction))
    _check(dims, unreduced, text)
    return dtype, Layout.of(dims, unreduced)


def _check(dims: Sequence[Dim], unreduced: Sequence[tuple[Axis, str]], text: str) -> None:
    reductions = sorted({reduction for _, reduction in unreduced})
    if len(reductions) > 1 or not set(reductions) <= set(REDUCTIONS):
        raise LayoutError(
            f"{text!r} is unreduced by {' and '.join(map(repr, reductions))}",
            fix=f"use one of {', '.join(REDUCTIONS)} for all of its unreduced axes",
        )
    axes = [axis for dim in dims for factor in dim for axis in factor.axes] + [axis for axis, _ in unreduced]
    for a, b in itertools.combinations(axes, 2):
        if not a.independent(b):
            raise LayoutError(
                f"{text!r} uses {a} and {b}, which share ranks" if a != b else f"{text!r} uses {a} twice",
                fix="use every axis, or disjoint sub-axes of it, at most once",
            )


def _split_dims(body: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for i, char in enumerate(body):
        depth += (char == "(") - (char == ")")
        if char == "," and depth == 0:
            parts.append(body[start:i])
            start = i + 1
    return [*parts, body[start:]] if body else []


def _parse_factor(text: str, mesh: Mesh, whole: str) -> Factor:
    match = _FACTOR.match(text)
    if not match:
        raise LayoutError(f"{text!r} in {whole!r} is not a factor", fix="write 8, 8@dp or 8@dp*tp")
    return Factor(int(match.group(1)), mesh.axes(match.group(2) or ""))
