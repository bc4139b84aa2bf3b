"""Sums over micro-batches: which are taken where their terms are made, and that they stay what they are."""

import collections

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fparallel as fp
from fparallel.schedule.ir import Run
from fparallel.schedule.segment import ADD, ADD_PRODUCT, ADD_ROWS
from fparallel.testing import assert_equivalent
from tests.pipeline_models import F64, matrix


def gradients(loss, micros):
    return fp.accumulate(fp.value_and_grad(loss), num_microbatches=micros)


def block(w, x):
    return torch.tanh(x @ w["a"] + w["b"]) @ w["c"]


def loss(params, batch):
    x = batch["x"]
    if "table" in params:
        x = x + torch.nn.functional.embedding(batch["ids"], params["table"]).flatten(1)
    for w in params["blocks"]:
        x = x + fp.block(block)(w, x)
    return x.square().mean()


def params_of(layers, dim=4, table=False, dtype=F64):
    blocks = [
        {"a": matrix(i, dim, 6), "b": matrix(i + 50, 6), "c": matrix(i + 90, 6, dim)} for i in range(layers)
    ]
    params = {"blocks": blocks}
    if table:
        params["table"] = matrix(7, 5, dim // 2)
    return fp.tree.map(lambda x: x.to(dtype), params)


def batch_of(rows, dim=4):
    return {"x": matrix(3, rows, dim), "ids": torch.arange(2 * rows).reshape(rows, 2) % 5}


def ops_of(lowered):
    """How often a step runs every op."""
    found = collections.Counter()
    for instr in lowered.schedule.programs[0].instrs:
        if isinstance(instr, Run):
            found.update(op.target for op in lowered.schedule.segments[instr.segment].ops)
    return found


def local_mesh(ranks=1):
    return fp.make_mesh((ranks,), ("dp",), kind="simulated")


@pytest.mark.parametrize("zero", [0, 1])
def test_weights_get_their_products_added_and_biases_their_sums_in_the_block_that_makes_them(zero):
    rules = fp.Rules(batch="dp").zero(zero, axis="dp") if zero else fp.Rules(batch="dp")
    step = fp.jit(gradients(loss, 4), mesh=local_mesh(2), rules=rules)
    lowered = step.lower(params_of(3), batch_of(8))
    ops = ops_of(lowered)
    assert ops[ADD_PRODUCT] == 3 * 2 * 3  # blocks, weights of each, micro-batches but the first
    assert ops[ADD] == 3 * 3 + 3  # biases, and the loss
    instrs = lowered.schedule.programs[0].instrs
    backwards = [
        i for i in instrs if isinstance(i, Run) and i.segment.startswith("B.block") and "sum" in i.segment
    ]
    assert len(backwards) == 9 and all(len(i.inplace) == 3 for i in backwards)


def test_the_rows_of_an_embedding_are_added_to_the_sum():
    step = fp.jit(gradients(loss, 4), mesh=local_mesh())
    lowered = step.lower(params_of(1, table=True), batch_of(8))
    ops = ops_of(lowered)
    assert (ops[ADD_ROWS], ops["aten.embedding_dense_backward.default"]) == (3, 1)


@pytest.mark.parametrize("shape", [(5, 0), (5, 3)])
@pytest.mark.parametrize("ids", [(), (0,), (2,)])
def test_the_rows_of_tables_and_of_ids_may_be_empty(shape, ids):
    def loss(params, batch):
        return torch.nn.functional.embedding(batch["ids"], params["table"]).square().sum()

    args = (
        {"table": matrix(1, *shape[::-1]).T.contiguous()},
        {"ids": torch.ones(4, *ids, dtype=torch.int64)},
    )
    assert ops_of(fp.jit(gradients(loss, 2), mesh=local_mesh()).lower(*args))[ADD_ROWS] == 1
    assert_equivalent(gradients(loss, 2), args, mesh=local_mesh())


def test_a_gradient_that_is_reduced_for_each_micro_batch_is_added_after_that():
    rules = fp.Rules(batch="dp").zero(2, axis="dp")
    step = fp.jit(gradients(loss, 4), mesh=local_mesh(2), rules=rules)
    lowered = step.lower(params_of(2), batch_of(8))
    assert lowered.schedule.count("reduce_scatter", axis="dp") > 0
    assert ops_of(lowered)[ADD_PRODUCT] == 0


def test_sums_of_16_bit_terms_stay_in_32_bits():
    params = params_of(2, dtype=torch.bfloat16)
    batch = {"x": batch_of(8)["x"].bfloat16()}
    step = gradients(loss, 4)
    lowered = fp.jit(step, mesh=local_mesh()).lower(params, batch)
    assert ops_of(lowered)[ADD_PRODUCT] == 0 and ops_of(lowered)[ADD] > 0
    got, want = fp.device_get(fp.jit(step, mesh=local_mesh())(params, batch)), step(params, batch)
    for a, b in zip(fp.tree.leaves(got), fp.tree.leaves(want), strict=True):
        torch.testing.assert_close(a, b)


def test_compiled_sums_are_those_of_one_device():
    """Inductor (torch 2.13) gives a 0-d input that is written to and returned as it was before."""
    step = fp.jit(gradients(loss, 3), mesh=local_mesh(), compile="inductor")
    params, batch = params_of(1, table=True), batch_of(6)
    got, want = fp.device_get(step(params, batch)), gradients(loss, 3)(params, batch)
    for a, b in zip(fp.tree.leaves(got), fp.tree.leaves(want), strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)


@given(
    layers=st.integers(1, 3),
    micros=st.integers(1, 4),
    ranks=st.sampled_from([1, 2]),
    zero=st.integers(0, 3),
    table=st.booleans(),
)
def test_gradients_are_those_of_one_device(layers, micros, ranks, zero, table):
    params, batch = params_of(layers, table=table), batch_of(4 * micros)
    rules = fp.Rules(batch="dp").zero(zero, axis="dp") if zero else fp.Rules(batch="dp")
    assert_equivalent(gradients(loss, micros), (params, batch), mesh=local_mesh(ranks), rules=rules)
