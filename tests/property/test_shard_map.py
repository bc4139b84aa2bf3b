"""Random programs of ops and collectives: gradients are the numerical ones, on a mesh as in one process."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

import fparallel as fp
from fparallel import P, lax
from tests.shard_map_cases import F64, close, numbers, scalar

MESHES = [
    fp.make_mesh(sizes, names, kind="simulated")
    for sizes, names in (((2,), "a"), ((3,), "a"), ((2, 2), "ab"), ((3, 2), "ab"), ((2, 1, 2), "abc"))
]
SIDE = 2  # of the square tensor that every step takes and returns


def weighted(x, size, dim):
    """[.., size * n, ..] to [.., n, ..]: a sum of the parts that tells them apart."""
    parts = x.chunk(size, dim)
    return sum(part * (i + 1) for i, part in enumerate(parts)) / size


def repeated(x, size, dim):
    """[.., n, ..] to [.., size * n, ..]: the inverse direction."""
    return torch.cat([x * (i + 1) for i in range(size)], dim) / size


STEPS = {
    "tanh": lambda x, x0, w, axes, dim, perm: x.tanh(),
    "scale": lambda x, x0, w, axes, dim, perm: x * w,
    "rest": lambda x, x0, w, axes, dim, perm: x + 0.5 * x0,
    "shift": lambda x, x0, w, axes, dim, perm: (x.roll(1, dim) + w.sum()) / 2,
    "place": lambda x, x0, w, axes, dim, perm: x * (lax.axis_index(axes) + 1) / lax.axis_size(axes),
    "psum": lambda x, x0, w, axes, dim, perm: lax.psum(x, axes) / lax.axis_size(axes),
    "mean": lambda x, x0, w, axes, dim, perm: x - lax.pmean(x, axes),
    "total": lambda x, x0, w, axes, dim, perm: x / (1 + lax.pmean(x.square().mean(), axes)),
    "gather": lambda x, x0, w, axes, dim, perm: weighted(
        lax.all_gather(x, axes, axis=dim, tiled=True), lax.axis_size(axes), dim
    ),
    "stack": lambda x, x0, w, axes, dim, perm: (
        lax.all_gather(x, axes, axis=dim).select(dim, 0).add(lax.all_gather(x, axes, axis=dim).sum(dim) * 0.2)
    ),
    "scatter": lambda x, x0, w, axes, dim, perm: lax.psum_scatter(
        repeated(x, lax.axis_size(axes), dim), axes, scatter_dimension=dim, tiled=True
    ),
    "exchange": lambda x, x0, w, axes, dim, perm: weighted(
        lax.all_to_all(repeated(x, lax.axis_size(axes), dim), axes, dim, 1 - dim, tiled=True),
        lax.axis_size(axes),
        1 - dim,
    ),
    "within": lambda x, x0, w, axes, dim, perm: weighted(
        lax.all_to_all(repeated(x, lax.axis_size(axes), dim), axes, dim, dim, tiled=True),
        lax.axis_size(axes),
        dim,
    ),
    "permute": lambda x, x0, w, axes, dim, perm: (x + lax.ppermute(x, axes, perm)) / 2,
}


@st.composite
def programs(draw):
    """(mesh, axes that cut x, steps with their axes, dim and permutation, whether the result is summed or stacked)."""
    mesh = draw(st.sampled_from(MESHES))

    def some_axes(least):
        names = draw(st.permutations(mesh.names))
        return tuple(names[: draw(st.integers(least, len(names)))])

    steps = []
    for name in draw(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=6)):
        axes = some_axes(1)
        ranks = range(math.prod(mesh.shape[axis] for axis in axes))
        perm = list(zip(draw(st.permutations(ranks)), draw(st.permutations(ranks)), strict=True))
        steps.append((name, axes, draw(st.integers(0, 1)), perm[: draw(st.integers(0, len(perm)))]))
    return mesh, some_axes(0), steps, draw(st.booleans())


@given(program=programs(), seed=st.integers(0, 100))
def test_random_programs(program, seed):
    mesh, cut, steps, summed = program
    everywhere = tuple(mesh.names)

    def f(x, w):
        y = x
        for name, *rest in steps:
            y = STEPS[name](y, x, w, *rest)
        return lax.psum(y, everywhere) if summed else y

    out = P() if summed else P(everywhere)
    mapped = fp.shard_map(f, mesh=mesh, in_specs=(P(cut), P()), out_specs=out)
    x = numbers(SIDE * math.prod(mesh.shape[axis] for axis in cut), SIDE, seed=seed)
    w = numbers(SIDE, seed=seed + 1)

    def loss(x, w):
        return scalar(mapped(x, w))

    def step(x, w):
        return mapped(x, w), fp.grad(loss, argnums=(0, 1))(x, w)

    value, grads = step(x, w)
    dx, dw, h = numbers(*x.shape, seed=seed + 2), numbers(SIDE, seed=seed + 3), 1e-4

    def beside(k):
        return loss(x + k * h * dx, w + k * h * dw) - loss(x - k * h * dx, w - k * h * dw)

    numerical = (8 * beside(1) - beside(2)) / (12 * h)  # with an error of h^4
    along = (grads[0] * dx).sum() + (grads[1] * dw).sum()
    size = 1 + (grads[0] * dx).abs().sum() + (grads[1] * dw).abs().sum()
    assert abs(along - numerical) < 1e-6 * size, (along, numerical)
    assert value.dtype == F64
    close(fp.jit(step, mesh=mesh)(x, w), (value, grads), 1e-9)
