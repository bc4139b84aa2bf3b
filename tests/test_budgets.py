"""Communication budgets: what a schedule sends, as the formulas say, and nothing that should not be there.

P is the number of parameters, N the ranks along dp; payloads are elements per rank and step.
"""

import dataclasses
import functools
import math
from typing import Annotated

import pytest
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

import fparallel as fp
from fparallel.models import gpt, llama
from fparallel.runtime.segments import compiles
from fparallel.schedule.ir import Collective, Free, Run

ITEM = 4  # float32
ROWS, SEQ = 8, 16
GPT = gpt.Config(vocab=64, seq=SEQ, layers=2, dim=16, heads=4)
TX = fp.optim.chain(fp.optim.clip_by_global_norm(1.0), fp.optim.adamw(1e-3))


def numel(leaves) -> int:
    return sum(torch.Size(leaf.shape).numel() for leaf in leaves)


def training(init_params, loss):
    """init(key) and step(state, batch) of AdamW with clipping."""

    def init(key):
        params = init_params(key)
        return fp.TrainState(step=0, params=params, opt_state=TX.init(params), key=key)

    def step(state, batch):
        value, grads = fp.value_and_grad(loss)(state.params, batch)
        updates, opt_state = TX.update(grads, state.opt_state, state.params)
        params = fp.optim.apply_updates(state.params, updates)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state), {"loss": value}

    return init, step


def token_batch(rows=ROWS, seq=SEQ):
    def tokens():
        return fp.ShapeDtypeStruct((rows, seq), torch.int64)

    return {"tokens": tokens(), "targets": tokens(), "mask": fp.ShapeDtypeStruct((rows, seq), torch.float32)}


@functools.cache
def lower(model, sizes, names, *, zero=None, **rules):
    init, step = model
    state = fp.eval_shape(init, fp.random.key(0))
    made = fp.Rules(**rules)
    if zero is not None:
        made = made.zero(zero, axis="dp")
    mesh = fp.make_mesh(sizes, names, kind="abstract")
    return fp.jit(step, mesh=mesh, rules=made, donate_argnums=0).lower(state, token_batch()), state.params


def big(schedule, op, axis=None):
    """The payload in elements of a kind of collective, without that of single numbers (loss, norm)."""
    total = 0
    for instr in schedule.collectives(op, axis):
        for src, dst in zip(instr.ins, instr.outs, strict=True):
            if schedule.buffers[src].layout.shape:
                total += schedule.payload(dataclasses.replace(instr, ins=(src,), outs=(dst,)))
    return total / ITEM


GPT_STEP = training(lambda key: gpt.init_params(key, GPT), gpt.loss)


# ---- the Lm of the guide: its backward reads every parameter -------------------------------------


@fp.dataclass
class Mlp:
    up: Float[Tensor, "embed mlp"]
    down: Float[Tensor, "mlp embed"]


@fp.dataclass
class Lm:
    tok: Float[Tensor, "vocab embed"]
    blocks: Annotated[list[Mlp], "layers"]


@fp.block
def mlp(p, x):
    return x + F.gelu(x @ p.up) @ p.down


def lm_loss(params, batch):
    x = F.embedding(batch["tokens"], params.tok)
    for p in params.blocks:
        x = mlp(p, x)
    logits = (x @ params.tok.T).flatten(0, 1)
    nll = F.cross_entropy(logits, batch["targets"].flatten(), reduction="none")
    mask = batch["mask"].flatten()
    return fp.Mean((nll * mask).sum(), mask.sum())


def lm_params(key):
    def normal(i, *shape):
        return fp.random.normal(fp.random.fold_in(key, i), shape) * 0.02

    return Lm(
        tok=normal(0, 48, 16),
        blocks=[Mlp(normal(2 * i, 16, 64), normal(2 * i + 1, 64, 16)) for i in range(1, 4)],
    )


LM_STEP = training(lm_params, lm_loss)


# ---- ZeRO ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("model", [GPT_STEP, LM_STEP], ids=["gpt", "lm"])
class TestZero:
    def test_0_is_one_all_reduce_of_the_gradients(self, model, n):
        lowered, params = lower(model, (n,), ("dp",), zero=0, batch="dp")
        p = numel(fp.tree.leaves(params))
        assert big(lowered.schedule, "all_reduce") == 2 * p * (n - 1) / n
        assert big(lowered.schedule, None) == 2 * p * (n - 1) / n

    @pytest.mark.parametrize("stage", [1, 2])
    def test_1_and_2_scatter_the_gradients_and_gather_the_parameters(self, model, n, stage):
        lowered, params = lower(model, (n,), ("dp",), zero=stage, batch="dp")
        p = numel(fp.tree.leaves(params))
        assert big(lowered.schedule, "reduce_scatter") == p * (n - 1) / n
        assert big(lowered.schedule, "all_gather") == p * (n - 1) / n
        assert big(lowered.schedule, None) == 2 * p * (n - 1) / n


@pytest.mark.parametrize("n", [2, 4, 8])
def test_zero_3_sends_3p_where_the_backward_reads_every_parameter(n):
    lowered, params = lower(LM_STEP, (n,), ("dp",), zero=3, batch="dp")
    p = numel(fp.tree.leaves(params))
    assert big(lowered.schedule, "reduce_scatter") == p * (n - 1) / n
    assert big(lowered.schedule, "all_gather") == 2 * p * (n - 1) / n
    assert big(lowered.schedule, None) == 3 * p * (n - 1) / n


@pytest.mark.parametrize("n", [2, 4, 8])
def test_zero_3_gathers_again_only_what_the_backward_reads(n):
    """The gradient of `x + pos` needs no pos, of `x @ w + b` no b; LayerNorm's backward takes its bias."""
    lowered, params = lower(GPT_STEP, (n,), ("dp",), zero=3, batch="dp")
    leaves = dict(zip(fp.tree.paths(fp.tree.structure(params)), fp.tree.leaves(params), strict=True))
    unread = {path for path in leaves if path == "pos" or path.endswith("_bias")}
    p, read = numel(leaves.values()), numel(leaf for path, leaf in leaves.items() if path not in unread)
    gathers = [name for instr in lowered.schedule.collectives("all_gather") for name in instr.ins]
    for path in leaves:
        assert gathers.count(f"state.params.{path}") == (1 if path in unread else 2), path
    assert big(lowered.schedule, "all_gather") == (p + read) * (n - 1) / n
    assert big(lowered.schedule, "reduce_scatter") == p * (n - 1) / n


def test_zero_3_holds_few_gathered_blocks_at_once():
    """The peak of gathered parameters does not grow with depth: a block's are freed when it has run."""

    def gathered(layers):
        cfg = dataclasses.replace(GPT, layers=layers)
        model = training(lambda key: gpt.init_params(key, cfg), gpt.loss)
        schedule = lower(model, (4,), ("dp",), zero=3, batch="dp")[0].schedule
        live, peak = set(), 0
        for instr in schedule.programs[0].instrs:
            live.update(name for name in instr.writes if name.split("~")[0].endswith("@full"))
            live.difference_update(instr.bufs if isinstance(instr, Free) else ())
            peak = max(peak, sum(schedule.buffers[name].nbytes for name in live))
        assert peak > 0
        return peak

    assert gathered(4) <= gathered(2)


def test_four_ranks_take_8_samples_each_of_a_batch_of_32():
    mesh = fp.make_mesh((4,), ("dp",), kind="simulated")
    step = fp.jit(lambda batch: batch * 1.0, mesh=mesh, rules=fp.Rules(batch="dp"))
    out = step(torch.arange(32.0))
    assert str(out) == "f32[32@dp]"
    assert [shard.tolist() for shard in out.shards.values()] == [
        list(range(8 * r, 8 * r + 8)) for r in range(4)
    ]


def test_the_mean_of_ones_over_4_ranks_is_exactly_1():
    mesh = fp.make_mesh((4,), ("dp",), kind="simulated")
    step = fp.jit(lambda batch: batch.mean(), mesh=mesh, rules=fp.Rules(batch="dp"))
    lowered = step.lower(torch.ones(4))
    assert lowered.schedule.count("all_reduce") == 1
    assert step(torch.ones(4)).item() == 1.0


# ---- Megatron ------------------------------------------------------------------------------------

MEGATRON = {"heads": "tp", "mlp": "tp", "vocab": "tp"}


def per_block(schedule, phase, number):
    """The kinds of the collectives of activations in one call of a block: between its first and last run."""
    label, inside = f"{phase} block.{number}", False
    kinds: list[str] = []
    pending: list[str] = []
    for instr in schedule.programs[0].instrs:
        if isinstance(instr, Run):
            if instr.label == label:
                kinds += pending if inside else []
                inside = True
            elif inside:
                break
            pending = []
        elif isinstance(instr, Collective):
            sizes = [math.prod(schedule.buffers[name].layout.shape) for name in instr.ins]
            pending += [instr.kind] if ROWS * SEQ * GPT.dim in sizes else []
    return kinds


class TestTensorParallel:
    def test_a_block_has_two_all_reduces_forward_and_two_backward(self):
        """One for attention and one for the MLP: g of Shoeybi et al. 2019 forward, f backward."""
        schedule = lower(GPT_STEP, (4,), ("tp",), **MEGATRON)[0].schedule
        for number in range(GPT.layers):
            assert per_block(schedule, "F", number) == ["all_reduce"] * 2
            assert per_block(schedule, "B", number) == ["all_reduce"] * 2

    def test_nothing_else_is_sent(self):
        """Beside the blocks: the embedding's rows, the head's cotangent, the loss's max and sum per token."""
        schedule = lower(GPT_STEP, (4,), ("tp",), **MEGATRON)[0].schedule
        assert (
            schedule.count("all_gather")
            == schedule.count("all_to_all")
            == schedule.count("reduce_scatter")
            == 0
        )
        activation = ROWS * SEQ * GPT.dim
        per_token = ROWS * SEQ
        sent = 4 * GPT.layers * activation + 2 * activation + 2 * per_token
        assert big(schedule, "all_reduce") == 2 * sent * 3 / 4

    @pytest.mark.parametrize("model", [GPT_STEP, LM_STEP], ids=["gpt", "lm"])
    def test_no_rank_holds_full_logits_or_a_full_sharded_weight(self, model):
        lowered, params = lower(model, (4,), ("tp",), **MEGATRON)
        vocab = params.tok.shape[0]
        paths, leaves, _ = fp.tree.flatten_with_path(params)
        sharded = ("tok", ".q", ".k", ".v", ".out", ".up", ".down")
        weights = {leaf.shape for path, leaf in zip(paths, leaves, strict=True) if path.endswith(sharded)}
        weights |= {shape[::-1] for shape in weights}
        for buffer in lowered.schedule.buffers.values():
            local = buffer.layout.local_shape({"tp": 0})
            assert local not in weights, buffer
            assert vocab not in local, buffer

    def test_sequence_parallelism_gathers_and_scatters_instead(self):
        """Korthikanti et al. 2022, figure 5: g is a reduce-scatter, its partner an all-gather."""
        schedule = lower(GPT_STEP, (4,), ("tp",), **MEGATRON, seq="tp")[0].schedule
        assert (
            schedule.count("all_reduce") <= 4
        )  # max and sum of the loss, gradients of the norms, the global norm
        for number in range(GPT.layers):
            assert per_block(schedule, "F", number) == ["all_gather", "reduce_scatter"] * 2
            backward = per_block(schedule, "B", number)
            assert "all_reduce" not in backward
            assert backward.count("reduce_scatter") <= 2
        residual = [b for b in schedule.buffers.values() if b.layout.shape == (ROWS, SEQ, GPT.dim)]
        assert sum(b.layout.local_shape({"tp": 0})[1] == SEQ // 4 for b in residual) > GPT.layers

    def test_with_data_parallelism_the_two_do_not_mix(self):
        """dp sends the gradients of the local shard once, tp what it sends alone, per row."""
        lowered, params = lower(GPT_STEP, (2, 4), ("dp", "tp"), zero=1, batch="dp", **MEGATRON)
        alone, _ = lower(GPT_STEP, (4,), ("tp",), **MEGATRON)
        rules = fp.Rules(**MEGATRON)
        mesh = fp.make_mesh((2, 4), ("dp", "tp"), kind="abstract")
        plans = rules.shardings(params, mesh)
        held = sum(
            s.layout(leaf.shape).max_local_numel
            for s, leaf in zip(fp.tree.leaves(plans), fp.tree.leaves(params), strict=True)
        )
        assert big(lowered.schedule, "reduce_scatter", "dp") == held / 2
        assert big(lowered.schedule, "all_gather", "dp") == held / 2
        assert big(lowered.schedule, None, "tp") == big(alone.schedule, None, "tp") / 2

    def test_llama_with_fewer_key_heads_than_ranks_gathers_no_weight(self):
        cfg = llama.Config(vocab=64, layers=2, dim=16, heads=8, kv_heads=2)
        model = training(lambda key: llama.init_params(key, cfg), llama.loss)
        schedule = lower(model, (4,), ("tp",), **MEGATRON, kv_heads="tp")[0].schedule
        for kind in ("all_gather", "all_to_all", "permute"):
            for instr in schedule.collectives(kind):
                assert not any(name.startswith("state.params") for name in instr.ins), instr


# ---- clipping ------------------------------------------------------------------------------------


def clipped(w, max_norm):
    """The norm of a tree and the tree clipped to `max_norm`."""
    clip = fp.optim.clip_by_global_norm(max_norm)
    updates, _ = clip.update(w, clip.init(w), None)
    return fp.optim.global_norm(w), updates


def test_the_norm_of_a_column_split_matrix_is_5_on_each_rank():
    mesh = fp.make_mesh((2,), ("tp",), kind="simulated")
    step = fp.jit(lambda w: clipped(w, 1.0), mesh=mesh, in_shardings=fp.P(None, "tp"))
    norm, w = step(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
    assert [float(shard) for shard in norm.shards.values()] == [5.0, 5.0]
    torch.testing.assert_close(fp.device_get(w), torch.tensor([[0.6, 0.0], [0.0, 0.8]]))


def test_parts_of_norm_3_and_4_are_both_clipped_by_a_fifth():
    """One part lies on each half of the mesh, a third leaf on all ranks, which counts once."""
    mesh = fp.make_mesh((2, 2), ("a", "b"), kind="simulated")
    parts = {"x": torch.tensor([3.0, 0.0]), "y": torch.tensor([[0.0, 4.0]]), "z": torch.zeros(3)}
    shardings = ({"x": fp.P("a"), "y": fp.P(None, "b"), "z": fp.P()},)
    norm, out = fp.jit(lambda w: clipped(w, 1.0), mesh=mesh, in_shardings=shardings)(parts)
    assert float(norm) == 5.0
    torch.testing.assert_close(fp.device_get(out["x"]), parts["x"] * 0.2)
    torch.testing.assert_close(fp.device_get(out["y"]), parts["y"] * 0.2)


def test_a_replicated_leaf_counts_once():
    mesh = fp.make_mesh((4,), ("dp",), kind="simulated")
    norm, _ = fp.jit(lambda w: clipped(w, 1.0), mesh=mesh, rules=fp.Rules())({"w": torch.tensor([3.0, 4.0])})
    assert float(norm) == 5.0


# ---- what compiles ------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [0, 3])
def test_what_torch_compiles_does_not_grow_with_depth(zero):
    def compiled(layers):
        cfg = dataclasses.replace(GPT, layers=layers)
        model = training(lambda key: gpt.init_params(key, cfg), gpt.loss)
        lowered, _ = lower(model, (2,), ("dp",), zero=zero, batch="dp")
        segments = lowered.schedule.segments.values()
        return {(s.name.split(".")[0], len(s.ops), len(s.inputs)) for s in segments if compiles(s)}

    assert compiled(2) == compiled(4)
