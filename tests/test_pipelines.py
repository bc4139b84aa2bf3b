"""Pipelines: who holds and runs what, what is sent, and the results of one device whatever the model reads where."""

import collections

import pytest
import torch

import fparallel as fp
from fparallel.errors import FparallelError, ScheduleError, ShardingError
from fparallel.runtime.executor import Executor
from fparallel.runtime.transport.simulated import SimulatedTransport
from fparallel.schedule import memory
from fparallel.schedule.ir import Collective, Run, Send
from fparallel.schedule.orders import ORDERS
from tests.pipeline_models import (
    DIM,
    F64,
    VOCAB,
    assert_close,
    matrix,
    mlp_batch,
    mlp_block,
    mlp_hidden,
    mlp_loss,
    mlp_params,
    sgd_step,
    tied_loss,
    tied_params,
)

RULES = fp.Rules({"blocks": "layers"}, layers="pp")
ORDER_NAMES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v")


def pp_mesh(ranks=2, kind="simulated", **axes):
    return fp.make_mesh((*axes.values(), ranks), (*axes, "pp"), kind=kind)


def jitted(step, ranks=2, order="1f1b", rules=RULES, **options):
    return fp.jit(step, mesh=pp_mesh(ranks), rules=rules, pipeline=order, **options)


def check_step(step, *args, ranks=2, order="1f1b", rules=RULES, **options):
    """The step on a pipeline equals the step on one device."""
    compiled = jitted(step, ranks, order, rules, **options)
    want = step(*args)
    low = compiled.lower(*args)
    low.schedule.verify()
    assert_close(compiled(*args), want)
    return low


def sends(low):
    """(sender, receiver, shapes) of every send."""
    found = []
    for program in low.schedule.programs:
        source = dict(program.role)["pp"]
        for instr in program.instrs:
            if isinstance(instr, Send):
                shapes = [tuple(low.schedule.buffers[name].layout.shape) for name in instr.ins]
                found.append((source, instr.peer, shapes))
    return found


def blocks_loss(params, batch):
    x = batch["x"] @ params["inp"]
    for p in params["blocks"]:
        x = fp.block(mlp_block)(p, x)
    error = (x @ params["out"] - batch["y"]).square().sum(1)
    return fp.Mean((error * batch["mask"]).sum(), batch["mask"].sum())


def tied_batch(rows):
    return {"ids": torch.arange(rows * 4).reshape(rows, 4) % VOCAB}


class TestSchedules:
    @pytest.mark.parametrize("micros", [1, 2, 4])
    def test_a_tied_embedding_is_sent_once_and_its_gradient_once(self, micros):
        step = sgd_step(tied_loss, micros)
        low = check_step(step, tied_params(4), tied_batch(4))
        table = [(a, b) for a, b, shapes in sends(low) for shape in shapes if sorted(shape) == [DIM, VOCAB]]
        assert table == [(0, 1), (1, 0)]

    @pytest.mark.parametrize("order", ORDER_NAMES)
    def test_what_is_sent(self, order):
        """Per boundary of stages and micro-batch one send forward and one backward, between neighbours."""
        micros, ranks = 4, 2
        chunks = 2 if order in ("interleaved", "zb_v") else 1
        low = check_step(sgd_step(mlp_loss, micros), mlp_params(4), mlp_batch(8), order=order)
        between = 2 * ranks - 1 - (order == "zb_v") if chunks == 2 else 1
        assert len(sends(low)) == 2 * micros * between
        assert all(shapes == [(2, DIM)] for _, _, shapes in sends(low))

    def test_several_tensors_of_an_edge_go_in_one_send(self):
        def loss(params, batch):
            a, b = batch["x"], batch["x"].sin()
            for p in params["blocks"]:
                a, b = mlp_block(p, b), a
            return (a * b).square().mean()

        low = check_step(sgd_step(loss, 2), {"blocks": mlp_params(4)["blocks"]}, {"x": matrix(9, 4, DIM)})
        assert sorted(len(shapes) for _, _, shapes in sends(low)) == [2, 2, 2, 2]

    def test_gradients_are_made_where_their_parameters_lie(self):
        """Whatever a block ends with, the gradients of the next one's weights are made on its own stage."""

        def loss(params, batch):
            x = batch["x"]
            for p in params["blocks"]:
                x = mlp_block(p, x).sin()
            return x.square().mean()

        args = {"blocks": mlp_params(4)["blocks"]}, {"x": matrix(3, 4, DIM)}
        for order in ORDER_NAMES:
            low = check_step(sgd_step(loss, 2), *args, order=order)
            assert all(shapes == [(2, DIM)] for _, _, shapes in sends(low))
            collectives = [c for p in low.schedule.programs for c in p.instrs if isinstance(c, Collective)]
            assert len(collectives) == 2, "the loss, on both ranks"

    def test_scalars_are_joined_and_lie_on_every_rank(self):
        def step(params, batch):
            loss, grads = fp.accumulate(fp.value_and_grad(mlp_loss), num_microbatches=2)(params, batch)
            norm = fp.optim.global_norm(grads)
            return grads, {"loss": loss, "norm": norm, "twice": 2 * loss + norm}

        args = mlp_params(4), mlp_batch(4)
        low = check_step(step, *args)
        for program in low.schedule.programs:
            kinds = [(c.kind, c.reduce) for c in program.instrs if isinstance(c, Collective)]
            assert kinds and set(kinds) == {("all_reduce", "sum")}
        assert not any(shape == () for _, _, shapes in sends(low) for shape in shapes)
        _, metrics = jitted(step)(*args)
        for value in metrics.values():
            assert value.home is None and len(value.shards) == 2
            first, second = value.shards.values()
            assert torch.equal(first, second) and isinstance(float(value), float)

    @pytest.mark.parametrize(("layers", "ranks"), [(30, 4), (5, 4), (4, 4), (3, 2)])
    def test_every_layer_is_on_a_stage_and_every_stage_has_some(self, layers, ranks):
        low = jitted(sgd_step(mlp_loss, ranks), ranks).lower(mlp_params(layers), mlp_batch(2 * ranks))
        homes = [plan.home for plan in low.plans if plan.path.endswith(".w")]
        assert homes == sorted(homes) and set(homes) == set(range(ranks))
        counts = collections.Counter(homes).values()
        assert sum(counts) == layers and max(counts) - min(counts) <= 1

    def test_a_head_counts_in_the_balance(self):
        """With a head as costly as four layers, the last stage has fewer layers than the first."""
        params = mlp_params(8, head=4 * DIM)
        low = jitted(sgd_step(mlp_loss, 2)).lower(params, mlp_batch(4, head=4 * DIM))
        homes = [plan.home for plan in low.plans if plan.path.endswith(".w")]
        assert homes.count(0) > homes.count(1) > 0

    def test_parameters_and_their_state_are_arguments_of_their_stage_alone(self):
        optimizer = fp.optim.adamw(0.1)

        def step(state, batch):
            loss, grads = fp.accumulate(fp.value_and_grad(mlp_loss), num_microbatches=2)(
                state["params"], batch
            )
            updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
            return {"params": fp.optim.apply_updates(state["params"], updates), "opt_state": opt_state}, loss

        params = mlp_params(4)
        state = {"params": params, "opt_state": optimizer.init(params)}
        low = check_step(step, state, mlp_batch(4))
        held = {dict(program.role)["pp"]: set(program.arguments) for program in low.schedule.programs}
        for i in range(4):
            for leaf in ("w", "b"):
                names = {rank: [n for n in held[rank] if n.endswith(f"blocks.{i}.{leaf}")] for rank in (0, 1)}
                assert len(names[i // 2]) == 3, "the parameter and two moments"
                assert not names[1 - i // 2]
        assert any(name.endswith("inp") for name in held[0])
        assert not any(name.endswith("inp") for name in held[1])
        assert any(name.endswith("out") for name in held[1])
        assert not any(name.endswith("out") for name in held[0])

    def test_layers_are_cut_by_what_they_take_on_a_cluster(self):
        """Four layers: a product, then three with elementwise functions alone."""

        def loss(params, batch):
            x = batch["x"]
            for i, p in enumerate(params["blocks"]):
                x = x @ p["w"] if i == 0 else torch.tanh(x * p["w"][0])
            return x.square().mean()

        def first_rank(cluster):
            step = jitted(sgd_step(loss, 2), cluster=cluster)
            low = step.lower(params, batch)
            return sum(plan.home == 0 for plan in low.plans if plan.layer is not None)

        dim = 64
        params = {"blocks": [{"w": matrix(i, dim, dim)} for i in range(4)]}
        batch = {"x": matrix(9, 8, dim)}
        rates = {"flops": {"float64": 1e9}, "op_overhead": 0.0, "run_overhead": 0.0}
        products = fp.Cluster.preset("h100", **rates, bandwidth=1e15)  # only products take time
        passes = fp.Cluster.preset("h100", **{**rates, "flops": {"float64": 1e18}}, bandwidth=1e9)
        tanh = fp.Cluster.preset("h100", **rates, bandwidth=1e13, factors={"aten.tanh.default": 1e6})
        assert first_rank(products) == 1
        assert first_rank(passes) == first_rank(tanh) == 2

    @pytest.mark.parametrize("order", ["gpipe", "1f1b", "interleaved"])
    def test_the_gradient_for_the_stage_before_leaves_ahead_of_the_weight_gradients(self, order):
        low = check_step(sgd_step(blocks_loss, 4), mlp_params(4), mlp_batch(8), order=order)
        for program in low.schedule.programs:
            rank, left = dict(program.role)["pp"], 0
            for i, instr in enumerate(program.instrs):
                if isinstance(instr, Send) and ", B stage" in instr.cause:
                    after = [later.label for later in program.instrs[i + 1 :] if isinstance(later, Run)]
                    assert after[0].startswith("W mlp_block"), after
                    left += 1
            assert left == (4 if order != "interleaved" else 4 * (1 + rank)) * (
                rank > 0 or order == "interleaved"
            )

    @pytest.mark.parametrize("order", ["1f1b", "zb_h1"])
    def test_a_block_keeps_what_one_pass_over_memory_cannot_make_again(self, order):
        def block(p, x):
            h = torch.nn.functional.layer_norm(x, (DIM,), p["b"]) @ p["w"]
            return x + torch.nn.functional.gelu(h) @ p["w"]

        def loss(params, batch):
            x = batch["x"]
            for p in params["blocks"]:
                x = fp.block(block)(p, x)
            return x.square().mean()

        params = {"blocks": mlp_params(4)["blocks"]}
        low = check_step(sgd_step(loss, 2), params, {"x": matrix(3, 4, DIM)}, order=order)
        forward = next(s for name, s in low.schedule.segments.items() if name.startswith("F.block"))
        kept = [
            layout.shape for _, layout in forward.outputs if len(layout.shape) == 2 and layout.shape[1] == DIM
        ]
        assert len(kept) == 3  # what gelu reads, what it gives, and the output; not what the norm gives


class TestPrograms:
    def test_init_then_step_then_another_function(self):
        def init(key):
            blocks = [
                {"w": fp.random.normal(fp.random.fold_in(key, i), (DIM, DIM), dtype=F64)} for i in range(6)
            ]
            return {"params": {"blocks": blocks, "out": torch.ones(DIM, 40 * DIM, dtype=F64)}}

        def loss(params, batch):
            x = batch["x"]
            for p in params["blocks"]:
                x = torch.tanh(x @ p["w"])
            return (x @ params["out"]).square().mean()

        def step(state, batch):
            new, value = sgd_step(loss, 2)(state["params"], batch)
            return {"params": new}, value

        def evaluate(state, batch):
            return loss(state["params"], batch)

        batch = {"x": matrix(5, 4, DIM)}
        want = init(fp.random.key(0))
        state = jitted(init)(fp.random.key(0))
        assert_close(state, want)
        homes = {leaf.home for leaf in fp.tree.leaves(state)}
        assert homes == {0, 1}
        run, judge = jitted(step, donate_argnums=0), jitted(evaluate)
        for _ in range(3):
            want, want_loss = step(want, batch)
            state, value = run(state, batch)
            assert_close((state, value), (want, want_loss))
            low = judge.lower(state, batch)
            for plan, leaf in zip(low.plans, fp.tree.leaves(state), strict=False):
                assert plan.home == leaf.home, plan.path
            assert_close(judge(state, batch), evaluate(want, batch))

    def test_encoder_and_decoder_with_skips_over_several_stages(self):
        def loss(params, batch):
            x, kept = batch["x"] @ params["inp"], []
            for p in params["encoder"]:
                x = mlp_block(p, x)
                kept.append(x)
            for p in params["decoder"]:
                x = mlp_block(p, x) + kept.pop()
            return (x @ params["out"]).square().mean()

        p = mlp_params(8)
        params = {"inp": p["inp"], "encoder": p["blocks"][:4], "decoder": p["blocks"][4:], "out": p["out"]}
        rules = fp.Rules({"encoder": "layers", "decoder": "layers"}, layers="pp")
        for order, ranks in (("1f1b", 4), ("zb_h1", 4), ("interleaved:2", 2), ("zb_v", 2)):
            check_step(
                sgd_step(loss, 3), params, {"x": matrix(3, 6, DIM)}, ranks=ranks, order=order, rules=rules
            )

    @pytest.mark.parametrize("order", ORDER_NAMES)
    def test_a_parameter_used_on_every_stage(self, order):
        def loss(params, batch):
            x = batch["x"]
            for p in params["blocks"]:
                x = mlp_block(p, x) * params["scale"]
            return (x @ params["shared"] @ params["shared"].T).square().mean()

        params = {
            "blocks": mlp_params(4)["blocks"],
            "scale": matrix(1, DIM),
            "shared": matrix(2, DIM, DIM),
        }
        check_step(sgd_step(loss, 2), params, {"x": matrix(3, 4, DIM)}, order=order)

    def test_a_mask_of_the_batch_is_not_sent(self):
        def loss(params, batch):
            x, mask = batch["x"], (batch["mask"] > 0).to(F64)[:, None]
            for p in params["blocks"]:
                x = mlp_block(p, x) * mask
            return x.square().mean()

        args = {"blocks": mlp_params(4)["blocks"]}, mlp_batch(4)
        low = check_step(sgd_step(loss, 2), *args)
        assert [shapes for _, _, shapes in sends(low)] == [[(2, DIM)]] * 4

    def test_a_loss_of_the_outputs_of_several_stages(self):
        def loss(params, batch):
            x, total = batch["x"], torch.zeros((), dtype=F64)
            kept = []
            for p in params["blocks"]:
                x = mlp_block(p, x)
                kept.append(x)
                total = total + x.square().mean()
            return total + (kept[0] * kept[-1] - kept[1]).square().mean()

        params = {"blocks": mlp_params(4)["blocks"]}
        for order in ORDER_NAMES:
            check_step(sgd_step(loss, 2), params, {"x": matrix(3, 4, DIM)}, order=order)

    def test_auxiliary_losses_inside_blocks(self):
        def loss(params, batch):
            x, mask = batch["x"], batch["mask"]
            aux = []
            for p in params["blocks"]:
                x = mlp_block(p, x)
                aux.append(fp.Mean((x.abs().sum(1) * mask).sum(), mask.sum()))
            total = fp.Mean((x.square().sum(1) * mask).sum(), mask.sum())
            for term in aux:
                total = total + 0.1 * term
            return total

        check_step(sgd_step(loss, 2), {"blocks": mlp_params(4)["blocks"]}, mlp_batch(8), ranks=4)

    def test_frozen_and_unused_parameters(self):
        def loss(params, batch):
            x = batch["x"]
            for i, p in enumerate(params["blocks"]):
                w = p["w"].detach() if i % 2 else p["w"]
                x = x + torch.tanh(x @ w)
            return x.square().mean()

        params = {"blocks": mlp_params(4)["blocks"], "unused": matrix(7, 3, 3)}
        check_step(sgd_step(loss, 2), params, {"x": matrix(3, 4, DIM)})

    @pytest.mark.parametrize("donate", [(), 0])
    @pytest.mark.parametrize("order", ORDER_NAMES)
    @pytest.mark.parametrize("micros", [None, 1, 2])
    def test_few_micro_batches(self, donate, order, micros):
        """No accumulate at all, one, and fewer than stages."""
        step = sgd_step(mlp_loss, micros)
        ranks = 4 if order in ("gpipe", "1f1b", "zb_h1") else 2
        check_step(step, mlp_params(4), mlp_batch(4), ranks=ranks, order=order, donate_argnums=donate)

    @pytest.mark.parametrize("micros", [None, 2])
    def test_forward_alone_gives_rows_in_batch_order(self, micros):
        def predict(params, batch):
            def rows(params, batch):
                x = mlp_hidden(params, batch["x"])
                return {"rows": x, "norms": x.norm(dim=1)}

            if micros is not None:
                rows = fp.accumulate(rows, num_microbatches=micros)
            return rows(params, batch)

        args = mlp_params(4, dim=32), {"x": matrix(4, 64, 32)}
        check_step(predict, *args)
        out = jitted(predict)(*args)
        assert (out["rows"].home, out["norms"].home) == (1, None), "what is large lies on the last stage"

    def test_an_order_of_ones_own(self):
        @fp.register_order("backwards last to first")
        def mine(ranks, micros, chunks):
            return [
                [fp.Task("F", rank, m) for m in range(micros)]
                + [fp.Task("B", rank, m) for m in reversed(range(micros))]
                for rank in range(ranks)
            ]

        try:
            check_step(sgd_step(mlp_loss, 3), mlp_params(4), mlp_batch(6), order="backwards last to first")
        finally:
            del ORDERS["backwards last to first"]

    @pytest.mark.parametrize("order", ORDER_NAMES)
    @pytest.mark.parametrize("stage", [0, 3])
    def test_live_bytes_are_as_planned(self, order, stage):
        """Law 8, with ZeRO or without, on every rank."""
        mesh = pp_mesh(2, dp=2)
        rules = fp.Rules(RULES.globs, layers="pp", batch="dp").zero(stage, axis="dp")
        state = {"params": mlp_params(4)}

        def step(state, batch):
            new, loss = sgd_step(mlp_loss, 2)(state["params"], batch)
            return {"params": new}, loss

        batch = mlp_batch(8)
        low = fp.jit(step, mesh=mesh, rules=rules, pipeline=order, donate_argnums=0).lower(state, batch)
        low.schedule.verify()
        compiled = low.compile()
        executor = Executor(
            low.schedule, SimulatedTransport(mesh.size), low.program.constants, trace=True, check=True
        )
        compiled.runner.executor = executor
        assert_close(compiled(state, batch), step({"params": mlp_params(4)}, batch))
        for rank in range(mesh.size):
            planned = memory.live_bytes(low.schedule, rank)
            assert executor.live_bytes[rank][: len(planned)] == planned

    def test_1f1b_holds_less_than_gpipe(self):
        peaks = {}
        for order in ("gpipe", "1f1b"):
            low = jitted(sgd_step(mlp_loss, 8), 2, order).lower(mlp_params(4, dim=8), mlp_batch(512, dim=8))
            peaks[order] = low.memory().peak()
        assert peaks["1f1b"] < peaks["gpipe"]


class TestValues:
    def test_one_norm_of_all_stages_clips(self):
        """Stage norms of 3 and 4, a bound of 1: the coefficient is 0.2 on both stages."""
        params = {"blocks": [{"w": torch.ones(1, dtype=F64)}, {"w": torch.ones(1, dtype=F64)}]}
        clip = fp.optim.clip_by_global_norm(1.0)

        def loss(params, batch):
            x = batch["x"] * 3 * params["blocks"][0]["w"]
            return (x + params["blocks"][1]["w"] * 4).mean()

        def step(params, batch):
            _, grads = fp.accumulate(fp.value_and_grad(loss), num_microbatches=2)(params, batch)
            clipped, _ = clip.update(grads, clip.init(params))
            return grads, clipped, fp.optim.global_norm(grads)

        batch = {"x": torch.ones(4, 1, dtype=F64)}
        low = check_step(step, params, batch)
        assert [plan.home for plan in low.plans[:2]] == [0, 1]
        grads, clipped, norm = fp.device_get(jitted(step)(params, batch))
        assert [float(g["w"]) for g in grads["blocks"]] == [3.0, 4.0] and float(norm) == 5.0
        for got, raw in zip(clipped["blocks"], grads["blocks"], strict=True):
            torch.testing.assert_close(got["w"], 0.2 * raw["w"], atol=1e-15, rtol=0)


class TestErrors:
    def lower(self, layers=4, micros=2, rows=4, order="1f1b", ranks=2, rules=RULES):
        jitted(sgd_step(mlp_loss, micros), ranks, order, rules).lower(mlp_params(layers), mlp_batch(rows))

    @pytest.mark.parametrize(
        ("options", "kind", "text"),
        [
            ({"layers": 3, "ranks": 4}, ShardingError, r"3 l(ayers|evels).*4 stages"),
            ({"layers": 3, "order": "interleaved"}, ShardingError, r"3 l(ayers|evels).*4 stages.*2 chunks"),
            ({"order": "1f1v"}, ScheduleError, r"no pipeline order '1f1v'; did you mean '1f1b'"),
            ({"order": "zb_v:3"}, ScheduleError, r"zb_v needs 2 chunks a rank"),
            ({"order": "interleaved:x"}, ScheduleError, r"'x' is no number of chunks"),
            ({"rows": 5}, FparallelError, r"5 rows.*2"),
            ({"rules": fp.Rules()}, ShardingError, r"mesh axis pp=2"),
            (
                {"rules": fp.Rules({"blocks": "layers"}, layers="pp", batch="pp")},
                ShardingError,
                r"batch='pp' shards over pp",
            ),
            (
                {"rules": fp.Rules({"blocks": "layers", "blocks.0.w": fp.P("pp")}, layers="pp")},
                ShardingError,
                r"blocks\.0\.w is f64\[.*stages of the pipeline lie on pp",
            ),
        ],
    )
    def test_bad_input(self, options, kind, text):
        with pytest.raises(kind, match=f"(?s){text}.*\n.*Fix: "):
            self.lower(**options)

    @pytest.mark.parametrize(
        ("spoil", "text"),
        [
            (lambda rows: rows[1].pop(), r"B1\.1 is not run"),
            (lambda rows: rows[1].append(rows[1][0]), r"F1\.0 is run twice"),
            (lambda rows: rows[0].reverse(), r"B0\.1 waits for"),
            (lambda rows: rows[0].append(rows[1].pop()), r"B1\.1 is no task of this rank"),
            (lambda rows: rows.pop(), r"1 rows for 2 ranks"),
        ],
    )
    def test_a_spoilt_order(self, spoil, text):
        good = ORDERS["gpipe"].make

        @fp.register_order("spoilt")
        def spoilt(ranks, micros, chunks):
            rows = good(ranks, micros, chunks)
            spoil(rows)
            return rows

        try:
            with pytest.raises(ScheduleError, match=f"(?s){text}.*Fix: "):
                self.lower(order="spoilt")
        finally:
            del ORDERS["spoilt"]
