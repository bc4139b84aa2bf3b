"""Collectives between the processes of one host: each reads what it needs from the memory of the others.

A rank that issues a step tells its peers where its parts lie. Once a rank has been told by all, it reads the
parts, adds them in rank order (as the gloo and the simulated transports do, so all three are equal bit for
bit), and answers. A step has ended when its own reads are done and all peers have answered: then its inputs
may be overwritten. The thread of `links` does all of it, so a step completes once all members have issued it,
whatever they wait for next.
"""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from fparallel.runtime.exchange import Cut, Exchange
from fparallel.runtime.transport.base import Issue, Pending
from fparallel.runtime.transport.gloo import CHUNKED, chunked
from fparallel.runtime.transport.host_memory import Remote, combine
from fparallel.runtime.transport.links import Link, Note
from fparallel.runtime.transport.messages import Pool

Parts = Sequence[Tensor]
Told = Mapping[int, Sequence[int]]  # by peer, the addresses of its parts
# A transfer is known by its channel (collectives, or a direction between two members), the peer of a send, and
# its number there.
Key = tuple[int, int, int]
_TELLS, _ANSWERS = 0, 1
_COLLECTIVES, _UP, _DOWN = 0, 1, 2


class _Step:
    """What a rank waits for: one or two transfers; see `Pending`."""

    def __init__(self, transfers: int, deadline: float) -> None:
        self.unfinished, self.deadline = transfers, deadline
        self.done = threading.Event()
        self.error: Exception | None = None

    def ended(self) -> None:
        self.unfinished -= 1
        if self.unfinished == 0:
            self.done.set()

    def failed(self, error: Exception) -> None:
        self.error = error
        self.done.set()

    def wait(self) -> None:
        if not self.done.wait(self.deadline):
            raise RuntimeError("timed out")
        if self.error is not None:
            raise RuntimeError(str(self.error)) from self.error


class _Transfer:
    """One exchange in flight.

    Attributes:
      read: reads what the peers have told of; None once it has.
      held: the tensors that the peers and `read` need.
      staged: those of them that go back to the pool.
      untold: the peers that have not yet told where their parts are.
      unanswered: the peers that have not yet read.
    """

    __slots__ = ("held", "read", "staged", "step", "told", "unanswered", "untold")

    def __init__(
        self, step: _Step, read: Callable[[Told], None], held: Parts, staged: Parts, unanswered: set[int]
    ) -> None:
        self.step, self.held, self.staged, self.unanswered = step, list(held), staged, unanswered
        self.read: Callable[[Told], None] | None = read
        self.told: dict[int, Sequence[int]] = {}
        self.untold: set[int] = set()


class HostCommunicator:
    """One group of ranks, all on this host: its steps are matched in the order of their issue.

    Args:
      links: to all other members, by position.
      members: the ranks, ascending.
      me: the position of this rank.
      deadline: seconds that a wait may take.
    """

    def __init__(
        self, links: Mapping[int, Link], members: Sequence[int], me: int, pool: Pool, deadline: float
    ) -> None:
        self.links, self.members, self.me = dict(links), tuple(members), me
        self.pool, self.deadline = pool, deadline
        self.lock = threading.Lock()  # the rank's own thread and that of the links
        self.transfers: dict[Key, _Transfer] = {}
        self.early: dict[Key, dict[int, Sequence[int]]] = {}  # told before this rank issued the step
        self.counts: collections.Counter[tuple[int, int]] = collections.Counter()
        for peer, link in self.links.items():
            link.serve(functools.partial(self._receive, peer), functools.partial(self._lose, peer))

    def collective(self, exchange: Exchange) -> Issue:
        """The function that issues a collective."""
        if is_chunked(exchange):
            scatter, gather = (self._exchange(half, whole_chunks=True) for half in chunked(exchange))

            def issue(inputs: Parts, outputs: Parts) -> Pending:
                step = _Step(2, self.deadline)
                first, second = self._key(_COLLECTIVES), self._key(_COLLECTIVES)
                scatter(inputs, outputs, step, first, lambda: gather(outputs, outputs, step, second))
                return step

            return issue
        exchange_once = self._exchange(exchange)

        def issue_once(inputs: Parts, outputs: Parts) -> Pending:
            step = _Step(1, self.deadline)
            exchange_once(inputs, outputs, step, self._key(_COLLECTIVES))
            return step

        return issue_once

    def send(self, peer: int) -> Issue:
        """The function that sends the inputs to rank `peer`."""
        peer = self.members.index(peer)
        channel = _UP if self.me < peer else _DOWN

        def issue(inputs: Parts, outputs: Parts) -> Pending:
            step = _Step(1, self.deadline)
            given = [x.contiguous() for x in inputs if x.numel()]
            key = self._key(channel, peer)
            self._start(step, key, {peer: given} if given else {}, (), lambda _: None, given)
            return step

        return issue

    def recv(self, peer: int) -> Issue:
        """The function that receives the outputs from rank `peer`."""
        peer = self.members.index(peer)
        channel, memory = _DOWN if self.me < peer else _UP, self.links[peer].memory

        def issue(inputs: Parts, outputs: Parts) -> Pending:
            targets = [x for x in outputs if x.numel()]

            def read(told: Told) -> None:
                for address, target in zip(told.get(peer, ()), targets, strict=True):
                    combine("", [Remote(memory, address)], target)

            step = _Step(1, self.deadline)
            self._start(step, self._key(channel, peer), {}, (peer,) if targets else (), read, targets)
            return step

        return issue

    def _key(self, channel: int, peer: int = -1) -> Key:
        self.counts[channel, peer] += 1
        return channel, peer, self.counts[channel, peer]

    def _exchange(self, exchange: Exchange, *, whole_chunks: bool = False) -> Callable[..., None]:
        """The function (inputs, outputs, step, key, then) that starts one exchange.

        `whole_chunks`: it is half of an all_reduce in chunks, which no two members read and write at a time.
        """
        me, moves, dtype = exchange.me, exchange.moves, exchange.dtype
        sends = {peer: _parts(exchange, peer, sends=True) for peer in self.links}
        recvs = {peer: _parts(exchange, peer, sends=False) for peer in self.links}
        givers = [peer for peer, parts in recvs.items() if parts]
        order = {peer: {t: at for at, (t, _) in enumerate(parts)} for peer, parts in recvs.items()}
        memories = {peer: link.memory for peer, link in self.links.items()}

        def read(inputs: Parts, outputs: Parts, told: Told) -> None:
            for tensor, move in enumerate(moves):
                found: list[tuple[Cut, Tensor | Remote]] = []
                for peer, place in enumerate(move.recvs):
                    if place is None:
                        continue
                    if peer != me:
                        found.append((place, Remote(memories[peer], told[peer][order[peer][tensor]])))
                    elif (own := move.sends[me]) is not None:
                        found.append((place, own.of(inputs[tensor])))
                if exchange.reduce and found:
                    target = found[0][0].of(outputs[tensor])
                    parts = [p.reshape(target.shape) if isinstance(p, Tensor) else p for _, p in found]
                    combine(exchange.reduce, parts, target)
                    continue
                for place, part in found:
                    target = place.of(outputs[tensor])
                    if isinstance(part, Tensor):
                        target.copy_(part.reshape(target.shape))
                    else:
                        combine("", [part], target)

        def start(
            inputs: Parts, outputs: Parts, step: _Step, key: Key, then: Callable[[], None] | None = None
        ) -> None:
            inputs = [x.contiguous() for x in inputs]
            if not whole_chunks and inputs and inputs[0] is outputs[0]:
                inputs = [x.clone() for x in inputs]  # in place, and peers read what is written here
            staged: list[Tensor] = []

            def contiguous(part: Tensor) -> Tensor:
                if part.is_contiguous():
                    return part
                packed = self.pool.take(part.numel(), dtype)
                staged.append(packed)
                packed.view(part.shape).copy_(part)
                return packed

            def run(told: Told) -> None:
                read(inputs, outputs, told)
                if then is not None:
                    then()

            shown = {
                peer: [contiguous(cut.of(inputs[tensor])) for tensor, cut in parts]
                for peer, parts in sends.items()
                if parts
            }
            self._start(step, key, shown, givers, run, [*inputs, *outputs], staged)

        return start

    # ------------------------------------------------------------ transfers

    def _start(
        self,
        step: _Step,
        key: Key,
        shown: Mapping[int, Parts],
        givers: Sequence[int],
        read: Callable[[Told], None],
        held: Parts,
        staged: Parts = (),
    ) -> None:
        """Tells the peers where their parts are, and reads if all givers have told already."""
        transfer = _Transfer(step, read, held, staged, set(shown))
        with self.lock:
            transfer.told = self.early.pop(key, {})
            transfer.untold = set(givers) - set(transfer.told)
            self.transfers[key] = transfer
            ready = not transfer.untold
            gone = sorted(peer for peer in transfer.unanswered | transfer.untold if self.links[peer].gone)
        if gone:
            step.failed(RuntimeError(f"{self.links[gone[0]].peer} has ended"))
            return
        try:
            for peer, given in shown.items():
                table = self.links[peer].send((_TELLS, *key), [x.data_ptr() for x in given])
                if table is not None:
                    transfer.held.append(table)
        except RuntimeError as error:
            step.failed(error)
            return
        if ready:
            self._read(key, transfer)

    def _receive(self, peer: int, note: Note, addresses: Sequence[int]) -> None:
        kind, channel, to, number = note
        key = (channel, to if channel == _COLLECTIVES else peer, number)
        with self.lock:
            transfer = self.transfers.get(key)
            if kind == _ANSWERS:
                assert transfer is not None, f"an answer to {key}, which is not in flight"
                transfer.unanswered.discard(peer)
                self._end_if_done(key, transfer)
                return
            if transfer is None:
                self.early.setdefault(key, {})[peer] = addresses
                return
            transfer.told[peer] = addresses
            transfer.untold.discard(peer)
            ready = not transfer.untold
        if ready:
            self._read(key, transfer)

    def _read(self, key: Key, transfer: _Transfer) -> None:
        assert transfer.read is not None
        try:
            transfer.read(transfer.told)
            for peer in transfer.told:
                self.links[peer].send((_ANSWERS, *key))
        except Exception as error:
            transfer.step.failed(error)
            return
        with self.lock:
            transfer.read = None
            self._end_if_done(key, transfer)

    def _end_if_done(self, key: Key, transfer: _Transfer) -> None:
        if transfer.read is None and not transfer.unanswered:
            del self.transfers[key]
            for tensor in transfer.staged:
                self.pool.give(tensor)
            transfer.step.ended()

    def _lose(self, peer: int, why: str) -> None:
        with self.lock:
            waiting = [t for t in self.transfers.values() if peer in t.untold or peer in t.unanswered]
        for transfer in waiting:
            transfer.step.failed(RuntimeError(why))


def is_chunked(exchange: Exchange) -> bool:
    """Whether an all_reduce is better cut into chunks, each summed by one member and read by all."""
    received = sum(cut.numel for move in exchange.moves if (cut := move.recvs[exchange.me]))
    return exchange.kind == "all_reduce" and received * exchange.dtype.itemsize >= CHUNKED


def _parts(exchange: Exchange, peer: int, *, sends: bool) -> list[tuple[int, Cut]]:
    cuts = [(move.sends if sends else move.recvs)[peer] for move in exchange.moves]
    return [(tensor, cut) for tensor, cut in enumerate(cuts) if cut is not None]
