"""Philox4x32-10: random words as a pure function of (key, position in the global array).

A key is an int64 tensor of shape ``[2]``. ``key[0]`` is Philox's 64-bit key and ``key[1]`` the upper half of
its 128-bit counter; the lower half counts blocks of four 32-bit words along the row-major positions of the
global array. Position ``i`` reads word ``i % 4`` of block ``i // 4``, or, where an element needs 64 bits, the
word pair ``i % 2`` of block ``i // 2``. Nothing depends on how the array is cut, nor on chunk sizes, threads
or device: all arithmetic is on integers.

``fold_in`` and ``split`` run the same function under other Philox keys, so that a child key never repeats the
bits of a draw made with its parent.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC11), section 3.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

__all__ = ["Box", "Factor", "child_keys", "philox4x32", "random_words"]

# A word is 32 bits held in a Python int or in an int64 tensor; every line below works on either.
Word: TypeAlias = int | Tensor

# (start, count, stride): j in range(count) stands for the index (start + j) * stride.
Factor: TypeAlias = tuple[int, int, int]

_MASK = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_DOMAINS = {"fold_in": 0x666F6C645F696E00, "split": 0x73706C6974000000}  # ASCII; a draw's own domain is 0

_CPU_BLOCKS = 2**15  # blocks per chunk (2**17 32-bit words): temporaries stay in the cache
_DEVICE_BLOCKS = 2**22  # elsewhere launches cost more than memory
_FEW_BLOCKS = 16  # below, Python's ints are faster than 80 calls on tiny tensors


def philox4x32(
    counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word], rounds: int = 10
) -> tuple[Word, Word, Word, Word]:
    """One Philox4x32 block for every counter and key, which broadcast against each other.

    Args:
        counter: four 32-bit words, each an int or an int64 tensor with values in ``[0, 2**32)``.
        key: two such words.
        rounds: 10 is the standard choice.

    Returns:
        Four 32-bit words.
    """
    shapes = [w.shape for w in (*counter, *key) if isinstance(w, Tensor)]
    shape = torch.broadcast_shapes(*shapes)
    c0, c1, c2, c3 = (w.expand(shape) if isinstance(w, Tensor) else w for w in counter)
    k0, k1 = key
    for i in range(rounds):
        if i:
            k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
        high0, low0 = _product(c0, _MULTIPLIERS[0])
        high1, low1 = _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = _mix(high1, c1, k0), low1, _mix(high0, c3, k1), low0
    return c0, c1 & _MASK, c2, c3 & _MASK


def _product(word: Word, multiplier: int) -> tuple[Word, Word]:
    """The high and the low half of a product; of a tensor, with other bits above the 32 of each."""
    product = word * multiplier
    return product >> 32, product if isinstance(product, Tensor) else product & _MASK


def _mix(high: Word, low: Word, key: Word) -> Word:
    """``high ^ low ^ key``, in place if ``high`` is a tensor: new memory costs more than the arithmetic."""
    high ^= low
    high ^= key
    high &= _MASK
    return high


@dataclass(frozen=True)
class Box:
    """The part of a row-major array that is a product of strided runs, as nested loops over linear positions.

    Attributes:
        base: the linear position of the first element.
        loops: ``(count, step)`` of the outer loops, major first.
        run: the length of the innermost loop, whose step is 1.
    """

    base: int
    loops: tuple[tuple[int, int], ...]
    run: int

    @classmethod
    def of(cls, shape: Sequence[int], index: Sequence[Sequence[Factor]] | None = None) -> Box:
        """The box of ``index`` (all of the array if ``None``) in an array of ``shape``.

        Along dim ``d`` the indices are the sums over the factors ``(start, count, stride)`` of ``index[d]``,
        major first, of ``(start + j) * stride`` for ``j`` in ``range(count)``.

        >>> Box.of((6, 8))
        Box(base=0, loops=(), run=48)
        >>> Box.of((6, 8), [[(2, 3, 1)], [(0, 2, 4), (1, 2, 1)]])
        Box(base=17, loops=((6, 4),), run=2)
        """
        if index is None:
            index = [[(0, size, 1)] for size in shape]
        assert len(index) == len(shape), f"{len(index)} index entries for {len(shape)} dims"
        base, loops, pitch = 0, [], 1
        for size, factors in zip(reversed(shape), reversed(index), strict=True):
            assert math.prod(count for _, count, _ in factors) == 0 or (
                sum((start + count - 1) * stride for start, count, stride in factors) < size
                and all(start >= 0 and stride >= 0 for start, _, stride in factors)
            ), f"index {factors} is outside of a dim of size {size}"
            for start, count, stride in reversed(factors):
                base += start * stride * pitch
                loops.append((count, stride * pitch))
            pitch *= size
        return cls._nest(base, loops)

    @classmethod
    def _nest(cls, base: int, loops: list[tuple[int, int]]) -> Box:
        """Merges loops (minor first) that continue one another, and splits off the innermost run."""
        if any(count == 0 for count, _ in loops):
            return cls(0, (), 0)
        merged: list[tuple[int, int]] = [(1, 1)]
        for count, step in loops:
            inner_count, inner_step = merged[-1]
            if step == inner_count * inner_step:
                merged[-1] = (inner_count * count, inner_step)
            elif count > 1:
                merged.append((count, step))
        return cls(base, tuple(reversed(merged[1:])), merged[0][0])

    @property
    def rows(self) -> int:
        """The number of runs."""
        return math.prod(count for count, _ in self.loops)

    @property
    def last(self) -> int:
        """The largest linear position."""
        return self.base + sum((count - 1) * step for count, step in self.loops) + self.run - 1

    def row_starts(self, first: int, stop: int, device: torch.device) -> Tensor:
        """The linear position of the first element of each run in ``range(first, stop)``, int64."""
        row = torch.arange(first, stop, dtype=torch.int64, device=device)
        start = torch.full_like(row, self.base)
        for count, step in reversed(self.loops):
            start += (row % count) * step
            row = row.div(count, rounding_mode="floor")
        return start


def random_words(
    keys: Tensor, box: Box, *, wide: bool, device: torch.device
) -> Iterator[tuple[tuple[slice, slice, slice], Tensor, Tensor | int]]:
    """The random words of a box, chunk by chunk.

    Args:
        keys: int64 ``[K, 2]``.
        box: the positions to draw for.
        wide: 64 bits an element (int64) instead of 32 (int32).
        device: where to compute.

    Yields:
        ``(place, words, offset)``. ``place`` cuts the chunk out of a result ``[K, box.rows, box.run]``.
        ``words`` is ``[k, rows, length]`` with whole blocks in the last dim, so that a pair of neighbouring
        words (2j, 2j+1) is never torn; the chunk's elements start at ``offset``: an int, or an int64 tensor
        ``[rows]`` of one for each row.
    """
    lanes = 2 if wide else 4
    limit = _CPU_BLOCKS if device.type == "cpu" else _DEVICE_BLOCKS
    row_blocks = (box.run + lanes - 1) // lanes + 1  # one more, as a run need not start at a block
    rows_each = max(1, limit // row_blocks)
    run_each = min(box.run, limit * lanes)
    keys_each = max(1, limit // (row_blocks * min(box.rows, rows_each)))
    top = (box.base // lanes) >> 32
    if (box.last // lanes) >> 32 != top:
        top = -1  # the upper counter word varies
    aligned = all(step % lanes == 0 for _, step in box.loops)

    for k in range(0, len(keys), keys_each):
        key_slice = slice(k, min(k + keys_each, len(keys)))
        k0, k1, c2, c3 = _key_words(keys[key_slice], device)
        for r, c in itertools.product(range(0, box.rows, rows_each), range(0, box.run, run_each)):
            row_slice = slice(r, min(r + rows_each, box.rows))
            run_slice = slice(c, min(c + run_each, box.run))
            starts = box.row_starts(row_slice.start, row_slice.stop, device) + c
            length = run_slice.stop - c
            offset: Tensor | int
            if aligned:
                offset = (box.base + c) % lanes
                num_blocks = (offset + length + lanes - 1) // lanes
            else:
                offset = starts % lanes
                num_blocks = (length + 2 * lanes - 2) // lanes
            block = torch.arange(num_blocks, dtype=torch.int64, device=device)
            block = block + starts.div(lanes, rounding_mode="floor")[:, None]
            words = _blocks((block & _MASK, top if top >= 0 else block >> 32, c2, c3), (k0, k1))
            yield (key_slice, row_slice, run_slice), _interleave(words, wide), offset


def _interleave(words: Sequence[Tensor], wide: bool) -> Tensor:
    """Four tensors of words ``[.., B]`` as one: int32 ``[k, rows, 4B]`` or int64 ``[k, rows, 2B]``."""
    first = words[0]
    out = torch.empty((*first.shape, 4), dtype=torch.int32, device=first.device)
    for lane, word in enumerate(words):
        out[..., lane] = word  # int64 to int32 keeps the low bits
    if wide:
        out = out.view(torch.int64)  # little-endian: the first word of a pair is the low half
    return out.flatten(-2).reshape(-1, first.shape[-2], first.shape[-1] * (2 if wide else 4))


def child_keys(keys: Tensor, data: Tensor | Sequence[int], *, domain: str) -> Tensor:
    """The children of keys: Philox of ``data`` under the parent's key, in a domain apart from that of draws.

    Args:
        keys: int64 ``[..., 2]``.
        data: int64, to broadcast with ``keys[..., 0]``; or ints, which make a new last-but-one dim.
        domain: ``"fold_in"`` or ``"split"``.

    Returns:
        int64 ``[..., 2]``. Different data give different children: Philox permutes the counters of one key.
    """
    if not isinstance(data, Tensor):
        data, keys = torch.tensor(data, dtype=torch.int64, device=keys.device), keys.unsqueeze(-2)
    data = data.to(device=keys.device, dtype=torch.int64)
    keys = keys ^ torch.tensor([_DOMAINS[domain], 0], device=keys.device)
    low, high = keys & _MASK, (keys >> 32) & _MASK
    counter = data & _MASK, (data >> 32) & _MASK, low[..., 1], high[..., 1]
    words = torch.stack(_blocks(counter, (low[..., 0], high[..., 0])), -1)
    return words[..., 0::2] | (words[..., 1::2] << 32)


def _blocks(counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word]) -> tuple[Tensor, ...]:
    """:func:`philox4x32` where a word is a tensor, through Python's ints if there are few blocks."""
    inputs = (*counter, *key)
    tensors = [word for word in inputs if isinstance(word, Tensor)]
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    if tensors[0].device.type != "cpu" or shape.numel() > _FEW_BLOCKS:
        return philox4x32(counter, key)  # type: ignore[return-value]
    count = shape.numel()
    columns = [w.expand(shape).flatten().tolist() if isinstance(w, Tensor) else [w] * count for w in inputs]
    blocks = [philox4x32(block[:4], block[4:]) for block in zip(*columns, strict=True)]
    return torch.tensor(blocks, dtype=torch.int64, device="cpu").reshape(*shape, 4).unbind(-1)


def _key_words(keys: Tensor, device: torch.device) -> tuple[Word, Word, Word, Word]:
    """Words of the Philox key, then of the upper counter: ints if at hand, else int64 ``[K, 1, 1]``."""
    if keys.device.type == "cpu" and len(keys) == 1:
        a, b = keys[0].tolist()
    else:
        a, b = (part[:, None, None] for part in keys.to(device).unbind(-1))
    return a & _MASK, (a >> 32) & _MASK, b & _MASK, (b >> 32) & _MASK
