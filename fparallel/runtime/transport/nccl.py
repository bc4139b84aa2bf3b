"""Collectives between GPUs: NCCL on a side stream per communicator.

A step is issued by making the communicator's stream wait for the compute stream, then packing, communicating
and unpacking on it; `wait` makes the compute stream wait for the event that ends the step. The host never
blocks. Shards of different sizes are padded to the largest inside the packed buffers, and nowhere else. Sums
are NCCL's: their order, and so the last bits, depend on its algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fparallel._compat import all_gather_single, reduce_scatter_single
from fparallel.runtime.exchange import Cut, Exchange
from fparallel.runtime.transport.base import Issue

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class _Pending:
    """A step on a side stream; see `Pending`. It keeps its tensors until the compute stream has waited."""

    def __init__(self, event: torch.cuda.Event, held: Sequence[Sequence[Tensor]]) -> None:
        self.event, self.held = event, held

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)
        self.held = ()


def _on_stream(
    stream: torch.cuda.Stream, work: Callable[[Sequence[Tensor], Sequence[Tensor]], None]
) -> Issue:
    def issue(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> _Pending:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work(inputs, outputs)
            event = torch.cuda.Event()
            event.record(stream)
        return _Pending(event, (inputs, outputs))

    return issue


class NcclWork:
    """What a collective does on the stream it is given: pack, communicate, unpack.

    Args:
      group: a process group over `members`.
      members: its ranks, ascending.
    """

    def __init__(self, group: dist.ProcessGroup, members: Sequence[int]) -> None:
        self.group, self.members = group, tuple(members)

    def work(self, exchange: Exchange) -> Callable[[Sequence[Tensor], Sequence[Tensor]], None]:
        """The function from inputs to outputs."""
        function = {
            "all_gather": self._all_gather,
            "reduce_scatter": self._reduce_scatter,
            "all_reduce": self._all_reduce,
            "all_to_all": self._all_to_all,
            "permute": self._all_to_all,
        }[exchange.kind]
        return lambda inputs, outputs: function(exchange, inputs, outputs)

    def _all_gather(self, exchange: Exchange, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        sizes = [_numel(_parts(exchange, peer, sends=False)) for peer in range(len(self.members))]
        wide = max(sizes)
        if wide == 0:
            return
        gathered = outputs[0].new_empty(len(sizes) * wide)
        mine = gathered.new_empty(wide)
        _pack(_parts(exchange, exchange.me, sends=True), inputs, mine)
        all_gather_single(gathered, mine, group=self.group)
        for peer, flat in enumerate(gathered.split(wide)):
            _unpack(_parts(exchange, peer, sends=False), flat, outputs)

    def _reduce_scatter(
        self, exchange: Exchange, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        by_peer = [_parts(exchange, peer, sends=True) for peer in range(len(self.members))]
        wide = max(map(_numel, by_peer))
        if wide == 0:
            return
        given = inputs[0].new_zeros(len(by_peer) * wide)
        for parts, flat in zip(by_peer, given.split(wide), strict=True):
            _pack(parts, inputs, flat)
        mine = given.new_empty(wide)
        reduce_scatter_single(mine, given, op=_OPS[exchange.reduce], group=self.group)
        _unpack(_parts(exchange, exchange.me, sends=False), mine, outputs)

    def _all_reduce(self, exchange: Exchange, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        parts = _parts(exchange, exchange.me, sends=True)
        if not parts:
            return
        ((tensor, _), *others) = parts
        if not others and inputs[tensor] is outputs[tensor]:
            dist.all_reduce(inputs[tensor], op=_OPS[exchange.reduce], group=self.group)
            return
        flat = inputs[0].new_empty(_numel(parts))
        _pack(parts, inputs, flat)
        dist.all_reduce(flat, op=_OPS[exchange.reduce], group=self.group)
        _unpack(_parts(exchange, exchange.me, sends=False), flat, outputs)

    def _all_to_all(self, exchange: Exchange, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        peers = range(len(self.members))
        out_parts = [_parts(exchange, peer, sends=True) for peer in peers]
        in_parts = [_parts(exchange, peer, sends=False) for peer in peers]
        out_sizes, in_sizes = list(map(_numel, out_parts)), list(map(_numel, in_parts))
        given, got = inputs[0].new_empty(sum(out_sizes)), outputs[0].new_empty(sum(in_sizes))
        for parts, flat in zip(out_parts, given.split(out_sizes), strict=True):
            _pack(parts, inputs, flat)
        dist.all_to_all_single(got, given, in_sizes, out_sizes, group=self.group)
        for parts, flat in zip(in_parts, got.split(in_sizes), strict=True):
            _unpack(parts, flat, outputs)


class NcclCommunicator:
    """A group of ranks with a stream of its own; NCCL connects here, not in the first step."""

    def __init__(self, group: dist.ProcessGroup, members: Sequence[int]) -> None:
        self.work = NcclWork(group, members).work
        self.stream = torch.cuda.Stream()
        with torch.cuda.stream(self.stream):
            dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
        self.stream.synchronize()

    def collective(self, exchange: Exchange) -> Issue:
        """The function that issues a collective."""
        return _on_stream(self.stream, self.work(exchange))


class NcclPairs:
    """Sends and receives of one rank: a communicator and a stream for each rank that it talks to.

    Args:
      pairs: the groups of two, by (lower rank, higher rank).
      rank: this rank.
    """

    def __init__(self, pairs: Mapping[tuple[int, int], dist.ProcessGroup], rank: int) -> None:
        self.groups = {sum(pair) - rank: group for pair, group in pairs.items() if rank in pair}
        self.streams = {}
        for peer, group in self.groups.items():
            self.streams[peer] = stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
            stream.synchronize()

    def send(self, peer: int) -> Issue:
        """The function that sends the inputs to rank `peer`."""
        group = self.groups[peer]

        def work(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
            for x in filter(Tensor.numel, inputs):
                dist.send(x.contiguous(), dst=peer, group=group)

        return _on_stream(self.streams[peer], work)

    def recv(self, peer: int) -> Issue:
        """The function that receives the outputs from rank `peer`."""
        group = self.groups[peer]

        def work(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
            for x in filter(Tensor.numel, outputs):
                dist.recv(x, src=peer, group=group)

        return _on_stream(self.streams[peer], work)


# ---------------------------------------------------------------- packing


def _parts(exchange: Exchange, peer: int, *, sends: bool) -> list[tuple[int, Cut]]:
    cuts = [(move.sends if sends else move.recvs)[peer] for move in exchange.moves]
    return [(tensor, cut) for tensor, cut in enumerate(cuts) if cut is not None]


def _numel(parts: Sequence[tuple[int, Cut]]) -> int:
    return sum(cut.numel for _, cut in parts)


def _views(parts: Sequence[tuple[int, Cut]], flat: Tensor) -> Sequence[Tensor]:
    return flat[: _numel(parts)].split([cut.numel for _, cut in parts])


def _pack(parts: Sequence[tuple[int, Cut]], tensors: Sequence[Tensor], flat: Tensor) -> None:
    for (tensor, cut), view in zip(parts, _views(parts, flat), strict=True):
        part = cut.of(tensors[tensor])
        view.view(part.shape).copy_(part)


def _unpack(parts: Sequence[tuple[int, Cut]], flat: Tensor, tensors: Sequence[Tensor]) -> None:
    for (tensor, cut), view in zip(parts, _views(parts, flat), strict=True):
        target = cut.of(tensors[tensor])
        target.copy_(view.view(target.shape))
