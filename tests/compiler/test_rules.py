"""fp.register_rule: a user's own ops shard as their rule says; a rule that does not fit is an error."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fparallel as fp
from fparallel import P
from fparallel.errors import RuleError
from tests.compiler.sharded import run, simulated, whole


@torch.library.custom_op("fptest::product", mutates_args=())
def product(a: Tensor, b: Tensor) -> Tensor:
    return torch.einsum("bmk,kn->bmn", a, b)


@product.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty((a.shape[0], a.shape[1], b.shape[1]))


@torch.library.custom_op("fptest::scale_rows", mutates_args=())
def scale_rows(a: Tensor, b: Tensor) -> Tensor:
    return a * b[:, None]


@scale_rows.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return torch.empty_like(a)


@torch.library.custom_op("fptest::ranks", mutates_args=())
def ranks(a: Tensor) -> Tensor:
    """The place of every element in its row."""
    return a.argsort(dim=1, stable=True).argsort(dim=1, stable=True).to(a.dtype)


@ranks.register_fake
def _(a: Tensor) -> Tensor:
    return torch.empty_like(a)


@torch.library.custom_op("fptest::row_max", mutates_args=())
def row_max(a: Tensor) -> Tensor:
    return a.amax(1)  # which has no result for an empty row: a rank without columns must not call it


@row_max.register_fake
def _(a: Tensor) -> Tensor:
    return a.new_empty((a.shape[0],))


@torch.library.custom_op("fptest::heads", mutates_args=())
def heads(a: Tensor, gate: Tensor) -> Tensor:
    """(n, h * e) and (h,) to (h, n, e)."""
    return (
        (a.reshape(a.shape[0], gate.shape[0], a.shape[1] // gate.shape[0]) * gate[:, None])
        .transpose(0, 1)
        .contiguous()
    )


@heads.register_fake
def _(a: Tensor, gate: Tensor) -> Tensor:
    return a.new_empty((gate.shape[0], a.shape[0], a.shape[1] // gate.shape[0]))


@torch.library.custom_op("fptest::moments", mutates_args=())
def moments(a: Tensor) -> tuple[Tensor, Tensor]:
    return a.sum(0), a.square().sum(0)


@moments.register_fake
def _(a: Tensor) -> tuple[Tensor, Tensor]:
    return a.new_empty(a.shape[1:]), a.new_empty(a.shape[1:])


@torch.library.custom_op("fptest::without_rule", mutates_args=())
def without_rule(a: Tensor) -> Tensor:
    return a.flip(0)


@without_rule.register_fake
def _(a: Tensor) -> Tensor:
    return torch.empty_like(a)


@dataclasses.dataclass(frozen=True)
class Taught:
    """A custom op, its rule, and for drawn sizes the shapes of its operands."""

    op: object
    text: str
    options: dict
    shapes: object
    gathered: tuple[
        tuple[int, int], ...
    ] = ()  # (operand, dim): must be whole, or cheaper to gather than to reduce


TAUGHT = [
    Taught(
        product,
        "b m k, k n -> b m n",
        {"linear": (0, 1)},
        lambda a, b, c, d: ((a, b, c), (c, d)),
        ((0, 2), (1, 0)),
    ),
    Taught(scale_rows, "n d, n -> n d", {"linear": (0,)}, lambda a, b, c, d: ((a, b), (a,))),
    Taught(ranks, "n d -> n d", {"replicate": "d"}, lambda a, b, c, d: ((a, b),), ((0, 1),)),
    Taught(row_max, "n d -> n", {"reduce": "max"}, lambda a, b, c, d: ((a, b),)),
    Taught(heads, "n (h e), h -> h n e", {"linear": (0,)}, lambda a, b, c, d: ((a, b * c), (b,))),
    Taught(moments, "n d -> d, d", {}, lambda a, b, c, d: ((a, b),)),
]
for taught in TAUGHT:
    fp.register_rule(taught.op._opoverload, taught.text, **taught.options)


@st.composite
def sharded_calls(draw):
    """A taught op with operands, a mesh, and a spec per operand."""
    taught = draw(st.sampled_from(TAUGHT))
    shapes = taught.shapes(*(draw(st.integers(1, 5)) for _ in range(4)))
    sizes = draw(st.sampled_from([{"x": 2}, {"x": 3}, {"x": 2, "y": 2}, {"x": 4}]))
    args = [whole(draw(st.integers(0, 9)) + i, *shape) for i, shape in enumerate(shapes)]
    specs = []
    for shape in shapes:
        free = draw(st.permutations(list(sizes)))
        spec = [free.pop() if free and draw(st.booleans()) else None for _ in shape]
        specs.append(P(*spec))
    return taught, args, specs, simulated(**sizes)


@given(sharded_calls())
def test_a_taught_op_gives_what_it_gives_on_one_device(call):
    taught, args, specs, mesh = call
    run(lambda *xs: taught.op(*xs), args, specs, mesh, exact=True)


@pytest.mark.parametrize("mesh", [simulated(x=2), simulated(x=3)], ids=str)
@pytest.mark.parametrize("taught", TAUGHT, ids=lambda t: t.text)
def test_every_factor_that_may_be_sharded_is(mesh, taught):
    """Sharding one dim of one operand gathers nothing, but for the factors that must be whole."""
    shapes = taught.shapes(4, 6, 6, 5)
    args = [whole(i, *shape) for i, shape in enumerate(shapes)]
    for i, shape in enumerate(shapes):
        for dim in range(len(shape)):
            specs = [P(*[None] * dim, "x") if j == i else P() for j in range(len(shapes))]
            made = run(lambda *xs: taught.op(*xs), args, specs, mesh, exact=True)
            gathers = any("gather" in move or "all_to_all" in move for move in made.collectives)
            assert gathers == ((i, dim) in taught.gathered), (i, dim, made.collectives)


def test_a_pending_sum_passes_through_the_operands_that_are_linear():
    """a @ b over a sharded k is a sum over ranks: reduced after `scale_rows`, before `row_max`."""
    a, b, gate = whole(0, 4, 6), whole(1, 6, 5), whole(2, 4)

    def linear(a, b, gate):
        return scale_rows(a @ b, gate).sum()

    made = run(linear, (a, b, gate), (P(None, "x"), P("x"), P()), simulated(x=2), exact=True)
    assert made.collectives == ["all_reduce[x] sum []"]

    made = run(lambda a, b: row_max(a @ b), (a, b), (P(None, "x"), P("x")), simulated(x=2), exact=True)
    assert made.collectives[0].endswith("sum [4,5]")


def test_an_op_without_a_rule_is_refused_only_if_its_operand_is_sharded():
    x = whole(0, 4, 3)
    run(lambda x: without_rule(x), (x,), (P(),), simulated(x=2), exact=True)
    with pytest.raises(RuleError, match=r"fptest\.without_rule\.default") as error:
        run(lambda x: without_rule(x), (x,), (P("x"),), simulated(x=2))
    assert "test_rules.py:" in str(error.value)
    assert "fp.register_rule" in str(error.value)
    run(
        lambda x: without_rule(fp.with_sharding_constraint(x, P())),
        (x,),
        (P("x"),),
        simulated(x=2),
        exact=True,
    )


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("n d", {}, "->"),
        ("n d -> n d", {"replicate": "q"}, "q"),
        ("n d -> n z", {}, "z"),
        ("n n -> n", {}, "n"),
    ],
)
def test_malformed_rules(text, options, message):
    with pytest.raises(RuleError, match=message):
        fp.register_rule("fptest.unused.default", text, **options)


def test_a_rule_that_does_not_fit_its_call():
    fp.register_rule("fptest.without_rule.default", "n d e -> n d e")
    try:
        with pytest.raises(RuleError, match="does not fit"):
            run(lambda x: without_rule(x), (whole(0, 4, 3),), (P("x"),), simulated(x=2))
    finally:
        from fparallel.compiler.rules.registry import _RULES

        del _RULES["fptest.without_rule.default"]
