"""Small models of every kind that a `Case` can describe: their parameters and their blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from fparallel import random, tree
from fparallel.testing.descriptions import Block, Case
from fparallel.testing.small_modules import MODULES, init_module, run_module
from fparallel.transforms import block, grad, with_sharding_constraint

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


class Draw:
    """Draws leaves, each from a key of its own."""

    def __init__(self, key: Tensor, whole: bool) -> None:
        self.key, self.whole, self.count = key, whole, 0

    def __call__(self, *shape: int) -> Tensor:
        self.count += 1
        key = random.fold_in(self.key, self.count)
        if self.whole:
            return random.randint(key, shape, -2, 3).to(torch.float64)
        return random.normal(key, shape, dtype=torch.float64) * 0.5


def init_norm(b: Block, c: Case, draw: Draw) -> Norm | None:
    """The norm of a block, or None."""
    if not b.norm:
        return None
    return Norm(1 + 0.1 * draw(c.dim), draw(c.dim) if b.bias and b.norm == "layer" else None)


def init_block(b: Block, c: Case, draw: Draw) -> Any:
    """The parameters of a block."""
    d, m, h, g, k = c.dim, c.hidden, c.heads, c.kv_heads, c.head_dim
    if b.kind in MODULES:
        return init_module(b, c, draw)
    norm = init_norm(b, c, draw)
    if b.kind == "glu":
        return Glu(norm, draw(d, m), draw(d, m), draw(m, d))
    inner = None if b.kind == "parallel" else norm  # parallel branches share the norm of their block
    attn = Attention(inner, draw(d, h, k), draw(d, g, k), draw(d, g, k), draw(h, k, d))
    if b.kind == "attention":
        return attn
    mlp = Mlp(inner, draw(d, m), draw(m, d), draw(m) if b.bias else None, draw(d) if b.bias else None)
    if b.kind == "parallel":
        return Parallel(norm, attn, mlp)
    if b.kind == "mixer":
        return Mixer(norm, draw(c.seq, c.seq), draw(d))
    return mlp


def init_extras(c: Case, draw: Draw) -> dict[str, Any]:
    """The odd leaves of a case."""
    made: dict[str, Any] = {
        "unused": lambda: draw(3, 5),
        "zero_size": lambda: [draw(0, 4), draw(5, 0)],
        "scalar": lambda: draw(),
        "nested": lambda: {"a": (draw(2), [draw(c.dim), None]), "b": [{}, {"c": draw(1, 3)}]},
        "fixed": lambda: draw(c.dim),
        "dotted": lambda: {"0.weight": draw(c.dim), "1.weight": draw(7)},
    }
    return {name: made[name]() for name in c.extras}


def use_extras(extras: dict[str, Any], x: Tensor) -> Tensor:
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


def feature(values: Tensor) -> Tensor:
    """Of f64[rows, seq, dim] the same shape: two products of matrices of 56 x 56 for each row, to make it expensive."""
    first = torch.tanh(values.flatten(1))
    table = torch.cos(torch.arange(56, dtype=torch.float64).outer(1.0 + torch.arange(56))) / 8
    wide = first.sum(1)[:, None, None] * table + 0.1
    mixed = torch.tanh(torch.tanh(wide @ wide) @ wide).sum(2)
    return values * mixed.mean(1)[:, None, None] / 8


# ---------------------------------------------------------------- blocks


def normed(b: Block, p: Any, x: Tensor) -> Tensor:
    """The block's norm of x f64[..., embed]."""
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
    """cos and sin of rotary embeddings, each f64[length, head_dim] (Su et al. 2021, section 3.2.2)."""
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
    if b.kind in MODULES:
        return run_module(b, c, p, x)
    x = normed(b, p, x)
    if b.kind == "glu":
        return (F.silu(x @ p.gate) * (x @ p.up)) @ p.down
    if b.kind == "attention":
        return _attention(p, x, c, rope)
    if b.kind == "parallel":
        return _attention(p.attn, x, c, rope) + F.gelu(x @ p.mlp.up) @ p.mlp.down
    if b.kind == "mixer":
        return torch.einsum("btd,ts->bsd", x, p.mix) * p.scale
    if b.kind == "einsum":
        y = torch.einsum(
            "btd,dm->btm", rearrange(rearrange(x, "b t d -> (b t) d"), "(b t) d -> b t d", t=x.shape[1]), p.up
        )
        return torch.einsum("btm,md->btd", y.sigmoid(), p.down)
    if b.kind == "vmap":
        return torch.func.vmap(lambda row: torch.tanh(_linear(row, p.up, p.up_bias)) @ p.down)(x)
    if b.kind == "jvp":
        return torch.func.jvp(lambda y: torch.tanh(y @ p.up) @ p.down, (x,), (torch.ones_like(x),))[1]
    if b.kind == "energy":
        return grad(lambda y: (torch.tanh(y @ p.up) ** 2).sum())(x)
    hidden = _linear(x, p.up, p.up_bias)
    act: dict[str, Callable[[Tensor], Tensor]] = {
        "mlp": F.gelu,
        "relu": torch.relu,
        "custom": _Cube.apply,
        "inplace": _shift,
        "slices": _write_slices,
    }
    return _linear(act[b.kind](hidden), p.down, p.down_bias)


def make_block(b: Block, c: Case) -> Callable[[Any, Tensor], Tensor]:
    """The function (parameters, x) -> x of a block."""
    rope = (
        rope_tables(c.seq, c.head_dim)
        if c.head_dim % 2 == 0 and b.kind in ("attention", "parallel")
        else None
    )

    def run(p: Any, x: Tensor) -> Tensor:
        y = _update(b, c, p, x, rope)
        if b.dropout:
            y = F.dropout(y, b.dropout)
        if b.residual:
            y = x + y
        return with_sharding_constraint(y, "batch seq embed") if b.constrain else y

    run.__name__ = b.kind
    return block(run) if b.outlined else run
