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

from fparallel.errors import LayoutError
from fparallel.mesh import Axis, Mesh, merge_axes

Coords = Mapping[str, int]
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
class Factor:
    """A factor of a dim: its size and the axes that shard it, major first."""

    size: int
    axes: tuple[Axis, ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.size, self.axes))

    def __reduce__(self) -> tuple:
        return Factor, (self.size, self.axes)

    @functools.cached_property
    def num_shards(self) -> int:
        return math.prod(axis.size for axis in self.axes)

    def piece(self, coords: Coords) -> tuple[int, int]:
        """(start, length) of the interval that the rank at `coords` holds."""
        return piece(self.size, self.axes, coords)

    def __str__(self) -> str:
        axes = "*".join(map(str, compact(self.size, self.axes)))
        return f"{self.size}@{axes}" if axes else str(self.size)


Dim = tuple[Factor, ...]


def piece(size: int, axes: Sequence[Axis], coords: Coords) -> tuple[int, int]:
    """(start, length) of what nested ceil chunks of range(size) over `axes` give the rank at `coords`."""
    start, length = 0, size
    for axis in axes:
        chunk = -(-length // axis.size)
        offset = min(axis.digit(coords) * chunk, length)
        start, length = start + offset, min(chunk, length - offset)
    return start, length


def chunk_sizes(length: int, axes: Sequence[Axis]) -> tuple[int, ...]:
    """The lengths of all pieces of a piece of `length` split over `axes`, in group order."""
    sizes = [length]
    for axis in axes:
        split = []
        for size in sizes:
            chunk = -(-size // axis.size)
            split += [max(0, min(chunk, size - i * chunk)) for i in range(axis.size)]
        sizes = split
    return tuple(sizes)


def compact(size: int, axes: Sequence[Axis]) -> tuple[Axis, ...]:
    """`axes` with neighbouring digits of one axis joined where that keeps every piece of range(size).

    8@tp:(1)2*tp:(2)2 is 8@tp, with pieces of 2; but 5@tp:(1)2*tp:(2)2 has pieces of 2, 1, 1, 1 and 5@tp of 2,
    2, 1, 0.
    """
    merged: list[Axis] = []
    for axis in axes:
        last = merged[-1] if merged else None
        if last and last.name == axis.name and last.pre * last.size == axis.pre:
            joined = [*merged[:-1], Axis(last.name, last.size * axis.size, last.pre, last.total)]
            if chunk_sizes(size, joined) == chunk_sizes(size, [*merged, axis]):
                merged = joined
                continue
        merged.append(axis)
    return tuple(merged)


def axis_atoms(*lists: Sequence[Axis]) -> dict[str, tuple[Axis, ...]]:
    """Per axis name its digits, cut at every sub-axis boundary; names whose cuts do not nest are left out."""
    cuts: dict[str, set[int]] = {}
    totals: dict[str, int] = {}
    for axis in itertools.chain(*lists):
        cuts.setdefault(axis.name, {1, axis.total}).update((axis.pre, axis.pre * axis.size))
        totals[axis.name] = axis.total
    atoms = {}
    for name, bounds in cuts.items():
        chain = sorted(bounds)
        if len(chain) > 2 and not any(high % low for low, high in itertools.pairwise(chain)):
            total = totals[name]
            digits = itertools.pairwise(chain)
            atoms[name] = tuple(Axis(name, high // low, low, total) for low, high in digits)
    return atoms


def refine_axes(size: int, axes: Sequence[Axis], atoms: Mapping[str, tuple[Axis, ...]]) -> tuple[Axis, ...]:
    """`axes` written as the sub-axes in `atoms`, except where that would change the pieces of range(size)."""
    result: tuple[Axis, ...] = ()
    for axis in axes:
        parts = atoms_of(axis, atoms)
        keeps = len(parts) == 1 or chunk_sizes(size, result + parts) == chunk_sizes(size, (*result, axis))
        result += parts if keeps else (axis,)
    return result


def normal_dim(factors: Iterable[Factor]) -> Dim:
    """The shortest chain of factors with the same index sets.

    An empty dim is one factor of 0. What shards factors of 1 (one rank has it, the others have nothing) says
    the same anywhere in the chain, and stands first.
    """
    ones: tuple[Axis, ...] = ()
    result: list[Factor] = []
    for factor in factors:
        if factor.size == 0:
            return (Factor(0),)
        axes = tuple(axis for axis in factor.axes if axis.size > 1)
        factor = Factor(factor.size, axes)
        if factor.size == 1:
            ones += axes
            continue
        if result and _joins(result[-1], factor):
            result[-1] = Factor(result[-1].size * factor.size, result[-1].axes + axes)
        else:
            result.append(factor)
    if ones:
        result.insert(0, Factor(1, ones))
    return tuple(result) or (Factor(1),)


def _joins(a: Factor, b: Factor) -> bool:
    """Whether (a b) has the index sets of the one factor that has the axes of both."""
    shards = a.num_shards
    if not b.axes and a.size % shards == 0:
        return True
    if b.axes and not a.axes:
        return False
    if a.size == shards:
        return True
    held = chunk_sizes(a.size, a.axes)
    if b.axes and max(held) > 1:
        return False
    return chunk_sizes(a.size * b.size, a.axes) == tuple(n * b.size for n in held)


@dataclass(frozen=True)
class Layout:
    """Where the parts of one tensor lie. Make with `Layout.of`, which normalises."""

    dims: tuple[Dim, ...]
    unreduced: tuple[tuple[Axis, str], ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
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

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return tuple(math.prod(f.size for f in dim) for dim in self.dims)

    @functools.cached_property
    def sharded_axes(self) -> tuple[Axis, ...]:
        return tuple(axis for dim in self.dims for factor in dim for axis in factor.axes)

    @functools.cached_property
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

    @functools.cached_property
    def max_local_numel(self) -> int:
        """Elements on the fullest rank."""
        return math.prod(
            chunk_sizes(f.size, f.axes)[0] if f.axes else f.size for dim in self.dims for f in dim
        )

    @functools.cached_property
    def is_even(self) -> bool:
        """Whether every rank holds the same shape."""
        return all(f.size % f.num_shards == 0 for dim in self.dims for f in dim)

    def runs(self, coords: Coords) -> tuple[tuple[tuple[int, int, int], ...], ...]:
        """Per dim the (start, count, stride) of each factor: index = sum((start + j) * stride), j < count."""
        result = []
        for dim in self.dims:
            stride, runs = 1, []
            for factor in reversed(dim):
                start, count = factor.piece(coords)
                runs.append((start, count, stride))
                stride *= factor.size
            result.append(tuple(reversed(runs)))
        return tuple(result)

    def indices(self, coords: Coords) -> list[torch.Tensor]:
        """Per dim the global indices that the rank at `coords` holds, int64, in local order."""
        result = []
        for runs in self.runs(coords):
            index = torch.zeros(1, dtype=torch.int64)
            for start, count, stride in runs:
                step = (torch.arange(count) + start) * stride
                index = (index[:, None] + step[None, :]).reshape(-1)
            result.append(index)
        return result

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


def atoms_of(axis: Axis, atoms: Mapping[str, tuple[Axis, ...]]) -> tuple[Axis, ...]:
    """The sub-axes of `atoms` that make up `axis`."""
    last = axis.pre * axis.size
    parts = tuple(a for a in atoms.get(axis.name, (axis,)) if a.pre >= axis.pre and a.pre * a.size <= last)
    return parts if math.prod(a.size for a in parts) == axis.size else (axis,)


def mesh_atoms(mesh: Mesh, layouts: Iterable[Layout]) -> dict[str, tuple[Axis, ...]]:
    """Cuts every axis of the mesh at each sub-axis boundary that occurs in `layouts`."""
    cuts = {name: {1, size} for name, size in mesh.shape.items()}
    for layout in layouts:
        for axis in layout.sharded_axes + layout.unreduced_axes:
            cuts[axis.name] |= {axis.pre, axis.pre * axis.size}
    atoms = {}
    for name, size in mesh.shape.items():
        chain = sorted(cuts[name])
        for low, high in itertools.pairwise(chain):
            if high % low:
                raise LayoutError(
                    f"sub-axes of {name} (size {size}) cut it at {low} and {high}, which do not nest",
                    fix="use sizes of which each divides the next, or replicate one of the tensors",
                )
        digits = tuple(Axis(name, high // low, low, size) for low, high in itertools.pairwise(chain))
        atoms[name] = digits or (Axis(name, 1),)
    return atoms


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


# ---------------------------------------------------------------- equality and regrouping


def same_dim(a: Dim, b: Dim) -> bool:
    """Whether two dims give every rank the same indices."""
    if a == b:
        return True
    total = math.prod(f.size for f in a)
    if total != math.prod(f.size for f in b):
        return False
    if total == 0:
        return True
    totals = {axis.name: axis.total for f in a + b for axis in f.axes}
    digits = itertools.product(*map(range, totals.values()))
    ranks = (dict(zip(totals, at, strict=True)) for at in digits)
    pair = align(a, b)
    if pair is None:
        left, right = Layout((a,)), Layout((b,))
        return all(torch.equal(left.indices(coords)[0], right.indices(coords)[0]) for coords in ranks)
    if all(compact(x.size, x.axes) == compact(y.size, y.axes) for x, y in zip(*pair, strict=True)):
        return True
    if all(f.size % f.num_shards == 0 for f in pair[0] + pair[1]):
        return False  # without empty or uneven pieces, other axes give other starts
    for coords in ranks:
        old, new = [f.piece(coords) for f in pair[0]], [f.piece(coords) for f in pair[1]]
        if old != new and (all(n for _, n in old) or all(n for _, n in new)):
            return False
    return True


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


def common_refinement(*chains: Sequence[int]) -> tuple[int, ...] | None:
    """The coarsest chain of factors that refines all of `chains` (equal products), or None.

    (6, 4) and (3, 8) give (3, 2, 4); (4, 6) and (3, 8) have none.
    """
    total = math.prod(chains[0])
    if total == 0:
        return tuple(chains[0]) if all(tuple(c) == tuple(chains[0]) for c in chains) else None
    bounds = {1, total}
    for chain in chains:
        product = 1
        for size in reversed(chain):
            product *= size
            bounds.add(product)
    ordered = sorted(bounds)
    if any(high % low for low, high in itertools.pairwise(ordered)):
        return None
    return tuple(high // low for low, high in reversed(list(itertools.pairwise(ordered))))


def align(a: Dim, b: Dim) -> tuple[Dim, Dim] | None:
    """Two dims of one size over one common chain of factors, or None if their shards do not allow it.

    `8@dp` and `(2 4@tp)` are `(2@dp 4)` and `(2 4@tp)`.
    """
    a, b = normal_dim(a), normal_dim(b)
    if len(a) == len(b) and all(x.size == y.size for x, y in zip(a, b, strict=True)):
        return a, b
    chain = common_refinement([f.size for f in a], [f.size for f in b])
    if chain is None:
        return None
    atoms = axis_atoms(*(f.axes for f in a + b))
    if atoms:
        a, b = (tuple(Factor(f.size, refine_axes(f.size, f.axes, atoms)) for f in dim) for dim in (a, b))
    if a[0].size == 1 or b[0].size == 1:
        chain = (1, *chain)
    left, right = regroup(a, chain, cut_axes=True), regroup(b, chain, cut_axes=True)
    return None if left is None or right is None else (left, right)


def regroup(dim: Dim, sizes: Sequence[int], *, cut_axes: bool = False) -> Dim | None:
    """`dim` over exactly the factors `sizes` (of its product), or None if its shards do not allow it.

    With `cut_axes` an axis may be cut in sub-axes: for a tp of 4, 8@tp over (2, 4) is (2@tp:(1)2 4@tp:(2)2).
    """
    if not any(f.axes for f in dim):
        return tuple(Factor(size) for size in sizes)
    if math.prod(sizes) == 0:
        return None
    ones = tuple(axis for f in dim for axis in f.axes if f.size == 1)
    left = [f for f in dim if f.size != 1]
    result = []
    for size in sizes:
        if size == 1:
            result.append(Factor(1, ones))
            ones = ()
            continue
        parts: list[Factor] = []
        need = size
        while need > 1:
            if not left:
                return None
            head = left.pop(0)
            if need % head.size == 0:
                parts.append(head)
                need //= head.size
                continue
            split = split_factor(head, need, cut_axes=cut_axes)
            if split is None:
                return None
            parts.append(split[0])
            left.insert(0, split[1])
            need = 1
        merged = normal_dim(parts)
        if len(merged) != 1:
            return None
        result.append(merged[0])
    return None if left or ones else tuple(result)


def split_factor(factor: Factor, major: int, *, cut_axes: bool = False) -> tuple[Factor, Factor] | None:
    """A factor as (major, rest) with the same index sets, or None; `cut_axes` as in `regroup`."""
    if major == 0 or factor.size % major:
        return None
    rest, shards = factor.size // major, 1
    if major % factor.num_shards == 0:
        return Factor(major, factor.axes), Factor(rest)
    for i, axis in enumerate(factor.axes):
        part, left_over = divmod(major, shards)
        shards *= axis.size
        divides = 1 < part < axis.size and not (left_over or axis.size % part or factor.size % shards)
        if cut_axes and divides:
            high = Axis(axis.name, part, axis.pre, axis.total)
            low = Axis(axis.name, axis.size // part, axis.pre * part, axis.total)
            before, after = factor.axes[:i], factor.axes[i + 1 :]
            return Factor(major, (*before, high)), Factor(rest, (low, *after))
        outer, inner = Factor(major, factor.axes[: i + 1]), Factor(rest, factor.axes[i + 1 :])
        if shards == major:
            return outer, inner
        if factor.size % shards and _joins(outer, inner):
            return outer, inner
    return None


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
