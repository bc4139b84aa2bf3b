"""A bound segment computes what its ops compute, one by one."""

import dis
import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fparallel.errors import ExecutionError
from fparallel.layout import Layout, parse
from fparallel.mesh import make_mesh
from fparallel.runtime.segments import bind, failing_op, resolve_target
from fparallel.schedule.segment import (
    IsFirst,
    LocalOp,
    LocalShape,
    LocalSize,
    Narrowing,
    Ref,
    Runs,
    Segment,
    map_refs,
)

SCALAR = Layout.replicated(())
MATRIX = Layout.replicated((4, 4))
F32 = torch.float32


def segment(ops, results, num_inputs=2, name="s", inputs=None):
    inputs = inputs or ((F32, MATRIX),) * num_inputs
    return Segment(name, tuple(inputs), ((F32, MATRIX),) * len(results), tuple(ops), tuple(results))


def op(target, *args, outs, **kwargs):
    return LocalOp(target, args, outs, tuple(kwargs.items()))


def matrices(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 4, generator=generator) for _ in range(count)]


def evaluate(body, inputs):
    """The meaning of a segment: every op in turn, nothing deleted, nothing shared."""
    values = dict(enumerate(inputs))
    for each in body.ops:
        args = map_refs(lambda ref: values[ref.index], each.args)  # noqa: B023
        out = resolve_target(each.target)(*args, **dict(each.kwargs))
        values |= zip(each.outs, out if len(each.outs) > 1 else (out,), strict=True)
    return [values[r] for r in body.results]


def random_program(rng, num_inputs):
    """Ops over 4x4 matrices, and the values that are such matrices."""
    ops, square, count = [], list(range(num_inputs)), num_inputs

    def add(target, *args, unused=0, **kwargs):
        nonlocal count
        ops.append(op(target, *args, outs=(count,) + (None,) * unused, **kwargs))
        count += 1
        return Ref(count - 1)

    for _ in range(rng.randint(1, 12)):
        a, b = Ref(rng.choice(square)), Ref(rng.choice(square))
        choice = rng.randrange(6)
        if choice == 0:
            made = add("aten.mm.default", a, b)
        elif choice == 1:
            made = add("aten.add.Tensor", a, b, alpha=rng.choice([1, 2, 0.5]))
        elif choice == 2:
            made = add("aten.mul.Tensor", a, rng.choice([2, 0.25, -1.5]))
        elif choice == 3:
            made = add("aten.slice.Tensor", add("aten.cat.default", [a, b]), 0, 2, 6)
        elif choice == 4:
            made = add("aten.expand.default", add("aten.max.dim", a, 1, True, unused=1), [4, 4])
        else:
            made = add("aten.t.default", a)
        square.append(made.index)
    made = square[num_inputs:]
    return ops, rng.sample(made, rng.randint(1, min(3, len(made))))


@given(seed=st.integers(0, 10**6))
def test_random_programs_equal_their_direct_evaluation(seed):
    ops, results = random_program(random.Random(seed), 3)
    body = segment(ops, results, num_inputs=3)
    inputs = matrices(3, seed)
    got, want = bind(body, {}, {})(*inputs), evaluate(body, inputs)
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)


def test_values_die_after_their_last_use():
    """v0 and v1 are deleted where they are read last, v2 is a result, v3 is never read."""
    ops = [op("aten.add.Tensor", Ref(0), Ref(1), outs=(2,)), op("aten.mul.Tensor", Ref(1), Ref(2), outs=(3,))]
    deleted = [
        i.argval for i in dis.get_instructions(bind(segment(ops, (2,)), {}, {})) if i.opname == "DELETE_FAST"
    ]
    assert deleted == ["v0", "v1", "v3"]


def test_a_list_of_one_result_is_unpacked():
    body = segment([op("aten.split.Tensor", Ref(0), 4, outs=(1,))], (1,), num_inputs=1)
    (x,) = matrices(1)
    assert torch.equal(bind(body, {}, {})(x)[0], x)


def test_symbols_are_resolved_for_the_rank():
    mesh = make_mesh((2,), ("dp",), kind="abstract")
    dtype, sharded = parse("f32[5@dp,4]", mesh)
    whole = Layout.replicated((5, 4))
    ops = [
        op("local.narrow", Ref(0), Narrowing(whole, sharded), outs=(1,)),
        op("aten.new_zeros.default", Ref(0), LocalShape(sharded), outs=(2,)),
        op("aten.narrow.default", Ref(0), 0, 0, LocalSize(sharded, 0), outs=(3,)),
        op("local.keep_on_first", Ref(0), IsFirst(sharded.sharded_axes), outs=(4,)),
        op("local.arange", Runs(Layout.of([sharded.dims[0]])), 0, 1, torch.int64, "cpu", outs=(5,)),
    ]
    body = Segment("symbols", ((dtype, whole),), ((dtype, sharded),) * 5, tuple(ops), (1, 2, 3, 4, 5))
    x = torch.arange(20.0).reshape(5, 4)
    first, second = (bind(body, {}, {"dp": rank})(x) for rank in (0, 1))
    assert [tuple(t.shape) for t in first] == [(3, 4), (3, 4), (3, 4), (5, 4), (3,)]
    assert [tuple(t.shape) for t in second] == [(2, 4), (2, 4), (2, 4), (5, 4), (2,)]
    assert torch.equal(second[0], x[3:]) and torch.equal(first[0], x[:3])
    assert torch.equal(first[3], x) and second[3].abs().sum() == 0
    assert second[4].tolist() == [3, 4]


def test_equal_bodies_share_one_function():
    ops = [op("aten.mul.Tensor", Ref(0), 2.0, outs=(1,))]
    one, two = segment(ops, (1,), 1, "layer.0"), segment(ops, (1,), 1, "layer.1")
    other = segment([op("aten.mul.Tensor", Ref(0), 3.0, outs=(1,))], (1,), 1)
    assert bind(one, {}, {}) is bind(two, {}, {})
    assert bind(one, {}, {}) is not bind(other, {}, {})
    assert bind(one, {}, {}) is not bind(one, {}, {}, ((0, 0),))
    # 1, 1.0 and True are equal in Python and different constants here
    functions = {
        bind(segment([op("aten.mul.Tensor", Ref(0), c, outs=(1,))], (1,), 1), {}, {}) for c in (1, 1.0, True)
    }
    assert len(functions) == 3


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_constants_without_a_literal(value):
    body = segment([op("aten.full_like.default", Ref(0), value, outs=(1,))], (1,), 1)
    (got,) = bind(body, {}, {})(torch.zeros(4, 4))
    assert torch.equal(got, torch.full((4, 4), value)) or (math.isnan(value) and got.isnan().all())


def test_in_place_outputs_take_the_storage_of_their_inputs():
    ops = [op("aten.add.Tensor", Ref(0), Ref(1), outs=(2,)), op("aten.mul.Tensor", Ref(0), Ref(1), outs=(3,))]
    a, b = matrices(2)
    total, product = a + b, a * b
    got = bind(segment(ops, (2, 3)), {}, {}, ((0, 1), (1, 0)))(a, b)
    assert got[0] is b and got[1] is a
    assert torch.equal(b, total) and torch.equal(a, product)


def test_an_operator_that_does_not_exist_is_named():
    with pytest.raises(ExecutionError, match=r"aten\.mmm\.default") as caught:
        bind(segment([op("aten.mmm.default", Ref(0), outs=(1,))], (1,), 1), {}, {})
    assert "Fix:" in str(caught.value)


def test_the_failing_op_is_found():
    ops = [
        op("aten.t.default", Ref(0), outs=(1,)),
        LocalOp("aten.mm.default", (Ref(0), Ref(0)), (2,), source="model.py:7"),
    ]
    body = segment(ops, (1, 2), 1, "bad")
    with pytest.raises(RuntimeError) as caught:
        bind(body, {}, {})(torch.zeros(2, 3))
    assert failing_op(body, caught.value.__traceback__).source == "model.py:7"


@pytest.mark.full
def test_inductor_computes_the_same_and_once_per_body():
    """A segment with a map in it, written in place."""
    body = segment(
        [op("aten.mul.Tensor", Ref(0), Ref(1), outs=(2,)), op("aten.relu.default", Ref(2), outs=(3,))], (3,)
    )
    outer = segment(
        [op("aten.mm.default", Ref(0), Ref(1), outs=(2,)), op("map.body", Ref(2), Ref(0), outs=(3,))],
        (3,),
        name="outer",
    )
    segments = {"body": body, "outer": outer}
    a, b = matrices(2)
    want = torch.relu((a @ b) * a)
    bound = bind(outer, segments, {}, ((0, 1),), compile="inductor")
    assert bound is bind(outer, segments, {}, ((0, 1),), compile="inductor")
    with torch.no_grad():
        (got,) = bound(a, b)
    torch.testing.assert_close(b, want)
    assert got.data_ptr() == b.data_ptr()
