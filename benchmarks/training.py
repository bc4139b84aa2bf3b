"""The same work under fparallel: the project's GPT, its training step, the peers' initial values in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import fparallel as fp
from benchmarks import work
from benchmarks.work import Config
from fparallel.models import gpt

__all__ = [
    "Functions",
    "batch_of",
    "example_batch",
    "initial_params",
    "make_functions",
    "make_rules",
    "model_config",
]

_PLAIN = {
    "tok": "embed.tok.weight",
    "pos": "embed.pos.weight",
    "norm.scale": "head.ln.weight",
    "norm.bias": "head.ln.bias",
    "head": "head.proj.weight",
    "norm1.scale": "ln1.weight",
    "norm1.bias": "ln1.bias",
    "norm2.scale": "ln2.weight",
    "norm2.bias": "ln2.bias",
    "attn.qkv": "attn.qkv.weight",
    "attn.qkv_bias": "attn.qkv.bias",
    "attn.out": "attn.out.weight",
    "attn.out_bias": "attn.out.bias",
    "mlp.up": "mlp.up.weight",
    "mlp.up_bias": "mlp.up.bias",
    "mlp.down": "mlp.down.weight",
    "mlp.down_bias": "mlp.down.bias",
}


class Functions(NamedTuple):
    """What is compiled: `(key) -> state` and `(state, batch) -> (state, metrics)`."""

    init_state: Callable[[Tensor], Any]
    train_step: Callable[[Any, dict[str, Tensor]], tuple[Any, dict[str, Tensor]]]


def model_config(cfg: Config) -> gpt.Config:
    """The peers' network: biases on every linear map, an untied head without one."""
    return gpt.Config(
        vocab=cfg.vocab, seq=cfg.seq, layers=cfg.layers, dim=cfg.dim, heads=cfg.heads, bias=True, tie=False
    )


def make_functions(cfg: Config, *, dtype: torch.dtype = torch.float32, micro: int = 1) -> Functions:
    """The training step of the peers, written for one device; the batch in `micro` parts."""
    sizes = model_config(cfg)
    tx = fp.optim.chain(
        fp.optim.clip_by_global_norm(work.CLIP),
        fp.optim.adamw(work.LR, *work.BETAS, eps=work.EPS, weight_decay=work.WEIGHT_DECAY),
    )

    grad_fn = fp.value_and_grad(gpt.loss)
    if micro > 1:
        grad_fn = fp.accumulate(grad_fn, num_microbatches=micro)

    def init_state(key: Tensor) -> Any:
        params = gpt.init_params(key, sizes, dtype=dtype)
        return fp.TrainState(step=0, params=params, opt_state=tx.init(params), key=key)

    def train_step(state: Any, batch: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
        loss, grads = grad_fn(state.params, batch)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = fp.optim.apply_updates(state.params, updates)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state), {"loss": loss}

    return Functions(init_state, train_step)


def make_rules(names: tuple[str, ...], zero: int) -> Any:
    """Rules for a mesh with axes among dp, pp and tp."""
    logical = {"batch": "dp"} if "dp" in names else {}
    if "tp" in names:
        logical |= dict.fromkeys(("heads", "mlp", "vocab"), "tp")
    if "pp" in names:
        logical["layers"] = "pp"
    rules = fp.Rules(**logical)
    return rules.zero(zero, axis="dp") if zero else rules


def batch_of(inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """The model's batch: every target counts."""
    return {"tokens": inputs, "targets": targets, "mask": torch.ones(inputs.shape)}


def example_batch(cfg: Config) -> dict[str, Any]:
    """The shapes and dtypes of a global batch."""
    shape = (cfg.batch, cfg.seq)
    ids = fp.ShapeDtypeStruct(shape, torch.int64)
    return {"tokens": ids, "targets": ids, "mask": fp.ShapeDtypeStruct(shape, torch.float32)}


def initial_params(cfg: Config, params: Any) -> Any:
    """`params`, a tree of fp.Array or of tensors, with the peers' initial values in it.

    An Array keeps its sharding; one whole leaf exists at a time.
    """

    def value(path: str, leaf: Any) -> Any:
        new = torch.from_numpy(np.ascontiguousarray(_value(cfg, path))).reshape(tuple(leaf.shape))
        return fp.device_put(new, leaf.sharding) if isinstance(leaf, fp.Array) else new

    return fp.tree.map_with_path(value, params)


def _value(cfg: Config, path: str) -> np.ndarray:
    """The value of a leaf of the project's GPT: weights are (in, out)."""
    block, name = "", path
    if path.startswith("blocks."):
        index, name = path.removeprefix("blocks.").split(".", 1)
        block = f"blocks.{index}."
    theirs = block + _PLAIN[name]
    value = work.init_value(cfg, theirs, _shape(cfg, theirs))
    return value if value.ndim == 1 or theirs.startswith("embed.") else value.T


def _shape(cfg: Config, name: str) -> tuple[int, ...]:
    d = cfg.dim
    shapes = {
        "embed.tok.weight": (cfg.vocab, d),
        "embed.pos.weight": (cfg.seq, d),
        "head.proj.weight": (cfg.vocab, d),
        "attn.qkv.weight": (3 * d, d),
        "attn.qkv.bias": (3 * d,),
        "attn.out.weight": (d, d),
        "mlp.up.weight": (4 * d, d),
        "mlp.up.bias": (4 * d,),
        "mlp.down.weight": (d, 4 * d),
    }
    return next((shape for end, shape in shapes.items() if name.endswith(end)), (d,))
