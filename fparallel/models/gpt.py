"""GPT: learned positions, LayerNorm before each branch, causal attention, a GELU MLP.

The architecture and the initial values of GPT-2 (Radford et al. 2019, "Language models are unsupervised
multitask learners"). Parameters are a pytree, the model is a function of it, and the names in the annotations
are the logical axes that rules shard: ``vocab``, ``positions``, ``embed``, ``heads``, ``qkv``, ``head_dim``,
``mlp``, ``layers``; activations are ``batch seq embed``.
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
    residual,
    self_attention,
)

__all__ = ["GPT", "Attention", "Block", "Config", "Mlp", "Norm", "forward", "init_params", "loss"]


@dataclass(frozen=True, kw_only=True)
class Config:
    """The sizes of a GPT.

    Args:
        vocab: number of token ids.
        seq: longest sequence; the number of learned positions.
        layers: number of blocks.
        dim: width of the residual stream.
        heads: attention heads; divides ``dim``.
        mlp: width of the hidden layer, ``4 * dim`` unless given.
        bias: biases on the linear maps and on LayerNorm. The output head never has one.
        tie: the output head is the token embedding (one leaf, used twice).
    """

    vocab: int = 256
    seq: int = 256
    layers: int = 4
    dim: int = 128
    heads: int = 4
    mlp: int | None = None
    bias: bool = True
    tie: bool = True

    def __post_init__(self) -> None:
        check_sizes(self, multiples={"dim": "heads"})


@fp.dataclass
class Norm:
    """LayerNorm over ``embed`` (Ba et al. 2016)."""

    scale: Float[Tensor, "embed"]
    bias: Float[Tensor, "embed"] | None


@fp.dataclass
class Attention:
    """Multi-head causal self-attention (Vaswani et al. 2017); query, key and value are one matrix, by head."""

    qkv: Float[Tensor, "embed heads qkv head_dim"]
    out: Float[Tensor, "heads head_dim embed"]
    qkv_bias: Float[Tensor, "heads qkv head_dim"] | None
    out_bias: Float[Tensor, "embed"] | None


@fp.dataclass
class Mlp:
    """``gelu(x @ up) @ down``, with the tanh form of GELU (Hendrycks and Gimpel 2016)."""

    up: Float[Tensor, "embed mlp"]
    down: Float[Tensor, "mlp embed"]
    up_bias: Float[Tensor, "mlp"] | None
    down_bias: Float[Tensor, "embed"] | None


@fp.dataclass
class Block:
    norm1: Norm
    attn: Attention
    norm2: Norm
    mlp: Mlp


@fp.dataclass
class GPT:
    tok: Float[Tensor, "vocab embed"]
    pos: Float[Tensor, "positions embed"]
    blocks: Annotated[list[Block], "layers"]
    norm: Norm
    head: Float[Tensor, "embed vocab"] | None


def init_params(key: Tensor, cfg: Config, *, dtype: torch.dtype = torch.float32) -> GPT:
    """GPT-2's initial values: normal(0, 0.02), the branch outputs divided by ``sqrt(2 * layers)``, biases 0.

    Args:
        key: an ``fp.random`` key; every leaf draws from a key of its own.
        cfg: the sizes.
        dtype: of every leaf.
    """

    def normal(key: Tensor, index: int, *shape: int, std: float = 0.02) -> Tensor:
        return fp.random.normal(fp.random.fold_in(key, index), shape, dtype=dtype) * std

    def zeros(*shape: int) -> Tensor | None:
        return torch.zeros(shape, dtype=dtype) if cfg.bias else None

    def norm() -> Norm:
        return Norm(scale=torch.ones(d, dtype=dtype), bias=zeros(d))

    def block(key: Tensor) -> Block:
        attn = Attention(
            qkv=normal(key, 0, d, h, 3, hd),
            out=normal(key, 1, h, hd, d, std=out_std),
            qkv_bias=zeros(h, 3, hd),
            out_bias=zeros(d),
        )
        mlp = Mlp(
            up=normal(key, 2, d, hidden),
            down=normal(key, 3, hidden, d, std=out_std),
            up_bias=zeros(hidden),
            down_bias=zeros(d),
        )
        return Block(norm1=norm(), attn=attn, norm2=norm(), mlp=mlp)

    d, h, hidden = cfg.dim, cfg.heads, cfg.mlp or 4 * cfg.dim
    hd = d // h
    out_std = 0.02 / max(1, 2 * cfg.layers) ** 0.5
    return GPT(
        tok=normal(key, 0, cfg.vocab, d),
        pos=normal(key, 1, cfg.seq, d),
        blocks=[block(fp.random.fold_in(key, 3 + i)) for i in range(cfg.layers)],
        norm=norm(),
        head=None if cfg.tie else normal(key, 2, d, cfg.vocab),
    )


def _layer_norm(p: Norm, x: Tensor) -> Tensor:
    return F.layer_norm(x, p.scale.shape, p.scale, p.bias)


@fp.block
def block(p: Block, x: Float[Tensor, "batch seq embed"]) -> Float[Tensor, "batch seq embed"]:
    """One transformer layer: attention, then the MLP, each added to the residual stream."""
    y = _layer_norm(p.norm1, x)
    q, k, v = project_in(y, p.attn.qkv, p.attn.qkv_bias).unbind(-2)
    x = residual(x, project_out(self_attention(q, k, v), p.attn.out, p.attn.out_bias))
    y = F.gelu(project_in(_layer_norm(p.norm2, x), p.mlp.up, p.mlp.up_bias), approximate="tanh")
    return residual(x, project_out(y, p.mlp.down, p.mlp.down_bias))


def forward(params: GPT, tokens: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq vocab"]:
    """The logits of the next token at every position."""
    length = tokens.shape[1]
    if length > params.pos.shape[0]:
        raise ModelError(
            f"{length} tokens, but the model has {params.pos.shape[0]} positions",
            fix=f"build it with Config(seq={length}) or pass shorter sequences",
        )
    x = F.embedding(tokens, params.tok) + params.pos[:length]
    x = fp.with_sharding_constraint(x, "batch seq embed")
    for p in params.blocks:
        x = block(p, x)
    x = _layer_norm(params.norm, x)
    return project_in(x, params.tok.T if params.head is None else params.head)


def loss(params: GPT, batch: dict[str, Tensor]) -> fp.Mean:
    """The mean loss in nats per token over the targets that the mask keeps.

    Args:
        params: the parameters.
        batch: ``tokens`` and ``targets`` int64 ``[B, T]``, ``mask`` ``[B, T]``.
    """
    return cross_entropy(forward(params, batch["tokens"]), batch["targets"], batch["mask"])
