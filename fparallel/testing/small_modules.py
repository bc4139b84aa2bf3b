"""Small `torch.nn` modules as blocks of a `Case`: their parameters as trees, run by `torch.func.functional_call`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fparallel import tree
from fparallel.testing.descriptions import Block, Case

MODULES = ("linear", "encoder", "subclass")


@tree.dataclass
class Weights:
    """The parameters of a module by name; a name may have dots."""

    weights: dict[str, Tensor]


class _Gated(nn.Module):
    """A norm over the sharded dim, a submodule under two names, a buffer."""

    scale: Tensor

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.down = nn.Linear(hidden, dim, bias=False)
        self.again = self.up
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.sigmoid(self.norm(self.up(x))) * self.again(x)) * self.scale


def _encoder_heads(c: Case) -> int:
    return max(n for n in (1, 2, 3, 4) if c.dim % n == 0)


@functools.cache
def make_module(kind: str, c: Case) -> nn.Module:
    """The module of a block; its own parameters are never read."""
    with torch.random.fork_rng(devices=[]):
        if kind == "encoder":
            return nn.TransformerEncoderLayer(
                c.dim,
                _encoder_heads(c),
                c.hidden,
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
        if kind == "subclass":
            return _Gated(c.dim, c.hidden)
        return nn.Sequential(nn.Linear(c.dim, c.hidden), nn.Tanh(), nn.Linear(c.hidden, c.dim))


def init_module(b: Block, c: Case, draw: Callable[..., Tensor]) -> Weights:
    """Drawn parameters of a block's module."""
    return Weights({name: draw(*x.shape) for name, x in make_module(b.kind, c).named_parameters()})


def run_module(b: Block, c: Case, p: Weights, x: Tensor) -> Tensor:
    """The module of x f64[batch, seq, embed]."""
    return torch.func.functional_call(make_module(b.kind, c), p.weights, (x,))


def module_globs(c: Case) -> dict[str, Any]:
    """The logical axes of the parameters of all modules of a case, by glob: torch's weights are [out, in]."""
    per_head = c.dim // _encoder_heads(c)
    globs = {
        "linear": {"0.weight": "mlp embed", "0.bias": "mlp", "2.weight": "embed mlp"},
        "subclass": {
            "up.weight": "mlp embed",
            "up.bias": "mlp",
            "norm.*": "mlp",
            "down.weight": "embed mlp",
        },
        "encoder": {
            "linear1.weight": "mlp embed",
            "linear1.bias": "mlp",
            "linear2.weight": "embed mlp",
            "self_attn.in_proj_weight": f"(3 heads {per_head}) embed",
            "self_attn.in_proj_bias": f"(3 heads {per_head})",
            "self_attn.out_proj.weight": f"embed (heads {per_head})",
        },
    }
    used = [kind for kind in MODULES if any(b.kind == kind for b in c.blocks)]
    return {f"weights.{name}": spec for kind in used for name, spec in globs[kind].items()}
