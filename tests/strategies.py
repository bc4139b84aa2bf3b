"""Hypothesis strategies for meshes, layouts and tensors.

@given(data=st.data(), mesh=meshes())
def test_law(data, mesh):
    layout = data.draw(layouts(mesh))
    value = whole_numbers(layout.shape)
"""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st

from fparallel.factors import Factor
from fparallel.layout import Layout
from fparallel.mesh import Axis, Mesh, make_mesh

AXIS_NAMES = ("dp", "pp", "tp", "ep")
# Empty, one, smaller than most axes, prime (uneven) and with many divisors.
SIZES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24)


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


@st.composite
def meshes(draw: st.DrawFn, *, max_ranks: int = 16, max_axes: int = 4) -> Mesh:
    """A simulated mesh of one to four axes (some of size 1) and at most `max_ranks` ranks."""
    sizes: list[int] = []
    for _ in range(draw(st.integers(1, max_axes))):
        room = max_ranks // math.prod(sizes)
        sizes.append(draw(st.sampled_from([s for s in (2, 1, 3, 4, 6, 8) if s <= room])))
    names = draw(st.permutations(AXIS_NAMES))[: len(sizes)]
    return make_mesh(sizes, tuple(names), kind="simulated")


@st.composite
def shapes(draw: st.DrawFn, *, max_dims: int = 3, max_numel: int = 1024) -> tuple[int, ...]:
    shape: list[int] = []
    for _ in range(draw(st.integers(0, max_dims))):
        room = max_numel // max(1, math.prod(shape))
        shape.append(draw(st.sampled_from([s for s in SIZES if s <= room])))
    return tuple(shape)


@st.composite
def factorizations(draw: st.DrawFn, size: int) -> tuple[int, ...]:
    """An ordered factorization of `size`: (24,), (2, 12), (3, 2, 4) ..., now and then with ones."""
    if size == 0:
        return draw(st.sampled_from([(0,), (0, 3), (2, 0)]))
    chain = []
    for _ in range(draw(st.integers(0, 2))):
        factor = draw(st.sampled_from(divisors(size)))
        chain.append(factor)
        size //= factor
    return (*chain, size)


@st.composite
def axis_pieces(draw: st.DrawFn, mesh: Mesh) -> list[Axis]:
    """Every axis of the mesh, whole or cut into sub-axes, in any order."""
    pieces = []
    for name, total in mesh.shape.items():
        pre = 1
        while pre < total:
            size = draw(st.sampled_from([d for d in reversed(divisors(total // pre)) if d > 1]))
            pieces.append(Axis(name, size, pre, total))
            pre *= size
    return draw(st.permutations(pieces))


@st.composite
def layouts(
    draw: st.DrawFn, mesh: Mesh, shape: tuple[int, ...] | None = None, *, unreduced: bool = True
) -> Layout:
    """Any layout on the mesh: each (sub-)axis replicated, on some factor of some dim, or unreduced."""
    shape = draw(shapes()) if shape is None else shape
    chains = [draw(factorizations(size)) for size in shape]
    places: list[object] = [(d, i) for d, chain in enumerate(chains) for i in range(len(chain))]
    axes: dict[object, list[Axis]] = {place: [] for place in places}
    pending: list[Axis] = []
    choices = ["replicated", *places, *(["unreduced"] if unreduced else [])]
    for axis in draw(axis_pieces(mesh)):
        place = draw(st.sampled_from(choices))
        if place == "unreduced":
            pending.append(axis)
        elif place != "replicated":
            axes[place].append(axis)
    reduction = draw(st.sampled_from(["sum", "max", "min"]))
    dims = [[Factor(n, tuple(axes[d, i])) for i, n in enumerate(chain)] for d, chain in enumerate(chains)]
    return Layout.of(dims, [(axis, reduction) for axis in pending])


@st.composite
def chains(draw: st.DrawFn, mesh: Mesh, *, max_factors: int = 5, max_numel: int = 1024) -> list[Factor]:
    """Factors of a tensor, major first, each sharded by some axes: any grouping of them is a layout."""
    sizes: list[int] = []
    for _ in range(draw(st.integers(1, max_factors))):
        room = max_numel // max(1, math.prod(sizes))
        sizes.append(draw(st.sampled_from([s for s in (2, 4, 3, 1, 6, 5) if s <= room])))
    axes: list[list[Axis]] = [[] for _ in sizes]
    for axis in draw(axis_pieces(mesh)):
        place = draw(st.integers(-1, len(sizes) - 1))
        if place >= 0:
            axes[place].append(axis)
    return [Factor(size, tuple(held)) for size, held in zip(sizes, axes, strict=True)]


@st.composite
def groupings(draw: st.DrawFn, chain: list[Factor]) -> list[list[Factor]]:
    """The chain cut into dims."""
    cuts = sorted(draw(st.sets(st.integers(1, len(chain) - 1)))) if len(chain) > 1 else []
    return [chain[a:b] for a, b in zip([0, *cuts], [*cuts, len(chain)], strict=True)]


@st.composite
def laid_out(draw: st.DrawFn, *, unreduced: bool = True) -> tuple[Mesh, Layout]:
    """A mesh and a layout on it."""
    mesh = draw(meshes())
    return mesh, draw(layouts(mesh, unreduced=unreduced))


@st.composite
def laid_out_twice(draw: st.DrawFn, *, unreduced: bool = True) -> tuple[Mesh, Layout, Layout]:
    """A mesh and two layouts of one shape on it."""
    mesh, shape = draw(meshes()), draw(shapes())
    pair = st.tuples(*[layouts(mesh, shape, unreduced=unreduced)] * 2)
    return (mesh, *draw(pair))


def whole_numbers(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """1, 2, 3, ...: every element differs, and sums are exact in any order."""
    return (torch.arange(math.prod(shape)) + 1).to(dtype).reshape(shape)


def spread(value: torch.Tensor, layout: Layout, mesh: Mesh) -> list[torch.Tensor]:
    """One shard per rank that together mean `value`; unreduced parts differ between ranks everywhere.

    Of a sum member k of n holds k and member 0 the rest; of a max (min) member x mod n holds x itself,
    and less (more) on the others.
    """
    whole, axes = layout.drop_unreduced(), layout.unreduced_axes
    n = math.prod(axis.size for axis in axes)
    shards = []
    for coords in mesh.rank_coords:
        part, k = whole.shard(value, coords).clone(), 0
        for axis in axes:
            k = k * axis.size + axis.digit(coords)
        if axes and layout.unreduced[0][1] == "sum":
            part = torch.full_like(part, k) if k else part - n * (n - 1) // 2
        elif axes:
            part = part + (-1 if layout.unreduced[0][1] == "max" else 1) * ((part - k) % n)
        shards.append(part)
    return shards


def index_sets(layout: Layout, mesh: Mesh) -> list[set[int]]:
    """Per rank the flat global positions that it holds."""
    iota = torch.arange(math.prod(layout.shape)).reshape(layout.shape)
    whole = layout.drop_unreduced()
    return [set(whole.shard(iota, coords).flatten().tolist()) for coords in mesh.rank_coords]
