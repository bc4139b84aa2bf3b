"""Keys, and the draws that take one: what users call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import fparallel.random.ops  # noqa: F401  (registers the operators)
from fparallel.errors import RandomError

__all__ = [
    "bernoulli",
    "bits",
    "check_key",
    "exponential",
    "fold_in",
    "key",
    "normal",
    "permutation",
    "randint",
    "split",
    "uniform",
]

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def key(seed: int | Tensor) -> Tensor:
    """The key of a seed.

    Args:
        seed: an int in ``[0, 2**63)`` or a 0-d integer tensor.

    Returns:
        int64 ``[2]``: ``[seed, 0]``. Keys are values: pass them, :func:`split` them, :func:`fold_in` to them,
        and draw from each once.

    Raises:
        RandomError: the seed is not such a number.

    >>> key(7)
    tensor([7, 0])
    """
    if isinstance(seed, Tensor):
        if seed.dim() or seed.is_floating_point() or seed.is_complex():
            raise RandomError(
                f"a seed is an int or a 0-d tensor of one, got {_show(seed)}", fix="pass an int"
            )
        seed = seed.to(torch.int64)
        return torch.stack((seed, torch.zeros_like(seed)))
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise RandomError(f"a seed is an int in [0, 2**63), got {seed!r}", fix="reduce it modulo 2**63")
    return torch.tensor([seed, 0], dtype=torch.int64)


def split(key: Tensor, num: int = 2) -> Tensor:
    """``num`` independent keys.

    Args:
        key: int64 ``[2]``.
        num: how many.

    Returns:
        int64 ``[num, 2]``, to index or unpack: ``k1, k2 = split(key)``. Key ``i`` does not depend on ``num``.
    """
    check_key(key)
    return torch.ops.fparallel.split(key, num)


def fold_in(key: Tensor, data: int | Tensor) -> Tensor:
    """The child of a key for some number, such as a step or the index of a layer.

    Args:
        key: int64 ``[2]``.
        data: an int of at most 64 bits or a 0-d integer tensor. Different data give different keys.

    Returns:
        int64 ``[2]``.

    Raises:
        RandomError: ``data`` is not such a number.
    """
    check_key(key)
    if isinstance(data, Tensor):
        if data.dim() or data.is_floating_point() or data.is_complex():
            raise RandomError(
                f"fold_in takes an int or a 0-d integer tensor, got {_show(data)}",
                fix="fold several numbers in one after another, or use torch.vmap",
            )
        return torch.ops.fparallel.fold_in(key, data)
    if not isinstance(data, int) or not -(2**63) <= data < 2**63:
        raise RandomError(f"fold_in takes an int of 64 bits, got {data!r}", fix="reduce it modulo 2**63")
    return torch.ops.fparallel.fold_in.int(key, data)


def bits(
    key: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.int64, *, device: torch.device | None = None
) -> Tensor:
    """Random bits.

    Args:
        key: int64 ``[2]``.
        shape: of the result, the global one.
        dtype: an integer type; every bit of it is random.
        device: of the result; the key's by default.
    """
    return _draw(key, "bits", shape, dtype, 0, 0, device, _INTEGERS)


def uniform(
    key: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    minval: float = 0.0,
    maxval: float = 1.0,
    *,
    device: torch.device | None = None,
) -> Tensor:
    """Uniform draws from ``[minval, maxval)``, ``maxval`` rounded to ``dtype``.

    Args:
        key: int64 ``[2]``.
        shape: of the result, the global one.
        dtype: float32 (24 random bits), float64 (53), or bfloat16 and float16 (the float32 draw, rounded).
        minval: the lower bound.
        maxval: the upper bound.
        device: of the result; the key's by default.
    """
    if not minval < maxval:
        raise RandomError(f"uniform over the empty range [{minval}, {maxval})", fix="pass minval < maxval")
    return _draw(key, "uniform", shape, dtype, minval, maxval, device, _FLOATS)


def normal(
    key: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    *,
    device: torch.device | None = None,
) -> Tensor:
    """Standard normal draws (Box and Muller 1958).

    Args:
        key: int64 ``[2]``.
        shape: of the result, the global one.
        dtype: float32 (at most 6.6 in size), float64 (at most 9.3), or bfloat16 and float16 (the float32
            draw, rounded).
        device: of the result; the key's by default.
    """
    return _draw(key, "normal", shape, dtype, 0.0, 1.0, device, _FLOATS)


def exponential(
    key: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    *,
    device: torch.device | None = None,
) -> Tensor:
    """Exponential draws of mean 1.

    Args:
        key: int64 ``[2]``.
        shape: of the result, the global one.
        dtype: float32, float64, bfloat16 or float16.
        device: of the result; the key's by default.
    """
    return _draw(key, "exponential", shape, dtype, 0.0, 1.0, device, _FLOATS)


def bernoulli(
    key: Tensor, p: float | Tensor, shape: Sequence[int], *, device: torch.device | None = None
) -> Tensor:
    """True with probability ``p``.

    Args:
        key: int64 ``[2]``.
        p: in [0, 1]; a float counts to 2**-32, a tensor (to broadcast to ``shape``) to its dtype's uniform
            draws.
        shape: of the result, the global one.
        device: of the result; the key's by default.

    Returns:
        bool.
    """
    if isinstance(p, Tensor):
        dtype = torch.float64 if p.dtype == torch.float64 else torch.float32
        return uniform(key, shape, dtype, device=device or p.device) < p
    if not 0 <= p <= 1:
        raise RandomError(f"{p} is not a probability", fix="pass a p in [0, 1]")
    return _draw(key, "bernoulli", shape, torch.bool, float(p), 0, device, (torch.bool,))


def randint(
    key: Tensor,
    shape: Sequence[int],
    minval: int,
    maxval: int,
    dtype: torch.dtype = torch.int64,
    *,
    device: torch.device | None = None,
) -> Tensor:
    """Uniform integers from ``[minval, maxval)``: 63 random bits modulo the width.

    Args:
        key: int64 ``[2]``.
        shape: of the result, the global one.
        minval: the least value.
        maxval: one more than the largest; ``maxval - minval`` is less than 2**63.
        dtype: an integer type that holds the range, or a floating-point type.
        device: of the result; the key's by default.
    """
    if not 0 < maxval - minval < 2**63:
        fix = "pass minval < maxval, less than 2**63 apart"
        raise RandomError(f"randint over [{minval}, {maxval})", fix=fix)
    if not dtype.is_floating_point and dtype in _INTEGERS:
        limits = torch.iinfo(dtype)
        if minval < limits.min or maxval - 1 > limits.max:
            raise RandomError(f"[{minval}, {maxval}) does not fit {dtype}", fix="pass a wider dtype")
    return _draw(key, "randint", shape, dtype, minval, maxval, device, _INTEGERS + _FLOATS)


def permutation(key: Tensor, n: int, *, device: torch.device | None = None) -> Tensor:
    """A random permutation of ``range(n)``, int64 ``[n]``: the stable order of ``n`` random 64-bit numbers.

    It sorts all of them at once, so it belongs on the host (shuffling data) or on replicated values.
    """
    return bits(key, (n,), device=device).argsort(stable=True)


def check_key(key: object) -> None:
    """Raises RandomError unless ``key`` is one."""
    if not isinstance(key, Tensor):
        fix = "make one with fp.random.key(seed)"
        raise RandomError(f"a key is an int64[2] tensor, got {key!r}", fix=fix)
    if key.dtype != torch.int64 or key.dim() != 1 or key.shape[0] != 2:
        fix = "make keys with fp.random.key, split and fold_in; for a batch of keys use torch.vmap"
        raise RandomError(f"a key is an int64[2] tensor, got {_show(key)}", fix=fix)


def _draw(
    key: Tensor,
    kind: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    a: float,
    b: float,
    device: torch.device | str | None,
    dtypes: Sequence[torch.dtype],
) -> Tensor:
    check_key(key)
    if dtype not in dtypes:
        names = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise RandomError(f"{kind} draws have no dtype {dtype}", fix=f"pass one of {names}")
    if device is None or torch.device(device) == key.device:
        return torch.ops.fparallel.random(key, kind, tuple(shape), dtype, a, b)
    return torch.ops.fparallel.random(key, kind, tuple(shape), dtype, a, b, device=device)


def _show(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
