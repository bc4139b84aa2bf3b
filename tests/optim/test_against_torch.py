"""On one device the optimizers are those of torch.optim."""

import pytest
import torch

from fparallel import optim

NUM_STEPS = 100
SHAPES = {"bias": (7,), "kernel": (5, 7), "scalar": ()}

CASES = {
    "sgd": (lambda: optim.sgd(0.05), lambda p: torch.optim.SGD(p, lr=0.05)),
    "momentum": (lambda: optim.sgd(0.01, 0.9), lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9)),
    "nesterov": (
        lambda: optim.sgd(0.01, 0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    ),
    "sgd with L2 penalty": (
        lambda: optim.chain(optim.add_decayed_weights(0.1), optim.sgd(0.01, 0.9)),
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1),
    ),
    "adam": (lambda: optim.adam(1e-2), lambda p: torch.optim.Adam(p, lr=1e-2)),
    "adam, other betas and eps": (
        lambda: optim.adam(1e-2, b1=0.8, b2=0.95, eps=1e-3),
        lambda p: torch.optim.Adam(p, lr=1e-2, betas=(0.8, 0.95), eps=1e-3),
    ),
    "adam with L2 penalty": (
        lambda: optim.chain(optim.add_decayed_weights(0.1), optim.adam(1e-2)),
        lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1),
    ),
    "adamw, defaults": (lambda: optim.adamw(1e-2), lambda p: torch.optim.AdamW(p, lr=1e-2)),
    "adamw": (
        lambda: optim.adamw(1e-2, weight_decay=0.3),
        lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.3),
    ),
}


def random_tree(dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)
        for name, shape in SHAPES.items()
    }


def our_trajectory(tx, dtype):
    params = random_tree(dtype, seed=0)
    state = tx.init(params)
    for step in range(NUM_STEPS):
        updates, state = tx.update(random_tree(dtype, seed=step + 1), state, params)
        params = optim.apply_updates(params, updates)
        yield params


def torch_trajectory(make, dtype):
    params = {k: torch.nn.Parameter(p) for k, p in random_tree(dtype, seed=0).items()}
    optimizer = make(list(params.values()))
    for step in range(NUM_STEPS):
        for k, grad in random_tree(dtype, seed=step + 1).items():
            params[k].grad = grad
        optimizer.step()
        yield {k: p.detach().clone() for k, p in params.items()}


def assert_same_trajectory(ours, theirs, tolerance):
    for a, b in zip(ours, theirs, strict=True):
        for k in SHAPES:
            torch.testing.assert_close(
                a[k], b[k], rtol=tolerance, atol=tolerance, check_dtype=False, msg=lambda m, k=k: f"{k}: {m}"
            )


@pytest.mark.parametrize("name", CASES)
def test_float64_agrees_to_1e_12_after_each_of_100_steps(name):
    ours, theirs = CASES[name]
    assert_same_trajectory(
        our_trajectory(ours(), torch.float64), torch_trajectory(theirs, torch.float64), tolerance=1e-12
    )


@pytest.mark.parametrize("name", CASES)
def test_float32_agrees_with_torch_in_float64_to_1e_6_after_each_of_100_steps(name):
    ours, theirs = CASES[name]
    assert_same_trajectory(
        our_trajectory(ours(), torch.float32), torch_trajectory(theirs, torch.float64), tolerance=1e-6
    )


@pytest.mark.parametrize("name", CASES)
def test_float32_agrees_with_torch_in_float32(name):
    """To 1e-6, but for AdamW: in every step torch multiplies by 1 - lr * weight_decay, rounded to float32.

    That alone moves its parameters by up to 1e-5 in 100 steps.
    """
    ours, theirs = CASES[name]
    assert_same_trajectory(
        our_trajectory(ours(), torch.float32),
        torch_trajectory(theirs, torch.float32),
        tolerance=1e-5 if name.startswith("adamw") else 1e-6,
    )


def test_a_schedule_is_the_lr_scheduler_of_torch():
    schedule = optim.warmup_cosine_decay_schedule(0.0, 0.1, warmup_steps=5, decay_steps=50)
    tx, params = optim.adamw(schedule), random_tree(torch.float64, seed=0)
    state = tx.init(params)
    theirs = {k: torch.nn.Parameter(p.clone()) for k, p in params.items()}
    torch_optimizer = torch.optim.AdamW(theirs.values(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(torch_optimizer, lambda step: float(schedule(step)))

    for step in range(60):
        grads = random_tree(torch.float64, seed=step + 1)
        updates, state = tx.update(grads, state, params)
        params = optim.apply_updates(params, updates)
        for k, p in theirs.items():
            p.grad = grads[k].clone()
        torch_optimizer.step()
        scheduler.step()
    for k in params:
        torch.testing.assert_close(params[k], theirs[k].data, rtol=0, atol=1e-12)


def test_moments_are_those_of_torch():
    params = random_tree(torch.float32, seed=0)
    tx = optim.scale_by_adam()
    state = tx.init(params)
    p = torch.nn.Parameter(params["kernel"].clone())
    torch_optimizer = torch.optim.Adam([p], lr=1e-3)
    for step in range(10):
        grads = random_tree(torch.float32, seed=step + 1)
        _, state = tx.update(grads, state)
        p.grad = grads["kernel"].clone()
        torch_optimizer.step()
    assert int(state.count) == int(torch_optimizer.state[p]["step"]) == 10
    torch.testing.assert_close(state.mu["kernel"], torch_optimizer.state[p]["exp_avg"], rtol=0, atol=1e-6)
    torch.testing.assert_close(state.nu["kernel"], torch_optimizer.state[p]["exp_avg_sq"], rtol=0, atol=1e-6)


def test_bias_correction_stays_exact_where_float32_would_not():
    """Computed in float32, 1 - 0.999999**1 is wrong by more than 1 %."""
    tx = optim.adam(1.0, b1=0.0, b2=0.999999, eps=0.0)
    grad = torch.tensor([0.5])
    updates, _ = tx.update(grad, tx.init(grad))
    torch.testing.assert_close(updates, torch.tensor([-1.0]), rtol=1e-6, atol=0)
