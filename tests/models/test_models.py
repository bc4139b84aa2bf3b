"""The models are the networks that their papers and torch modules define, as functions of a pytree."""

import pytest
import torch
import torch.nn.functional as F
from beartype import beartype
from jaxtyping import TypeCheckError, jaxtyped

import fparallel as fp
from fparallel.models import generate, gpt, llama, presets
from fparallel.models.layers import ModelError, repeat_heads
from tests.models.reference import Gpt, gpt_params, llama_logits

GPT = gpt.Config(vocab=11, seq=7, layers=2, dim=12, heads=3)
LLAMA = llama.Config(vocab=11, layers=2, dim=24, heads=6, kv_heads=2)
MODELS = [(gpt, GPT), (llama, LLAMA)]


def make_batch(vocab: int, *, b: int = 3, t: int = 7, seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    draw = torch.randint(vocab, (b, t + 1), generator=g)
    mask = (torch.rand(b, t, generator=g) < 0.6).double()
    return {"tokens": draw[:, :-1].contiguous(), "targets": draw[:, 1:].contiguous(), "mask": mask}


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_gpt_is_the_torch_module_loss_and_gradients(tie, bias):
    torch.manual_seed(0)
    net = Gpt(gpt.Config(vocab=11, seq=7, layers=2, dim=12, heads=3, tie=tie, bias=bias)).double()
    batch = make_batch(11)
    params = gpt_params(net)
    torch.testing.assert_close(gpt.forward(params, batch["tokens"]), net(batch["tokens"]))

    nll = F.cross_entropy(net(batch["tokens"]).mT, batch["targets"], reduction="none")
    expected = (nll * batch["mask"]).sum() / batch["mask"].sum()
    weights = list(net.parameters())
    want = torch.autograd.grad(expected, weights)
    mean = gpt.loss(params, batch)
    got = torch.autograd.grad(mean.sum / mean.weight, weights)
    torch.testing.assert_close(mean.sum / mean.weight, expected)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
@pytest.mark.parametrize("tie", [True, False])
def test_llama_is_its_equations(kv_heads, tie):
    cfg = llama.Config(vocab=11, layers=2, dim=24, heads=6, kv_heads=kv_heads, tie=tie, rope_theta=100.0)
    params = llama.init_params(fp.random.key(0), cfg, dtype=torch.float64)
    params = fp.tree.map(lambda p: p * 10, params)  # far from linear
    tokens = make_batch(11)["tokens"]
    torch.testing.assert_close(llama.forward(params, tokens), llama_logits(params, tokens))


def test_repeated_heads_are_repeat_interleaved():
    x = torch.randn(2, 3, 4, 5)
    assert torch.equal(repeat_heads(x, 3), x.repeat_interleave(3, dim=2))
    assert repeat_heads(x, 1) is x


def test_rotary_scores_depend_on_the_distance_alone():
    cos, sin = llama.rotary(50, 8, 10_000.0, like=torch.zeros((), dtype=torch.float64))
    q, k = torch.randn(2, 8, dtype=torch.float64)
    turned_q = llama._rotate(q.expand(1, 50, 1, 8), cos, sin)[0, :, 0]
    turned_k = llama._rotate(k.expand(1, 50, 1, 8), cos, sin)[0, :, 0]
    scores = turned_q @ turned_k.mT
    for distance in (0, 1, 20):
        along = scores.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along))
    torch.testing.assert_close(scores[0, 0], q @ k)


@pytest.mark.parametrize(("model", "cfg"), MODELS)
def test_a_logit_sees_no_later_token(model, cfg):
    params = fp.tree.map(lambda p: p * 10, model.init_params(fp.random.key(1), cfg))
    tokens = make_batch(cfg.vocab)["tokens"]
    changed = tokens.clone()
    changed[:, 4] = (changed[:, 4] + 1) % cfg.vocab
    before, after = model.forward(params, tokens), model.forward(params, changed)
    assert torch.equal(before[:, :4], after[:, :4])
    assert (before[:, 4:] != after[:, 4:]).any(dim=(0, 2)).all()


@pytest.mark.parametrize(("model", "cfg"), MODELS)
def test_masked_targets_do_not_count(model, cfg):
    params = model.init_params(fp.random.key(1), cfg)
    batch = make_batch(cfg.vocab)
    other = batch | {"targets": torch.where(batch["mask"] == 1, batch["targets"], 0)}
    assert model.loss(params, batch).sum == model.loss(params, other).sum
    assert model.loss(params, batch).weight == batch["mask"].sum()
    nothing = model.loss(params, batch | {"mask": torch.zeros(3, 7)})
    assert (nothing.sum, nothing.weight) == (0, 0)
    as_bool = model.loss(params, batch | {"mask": batch["mask"].bool()})
    assert as_bool.sum == model.loss(params, batch).sum


@pytest.mark.parametrize(("model", "cfg"), MODELS)
def test_a_fresh_model_is_undecided_and_its_leaves_have_keys_of_their_own(model, cfg):
    params = model.init_params(fp.random.key(2), cfg)
    batch = make_batch(cfg.vocab, b=8)
    loss = model.loss(params, batch)
    assert abs(loss.sum / loss.weight - torch.tensor(float(cfg.vocab)).log()) < 0.05
    drawn = [p.flatten()[:8] / p.std() for p in fp.tree.leaves(params) if p.std() > 0]
    for i, a in enumerate(drawn):
        assert not any(torch.allclose(a, b) for b in drawn[:i])
    again = model.init_params(fp.random.key(2), cfg)
    assert all(torch.equal(a, b) for a, b in zip(fp.tree.leaves(params), fp.tree.leaves(again), strict=True))


def test_initial_standard_deviations_are_those_of_gpt2():
    params = gpt.init_params(fp.random.key(0), gpt.Config(vocab=500, seq=64, layers=8, dim=64, heads=2))
    assert abs(params.tok.std() - 0.02) < 0.001
    for block in params.blocks:
        assert abs(block.mlp.up.std() - 0.02) < 0.001
        assert abs(block.mlp.down.std() - 0.02 / 4) < 0.0003
        assert abs(block.attn.out.std() - 0.02 / 4) < 0.0003


@pytest.mark.parametrize(
    ("model", "cfg", "axes"),
    [
        (gpt, GPT, {"vocab", "positions", "embed", "heads", "qkv", "head_dim", "mlp"}),
        (llama, LLAMA, {"vocab", "embed", "heads", "kv_heads", "head_dim", "mlp"}),
    ],
)
def test_every_dim_of_every_leaf_has_a_logical_name(model, cfg, axes):
    params = model.init_params(fp.random.key(0), cfg)
    names = set()
    for leaf, spec in zip(fp.tree.leaves(params), fp.tree.logical_specs(params), strict=True):
        assert spec is not None and len(spec.dims) == leaf.ndim
        names |= {name for dim in spec.dims for name, _ in dim}
    assert names == axes
    paths, _, _ = fp.tree.flatten_with_path(params)
    assert "blocks.1.mlp.up" in paths and "blocks.0.attn.out" in paths


def test_presets_have_the_parameter_counts_of_the_benchmarks():
    def count(cfg: gpt.Config) -> int:
        d, block = cfg.dim, 12 * cfg.dim**2 + 13 * cfg.dim
        return (2 * cfg.vocab + cfg.seq) * d + cfg.layers * block + 2 * d

    for name in ("tiny", "S"):
        cfg = presets.GPT[name]
        params = gpt.init_params(fp.random.key(0), cfg)
        assert sum(p.numel() for p in fp.tree.leaves(params)) == count(cfg)
    assert (presets.GPT["M"].vocab, presets.GPT["M"].dim, presets.GPT["M"].layers) == (8192, 768, 12)


@pytest.mark.parametrize(("model", "cfg"), MODELS)
def test_generation_continues_the_prompt_and_is_a_function_of_the_key(model, cfg):
    params = fp.tree.map(lambda p: p * 5, model.init_params(fp.random.key(0), cfg))
    prompt = torch.tensor([[1, 2, 3]])

    def text(seed: int, **kw: float) -> torch.Tensor:
        return generate(model.forward, params, prompt, num_tokens=9, key=fp.random.key(seed), context=7, **kw)

    assert text(0).shape == (1, 12) and torch.equal(text(0)[:, :3], prompt)
    assert torch.equal(text(0), text(0))
    assert not torch.equal(text(0), text(1))
    greedy = text(0, temperature=0.0)
    assert torch.equal(greedy, text(5, temperature=0.0))
    assert greedy[0, 3] == model.forward(params, prompt)[0, -1].argmax()


def test_generation_draws_from_the_models_distribution():
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()

    def forward(params: None, tokens: torch.Tensor) -> torch.Tensor:
        return logits.expand(*tokens.shape, 4)

    prompt = torch.zeros(4000, 1, dtype=torch.int64)
    drawn = generate(forward, None, prompt, num_tokens=1, key=fp.random.key(0))[:, 1]
    share = drawn.bincount(minlength=4) / 4000
    torch.testing.assert_close(share, torch.tensor([0.1, 0.2, 0.3, 0.4]), atol=0.03, rtol=0)


@pytest.mark.parametrize(
    ("make", "found", "fix"),
    [
        (lambda: gpt.Config(dim=100, heads=3), "dim=100 is not a multiple of heads=3", "use dim=99"),
        (lambda: gpt.Config(layers=0), "layers=0", "layers >= 1"),
        (lambda: llama.Config(heads=4, kv_heads=3), "heads=4 is not a multiple of kv_heads=3", "heads=3"),
        (lambda: llama.Config(dim=12, heads=4), "4 heads of dim=12 are odd", "use dim=16"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(make, found, fix):
    with pytest.raises(ModelError, match=found) as error:
        make()
    assert fix in str(error.value).splitlines()[-1]


def test_more_tokens_than_positions_are_refused():
    params = gpt.init_params(fp.random.key(0), GPT)
    with pytest.raises(ModelError, match="8 tokens, but the model has 7 positions"):
        gpt.forward(params, torch.zeros(1, 8, dtype=torch.int64))


@pytest.mark.parametrize(("model", "cfg"), MODELS)
def test_the_annotations_are_the_shapes(model, cfg):
    checked = jaxtyped(typechecker=beartype)(model.forward)
    params, tokens = model.init_params(fp.random.key(0), cfg), make_batch(cfg.vocab)["tokens"]
    assert checked(params, tokens).shape == (3, 7, cfg.vocab)
    with pytest.raises(TypeCheckError):
        checked(params, tokens[0])
    with pytest.raises(TypeCheckError):
        checked(params, tokens.float())
