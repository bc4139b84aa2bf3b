"""Comparing functions under fp.shard_map, un-jitted and jitted, with formulas on whole tensors."""

import torch

import fparallel as fp
from fparallel import lax

F64 = torch.float64
LINE = fp.make_mesh((4,), ("tp",), kind="simulated")
SQUARE = fp.make_mesh((2, 2), ("dp", "tp"), kind="simulated")


def numbers(*shape, seed=0):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def scalar(out):
    """A number that weighs every element of the results differently."""
    leaves = fp.tree.leaves(out)
    return sum((x.sin() * torch.arange(1, x.numel() + 1, dtype=F64).view(x.shape)).sum() for x in leaves)


def values_and_grads(f, args):
    argnums = tuple(range(len(args)))
    return f(*args), fp.grad(lambda *xs: scalar(f(*xs)), argnums=argnums)(*args)


def close(got, want, tolerance=1e-10):
    got, want = fp.tree.leaves(fp.device_get(got)), fp.tree.leaves(want)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


def check(mapped, mesh, args, formula, func=True):
    """Values and gradients of `mapped` are those of `formula`: un-jitted, jitted, and by torch.func in both."""
    want = values_and_grads(formula, args)
    close(values_and_grads(mapped, args), want)
    close(fp.jit(lambda *xs: values_and_grads(mapped, xs), mesh=mesh)(*args), want)
    if func:
        grad = torch.func.grad(lambda *xs: scalar(mapped(*xs)), argnums=tuple(range(len(args))))
        close(grad(*args), want[1])
        close(fp.jit(grad, mesh=mesh)(*args), want[1])


def ring_all_gather(x):
    """[n, ...] of each rank to [ranks * n, ...], by passing shards to the next rank."""
    size, me = lax.axis_size("tp"), lax.axis_index("tp")
    shards = [x]
    for _ in range(size - 1):
        shards.append(lax.ppermute(shards[-1], "tp", [(i, (i + 1) % size) for i in range(size)]))
    order = torch.argsort((me - torch.arange(size)) % size)  # shards[k] is that of rank me - k
    return torch.stack(shards)[order].flatten(0, 1)
