"""Messages between two ranks: which parts of a bucket travel together, and through which memory.

A large part travels alone, straight from and into the tensors where it is contiguous there. Small parts for
one peer are packed into one message. Both sides decide from the numbers of elements alone, so they agree
without talking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fparallel.runtime.exchange import Cut, Exchange

ALONE = 32 * 1024  # bytes from which a part is a message of its own


@dataclass(frozen=True)
class Message:
    """Parts that travel together between this rank and member `peer` (a position in the group).

    Attributes:
      parts: (position of the tensor in the bucket, the part).
      direct: whether the message can use the memory of the tensor itself.
    """

    peer: int
    parts: tuple[tuple[int, Cut], ...]
    numel: int
    direct: bool

    def pack(self, tensors: Sequence[Tensor], pool: Pool) -> tuple[Tensor, bool]:
        """A contiguous tensor with the parts of contiguous tensors, and whether it came from the pool."""
        if self.direct:
            tensor, cut = self.parts[0]
            return cut.of(tensors[tensor]), False
        staged = pool.take(self.numel, tensors[self.parts[0][0]].dtype)
        for view, (tensor, cut) in zip(self.split(staged), self.parts, strict=True):
            part = cut.of(tensors[tensor])
            view.view(part.shape).copy_(part)
        return staged, True

    def split(self, flat: Tensor) -> list[Tensor]:
        """The parts of a packed message, each flat."""
        return list(flat.split([cut.numel for _, cut in self.parts]))


def messages(exchange: Exchange, *, sends: bool) -> tuple[Message, ...]:
    """The messages that a rank sends, or receives, in an exchange; none to itself."""
    found = []
    for peer in range(len(exchange.members)):
        if peer == exchange.me:
            continue
        cuts = [(move.sends if sends else move.recvs)[peer] for move in exchange.moves]
        parts = [(tensor, cut) for tensor, cut in enumerate(cuts) if cut is not None]
        alone = [part for part in parts if part[1].numel * exchange.dtype.itemsize >= ALONE]
        packed = [part for part in parts if part not in alone]
        if len(packed) == 1:
            alone, packed = alone + packed, []
        copies = not sends and bool(exchange.reduce)  # what arrives to be added needs a place of its own
        found += [Message(peer, (part,), part[1].numel, part[1].is_flat and not copies) for part in alone]
        if packed:
            found.append(Message(peer, tuple(packed), sum(cut.numel for _, cut in packed), False))
    return tuple(found)


class Pool:
    """Flat tensors that are used again: step after step asks for the same sizes."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = device
        self.free: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        try:  # not "if": another thread may take the last one in between
            return self.free[numel, dtype].pop()
        except (KeyError, IndexError):
            return torch.empty(numel, dtype=dtype, device=self.device)

    def give(self, tensor: Tensor) -> None:
        self.free.setdefault((tensor.numel(), tensor.dtype), []).append(tensor)

    @property
    def nbytes(self) -> int:
        """Bytes that wait for their next use."""
        return sum(tensor.nbytes for tensors in self.free.values() for tensor in tensors)
