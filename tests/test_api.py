"""What users call: jit and its options, arrays, shapes, lowering without ranks."""

import re
from typing import NamedTuple

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import fparallel as fp
from fparallel.errors import ExecutionError, FparallelWarning, ShardingError

MESH = fp.make_mesh((2, 2), ("dp", "tp"), kind="simulated")


def sharded(value, *spec):
    return fp.device_put(value, fp.NamedSharding(MESH, fp.P(*spec)))


class Traces:
    """A function that counts how often it is traced."""

    def __init__(self, fn):
        self.fn, self.count, self.__name__ = fn, 0, "counted"

    def __call__(self, *args, **kwargs):
        self.count += 1
        return self.fn(*args, **kwargs)


class TestCaching:
    def test_traces_once_per_shapes_and_dtypes(self):
        fn = Traces(lambda x: x * 2)
        step = fp.jit(fn, mesh=MESH)
        for _ in range(3):
            step(torch.ones(4))
        assert fn.count == 1
        step(torch.ones(5))
        step(torch.ones(4, dtype=torch.float64))
        step(torch.ones(4))
        assert fn.count == 3

    def test_an_array_and_a_plain_tensor_are_one_signature_under_rules(self):
        fn = Traces(lambda x: x * 2)
        step = fp.jit(fn, mesh=MESH, rules=fp.Rules())
        step(step(torch.ones(4)))
        assert fn.count == 1

    def test_static_arguments_are_part_of_the_program(self):
        fn = Traces(lambda x, times, scale=1: x * times * scale)
        step = fp.jit(fn, mesh=MESH, static_argnames=("times", "scale"))
        assert fp.device_get(step(torch.ones(()), times=3)).item() == 3
        assert fp.device_get(step(torch.ones(()), times=4, scale=2)).item() == 8
        assert fp.device_get(step(torch.ones(()), times=3)).item() == 3
        assert fn.count == 2

    def test_static_arguments_by_number(self):
        step = fp.jit(lambda x, how: x + 1 if how == "up" else x - 1, mesh=MESH, static_argnums=1)
        assert step(torch.zeros(()), "up").item() == 1
        assert step(torch.zeros(()), "down").item() == -1

    def test_python_numbers_are_traced_as_tensors(self):
        fn = Traces(lambda x, rate: x * rate)
        step = fp.jit(fn, mesh=MESH)
        assert [step(torch.ones(()), rate).item() for rate in (0.5, 0.25)] == [0.5, 0.25]
        assert fn.count == 1

    def test_keyword_arguments(self):
        step = fp.jit(lambda x, y: x - y, mesh=MESH)
        assert step(y=torch.ones(()), x=torch.zeros(())).item() == -1


class TestDonation:
    def step(self, **options):
        return fp.jit(lambda state, x: ({"w": state["w"] + x}, x * 2), mesh=MESH, **options)

    def test_reading_a_donated_array_raises(self):
        step = self.step(donate_argnums=0)
        state = {"w": sharded(torch.ones(4))}
        new, _ = step(state, torch.ones(4))
        with pytest.raises(ExecutionError, match=r"(?s)f32\[4\] was donated.*\nFix: "):
            fp.device_get(state["w"])
        assert "donated" in repr(state["w"])
        assert state["w"].is_deleted and not new["w"].is_deleted
        with pytest.raises(ExecutionError, match="was donated"):
            step(state, torch.ones(4))

    def test_the_result_takes_over_the_memory(self):
        step = self.step(donate_argnums=0)
        array = sharded(torch.ones(4))
        before = {rank: shard.data_ptr() for rank, shard in array.shards.items()}
        new, _ = step({"w": array}, torch.ones(4))
        assert {rank: shard.data_ptr() for rank, shard in new["w"].shards.items()} == before

    def test_a_donated_plain_tensor_is_copied(self):
        w = torch.ones(4)
        self.step(donate_argnums=0)({"w": w}, torch.ones(4))
        assert torch.equal(w, torch.ones(4))

    def test_what_is_not_donated_stays(self):
        array = sharded(torch.ones(4))
        self.step()({"w": array}, torch.ones(4))
        assert torch.equal(fp.device_get(array), torch.ones(4))

    def test_a_donation_that_cannot_happen_warns(self):
        step = fp.jit(lambda x: x.sum(), mesh=MESH, donate_argnums=0)
        with pytest.warns(FparallelWarning, match=r"(?s)donated, but no output takes the place of x.*Fix: "):
            step(torch.ones(4))


class TestShardings:
    def test_in_and_out_shardings_are_tree_prefixes(self):
        def step(params, x):
            return {"a": x @ params["w"], "b": [x * 2, x.sum()]}

        P = fp.P
        step = fp.jit(
            step,
            mesh=MESH,
            in_shardings=(P(None, "tp"), P("dp")),
            out_shardings={"a": P("dp", "tp"), "b": [P("dp"), None]},
        )
        x, w = torch.arange(8.0).reshape(4, 2), torch.arange(4.0).reshape(2, 2)
        out = step({"w": w}, x)
        assert [str(leaf.text) for leaf in fp.tree.leaves(out)] == ["f32[4@dp,2@tp]", "f32[4@dp,2]", "f32[]"]
        assert torch.equal(fp.device_get(out["a"]), x @ w)

    def test_one_sharding_for_everything(self):
        step = fp.jit(
            lambda x, y: (x + y, x * y), mesh=MESH, in_shardings=fp.P("tp"), out_shardings=fp.P("dp")
        )
        out = step(torch.arange(4.0), torch.ones(4))
        assert [leaf.text for leaf in out] == ["f32[4@dp]", "f32[4@dp]"]
        assert fp.device_get(out[0]).tolist() == [1, 2, 3, 4]

    def test_the_state_that_comes_out_is_laid_out_as_the_one_that_goes_in(self):
        rules = fp.Rules({"w": fp.P("tp")})
        step = fp.jit(lambda state, x: ({"w": state["w"] * x}, x), mesh=MESH, rules=rules)
        state = {"w": torch.arange(4.0)}
        for _ in range(3):
            state, _ = step(state, torch.full((), 2.0))
        assert state["w"].text == "f32[4@tp]"
        assert fp.device_get(state["w"]).tolist() == [0, 8, 16, 24]

    def test_an_array_laid_out_otherwise_than_planned_is_an_error_that_names_both(self):
        step = fp.jit(lambda x: x * 2, mesh=MESH, rules=fp.Rules({"x": fp.P("dp")}))
        step(sharded(torch.ones(4), "dp"))
        with pytest.raises(ShardingError) as info:
            step(sharded(torch.ones(4), "tp"))
        assert "x arrives as f32[4@tp], the step expects f32[4@dp]" in str(info.value)
        assert str(info.value).splitlines()[-1].startswith("Fix: ")

    def test_without_rules_arrays_are_taken_as_they_lie(self):
        step = fp.jit(lambda x: x * 2, mesh=MESH)
        assert step(sharded(torch.ones(4), "tp")).text == "f32[4@tp]"
        assert step(sharded(torch.ones(4), ("dp", "tp"))).text == "f32[4@dp*tp]"
        assert step(torch.ones(4)).text == "f32[4]"

    def test_shardings_of_a_step(self):
        step = fp.jit(lambda x: x * 2, mesh=MESH, rules=fp.Rules({"x": fp.P("dp", "tp")}))
        ins, out = step.shardings(fp.ShapeDtypeStruct((4, 4), torch.float32))
        assert ins == {"x": fp.NamedSharding(MESH, fp.P("dp", "tp"))}
        assert out == fp.NamedSharding(MESH, fp.P("dp", "tp"))

    def test_without_a_mesh_plain_tensors_come_out(self):
        out = fp.jit(lambda x: (x * 2, x.sum()))(torch.ones(3))
        assert isinstance(out[0], Tensor) and torch.equal(out[0], torch.full((3,), 2.0))
        assert out[1].item() == 3


class TestArrays:
    def test_print(self):
        assert str(sharded(torch.zeros(8, 4), "dp", "tp")) == "f32[8@dp,4@tp]"
        assert str(sharded(torch.zeros(8, 4, dtype=torch.bfloat16), ("dp", "tp"))) == "bf16[8@dp*tp,4]"
        assert str(sharded(torch.zeros(3, dtype=torch.int64))) == "i64[3]"
        assert repr(sharded(torch.tensor(2.5))) == "f32[](2.5)"

    @pytest.mark.parametrize("spec", [(), ("dp",), (None, "tp"), ("dp", "tp"), (("tp", "dp"),), ("tp", "dp")])
    @pytest.mark.parametrize("shape", [(4, 6), (5, 3), (1, 7), (0, 2)])
    def test_put_and_get_are_inverse(self, spec, shape):
        value = torch.arange(shape[0] * shape[1]).reshape(shape)
        assert torch.equal(fp.device_get(sharded(value, *spec)), value)

    def test_get_of_a_tree_leaves_other_leaves(self):
        tree = {"a": sharded(torch.ones(2), "dp"), "b": torch.zeros(1), "c": 3}
        got = fp.device_get(tree)
        assert torch.equal(got["a"], torch.ones(2)) and got["b"] is tree["b"] and got["c"] == 3

    def test_put_from_one_sharding_to_another(self):
        value = torch.arange(8.0)
        moved = fp.device_put(sharded(value, "dp"), fp.NamedSharding(MESH, fp.P("tp")))
        assert moved.text == "f32[8@tp]" and torch.equal(fp.device_get(moved), value)

    def test_numbers(self):
        one = sharded(torch.tensor(2.0))
        assert (float(one), int(one), one.item(), f"{one:.2f}", bool(one)) == (2.0, 2, 2.0, "2.00", True)
        with pytest.raises(ExecutionError, match=r"(?s)f32\[2@dp\] is no replicated single value.*Fix: "):
            sharded(torch.ones(2), "dp").item()

    @pytest.mark.parametrize(
        "use",
        [
            lambda x: x + 1,
            lambda x: 1 - x,
            lambda x: x @ x,
            lambda x: -x,
            lambda x: x[0],
            lambda x: x > 0,
            lambda x: x.sum(),
            lambda x: torch.sum(x),
            lambda x: torch.ones(4) * x,
            lambda x: x / 2,
        ],
    )
    def test_torch_on_an_array_is_refused(self, use):
        with pytest.raises(ExecutionError) as info:
            use(sharded(torch.ones(4), "dp"))
        assert "f32[4@dp]" in str(info.value)
        assert re.search(r"\nFix: .*fp\.jit.*fp\.device_get", str(info.value))

    def test_facts(self):
        x = sharded(torch.zeros(8, 6, dtype=torch.int32), "dp", "tp")
        assert (x.shape, x.ndim, x.dtype, x.numel()) == ((8, 6), 2, torch.int32, 48)
        assert x.sharding == fp.NamedSharding(MESH, fp.P("dp", "tp"))
        assert {tuple(shard.shape) for shard in x.shards.values()} == {(4, 3)}


class TestShapes:
    def test_eval_shape_computes_nothing(self):
        out = fp.eval_shape(lambda x: {"y": x @ x.T, "n": 3}, fp.ShapeDtypeStruct((10**6, 8), torch.bfloat16))
        assert out["y"] == fp.ShapeDtypeStruct((10**6, 10**6), torch.bfloat16)
        assert out["n"].dtype == torch.int64

    def test_lowering_for_2048_ranks_needs_none_of_them(self):
        @fp.dataclass
        class Params:
            w: Float[Tensor, "embed mlp"]
            out: Float[Tensor, "mlp embed"]

        def step(state, batch):
            def loss(params, batch):
                return fp.Mean((torch.relu(batch @ params.w) @ params.out).square().sum(), batch.shape[0])

            value, grads = fp.value_and_grad(loss)(state["params"], batch)
            return {"params": fp.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)}, value

        def shape(*sizes):
            return fp.ShapeDtypeStruct(sizes, torch.float32)

        mesh = fp.make_mesh((256, 8), ("dp", "tp"), kind="abstract")
        rules = fp.Rules(batch="dp", mlp="tp").zero(3, axis="dp")
        lowered = fp.jit(step, mesh=mesh, rules=rules).lower(
            {"params": Params(shape(1024, 4096), shape(4096, 1024))}, shape(4096, 1024)
        )
        lowered.schedule.verify()
        assert len(lowered.schedule.programs) == 1
        shard = 2 * 1024 * 4096 // 8 * 4
        assert lowered.schedule.bytes("reduce_scatter", axis="dp") == shard * 255 / 256
        assert "f32[1024@dp,4096@tp]" in lowered.explain("params.w")

    def test_traced_and_lowered_print(self):
        traced = fp.jit(lambda x: x @ x.T, mesh=MESH).trace(torch.ones(2, 2))
        assert "aten.mm.default" in str(traced)
        assert "run step" in str(traced.lower())

    def test_compile_then_call(self):
        compiled = fp.jit(lambda x: x * 2, mesh=MESH).lower(torch.ones(2)).compile()
        assert fp.device_get(compiled(torch.full((2,), 3.0))).tolist() == [6, 6]


class TestTrees:
    def test_every_kind_of_node_goes_in_and_out(self):
        class Pair(NamedTuple):
            left: object
            right: object

        @fp.dataclass
        class Node:
            x: object
            tag: str = fp.static(default="t")
            maybe: object = None

        def step(tree):
            return fp.tree.map(lambda x: x * 2, tree)

        tree = {
            "a": [torch.ones(2), (torch.zeros(0), None)],
            "b": Pair(torch.ones(()), {}),
            "c": Node(torch.arange(3), tag="u"),
        }
        out = fp.jit(step, mesh=MESH)(tree)
        assert out["c"].tag == "u" and out["c"].maybe is None and isinstance(out["b"], Pair)
        got = fp.device_get(out)
        assert got["a"][0].tolist() == [2, 2] and got["c"].x.tolist() == [0, 2, 4]

    def test_an_argument_returned_as_it_is(self):
        x = torch.arange(4.0)
        out = fp.jit(lambda x: {"same": x, "other": x + 0}, mesh=MESH, rules=fp.Rules({"x": fp.P("dp")}))(x)
        assert torch.equal(fp.device_get(out["same"]), x) and torch.equal(fp.device_get(out["other"]), x)

    def test_a_function_of_nothing(self):
        out = fp.jit(lambda: torch.arange(3), mesh=MESH, out_shardings=fp.P("dp"))()
        assert out.text == "i64[3@dp]" and fp.device_get(out).tolist() == [0, 1, 2]


class TestGradients:
    def test_values_come_first(self):
        def loss(w, x):
            return (w * x).sum(), {"x": x * 2}

        (value, aux), grad = fp.value_and_grad(loss, has_aux=True)(torch.ones(2), torch.tensor([2.0, 3.0]))
        assert (value.item(), grad.tolist(), aux["x"].tolist()) == (5.0, [2, 3], [4, 6])
        grad, aux = fp.grad(loss, has_aux=True)(torch.ones(2), torch.tensor([2.0, 3.0]))
        assert grad.tolist() == [2, 3]

    def test_of_several_arguments(self):
        value, (a, b) = fp.value_and_grad(lambda a, b: (a * b).sum(), argnums=(0, 1))(
            torch.ones(2), torch.full((2,), 3.0)
        )
        assert (value.item(), a.tolist(), b.tolist()) == (6.0, [3, 3], [1, 1])

    def test_second_order_on_a_mesh(self):
        def step(x):
            return fp.grad(lambda y: fp.grad(lambda z: (z**3).sum())(y).sum())(x)

        out = fp.jit(step, mesh=MESH, in_shardings=fp.P("dp"))(torch.arange(4.0))
        assert fp.device_get(out).tolist() == [0, 6, 12, 18]

    def test_strict_refuses_a_reshard_that_nobody_asked_for(self):
        def step(x, y):
            return x + y

        shardings = (fp.P("dp"), fp.P(None, "dp"))
        x = torch.ones(4, 4)
        fp.jit(step, mesh=MESH, in_shardings=shardings)(x, x.clone())
        with pytest.raises(ShardingError, match=r"(?s)strict: .*\[4.*test_api\.py:\d+.*\nFix: "):
            fp.jit(step, mesh=MESH, in_shardings=shardings, strict=True)(x, x.clone())

    def test_a_mean_is_a_metric_like_any_number(self):
        def step(x):
            mean = fp.Mean(x.sum(), (x > 0).sum())
            square = fp.Mean(x.square().sum(), torch.full((), x.numel()))
            return {"mean": mean, "both": fp.Mean(x.sum() + 0, x.sum() / 2) + 2 * square}

        x = torch.tensor([0.0, 1.0, 2.0, 3.0])
        plain, out = step(x), fp.jit(step, mesh=MESH, in_shardings=fp.P("dp"))(x)
        assert float(out["mean"]) == float(plain["mean"]) == 2.0
        assert out["both"].item() == plain["both"].item() == 9.0
