"""The rules on which tensor parallelism depends: what moves, and nothing else."""

import pytest
import torch
import torch.nn.functional as F

import fparallel as fp
from fparallel import P
from tests.compiler.sharded import index, real, run, simulated, whole

TP = simulated(tp=2)
MESHES = [simulated(tp=n) for n in (2, 3)]


def grads(fn, *argnums):
    """The loss sum(fn(...) * weight) and its gradients; `weight` is the last argument."""

    def step(*args):
        def loss(*inner):
            return (fn(*inner) * args[-1]).sum()

        return fp.value_and_grad(loss, argnums=argnums)(*args[:-1])

    return step


# ---------------------------------------------------------------- linear layers

LINEAR = [
    # x, weight [in, out], collectives of x @ w, layout of the result
    (P(), P(None, "tp"), [], "f64[6,8@tp]"),  # column-parallel
    (P(None, "tp"), P("tp"), ["all_reduce[tp] sum [6,8]"], "f64[6,8]"),  # row-parallel
    (P("tp"), P(), [], "f64[6@tp,8]"),  # over rows of x
    (P(), P("tp"), ["all_reduce[tp] sum [6,8]"], "f64[6,8]"),  # x is cut for free
    (P(), P(), [], "f64[6,8]"),
]


@pytest.mark.parametrize(("x", "w", "moves", "out"), LINEAR)
def test_matrix_product(x, w, moves, out):
    made = run(lambda a, b: a @ b, (whole(0, 6, 12), whole(1, 12, 8)), (x, w), TP, exact=True)
    assert made.collectives == moves
    assert made.layouts == [out]


@pytest.mark.parametrize(
    ("b", "w", "moves"), [(P("tp"), P("tp"), []), (P(), P(None, "tp"), ["all_reduce[tp] sum [6,8]"])]
)
def test_linear_with_bias(b, w, moves):
    """The bias is added once, whichever rank holds it."""
    args = (whole(0, 6, 12), whole(1, 8, 12), whole(2, 8))
    made = run(F.linear, args, (P(), w, b), TP, exact=True)
    assert made.collectives == moves


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_two_linear_layers_cost_one_all_reduce_each_way(mesh):
    """Megatron's MLP: column then row; forward reduces the result, backward the gradient of the input."""

    def mlp(x, up, down):
        return (F.relu(x @ up) @ down).square()

    args = (whole(0, 6, 4), whole(1, 4, 9), whole(2, 9, 4), whole(3, 6, 4))
    made = run(grads(mlp, 0, 1, 2), args, (P(), P(None, "tp"), P("tp"), P()), mesh, exact=True)
    assert made.collectives == ["all_reduce[tp] sum [6,4]", "all_reduce[tp] sum [6,4]"]
    assert made.layouts[2:] == ["f64[4,9@tp]", "f64[9@tp,4]"]


# ---------------------------------------------------------------- embedding

EMBEDDING = [
    (P("tp"), P(), ["all_reduce[tp] sum [3,5,8]"], "f64[3,5,8]"),  # by vocabulary
    (P(None, "tp"), P(), [], "f64[3,5,8@tp]"),  # by features
    (P(), P("tp"), [], "f64[3@tp,5,8]"),  # by tokens
]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(("table", "tokens", "moves", "out"), EMBEDDING)
@pytest.mark.parametrize(
    "lookup", [lambda t, i: F.embedding(i, t), lambda t, i: t[i]], ids=["embedding", "index"]
)
def test_embedding(mesh, table, tokens, moves, out, lookup):
    made = run(lookup, (whole(0, 10, 8), index(1, 10, 3, 5)), (table, tokens), mesh, exact=True)
    assert made.collectives == moves
    assert made.layouts == [out]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(
    "lookup", [lambda t, i: F.embedding(i, t), lambda t, i: t[i]], ids=["embedding", "index"]
)
@pytest.mark.parametrize("table", [P("tp"), P(None, "tp")], ids=str)
def test_embedding_gradient_stays_where_the_table_is(mesh, lookup, table):
    args = (whole(0, 10, 8), index(1, 10, 3, 5), whole(2, 3, 5, 8))
    made = run(grads(lookup, 0), args, (table, P(), P()), mesh, exact=True)
    assert made.layouts[1] == ("f64[10@tp,8]" if table == P("tp") else "f64[10,8@tp]")
    assert not any("[10,8]" in move for move in made.collectives)


@pytest.mark.parametrize(
    "lookup", [lambda t, i: F.embedding(i, t), lambda t, i: t[i]], ids=["embedding", "index"]
)
def test_embedding_gradient_over_tokens_is_one_sum(lookup):
    args = (whole(0, 10, 8), index(1, 10, 4, 5), whole(2, 4, 5, 8))
    made = run(grads(lookup, 0), args, (P(), P("tp"), P("tp")), TP, exact=True)
    assert sorted(made.collectives) == ["all_reduce[tp] sum [10,8]", "all_reduce[tp] sum []"]


def test_a_nan_row_of_another_rank_does_not_leak():
    table = whole(0, 10, 8)
    table[7] = float("nan")
    run(lambda t, i: F.embedding(i, t), (table, torch.tensor([0, 7, 9])), (P("tp"), P()), TP)


# ---------------------------------------------------------------- cross entropy


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_by_vocabulary_gathers_no_logits(mesh, reduction, smoothing):
    """A maximum, a sum of exponentials and a pick per example: all of size [n]."""
    n, vocab = 6, 10
    logits, target = real(0, n, vocab), index(1, vocab, n)
    target[2] = -100

    def step(logits):
        def loss(logits):
            out = F.cross_entropy(logits, target, reduction=reduction, label_smoothing=smoothing)
            return out.sum()

        return fp.value_and_grad(loss)(logits)

    made = run(step, (logits,), (P(None, "tp"),), mesh)
    assert {move.split(" ")[0] for move in made.collectives} == {"all_reduce[tp]"}
    assert {move.split(" ")[2] for move in made.collectives} <= {"[]", f"[{n}]", f"[{n},1]"}
    assert made.layouts[1] == f"f64[{n},{vocab}@tp]"


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_cross_entropy_by_examples(mesh):
    """The mean is over all examples that count, not a mean of means."""
    logits, target = real(0, 6, 10), index(1, 10, 6)
    target[:2] = -100

    def step(logits, target):
        return fp.value_and_grad(lambda x: F.cross_entropy(x, target))(logits)

    made = run(step, (logits, target), (P("tp"), P("tp")), mesh)
    assert {move for move in made.collectives} == {"all_reduce[tp] sum []"}


@pytest.mark.parametrize("spec", [P("tp"), P(None, "tp"), P(None, None, "tp")], ids=str)
def test_picking_by_position_is_local(spec):
    """logits[arange(B)[:, None], arange(T), y]: only the vocabulary needs a sum."""
    b, t, vocab = 4, 6, 8
    logits, y = whole(0, b, t, vocab), index(1, vocab, b, t)

    def pick(logits, y):
        rows = torch.arange(b).unsqueeze(1)
        return logits[rows, torch.arange(t), y]

    made = run(pick, (logits, y), (spec, P()), TP, exact=True)
    assert made.collectives == (["all_reduce[tp] sum [4,6]"] if spec == P(None, None, "tp") else [])
    weight = whole(3, b, t)
    made = run(grads(pick, 0), (logits, y, weight), (spec, P(), P()), TP, exact=True)
    assert not any("[4,6,8]" in move for move in made.collectives)


@pytest.mark.parametrize("spec", [P("tp"), P(None, "tp")], ids=str)
def test_gather_along_the_vocabulary(spec):
    logits, y = whole(0, 6, 8), index(1, 8, 6, 1)
    made = run(lambda x, y: x.gather(1, y).squeeze(1), (logits, y), (spec, P()), TP, exact=True)
    assert made.collectives == (
        ["all_reduce[tp] sum [6,1]"] if spec == P(None, "tp") else []
    ) or made.collectives == ["all_reduce[tp] sum [6]"]


# ---------------------------------------------------------------- norms

NORMS = {
    "layer_norm": lambda x, w, b: F.layer_norm(x, (8,), w, b),
    "rms_norm": lambda x, w, b: F.rms_norm(x, (8,), w) + b,
}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_norm_over_tokens_moves_only_gradients_of_its_parameters(mesh, name):
    args = (real(0, 6, 5, 8), real(1, 8), real(2, 8), real(3, 6, 5, 8))
    made = run(grads(NORMS[name], 0, 1, 2), args, (P("tp"), P(), P(), P("tp")), mesh)
    assert set(made.collectives) == {"all_reduce[tp] sum []", "all_reduce[tp] sum [8]"}
    assert made.layouts[1] == "f64[6@tp,5,8]"


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_norm_over_its_own_dim_moves_only_statistics(mesh, name):
    args = (real(0, 6, 5, 8), real(1, 8), real(2, 8), real(3, 6, 5, 8))
    sharded = P(None, None, "tp")
    made = run(grads(NORMS[name], 0, 1, 2), args, (sharded, P("tp"), P("tp"), sharded), mesh)
    assert {move.split(" ")[2] for move in made.collectives} <= {"[]", "[6,5,1]", "[6,5]"}
    assert {move.split(" ")[0] for move in made.collectives} == {"all_reduce[tp]"}
    assert made.layouts[1:] == ["f64[6,5,8@tp]", "f64[8@tp]", "f64[8@tp]"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_norms_are_computed_in_float32(dtype):
    """As torch's kernels: a sum of squares in half precision would overflow."""
    x = (real(0, 4, 8) * 200).to(dtype)

    def norm(x):
        return F.layer_norm(x, (8,))

    jitted = fp.jit(norm, mesh=TP, in_shardings=(P(None, "tp"),))
    torch.testing.assert_close(fp.device_get(jitted(x)), norm(x), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("dim", [None, 0, 1, (0, 1)])
@pytest.mark.parametrize("keepdim", [False, True])
def test_mean_and_variance_count_everything(mesh, dim, keepdim):
    """5 rows over 2 or 3 ranks: the divisor is the global count, not a rank's."""
    dims = (0, 1) if dim is None else dim

    def statistics(x):
        return x.mean(dims, keepdim), x.var(dims, keepdim=keepdim), x.std(dims, correction=0, keepdim=keepdim)

    made = run(statistics, (real(0, 5, 4),), (P("tp"),), mesh)
    assert not any("gather" in move for move in made.collectives)


# ---------------------------------------------------------------- attention


def attention(q, k, v, **options):
    return F.scaled_dot_product_attention(q, k, v, **options)


def repeated(q, k, v):
    times = q.shape[1] // k.shape[1]
    return attention(q, k.repeat_interleave(times, 1), v.repeat_interleave(times, 1), is_causal=True)


ATTENTION = {
    "causal": (4, lambda q, k, v: attention(q, k, v, is_causal=True)),
    "masked": (4, lambda q, k, v: attention(q, k, v, attn_mask=torch.ones(6, 6, dtype=torch.bool).tril())),
    "gqa": (2, lambda q, k, v: attention(q, k, v, is_causal=True, enable_gqa=True)),
    "gqa by repetition": (2, repeated),
}


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("axis", [0, 1])
def test_attention_over_batch_and_heads_moves_nothing(name, axis):
    kv_heads, fn = ATTENTION[name]
    q, k, v = real(0, 2, 4, 6, 8), real(1, 2, kv_heads, 6, 8), real(2, 2, kv_heads, 6, 8)
    spec = P("tp") if axis == 0 else P(None, "tp")
    made = run(fn, (q, k, v), (spec,) * 3, TP)
    assert made.collectives == []
    made = run(grads(fn, 0, 1, 2), (q, k, v, real(3, 2, 4, 6, 8)), (spec,) * 4, TP)
    assert made.collectives == ["all_reduce[tp] sum []"]
    assert all("@tp" in layout for layout in made.layouts[1:])


@pytest.mark.parametrize("name", ["gqa", "gqa by repetition"])
def test_fewer_kv_heads_than_ranks(name):
    """Two kv heads on four ranks: each is held by two of them, and its gradient is the sum over those two."""
    mesh = simulated(tp=4)
    _, fn = ATTENTION[name]
    sharding = fp.NamedSharding(mesh, P(None, "tp:(1)2"))
    args = (real(0, 2, 4, 6, 8), real(1, 2, 2, 6, 8), real(2, 2, 2, 6, 8))
    made = run(fn, args, (P(None, "tp"), sharding, sharding), mesh)
    assert made.collectives == []
    assert made.layouts == ["f64[2,4@tp,6,8]"]
    made = run(
        grads(fn, 0, 1, 2),
        (*args, real(3, 2, 4, 6, 8)),
        (P(None, "tp"), sharding, sharding, P(None, "tp")),
        mesh,
    )
    assert not any("gather" in move for move in made.collectives)
    assert made.layouts[1] == "f64[2,4@tp,6,8]"


def test_three_heads_on_two_ranks():
    """Uneven heads: the second rank has one, and a fourth rank none."""
    args = tuple(real(i, 2, 3, 6, 8) for i in range(3))
    for mesh in (TP, simulated(tp=4)):
        made = run(lambda q, k, v: attention(q, k, v, is_causal=True), args, (P(None, "tp"),) * 3, mesh)
        assert made.collectives == []
