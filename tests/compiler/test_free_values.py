"""Values of a pipeline's loop that depend on the batch alone: copied where that is cheaper than to send them."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fparallel as fp
from fparallel.compiler.free_values import MESSAGE, FreeValues, work
from fparallel.compiler.local import Local, Op
from fparallel.compiler.propagate import FLOPS_PER_BYTE
from fparallel.layout import Layout
from fparallel.schedule.ir import Run
from tests.pipeline_models import DIM, F64, matrix, mlp_block, mlp_params, sgd_step
from tests.test_pipelines import ORDER_NAMES, check_step, sends

MICROS, ROWS = 3, 6
BATCH = {"x": matrix(9, ROWS, DIM), "other": matrix(10, ROWS, DIM)}


def expensive(x):
    """[rows, DIM] to the same, through two products of [48, 48] a row."""
    y = torch.tanh(x.unsqueeze(2) * x.unsqueeze(1)).repeat(1, 8, 8)
    return (y @ y @ y)[:, :DIM, 0] / 2304


def cheap(x):
    return (x > 0).to(F64) * x.cos()


def loss_of(feature, reading, metric=None):
    """A model whose layers `reading` read a feature of the batch."""

    def loss(params, batch):
        x, free = batch["x"], feature(batch["other"])
        for i, p in enumerate(params["blocks"]):
            x = mlp_block(p, x + free if i in reading else x)
        aux = {} if metric is None else {"metric": metric(free)}
        return x.square().mean(), aux

    return loss


def check(feature, reading, ranks=2, order="1f1b", layers=4, metric=None):
    params = {"blocks": mlp_params(layers)["blocks"]}
    step = sgd_step(loss_of(feature, reading, metric), MICROS, has_aux=True)
    return check_step(step, params, BATCH, ranks=ranks, order=order)


def products(low):
    """By pipeline rank the batched products of its program: those of the expensive feature."""
    found = {}
    for program in low.schedule.programs:
        segments = [low.schedule.segments[i.segment] for i in program.instrs if isinstance(i, Run)]
        ops = [op.target for segment in segments for op in segment.ops]
        found[dict(program.role)["pp"]] = ops.count("aten.bmm.default")
    return found


def choices(low):
    return [decision for decision in low.program.decisions if "the batch alone" in decision.cause]


class TestChoice:
    @pytest.mark.parametrize("order", ORDER_NAMES)
    def test_what_is_expensive_is_made_once_and_goes_with_the_activations(self, order):
        plain = check(cheap, range(4), order=order)
        low = check(expensive, range(4), order=order)
        assert products(plain) == {0: 0, 1: 0} and products(low) == {0: 2 * MICROS, 1: 0}
        assert len(sends(low)) == len(sends(plain)), "no send of its own"
        assert all(shapes == [(2, DIM)] for _, _, shapes in sends(plain))
        packed = [(a, b) for a, b, shapes in sends(low) if shapes == [(2, DIM)] * 2]
        assert packed == [(0, 1)] * MICROS
        (choice,), (other, *_) = choices(low), choices(plain)
        assert choice.kinds == ("send",) and "made on stage 0, sent to the others of 0, 1" in choice.cause
        assert other.kinds == () and "made by each of the pipeline ranks 0, 1" in other.cause
        assert choice.source.startswith("test_free_values.py:")

    def test_on_the_stage_that_needs_it_first(self):
        low = check(expensive, {3, 5}, ranks=3, layers=6)
        assert products(low) == {0: 0, 1: 2 * MICROS, 2: 0}
        packed = [(a, b) for a, b, shapes in sends(low) if len(shapes) == 2]
        assert packed == [(1, 2)] * MICROS

    def test_not_sent_where_one_stage_reads_it(self):
        low = check(expensive, {2, 3})
        assert products(low) == {0: 0, 1: 2 * MICROS}
        assert all(shapes == [(2, DIM)] for _, _, shapes in sends(low)) and not choices(low)

    def test_the_smaller_of_what_is_made_of_it_is_sent(self):
        """Of [rows, 48, 48] and of its [rows, DIM] the latter; a mask made of that is copied."""

        def masked(x):
            y = expensive(x)
            return y * (y > 0)

        low = check(masked, range(4))
        assert products(low)[1] == 0
        assert sorted(shapes for _, _, shapes in sends(low) if len(shapes) > 1) == [[(2, DIM)] * 2] * MICROS

    def test_a_metric_of_the_batch_alone_is_made_once(self):
        """The joint sum carries it to all ranks; nothing is sent."""
        low = check(expensive, {0}, metric=lambda free: free.square().mean())
        assert products(low) == {0: 2 * MICROS, 1: 0}
        assert all(shapes == [(2, DIM)] for _, _, shapes in sends(low))

    def test_what_differs_between_no_micro_batches_stays_on_every_rank(self):
        """A table that is passed whole is made into a feature once a step, by each rank."""

        def loss(params, batch, table):
            x, free = batch["x"], expensive(table).mean(0)
            for p in params["blocks"]:
                x = mlp_block(p, x + free)
            return x.square().mean()

        def step(params, batch, table):
            return fp.accumulate(fp.value_and_grad(loss), num_microbatches=MICROS)(params, batch, table)

        low = check_step(step, {"blocks": mlp_params(4)["blocks"]}, BATCH, BATCH["other"])
        assert products(low) == {0: 2, 1: 2}

    def test_its_work_counts_when_layers_are_cut_into_stages(self):
        def homes(low):
            return [plan.home for plan in low.plans if plan.path.endswith(".w")]

        assert homes(check(cheap, {0, 3})) == [0, 0, 1, 1]
        assert homes(check(expensive, {0, 3})) == [0, 1, 1, 1]


# ---------------------------------------------------------------- the least cost


@st.composite
def bodies(draw):
    """Items of a loop's body: free ones, each with its work and bytes, and one reader a stage."""
    stages = draw(st.integers(2, 3))
    batch = Local(F64, Layout.replicated((4,)), "batch")
    values, items, kinds = [batch], [], []
    for _ in range(draw(st.integers(1, 6))):
        ins = draw(st.lists(st.sampled_from(values), min_size=1, max_size=2, unique=True))
        out = Local(F64, Layout.replicated((draw(st.sampled_from([1, 100, 2000])),)))
        flops = draw(st.sampled_from([0, 1, 5, 20, 80])) * int(1000 * FLOPS_PER_BYTE)
        items.append(Op("free", tuple(ins), {}, [out], flops=flops))
        kinds.append(None)
        values.append(out)
    for stage in range(stages):
        ins = draw(st.lists(st.sampled_from(values), max_size=2, unique=True))
        items.append(Op("staged", tuple(ins), {}, [Local(F64, Layout.replicated((4,)))]))
        kinds.append(stage)
    return batch, items, kinds, stages


def cost_of(values, items, once):
    """What a choice costs, in bytes sent: copies on further ranks, and sends of what is made once to them."""
    total = 0.0
    readers = {out: [i for i in items if out in i.inputs] for item in items for out in item.outs}
    for item in items:
        if id(item) not in values.use or len(values.use[id(item)].ranks) < 2:
            continue
        further = len(values.use[id(item)].ranks) - 1
        if id(item) not in once:
            total += work(item) * further
        elif any(
            id(reader) not in once and values.ranks_of(reader) != {values.home(item)}
            for out in item.outs
            for reader in readers[out]
            if values.ranks_of(reader)
        ):
            total += sum(out.nbytes + MESSAGE for out in item.outs) * further
    return total


@given(bodies())
def test_no_other_choice_costs_less(body):
    batch, items, kinds, stages = body
    free = {id(item) for item, kind in zip(items, kinds, strict=True) if kind is None}
    everything = {id(item) for item in items}
    values = FreeValues(items, kinds, range(stages), free, everything, {batch}, frozenset())
    once = values.run()
    several = [i for i in items if id(i) in free and len(values.use[id(i)].ranks) > 1]
    assert set(once) <= {id(item) for item in several}
    best = min(
        cost_of(values, items, {id(item) for item in chosen})
        for n in range(len(several) + 1)
        for chosen in itertools.combinations(several, n)
    )
    assert cost_of(values, items, set(once)) <= best + 1e-6
    for item in several:  # on the first of the stages that read it, or what it is made once with
        if id(item) in once:
            assert once[id(item)] <= min(values.use[id(item)].stages)
