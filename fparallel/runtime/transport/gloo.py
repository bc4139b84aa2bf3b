"""Collectives between CPU processes of several hosts, built from gloo's sends and receives.

gloo's own collectives are left alone, for three reasons: sums must be in ascending rank order, whatever the
bucket or the algorithm, so that they equal the simulated transport bit for bit; uneven shards must travel
without padding; and exchanging parts directly is faster.

Every collective is one direct exchange: each rank sends each peer the parts that it needs, and adds what
arrives in rank order. A large all_reduce is two: a reduce_scatter of flat chunks, then an all_gather of them.
All messages of an exchange are posted when it is issued, and gloo's own thread moves them; the second half of
a large all_reduce is posted by a helper thread. So a step completes once all members have issued it, whatever
they wait for next.

Between processes of one host, `host` is faster still. Milliseconds for one float32 tensor, one thread a rank,
two cores (`benchmarks/collectives.py`; "sent" is this module, "read" is `host`):

    ranks  size      all_gather          reduce_scatter      all_reduce
                     gloo  sent  read    gloo  sent  read    gloo  sent  read
    2      64 KiB     0.4   0.5   0.4     0.9   0.6   0.6     1.1   0.8   0.3
    2      1 MiB      1.3   0.8   0.8     1.8   1.0   0.8     1.3   2.2   1.4
    2      8 MiB      8.0   4.6   2.7      12   5.5   3.2     7.8   9.3   4.6
    2      64 MiB      80    32    17     102    33    20      52    69    29
    4      64 KiB     3.1   2.6   1.4     4.7   2.7   1.7     4.3   2.3   1.6
    4      1 MiB      3.2   2.5   2.0     4.9   3.3   2.5     4.1   5.9   4.0
    4      8 MiB       14    10   7.7      27    12   8.3      18    22    14
    4      64 MiB     150    65    39     225    85    45     137   151    74
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fparallel.factors import chunk_sizes
from fparallel.mesh import Axis
from fparallel.runtime.exchange import Cut, Exchange, Move, deliver
from fparallel.runtime.transport.base import Issue, Pending
from fparallel.runtime.transport.messages import Message, Pool, messages

# From this many bytes on, an all_reduce over more than two ranks goes through flat chunks: it then moves the
# tensor 2(n-1)/n times instead of n-1 times, for one more round trip.
CHUNKED = 1 << 20
_STEPS, _MESSAGES = 1 << 16, 1 << 12  # a tag is (step, message); sends and recvs have a range of their own


class GlooCommunicator:
    """One group of ranks: its steps are matched in the order of their issue.

    Args:
      group: a gloo process group over `members`; None for one member, which needs none.
      members: its ranks, ascending.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, members: Sequence[int], pool: Pool, deadline: float
    ) -> None:
        self.group: Any = group
        self.members, self.pool = tuple(members), pool
        self.timeout = timedelta(seconds=deadline)
        self.step = 0
        self.helper = _Helper(deadline)
        self.one_way: dict[tuple[int, bool], int] = {}

    def next_tag(self) -> int:
        self.step = (self.step + 1) % _STEPS
        return self.step * _MESSAGES

    def collective(self, exchange: Exchange) -> Issue:
        """The function that issues a collective."""
        if is_chunked(exchange):
            scatter, gather = map(self._exchange, chunked(exchange))

            def issue(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Pending:
                first, second = self.next_tag(), self.next_tag()
                scattering = scatter(inputs, outputs, first)

                def rest() -> None:
                    scattering.wait()
                    gather(outputs, outputs, second).wait()

                return self.helper.submit(rest)

            return issue
        exchange_once = self._exchange(exchange)

        def issue_once(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Pending:
            return exchange_once(inputs, outputs, self.next_tag())

        return issue_once

    def send(self, peer: int) -> Issue:
        """The function that sends the inputs, one message each, to rank `peer`."""
        peer = self.members.index(peer)

        def issue(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> _Pending:
            tag = self._one_way_tag(peer, sends=True)
            held = [x.contiguous() for x in inputs if x.numel()]
            return _Pending(self, [self.group.send([x], peer, tag + i) for i, x in enumerate(held)], held)

        return issue

    def recv(self, peer: int) -> Issue:
        """The function that receives the outputs from rank `peer`."""
        peer = self.members.index(peer)

        def issue(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> _Pending:
            tag = self._one_way_tag(peer, sends=False)
            held = [x for x in outputs if x.numel()]
            return _Pending(self, [self.group.recv([x], peer, tag + i) for i, x in enumerate(held)], held)

        return issue

    def _one_way_tag(self, peer: int, *, sends: bool) -> int:
        at = self.one_way.get((peer, sends), 0)
        self.one_way[(peer, sends)] = (at + 1) % _STEPS
        return (_STEPS + at) * _MESSAGES

    def _exchange(self, exchange: Exchange) -> Callable[..., _Pending]:
        """The function (inputs, outputs, tag) that starts one direct exchange."""
        outgoing = _slotted(messages(exchange, sends=True))
        incoming = _slotted(messages(exchange, sends=False))
        group, pool, me, dtype = self.group, self.pool, exchange.me, exchange.dtype
        own = [] if exchange.reduce else [
            (tensor, send, recv)
            for tensor, move in enumerate(exchange.moves)
            if (send := move.sends[me]) is not None and (recv := move.recvs[me]) is not None
        ]  # fmt: skip
        if exchange.reduce:

            def finish(
                arrived: list[tuple[Message, Tensor]], inputs: Sequence[Tensor], outputs: Sequence[Tensor]
            ) -> None:
                _reduce(exchange, arrived, inputs, outputs)
        else:

            def finish(
                arrived: list[tuple[Message, Tensor]], inputs: Sequence[Tensor], outputs: Sequence[Tensor]
            ) -> None:
                for message, flat in arrived:
                    for part, (tensor, cut) in zip(message.split(flat), message.parts, strict=True):
                        target = cut.of(outputs[tensor])
                        target.copy_(part.view(target.shape))

        def start(inputs: Sequence[Tensor], outputs: Sequence[Tensor], tag: int) -> _Pending:
            works, held, arrived, staged = [], [], [], []
            inputs = [x.contiguous() for x in inputs]
            for message, slot in incoming:
                if message.direct:
                    tensor, cut = message.parts[0]
                    target = cut.of(outputs[tensor])
                    held.append(target)
                else:
                    target = pool.take(message.numel, dtype)
                    arrived.append((message, target))
                    staged.append(target)
                works.append(group.recv([target], message.peer, tag + slot))
            for message, slot in outgoing:
                flat, from_pool = message.pack(inputs, pool)
                (staged if from_pool else held).append(flat)
                works.append(group.send([flat], message.peer, tag + slot))
            for tensor, send, recv in own:
                target = recv.of(outputs[tensor])
                target.copy_(send.of(inputs[tensor]).reshape(target.shape))
            return _Pending(self, works, held, staged, lambda: finish(arrived, inputs, outputs))

        return start


def _slotted(found: Sequence[Message]) -> list[tuple[Message, int]]:
    """Each message with its position among those of its peer: the last part of its tag."""
    seen: dict[int, int] = {}
    result = []
    for message in found:
        slot = seen[message.peer] = seen.get(message.peer, -1) + 1
        result.append((message, slot % _MESSAGES))
    return result


def _reduce(
    exchange: Exchange,
    arrived: list[tuple[Message, Tensor]],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
) -> None:
    parts: list[list[Tensor | None]] = [[None] * len(exchange.members) for _ in exchange.moves]
    for message, flat in arrived:
        for part, (tensor, _) in zip(message.split(flat), message.parts, strict=True):
            parts[tensor][message.peer] = part
    for tensor, out in enumerate(outputs):
        own = exchange.moves[tensor].sends[exchange.me]
        if own is not None:
            part = own.of(inputs[tensor])
            parts[tensor][exchange.me] = part.clone() if inputs[tensor] is out else part  # in place
        deliver(exchange, tensor, parts[tensor], out)


class _Pending:
    """An exchange in flight; see `Pending`."""

    __slots__ = ("communicator", "finish", "held", "staged", "works")

    def __init__(
        self,
        communicator: GlooCommunicator,
        works: list[Any],
        held: list[Tensor],
        staged: Sequence[Tensor] = (),
        finish: Callable[[], None] | None = None,
    ) -> None:
        self.communicator, self.works, self.held = communicator, works, held
        self.staged, self.finish = staged, finish

    def wait(self) -> None:
        timeout = self.communicator.timeout
        for work in self.works:
            work.wait(timeout)
        if self.finish is not None:
            self.finish()
        for tensor in self.staged:
            self.communicator.pool.give(tensor)
        self.works, self.held, self.staged, self.finish = [], [], (), None


class _Helper:
    """A thread that does work in the order of submission; it starts with the first."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.queue: queue.SimpleQueue[tuple[Callable[[], None], _Later]] = queue.SimpleQueue()
        self.thread: threading.Thread | None = None

    def submit(self, work: Callable[[], None]) -> _Later:
        if self.thread is None:
            arguments = (self.queue, torch.get_num_threads())
            self.thread = threading.Thread(target=_work, args=arguments, name="fparallel-gloo", daemon=True)
            self.thread.start()
        later = _Later(self.deadline)
        self.queue.put((work, later))
        return later


def _work(todo: queue.SimpleQueue[tuple[Callable[[], None], _Later]], num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    with torch.no_grad():
        while True:
            work, later = todo.get()
            try:
                work()
            except Exception as error:
                later.error = error
            later.done.set()
            del work, later  # they hold tensors


class _Later:
    """Work that a helper has been given; see `Pending`."""

    def __init__(self, deadline: float) -> None:
        self.done = threading.Event()
        self.error: Exception | None = None
        self.deadline = deadline

    def wait(self) -> None:
        # the helper's own waits time out first: each of its two exchanges has the deadline to itself
        if not self.done.wait(2 * self.deadline + 1):
            raise RuntimeError("timed out")
        if self.error is not None:
            raise self.error


# ---------------------------------------------------------------- all_reduce in two exchanges


def is_chunked(exchange: Exchange) -> bool:
    """Whether a step is an all_reduce that is better cut into chunks."""
    if exchange.kind != "all_reduce" or len(exchange.members) <= 2:
        return False
    nbytes = (
        sum(cut.numel for move in exchange.moves if (cut := move.recvs[exchange.me]))
        * exchange.dtype.itemsize
    )
    return nbytes >= CHUNKED


def chunked(exchange: Exchange) -> tuple[Exchange, Exchange]:
    """An all_reduce as a reduce_scatter of flat chunks into the output and an all_gather of them there."""
    num, me = len(exchange.members), exchange.me
    scatters, gathers = [], []
    for move in exchange.moves:
        numel = next((cut.numel for cut in move.recvs if cut is not None), 0)
        sizes = chunk_sizes(numel, (Axis("chunk", num),))
        chunks = [
            Cut((numel,), ((0, sum(sizes[:i]), size),), size) if size else None
            for i, size in enumerate(sizes)
        ]
        scatters.append(Move(tuple(chunks), (chunks[me],) * num, move.in_shape, move.out_shape))
        mine = tuple(chunks[me] if i != me else None for i in range(num))
        gathers.append(
            Move(
                mine, tuple(chunks[i] if i != me else None for i in range(num)), move.in_shape, move.out_shape
            )
        )
    return replace(exchange, moves=tuple(scatters)), replace(exchange, moves=tuple(gathers), reduce="")
