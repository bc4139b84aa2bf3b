"""Batches as a pure function of a key and a step, so that a position in the data is one integer.

An epoch takes every window of ``seq + 1`` bytes once, in an order that only the key and the epoch decide. The
order is a keyed bijection evaluated at the rows that a step needs: nothing is shuffled, stored or sought, and
any step costs the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import UInt8
from numpy.typing import NDArray
from torch import Tensor

from fparallel.data.corpus import END_OF_FILE
from fparallel.errors import DataError

__all__ = ["Loader"]

_ROUNDS = 4


@dataclass(frozen=True, eq=False)
class Loader:
    """``loader(key, step)`` is the global batch of that step, the same on every rank and in every run.

    Args:
        data: the bytes of one split.
        batch: sequences in a batch.
        seq: tokens in a sequence.

    Raises:
        DataError: the split is shorter than one window, or a size is not positive.
    """

    data: UInt8[np.ndarray, "bytes"]
    batch: int
    seq: int

    def __post_init__(self) -> None:
        if self.batch < 1 or self.seq < 1:
            raise DataError(f"batch={self.batch}, seq={self.seq}", fix="use sizes of at least 1")
        if len(self.data) < self.seq + 1:
            raise DataError(
                f"a window of seq={self.seq} needs {self.seq + 1} bytes, the text has {len(self.data)}",
                fix="use more text, or a smaller seq",
            )

    @property
    def windows(self) -> int:
        """Sequences in an epoch."""
        return max(1, (len(self.data) - 1) // self.seq)

    def __call__(self, key: Tensor, step: int) -> dict[str, Tensor]:
        """The batch of a step.

        Args:
            key: an ``fp.random`` key (int64 ``[2]``).
            step: 0, 1, 2 ...; rows ``step * batch`` up to ``(step + 1) * batch`` of the endless stream.

        Returns:
            ``tokens`` and ``targets``, int64 ``[B, T]``, the targets one byte ahead; ``mask``, float32
            ``[B, T]``, 0 where the target is the first byte of another file and 1 elsewhere.
        """
        rows = np.arange(step * self.batch, (step + 1) * self.batch, dtype=np.uint64)
        starts = self._starts(_words(key), rows)
        text = self.data[starts[:, None] + np.arange(self.seq + 1)].astype(np.int64)
        tokens, targets = np.ascontiguousarray(text[:, :-1]), np.ascontiguousarray(text[:, 1:])
        mask = (tokens != END_OF_FILE).astype(np.float32)
        return {
            "tokens": torch.from_numpy(tokens),
            "targets": torch.from_numpy(targets),
            "mask": torch.from_numpy(mask),
        }

    def _starts(self, key: NDArray[np.uint64], rows: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Where the windows of these rows begin; an epoch shifts all its windows by an offset of its own."""
        epoch, index = np.divmod(rows, np.uint64(self.windows))
        slack = np.uint64(len(self.data) - self.windows * self.seq)  # >= 1 offsets at which all windows fit
        shift = _hash(epoch, key[::-1]) % slack
        window = _permute(index, self.windows, _hash(epoch, key))
        return (window * np.uint64(self.seq) + shift).astype(np.int64)


def _words(key: Tensor) -> NDArray[np.uint64]:
    if key.dtype != torch.int64 or tuple(key.shape) != (2,):
        raise DataError(
            f"a key is int64[2], got {key.dtype} {tuple(key.shape)}", fix="use fp.random.key(seed)"
        )
    return key.cpu().numpy().view(np.uint64)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele et al. 2014, "Fast splittable pseudorandom number generators")."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _hash(x: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    golden = np.uint64(0x9E3779B97F4A7C15)
    return _mix(_mix(x * golden + key[:1]) + key[1:])


def _permute(index: NDArray[np.uint64], size: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Each index sent through the bijection of ``range(size)`` that its key picks.

    A Feistel network permutes the smallest ``range(4 ** half)`` that holds ``size``; what falls outside walks
    on until it falls inside (Black and Rogaway 2002, "Ciphers with arbitrary finite domains").
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    low = np.uint64((1 << int(half)) - 1)
    value = index.copy()
    outside = np.ones(len(value), dtype=bool)
    while outside.any():
        left, right = value[outside] >> half, value[outside] & low
        for i in range(_ROUNDS):
            left, right = right, left ^ (_mix(right + keys[outside] + np.uint64(i << 56)) & low)
        value[outside] = (left << half) | right
        outside = value >= size
    return value
