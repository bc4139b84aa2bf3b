"""The ops in the training steps of 26 published architectures, each against the unsharded op."""

import pytest

from fparallel.testing import opcheck

SHARDED = [
    "t", "add", "view", "log_softmax", "mm", "sum", "transpose", "nn.functional.nll_loss",
    "nn.functional.cross_entropy", "ones_like", "nn.functional.embedding", "expand", "mul", "clone",
    "nn.functional.scaled_dot_product_attention", "unsqueeze", "where", "constant_pad_nd", "le", "cat",
    "cumsum", "sub", "index_put", "__getitem__", "ne", "neg", "eq", "logical_and", "new_ones", "sin",
    "cos", "pow", "squeeze", "rsqrt", "div.no_rounding_mode", "mean", "nn.functional.layer_norm",
    "native_layer_norm", "nn.functional.rms_norm", "nn.functional.silu", "addmm", "nn.functional.gelu",
    "softmax", "split", "tanh", "bmm", "select", "permute", "new_zeros", "gather", "gt",
    "nn.functional.relu", "repeat", "stack", "scatter", "sort", "histc", "floor_divide", "topk",
    "full_like", "baddbmm", "lt", "abs", "minimum", "log", "ge", "zeros_like", "masked_fill",
    "nn.functional.conv2d", "nn.functional.linear", "reshape", "flatten", "index_select", "scatter_add",
    "matmul", "mv", "outer", "amax", "amin", "max.reduction_with_dim", "var_mean", "std", "logsumexp",
    "tril", "triu", "sigmoid", "take_along_dim", "index_add", "narrow", "unflatten", "chunk",
    "nn.functional.group_norm", "nn.functional.mse_loss", "exp", "erf", "maximum",
]  # fmt: skip
WHOLE = ["arange", "zeros", "ones", "full", "scalar_tensor", "argmax"]
REFUSED = {
    "item": "reads the value", "nonzero": "depends on data", "bernoulli": "draws from",
    "unique": "depends on data", "fft.fft": "returns a complex tensor", "masked_select": "depends on data",
}  # fmt: skip


@pytest.fixture(scope="module")
def ops():
    return {opcheck.op_name(op): op for op in opcheck.op_database()}


@pytest.fixture(scope="module")
def results(ops):
    """Checked together: importing torch's database takes most of the time."""
    names = [*SHARDED, *WHOLE, *REFUSED]
    return {name: opcheck.check_op(ops[name], samples=2) for name in names}


def test_every_op_is_in_the_database(ops):
    assert not [name for name in [*SHARDED, *WHOLE, *REFUSED] if name not in ops]


@pytest.mark.parametrize("name", SHARDED)
def test_works_where_it_lies(results, name):
    found = results[name]
    assert not found.wrong(), "\n".join(map(str, found.wrong()))
    assert found.verdict == "sharded", "\n".join(map(str, found.placements))


@pytest.mark.parametrize("name", WHOLE)
def test_works(results, name):
    assert results[name].verdict in ("replicated", "sharded"), "\n".join(map(str, results[name].placements))


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_and_says_why(results, name):
    assert results[name].verdict == "refused"
    assert REFUSED[name] in results[name].note


def test_a_wrong_rule_is_caught(ops, monkeypatch):
    """A mean that divides by the local count passes no dim."""
    from fparallel.compiler.rules import reductions, registry

    def local_mean(node):
        return reductions.sum_(node)

    monkeypatch.setitem(registry._RULES, "aten.mean.dim", local_mean)
    monkeypatch.setitem(registry._RULES, "aten.mean.default", local_mean)
    assert opcheck.check_op(ops["mean"], samples=2).verdict == "WRONG"
