"""Split, slice and cat of a dim whose unit is sharded: nothing is gathered, values and gradients are right."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fparallel as fp
from fparallel import P
from tests.compiler.sharded import index, run, simulated, whole

TP = simulated(tp=2)


def fused(function, *units: int, size: int = 4):
    """A column-parallel product whose columns are `units` of `size` each, then `function` of the result."""

    def step(x, w):
        def loss(w):
            parts = function(x @ w.view(w.shape[0], -1))
            return sum((part * part).sum() for part in parts)

        return fp.value_and_grad(loss)(w)

    return step, (whole(1, 6, 5), whole(2, 5, sum(units), size))


CASES = {
    "split": lambda y: y.split(4, 1),
    "chunk": lambda y: y.chunk(3, 1),
    "sizes": lambda y: y.split([8, 4], 1),
    "slices": lambda y: (y[:, :4], y[:, 4:]),
    "middle": lambda y: (y[:, 4:8],),
    "narrow": lambda y: (y.narrow(1, 8, 4), y),
    "swapped": lambda y: (torch.cat([y[:, 8:], y[:, :8]], 1).relu(),),
    "twice": lambda y: (torch.cat([y, 2 * y], 1),),
}


@pytest.mark.parametrize("tp", [2, 3, 5])
@pytest.mark.parametrize("name", CASES)
def test_a_sharded_unit_stays_where_it_lies(name, tp):
    step, args = fused(CASES[name], 1, 1, 1)
    made = run(step, args, (P(), P(None, None, "tp")), simulated(tp=tp), exact=True)
    assert {move.split(" ")[0] for move in made.collectives} <= {"all_reduce[tp]"}
    assert all(move.endswith("[]") for move in made.collectives)


@given(st.data())
def test_any_cut_of_any_layout_is_right(data):
    unit, units = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    size = unit * units
    bounds = sorted(data.draw(st.lists(st.integers(0, size), min_size=1, max_size=3)))
    sizes = [b - a for a, b in zip([0, *bounds], [*bounds, size], strict=True)]
    step = data.draw(st.sampled_from([1, 1, 2]))

    def function(x):
        def loss(x):
            parts = x.split(sizes, 1)
            again = torch.cat([parts[-1], *parts], 1)
            return ((again[:, bounds[0] :: step] ** 2).sum() + (x[:, -2:] * 3).sum()), again

        (value, again), grad = fp.value_and_grad(loss, has_aux=True)(x.flatten(1))
        return value, again, grad

    spec = data.draw(st.sampled_from([P(), P("tp"), P(None, "tp"), P(None, None, "tp")]))
    mesh = data.draw(st.sampled_from([simulated(tp=n) for n in (2, 3, 4)]))
    run(function, (whole(size, 4, units, unit),), (spec,), mesh, exact=True)


class FusedAttention(nn.Module):
    """Queries, keys and values from one product, as many torch models write it."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), heads

    def forward(self, x):
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).split(dim, dim=2)
        q, k, v = (y.view(batch, length, self.heads, -1).transpose(1, 2) for y in (q, k, v))
        scores = (q @ k.transpose(-2, -1)).masked_fill(torch.ones(length, length).triu(1) > 0, -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, dim))


def test_a_fused_projection_needs_two_all_reduces():
    module = FusedAttention(16, 4).double()
    params = {name: p.detach() for name, p in module.named_parameters()}

    def step(params, x):
        return fp.value_and_grad(lambda p: torch.func.functional_call(module, p, (x,)).square().mean())(
            params
        )

    rules = fp.Rules(
        {"qkv.weight": "(3 heads 4) embed", "qkv.bias": "(3 heads 4)", "out.weight": "embed (heads 4)"},
        heads="tp",
    )
    made = run(step, (params, index(1, 9, 2, 5, 16).double()), (), TP, rules=rules)
    assert made.collectives == ["all_reduce[tp] sum [2,5,16]"]
