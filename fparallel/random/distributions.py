"""Random words to random values, with the same bits on every device.

Only IEEE operations that round one way (+, -, *, /, sqrt, conversions) are used, each as a kernel of its own,
so that nothing is fused or approximated by a vendor's library: a normal drawn on a CPU equals the one drawn
on a GPU. The polynomials are those of FreeBSD's msun (``e_log``, ``k_sin``, ``k_cos`` and their float
versions), good to about one unit in the last place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fparallel.random.philox import Box, Factor, random_words

__all__ = ["KINDS", "draw", "local_shape"]

Number = int | float

KINDS = ("bits", "uniform", "normal", "exponential", "bernoulli", "randint")


@dataclass(frozen=True)
class _Format:
    """A floating-point format, with the polynomials to its precision; words have its width."""

    dtype: torch.dtype
    bits: int
    mantissa: int  # stored bits
    sqrt_half: int  # the bits of sqrt(1/2)
    log: tuple[float, ...]
    sin: tuple[float, ...]
    cos: tuple[float, ...]


_F32 = _Format(
    torch.float32,
    bits=32,
    mantissa=23,
    sqrt_half=0x3F3504F3,
    log=(0.66666662693, 0.40000972152, 0.28498786688, 0.24279078841),
    sin=(
        -0.166666666416265235595,
        0.0083333293858894631756,
        -0.000198393348360966317347,
        0.0000027183114939898219064,
    ),
    cos=(
        -0.499999997251031003120,
        0.0416666233237390631894,
        -0.00138867637746099294692,
        0.0000243904487962774090654,
    ),
)
_F64 = _Format(
    torch.float64,
    bits=64,
    mantissa=52,
    sqrt_half=0x3FE6A09E667F3BCD,
    log=(
        6.666666666666735130e-01,
        3.999999999940941908e-01,
        2.857142874366239149e-01,
        2.222219843214978396e-01,
        1.818357216161805012e-01,
        1.531383769920937332e-01,
        1.479819860511658591e-01,
    ),
    sin=(
        -1.66666666666666324348e-01,
        8.33333333332248946124e-03,
        -1.98412698298579493134e-04,
        2.75573137070700676789e-06,
        -2.50507602534068634195e-08,
        1.58969099521155010221e-10,
    ),
    cos=(
        -0.5,
        4.16666666666666019037e-02,
        -1.38888888888741095749e-03,
        2.48015872894767294178e-05,
        -2.75573143513906633035e-07,
        2.08757232129817482790e-09,
        -1.13596475577881948265e-11,
    ),
)


def local_shape(shape: Sequence[int], index: Sequence[Sequence[Factor]] | None) -> tuple[int, ...]:
    """The shape of the part ``index`` of an array of ``shape``; see :class:`~fparallel.random.philox.Box`."""
    if index is None:
        return tuple(shape)
    return tuple(math.prod(count for _, count, _ in factors) for factors in index)


def draw(
    key: Tensor,
    kind: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    a: Number,
    b: Number,
    index: Sequence[Sequence[Factor]] | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Part ``index`` of the array of ``shape`` that ``key`` draws.

    Args:
        key: int64 ``[*batch, 2]``.
        kind: one of :data:`KINDS`.
        shape: the GLOBAL shape.
        dtype: of the result.
        a, b: lower and upper bound (``uniform``, ``randint``), mean and standard deviation (``normal``),
            unused and scale (``exponential``), probability and unused (``bernoulli``), unused (``bits``).
        index: per dim the factors of the local indices; ``None`` is everything.
        device: of the result; the key's by default.

    Returns:
        ``[*batch, *local_shape(shape, index)]``. The elements of an array never depend on ``index``.
    """
    device = key.device if device is None else device
    keys = key.reshape(-1, 2)
    box = Box.of(shape, index)
    out = torch.empty((len(keys), box.rows, box.run), dtype=dtype, device=device)
    wide = dtype == torch.float64 or kind == "randint" or (kind == "bits" and dtype == torch.int64)
    if out.numel():
        for place, words, offset in random_words(keys, box, wide=wide, device=out.device):
            values = _values(words, kind, dtype, a, b)
            length = place[2].stop - place[2].start
            if isinstance(offset, int):
                out[place] = values[..., offset : offset + length]
            else:
                columns = offset[:, None] + torch.arange(length, device=out.device)
                out[place] = values.gather(-1, columns.expand(len(values), -1, -1))
    return out.reshape((*key.shape[:-1], *local_shape(shape, index)))


def _values(words: Tensor, kind: str, dtype: torch.dtype, a: Number, b: Number) -> Tensor:
    fmt = _F64 if dtype == torch.float64 else _F32
    match kind:
        case "bits":
            return words.to(dtype)
        case "uniform":
            return _uniform(words, fmt, dtype, a, b)
        case "normal":
            z = _normal(words, fmt)
            return (z if (a, b) == (0, 1) else z * float(b) + float(a)).to(dtype)
        case "exponential":
            e = _minus_log(words, fmt)
            return (e if b == 1 else e * float(b)).to(dtype)
        case "bernoulli":
            threshold = round(a * 2**32) - 2**31
            return (words < threshold if threshold < 2**31 else torch.ones_like(words)).to(dtype)
        case "randint":
            return ((words & (2**63 - 1)) % (b - a) + a).to(dtype)
    raise AssertionError(f"unknown kind {kind!r}")


def _uniform(words: Tensor, fmt: _Format, dtype: torch.dtype, a: Number, b: Number) -> Tensor:
    """``[a, b)`` on a grid of 2**-24 (float64: 2**-53) of the width."""
    digits = fmt.mantissa + 1
    u = ((words >> (fmt.bits - digits)) & (2**digits - 1)).to(fmt.dtype) * 2.0**-digits
    if (a, b) == (0, 1) and dtype == fmt.dtype:
        return u
    if (a, b) != (0, 1):
        u = u * float(b - a) + float(a)
    return u.to(dtype).clamp(max=_below(b, dtype))  # rounding may have reached b


def _below(x: Number, dtype: torch.dtype) -> float:
    """The largest number of ``dtype`` less than ``x`` rounded to it."""
    bound = torch.tensor(float(x), dtype=dtype, device="cpu")
    return torch.nextafter(bound, torch.full_like(bound, -math.inf)).item()


def _normal(words: Tensor, fmt: _Format) -> Tensor:
    """Box and Muller 1958, on pairs of words: ``sqrt(-2 ln u) (cos t, sin t)``.

    A word of a pair gives a sign and either ``u`` or ``y`` in [-pi/4, pi/4); then ``t = y + pi/4``, so that
    ``sqrt 2 cos t = cos y - sin y`` and ``sqrt 2 sin t = cos y + sin y``.
    """
    first, second = words[..., 0::2].contiguous(), words[..., 1::2].contiguous()
    radius = _minus_log(first, fmt).sqrt()
    y = (second << 1).bitwise_or_(1).to(fmt.dtype).mul_(math.pi / 4 * 2.0 ** (1 - fmt.bits))
    square = y * y
    sin = _horner(square, fmt.sin).mul_(square).mul_(y).add_(y)
    cos = _horner(square, fmt.cos).mul_(square).add_(1.0)
    out = torch.empty(words.shape, dtype=fmt.dtype, device=words.device)
    out[..., 0::2] = _with_sign(radius * (cos - sin), first, fmt)
    out[..., 1::2] = _with_sign(radius * (cos + sin), second, fmt)
    return out


def _with_sign(x: Tensor, word: Tensor, fmt: _Format) -> Tensor:
    """``x`` with its sign flipped where the top bit of ``word`` is set."""
    return (word & -(2 ** (fmt.bits - 1))).bitwise_xor_(x.view(word.dtype)).view(fmt.dtype)


def _minus_log(words: Tensor, fmt: _Format) -> Tensor:
    """``-ln u`` for the midpoints u of the 2**30 (float64: 2**62) cells of (0, 1) that the lower bits choose,
    rounded to the format.

    ``u = 2**k m`` with ``m`` in [sqrt(1/2), sqrt 2), and ``ln(1 + f) = f - (f²/2 - s (f²/2 + R(s²)))`` with
    ``s = f / (2 + f)``.
    """
    digits = fmt.bits - 1
    x = (words & (2**digits - 1)).bitwise_or_(1).to(fmt.dtype).view(words.dtype).sub_(fmt.sqrt_half)
    k = (x >> fmt.mantissa).to(fmt.dtype)
    f = x.bitwise_and_(2**fmt.mantissa - 1).add_(fmt.sqrt_half).view(fmt.dtype).sub_(1.0)
    s = f / (f + 2.0)
    square = s * s
    half = (f * f).mul_(0.5)
    log_m = f.sub_(half.sub_(_horner(square, fmt.log).mul_(square).add_(half).mul_(s)))
    return k.neg_().add_(float(digits)).mul_(math.log(2)).sub_(log_m)


def _horner(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """``c0 + c1 x + c2 x² ...``, each product and each sum rounded by itself."""
    value = x * coefficients[-1]
    for c in coefficients[-2:0:-1]:
        value.add_(c).mul_(x)
    return value.add_(coefficients[0])
