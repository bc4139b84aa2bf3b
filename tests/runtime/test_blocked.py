"""Elementwise segments in blocks equal the same ops one by one, in every bit."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fparallel.layout import Layout
from fparallel.runtime import blocked
from fparallel.runtime.segments import bind
from fparallel.schedule.segment import LocalOp, Ref, Segment

SCALAR = Layout.replicated(())
NUMEL = 2 * blocked.BLOCK + 777  # two whole blocks and a ragged one


class Body:
    """Collects the ops of an elementwise segment."""

    def __init__(self, dtypes, scalars=()):
        self.inputs = [(d, Layout.replicated((NUMEL,))) for d in dtypes] + [(d, SCALAR) for d in scalars]
        self.ops, self.count = [], len(self.inputs)

    def __call__(self, target, *args, **kwargs):
        self.ops.append(LocalOp(f"aten.{target}", args, (self.count,), tuple(kwargs.items())))
        self.count += 1
        return Ref(self.count - 1)

    def segments(self, *results):
        """The body under the name "body", and a segment that maps it."""
        outputs = tuple(self.inputs[0] for _ in results)
        body = Segment("body", tuple(self.inputs), outputs, tuple(self.ops), tuple(r.index for r in results))
        first = len(self.inputs)
        outs = tuple(range(first, first + len(results)))
        call = LocalOp("map.body", tuple(map(Ref, range(first))), outs)
        return {"body": body, "outer": Segment("outer", body.inputs, outputs, (call,), outs)}


def adamw():
    """Inputs p, g, m, v and 0-d scale, 1-b1^t, 1-b2^t, -lr; results p, m, v."""
    f = torch.float32
    b = Body([f] * 4, [f] * 4)
    p, g, m, v, scale, c1, c2, lr = map(Ref, range(8))
    g = b("mul.Tensor", g, scale)
    m = b("add.Tensor", b("mul.Tensor", m, 0.9), b("mul.Tensor", g, 0.1))
    v = b("add.Tensor", b("mul.Tensor", v, 0.99), b("mul.Tensor", b("mul.Tensor", g, g), 0.01))
    root = b("add.Tensor", b("sqrt.default", b("div.Tensor", v, c2)), 1e-8)
    update = b("add.Tensor", b("div.Tensor", b("div.Tensor", m, c1), root), b("mul.Tensor", p, 0.01))
    return b.segments(b("add.Tensor", p, b("mul.Tensor", update, lr)), m, v)


def values(segment, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.rand(layout.shape, generator=generator, dtype=torch.float64) + 0.1).to(dtype)
        for dtype, layout in segment.inputs
    ]


def check(segments, inplace=(), seed=0):
    inputs = values(segments["outer"], seed)
    want = bind(segments["body"], segments, {})(*inputs)
    given = [x.clone() for x in inputs]
    got = bind(segments["outer"], segments, {}, inplace)(*given)
    for i, (x, y) in enumerate(zip(got, want, strict=True)):
        assert x.dtype == y.dtype and torch.equal(x, y), f"output {i}"
    for out, into in inplace:
        assert got[out] is given[into]
    written = {into for _, into in inplace}
    for i, (x, y) in enumerate(zip(given, inputs, strict=True)):
        assert i in written or torch.equal(x, y), f"input {i} was overwritten"


def test_adamw_into_new_tensors():
    check(adamw())


@pytest.mark.parametrize(
    "inplace", [((0, 0), (1, 2), (2, 3)), ((0, 1),), ((0, 2), (1, 3), (2, 1)), ((0, 3), (2, 0))]
)
def test_adamw_in_place(inplace):
    """Also into inputs that are still read after the output is known."""
    check(adamw(), inplace)


UNARY = ["neg", "abs", "sqrt", "exp", "log", "tanh", "rsqrt", "reciprocal", "sigmoid", "sin", "erf", "gelu"]
UNARY = [f"{name}.default" for name in UNARY]
BINARY = [f"{name}.Tensor" for name in ("add", "sub", "mul", "div")]
BINARY += ["maximum.default", "pow.Tensor_Tensor", "atan2.default"]
NUMBERS = (2, 0.3, -1, 1e-8, 3)


def random_body(rng):
    dtypes = [rng.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16]) for _ in range(3)]
    body = Body(dtypes, [rng.choice([torch.float32, torch.float64, torch.int64])])
    wide, made = [0, 1, 2], []
    for _ in range(rng.randint(1, 12)):
        a, b = Ref(rng.choice(wide)), Ref(rng.choice([*wide, 3]))
        kind = rng.randrange(6)
        if kind == 0:
            out = body(rng.choice(UNARY), a)
        elif kind == 1:
            out = body(rng.choice(BINARY), a, b)
        elif kind == 2:
            out = body(
                rng.choice(("add.Tensor", "mul.Tensor", "sub.Tensor", "div.Tensor")), a, rng.choice(NUMBERS)
            )
        elif kind == 3:
            out = body("where.self", body("gt.Scalar", a, 0.5), a, b)
        elif kind == 4:
            out = body("add.Tensor", a, b, alpha=rng.choice(NUMBERS))
        else:
            out = body(
                "_to_copy.default", a, dtype=rng.choice([torch.float32, torch.float64, torch.bfloat16])
            )
        wide.append(out.index)
        made.append(out)
    return body.segments(*rng.sample(made, rng.randint(1, min(3, len(made)))))


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6))
def test_random_bodies(seed):
    segments = random_body(random.Random(seed))
    inputs = values(segments["outer"], seed)
    want = bind(segments["body"], segments, {})(*inputs)
    got = bind(segments["outer"], segments, {})(*inputs)
    for x, y in zip(got, want, strict=True):
        assert x.dtype == y.dtype and torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0))


def test_one_loop_serves_one_body():
    """The same body under two names, and its blocks, are generated once."""
    one, two = adamw(), adamw()
    assert bind(one["outer"], one, {}) is bind(two["outer"], two, {})


@pytest.mark.parametrize(
    "change",
    [lambda x: x[:100], lambda x: x.reshape(-1, 1)[:, 0][::2], lambda x: x.view(64, -1).t(), lambda x: x[:0]],
    ids=["small", "strided", "transposed", "empty"],
)
def test_other_tensors_run_op_by_op(change):
    segments = adamw()
    inputs = [change(x[: NUMEL // 64 * 64]) if x.dim() else x for x in values(segments["outer"])]
    want = bind(segments["body"], segments, {})(*inputs)
    got = bind(segments["outer"], segments, {}, ((0, 0),))(*[x.clone() for x in inputs])
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)


def test_an_op_that_is_not_elementwise_runs_on_the_whole():
    body = Body([torch.float32])
    segments = body.segments(body("cumsum.default", Ref(0), 0))
    check(segments)
    check(segments, ((0, 0),))
