"""The fused kernels agree with the ops of the segment that they run in place of."""

import pytest
import torch

import fparallel as fp

LEAVES = {"matrix": (300, 500), "bias": (7,), "scalar": (), "empty": (0, 3)}


def adamw(clip: float | None, learning_rate: object, **kw: float) -> fp.optim.GradientTransformation:
    tx = fp.optim.adamw(learning_rate, **kw)
    return fp.optim.chain(fp.optim.clip_by_global_norm(clip), tx) if clip else tx


def trajectories(
    tx: fp.optim.GradientTransformation, dtype: torch.dtype, donate: tuple[int, ...]
) -> tuple[list, list, object]:
    """Parameters and state after 20 steps, un-jitted and jitted, and the jitted step's schedule."""

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return fp.optim.apply_updates(params, updates), state

    generator = torch.Generator().manual_seed(0)
    start = {k: torch.randn(s, dtype=dtype, generator=generator) for k, s in LEAVES.items()}
    jitted = fp.jit(step, donate_argnums=donate)
    plain, fused = ((fp.tree.map(torch.clone, start), tx.init(start)) for _ in range(2))
    for _ in range(20):
        grads = {k: torch.randn(s, dtype=dtype, generator=generator) for k, s in LEAVES.items()}
        before = fp.tree.map(torch.clone, grads)
        plain, fused = step(*plain, grads), jitted(*fused, grads)
        assert all(torch.equal(grads[k], before[k]) for k in grads), "gradients are only read"
    schedule = jitted.lower(*fused, grads).schedule
    return fp.tree.leaves(plain), fp.tree.leaves(fused), schedule


@pytest.mark.parametrize("donate", [(), (0, 1)])
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-12)])
def test_a_jitted_adamw_is_the_plain_one(dtype, tolerance, clip, donate):
    tx = adamw(clip, fp.optim.cosine_decay_schedule(1e-2, 100), weight_decay=0.1)
    plain, fused, schedule = trajectories(tx, dtype, donate)
    assert any(segment.kernel for segment in schedule.segments.values()), "the kernel is used"
    for a, b in zip(plain, fused, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    "tx", [fp.optim.sgd(1e-2, momentum=0.9), fp.optim.lion(1e-3), fp.optim.scale_by_adam(eps_root=1e-3)]
)
def test_other_optimizers_run_their_own_ops_bit_for_bit(tx):
    plain, fused, schedule = trajectories(tx, torch.float64, (0, 1))
    assert not any(segment.kernel for segment in schedule.segments.values())
    for a, b in zip(plain, fused, strict=True):
        torch.testing.assert_close(a, b, atol=1e-14, rtol=1e-14)


def test_a_learning_rate_of_zero_changes_no_parameter():
    plain, fused, _ = trajectories(adamw(1.0, 0.0, weight_decay=0.1), torch.float64, (0, 1))
    for a, b in zip(plain, fused, strict=True):
        torch.testing.assert_close(a, b, atol=1e-14, rtol=1e-14)
