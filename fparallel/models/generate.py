"""Sampling text from a model, one token at a time, on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

import fparallel as fp

__all__ = ["generate"]


@torch.no_grad()
def generate(
    forward: Callable[[Any, Tensor], Tensor],
    params: Any,
    tokens: Int[Tensor, "batch seq"],
    *,
    num_tokens: int,
    key: Tensor,
    temperature: float = 1.0,
    context: int | None = None,
) -> Int[Tensor, "batch longer"]:
    """Continues ``tokens`` by ``num_tokens`` draws from the model's own distribution.

    Args:
        forward: ``forward(params, tokens) -> logits [B, T, V]``.
        params: plain tensors (see ``fp.device_get``).
        tokens: the prompt, int64, at least one token long.
        num_tokens: how many to add.
        key: an ``fp.random`` key; draw ``i`` uses ``fold_in(key, i)``, so the text is a function of the key.
        temperature: divides the logits; 0 always takes the likeliest token.
        context: how many of the last tokens the model sees; all of them unless given.

    Returns:
        Prompt and continuation, ``[B, T + num_tokens]``.
    """
    for i in range(num_tokens):
        window = tokens if context is None else tokens[:, -context:]
        logits = forward(params, window)[:, -1]
        if temperature > 0:  # Gumbel's trick: argmax(logits + gumbel) is a draw from softmax(logits)
            uniform = fp.random.uniform(fp.random.fold_in(key, i), tuple(logits.shape))
            gumbel = -torch.log(-torch.log(uniform.clamp(1e-20, 1 - 1e-7)))
            logits = logits / temperature + gumbel
        tokens = torch.cat((tokens, logits.argmax(-1, keepdim=True)), dim=1)
    return tokens
