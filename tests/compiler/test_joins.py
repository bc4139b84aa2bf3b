"""Small sums over the pipeline axis: as few all-reduces as the program allows, in one order on all ranks."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fparallel as fp
from fparallel.compiler.joins import Join, bundles
from fparallel.compiler.local import Comm, Local, Op
from fparallel.compiler.pipeline import Placed
from fparallel.factors import Factor
from fparallel.layout import Layout
from fparallel.mesh import Axis
from fparallel.models import gpt
from tests.pipeline_models import F64, mlp_batch, mlp_loss, mlp_params
from tests.test_pipelines import RULES, check_step, jitted

CONFIG = gpt.Config(vocab=520, seq=4, layers=4, dim=8, heads=2)
# A small eps would make the rounding of gradients that are zero visible.
TX = fp.optim.chain(fp.optim.clip_by_global_norm(1.0), fp.optim.adamw(1e-2, eps=1e-3))
MESHES = {"pp": (4,), "dp pp": (2, 2), "pp tp": (2, 2), "dp pp tp": (2, 2, 2)}


def init(key):
    params = gpt.init_params(key, CONFIG, dtype=F64)
    return fp.TrainState(step=0, params=params, opt_state=TX.init(params), key=key)


def train(state, batch):
    grad_fn = fp.accumulate(fp.value_and_grad(gpt.loss), num_microbatches=4)
    loss, grads = grad_fn(state.params, batch)
    updates, opt_state = TX.update(grads, state.opt_state, state.params)
    params = fp.optim.apply_updates(state.params, updates)
    state = state.replace(step=state.step + 1, params=params, opt_state=opt_state)
    return state, {"loss": loss, "grads": grads}


def plain(state, batch):
    state, metrics = train(state, batch)
    return state, metrics["loss"]


def tokens():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, CONFIG.vocab, (8, CONFIG.seq + 1), generator=generator)
    mask = (torch.rand(8, CONFIG.seq, generator=generator) < 0.7).to(F64)
    return {"tokens": ids[:, :-1].clone(), "targets": ids[:, 1:].clone(), "mask": mask}


def rules_for(names, stage):
    axes = {"dp": {"batch": "dp"}, "tp": {"heads": "tp", "mlp": "tp", "vocab": "tp"}, "pp": {"layers": "pp"}}
    rules = fp.Rules(**{logical: axis for name in names for logical, axis in axes[name].items()})
    return rules.zero(stage, axis="dp") if stage else rules


@pytest.mark.parametrize(
    ("mesh", "stage", "order"),
    [
        ("pp", 0, "1f1b"),
        ("pp", 0, "gpipe"),
        ("pp", 0, "zb_h1"),
        ("dp pp", 0, "1f1b"),
        ("dp pp", 3, "zb_h1"),
        ("pp tp", 0, "gpipe"),
        ("dp pp tp", 1, "1f1b"),
    ],
)
def test_a_step_with_clipping_meets_once_over_the_axis(mesh, stage, order):
    """The loss and the norm go together; the weight of the loss, of the batch alone, needs no meeting."""
    names = tuple(mesh.split())
    made = fp.make_mesh(MESHES[mesh], names, kind="simulated")
    rules = rules_for(names, stage)
    state = init(fp.random.key(0))
    low = fp.jit(plain, mesh=made, rules=rules, pipeline=order).lower(state, tokens())
    for rank in range(made.size):
        assert low.schedule.count("all_reduce", "pp", rank=rank) == 1
        (one,) = low.schedule.collectives("all_reduce", "pp", rank=rank)
        assert len(one.ins) == 2
    fp.testing.assert_equivalent(train, (state, tokens()), mesh=made, rules=rules, pipeline=order, steps=2)


def norms(params, batch, *, again):
    """The gradients clipped twice; with `again` the second norm is that of what the first gave."""
    loss, grads = fp.accumulate(fp.value_and_grad(mlp_loss), num_microbatches=2)(params, batch)
    norm = fp.optim.global_norm(grads)
    scaled = fp.tree.map(lambda g: (g / norm).tanh(), grads) if again else fp.tree.map(torch.tanh, grads)
    return scaled, {"loss": loss, "first": norm, "second": fp.optim.global_norm(scaled)}


@pytest.mark.parametrize("order", ["1f1b", "zb_v"])
def test_what_depends_on_a_sum_needs_another(order):
    def one(params, batch):
        return norms(params, batch, again=False)

    def two(params, batch):
        return norms(params, batch, again=True)

    for step, number in ((one, 1), (two, 2)):
        low = check_step(step, mlp_params(4), mlp_batch(4), order=order)
        assert low.schedule.count("all_reduce", "pp") == number


def test_a_norm_of_the_parameters_waits_for_that_of_the_gradients():
    """Where it is a metric; a loss that reads it needs it before the loop."""

    def loss(params, batch, scale):
        mean = mlp_loss(params, batch)
        return fp.Mean(mean.sum * scale, mean.weight)

    def step(params, batch, *, reads):
        norm = fp.optim.global_norm(params)
        scale = 1 / norm if reads else torch.ones((), dtype=F64)
        value, grads = fp.accumulate(fp.value_and_grad(loss), num_microbatches=2)(params, batch, scale)
        return grads, {"loss": value, "norm": norm, "other": 2 * fp.optim.global_norm(grads)}

    def metric(params, batch):
        return step(params, batch, reads=False)

    def scaled(params, batch):
        return step(params, batch, reads=True)

    for run, number in ((metric, 1), (scaled, 2)):
        low = check_step(run, mlp_params(4), mlp_batch(4))
        assert low.schedule.count("all_reduce", "pp") == number


def test_dtypes_do_not_mix():
    def step(params, batch):
        value, grads = fp.accumulate(fp.value_and_grad(mlp_loss), num_microbatches=2)(params, batch)
        return grads, {"loss": value, "norm": fp.optim.global_norm(grads).float()}

    def mixed(params, batch):
        def loss(params, batch):
            value = mlp_loss(params, batch)
            return value, fp.Mean(value.sum.float(), value.weight)

        (value, half), grads = fp.accumulate(fp.value_and_grad(loss, has_aux=True), num_microbatches=2)(
            params, batch
        )
        return grads, {"loss": value, "half": half, "norm": fp.optim.global_norm(grads)}

    args = mlp_params(4), mlp_batch(4)
    assert jitted(step, rules=RULES).lower(*args).schedule.count("all_reduce", "pp") == 1
    low = jitted(mixed, rules=RULES).lower(*args)
    dtypes = [
        {low.schedule.buffers[name].dtype for name in one.ins}
        for one in low.schedule.collectives("all_reduce")
    ]
    assert sorted(map(str, (dtype for found in dtypes for dtype in found))) == [
        "torch.float32",
        "torch.float64",
    ]


# ---------------------------------------------------------------- the fewest


LENGTH = 8
PP, DP = Axis("pp", 2), Axis("dp", 2)


def join(value, dims=(), pending=(), axes=(PP,)):
    """A sum over `axes` that leaves a value of these dims, pending over further axes."""
    partial = Local(F64, Layout.of(dims, [(axis, "sum") for axis in (*pending, *axes)]))
    done = Local(F64, Layout.of(dims, [(axis, "sum") for axis in pending]))
    return Join({0: [value]}, partial, Comm("all_reduce", axes, partial, done, "sum"))


def place(items):
    placed = [Placed(item, frozenset({0, 1}), i, frozenset({0, 1})) for i, item in enumerate(items)]
    return placed, {out: one for one in placed for out in one.item.outs}


ROW, SHARDED = (Factor(4),), (Factor(4, (DP,)),)


@pytest.mark.parametrize(
    ("dims", "pending", "number"), [((), (), 1), ((ROW,), (), 1), ((ROW,), (DP,), 2), ((SHARDED,), (), 2)]
)
def test_the_axes_of_another_join_are_added_where_the_value_does_not_lie_along_them(dims, pending, number):
    value = Local(F64, Layout.replicated(()))
    placed, maker = place([join(value, axes=(DP, PP)), join(value, dims, pending)])
    made = [bundle for found in bundles(placed, maker).values() for bundle in found]
    assert len(made) == number
    assert {axis.name for axis in made[0].axes} == {"dp", "pp"}
    for bundle in made:
        for one, partial in zip(bundle.joins, bundle.partials, strict=True):
            left = [axis for axis, _ in partial.layout.unreduced if axis not in bundle.axes]
            assert left == [axis for axis, _ in one.comm.dst.layout.unreduced]


windows = st.tuples(st.integers(0, LENGTH - 1), st.integers(1, LENGTH)).map(
    lambda pair: (min(pair), max(pair))
)


def program(found):
    """An op at each place; per window a value made by the op before its begin, and a join that its end reads."""
    made = [Local(F64, Layout.replicated(())) for _ in range(LENGTH + 1)]
    joins = [join(made[begin]) for begin, _ in found]
    items = []
    for at in range(LENGTH + 1):
        here = [one for one, (_, end) in zip(joins, found, strict=True) if end == at]
        items += here
        read = tuple(one.comm.dst for one in here)
        if at < LENGTH:
            items.append(Op("op", read, {}, [made[at + 1]]))
    return place(items)


@given(st.lists(windows, min_size=1, max_size=5))
def test_no_smaller_number_would_do(found):
    placed, maker = program(found)
    made = bundles(placed, maker)
    number = sum(map(len, made.values()))
    points = range(LENGTH + 1)
    fewest = next(
        n
        for n in range(1, len(found) + 1)
        if any(
            all(any(begin <= p <= end for p in chosen) for begin, end in found)
            for chosen in itertools.combinations(points, n)
        )
    )
    assert number == fewest
    for at, here in made.items():
        for bundle in here:
            for found_join in bundle.joins:
                assert all(maker[value].index < at for value in found_join.inputs if value in maker)
                readers = [one.index for one in placed if found_join.comm.dst in one.item.inputs]
                assert all(at <= reader for reader in readers)
