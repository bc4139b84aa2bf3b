"""A memory budget: which order a pipeline takes, what is kept, the least that will do; and results that are equal."""

import functools
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fparallel as fp
from fparallel.errors import ScheduleError
from fparallel.schedule.memory import highest_peak
from fparallel.schedule.passes import run_passes
from tests.pipeline_models import assert_close, mlp_batch, mlp_block, mlp_params, sgd_step, whole

ROOM = 10**9
ORDERS = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v")
FEW = settings(max_examples=max(4, settings.default.max_examples // 5))
block = fp.block(mlp_block)


def loss(params, batch):
    x = batch["x"] @ params["inp"]
    for p in params["blocks"]:
        x = block(p, x)
    error = (x @ params["out"] - batch["y"]).square().sum(1)
    return fp.Mean((error * batch["mask"]).sum(), batch["mask"].sum())


@functools.cache
def case(micros, layers, sizes, zero=3):
    """(arguments, options of fp.jit) for a mesh of dp, or of dp and pp."""
    names = ("dp", "pp")[: len(sizes)]
    globs, staged = ({"blocks": "layers"}, {"layers": "pp"}) if len(sizes) == 2 else ({}, {})
    rules = fp.Rules(globs, batch="dp", **staged).zero(zero, axis="dp")
    args = mlp_params(layers), mlp_batch(micros * sizes[0] * 2)
    return args, {"mesh": fp.make_mesh(sizes, names, kind="simulated"), "rules": rules}


def jitted(micros, layers, sizes, zero=3, **options):
    args, more = case(micros, layers, sizes, zero)
    return fp.jit(sgd_step(loss, micros), donate_argnums=0, **more, **options), args


def lower(*what, **options):
    step, args = jitted(*what, **options)
    return step.lower(*args)


def least(low):
    """The bytes without prefetch and with nothing kept."""
    return highest_peak(run_passes(low.program.schedule, memory_budget=0)).nbytes


def needed(*what, budget=0, **options):
    """The numbers in the error for too small a budget: the least as asked for, and (order, the least) of another."""
    with pytest.raises(ScheduleError) as found:
        lower(*what, memory_budget=budget, **options)
    text = str(found.value)
    number = re.search(r"Fix: memory_budget=(\d+) is the least that would do", text)
    other = re.search(r'pipeline="(\w+)" needs (\d+)', text.partition("Fix:")[2])
    assert number is not None and "instruction" in text and f"needs {number[1]} bytes" in text
    return int(number[1]), (other[1], int(other[2])) if other else None


def gathered(low):
    """By rank of the pipeline, the parameters that are gathered."""
    ranks = [low.schedule.first_rank(program) for program in low.schedule.programs]
    return [
        sorted(n for i in low.schedule.collectives("all_gather", "dp", rank=rank) for n in i.ins)
        for rank in ranks
    ]


SIZES = st.sampled_from([(2,), (3,), (2, 2), (1, 3), (2, 4)])
WHAT = st.tuples(st.integers(1, 4), st.integers(4, 8), SIZES, st.sampled_from([0, 2, 3]))


class TestTheLeast:
    @FEW
    @given(what=WHAT, order=st.sampled_from([*ORDERS, "auto"]))
    def test_the_bytes_that_the_error_names_do_and_one_less_does_not(self, what, order):
        order = order if len(what[2]) == 2 and what[1] >= 2 * what[2][1] else None
        number, other = needed(*what, pipeline=order)
        low = lower(*what, pipeline=order, memory_budget=number)
        low.schedule.verify(memory_budget=number)
        assert low.memory().peak() <= number
        assert needed(*what, pipeline=order, budget=number - 1) == (number, other)
        if other is not None:
            assert other[1] < number and order != "auto"
            lower(*what, pipeline=other[0], memory_budget=other[1])
            with pytest.raises(ScheduleError):
                lower(*what, pipeline=other[0], memory_budget=other[1] - 1)

    def test_gpipe_names_an_order_that_holds_fewer_micro_batches(self):
        what = 6, 4, (2, 2)
        number, other = needed(*what, pipeline="gpipe")
        assert other is not None and other[1] < number
        assert other[1] <= needed(*what, pipeline="1f1b")[0] < number
        # the least, also where there is room to keep something
        assert needed(*what, pipeline="gpipe", budget=number - 1) == (number, other)

    @FEW
    @given(what=WHAT.filter(lambda what: len(what[2]) == 2))
    def test_no_order_needs_less_than_auto_says(self, what):
        number, _ = needed(*what, pipeline="auto")
        for order in ORDERS:
            if order not in ("interleaved", "zb_v") or what[1] >= 2 * what[2][1]:
                assert least(lower(*what, pipeline=order)) >= number


class TestAuto:
    @FEW
    @given(what=WHAT.filter(lambda what: len(what[2]) == 2), at=st.floats(0, 1.2))
    def test_the_fastest_order_that_fits(self, what, at):
        """Against the peaks of all orders, each lowered by itself."""
        step, args = jitted(*what, pipeline="auto", memory_budget=ROOM)
        traced = step.trace(*args)
        orders = traced.lower().program.candidates
        peaks = [least(step.lower_as(traced, "auto", order)) for order in orders]
        budget = min(peaks) + int(at * (max(peaks) - min(peaks)))
        low = lower(*what, pipeline="auto", memory_budget=budget)
        assert low.memory().peak() <= budget
        fitting = [order.time for order, peak in zip(orders, peaks, strict=True) if peak <= budget]
        chosen = {str(order): order for order in orders}[low.program.order]
        assert chosen.time == min(fitting)

    def test_bytes_decide_and_not_micro_batches(self):
        """With room an order that holds more micro-batches than 1f1b and is faster; with little one at a time."""
        what = 8, 8, (2, 4)
        roomy = lower(*what, pipeline="auto", memory_budget=ROOM)
        number, _ = needed(*what, pipeline="auto")
        tight = lower(*what, pipeline="auto", memory_budget=number)
        assert roomy.program.order == "auto with at most 8 micro-batches in flight"
        assert tight.program.order == "auto with at most 1 micro-batch in flight"
        free = lower(*what, pipeline="auto")
        assert roomy.program.candidates[0].time < free.program.candidates[0].time
        assert least(tight) < least(lower(*what, pipeline="1f1b")) < least(roomy)

    def test_without_a_budget_no_more_micro_batches_than_1f1b(self):
        low = lower(8, 8, (2, 4), pipeline="auto")
        assert all(order.in_flight in (None, 4) for order in low.program.candidates)


def levels(what, order):
    """Budgets from the least that will do to one with room for everything."""
    number, _ = needed(*what, pipeline=order)
    top = lower(*what, pipeline=order, memory_budget=ROOM).memory().peak()
    return [number + (top - number) * i // 5 for i in range(6)] + [ROOM]


CASES = [((1, 4, (2,)), None), ((3, 4, (3,)), None), ((3, 4, (2, 2)), "1f1b"), ((4, 6, (2, 3)), "zb_h1")]
CASES += [((4, 4, (2, 2)), order) for order in ("gpipe", "interleaved", "zb_v")]


class TestKept:
    @pytest.mark.parametrize(("what", "order"), CASES)
    def test_equal_results_within_every_budget_and_never_more_gathers(self, what, order):
        micros, *_ = what
        args, _ = case(*what)
        want = sgd_step(loss, micros)(*args)
        step, _ = jitted(*what, pipeline=order)
        plain = whole(step(*args))
        counts = []
        for budget in levels(what, order):
            step, _ = jitted(*what, pipeline=order, memory_budget=budget)
            low = step.lower(*args)
            low.schedule.verify(memory_budget=budget)
            assert low.memory().peak() <= budget
            counts.append(sum(map(len, gathered(low))))
            got = step(*args)
            assert_close(got, want)
            for a, b in zip(fp.tree.leaves(whole(got)), fp.tree.leaves(plain), strict=True):
                assert torch.equal(a, b)
        assert counts == sorted(counts, reverse=True) and len(set(counts)) > 1 + (micros > 1)
        assert counts[0] <= sum(map(len, gathered(lower(*what, pipeline=order))))

    @FEW
    @given(what=WHAT.filter(lambda what: what[3] == 3), data=st.data())
    def test_with_room_for_everything_each_parameter_is_gathered_once_a_step(self, what, data):
        orders = ORDERS if len(what[2]) == 2 and what[1] >= 2 * what[2][1] else ("1f1b",)
        order = data.draw(st.sampled_from(orders)) if len(what[2]) == 2 else None
        plain, kept = (gathered(lower(*what, pipeline=order, memory_budget=m)) for m in (None, ROOM))
        for before, after in zip(plain, kept, strict=True):
            assert after == sorted(set(before))

    def test_the_choice_is_seen_in_the_schedule_and_in_memory(self):
        what = 2, 4, (2,)
        plain, kept = lower(*what), lower(*what, memory_budget=ROOM)
        assert kept.schedule.count("all_gather", "dp") < plain.schedule.count("all_gather", "dp")
        assert "storage -> compute; kept" in str(kept)
        assert "storage -> compute; kept" in kept.explain("params.blocks.0.w")
        assert "kept" in str(kept.memory()) and "kept" not in str(plain.memory())
        sizes = {name: buffer.nbytes for name, buffer in kept.schedule.buffers.items()}
        held = sum(sizes[f"params.{name}@full"] for name in ("inp", "blocks.0.w", "blocks.1.w", "blocks.2.w"))
        assert kept.memory().rows[0].kept >= held

    def test_it_can_be_switched_off(self):
        step, args = jitted(2, 4, (2,), memory_budget=ROOM)
        step.passes_off = ("keep",)
        assert gathered(step.lower(*args)) == gathered(lower(2, 4, (2,)))

    @pytest.mark.parametrize("zero", [0, 1, 2])
    def test_what_is_gathered_once_stays_as_it_is(self, zero):
        assert lower(2, 4, (2,), zero, memory_budget=ROOM).schedule == lower(2, 4, (2,), zero).schedule
