"""Llama: rotary positions, RMSNorm before each branch, grouped-query attention, a SwiGLU MLP, no biases.

Touvron et al. 2023 ("LLaMA: open and efficient foundation language models"), with the grouped key/value heads
of Llama 2. The logical axes are those of the GPT, and ``kv_heads`` for the key/value heads: with fewer
of them than tensor-parallel ranks, leave ``kv_heads`` out of the rules and they are replicated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

import fparallel as fp
from fparallel.models.layers import (
    ModelError,
    check_sizes,
    cross_entropy,
    project_in,
    project_out,
    repeat_heads,
    residual,
    self_attention,
)

__all__ = ["Attention", "Block", "Config", "Llama", "Mlp", "forward", "init_params", "loss", "rotary"]

_EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class Config:
    """The sizes of a Llama.

    Args:
        vocab: number of token ids.
        layers: number of blocks.
        dim: width of the residual stream.
        heads: query heads; divides ``dim`` into an even head dim.
        kv_heads: key/value heads; divides ``heads``, and is ``heads`` unless given.
        mlp: width of the gated hidden layer; unless given, 8/3 of ``dim`` rounded up to a multiple of 32.
        rope_theta: base of the rotary wavelengths.
        tie: the output head is the token embedding (one leaf, used twice).
    """

    vocab: int = 256
    layers: int = 4
    dim: int = 128
    heads: int = 4
    kv_heads: int | None = None
    mlp: int | None = None
    rope_theta: float = 10_000.0
    tie: bool = False

    def __post_init__(self) -> None:
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.mlp is None:
            object.__setattr__(self, "mlp", -(-8 * self.dim // (3 * 32)) * 32)
        check_sizes(self, multiples={"dim": "heads", "heads": "kv_heads"})
        if self.dim // self.heads % 2:
            raise ModelError(
                f"rotary positions turn pairs, but {self.heads} heads of dim={self.dim} are odd",
                fix=f"use dim={self.dim + self.heads}, or another number of heads",
            )


@fp.dataclass
class Attention:
    """Grouped-query attention (Ainslie et al. 2023): neighbouring query heads share one key/value head."""

    q: Float[Tensor, "embed heads head_dim"]
    k: Float[Tensor, "embed kv_heads head_dim"]
    v: Float[Tensor, "embed kv_heads head_dim"]
    out: Float[Tensor, "heads head_dim embed"]


@fp.dataclass
class Mlp:
    """``(silu(x @ gate) * (x @ up)) @ down`` (Shazeer 2020, "GLU variants improve transformer")."""

    gate: Float[Tensor, "embed mlp"]
    up: Float[Tensor, "embed mlp"]
    down: Float[Tensor, "mlp embed"]


@fp.dataclass
class Block:
    norm1: Float[Tensor, "embed"]
    attn: Attention
    norm2: Float[Tensor, "embed"]
    mlp: Mlp


@fp.dataclass
class Llama:
    tok: Float[Tensor, "vocab embed"]
    blocks: Annotated[list[Block], "layers"]
    norm: Float[Tensor, "embed"]
    head: Float[Tensor, "embed vocab"] | None
    rope_theta: float = fp.static(default=10_000.0)


def init_params(key: Tensor, cfg: Config, *, dtype: torch.dtype = torch.float32) -> Llama:
    """normal(0, 0.02), the branch outputs divided by ``sqrt(2 * layers)``, norms 1.

    Args:
        key: an ``fp.random`` key; every leaf draws from a key of its own.
        cfg: the sizes.
        dtype: of every leaf.
    """
    assert cfg.kv_heads is not None and cfg.mlp is not None  # Config filled them in
    d, h, g, hidden = cfg.dim, cfg.heads, cfg.kv_heads, cfg.mlp
    hd = d // h
    out_std = 0.02 / (2 * cfg.layers) ** 0.5

    def normal(key: Tensor, index: int, *shape: int, std: float = 0.02) -> Tensor:
        return fp.random.normal(fp.random.fold_in(key, index), shape, dtype=dtype) * std

    def block(key: Tensor) -> Block:
        return Block(
            norm1=torch.ones(d, dtype=dtype),
            attn=Attention(
                q=normal(key, 0, d, h, hd),
                k=normal(key, 1, d, g, hd),
                v=normal(key, 2, d, g, hd),
                out=normal(key, 3, h, hd, d, std=out_std),
            ),
            norm2=torch.ones(d, dtype=dtype),
            mlp=Mlp(
                gate=normal(key, 4, d, hidden),
                up=normal(key, 5, d, hidden),
                down=normal(key, 6, hidden, d, std=out_std),
            ),
        )

    return Llama(
        tok=normal(key, 0, cfg.vocab, d),
        blocks=[block(fp.random.fold_in(key, 2 + i)) for i in range(cfg.layers)],
        norm=torch.ones(d, dtype=dtype),
        head=None if cfg.tie else normal(key, 1, d, cfg.vocab),
        rope_theta=cfg.rope_theta,
    )


def rotary(length: int, head_dim: int, theta: float, *, like: Tensor) -> tuple[Tensor, Tensor]:
    """The cosines and sines of the rotary embedding, ``[T, 1, K / 2]`` each, of ``like``'s dtype and device.

    Position ``t`` turns pair ``i`` by ``t / theta ** (2 i / K)`` radians (Su et al. 2021, "RoFormer", section
    3.2.2). The angles are computed in float64: in float32 they lose digits with the position.
    """
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float64, device=like.device)
    positions = torch.arange(length, dtype=torch.float64, device=like.device)
    angles = (positions[:, None] * theta ** (-pairs / head_dim))[:, None, :]
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each pair (dim ``i``, dim ``i + K / 2``) of ``[B, T, H, K]`` by its angle."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin)), dim=-1)


def _rms_norm(x: Tensor, scale: Tensor) -> Tensor:
    """Zhang and Sennrich 2019, "Root mean square layer normalization"."""
    return F.rms_norm(x, scale.shape, scale, _EPS)


@fp.block
def block(
    p: Block, x: Float[Tensor, "batch seq embed"], cos: Tensor, sin: Tensor
) -> Float[Tensor, "batch seq embed"]:
    """One transformer layer: attention, then the MLP, each added to the residual stream."""
    y = _rms_norm(x, p.norm1)
    group = p.attn.q.shape[1] // p.attn.k.shape[1]
    q = _rotate(project_in(y, p.attn.q), cos, sin)
    k = repeat_heads(_rotate(project_in(y, p.attn.k), cos, sin), group)
    v = repeat_heads(project_in(y, p.attn.v), group)
    x = residual(x, project_out(self_attention(q, k, v), p.attn.out))
    y = _rms_norm(x, p.norm2)
    return residual(x, project_out(F.silu(project_in(y, p.mlp.gate)) * project_in(y, p.mlp.up), p.mlp.down))


def forward(params: Llama, tokens: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq vocab"]:
    """The logits of the next token at every position."""
    x = fp.with_sharding_constraint(F.embedding(tokens, params.tok), "batch seq embed")
    if params.blocks:
        head_dim = params.blocks[0].attn.q.shape[2]
        cos, sin = rotary(tokens.shape[1], head_dim, params.rope_theta, like=params.tok)
    for p in params.blocks:
        x = block(p, x, cos, sin)
    x = _rms_norm(x, params.norm)
    return project_in(x, params.tok.T if params.head is None else params.head)


def loss(params: Llama, batch: dict[str, Tensor]) -> fp.Mean:
    """The mean loss in nats per token over the targets that the mask keeps.

    Args:
        params: the parameters.
        batch: ``tokens`` and ``targets`` int64 ``[B, T]``, ``mask`` ``[B, T]``.
    """
    return cross_entropy(forward(params, batch["tokens"]), batch["targets"], batch["mask"])
