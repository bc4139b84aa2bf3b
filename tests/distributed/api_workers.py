"""What the ranks of the tests of the public API on real processes do."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fparallel as fp
from fparallel import P
from fparallel.errors import ExecutionError


def _step(state: dict, batch: torch.Tensor) -> tuple[dict, torch.Tensor]:
    def loss(w: torch.Tensor) -> torch.Tensor:
        return ((batch @ w) ** 2).mean()

    value, grad = fp.value_and_grad(loss)(state["params"]["w"])
    return {"params": {"w": state["params"]["w"] - 0.1 * grad}}, value


def dtensors(rank: int, num_ranks: int) -> None:
    """DTensor state comes in, trains, and goes out, sharing memory both ways."""
    names = ("dp", "tp")
    mesh = fp.make_mesh((num_ranks // 2, 2), names)
    device_mesh = init_device_mesh("cpu", mesh.sizes, mesh_dim_names=names)
    value = torch.arange(8 * 6, dtype=torch.float64).reshape(8, 6)
    for placements, spec in [
        ([Shard(0), Shard(1)], P("dp", "tp")),
        ([Replicate(), Shard(0)], P("tp")),
        ([Shard(0), Shard(0)], P(("dp", "tp"))),
        ([Replicate(), Replicate()], P()),
    ]:
        there = distribute_tensor(value, device_mesh, placements)
        array = fp.Array.from_dtensor(there, mesh)
        assert array.sharding == fp.NamedSharding(mesh, spec), array
        assert torch.equal(fp.device_get(array), value)
        assert next(iter(array.shards.values())).data_ptr() == there.to_local().data_ptr()
        back = array.to_dtensor()
        assert isinstance(back, DTensor) and list(back.placements) == placements
        assert torch.equal(back.full_tensor(), value)


def local_data(rank: int, num_ranks: int) -> None:
    """Rows that each process holds enter as one array; a step over them equals the step on one device."""
    mesh = fp.make_mesh((-1,), ("dp",))
    assert mesh.size == num_ranks and fp.process_index() == rank and fp.process_count() == num_ranks
    batch = torch.randn(4 * num_ranks, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    state = {
        "params": {"w": torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))}
    }
    mine = fp.make_array_from_process_local_data(
        fp.NamedSharding(mesh, P("dp")), batch[4 * rank : 4 * rank + 4]
    )
    assert mine.shape == (4 * num_ranks, 6)
    step = fp.jit(_step, mesh=mesh, rules=fp.Rules(batch="dp").zero(3, axis="dp"))
    new, loss = step(state, mine)
    want, want_loss = _step(state, batch)
    assert abs(float(loss) - float(want_loss)) < 1e-12
    torch.testing.assert_close(fp.device_get(new), want, atol=1e-12, rtol=0)


def different_batches(rank: int, num_ranks: int) -> None:
    """A plain tensor is the global value: ranks that disagree are named, and the leaf."""
    mesh = fp.make_mesh((num_ranks,), ("dp",))
    step = fp.jit(_step, mesh=mesh, rules=fp.Rules(batch="dp"))
    batch = torch.full((4, 6), float(rank == 1), dtype=torch.float64)
    try:
        step({"params": {"w": torch.ones(6, 3, dtype=torch.float64)}}, batch)
    except ExecutionError as error:
        assert (
            "batch is a plain tensor" in str(error) and "rank(s) 1 " in str(error) and "Fix:" in str(error)
        ), error
        return
    raise AssertionError("ranks with different batches trained on")


def different_programs(rank: int, num_ranks: int) -> None:
    """Ranks that were given different programs stop before the first step."""
    mesh = fp.make_mesh((num_ranks,), ("dp",))
    rules = fp.Rules(batch="dp").zero(3 if rank == 1 else 0, axis="dp")
    step = fp.jit(_step, mesh=mesh, rules=rules)
    state = {"params": {"w": torch.ones(6, 3, dtype=torch.float64)}}
    try:
        step(state, torch.ones(4, 6, dtype=torch.float64))
    except ExecutionError as error:
        assert "different programs" in str(error) and "Fix:" in str(error), error
        return
    raise AssertionError("ranks with different programs trained on")


def shard_maps(rank: int, num_ranks: int) -> None:
    """Every collective of fp.lax, forward and backward, as all ranks in one process compute it."""
    mesh = fp.make_mesh((num_ranks,), ("tp",))
    lax = fp.lax

    def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ring = lax.ppermute(x, "tp", [(i, (i + 1) % num_ranks) for i in range(num_ranks)])
        shifted = lax.ppermute(x.sin(), "tp", [(0, 1)])
        whole = lax.all_gather(x * (lax.axis_index("tp") + 1), "tp", tiled=True)
        part = lax.psum_scatter((whole @ w).tanh(), "tp", tiled=True)
        turned = lax.all_to_all(part * ring * w[0], "tp", 1, 0, tiled=True)
        return turned, lax.pmean((turned.mean() + shifted.sum()) ** 2, "tp")

    mapped = fp.shard_map(f, mesh=mesh, in_specs=(P("tp"), P()), out_specs=(P(None, "tp"), P()))

    def step(x: torch.Tensor, w: torch.Tensor) -> tuple:
        def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            y, z = mapped(x, w)
            return (y**2).sum() + z

        return mapped(x, w), fp.grad(loss, argnums=(0, 1))(x, w)

    generator = torch.Generator().manual_seed(0)
    for side in (4, 256):  # small parts travel packed, large ones alone
        args = [torch.randn(side, side, dtype=torch.float64, generator=generator) / side for _ in range(2)]
        got, want = fp.jit(step, mesh=mesh)(*args), step(*args)
        for a, b in zip(fp.tree.leaves(fp.device_get(got)), fp.tree.leaves(want), strict=True):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-10)
