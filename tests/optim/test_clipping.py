"""Clipping by the global norm and by entry."""

import math

import pytest
import torch

import fparallel as fp
from fparallel import optim


def clipped(updates, max_norm):
    tx = optim.clip_by_global_norm(max_norm)
    return tx.update(updates, tx.init(updates))[0]


def test_the_norm_of_the_3_4_5_matrix_is_5():
    w = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    assert optim.global_norm({"w": w}) == 5.0
    assert optim.global_norm([w[:, :1], w[:, 1:]]) == 5.0  # split by columns


def test_norms_3_and_4_clipped_to_1_are_scaled_by_exactly_a_fifth():
    stages = [torch.tensor([3.0], dtype=torch.float64), torch.tensor([0.0, 4.0], dtype=torch.float64)]
    first, second = clipped(stages, 1.0)
    assert first.tolist() == [3.0 * 0.2]
    assert second.tolist() == [0.0, 4.0 * 0.2]


@pytest.mark.parametrize("seed", range(5))
def test_the_result_has_the_largest_norm_allowed_and_the_direction_of_before(seed):
    generator = torch.Generator().manual_seed(seed)
    updates = {"a": torch.randn(3, 4, generator=generator), "b": (torch.randn(5, generator=generator),)}
    norm = math.sqrt(sum(float(x.square().sum()) for x in [updates["a"], *updates["b"]]))
    result = clipped(updates, 0.5)
    assert float(optim.global_norm(result)) == pytest.approx(0.5, rel=1e-6)
    torch.testing.assert_close(result["a"], updates["a"] * (0.5 / norm))
    torch.testing.assert_close(result["b"][0], updates["b"][0] * (0.5 / norm))


def test_as_torch_clips_but_for_its_1e_6():
    grad = torch.randn(20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p = torch.nn.Parameter(torch.zeros(20, dtype=torch.float64))
    p.grad = grad.clone()
    torch.nn.utils.clip_grad_norm_([p], 0.3)
    torch.testing.assert_close(clipped(grad, 0.3), p.grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("max_norm", [0.1, 0.3, 0.7, 1.0, 49.0])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_below_the_largest_norm_no_bit_changes(share, max_norm, dtype):
    updates = torch.tensor([0.6, -0.8], dtype=torch.float64).mul(share * max_norm).to(dtype)
    assert torch.equal(clipped(updates, max_norm), updates)


@pytest.mark.parametrize("updates", [None, {}, [torch.zeros(0)], {"a": None, "b": torch.zeros(3, 0)}])
def test_a_tree_without_entries_has_norm_0_and_stays(updates):
    assert optim.global_norm(updates) == 0.0
    assert str(clipped(updates, 1.0)) == str(updates)


def test_an_infinite_norm_gives_0_and_nan_as_in_torch():
    updates = torch.tensor([1.0, math.inf])
    p = torch.nn.Parameter(torch.zeros(2))
    p.grad = updates.clone()
    torch.nn.utils.clip_grad_norm_([p], 1.0)
    assert str(clipped(updates, 1.0)) == str(p.grad) == str(torch.tensor([0.0, math.nan]))


def test_nan_is_not_hidden():
    assert clipped([torch.ones(2), torch.tensor([math.nan])], 1.0)[0].isnan().all()


def test_bfloat16_squares_are_summed_in_float32():
    updates = torch.ones(4096, dtype=torch.bfloat16)  # a bfloat16 sum of ones stops growing at 256
    assert float(optim.global_norm(updates)) == 64.0
    result = clipped(updates, 1.0)
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, torch.full((4096,), 1 / 64, dtype=torch.bfloat16))


def test_clip_limits_each_entry():
    tx = optim.clip(1.5)
    updates, _ = tx.update([torch.tensor([-9.0, -1.5, 0.2, 2.0, math.inf, math.nan])], tx.init(None))
    torch.testing.assert_close(
        updates[0], torch.tensor([-1.5, -1.5, 0.2, 1.5, 1.5, math.nan]), equal_nan=True
    )


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan])
@pytest.mark.parametrize("make", [optim.clip, optim.clip_by_global_norm])
def test_a_limit_that_is_not_positive_is_refused(make, limit):
    with pytest.raises(optim.OptimError, match="must be positive"):
        make(limit)


def test_the_norm_of_millions_of_entries_is_accurate():
    """In float32 the error stays at rounding, where one long dot product is off by 1e-4."""
    x = torch.randn(5_000_000, generator=torch.Generator().manual_seed(0)) * 1e-3
    assert float(optim.global_norm([x])) == pytest.approx(float(x.double().norm()), rel=1e-6)
    mesh = fp.make_mesh((2,), ("dp",), kind="simulated")
    norm = fp.jit(optim.global_norm, mesh=mesh, in_shardings=fp.P("dp"))(x)
    assert float(norm) == pytest.approx(float(x.double().norm()), rel=1e-6)
