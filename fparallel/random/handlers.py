"""The keyed meaning of each of torch's random functions: what :func:`~fparallel.random.use` intercepts.

A handler takes ``next_key``, which gives the key of the scope's next draw, and then the arguments of the
torch function. It returns the result, or ``NotImplemented`` where this call draws nothing and torch may run
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from fparallel.errors import RandomError
from fparallel.random.dropout import DROPOUTS
from fparallel.random.keyed import bernoulli, exponential, normal, permutation, randint, uniform
from fparallel.random.refused import REFUSED

__all__ = ["HANDLERS"]

NextKey: TypeAlias = Callable[[], Tensor]


# ---- factories


def _finish(value: Tensor, out: Tensor | None = None, requires_grad: bool = False, **options: Any) -> Tensor:
    """What factories have in common once the values are drawn."""
    options.pop("generator", None)  # an explicit one has not come here
    options.pop("memory_format", None)
    unknown = [name for name, x in options.items() if x not in (None, False, torch.strided)]
    if unknown:
        raise RandomError(f"a keyed draw has no option {', '.join(unknown)}", fix="convert the result")
    if out is not None:
        return out.resize_(value.shape).copy_(value)
    return value.requires_grad_() if requires_grad else value


def _factory(sample: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def handler(
        next_key: NextKey,
        *args: Any,
        size: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        **options: Any,
    ) -> Tensor:
        shape = _shape(args if size is None else size)
        dtype = dtype or torch.get_default_dtype()
        value = sample(next_key(), shape, dtype, device=device or torch.get_default_device())
        return _finish(value, **options)

    return handler


def _factory_like(sample: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def handler(
        next_key: NextKey,
        input: Tensor,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        **options: Any,
    ) -> Tensor:
        value = sample(next_key(), input.shape, dtype or input.dtype, device=device or input.device)
        return _finish(value, **options)

    return handler


def _shape(size: Sequence[Any]) -> tuple[int, ...]:
    """``(2, 3)`` from ``(2, 3)`` or from ``((2, 3),)``."""
    if len(size) == 1 and isinstance(size[0], Sequence):
        size = size[0]
    return tuple(size)


def _randint(
    next_key: NextKey,
    *args: Any,
    low: int | None = None,
    high: int | None = None,
    size: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **options: Any,
) -> Tensor:
    if size is None:
        *args, size = args  # type: ignore[assignment]
    low, high = _bounds(args, low, high)
    device = device or torch.get_default_device()
    value = randint(next_key(), tuple(size), low, high, dtype or torch.int64, device=device)
    return _finish(value, **options)


def _randint_like(
    next_key: NextKey,
    input: Tensor,
    *args: Any,
    low: int | None = None,
    high: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **options: Any,
) -> Tensor:
    low, high = _bounds(args, low, high)
    value = randint(next_key(), input.shape, low, high, dtype or input.dtype, device=device or input.device)
    return _finish(value, **options)


def _bounds(args: Sequence[int], low: int | None, high: int | None) -> tuple[int, int]:
    """(low, high) of torch's ``high`` or ``low, high``, by position or by name."""
    *lows, last = (*args, *(x for x in (low, high) if x is not None))
    return int(lows[0]) if lows else 0, int(last)


def _randperm(
    next_key: NextKey,
    n: int,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **options: Any,
) -> Tensor:
    value = permutation(next_key(), n, device=device or torch.get_default_device())
    return _finish(value.to(dtype or torch.int64), **options)


# ---- draws with parameters


@torch.no_grad()
def _normal(
    next_key: NextKey,
    mean: float | Tensor = 0.0,
    std: float | Tensor = 1.0,
    size: Sequence[int] | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **options: Any,
) -> Tensor:
    tensors = [x for x in (mean, std) if isinstance(x, Tensor)]
    shape = torch.broadcast_shapes(*(x.shape for x in tensors)) if size is None else tuple(size)
    dtype = dtype or (tensors[0].dtype if tensors else torch.get_default_dtype())
    device = device or (tensors[0].device if tensors else torch.get_default_device())
    return _finish(normal(next_key(), shape, dtype, device=device) * std + mean, **options)


@torch.no_grad()
def _bernoulli(
    next_key: NextKey, input: Tensor, p: float | None = None, *, out: Tensor | None = None, **_: Any
) -> Tensor:
    keep = bernoulli(next_key(), input if p is None else p, input.shape, device=input.device)
    return _finish(keep.to(input.dtype), out)


@torch.no_grad()
def _multinomial(
    next_key: NextKey,
    input: Tensor,
    num_samples: int,
    replacement: bool = False,
    *,
    out: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """The first ``num_samples`` arrivals of exponential clocks whose rates are the weights."""
    weights = input if input.dtype == torch.float64 else input.float()
    if replacement:
        weights = weights.unsqueeze(-2).expand(*weights.shape[:-1], num_samples, weights.shape[-1])
    arrivals = weights / exponential(next_key(), weights.shape, weights.dtype, device=input.device)
    return _finish(arrivals.argmax(-1) if replacement else arrivals.topk(num_samples, -1).indices, out)


def _gumbel_softmax(
    next_key: NextKey, logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> Tensor:
    """Jang et al. 2017, eq. 1 and 2: softmax of the perturbed logits, straight through if ``hard``."""
    gumbels = -exponential(next_key(), logits.shape, logits.dtype, device=logits.device).log()
    soft = ((logits + gumbels) / tau).softmax(dim)
    if not hard:
        return soft
    top = soft.detach().argmax(dim, keepdim=True)
    return torch.zeros_like(soft).scatter(dim, top, 1.0) - soft.detach() + soft


# ---- in-place fills


def _normal_(next_key: NextKey, x: Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> Tensor:
    z = normal(next_key(), x.shape, x.dtype, device=x.device)
    return x.copy_(z if (mean, std) == (0, 1) else z * std + mean)


def _uniform_(next_key: NextKey, x: Tensor, *bounds: float, **names: Any) -> Tensor:
    low, high = (*bounds, *(0.0, 1.0)[len(bounds) :])
    low, high = names.get("from", low), names.get("to", high)
    if low == high:
        return x.copy_(torch.full_like(x, low))
    return x.copy_(uniform(next_key(), x.shape, x.dtype, low, high, device=x.device))


def _exponential_(next_key: NextKey, x: Tensor, lambd: float = 1.0, **_: Any) -> Tensor:
    e = exponential(next_key(), x.shape, x.dtype, device=x.device)
    return x.copy_(e if lambd == 1 else e * (1 / lambd))


def _bernoulli_(next_key: NextKey, x: Tensor, p: float | Tensor = 0.5, **_: Any) -> Tensor:
    return x.copy_(bernoulli(next_key(), p, x.shape, device=x.device))


# The last integer up to which a dtype holds all of them.
_EXACT = {torch.float64: 2**53, torch.float32: 2**24, torch.float16: 2**11, torch.bfloat16: 2**8}
_EXACT |= {t: torch.iinfo(t).max for t in (torch.int32, torch.int16, torch.int8, torch.uint8)}
_EXACT |= {torch.int64: 2**63 - 2}  # one less: 2**63 numbers are too many for randint


def _random_(next_key: NextKey, x: Tensor, *bounds: int, **names: Any) -> Tensor:
    if bounds or "to" in names:
        low, high = _bounds(bounds, names.get("from"), names.get("to"))
    else:
        low, high = 0, _EXACT[x.dtype] + 1
    return x.copy_(randint(next_key(), x.shape, low, high, x.dtype, device=x.device))


@torch.no_grad()
def _init_uniform_(next_key: NextKey, tensor: Tensor, a: float = 0.0, b: float = 1.0, **_: Any) -> Tensor:
    return _uniform_(next_key, tensor, a, b)


@torch.no_grad()
def _init_normal_(next_key: NextKey, tensor: Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> Tensor:
    return _normal_(next_key, tensor, mean, std)


@torch.no_grad()
def _kaiming_uniform_(
    next_key: NextKey,
    tensor: Tensor,
    a: float = 0,
    mode: str = "fan_in",
    nonlinearity: Any = "leaky_relu",
    **_: Any,
) -> Tensor:
    """He et al. 2015, as ``torch.nn.init.kaiming_uniform_``: bound ``gain * sqrt(3 / fan)``."""
    if tensor.numel() == 0:
        return tensor
    fan = tensor[0].numel() if mode == "fan_in" else tensor.numel() // tensor.shape[1]
    bound = torch.nn.init.calculate_gain(nonlinearity, a) * math.sqrt(3 / fan)
    return _uniform_(next_key, tensor, -bound, bound)


HANDLERS: dict[Any, Callable[..., Any]] = {
    torch.rand: _factory(uniform),
    torch.randn: _factory(normal),
    torch.rand_like: _factory_like(uniform),
    torch.randn_like: _factory_like(normal),
    torch.randint: _randint,
    torch.randint_like: _randint_like,
    torch.randperm: _randperm,
    torch.normal: _normal,
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    torch.multinomial: _multinomial,
    Tensor.multinomial: _multinomial,
    F.gumbel_softmax: _gumbel_softmax,
    Tensor.normal_: _normal_,
    Tensor.uniform_: _uniform_,
    Tensor.exponential_: _exponential_,
    Tensor.bernoulli_: _bernoulli_,
    Tensor.random_: _random_,
    torch.nn.init.uniform_: _init_uniform_,
    torch.nn.init.normal_: _init_normal_,
    torch.nn.init.kaiming_uniform_: _kaiming_uniform_,
    **DROPOUTS,
    **REFUSED,
}
