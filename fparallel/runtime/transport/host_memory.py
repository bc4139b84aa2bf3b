"""Reading the memory of another process of the same host: one copy, where a socket needs at least two.

Linux has `process_vm_readv` for this. It needs no shared segment and no file, and leaves nothing behind; the
kernel allows it between processes of one user (MPI libraries move their large local messages by it).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fparallel.runtime.exchange import COMBINE

PIECE = 256 * 1024  # bytes that stay in the cache between their reading and their use
_PR_SET_PTRACER, _ANY = 0x59616D61, ctypes.c_ulong(-1)


class _Span(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class PeerMemory:
    """The memory of another process of this host.

    Args:
      pid: its process id.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.function: Any = ctypes.CDLL(None, use_errno=True).process_vm_readv
        self.function.restype = ctypes.c_ssize_t
        span = ctypes.POINTER(_Span)
        self.function.argtypes = [ctypes.c_int, span, ctypes.c_ulong, span, ctypes.c_ulong, ctypes.c_ulong]

    @staticmethod
    def is_supported() -> bool:
        """Whether this system has the call."""
        return hasattr(ctypes.CDLL(None), "process_vm_readv")

    @staticmethod
    def permit() -> None:
        """Lets the other processes of this user read here, where the Yama module restricts that to parents."""
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANY, 0, 0, 0)

    def read(self, address: int, target: Tensor) -> None:
        """Copies `target.nbytes` bytes at an address of that process into a contiguous CPU tensor.

        Raises:
          RuntimeError: the process is gone, nothing is mapped there, or the system does not permit it.
        """
        to, left = target.data_ptr(), target.nbytes
        while left:
            mine, theirs = _Span(to, left), _Span(address, left)
            count = self.function(self.pid, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
            if count <= 0:
                why = os.strerror(ctypes.get_errno()) if count < 0 else "nothing was read"
                raise RuntimeError(f"cannot read the memory of process {self.pid}: {why}")
            to, address, left = to + count, address + count, left - count


@dataclass(frozen=True)
class Remote:
    """A contiguous part of a tensor in the memory of another process."""

    memory: PeerMemory
    address: int


def combine(reduce: str, parts: Sequence[Tensor | Remote], target: Tensor) -> None:
    """target = the reduction of the parts in their order, a piece at a time.

    What is read goes into a scratch that stays in the cache and is added there, so that it needs no memory of
    its own.

    Args:
      reduce: a key of `COMBINE`; "" with one part, which is copied.
      parts: each of the shape and dtype of the target; one of them may be the target.
    """
    if target.numel() == 0:
        return
    if target.ndim == 0 or (
        target.is_contiguous() and all(p.is_contiguous() for p in parts if isinstance(p, Tensor))
    ):
        target = target.view(-1)
        parts = [p.view(-1) if isinstance(p, Tensor) else p for p in parts]
    first, last = parts[0], len(parts) - 1
    if not last and isinstance(first, Remote) and target.is_contiguous():
        first.memory.read(first.address, target)
        return
    row = target[0].numel() * target.itemsize
    step = max(1, PIECE // row)
    shape = (2, min(step, len(target)), *target.shape[1:])
    scratch = torch.empty(shape, dtype=target.dtype)
    for start in range(0, len(target), step):
        out = target[start : start + step]
        total: Tensor | None = None
        for at, part in enumerate(parts):
            if isinstance(part, Remote):
                piece = scratch[0 if total is None else 1, : len(out)]
                part.memory.read(part.address + start * row, piece)
            else:
                piece = part[start : start + step]
            if total is None:
                total = piece
            else:  # the target is written last, since it may be a part
                total = COMBINE[reduce](total, piece, out=out if at == last else scratch[0, : len(out)])
        if not last:
            assert total is not None
            out.copy_(total)
