"""The random functions of torch that no key can serve: an error wherever they would draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fparallel.errors import RandomError

__all__ = ["REFUSED"]


def _always(*args: Any, **kwargs: Any) -> bool:
    return True


def _refuse(name: str, fix: str, draws: Callable[..., bool] = _always) -> Callable[..., Any]:
    """Raises where ``draws(*args, **kwargs)``."""

    def handler(_: Callable[[], Tensor], *args: Any, **kwargs: Any) -> Any:
        if draws(*args, **kwargs):
            raise RandomError(f"{name} would draw from torch's own generator, which no key controls", fix=fix)
        return NotImplemented

    return handler


def _attention_draws(*args: Any, dropout_p: float = 0.0, **kwargs: Any) -> bool:
    return (args[4] if len(args) > 4 else dropout_p) > 0


def _multi_head_draws(*args: Any, **kwargs: Any) -> bool:
    dropout_p = kwargs["dropout_p"] if "dropout_p" in kwargs else args[10]
    return dropout_p > 0 and kwargs.get("training", args[13] if len(args) > 13 else True)


def _rnn_draws(*args: Any) -> bool:
    """The overloads agree on ``.., num_layers, dropout, train, ..``, and dropout is the only float."""
    at = next(i for i, x in enumerate(args) if isinstance(x, float))
    return args[at - 1] > 1 and args[at] > 0 and args[at + 1]


def _rrelu_draws(*args: Any, training: bool = False, **kwargs: Any) -> bool:
    return args[3] if len(args) > 3 else training


def _pooling_draws(*args: Any, _random_samples: Tensor | None = None, **kwargs: Any) -> bool:
    return _random_samples is None


_EXPLICIT = "draw the randomness with fp.random and compute the result from it"


def _table() -> dict[Any, Callable[..., Any]]:
    table: dict[Any, Callable[..., Any]] = {
        F.scaled_dot_product_attention: _refuse(
            "scaled_dot_product_attention with dropout_p > 0",
            "pass dropout_p=0.0 and apply F.dropout to the output, or to the weights of one written out",
            _attention_draws,
        ),
        F.multi_head_attention_forward: _refuse(
            "multi-head attention with dropout",
            "build it with dropout=0.0 and apply F.dropout to the output",
            _multi_head_draws,
        ),
    }
    for rnn in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu):
        fix = "use dropout=0.0 in layers of one, with F.dropout between them"
        table[rnn] = _refuse(f"{rnn.__name__} with dropout", fix, _rnn_draws)
    for rrelu in (F.rrelu, torch.rrelu, torch.rrelu_):
        table[rrelu] = _refuse("rrelu in training", "use F.leaky_relu", _rrelu_draws)
    for name in ("2d", "2d_with_indices", "3d", "3d_with_indices"):
        fix = "pass _random_samples=fp.random.uniform(...)"
        table[getattr(F, f"fractional_max_pool{name}")] = _refuse("fractional_max_pool", fix, _pooling_draws)
    for name in ("binomial", "poisson", "svd_lowrank", "pca_lowrank", "_standard_gamma", "_sample_dirichlet"):
        table[getattr(torch, name)] = _refuse(name, _EXPLICIT)
    for name in ("cauchy_", "geometric_", "log_normal_"):
        table[getattr(Tensor, name)] = _refuse(name, _EXPLICIT)
    return table


REFUSED = _table()
