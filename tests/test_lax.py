"""fp.lax against formulas on whole tensors: values and gradients, un-jitted and on simulated meshes."""

import pytest
import torch
import torch.nn.functional as F

import fparallel as fp
from fparallel import P, lax
from tests.shard_map_cases import F64, LINE, SQUARE, check, numbers, ring_all_gather

X, W, V = numbers(8, 8), numbers(8, 4, seed=1), numbers(8, seed=2)


def vocab_parallel_cross_entropy(logits, labels):
    """Logits [B, V] with shards of V, labels [B] in 0..V-1; the mean over B."""
    size = logits.shape[1]
    top = lax.all_gather(logits.detach().max(1).values, "tp").max(0).values
    total = lax.psum(torch.exp(logits - top[:, None]).sum(1), "tp")
    at = labels - lax.axis_index("tp") * size
    picked = logits.gather(1, at.clamp(0, size - 1)[:, None])[:, 0] - top
    picked = lax.psum(torch.where((at >= 0) & (at < size), picked, 0.0), "tp")
    return (total.log() - picked).mean()


# name: (function, mesh, in_specs, out_specs, formula, arguments)
CASES = {
    "row-parallel matmul": (
        lambda x, w: lax.psum(x @ w, "tp"),
        SQUARE,
        (P("dp", "tp"), P("tp")),
        P("dp"),
        torch.matmul,
        (X, W),
    ),
    "column-parallel matmul": (
        torch.matmul,
        LINE,
        (P(), P(None, "tp")),
        P(None, "tp"),
        torch.matmul,
        (X, W),
    ),
    "a sum over two axes": (
        lambda x: lax.psum(x.sum(), ("dp", "tp")),
        SQUARE,
        P("dp", "tp"),
        P(),
        torch.sum,
        (X,),
    ),
    "pmean": (
        lambda x, v: (lax.pmean(x.tanh(), "dp") * v).cos(),
        SQUARE,
        (P("dp"), P()),
        P(),
        lambda x, v: ((x[:4].tanh() + x[4:].tanh()) / 2 * v).cos(),
        (X, V),
    ),
    "all_gather": (
        lambda x, w: x @ lax.all_gather(w, "dp", tiled=True),
        SQUARE,
        (P("dp"), P("dp")),
        P("dp"),
        torch.matmul,
        (X, W),
    ),
    "all_gather into a new dim": (
        lambda x: lax.all_gather(x, "tp", axis=1),
        SQUARE,
        P("dp", "tp"),
        P("dp"),
        lambda x: x.reshape(8, 2, 4),
        (X,),
    ),
    "all_gather over axes against their order": (
        lambda x: lax.all_gather(x, ("tp", "dp"), tiled=True),
        SQUARE,
        P(("tp", "dp")),
        P(),
        torch.clone,
        (X,),
    ),
    "psum_scatter": (
        lambda x, w: lax.psum_scatter(x @ w, "tp", scatter_dimension=1, tiled=True),
        SQUARE,
        (P("dp", "tp"), P("tp")),
        P("dp", "tp"),
        torch.matmul,
        (X, W),
    ),
    "psum_scatter of one row per rank": (
        lambda x: lax.psum_scatter(x, "tp"),
        LINE,
        P(None, "tp"),
        P("tp"),
        lambda x: (x[:, 0:2] + x[:, 2:4] + x[:, 4:6] + x[:, 6:8]).flatten(),
        (numbers(4, 8),),
    ),
    "a ring of ppermutes": (ring_all_gather, LINE, P("tp"), P(), torch.clone, (X,)),
    "a shift": (
        lambda x: lax.ppermute(x, "tp", [(0, 1), (1, 2), (2, 3)]) * x,
        LINE,
        P("tp"),
        P("tp"),
        lambda x: torch.cat([torch.zeros(2, 8, dtype=F64), x[:-2]]) * x,
        (X,),
    ),
    "all_to_all": (
        lambda x: lax.all_to_all(x.sin(), "tp", 1, 0, tiled=True),
        LINE,
        P("tp"),
        P(None, "tp"),
        torch.sin,
        (X,),
    ),
    "all_to_all within a dim": (
        lambda x: lax.all_to_all(x, "tp", 0, 0, tiled=True),
        LINE,
        P("tp"),
        P("tp"),
        lambda x: x.reshape(4, 4, 2, 3).transpose(0, 1).reshape(32, 3),
        (numbers(32, 3),),
    ),
    "all_to_all of whole entries": (
        lambda x: lax.all_to_all(x, "tp", 1, 2),
        LINE,
        P("tp"),
        P("tp"),
        lambda x: x.reshape(4, 2, 4, 5).permute(2, 1, 3, 0).reshape(8, 5, 4),
        (numbers(8, 4, 5),),
    ),
    "experts": (
        lambda x, w: lax.all_to_all(
            torch.relu(lax.all_to_all(x, "tp", 0, 1, tiled=True) @ w), "tp", 1, 0, tiled=True
        ),
        LINE,
        (P(None, "tp"), P("tp")),
        P(None, "tp"),
        lambda x, w: torch.relu(x @ w),
        (numbers(4, 8, 6), numbers(4, 6, 6, seed=1)),
    ),
    "axis_index": (
        lambda x: x * lax.axis_index(("tp", "dp")),
        SQUARE,
        P("dp", "tp"),
        P("dp", "tp"),
        lambda x: x * torch.tensor([[0.0, 2.0], [1.0, 3.0]]).repeat_interleave(4, 0).repeat_interleave(4, 1),
        (X,),
    ),
    "copies": (lambda v: v * 2, LINE, P(), P("tp"), lambda v: (v * 2).repeat(4), (V,)),
    "a sum that meets shards, and is used whole": (
        lambda x, v: (lambda s: s * x + s.sum() + v)(lax.psum(x.sum(0) * v, "tp")),
        LINE,
        (P("tp"), P()),
        P("tp"),
        lambda x, v: x.sum(0) * v * x + (x.sum(0) * v).sum() + v,
        (X, V),
    ),
    "a sum of what is equal": (
        lambda v: lax.psum(v.exp(), "tp"),
        LINE,
        P(),
        P(),
        lambda v: 4 * v.exp(),
        (V,),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_formula(name):
    f, mesh, ins, outs, formula, args = CASES[name]
    mapped = fp.shard_map(f, mesh=mesh, in_specs=ins, out_specs=outs, check_vma="ring" not in name)
    check(mapped, mesh, args, formula)


def test_vocab_parallel_cross_entropy():
    logits, labels = (
        numbers(6, 16),
        torch.randint(0, 16, (6,), generator=torch.Generator().manual_seed(0)),
    )
    loss = fp.shard_map(
        vocab_parallel_cross_entropy, mesh=SQUARE, in_specs=(P(None, "tp"), P()), out_specs=P()
    )
    check(lambda x: loss(x, labels), SQUARE, (logits,), lambda x: F.cross_entropy(x, labels))


def test_axes_of_one_rank():
    mesh = fp.make_mesh((1, 2), ("a", "b"), kind="simulated")

    def f(x):
        y = lax.psum_scatter(lax.all_to_all(x, "a", 0, 0, tiled=True), "a", tiled=True)
        nothing = lax.ppermute(x, "a", [])
        return lax.psum(lax.all_gather(y, "a", tiled=True) + nothing, ("a", "b")) + lax.axis_index("a")

    check(fp.shard_map(f, mesh=mesh, in_specs=P("b"), out_specs=P()), mesh, (X,), lambda x: x[:4] + x[4:])


def test_trees_numbers_bools_and_integers():
    def f(batch):
        flags = batch["i"] > 2
        return {"sum": lax.psum(batch, "tp"), "ranks": lax.psum(1, "tp"), "count": lax.psum(flags, "tp")}

    mapped = fp.shard_map(f, mesh=LINE, in_specs=({"i": P("tp"), "v": P()},), out_specs=P())
    batch = {"i": torch.arange(8), "v": V}
    for run in (mapped, fp.jit(mapped, mesh=LINE)):
        out = fp.device_get(run(batch))
        assert out["ranks"].item() == 4 and out["count"].tolist() == [2, 3]
        assert out["sum"]["i"].tolist() == [12, 16]
        assert torch.equal(out["sum"]["v"], 4 * V)
