"""Keyed dropout: ``where(keep, x / (1 - p), 0)`` with one draw an element, or a channel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from fparallel.errors import RandomError
from fparallel.random.keyed import bernoulli

__all__ = ["DROPOUTS"]

NextKey: TypeAlias = Callable[[], Tensor]

_SELU_ALPHA = 1.7580993408473766  # scale * alpha of SELU, Klambauer et al. 2017


def _dropout(
    spatial_dims: int | None = None, *, alpha: bool = False, inplace_default: bool = False
) -> Callable[..., Tensor]:
    """A dropout of elements, or of channels with ``spatial_dims`` dims after them (0: all but two)."""

    def handler(
        next_key: NextKey,
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = inplace_default,
        *,
        train: bool | None = None,
    ) -> Tensor:
        training = training if train is None else train
        if not 0 <= p <= 1:
            raise RandomError(f"dropout with the probability {p}", fix="pass a p in [0, 1]")
        if p == 0 or not training:
            return input
        keep = bernoulli(next_key(), 1 - p, _mask_shape(input, spatial_dims), device=input.device)
        value = _alpha_masked(input, keep, p) if alpha else _masked(input, keep, p)
        return input.copy_(value) if inplace else value

    return handler


def _masked(x: Tensor, keep: Tensor, p: float) -> Tensor:
    return torch.where(keep, x if p == 1 else x / (1 - p), 0)


def _alpha_masked(x: Tensor, keep: Tensor, p: float) -> Tensor:
    """Dropped elements become SELU's limit; then an affine map restores mean 0 and variance 1."""
    if p == 1:
        return _masked(x, keep, p)
    scale = 1 / math.sqrt((_SELU_ALPHA**2 * p + 1) * (1 - p))
    return torch.where(keep, x * scale, -_SELU_ALPHA * scale) + _SELU_ALPHA * scale * p


def _mask_shape(x: Tensor, spatial_dims: int | None) -> tuple[int, ...]:
    if spatial_dims is None:
        return tuple(x.shape)
    if spatial_dims == 2 and x.dim() == 3:  # torch reads (N, C, L) here
        spatial_dims = 1
    spatial_dims = spatial_dims or x.dim() - 2
    channel_dims = x.dim() - spatial_dims  # (N, C), or (C,) without a batch dim
    return (*x.shape[:channel_dims], *[1] * spatial_dims)


def _native_dropout(next_key: NextKey, input: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False or p == 0:
        return input, torch.ones_like(input, dtype=torch.bool)
    keep = bernoulli(next_key(), 1 - p, input.shape, device=input.device)
    return _masked(input, keep, p), keep


DROPOUTS: dict[Any, Callable[..., Any]] = {
    F.dropout: _dropout(),
    F.dropout1d: _dropout(1),
    F.dropout2d: _dropout(2),
    F.dropout3d: _dropout(3),
    F.alpha_dropout: _dropout(alpha=True),
    F.feature_alpha_dropout: _dropout(0, alpha=True),
    torch.dropout: _dropout(),
    torch.dropout_: _dropout(inplace_default=True),
    torch.feature_dropout: _dropout(0),
    torch.feature_dropout_: _dropout(0, inplace_default=True),
    torch.alpha_dropout: _dropout(alpha=True),
    torch.alpha_dropout_: _dropout(alpha=True, inplace_default=True),
    torch.feature_alpha_dropout: _dropout(0, alpha=True),
    torch.feature_alpha_dropout_: _dropout(0, alpha=True, inplace_default=True),
    torch.native_dropout: _native_dropout,
}
