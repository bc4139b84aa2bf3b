"""Laws of whole steps beside equality: tokens, schedules, agreement, randomness, memory, placement."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fparallel as fp
from fparallel.runtime.executor import Executor
from fparallel.runtime.transport.simulated import SimulatedTransport
from fparallel.schedule import memory
from tests.property.verdicts import check

D = torch.float64
# Whole steps are costly, and the law of equality (test_equivalence.py) runs many of them already.
few = settings(max_examples=max(1, settings.default.max_examples // 4))


# ---- law 2: tokens -------------------------------------------------------------------------------


def mean_loss(w, batch):
    """The weighted mean of w * values, and its gradient."""

    def loss(w):
        return fp.Mean((w * batch["values"] * batch["mask"]).sum(), batch["mask"].sum())

    return fp.value_and_grad(loss)(w)


def weigh(values, mask, ranks):
    mesh = fp.make_mesh((ranks,), ("dp",), kind="simulated")
    batch = {"values": torch.tensor(values, dtype=D), "mask": torch.tensor(mask, dtype=D)}
    step = fp.jit(mean_loss, mesh=mesh, rules=fp.Rules(batch="dp"))
    loss, grad = step(torch.ones((), dtype=D), batch)
    return loss.item(), grad.item()


def test_sums_2_and_90_of_1_and_9_tokens_make_9_2():
    values = [[2.0] + [0.0] * 8, [10.0] * 9]
    mask = [[1.0] + [0.0] * 8, [1.0] * 9]
    assert weigh(values, mask, 2) == (9.2, 9.2)


def test_a_rank_with_1_token_beside_one_with_9_weighs_a_tenth():
    """Only the token of the first rank has a value: it counts for 0.1, not for 0.5."""
    values = [[1.0] + [0.0] * 8, [0.0] * 9]
    mask = [[1.0] + [0.0] * 8, [1.0] * 9]
    assert weigh(values, mask, 2) == (0.1, 0.1)


def test_a_rank_without_tokens_does_not_count():
    assert weigh([[5.0, 7.0], [3.0, 4.0]], [[0.0, 0.0], [1.0, 0.0]], 2) == (3.0, 3.0)


def test_no_token_at_all_is_zero_with_zero_gradient():
    assert weigh([[5.0], [3.0]], [[0.0], [0.0]], 2) == (0.0, 0.0)


@given(
    data=st.data(),
    ranks=st.integers(1, 8),
    tokens=st.integers(1, 4),
)
def test_the_loss_is_the_global_weighted_mean(data, ranks, tokens):
    rows = ranks + data.draw(st.integers(0, 3))
    table = st.lists(
        st.lists(st.integers(0, 9), min_size=tokens, max_size=tokens), min_size=rows, max_size=rows
    )
    values, weights = data.draw(table), data.draw(table)
    total = sum(w for row in weights for w in row)
    weighted = sum(v * w for vs, ws in zip(values, weights, strict=True) for v, w in zip(vs, ws, strict=True))
    loss, grad = weigh(values, weights, ranks)
    assert loss == pytest.approx(weighted / total if total else 0.0, rel=1e-14)
    assert grad == pytest.approx(loss, rel=1e-14)


# ---- laws 5, 6 and 8: every lowered schedule -----------------------------------------------------

SOME = fp.testing.cases(
    kinds=("mlp", "attention", "glu", "inplace"), extras=("unused", "nested"), dropout=True
)


@pytest.mark.timeout(3600)
@few
@given(case=SOME, seed=st.one_of(st.none(), st.integers(0, 99)))
def test_runs_where_every_step_blocks_until_its_peers_are_there(case, seed):
    """No deadlock under blocking issue, in any order of the ranks; members agree on every collective."""
    check(case, mode="rendezvous", seed=seed)


@pytest.mark.timeout(3600)
@few
@given(case=SOME, seed=st.integers(0, 99))
def test_runs_in_any_order_of_the_ranks(case, seed):
    check(case, mode="buffered", seed=seed)


@pytest.mark.timeout(3600)
@few
@given(case=SOME)
def test_live_bytes_are_as_planned(case):
    problem = fp.testing.build(case)
    args = (problem.init(problem.args[0]), *problem.args[1:])
    jitted = fp.jit(
        problem.step, mesh=problem.mesh, rules=problem.rules, donate_argnums=0 if case.donate else ()
    )
    lowered = jitted.lower(*args)
    lowered.schedule.verify()
    compiled = lowered.compile()
    transport = SimulatedTransport(problem.mesh.size)
    executor = Executor(lowered.schedule, transport, lowered.program.constants, trace=True)
    compiled.runner.executor = executor
    compiled(*args)
    for rank in range(problem.mesh.size):
        planned = memory.live_bytes(lowered.schedule, rank)
        measured = executor.live_bytes[rank]
        assert measured[: len(planned)] == planned


# ---- law 7: randomness ---------------------------------------------------------------------------


@pytest.mark.timeout(3600)
@few
@given(
    case=fp.testing.cases(
        kinds=("mlp", "attention", "glu", "mixer"), extras=("unused", "zero_size", "nested"), dropout=True
    )
)
def test_init_and_dropout_do_not_depend_on_the_mesh(case):
    """The state is born sharded with the bits that one device draws; then dropout drops the same places."""
    check(case, jit_init=True)


@given(
    mesh=fp.testing.meshes(axes=("dp", "tp", "x")),
    shape=st.tuples(st.integers(0, 9), st.integers(1, 9)),
    data=st.data(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_draws_are_bit_identical_however_they_are_laid_out(mesh, shape, data, dtype):
    axes = st.lists(st.sampled_from(mesh.names), unique=True, max_size=len(mesh.names))
    names = data.draw(axes)
    cut = data.draw(st.integers(0, len(names)))
    spec = fp.P(tuple(names[:cut]), tuple(names[cut:]))

    def draw(key):
        with fp.random.use(key):
            ambient = torch.randn(shape, dtype=dtype)
            dropped = torch.nn.functional.dropout(torch.ones(shape, dtype=dtype), 0.4)
        return (
            fp.random.normal(key, shape, dtype=dtype),
            fp.random.randint(key, shape, 0, 100),
            ambient,
            dropped,
        )

    out = fp.device_get(fp.jit(draw, mesh=mesh, out_shardings=spec)(fp.random.key(3)))
    for found, expected in zip(out, draw(fp.random.key(3)), strict=True):
        assert torch.equal(found, expected)


# ---- placement: what a pass may not change -------------------------------------------------------


@few
@given(case=SOME, off=st.sampled_from(["bucket", "prefetch", "sink_waits", "hoist_reductions", "early_free"]))
def test_passes_change_no_bit(case, off):
    problem = fp.testing.build(case)
    args = (problem.init(problem.args[0]), *problem.args[1:])

    def run(*passes_off):
        step = fp.jit(problem.step, mesh=problem.mesh, rules=problem.rules)
        step.passes_off = passes_off
        return fp.device_get(step(*args))

    fp.testing.assert_close(run(off), run(), exact=True)
