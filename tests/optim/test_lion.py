"""Lion against algorithm 2 of arXiv:2302.06675, written out."""

import torch

from fparallel import optim


def lion_step(p, g, m, lr, b1, b2, weight_decay):
    update = torch.sign(b1 * m + (1 - b1) * g)
    return p - lr * (update + weight_decay * p), b2 * m + (1 - b2) * g


def test_lion_is_the_algorithm_of_the_paper():
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    expected, m = p.clone(), torch.zeros_like(p)
    tx = optim.lion(0.02, b1=0.8, b2=0.95, weight_decay=0.1)
    state = tx.init(p)
    for _ in range(100):
        g = torch.randn(6, 3, generator=generator, dtype=torch.float64)
        updates, state = tx.update(g, state, p)
        p = optim.apply_updates(p, updates)
        expected, m = lion_step(expected, g, m, 0.02, 0.8, 0.95, 0.1)
        torch.testing.assert_close(p, expected, rtol=0, atol=1e-12)


def test_defaults():
    p, g = torch.tensor([2.0, 2.0, 2.0]), torch.tensor([3.0, -0.1, 0.0])
    tx = optim.lion(0.1)
    updates, state = tx.update(g, tx.init(p), p)
    torch.testing.assert_close(updates, torch.tensor([-0.1002, 0.0998, -0.0002]))  # -0.1 * (sign + 1e-3 * 2)
    torch.testing.assert_close(state[0].mu, torch.tensor([0.03, -0.001, 0.0]))


def test_the_update_looks_at_the_old_momentum():
    tx = optim.scale_by_lion(b1=0.9, b2=0.5)
    state = optim.ScaleByLionState(mu=torch.tensor([1.0]))
    update, state = tx.update(torch.tensor([-8.0]), state)
    assert update.item() == 1.0  # 0.9 * 1 - 0.1 * 8 > 0, though the new momentum is -3.5
    assert state.mu.item() == -3.5
