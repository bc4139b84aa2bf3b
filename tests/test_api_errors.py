"""Mistakes and their messages: the class, the leaf or source line, and a line that says what to change."""

import inspect
import os
import re

import pytest
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

import fparallel as fp
from fparallel.errors import (
    ExecutionError,
    LayoutError,
    MeshError,
    RandomError,
    RuleError,
    ShardingError,
    TraceError,
)

MESH = fp.make_mesh((2, 2), ("dp", "tp"), kind="simulated")
HERE = os.path.basename(__file__)


@fp.dataclass
class Layer:
    w: Float[Tensor, "embed mlp"]
    out: Float[Tensor, "mlp embed"]


def layer():
    return Layer(w=torch.ones(4, 8), out=torch.ones(8, 4))


def apply(params, batch):
    return torch.relu(batch @ params.w) @ params.out


def raises(kind, *parts, call):
    """The call raises `kind`; the message has all parts and ends with a Fix line."""
    with pytest.raises(kind) as info:
        call()
    text = str(info.value)
    assert re.fullmatch(r"Fix: \S.*", text.splitlines()[-1]), text
    assert "\nFix: " in text and text.count("\nFix: ") == 1
    for part in parts:
        assert part in text, text
    return text


def line_of(function, text):
    """`file.py:12` of the line of a function that contains `text`."""
    lines, first = inspect.getsourcelines(function)
    return f"{HERE}:{first + next(i for i, line in enumerate(lines) if text in line)}"


def run(function, *args, rules=None, **options):
    return lambda: fp.jit(function, mesh=MESH, rules=rules, **options)(*args)


BATCH = torch.ones(4, 4)


class TestRules:
    def check(self, rules, *parts, kind=ShardingError):
        return raises(kind, *parts, call=run(apply, layer(), BATCH, rules=rules))

    def test_unknown_mesh_axis(self):
        self.check(fp.Rules(mlp="ttp"), "mlp='ttp'", "(dp=2, tp=2)", "did you mean 'tp'")

    def test_unknown_mesh_axis_in_a_glob(self):
        self.check(fp.Rules({"w": fp.P("model")}), "params.w", "'model'", "dp, tp")

    def test_unknown_mesh_axis_of_zero(self):
        self.check(fp.Rules().zero(1, axis="data"), "zero(1, axis='data')", "dp, tp")

    def test_unknown_logical_name(self):
        self.check(fp.Rules(mpl="tp"), "mpl='tp'", "did you mean 'mlp'")

    def test_a_glob_that_matches_nothing(self):
        self.check(
            fp.Rules({"layers.*.w": fp.P("tp")}), "'layers.*.w'", "matches no leaf of apply", "params.w"
        )

    def test_one_axis_used_twice(self):
        self.check(fp.Rules(mlp="tp", embed="tp"), "params.w", "the axis tp", "[4@tp,8@tp]")
        self.check(fp.Rules({"w": fp.P("tp", "tp")}), "params.w", "[4@tp,8@tp]")

    def test_a_spec_longer_than_the_rank(self):
        self.check(fp.Rules({"w": fp.P(None, None, "tp")}), "params.w", "names 3 dims", "[4, 8] has 2")

    def test_logical_names_that_do_not_fit_the_rank(self):
        self.check(fp.Rules({"w": "embed heads mlp"}, mlp="tp"), "params.w", "'embed heads mlp'", "[4, 8]")

    def test_a_batch_smaller_than_its_ranks(self):
        mesh = fp.make_mesh((4,), ("dp",), kind="simulated")
        step = fp.jit(lambda batch: batch["x"] * 2, mesh=mesh, rules=fp.Rules(batch="dp"))
        raises(
            ShardingError,
            "batch.x",
            "a batch of 3",
            "4 ranks of dp",
            call=lambda: step({"x": torch.ones(3, 2)}),
        )

    def test_a_zero_stage_that_does_not_exist(self):
        raises(ShardingError, "ZeRO stage 4", call=lambda: fp.Rules().zero(4, axis="dp"))

    def test_a_rule_without_a_mesh(self):
        raises(ShardingError, "without a mesh", call=lambda: fp.jit(apply, rules=fp.Rules(mlp="tp")))

    def test_a_constraint_longer_than_the_rank(self):
        def step(x):
            return fp.with_sharding_constraint(x, fp.P("dp", None, "tp"))

        raises(ShardingError, "P('dp', None, 'tp')", "names 3 dims", call=run(step, BATCH))

    def test_in_shardings_of_another_mesh(self):
        other = fp.make_mesh((4,), ("x",), kind="simulated")
        step = fp.jit(lambda x: x * 2, mesh=MESH, in_shardings=fp.NamedSharding(other, fp.P("x")))
        raises(ShardingError, "(x=4)", "(dp=2, tp=2)", call=lambda: step(BATCH))


class TestTracing:
    def check(self, function, *parts, args=(BATCH,), kind=TraceError, rules=None):
        return raises(kind, *parts, call=run(function, *args, rules=rules))

    def test_writing_into_an_argument(self):
        def step(x):
            x.add_(1)
            return x * 2

        self.check(step, "writes in place into x", line_of(step, "x.add_"))

    def test_writing_into_a_view_of_an_argument(self):
        def step(state):
            state["w"][0] = 0.0
            return {"w": state["w"] * 2}

        self.check(step, "writes in place into state.w", line_of(step, "= 0.0"), args=({"w": BATCH},))

    def test_writing_into_a_closed_over_tensor(self):
        count = torch.zeros(())

        def step(x):
            count.add_(1)
            return x + count

        self.check(step, "writes in place", "closes over", line_of(step, "add_"))
        assert count == 0

    @pytest.mark.parametrize(
        "read",
        [
            lambda x: x.sum().item(),
            lambda x: float(x.sum()),
            lambda x: int(x.sum()),
            lambda x: x.tolist(),
            lambda x: x if x.sum() > 0 else -x,
            lambda x: x.numpy(),
        ],
        ids=["item", "float", "int", "tolist", "if", "numpy"],
    )
    def test_reading_a_value(self, read):
        def step(x):
            return x * read(x)

        self.check(step, "reads the value", f"{HERE}:")

    def test_a_shape_that_depends_on_data(self):
        def step(x):
            return x[x > 0]

        self.check(step, line_of(step, "x > 0"))

    def test_returning_no_tensor(self):
        self.check(lambda x: {"a": x * 1, "name": "loss"}, "returned str 'loss' at name")

    def test_an_argument_that_is_no_tensor(self):
        self.check(lambda x, name: x, "name is str 'adam'", "static_argnames", args=(BATCH, "adam"))

    def test_closing_over_a_tensor_that_needs_grad(self):
        weight = torch.ones(4, requires_grad=True)

        def step(x):
            return x * weight

        self.check(step, "the variable 'weight'", "requires grad", line_of(step, "x * weight"))

    def test_closing_over_a_module_parameter(self):
        module = torch.nn.Linear(4, 4)
        self.check(lambda x: module(x), "requires grad", f"{HERE}:")

    def test_closing_over_a_large_tensor(self):
        table = torch.empty(65 * 2**18)

        def step(x):
            return x.sum() + table[:4].sum()

        self.check(step, "65 MiB", line_of(step, "table[:4]"))

    def test_receiving_one_tensor_at_two_paths(self):
        w = torch.ones(2)
        self.check(
            lambda params: params["a"] + params["b"], "params.a and params.b", args=({"a": w, "b": w},)
        )

    def test_receiving_one_tensor_in_two_arguments_is_legal(self):
        assert fp.device_get(fp.jit(lambda x, y: x + y, mesh=MESH)(BATCH, BATCH)).sum() == 32

    def test_returning_one_tensor_at_two_paths(self):
        def step(x):
            y = x * 2
            return {"a": y, "b": y}

        self.check(step, "step returns one tensor at two paths, a and b")

    @pytest.mark.parametrize(
        "draw",
        [
            lambda x: torch.rand_like(x),
            lambda x: F.dropout(x, 0.5),
            lambda x: torch.randn(4),
            lambda x: x.clone().normal_(),
            lambda x: x[torch.randperm(4)],
        ],
        ids=["rand_like", "dropout", "randn", "normal_", "randperm"],
    )
    def test_random_numbers_without_a_key(self, draw):
        text = raises(
            (TraceError, RandomError), "fp.random", call=run(lambda x: x * 1 + draw(x).mean(), BATCH)
        )
        assert f"{HERE}:" in text

    @pytest.mark.parametrize(
        ("make", "kind"),
        [
            (lambda: torch.ones(2, dtype=torch.complex64), "complex"),
            (lambda: torch.eye(2).to_sparse(), "sparse"),
            (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantized"),
        ],
        ids=["complex", "sparse", "quantized"],
    )
    @pytest.mark.filterwarnings("ignore")
    def test_odd_tensors(self, make, kind):
        self.check(lambda batch: batch, f"batch.x is a {kind} tensor", args=({"x": make()},))

    def test_differentiating_an_integer_leaf(self):
        def step(params):
            return fp.grad(lambda p: (p["w"] * p["n"]).sum())(params)

        self.check(step, "the leaf n", "int64", args=({"w": BATCH, "n": torch.ones(4, dtype=torch.int64)},))

    def test_differentiating_what_is_no_scalar(self):
        def loss(w):
            return w * 2

        self.check(lambda w: fp.grad(loss)(w), "loss returned torch.float32 of shape (4, 4)", "fp.Mean")

    def test_a_tensor_kept_between_two_traces(self):
        kept = []

        def step(x):
            kept.append(x * 2)
            return kept[0] + x

        fp.jit(step, mesh=MESH)(BATCH)
        self.check(step, "leaked", args=(BATCH.double(),))

    def test_an_unhashable_static_argument(self):
        step = fp.jit(lambda x, names: x, mesh=MESH, static_argnames="names")
        raises(TraceError, "static argument names", "list", call=lambda: step(BATCH, names=["a"]))

    def test_a_static_argument_that_does_not_exist(self):
        raises(
            TraceError,
            "'mode'",
            "no such argument",
            call=lambda: fp.jit(apply, mesh=MESH, static_argnames="mode"),
        )

    def test_a_donated_argument_that_does_not_exist(self):
        raises(TraceError, "argument 5 of apply", call=lambda: fp.jit(apply, mesh=MESH, donate_argnums=5))


torch.library.define("fparallel_test::twist", "(Tensor x) -> Tensor")
torch.library.impl("fparallel_test::twist", "CompositeExplicitAutograd", lambda x: x.flip(0))
torch.library.register_fake("fparallel_test::twist", lambda x: torch.empty_like(x))


class TestOps:
    def test_an_op_without_a_rule_on_a_sharded_input(self):
        def step(batch):
            return torch.ops.fparallel_test.twist(batch)

        rules = fp.Rules(batch="dp")
        raises(
            RuleError,
            "fparallel_test.twist",
            "f32[4@dp,4]",
            "fp.register_rule",
            line_of(step, "twist"),
            call=run(step, BATCH, rules=rules),
        )

    def test_runs_on_whole_inputs_and_where_the_gather_is_asked_for(self):
        def step(batch):
            return torch.ops.fparallel_test.twist(fp.with_sharding_constraint(batch, fp.P()))

        batch = torch.arange(8.0).reshape(4, 2)
        out = fp.jit(step, mesh=MESH, rules=fp.Rules(batch="dp"))(batch)
        assert torch.equal(fp.device_get(out), batch.flip(0))


class TestRunning:
    def test_nan_in_the_first_loss_names_the_leaf(self):
        def step(x):
            return x * 1, {"loss": (x - x).sum().log() * 0}

        raises(ExecutionError, "NaN", "1.loss", "step", call=run(step, BATCH))

    def test_nan_in_an_argument_is_named(self):
        batch = BATCH.clone()
        batch[1, 1] = float("nan")
        step = run(lambda batch: {"loss": batch.sum()}, batch)
        raises(ExecutionError, "NaN at loss", "NaN came in with batch", call=step)

    def test_nan_in_an_argument_that_is_masked_is_none(self):
        batch = BATCH.clone()
        batch[1, 1] = float("nan")
        assert run(lambda batch: {"loss": batch.nan_to_num().sum()}, batch)() is not None

    def test_an_abstract_mesh_cannot_run(self):
        mesh = fp.make_mesh((8,), ("dp",), kind="abstract")
        raises(ExecutionError, "(dp=8) is abstract", call=lambda: fp.jit(lambda x: x * 2, mesh=mesh)(BATCH))

    def test_shapes_cannot_run(self):
        shape = fp.ShapeDtypeStruct((4,), torch.float32)
        raises(
            ExecutionError, "x is a ShapeDtypeStruct", call=lambda: fp.jit(lambda x: x * 2, mesh=MESH)(shape)
        )

    def test_an_array_of_another_mesh(self):
        other = fp.make_mesh((4,), ("x",), kind="simulated")
        x = fp.device_put(BATCH, fp.NamedSharding(other, fp.P()))
        raises(ShardingError, "(x=4)", "(dp=2, tp=2)", call=lambda: fp.jit(lambda y: y * 2, mesh=MESH)(x))

    def test_a_mesh_of_another_size_than_the_job(self):
        raises(MeshError, "-1", call=lambda: fp.make_mesh((-1, 2), ("dp", "tp"), kind="simulated"))


class TestSubAxes:
    def test_cuts_that_do_not_nest_name_both_leaves(self):
        mesh = fp.make_mesh((6,), ("tp",), kind="simulated")

        @fp.dataclass
        class Params:
            two: Float[Tensor, "kv"]
            three: Float[Tensor, "heads"]

        params = Params(two=torch.ones(2), three=torch.ones(3))
        step = fp.jit(
            lambda params: params.two.sum() + params.three.sum(),
            mesh=mesh,
            rules=fp.Rules(kv="tp", heads="tp"),
        )
        raises(
            LayoutError, "tp of 6", "at 2 by params.two", "at 3 by params.three", call=lambda: step(params)
        )


def test_errors_are_value_errors():
    for kind in (TraceError, ShardingError, RuleError, MeshError):
        assert issubclass(kind, ValueError) and issubclass(kind, fp.FparallelError)
