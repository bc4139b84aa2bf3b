"""Ambient draws: torch's own random functions, served by the key in scope."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import get_overridable_functions

import fparallel as fp
from fparallel.errors import RandomError
from fparallel.random import (
    bernoulli,
    exponential,
    fold_in,
    is_stateful_random,
    key,
    normal,
    permutation,
    randint,
    uniform,
    use,
)
from fparallel.random.handlers import HANDLERS

K = key(11)
D0 = fold_in(K, 0)  # the key of a scope's first draw
F64 = torch.float64


@pytest.fixture(autouse=True)
def torchs_own_generator_is_left_alone():
    before = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), before)


def scoped(f, *args):
    with use(K):
        return f(*args)


# ---- what each function draws

SERVED = {
    "rand": (lambda: torch.rand(2, 3), lambda: uniform(D0, (2, 3))),
    "rand of a tuple": (lambda: torch.rand((2, 3), dtype=F64), lambda: uniform(D0, (2, 3), F64)),
    "randn of size=": (lambda: torch.randn(size=(4,)), lambda: normal(D0, (4,))),
    "randn scalar": (lambda: torch.randn(()), lambda: normal(D0, ())),
    "randn out": (lambda: torch.randn(4, out=torch.empty(4)), lambda: normal(D0, (4,))),
    "rand_like": (lambda: torch.rand_like(torch.ones(3, dtype=F64)), lambda: uniform(D0, (3,), F64)),
    "randn_like": (lambda: torch.randn_like(torch.ones(3), dtype=F64), lambda: normal(D0, (3,), F64)),
    "randint high": (lambda: torch.randint(9, (5,)), lambda: randint(D0, (5,), 0, 9)),
    "randint low high": (lambda: torch.randint(3, 9, (5,)), lambda: randint(D0, (5,), 3, 9)),
    "randint names": (
        lambda: torch.randint(low=3, high=9, size=(5,), dtype=torch.int32),
        lambda: randint(D0, (5,), 3, 9, torch.int32),
    ),
    "randint_like": (
        lambda: torch.randint_like(torch.ones(5), 9),
        lambda: randint(D0, (5,), 0, 9, torch.float32),
    ),
    "randint_like low": (
        lambda: torch.randint_like(torch.ones(5), 2, high=9),
        lambda: randint(D0, (5,), 2, 9, torch.float32),
    ),
    "randperm": (lambda: torch.randperm(6), lambda: permutation(D0, 6)),
    "normal numbers": (lambda: torch.normal(1.0, 2.0, (4,)), lambda: normal(D0, (4,)) * 2 + 1),
    "normal tensors": (
        lambda: torch.normal(torch.arange(4.0), torch.ones(3, 1)),
        lambda: normal(D0, (3, 4)) + torch.arange(4.0),
    ),
    "bernoulli": (
        lambda: torch.bernoulli(torch.full((9,), 0.3)),
        lambda: bernoulli(D0, torch.tensor(0.3), (9,)).float(),
    ),
    "bernoulli p": (lambda: torch.ones(9).bernoulli(0.3), lambda: bernoulli(D0, 0.3, (9,)).float()),
    "normal_": (lambda: torch.empty(5).normal_(1, std=3), lambda: normal(D0, (5,)) * 3 + 1),
    "uniform_": (lambda: torch.empty(5).uniform_(-1, 1), lambda: uniform(D0, (5,), torch.float32, -1, 1)),
    "uniform_ to": (lambda: torch.empty(5).uniform_(to=2), lambda: uniform(D0, (5,), torch.float32, 0, 2)),
    "exponential_": (lambda: torch.empty(5).exponential_(4), lambda: exponential(D0, (5,)) / 4),
    "bernoulli_": (lambda: torch.empty(9).bernoulli_(0.3), lambda: bernoulli(D0, 0.3, (9,)).float()),
    "bernoulli_ tensor": (
        lambda: torch.empty(9).bernoulli_(torch.full((9,), 0.3)),
        lambda: bernoulli(D0, torch.tensor(0.3), (9,)).float(),
    ),
    "random_": (
        lambda: torch.empty(5, dtype=torch.uint8).random_(),
        lambda: randint(D0, (5,), 0, 256, torch.uint8),
    ),
    "random_ to": (lambda: torch.empty(5).random_(8), lambda: randint(D0, (5,), 0, 8, torch.float32)),
    "random_ from to": (
        lambda: torch.empty(5, dtype=torch.int64).random_(3, 8),
        lambda: randint(D0, (5,), 3, 8),
    ),
    "init.normal_": (lambda: nn.init.normal_(torch.empty(5), std=0.02), lambda: normal(D0, (5,)) * 0.02),
    "init.uniform_": (
        lambda: nn.init.uniform_(nn.Parameter(torch.empty(5)), -2, 2).detach(),
        lambda: uniform(D0, (5,), torch.float32, -2, 2),
    ),
    "init.kaiming_uniform_": (
        lambda: nn.init.kaiming_uniform_(torch.empty(3, 4, 2), a=math.sqrt(5)),
        lambda: uniform(D0, (3, 4, 2), torch.float32, -1 / math.sqrt(8), 1 / math.sqrt(8)),
    ),
    "init.xavier_normal_": (
        lambda: nn.init.xavier_normal_(torch.empty(3, 5)),
        lambda: normal(D0, (3, 5)) * math.sqrt(2 / 8),
    ),
    "a distribution": (lambda: torch.distributions.Normal(0.0, 1.0).sample((3,)), lambda: normal(D0, (3,))),
    "dropout": (
        lambda: F.dropout(torch.arange(9.0), 0.25),
        lambda: torch.where(bernoulli(D0, 0.75, (9,)), torch.arange(9.0) / 0.75, 0),
    ),
    "nn.Dropout": (
        lambda: nn.Dropout(0.25)(torch.arange(9.0)),
        lambda: torch.where(bernoulli(D0, 0.75, (9,)), torch.arange(9.0) / 0.75, 0),
    ),
    "dropout1d": (
        lambda: F.dropout1d(torch.ones(2, 3, 4)),
        lambda: (bernoulli(D0, 0.5, (2, 3, 1)) * 2.0).expand(2, 3, 4),
    ),
    "dropout2d": (
        lambda: nn.Dropout2d()(torch.ones(2, 3, 4, 5)),
        lambda: (bernoulli(D0, 0.5, (2, 3, 1, 1)) * 2.0).expand(2, 3, 4, 5),
    ),
    "dropout3d of one": (
        lambda: F.dropout3d(torch.ones(3, 4, 5, 2)),
        lambda: (bernoulli(D0, 0.5, (3, 1, 1, 1)) * 2.0).expand(3, 4, 5, 2),
    ),
    "native_dropout": (
        lambda: torch.native_dropout(torch.ones(9), 0.5, True)[0],
        lambda: bernoulli(D0, 0.5, (9,)) * 2.0,
    ),
}


@pytest.mark.parametrize("name", SERVED)
def test_the_first_draw_of_a_scope_uses_child_zero_of_its_key(name):
    ambient, keyed = SERVED[name]
    got, expected = scoped(ambient), keyed()
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=3e-7, atol=1e-9)


def test_the_nth_draw_uses_child_n():
    with use(K) as scope:
        for n in range(4):
            assert torch.equal(torch.randn(3), normal(fold_in(K, n), (3,)))
        assert scope.draws == 4
        F.dropout(torch.ones(3), training=False)  # draws nothing
        F.dropout(torch.ones(3), p=0.0)
        assert scope.draws == 4


def test_every_random_function_of_torch_is_served_or_refused():
    """By torch's own tag on operators: the list grows with torch, and this test with it."""
    functions = {f for group in get_overridable_functions().values() for f in group}
    factories = ("rand", "randn", "randint", "randperm", "normal", "rand_like", "randn_like", "randint_like")
    functions |= {getattr(torch, name) for name in factories}
    missing = set()
    for f in functions:
        name = getattr(f, "__name__", "")
        packet = getattr(torch.ops.aten, name, None)
        if packet is None or name.startswith("_") or f in HANDLERS:
            continue
        if any(is_stateful_random(getattr(packet, overload)) for overload in packet.overloads()):
            missing.add(name)
    assert missing <= {"miopen_rnn"}  # torch.lstm and its kin are what people call


def test_multinomial():
    weights = torch.tensor([[0.0, 1.0, 3.0], [2.0, 2.0, 0.0]])
    drawn = scoped(torch.multinomial, weights, 4000, True)
    rates = F.one_hot(drawn, 3).double().mean(1)
    torch.testing.assert_close(rates, weights.double() / 4, rtol=0, atol=0.03)
    pairs = scoped(lambda: weights.multinomial(2))
    assert pairs.sort(-1).values.tolist() == [[1, 2], [0, 1]]
    assert scoped(lambda: torch.distributions.Categorical(weights[0]).sample((50,))).min() == 1


def test_gumbel_softmax():
    logits = torch.tensor([0.0, math.log(3.0)], requires_grad=True)
    hard = scoped(lambda: F.gumbel_softmax(logits.expand(4000, 2), hard=True))
    assert abs(hard[:, 1].mean() - 0.75) < 0.03
    torch.testing.assert_close(hard.sum(-1), torch.ones(4000))
    hard[:, 1].sum().backward()
    assert logits.grad[1] > 0


def test_a_module_is_born_from_the_key():
    build = lambda: nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Conv1d(8, 2, 3), nn.Embedding(5, 3))  # noqa: E731
    a, b = scoped(build).state_dict(), scoped(build).state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert a["0.weight"].abs().max() <= 0.5 and a["0.weight"].std() > 0.2


def test_an_explicit_generator_stays_in_charge():
    g, h = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    assert torch.equal(scoped(lambda: torch.randn(3, generator=g)), torch.randn(3, generator=h))


# ---- dropout


def test_dropout_passes_gradients_to_what_it_kept():
    x = torch.linspace(1, 2, 1000, requires_grad=True)
    y = scoped(F.dropout, x, 0.2)
    kept = y != 0
    assert abs(kept.double().mean() - 0.8) < 0.05
    torch.testing.assert_close(y[kept], x[kept] / 0.8)
    (g,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(g, kept / 0.8)


def test_dropout_of_everything_is_zero_with_zero_gradient():
    x = torch.tensor([1.0, float("inf"), -2.0], requires_grad=True)
    for f in (F.dropout, F.alpha_dropout):
        y = scoped(f, x, 1.0, True)
        assert y.tolist() == [0, 0, 0]
        assert torch.autograd.grad(y.sum(), x)[0].tolist() == [0, 0, 0]


def test_dropout_of_nothing_is_the_identity():
    x = torch.randn(3, generator=torch.Generator().manual_seed(0))
    assert scoped(F.dropout, x, 0.0) is x
    assert scoped(F.dropout, x, 0.5, False) is x
    assert scoped(nn.Dropout().eval(), x) is x


def test_dropout_in_place():
    x = torch.ones(100, requires_grad=True)
    y = x * 3
    with use(K):
        z = F.dropout(y, 0.5, True, inplace=True)
    assert z is y and set(z.tolist()) == {0.0, 6.0}
    (g,) = torch.autograd.grad(z.sum(), x)
    assert torch.equal(g, z.detach())
    w = torch.ones(100)
    assert scoped(torch.dropout_, w, 0.5, True) is w and set(w.tolist()) == {0.0, 2.0}


@pytest.mark.parametrize(
    "f, shape", [(F.alpha_dropout, (N := 20000,)), (F.feature_alpha_dropout, (100, 200, 1))]
)
def test_alpha_dropout_keeps_mean_and_variance(f, shape):
    x = normal(key(5), shape)
    y = scoped(f, x, 0.3, True)
    assert abs(y.mean()) < 0.05 and abs(y.var() - 1) < 0.05
    assert not torch.equal(x, y)


def test_dropout_under_transforms():
    x, keys = torch.ones(4, 50), fp.random.split(key(2), 4)

    def f(row, k):
        with use(k):
            return F.dropout(row, 0.5).sum()

    grads = torch.vmap(torch.func.grad(f))(x, keys)
    expected = torch.stack([bernoulli(fold_in(k, 0), 0.5, (50,)) * 2.0 for k in keys])
    assert torch.equal(grads, expected)


@pytest.mark.parametrize("p", [-0.1, 1.1])
def test_a_dropout_that_is_no_probability_is_an_error(p):
    with pytest.raises(RandomError, match="Fix: "):
        scoped(torch.dropout, torch.ones(3), p, True)


# ---- what no key can serve


def attend(p):
    q = torch.ones(1, 1, 2, 4)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=p)


def multi_head(p, training=True):
    q = torch.ones(2, 1, 4)
    return nn.MultiheadAttention(4, 2, dropout=p).train(training)(q, q, q)[0]


def lstm(p, layers=2):
    return nn.LSTM(2, 2, layers, dropout=p)(torch.ones(3, 1, 2))[0]


@pytest.mark.parametrize(
    "call",
    [
        lambda: attend(0.1),
        lambda: multi_head(0.1),
        lambda: lstm(0.1),
        lambda: F.rrelu(torch.ones(3), training=True),
        lambda: torch.poisson(torch.ones(3)),
        lambda: torch.empty(3).cauchy_(),
        lambda: torch.distributions.Gamma(1.0, 1.0).sample(),
        lambda: F.fractional_max_pool2d(torch.ones(1, 1, 4, 4), 2, output_size=2),
    ],
)
def test_draws_that_no_key_can_serve_are_errors(call):
    with pytest.raises(RandomError) as error:
        scoped(call)
    assert "no key controls" in str(error.value)
    assert str(error.value).splitlines()[-1].startswith("Fix: ")


@pytest.mark.parametrize(
    "call",
    [
        lambda: attend(0.0),
        lambda: multi_head(0.0),
        lambda: multi_head(0.1, training=False),
        lambda: lstm(0.0),
        lambda: F.rrelu(torch.ones(3)),
    ],
)
def test_the_same_functions_run_where_they_draw_nothing(call):
    assert torch.equal(scoped(call), scoped(call))


# ---- scopes


def test_there_is_no_scope_outside():
    assert fp.random.current_scope() is None
    assert fp.random.block_scope() is None
    assert fp.random.scope_child(3) is None


def test_scopes_nest_and_close():
    with use(K) as outer:
        assert fp.random.current_scope() is outer
        with use(key(1)):
            assert torch.equal(torch.randn(2), normal(fold_in(key(1), 0), (2,)))
        assert torch.equal(torch.randn(2), normal(D0, (2,)))
        with pytest.raises(ZeroDivisionError), use(key(2)):
            1 / 0  # noqa: B018
        assert fp.random.current_scope() is outer
    assert fp.random.current_scope() is None


def test_a_block_call_has_a_key_of_its_own():
    def block(x):
        with use(fp.random.block_scope()):
            return x + torch.randn(2)

    def nth(*path):
        k = K
        for i in path:
            k = fold_in(fold_in(k, 0x626C6F63), i)
        return k

    with use(K):
        before = torch.randn(2)
        first, second = block(torch.zeros(2)), block(torch.zeros(2))
        after = torch.randn(2)
        with use(fp.random.block_scope()):
            inner = block(torch.zeros(2))
    assert torch.equal(before, normal(D0, (2,)))
    assert torch.equal(first, normal(fold_in(nth(0), 0), (2,)))
    assert torch.equal(second, normal(fold_in(nth(1), 0), (2,)))
    assert torch.equal(after, normal(fold_in(K, 1), (2,)))  # blocks do not shift the draws around them
    assert torch.equal(inner, normal(fold_in(nth(2, 0), 0), (2,)))


def test_scope_child_folds_a_number_or_a_tensor():
    with use(K):
        assert torch.equal(fp.random.scope_child(5), fold_in(K, 5))
        assert torch.equal(fp.random.scope_child(torch.tensor(5)), fold_in(K, 5))


def test_a_scope_needs_a_key():
    with pytest.raises(RandomError, match="int64"), use(torch.zeros(2)):
        pass


# ---- tracing


def test_traced_and_untraced_steps_agree_bit_for_bit():
    layer = scoped(nn.TransformerEncoderLayer, 8, 2, 16, 0.0).train()
    layer.dropout.p = 0.3

    def step(k, x):
        with use(k):
            y = layer(x) + torch.randn_like(x)
            return F.dropout(y, 0.1).square().mean()

    params = dict(layer.named_parameters())

    def grads(k, x):
        return torch.autograd.grad(step(k, x), list(params.values()))

    x = normal(key(4), (5, 3, 8))
    graph = make_fx(grads, tracing_mode="fake", _allow_non_fake_inputs=True)(key(0), x)
    assert not any(is_stateful_random(node.target, node.args, node.kwargs) for node in graph.graph.nodes)
    for seed in (0, 1):
        for got, expected in zip(graph(key(seed), x), grads(key(seed), x), strict=True):
            assert torch.equal(got, expected)


def test_stateful_operators_are_known_by_torchs_tag():
    aten = torch.ops.aten
    sdpa = aten._scaled_dot_product_flash_attention_for_cpu.default
    q = torch.ones(1, 1, 2, 4)
    assert is_stateful_random(aten.rand.default)
    assert is_stateful_random(aten.bernoulli_.float, (torch.ones(2), 0.5))
    assert is_stateful_random(aten.native_dropout.default, (q, 0.5, True))
    assert not is_stateful_random(aten.native_dropout.default, (q, 0.5, False))
    assert is_stateful_random(sdpa)
    assert is_stateful_random(sdpa, (q, q, q, 0.1))
    assert not is_stateful_random(sdpa, (q, q, q))
    assert not is_stateful_random(sdpa, (q, q, q), {"dropout_p": 0.0})
    assert not is_stateful_random(aten.add.Tensor)
    assert not is_stateful_random(torch.ops.fparallel.random.default)
    assert not is_stateful_random("output")
