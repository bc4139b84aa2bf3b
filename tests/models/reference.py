"""The same networks as torch modules, written the way a torch user would write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fparallel.models import gpt, llama


class GptBlock(nn.Module):
    def __init__(self, dim: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim, bias=bias), nn.LayerNorm(dim, bias=bias)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=bias), nn.Linear(dim, dim, bias=bias)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=bias), nn.Linear(4 * dim, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / (d // self.heads) ** 0.5
        causal = torch.ones(t, t, dtype=torch.bool).tril()
        y = scores.masked_fill(~causal, -torch.inf).softmax(-1) @ v
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, cfg: gpt.Config) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(cfg.vocab, cfg.dim), nn.Embedding(cfg.seq, cfg.dim)
        self.blocks = nn.ModuleList(GptBlock(cfg.dim, cfg.heads, cfg.bias) for _ in range(cfg.layers))
        self.ln = nn.LayerNorm(cfg.dim, bias=cfg.bias)
        self.head = nn.Linear(cfg.dim, cfg.vocab, bias=False)
        if cfg.tie:
            self.head.weight = self.tok.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


def gpt_params(net: Gpt) -> gpt.GPT:
    """The module's weights (views of them) as the pytree of the pure function."""

    def norm(m: nn.LayerNorm) -> gpt.Norm:
        return gpt.Norm(scale=m.weight, bias=m.bias)

    def block(m: GptBlock) -> gpt.Block:
        d, h = m.out.weight.shape[0], m.heads
        qkv = m.qkv.weight.mT.unflatten(1, (3, h, d // h)).transpose(1, 2)
        bias = None if m.qkv.bias is None else m.qkv.bias.unflatten(0, (3, h, d // h)).transpose(0, 1)
        out = m.out.weight.mT.unflatten(0, (h, d // h))
        attn = gpt.Attention(qkv, out, bias, m.out.bias)
        mlp = gpt.Mlp(m.up.weight.mT, m.down.weight.mT, m.up.bias, m.down.bias)
        return gpt.Block(norm(m.ln1), attn, norm(m.ln2), mlp)

    head = None if net.head.weight is net.tok.weight else net.head.weight.mT
    return gpt.GPT(net.tok.weight, net.pos.weight, [block(m) for m in net.blocks], norm(net.ln), head)


def llama_logits(params: llama.Llama, tokens: Tensor) -> Tensor:
    """Llama from its equations: complex rotations, one loop over query heads, no fused attention."""
    x = params.tok[tokens]
    t = tokens.shape[1]

    def rms(x: Tensor, scale: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * scale

    def rotate(x: Tensor) -> Tensor:  # [B, T, K]
        half = x.shape[-1] // 2
        angle = torch.arange(t)[:, None] / params.rope_theta ** (torch.arange(half, dtype=x.dtype) / half)
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * angle)
        return torch.cat((turned.real, turned.imag), dim=-1)

    for p in params.blocks:
        y = rms(x, p.norm1)
        heads, groups = p.attn.q.shape[1], p.attn.k.shape[1]
        for h in range(heads):
            g = h // (heads // groups)
            q, k, v = rotate(y @ p.attn.q[:, h]), rotate(y @ p.attn.k[:, g]), y @ p.attn.v[:, g]
            scores = q @ k.mT / q.shape[-1] ** 0.5
            scores = scores.masked_fill(~torch.ones(t, t, dtype=torch.bool).tril(), -torch.inf)
            x = x + scores.softmax(-1) @ v @ p.attn.out[h]
        y = rms(x, p.norm2)
        x = x + (F.silu(y @ p.mlp.gate) * (y @ p.mlp.up)) @ p.mlp.down
    return rms(x, params.norm) @ (params.tok.mT if params.head is None else params.head)
