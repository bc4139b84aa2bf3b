"""The keyed draws: their values, their distributions, and the algebra of keys."""

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch.fx.experimental.proxy_tensor import make_fx

from fparallel.errors import RandomError
from fparallel.random import (
    bernoulli,
    bits,
    exponential,
    fold_in,
    key,
    normal,
    permutation,
    randint,
    split,
    uniform,
)

N = 2**17
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


# ---- values

KNOWN = {
    "split": [[-5926223656340395789, 2208863301467408703], [7523683686360437679, 7721195261103727698]],
    "fold_in": [-6692765423518360189, 8177430246053892097],
    "bits": [-8811364846024316701, 5470113421134313144],
    "uniform32": ["0x1.b96ca00000000p-2", "0x1.0b6f7c0000000p-1", "0x1.679d6c0000000p-1"],
    "uniform64": ["0x1.0b6f7cb6dcb65p-1", "0x1.2fa6fcb2cf3acp-2"],
    "normal32": [
        "0x1.6dbe8e0000000p-2",
        "-0x1.a50ab60000000p-2",
        "-0x1.54a4d00000000p+0",
        "0x1.9144700000000p-3",
    ],
    "normal64": ["-0x1.3bbf49d4fd3d8p+1", "0x1.73f0a1565837ep-2"],
    "exponential32": ["0x1.2fc14c0000000p-3", "0x1.8de1dc0000000p+1"],
    "bernoulli": [0, 1, 1, 0, 1, 0, 0, 1],
    "randint": [107, 144, 438, 529],
    "permutation": [0, 4, 3, 5, 1, 2],
}


def test_known_answers():
    """What every release must reproduce, on every machine."""
    k = key(2026)
    assert split(k).tolist() == KNOWN["split"]
    assert fold_in(k, 7).tolist() == KNOWN["fold_in"]
    assert bits(k, (2,)).tolist() == KNOWN["bits"]
    assert [x.hex() for x in uniform(k, (3,)).tolist()] == KNOWN["uniform32"]
    assert [x.hex() for x in uniform(k, (2,), torch.float64).tolist()] == KNOWN["uniform64"]
    assert [x.hex() for x in normal(k, (4,)).tolist()] == KNOWN["normal32"]
    assert [x.hex() for x in normal(k, (2,), torch.float64).tolist()] == KNOWN["normal64"]
    assert [x.hex() for x in exponential(k, (2,)).tolist()] == KNOWN["exponential32"]
    assert bernoulli(k, 0.5, (8,)).int().tolist() == KNOWN["bernoulli"]
    assert randint(k, (4,), 0, 1000).tolist() == KNOWN["randint"]
    assert permutation(k, 6).tolist() == KNOWN["permutation"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normals_are_box_and_mullers(dtype):
    """Against the formula in extended precision, from the same words rounded to the dtype."""
    integer = torch.int64 if dtype == torch.float64 else torch.int32
    top = torch.iinfo(integer).max
    first, second = bits(key(4), (N // 2, 2), integer).unbind(-1)
    u = wide((first & top) | 1, dtype) / (top + 1)
    y = wide((second << 1) | 1, dtype) / (top + 1)
    radius, angle = np.sqrt(-2 * np.log(u)), PI / 4 * (1 + y)
    signs = [np.where(word < 0, -1, 1) for word in (first.numpy(), second.numpy())]
    expected = np.stack([signs[0] * radius * np.cos(angle), signs[1] * radius * np.sin(angle)], -1)
    error = np.abs(normal(key(4), (N // 2, 2), dtype).numpy() - expected)
    assert np.all(error <= 4 * torch.finfo(dtype).eps * radius[:, None])


PI = np.longdouble(4) * np.arctan(np.longdouble(1))


def wide(x, dtype):
    """Integers rounded to a floating-point dtype, then in extended precision."""
    return x.to(dtype).numpy().astype(np.longdouble)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exponentials_are_minus_log(dtype):
    integer = torch.int64 if dtype == torch.float64 else torch.int32
    words = bits(key(4), (4096,), integer)
    digits = torch.iinfo(integer).bits - 1
    u = ((words & torch.iinfo(integer).max) | 1).double() / 2.0**digits
    torch.testing.assert_close(exponential(key(4), (4096,), dtype), -u.log().to(dtype), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype, digits", [(torch.float32, 24), (torch.float64, 53)])
def test_uniform_digits(dtype, digits):
    u = uniform(key(0), (N,), dtype).double()
    grid = u * 2.0**digits
    assert torch.equal(grid, grid.round())
    assert (grid.long() % 2 == 1).double().mean().sub(0.5).abs() < 0.01  # the last digit is random
    assert u.min() >= 0 and u.max() < 1


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("low, high", [(0.0, 1.0), (1.0, 2.0), (-3.0, -1.0), (-1.0, 0.0), (0.0, 0.1)])
def test_uniform_stays_below_its_upper_bound(dtype, low, high):
    """Also where rounding to the dtype would reach it."""
    u = uniform(key(1), (2**14,), dtype, low, high)
    assert u.dtype == dtype
    assert u.min() >= torch.tensor(low, dtype=dtype) and u.max() < torch.tensor(high, dtype=dtype)
    assert abs(u.double().mean() - (low + high) / 2) < 0.02 * (high - low)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_the_rounded_float32_draw(dtype):
    assert torch.equal(normal(key(0), (999,), dtype), normal(key(0), (999,)).to(dtype))


# ---- distributions


def ks_distance(samples, cdf):
    x = samples.double().flatten().sort().values
    f, n = cdf(x), len(x)
    steps = torch.arange(n, dtype=torch.float64) / n
    return max((f - steps).max().item(), (steps + 1 / n - f).max().item())


CRITICAL = 1.95 / math.sqrt(N)  # Kolmogorov-Smirnov at the level 0.001


@pytest.mark.parametrize("seed", [0, 1, 2**62 + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_distributions(seed, dtype):
    k = key(seed)
    assert ks_distance(uniform(k, (N,), dtype), lambda x: x) < CRITICAL
    assert ks_distance(normal(k, (N,), dtype), lambda x: 0.5 * (1 + torch.erf(x / math.sqrt(2)))) < CRITICAL
    assert ks_distance(exponential(k, (N,), dtype), lambda x: 1 - torch.exp(-x)) < CRITICAL


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_moments_of_normals(dtype):
    z = normal(key(9), (N,), dtype).double()
    for power, moment, variance in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)]:
        assert abs((z**power).mean() - moment) < 4 * math.sqrt(variance / N)
    assert abs((z.abs() > 3).double().mean() - 0.0027) < 4 * math.sqrt(0.0027 / N)
    pairs = z.reshape(-1, 2)
    assert abs((pairs[:, 0] * pairs[:, 1]).mean()) < 4 / math.sqrt(N / 2)
    assert abs((pairs[:, 0] ** 2 * pairs[:, 1] ** 2).mean() - 1) < 4 * math.sqrt(8 / (N / 2))


@pytest.mark.parametrize("p", [0.0, 1e-3, 0.1, 0.5, 0.9, 1.0])
def test_bernoulli_rate(p):
    for rate in (bernoulli(key(5), p, (N,)), bernoulli(key(5), torch.tensor(p), (N,))):
        assert rate.dtype == torch.bool
        assert abs(rate.double().mean() - p) <= 4 * math.sqrt(p * (1 - p) / N)


def test_bernoulli_of_a_tensor_broadcasts():
    p = torch.tensor([0.0, 1.0, 0.5], dtype=torch.float64)
    draws = bernoulli(key(5), p, (1000, 3)).double().mean(0)
    assert draws[0] == 0 and draws[1] == 1 and abs(draws[2] - 0.5) < 0.1


@pytest.mark.parametrize(
    "low, high, dtype", [(0, 7, torch.int64), (-3, 2, torch.int8), (250, 256, torch.uint8)]
)
def test_randint_is_even_over_its_range(low, high, dtype):
    x = randint(key(6), (N,), low, high, dtype)
    assert x.dtype == dtype
    counts = torch.bincount(x.long() - low, minlength=high - low).double()
    assert len(counts) == high - low
    expected = N / (high - low)
    assert ((counts - expected) ** 2 / expected).sum() < 30  # chi squared with at most 6 degrees of freedom


def test_randint_reaches_far_bounds():
    x = randint(key(6), (1000,), -(2**62), 2**62 - 1)
    assert x.min() < -(2**61) and x.max() > 2**61


def test_permutation():
    for n in (0, 1, 2, 1000):
        assert torch.equal(permutation(key(0), n).sort().values, torch.arange(n))
    firsts = torch.stack([permutation(fold_in(key(0), i), 4)[0] for i in range(400)])
    assert torch.bincount(firsts, minlength=4).min() > 60


# ---- keys


def test_streams_are_uncorrelated():
    """A key, its children, its grandchildren, and neighbouring seeds."""
    k = key(0)
    keys = [k, key(1), key(2), *split(k, 3), fold_in(k, 0), fold_in(k, 1), fold_in(fold_in(k, 0), 0)]
    keys += [split(keys[-1])[0]]
    z = torch.stack([normal(k, (2**14,), torch.float64) for k in keys])
    products = z @ z.T / z.shape[1] - torch.eye(len(keys), dtype=torch.float64)
    assert products.abs().max() < 5 * math.sqrt(2 / z.shape[1])
    shifted = z[:, :-1] @ z[:, 1:].T / z.shape[1]
    assert shifted.abs().max() < 5 / math.sqrt(z.shape[1])


@given(
    seed=st.integers(0, 2**63 - 1),
    data=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=8, unique=True),
)
def test_different_data_fold_to_different_keys(seed, data):
    k = key(seed)
    children = {tuple(fold_in(k, d).tolist()) for d in data} | {tuple(x) for x in split(k, 5).tolist()}
    assert len(children | {tuple(k.tolist())}) == len(data) + 6
    assert torch.equal(fold_in(k, data[0]), fold_in(k, torch.tensor(data[0])))


def test_folding_does_not_commute_with_itself():
    k = key(0)
    assert not torch.equal(fold_in(fold_in(k, 1), 2), fold_in(fold_in(k, 2), 1))


def test_split():
    k1, k2 = split(key(3))
    assert k1.shape == k2.shape == (2,)
    assert torch.equal(split(key(3), 40)[:2], torch.stack([k1, k2]))  # 40 keys go another way than 2
    assert split(key(3), 0).shape == (0, 2)


def test_key_of_a_tensor():
    assert torch.equal(key(torch.tensor(12, dtype=torch.int32)), key(12))
    assert torch.equal(key(12), torch.tensor([12, 0]))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: key(-1), "2**63"),
        (lambda: key(1.5), "1.5"),
        (lambda: key(torch.tensor([1, 2])), "int64[2]"),
        (lambda: normal(key(0).int(), (2,)), "int32[2]"),
        (lambda: normal(split(key(0)), (2,)), "int64[2, 2]"),
        (lambda: normal(7, (2,)), "got 7"),
        (lambda: normal(key(0), (2,), torch.complex64), "complex64"),
        (lambda: bits(key(0), (2,), torch.float32), "float32"),
        (lambda: uniform(key(0), (2,), torch.float32, 1.0, 1.0), "empty range"),
        (lambda: bernoulli(key(0), 1.5, (2,)), "1.5"),
        (lambda: randint(key(0), (2,), 3, 3), "[3, 3)"),
        (lambda: randint(key(0), (2,), 0, 300, torch.uint8), "uint8"),
        (lambda: fold_in(key(0), 2**63), "64 bits"),
        (lambda: fold_in(key(0), torch.tensor([1, 2])), "int64[2]"),
        (lambda: fold_in(key(0), 0.5), "0.5"),
    ],
)
def test_mistakes_say_what_was_found_and_how_to_fix_it(call, message):
    with pytest.raises(RandomError) as error:
        call()
    assert message in str(error.value)
    assert str(error.value).splitlines()[-1].startswith("Fix: ")


# ---- as operators

DRAWS = [
    lambda k: bits(k, (3,)),
    lambda k: uniform(k, (2, 3)),
    lambda k: normal(k, (5,), torch.float64),
    lambda k: exponential(k, ()),
    lambda k: bernoulli(k, 0.5, (7,)),
    lambda k: randint(k, (0, 4), 0, 9),
    lambda k: permutation(k, 5),
    lambda k: split(k, 3),
    lambda k: fold_in(k, 3),
]


@pytest.mark.parametrize("draw", DRAWS)
def test_vmap_over_keys(draw):
    keys = split(key(8), 6).reshape(2, 3, 2)
    expected = torch.stack([torch.stack([draw(k) for k in row]) for row in keys])
    assert torch.equal(torch.vmap(torch.vmap(draw))(keys), expected)
    assert torch.equal(torch.vmap(draw, in_dims=1)(keys[0].T), expected[0])


def test_vmap_over_data():
    keys, data = split(key(8), 3), torch.arange(4)
    expected = torch.stack([torch.stack([fold_in(k, d) for k in keys]) for d in data])
    over_data = torch.vmap(lambda d: torch.vmap(lambda k: fold_in(k, d))(keys))
    assert torch.equal(over_data(data), expected)
    assert torch.equal(
        torch.vmap(torch.vmap(fold_in, (None, 0)), (0, None))(keys, data), expected.transpose(0, 1)
    )
    assert torch.equal(torch.vmap(fold_in)(keys, data[:3]), torch.stack([expected[i, i] for i in range(3)]))


def test_a_draw_without_a_batched_key_is_shared_under_vmap():
    x = torch.zeros(4, 3)
    assert torch.equal(
        torch.vmap(lambda row: row + normal(key(0), (3,)))(x), normal(key(0), (3,)).expand(4, 3)
    )


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_a_traced_draw_is_one_opaque_node(mode):
    def f(k, x):
        k1, k2 = split(fold_in(k, 3))
        return x * normal(k1, x.shape) + bernoulli(k2, 0.5, x.shape)

    graph = make_fx(f, tracing_mode=mode)(key(0), torch.ones(6))
    ops = torch.ops.fparallel
    nodes = [
        node.target for node in graph.graph.nodes if getattr(node.target, "namespace", "") == "fparallel"
    ]
    assert nodes == [ops.fold_in.int, ops.split.default, ops.random.default, ops.random.default]
    assert torch.equal(graph(key(1), torch.ones(6)), f(key(1), torch.ones(6)))


def test_gradients_flow_past_draws():
    def f(x, k):
        return (x * normal(k, x.shape)).sum()

    x = torch.ones(5)
    assert torch.equal(torch.func.grad(f)(x, key(0)), normal(key(0), (5,)))
    per_key = torch.vmap(torch.func.grad(f), (None, 0))(x, split(key(0), 2))
    assert torch.equal(per_key, torch.stack([normal(k, (5,)) for k in split(key(0))]))


@pytest.mark.parametrize(
    "op, args",
    [
        (torch.ops.fparallel.random.default, (key(0), "normal", (3, 4), torch.float32, 0.0, 1.0)),
        (
            torch.ops.fparallel.random.default,
            (split(key(0)), "randint", (3,), torch.int32, 0, 7, [1, 1, 2, 1]),
        ),
        (torch.ops.fparallel.fold_in.default, (key(0), torch.tensor(3))),
        (torch.ops.fparallel.fold_in.int, (key(0), 3)),
        (torch.ops.fparallel.split.default, (key(0), 3)),
    ],
)
def test_opcheck(op, args):
    torch.library.opcheck(op, args)


def test_device_is_a_choice_apart_from_the_keys():
    assert normal(key(0), (2,), device="meta").device.type == "meta"
    assert normal(key(0).to("meta"), (2,)).device.type == "meta"
    with torch.device("meta"):
        assert normal(torch.zeros(2, dtype=torch.int64, device="cpu"), (2,)).device.type == "cpu"
