"""The atoms and how they chain."""

import pytest
import torch

from fparallel import optim, tree


def run(tx, grads, params=None):
    """The updates for a sequence of gradients."""
    state, out = tx.init(grads[0] if params is None else params), []
    for g in grads:
        updates, state = tx.update(g, state, params)
        out.append(updates)
    return out


def test_chain_applies_left_to_right():
    grads = [torch.tensor([3.0])]
    assert run(optim.chain(optim.clip(1.0), optim.scale(2.0)), grads)[0].item() == 2.0
    assert run(optim.chain(optim.scale(2.0), optim.clip(1.0)), grads)[0].item() == 1.0


def test_an_empty_chain_is_the_identity():
    assert run(optim.chain(), [torch.tensor(3.0)])[0].item() == 3.0


def test_a_chain_with_the_state_of_another_is_refused():
    with pytest.raises(optim.OptimError, match="a chain of 2 has a tuple of as many states, got 3 of them"):
        state = optim.chain(optim.clip(1.0), optim.clip(1.0), optim.clip(1.0)).init(None)
        optim.chain(optim.clip(1.0), optim.clip(1.0)).update(torch.ones(1), state)


def test_a_chain_with_a_bare_state_is_refused():
    with pytest.raises(optim.OptimError, match="got a ScaleByAdamState"):
        optim.adam(0.1).update(torch.ones(1), optim.scale_by_adam().init(torch.ones(1)))


def test_trace_is_a_decaying_sum():
    updates = run(optim.trace(0.5), [torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([4.0])])
    assert [u.item() for u in updates] == [1.0, 0.5, 4.25]


def test_nesterov_looks_one_step_ahead():
    updates = run(optim.trace(0.5, nesterov=True), [torch.tensor([1.0]), torch.tensor([0.0])])
    assert [u.item() for u in updates] == [1.5, 0.25]


def test_nesterov_without_momentum_is_refused():
    with pytest.raises(optim.OptimError, match="nesterov"):
        optim.sgd(0.1, nesterov=True)


def test_scale_by_learning_rate_descends_unless_told_otherwise():
    g = [torch.tensor([2.0])]
    assert run(optim.scale_by_learning_rate(0.5), g)[0].item() == -1.0
    assert run(optim.scale_by_learning_rate(0.5, flip_sign=False), g)[0].item() == 1.0
    assert run(optim.scale_by_learning_rate(torch.tensor(0.5)), g)[0].item() == -1.0
    assert run(optim.scale_by_learning_rate(lambda count: 0.5 * (count + 1)), g * 3)[2].item() == -3.0


def test_the_first_update_is_that_of_step_0():
    updates = run(optim.sgd(optim.linear_schedule(0.0, 1.0, 2)), [torch.tensor([1.0])] * 4)
    assert [u.item() for u in updates] == [0.0, -0.5, -1.0, -1.0]


def test_weight_decay_adds_to_the_update_before_the_learning_rate():
    tx = optim.chain(optim.add_decayed_weights(0.1), optim.scale_by_learning_rate(0.5))
    assert run(tx, [torch.tensor([1.0])], torch.tensor([10.0]))[0].item() == -1.0


def test_weight_decay_without_parameters_is_refused():
    tx = optim.adamw(0.1)
    with pytest.raises(optim.OptimError, match=r"Fix: call tx.update\(grads, state, params\)"):
        tx.update(torch.ones(1), tx.init(torch.ones(1)))


def test_stateless_makes_a_transformation_of_a_function():
    tx = optim.stateless(lambda updates, params: tree.map(lambda u, p: u * p, updates, params))
    assert run(tx, [torch.tensor([2.0])], torch.tensor([3.0]))[0].item() == 6.0
    assert tx.init(None) == optim.EmptyState()


def test_eps_is_outside_of_the_root_and_eps_root_inside():
    g = [torch.tensor([3.0], dtype=torch.float64)]  # bias-corrected: mean 3, mean square 9
    assert run(optim.scale_by_adam(eps=1.0), g)[0].item() == pytest.approx(3 / (3 + 1), abs=1e-12)
    assert run(optim.scale_by_adam(eps=1.0, eps_root=7.0), g)[0].item() == pytest.approx(3 / 5, abs=1e-12)


def test_a_zero_gradient_is_a_zero_update():
    assert run(optim.adam(0.1), [torch.zeros(3)])[0].tolist() == [0.0, 0.0, 0.0]


def test_apply_updates_rounds_once_to_the_dtype_of_the_parameter():
    params = torch.tensor([1.0], dtype=torch.bfloat16)
    updates = torch.tensor(
        [0.0039]
    )  # as bfloat16 it is just under, and 1 + it just over, half a step of 2**-7
    new = optim.apply_updates(params, updates)
    assert new.dtype == torch.bfloat16
    assert new.item() == (params.float() + updates).bfloat16().item()


def test_apply_updates_keeps_large_integers():
    params = {"table": torch.tensor([2**53 + 1, 2**24 + 1]), "flag": torch.tensor([True, False])}
    updates = {"table": torch.zeros(2), "flag": torch.zeros(2)}
    new = optim.apply_updates(params, updates)
    assert new["table"].tolist() == [2**53 + 1, 2**24 + 1]
    assert new["flag"].tolist() == [True, False]


def test_float16_adam_survives_the_eps_that_float16_cannot_hold():
    updates = run(optim.adam(0.5), [torch.zeros(2, dtype=torch.float16)])
    assert updates[0].tolist() == [0.0, 0.0]


def test_complex_leaves_are_refused():
    with pytest.raises(optim.OptimError, match="view_as_real"):
        run(optim.adam(0.1), [torch.zeros(2, dtype=torch.complex64)])
