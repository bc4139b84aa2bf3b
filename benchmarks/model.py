"""The network as a torch user writes it, and the optimizer that a torch user on a CPU would pick."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import work
from benchmarks.work import Config

__all__ = ["GPT", "adamw", "init_"]


class Attention(nn.Module):
    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.head_dim = cfg.dim // cfg.heads
        self.qkv = nn.Linear(cfg.dim, 3 * cfg.dim)
        self.out = nn.Linear(cfg.dim, cfg.dim)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        # -1: the number of heads held here, half of them under TP=2
        qkv = self.qkv(x).view(b, t, -1, 3 * self.head_dim).transpose(1, 2)
        q, k, v = qkv.split(self.head_dim, dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, -1))


class MLP(nn.Module):
    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.up = nn.Linear(cfg.dim, 4 * cfg.dim)
        self.down = nn.Linear(4 * cfg.dim, cfg.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(cfg.dim)
        self.attn = Attention(cfg)
        self.ln2 = nn.LayerNorm(cfg.dim)
        self.mlp = MLP(cfg)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Embed(nn.Module):
    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.tok = nn.Embedding(cfg.vocab, cfg.dim)
        self.pos = nn.Embedding(cfg.seq, cfg.dim)

    def forward(self, idx: Tensor) -> Tensor:
        return self.tok(idx) + self.pos(torch.arange(idx.shape[1], device=idx.device))


class Head(nn.Module):
    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(cfg.dim)
        self.proj = nn.Linear(cfg.dim, cfg.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.ln(x))


class GPT(nn.Module):
    """`forward(idx, targets)` is the mean token loss."""

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.embed = Embed(cfg)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.layers))
        self.head = Head(cfg)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(idx)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Stage(nn.Module):
    """One of the equal parts of GPT for a pipeline; its parameters have GPT's names."""

    def __init__(self, cfg: Config, stage: int, stages: int) -> None:
        super().__init__()
        layers = range(cfg.layers * stage // stages, cfg.layers * (stage + 1) // stages)
        self.embed = Embed(cfg) if stage == 0 else None
        self.blocks = nn.ModuleDict({str(i): Block(cfg) for i in layers})
        self.head = Head(cfg) if stage == stages - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) if self.embed is not None else x
        for block in self.blocks.values():
            x = block(x)
        return self.head(x) if self.head is not None else x


@torch.no_grad()
def init_(module: nn.Module, cfg: Config) -> nn.Module:
    """Gives every parameter its initial value, in place, by its name."""
    for name, p in module.named_parameters():
        p.copy_(torch.from_numpy(work.init_value(cfg, name, tuple(p.shape))))
    return module


def adamw(params: Any, **kwargs: Any) -> torch.optim.AdamW:
    """AdamW, fused: torch's default on a CPU, a loop over leaves, is ten times slower."""
    options = {"lr": work.LR, "betas": work.BETAS, "eps": work.EPS, "weight_decay": work.WEIGHT_DECAY}
    return torch.optim.AdamW(params, **{"fused": True, **options, **kwargs})
