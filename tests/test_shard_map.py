"""fp.shard_map: gradients of whole tensors, parts of steps, and what is sent for them."""

import pytest
import torch
import torch.nn.functional as F

import fparallel as fp
from fparallel import P, lax
from fparallel.schedule.text import parse_schedule
from tests.shard_map_cases import F64, LINE, SQUARE, check, numbers, ring_all_gather

X, W, V = numbers(8, 8), numbers(8, 4, seed=1), numbers(8, seed=2)


class TestGradients:
    def test_the_reference_has_the_numerical_gradient(self):
        def f(x, v):
            y = lax.ppermute(x * v, "tp", [(0, 1), (2, 3)]) + lax.psum(x.sin().sum(0), "tp")
            z = lax.psum_scatter(y * lax.axis_index("tp"), "tp", scatter_dimension=1, tiled=True)
            return lax.all_gather(z.tanh() * v[:2].sum(), "tp", axis=1, tiled=True) * v, lax.pmean(
                z.sum() ** 2, "tp"
            )

        mapped = fp.shard_map(f, mesh=LINE, in_specs=(P("tp"), P()), out_specs=(P("tp"), P()))
        args = (X.clone().requires_grad_(), V.clone().requires_grad_())
        assert torch.autograd.gradcheck(mapped, args)
        assert torch.autograd.gradgradcheck(mapped, args)

    def test_second_derivatives(self):
        mapped = fp.shard_map(
            lambda x, w: lax.psum((x @ w).tanh(), "tp"),
            mesh=SQUARE,
            in_specs=(P("dp", "tp"), P("tp")),
            out_specs=P("dp"),
        )

        def norm_of_gradient(f, grad):
            return grad(lambda w: (grad(lambda w: (f(X, w) ** 3).sum())(w) ** 2).sum())

        def formula(x, w):
            return (x[:, :4] @ w[:4]).tanh() + (x[:, 4:] @ w[4:]).tanh()

        want = norm_of_gradient(formula, torch.func.grad)(W)
        for grad in (fp.grad, torch.func.grad):
            step = norm_of_gradient(mapped, grad)
            for run in (step, fp.jit(step, mesh=SQUARE)):
                torch.testing.assert_close(fp.device_get(run(W)), want, atol=1e-9, rtol=1e-9)

    def test_gradients_taken_inside_are_those_of_all_ranks_together(self):
        """Of what is equal on all ranks, as in JAX: the sum of the ranks' gradients."""
        for grad in (fp.grad, torch.func.grad):

            def f(x, w, grad=grad):
                return grad(lambda w: ((x @ w) ** 2).sum())(w)

            mapped = fp.shard_map(f, mesh=LINE, in_specs=(P("tp"), P()), out_specs=P())
            check(mapped, LINE, (X, W), lambda x, w: 2 * x.T @ (x @ w), func=False)

    @pytest.mark.parametrize("grad", [fp.grad, torch.func.grad])
    def test_of_tensors_that_the_function_closes_over(self, grad):
        def step(w, v):
            def loss(args):
                w, v = args
                f = fp.shard_map(
                    lambda x: lax.psum((x * v).sum() * w.sum(), "tp"),
                    mesh=LINE,
                    in_specs=P("tp"),
                    out_specs=P(),
                )
                return f(X * w.mean()) ** 2

            return grad(loss)((w, v))

        want = torch.func.grad(lambda args: ((X * args[0].mean() * args[1]).sum() * args[0].sum()) ** 2)(
            (W, V)
        )
        for run in (step, fp.jit(step, mesh=LINE)):
            torch.testing.assert_close(fp.device_get(run(W, V)), want, atol=1e-9, rtol=1e-9)

    def test_of_writes_in_place(self):
        def f(x, v):
            b = torch.zeros(2, 8, dtype=F64)
            b[0] = x[0]
            b[1:] += v
            row = b[1]
            row.mul_(x.sum())
            return b

        def formula(x, v):
            return torch.cat([torch.stack([s[0], v * s.sum()]) for s in x.split(2)])

        check(fp.shard_map(f, mesh=LINE, in_specs=(P("tp"), P()), out_specs=P("tp")), LINE, (X, V), formula)

    def test_of_an_autograd_function(self):
        class Product(torch.autograd.Function):
            @staticmethod
            def forward(ctx, a, b):
                ctx.save_for_backward(a, b)
                return a * b

            @staticmethod
            def backward(ctx, g):
                a, b = ctx.saved_tensors
                return g * b, g * a

        def step(v, vary):
            f = fp.shard_map(
                lambda x, v: lax.psum(Product.apply(x, vary(v)).sum(), "tp"),
                mesh=LINE,
                in_specs=(P("tp"), P()),
                out_specs=P(),
            )
            return fp.grad(lambda v: f(X, v))(v)

        for wrap in (lambda f: f, lambda f: fp.jit(f, mesh=LINE)):
            got = wrap(lambda v: step(v, lambda v: lax.pvary(v, "tp")))(V)
            torch.testing.assert_close(fp.device_get(got), X.sum(0))
            with pytest.raises(fp.FparallelError, match="is equal along tp differs along it"):
                wrap(lambda v: step(v, lambda v: v))(V)


class TestInSteps:
    LAYER = staticmethod(
        fp.shard_map(
            lambda x, w: lax.psum((x @ w).tanh(), "tp"),
            mesh=SQUARE,
            in_specs=(P("dp", "tp"), P("tp")),
            out_specs=P("dp"),
        )
    )

    def same(self, step, args, rules=None):
        got, want = fp.jit(step, mesh=SQUARE, rules=rules)(*args), step(*args)
        for a, b in zip(fp.tree.leaves(fp.device_get(got)), fp.tree.leaves(want), strict=True):
            torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)

    def test_in_blocks(self):
        @fp.block
        def layer(x, w):
            return self.LAYER(x, w @ w.T)

        def step(w):
            def loss(w):
                x = X
                for _ in range(3):
                    x = layer(x, w)
                return (x**2).sum()

            return fp.value_and_grad(loss)(w)

        self.same(step, (W,))

    @pytest.mark.parametrize("stage", [0, 1, 2, 3])
    @pytest.mark.parametrize("microbatches", [1, 2])
    def test_in_micro_batches_under_zero(self, stage, microbatches):
        def step(params, batch):
            def loss(p, x):
                y = self.LAYER(x, p["w"])
                return fp.Mean((y**2).sum(), torch.tensor(y.shape[0]))

            grad = fp.accumulate(fp.value_and_grad(loss), num_microbatches=microbatches)
            value, grads = grad(params, batch)
            return fp.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

        self.same(step, ({"w": W}, X), fp.Rules(batch="dp").zero(stage, axis="dp"))

    def test_beside_writes_in_place(self):
        def step(w):
            y = torch.zeros(8, 4, dtype=F64)
            y.add_(self.LAYER(X, w))
            return y

        self.same(step, (W,))

    def test_draws_are_alike_on_all_ranks_but_for_keys_that_are_not(self):
        def f(x, key):
            mine = fp.random.normal(fp.random.fold_in(key, lax.axis_index("tp")), (2, 8), dtype=F64)
            return F.dropout(x, 0.5), x * mine

        mapped = fp.shard_map(f, mesh=LINE, in_specs=(P("tp"), P()), out_specs=P("tp"))

        def step(x, key):
            with fp.random.use(key):
                return mapped(x, key)

        key, x = fp.random.key(3), torch.ones(8, 8, dtype=F64)
        dropped, mine = step(x, key)
        got = fp.jit(step, mesh=LINE)(x, key)
        assert torch.equal(fp.device_get(got[0]), dropped) and torch.equal(fp.device_get(got[1]), mine)
        assert torch.equal(dropped[:2], dropped[2:4]) and not torch.equal(mine[:2], mine[2:4])


class TestSchedule:
    def collectives(self, step, mesh, *args, rules=None):
        schedule = fp.jit(step, mesh=mesh, rules=rules).lower(*args).schedule
        assert str(parse_schedule(str(schedule))) == str(schedule)
        return schedule, [(c.kind, "*".join(map(str, c.axes))) for c in schedule.collectives()]

    def test_a_row_parallel_matmul_sums_once_forward_and_not_backward(self):
        f = fp.shard_map(
            lambda x, w: lax.psum(x @ w, "tp"), mesh=LINE, in_specs=(P(None, "tp"), P("tp")), out_specs=P()
        )
        cut = fp.NamedSharding(LINE, P("tp")), fp.NamedSharding(LINE, P(None, "tp"))
        step = fp.jit(
            lambda w, x: fp.grad(lambda w: (f(x, w) ** 2).sum())(w),
            mesh=LINE,
            in_shardings=cut,
            out_shardings=cut[0],
        )
        assert [(c.kind, c.reduce) for c in step.lower(W, X).schedule.collectives()] == [
            ("all_reduce", "sum")
        ]

    def test_a_gradient_is_scattered_once_into_where_the_rules_put_it(self):
        """Not summed inside the function and cut afterwards; gathered for it once."""
        f = fp.shard_map(
            lambda x, w: ((x @ w) ** 2).sum()[None], mesh=LINE, in_specs=(P("tp"), P()), out_specs=P("tp")
        )

        def step(params, batch):
            grads = fp.grad(lambda p: f(batch, p["w"]).sum())(params)
            return fp.tree.map(lambda p, g: p - g, params, grads)

        _, found = self.collectives(step, LINE, {"w": W}, X, rules=fp.Rules(batch="tp").zero(3, axis="tp"))
        assert found == [("all_gather", "tp"), ("reduce_scatter", "tp")]

    def test_a_ring_sends_each_shard_once_per_step(self):
        ring = fp.shard_map(ring_all_gather, mesh=LINE, in_specs=P("tp"), out_specs=P(), check_vma=False)
        schedule, found = self.collectives(ring, LINE, X)
        assert found == [("permute", "tp")] * 3
        assert schedule.bytes("permute") == 3 * 2 * 8 * 8  # three shards of f64[2,8]
        assert "permute[tp from 3,0,1,2]" in str(schedule)

    def test_a_parameter_that_rests_as_the_spec_says_is_not_gathered(self):
        f = fp.shard_map(
            lambda x, w: x @ lax.all_gather(w, "tp", tiled=True),
            mesh=LINE,
            in_specs=(P("tp"), P("tp")),
            out_specs=P("tp"),
        )

        def step(params, batch):
            return f(batch, params["w"])

        _, found = self.collectives(step, LINE, {"w": W}, X, rules=fp.Rules(batch="tp").zero(3, axis="tp"))
        assert found == [("all_gather", "tp")]
