"""Micro-batches: the results of a whole batch, whatever is cut, on one device and on meshes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fparallel as fp
from fparallel.errors import ShardingError, TraceError
from fparallel.microbatches import in_batch_order, microbatch

F64 = torch.float64


def mean_loss(w, batch):
    nll = (batch["x"] @ w).square()
    return fp.Mean((nll * batch["mask"]).sum(), batch["mask"].sum())


def make_batch(rows, seed=0, dim=3):
    g = torch.Generator().manual_seed(seed)
    mask = (torch.rand(rows, generator=g) < 0.6).to(F64)
    return {"x": torch.randn(rows, dim, generator=g, dtype=F64), "mask": mask}


W = torch.tensor([1.0, -2.0, 0.5], dtype=F64)


class TestMeans:
    def test_the_loss_is_divided_once_by_the_weight_of_everything(self):
        """(loss sum, tokens) of (2, 1) and (90, 9): 92 / 10, not the mean of 2 and 10."""
        sums, counts = torch.tensor([2.0, 90.0], dtype=F64), torch.tensor([1, 9])

        def loss(w, s, n):
            return fp.Mean((w * s).sum(), n.sum())

        step = fp.accumulate(fp.value_and_grad(loss), num_microbatches=2, batch_argnums=(1, 2))
        value, grad = step(torch.tensor(1.0, dtype=F64), sums, counts)
        assert (value.item(), grad.item()) == (9.2, 9.2)

    def test_a_rank_with_one_token_beside_one_with_nine_weighs_a_tenth(self):
        mesh = fp.make_mesh((2,), ("dp",), kind="simulated")

        def step(w, batch):
            def loss(w, batch):
                return fp.Mean((w * batch["s"]).sum(), batch["n"].sum())

            return fp.accumulate(fp.value_and_grad(loss), num_microbatches=1)(w, batch)

        batch = {"s": torch.tensor([1.0, 0.0], dtype=F64), "n": torch.tensor([1, 9])}
        value, grad = fp.jit(step, mesh=mesh, rules=fp.Rules(batch="dp"))(torch.tensor(1.0, dtype=F64), batch)
        assert float(value) == float(grad) == 0.1

    @given(
        num=st.sampled_from([1, 2, 3, 4]),
        group=st.sampled_from([1, 2]),
        ranks=st.sampled_from([1, 2]),
        masks=st.lists(st.booleans(), min_size=16, max_size=16),
        seed=st.integers(0, 99),
        stage=st.integers(0, 3),
    )
    def test_equal_to_the_whole_batch(self, num, group, ranks, masks, seed, stage):
        """Law 2: any mask, micro-batches and ranks without a token included."""
        rows = num * group * ranks * 2
        batch = make_batch(rows, seed)
        batch["mask"] = torch.tensor([masks[i % 16] for i in range(rows)], dtype=F64)
        want = fp.value_and_grad(mean_loss)(W, batch)
        mesh = fp.make_mesh((ranks,), ("dp",), kind="simulated")
        rules = fp.Rules(batch="dp").zero(stage, axis="dp", params="params")

        def step(params, batch):
            return fp.accumulate(fp.value_and_grad(mean_loss), num_microbatches=num, group=group)(
                params, batch
            )

        for got in (step(W, batch), fp.jit(step, mesh=mesh, rules=rules)(W, batch)):
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(fp.device_get(a) if isinstance(a, fp.Array) else a, b)

    def test_every_mean_of_a_sum_keeps_its_own_denominator(self):
        def loss(w, batch):
            other = fp.Mean((batch["x"] * w).sum().square(), torch.tensor(batch["x"].shape[0]))
            return mean_loss(w, batch) + 0.5 * other

        batch = make_batch(8)
        parts = [{k: microbatch(v, m, 4, 1) for k, v in batch.items()} for m in range(4)]
        value, grad = fp.accumulate(fp.value_and_grad(loss), num_microbatches=4)(W, batch)
        w = W.clone().requires_grad_()
        first = mean_loss(w, batch).value()
        second = sum((p["x"] * w).sum().square() for p in parts) / 8
        want = first + 0.5 * second
        torch.testing.assert_close((value, grad), (want.detach(), torch.autograd.grad(want, w)[0]))

    def test_a_mean_among_the_results_is_the_mean_of_all(self):
        batch = make_batch(6)
        got = fp.accumulate(mean_loss, num_microbatches=3)(W, batch)
        assert isinstance(got, fp.Mean)
        torch.testing.assert_close(got.value(), mean_loss(W, batch).value())


class TestResults:
    def test_aux_by_what_it_is(self):
        def loss(w, batch):
            y = batch["x"] @ w
            aux = {
                "rows": y.square(),
                "pairs": torch.stack([y, y.abs()], 1),
                "max": y.amax(),
                "columns": batch["x"].sum(0),
                "mean": fp.Mean(y.sum(), batch["mask"].sum()),
                "number": 3,
                "name": fp.static,
            }
            return mean_loss(w, batch), aux

        batch = make_batch(8)
        (_, aux), _ = fp.accumulate(fp.value_and_grad(loss, has_aux=True), num_microbatches=2)(W, batch)
        y = batch["x"] @ W
        torch.testing.assert_close(aux["rows"], y.square())
        torch.testing.assert_close(aux["pairs"], torch.stack([y, y.abs()], 1))
        torch.testing.assert_close(aux["max"], (y[::2].amax() + y[1::2].amax()) / 2)
        torch.testing.assert_close(aux["columns"], batch["x"].sum(0) / 2)
        torch.testing.assert_close(aux["mean"].value(), y.sum() / batch["mask"].sum())
        assert aux["number"] == 3 and aux["name"] is fp.static

    def test_what_no_row_decides(self):
        """Results of arguments that pass whole, of constants, and arguments themselves, on a mesh."""
        mesh = fp.make_mesh((2,), ("dp",), kind="simulated")

        def step(w, batch):
            def body(w, batch):
                return {"double": w * 2, "same": w, "one": torch.ones(3), "rows": batch["mask"]}

            return fp.accumulate(body, num_microbatches=4)(w, batch)

        got, want = None, step(W, make_batch(8))
        torch.testing.assert_close(
            want, {"double": W * 2, "same": W, "one": torch.ones(3), "rows": make_batch(8)["mask"]}
        )
        got = fp.jit(step, mesh=mesh, rules=fp.Rules(batch="dp"))(W, make_batch(8))
        torch.testing.assert_close(fp.device_get(got), want)

    def test_loops_draw_differently(self):
        x = torch.ones(64, dtype=F64)

        def step(x):
            with fp.random.use(fp.random.key(0)):
                drop = fp.accumulate(torch.nn.functional.dropout, num_microbatches=2, batch_argnums=0)
                return drop(x), drop(x)

        a, b = step(x)
        assert not torch.equal(a, b)
        torch.testing.assert_close(fp.jit(step)(x), (a, b))

    def test_sums(self):
        batch = make_batch(8)
        got = fp.accumulate(lambda w, b: {"n": (b["mask"] > 0).sum()}, num_microbatches=4, reduction="sum")(
            W, batch
        )
        assert got["n"] == int(batch["mask"].sum())
        many = fp.accumulate(
            lambda b: b["x"].amax() > 0, num_microbatches=4, batch_argnums=0, reduction="sum"
        )
        assert many({"x": torch.ones(8, 2)}) == 4

    def test_a_plain_scalar_weighs_micro_batches_equally(self):
        batch = make_batch(8)

        def loss(w, batch):
            return (batch["x"] @ w).square().mean()

        got = fp.accumulate(fp.value_and_grad(loss), num_microbatches=4)(W, batch)
        torch.testing.assert_close(got, fp.value_and_grad(loss)(W, batch))
        total, _ = fp.accumulate(fp.value_and_grad(loss), num_microbatches=4, reduction="sum")(W, batch)
        torch.testing.assert_close(total, 4 * got[0])

    def test_a_parameter_with_as_many_rows_as_a_micro_batch_is_no_row_of_it(self):
        w = torch.arange(8.0, dtype=F64).reshape(4, 2)

        def loss(w, x):
            return (x[:, :4] @ w).square().mean(), {"w": w * 2, "x": x * 2}

        x = torch.randn(8, 4, dtype=F64)
        (_, aux), grads = fp.accumulate(fp.value_and_grad(loss, has_aux=True), num_microbatches=2)(w, x)
        torch.testing.assert_close(aux, {"w": w * 2, "x": x * 2})
        assert grads.shape == w.shape

    def test_grad_alone_and_wrapped_functions(self):
        batch = make_batch(8)
        want = fp.grad(mean_loss)(W, batch)
        torch.testing.assert_close(fp.accumulate(fp.grad(mean_loss), num_microbatches=4)(W, batch), want)

        def wrapped(w, batch):  # no longer known as a gradient: micro-batches weigh equally
            return fp.grad(mean_loss)(w, batch)

        got = fp.accumulate(wrapped, num_microbatches=2)(W, batch)
        parts = [{k: microbatch(v, m, 2, 1) for k, v in batch.items()} for m in range(2)]
        torch.testing.assert_close(got, sum(fp.grad(mean_loss)(W, p) for p in parts) / 2)

    def test_gradients_of_low_precision_add_up_in_float32(self):
        w = torch.ones(1, dtype=torch.bfloat16)
        x = torch.cat([torch.full((1, 1), 256.0), torch.ones(7, 1)]).to(torch.bfloat16)

        def loss(w, x):
            return (x @ w).sum()

        _, grad = fp.accumulate(fp.value_and_grad(loss), num_microbatches=8, reduction="sum")(w, x)
        assert grad.dtype == torch.bfloat16 and grad.item() == torch.tensor(263.0).to(torch.bfloat16).item()
        _, jitted = fp.jit(fp.accumulate(fp.value_and_grad(loss), num_microbatches=8, reduction="sum"))(w, x)
        assert torch.equal(jitted, grad)


class TestCuts:
    @pytest.mark.parametrize(("num", "group"), [(1, 1), (2, 1), (3, 2), (2, 3)])
    def test_micro_batches_are_every_mth_group_of_rows(self, num, group):
        x = torch.arange(12 * 2).reshape(12, 2)
        parts = [microbatch(x, m, num, group) for m in range(num)]
        assert torch.equal(in_batch_order(parts, group), x)
        rows = [row for row in range(12) if row // group % num == 0]
        assert torch.equal(parts[0], x[rows])

    def test_keys_are_folded_with_the_micro_batch(self):
        key = fp.random.key(3)
        got = fp.accumulate(lambda k, x: fp.random.bits(k, (1,)).expand(x.shape[0]), num_microbatches=2)(
            key, torch.zeros(4)
        )
        want = [fp.random.bits(fp.random.fold_in(key, m), (1,)).item() for m in (0, 1, 0, 1)]
        assert got.tolist() == want

    def test_ambient_draws_differ_by_micro_batch_and_equal_the_unjitted_ones(self):
        def step(w, batch):
            def loss(w, batch):
                x = torch.nn.functional.dropout(batch["x"], 0.5)
                return fp.Mean((x @ w).square().sum(), batch["mask"].sum()), {"x": x}

            with fp.random.use(fp.random.key(1)):
                grad_fn = fp.value_and_grad(loss, has_aux=True)
                return fp.accumulate(grad_fn, num_microbatches=2)(w, batch)

        batch = make_batch(8) | {"x": torch.ones(8, 3, dtype=F64)}
        (_, aux), _ = want = step(W, batch)
        assert not torch.equal(aux["x"][::2], aux["x"][1::2])
        mesh = fp.make_mesh((2,), ("dp",), kind="simulated")
        fp.testing.assert_equivalent(step, (W, batch), mesh=mesh, rules=fp.Rules(batch="dp"))
        del want


class TestSchedule:
    def lowered(self, stage, num, ranks=4, layers=3):
        from fparallel.models import gpt

        cfg = gpt.Config(vocab=32, seq=8, layers=layers, dim=16, heads=2)

        def init(key):
            params = gpt.init_params(key, cfg)
            return fp.TrainState(
                step=0, params=params, opt_state=fp.optim.sgd(0.1, momentum=0.9).init(params), key=key
            )

        def step(state, batch):
            grad_fn = fp.accumulate(fp.value_and_grad(gpt.loss), num_microbatches=num)
            loss, grads = grad_fn(state.params, batch)
            updates, opt_state = fp.optim.sgd(0.1, momentum=0.9).update(grads, state.opt_state, state.params)
            params = fp.optim.apply_updates(state.params, updates)
            return state.replace(params=params, opt_state=opt_state), loss

        mesh = fp.make_mesh((ranks,), ("dp",), kind="abstract")
        rules = fp.Rules(batch="dp").zero(stage, axis="dp")
        state = fp.eval_shape(init, fp.random.key(0))
        ids = fp.ShapeDtypeStruct((ranks * num, 8), torch.int64)
        batch = {"tokens": ids, "targets": ids, "mask": fp.ShapeDtypeStruct(ids.shape, torch.float32)}
        low = fp.jit(step, mesh=mesh, rules=rules, donate_argnums=0).lower(state, batch)
        sizes = [math.prod(leaf.shape) for leaf in fp.tree.leaves(state.params)]
        return low, 4 * sum(sizes)

    @pytest.mark.parametrize("num", [1, 2, 4])
    def test_payload(self, num):
        """P bytes of parameters, N ranks, M micro-batches: ZeRO-0 and 1 2P, ZeRO-2 (M + 1)P, ZeRO-3 up to 3MP."""
        ranks, slack = 4, 64  # bytes of scalars: the loss and its weight
        for stage, times in ((0, 2), (1, 2), (2, num + 1)):
            low, size = self.lowered(stage, num)
            want = times * size * (ranks - 1) / ranks
            assert want <= low.schedule.bytes() <= want + slack, stage
        low, size = self.lowered(3, num)
        assert low.schedule.bytes() <= 3 * num * size * (ranks - 1) / ranks + slack

    def test_micro_batches_share_their_segments(self):
        few, _ = self.lowered(0, 2)
        many, _ = self.lowered(0, 8)
        # beyond those of two micro-batches: what cuts the part of each out of the batch
        assert len(many.schedule.segments) - len(few.schedule.segments) <= 2 * 6
        assert "mb7" in str(many.schedule)

    def test_sums_of_gradients_are_made_in_place(self):
        one, size = self.lowered(0, 1, layers=8)
        four, _ = self.lowered(0, 4, layers=8)
        # what four micro-batches hold more than one: the sums, and a second term of one block at a time
        assert size / 2 < four.memory().peak() - one.memory().peak() < 1.25 * size


class TestErrors:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                {"num_microbatches": 3},
                "a batch of 8 rows does not make 3 equal micro-batches.*use a batch of 6 or 9 rows",
            ),
            ({"num_microbatches": 2, "group": 3}, "whole groups of 3"),
            ({"num_microbatches": 0}, "whole number of at least 1"),
            ({"num_microbatches": 2, "reduction": "max"}, 'use "mean" or "sum"'),
            ({"num_microbatches": 2, "batch_argnums": 5}, "cuts argument 5"),
            ({"num_microbatches": 2, "batch_argnums": 0}, None),
        ],
    )
    def test_bad_input(self, options, message):
        with pytest.raises(TraceError, match=f"(?s){message}" if message else None):
            fp.accumulate(fp.value_and_grad(mean_loss), **options)(W, make_batch(8))

    def test_rows_that_do_not_divide_over_ranks(self):
        mesh = fp.make_mesh((2,), ("dp",), kind="simulated")
        step = fp.jit(
            lambda w, batch: fp.accumulate(mean_loss, num_microbatches=3)(w, batch),
            mesh=mesh,
            rules=fp.Rules(batch="dp"),
        )
        with pytest.raises(
            ShardingError,
            match=r"(?s)9 rows do not make 3 micro-batches on each of 2 ranks.*use a batch of 6 or 12",
        ):
            step(W, make_batch(9))

    def test_integers_have_no_mean(self):
        with pytest.raises(TraceError, match="which has no mean"):
            fp.accumulate(lambda w, b: b["mask"].long().sum(), num_microbatches=2)(W, make_batch(8))

    def test_tensors_of_different_rows(self):
        batch = make_batch(8) | {"table": torch.zeros(5)}
        with pytest.raises(TraceError, match=r"differ in rows: 8 at argument 1\.mask, 5 at 1\.table"):
            fp.accumulate(mean_loss, num_microbatches=2)(W, batch)
