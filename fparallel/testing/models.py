"""Small models from a description: what the equivalence tests train, and a start for tests of your own.

A `Case` describes a model, its training step, the data, a mesh and rules in plain values; its `repr` is the Python that
makes it again. `build` gives the functions, `check` runs it both ways and compares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from fparallel import optim, random, tree
from fparallel.mesh import make_mesh
from fparallel.sharding import Rules
from fparallel.testing.equivalence import assert_equivalent
from fparallel.transforms import Mean, block, grad, value_and_grad, with_sharding_constraint
from fparallel.tree import TrainState

KINDS = (
    "mlp", "relu", "glu", "attention", "parallel", "mixer", "einsum", "custom", "inplace", "slices", "vmap", "jvp", "energy",
)  # fmt: skip
LOSSES = ("ce", "mean", "means", "mse", "sum", "vmap", "gather", "smooth", "ignore")
OPTIMIZERS = ("sgd", "momentum", "adamw", "lion", "manual", "frozen")
EXTRAS = ("unused", "zero_size", "scalar", "nested", "fixed", "dotted")


@dataclass(frozen=True)
class Block:
    """One block of a model.

    Attributes:
      kind: one of `KINDS`.
      residual: added to its input, or in its place.
      norm: "layer", "rms" or "".
      bias: whether the norm and the MLP have biases.
      outlined: whether it is an `fp.block`.
      constrain: whether "batch seq embed" is asked of its output.
      skip: 0, or from how many blocks before an edge comes in.
      dropout: probability.
    """

    kind: str = "mlp"
    residual: bool = True
    norm: str = "layer"
    bias: bool = False
    outlined: bool = True
    constrain: bool = False
    skip: int = 0
    dropout: float = 0.0


@dataclass(frozen=True)
class Case:
    """A training step, its data, a mesh and rules.

    Attributes:
      mesh: (axis, size) pairs.
      names: (logical name, axis or axes) pairs of the rules.
      zero: None, or (stage, axis or axes, min_elements).
      vocab, rows, seq, dim, hidden, heads, kv_heads, head_dim: sizes.
      blocks: see `Block`.
      tied: the output head is the embedding.
      extras: odd leaves, of `EXTRAS`.
      loss, optimizer: of `LOSSES` and `OPTIMIZERS`.
      mask: "ones", "random", "first" (only the first row counts) or "none" (no token counts).
      whole: integer-valued parameters and data, for comparisons bit for bit.
      state: "dict" or "TrainState".
      seed: of the key from which parameters and data are drawn.
      donate, steps: see `assert_equivalent`.
    """

    mesh: tuple[tuple[str, int], ...] = (("dp", 2),)
    names: tuple[tuple[str, Any], ...] = (("batch", "dp"),)
    zero: tuple[int, Any, int] | None = None
    vocab: int = 11
    rows: int = 2
    seq: int = 3
    dim: int = 4
    hidden: int = 8
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 2
    blocks: tuple[Block, ...] = (Block(),)
    tied: bool = True
    extras: tuple[str, ...] = ()
    loss: str = "mean"
    optimizer: str = "momentum"
    mask: str = "random"
    whole: bool = False
    state: str = "TrainState"
    seed: int = 0
    donate: bool = False
    steps: int = 1

    def __repr__(self) -> str:
        """Only what is not the default."""
        return _short_repr(self)


def _short_repr(value: Any) -> str:
    if isinstance(value, (Case, Block)):
        kind = type(value)
        given = [(n, getattr(value, n)) for n in kind.__dataclass_fields__ if getattr(value, n) != getattr(kind(), n)]
        return f"{kind.__name__}({', '.join(f'{n}={_short_repr(v)}' for n, v in given)})"
    if isinstance(value, tuple):
        return "(" + "".join(f"{_short_repr(v)}, " for v in value).removesuffix(" " if len(value) == 1 else ", ") + ")"
    return repr(value)


@dataclass(frozen=True)
class Problem:
    """What a `Case` describes: `step(*args)`, `init(key)` for the first argument, mesh and rules."""

    init: Callable[[Tensor], Any]
    step: Callable[..., Any]
    args: tuple[Any, ...]
    mesh: Any
    rules: Rules


# ---------------------------------------------------------------- parameters


@tree.dataclass
class Norm:
    scale: Float[Tensor, "embed"]
    bias: Float[Tensor, "embed"] | None


@tree.dataclass
class Mlp:
    norm: Norm | None
    up: Float[Tensor, "embed mlp"]
    down: Float[Tensor, "mlp embed"]
    up_bias: Float[Tensor, "mlp"] | None
    down_bias: Float[Tensor, "embed"] | None


@tree.dataclass
class Glu:
    norm: Norm | None
    gate: Float[Tensor, "embed mlp"]
    up: Float[Tensor, "embed mlp"]
    down: Float[Tensor, "mlp embed"]


@tree.dataclass
class Attention:
    norm: Norm | None
    q: Float[Tensor, "embed heads head_dim"]
    k: Float[Tensor, "embed kv_heads head_dim"]
    v: Float[Tensor, "embed kv_heads head_dim"]
    out: Float[Tensor, "heads head_dim embed"]


@tree.dataclass
class Parallel:
    norm: Norm | None
    attn: Attention
    mlp: Mlp


@tree.dataclass
class Mixer:
    norm: Norm | None
    mix: Float[Tensor, "positions positions"]
    scale: Float[Tensor, "embed"]


@tree.dataclass
class Model:
    tok: Float[Tensor, "vocab embed"]
    blocks: Annotated[list[Any], "layers"]
    norm: Norm | None
    head: Float[Tensor, "embed vocab"] | None
    extras: dict[str, Any]


class _Draw:
    """Draws leaves, each from a key of its own."""

    def __init__(self, key: Tensor, whole: bool) -> None:
        self.key, self.whole, self.count = key, whole, 0

    def __call__(self, *shape: int) -> Tensor:
        self.count += 1
        key = random.fold_in(self.key, self.count)
        if self.whole:
            return random.randint(key, shape, -2, 3).to(torch.float64)
        return random.normal(key, shape, dtype=torch.float64) * 0.5


def _init_norm(b: Block, c: Case, draw: _Draw) -> Norm | None:
    if not b.norm:
        return None
    return Norm(1 + 0.1 * draw(c.dim), draw(c.dim) if b.bias and b.norm == "layer" else None)


def _init_block(b: Block, c: Case, draw: _Draw) -> Any:
    d, m, h, g, k = c.dim, c.hidden, c.heads, c.kv_heads, c.head_dim
    norm = _init_norm(b, c, draw)
    if b.kind == "glu":
        return Glu(norm, draw(d, m), draw(d, m), draw(m, d))
    attn = Attention(norm, draw(d, h, k), draw(d, g, k), draw(d, g, k), draw(h, k, d))
    if b.kind == "attention":
        return attn
    mlp = Mlp(norm, draw(d, m), draw(m, d), draw(m) if b.bias else None, draw(d) if b.bias else None)
    if b.kind == "parallel":
        return Parallel(norm, attn.replace(norm=None), mlp.replace(norm=None))
    if b.kind == "mixer":
        return Mixer(norm, draw(c.seq, c.seq), draw(d))
    return mlp


def _init_extras(c: Case, draw: _Draw) -> dict[str, Any]:
    made: dict[str, Any] = {
        "unused": lambda: draw(3, 5),
        "zero_size": lambda: [draw(0, 4), draw(5, 0)],
        "scalar": lambda: draw(),
        "nested": lambda: {"a": (draw(2), [draw(c.dim), None]), "b": [{}, {"c": draw(1, 3)}]},
        "fixed": lambda: draw(c.dim),
        "dotted": lambda: {"0.weight": draw(c.dim), "1.weight": draw(7)},
    }
    return {name: made[name]() for name in c.extras}


def _use_extras(extras: dict[str, Any], x: Tensor) -> Tensor:
    """Reads every extra leaf but those that are meant to be unused."""
    if "scalar" in extras:
        x = x * extras["scalar"] + x
    if "nested" in extras:
        (pair, (scale, _)), (_, last) = extras["nested"]["a"], extras["nested"]["b"]
        x = x * scale + pair.sum() * last["c"].mean()
    if "zero_size" in extras:
        x = x + sum(leaf.sum() for leaf in extras["zero_size"])
    if "fixed" in extras:
        x = x + extras["fixed"]
    if "dotted" in extras:
        x = x - extras["dotted"]["0.weight"]
    return x


# ---------------------------------------------------------------- blocks


def _normed(b: Block, p: Any, x: Tensor) -> Tensor:
    if p.norm is None:
        return x
    if b.norm == "rms":
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * p.norm.scale
    return F.layer_norm(x, p.norm.scale.shape, p.norm.scale, p.norm.bias)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x @ weight if bias is None else x @ weight + bias


def _attention(p: Attention, x: Tensor, c: Case, rope: tuple[Tensor, Tensor] | None) -> Tensor:
    rows, length, _ = x.shape

    def project(weight: Tensor) -> Tensor:
        return (x @ weight.flatten(1)).view(rows, length, *weight.shape[1:]).transpose(1, 2)

    q, k, v = project(p.q), project(p.k), project(p.v)
    if rope is not None:
        q, k = _rotate(q, *rope), _rotate(k, *rope)
    times = c.heads // c.kv_heads
    gqa = times > 1 and c.seed % 2 == 0
    if times > 1 and not gqa:
        k, v = (y.unsqueeze(2).expand(-1, -1, times, -1, -1).flatten(1, 2) for y in (k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
    return y.transpose(1, 2).reshape(rows, length, -1) @ p.out.flatten(0, 1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def rope_tables(length: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin of rotary position embeddings, each f64[length, head_dim] (Su et al. 2021, section 3.2.2)."""
    angles = torch.arange(length)[:, None] / 100.0 ** (torch.arange(head_dim // 2) / max(1, head_dim // 2))
    both = torch.cat([angles, angles], -1).to(torch.float64)
    return both.cos(), both.sin()


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 0.1 * x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 0.3 * x * x


def _shift(y: Tensor) -> Tensor:
    y = y.clone()
    y[:, 1:] += 0.5 * y[:, :-1].clone()
    y.mul_(0.5).tanh_()
    return y


def _write_slices(y: Tensor) -> Tensor:
    out = torch.zeros_like(y)
    half = y.shape[-1] // 2
    out[..., :half] = y[..., :half] * 2
    out[..., half:] = y[..., half:].relu()
    out[:, 0] = 1.0
    return out


def _update(b: Block, c: Case, p: Any, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
    """What a block adds to the residual stream f64[batch, seq, embed]."""
    x = _normed(b, p, x)
    if b.kind == "glu":
        return (F.silu(x @ p.gate) * (x @ p.up)) @ p.down
    if b.kind == "attention":
        return _attention(p, x, c, rope)
    if b.kind == "parallel":
        return _attention(p.attn, x, c, rope) + F.gelu(x @ p.mlp.up) @ p.mlp.down
    if b.kind == "mixer":
        return torch.einsum("btd,ts->bsd", x, p.mix) * p.scale
    if b.kind == "einsum":
        y = torch.einsum("btd,dm->btm", rearrange(rearrange(x, "b t d -> (b t) d"), "(b t) d -> b t d", t=x.shape[1]), p.up)
        return torch.einsum("btm,md->btd", y.sigmoid(), p.down)
    if b.kind == "vmap":
        return torch.func.vmap(lambda row: torch.tanh(_linear(row, p.up, p.up_bias)) @ p.down)(x)
    if b.kind == "jvp":
        return torch.func.jvp(lambda y: torch.tanh(y @ p.up) @ p.down, (x,), (torch.ones_like(x),))[1]
    if b.kind == "energy":
        return grad(lambda y: (torch.tanh(y @ p.up) ** 2).sum())(x)
    hidden = _linear(x, p.up, p.up_bias)
    act: dict[str, Callable[[Tensor], Tensor]] = {
        "mlp": F.gelu, "relu": torch.relu, "custom": _Cube.apply, "inplace": _shift, "slices": _write_slices,
    }  # fmt: skip
    return _linear(act[b.kind](hidden), p.down, p.down_bias)


def _make_block(b: Block, c: Case) -> Callable[[Any, Tensor], Tensor]:
    rope = rope_tables(c.seq, c.head_dim) if c.head_dim % 2 == 0 and b.kind in ("attention", "parallel") else None

    def run(p: Any, x: Tensor) -> Tensor:
        y = _update(b, c, p, x, rope)
        if b.dropout:
            y = F.dropout(y, b.dropout)
        if b.residual:
            y = x + y
        return with_sharding_constraint(y, "batch seq embed") if b.constrain else y

    run.__name__ = b.kind
    return block(run) if b.outlined else run


# ---------------------------------------------------------------- the step


def _losses(c: Case, x: Tensor, logits: Tensor, batch: dict[str, Tensor]) -> Any:
    flat, targets = logits.flatten(0, 1), batch["targets"].flatten()
    if c.loss == "ce":
        return F.cross_entropy(flat, targets)
    if c.loss == "smooth":
        return F.cross_entropy(flat, targets, label_smoothing=0.1)
    if c.loss == "ignore":
        kept = torch.where(batch["mask"].flatten() > 0, targets, -100)
        return F.cross_entropy(flat, kept, reduction="sum") / batch["mask"].numel()
    if c.loss == "mse":
        return F.mse_loss(x, batch["values"])
    if c.loss == "sum":
        return (logits * batch["values"].sum(-1, keepdim=True)).sum()
    if c.loss == "gather":
        return -logits.log_softmax(-1).gather(-1, batch["targets"].unsqueeze(-1)).mean()
    if c.loss == "vmap":
        return torch.func.vmap(lambda row, y: F.cross_entropy(row, y))(logits, batch["targets"]).mean()
    nll = F.cross_entropy(flat, targets, reduction="none")
    mask = batch["mask"].flatten()
    mean = Mean((nll * mask).sum(), mask.sum())
    if c.loss == "means":
        return mean + 0.25 * Mean((logits.logsumexp(-1).square()).sum(), batch["tokens"].numel() * torch.ones(()))
    return mean


def _optimizer(c: Case) -> Any:
    if c.optimizer == "adamw":
        return optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.05))
    if c.optimizer == "lion":
        return optim.lion(0.05)
    if c.optimizer == "frozen":
        kinds = {"train": optim.sgd(0.05), "freeze": optim.set_to_zero()}
        return optim.multi_transform(kinds, lambda params: tree.map_with_path(
            lambda path, _: "freeze" if path == "tok" or "up" in path else "train", params))  # fmt: skip
    return optim.sgd(0.125, momentum=0.5 if c.optimizer == "momentum" else None)


def _manual(params: Any, grads: Any, momentum: Any) -> tuple[Any, Any]:
    """SGD with momentum and decay, written out."""
    momentum = tree.map(lambda m, g: 0.5 * m + g, momentum, grads)
    return tree.map(lambda p, m: p - 0.125 * (m + 0.25 * p), params, momentum), momentum


def build(c: Case) -> Problem:
    """The functions, arguments, mesh and rules of a case."""
    mesh = make_mesh([size for _, size in c.mesh], [name for name, _ in c.mesh], kind="simulated")
    rules = Rules(**dict(c.names))
    if c.zero is not None:
        rules = rules.zero(c.zero[0], axis=c.zero[1], min_elements=c.zero[2])
    runs = [_make_block(b, c) for b in c.blocks]
    drops = any(b.dropout for b in c.blocks)
    tx = _optimizer(c)
    final = Block(norm="" if c.whole else "layer")

    def init(key: Tensor) -> Any:
        draw = _Draw(key, c.whole)
        params = Model(
            tok=draw(c.vocab, c.dim), blocks=[_init_block(b, c, draw) for b in c.blocks], norm=_init_norm(final, c, draw),
            head=None if c.tied else draw(c.dim, c.vocab), extras=_init_extras(c, draw),
        )  # fmt: skip
        opt_state = tree.map(torch.zeros_like, params) if c.optimizer == "manual" else tx.init(params)
        if c.state == "dict":
            return {"step": 0, "params": params, "opt_state": opt_state, "key": key}
        return TrainState(step=0, params=params, opt_state=opt_state, key=key)

    def loss(params: Model, batch: dict[str, Tensor], frozen: Any) -> tuple[Any, Any]:
        x = F.embedding(batch["tokens"], params.tok)
        if frozen is not None:
            x = x + frozen["pos"]
        x = _use_extras(params.extras, x)
        history = [x]
        for b, run, p in zip(c.blocks, runs, params.blocks, strict=True):
            x = run(p, x)
            if b.skip:
                x = x + history[max(0, len(history) - b.skip)]
            history.append(x)
        if params.norm is not None:
            x = _normed(final, params, x)
        logits = x @ (params.tok.T if params.head is None else params.head)
        aux = {"largest": logits.amax(), "mean": x.sum() if c.whole else x.mean(), "rows": x.sum((1, 2))}
        return _losses(c, x, logits, batch), aux

    def step(state: Any, batch: dict[str, Tensor], frozen: Any = None) -> Any:
        get = state.__getitem__ if c.state == "dict" else lambda name: getattr(state, name)
        params, key = get("params"), get("key")
        if drops:
            with random.use(random.fold_in(key, get("step"))):
                (value, aux), grads = value_and_grad(loss, has_aux=True)(params, batch, frozen)
        else:
            (value, aux), grads = value_and_grad(loss, has_aux=True)(params, batch, frozen)
        if c.optimizer == "manual":
            params, opt_state = _manual(params, grads, get("opt_state"))
        else:
            updates, opt_state = tx.update(grads, get("opt_state"), params)
            params = optim.apply_updates(params, updates)
        new = {"step": get("step") + 1, "params": params, "opt_state": opt_state, "key": key + 0}
        state = new if c.state == "dict" else TrainState(**new)
        return state, {"loss": value, "grads": grads, "aux": aux}

    key = random.key(c.seed)
    frozen = ({"pos": _Draw(random.fold_in(key, 7), c.whole)(c.seq, c.dim)},) if "frozen" in c.optimizer else ()
    return Problem(init, step, (key, _batch(c, random.fold_in(key, 5)), *frozen), mesh, rules)


def _batch(c: Case, key: Tensor) -> dict[str, Tensor]:
    """Tokens, targets int64[rows, seq]; mask f64[rows, seq]; values f64[rows, seq, dim]."""
    shape = (c.rows, c.seq)
    tokens, targets = (random.randint(random.fold_in(key, i), shape, 0, c.vocab) for i in (0, 1))
    mask = (random.uniform(random.fold_in(key, 2), shape) < 0.5).to(torch.float64)
    if c.mask == "first":
        mask = torch.zeros(shape, dtype=torch.float64)
        mask[0] = 1
    elif c.mask != "random":
        mask = torch.full(shape, 1.0 if c.mask == "ones" else 0.0, dtype=torch.float64)
    values = _Draw(random.fold_in(key, 3), c.whole)(*shape, c.dim)
    return {"tokens": tokens, "targets": targets, "mask": mask, "values": values}


def check(case: Case, *, jit_init: bool = False, **options: Any) -> Any:
    """Asserts that a case gives on its mesh what it gives on one device: loss, gradients, new state and metrics.

    Args:
      jit_init: also make the state under `fp.jit` on the mesh, and compare it bit for bit.
      options: see `assert_equivalent`.

    Raises:
      EquivalenceError: with `check(Case(...))` as the line that reproduces it.
    """
    problem = build(case)
    args = problem.args if jit_init else (problem.init(problem.args[0]), *problem.args[1:])
    return assert_equivalent(
        problem.step, args, mesh=problem.mesh, rules=problem.rules, init=problem.init if jit_init else None,
        steps=case.steps, donate=case.donate, exact=case.whole, repro=f"fp.testing.check({case!r})", **options,
    )  # fmt: skip
