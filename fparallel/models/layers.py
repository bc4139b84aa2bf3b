"""The pieces that the models share, written so that every matrix product is one 2-D product.

Shapes: ``B`` batch, ``T`` sequence, ``D`` embedding, ``H`` heads, ``K`` head dim. A weight keeps its logical
dims (``"embed heads head_dim"``): flattening them is a view, and the heads stay a dim that can be sharded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fparallel as fp
from fparallel.errors import FparallelError

__all__ = [
    "ModelError",
    "check_sizes",
    "cross_entropy",
    "project_in",
    "project_out",
    "repeat_heads",
    "residual",
    "self_attention",
]


class ModelError(FparallelError, ValueError):
    """The sizes of a model do not fit together, or do not fit its input."""


def check_sizes(cfg: Any, *, multiples: Mapping[str, str]) -> None:
    """Refuses a config with a size below 1, or with a size that another one must divide and does not.

    Args:
        cfg: a dataclass; its integer fields are the sizes.
        multiples: field to field, "dim must be a multiple of heads" is ``{"dim": "heads"}``.

    Raises:
        ModelError: naming the field and the nearest legal value.
    """
    sizes = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg)}
    for name, size in sizes.items():
        if type(size) is int and size < 1:
            raise ModelError(f"{type(cfg).__module__}.Config: {name}={size}", fix=f"use {name} >= 1")
    for name, unit in multiples.items():
        size, divisor = sizes[name], sizes[unit]
        if size % divisor:
            raise ModelError(
                f"{type(cfg).__module__}.Config: {name}={size} is not a multiple of {unit}={divisor}",
                fix=f"use {name}={max(1, round(size / divisor)) * divisor}, or another {unit}",
            )


def project_in(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Contracts the last dim of ``x`` with the first of ``weight``.

    Args:
        x: ``[B, T, D]``.
        weight: ``[D, *out]``.
        bias: ``[*out]`` or ``None``.

    Returns:
        ``[B, T, *out]``.
    """
    rows, matrix = x.flatten(0, 1), weight.flatten(1)
    y = rows @ matrix if bias is None else torch.addmm(bias.flatten(), rows, matrix)
    return y.view(*x.shape[:2], *weight.shape[1:])


def project_out(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Contracts all dims of ``x`` after the second with all dims of ``weight`` but the last.

    Args:
        x: ``[B, T, *in]``.
        weight: ``[*in, D]``.
        bias: ``[D]`` or ``None``.

    Returns:
        ``[B, T, D]``.
    """
    rows, matrix = x.flatten(2).flatten(0, 1), weight.flatten(0, -2)
    y = rows @ matrix if bias is None else torch.addmm(bias, rows, matrix)
    return y.view(*x.shape[:2], weight.shape[-1])


def self_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention, scaled by ``1 / sqrt(K)``; ``[B, T, H, K]`` each and back."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def repeat_heads(x: Tensor, times: int) -> Tensor:
    """Repeats each key/value head for its query heads: ``[B, T, G, K]`` to ``[B, T, G * times, K]``.

    An expanded view and one copy; unlike SDPA's ``enable_gqa`` it leaves the query heads a dim that can be
    sharded over more ranks than there are key/value heads.
    """
    if times == 1:
        return x
    b, t, g, k = x.shape
    return x.unsqueeze(3).expand(b, t, g, times, k).reshape(b, t, g * times, k)


def residual(x: Tensor, update: Tensor) -> Tensor:
    """``x + update``, the update laid out as the residual stream is.

    The constraint is where Megatron-style parallelism adds up its partial sums: an all-reduce, or a
    reduce-scatter when the rules shard ``seq`` (Korthikanti et al. 2022, "Reducing activation recomputation
    in large transformer models", section 4.2.2).
    """
    return x + fp.with_sharding_constraint(update, "batch seq embed")


def cross_entropy(logits: Tensor, targets: Tensor, mask: Tensor) -> fp.Mean:
    """The mean negative log-likelihood, in nats, of the targets that ``mask`` keeps.

    Args:
        logits: ``[B, T, V]``.
        targets: ``[B, T]`` int64.
        mask: ``[B, T]``, 1 to count a target and 0 to ignore it; any dtype.
    """
    nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    weight = mask.flatten().to(nll.dtype)
    return fp.Mean((nll * weight).sum(), weight.sum())
