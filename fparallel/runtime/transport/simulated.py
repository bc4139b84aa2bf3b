"""All ranks in one process, on real tensors, deterministic.

Every rank advances until it must wait; then the next one goes on. A communicator (the group of a collective,
the pair of a send and its recv) is a queue per rank: when all members have a step at the head of
their queues, the steps are compared and executed together.

Two modes bracket what real transports do. "rendezvous": issuing a step blocks until all members have issued
it, as a blocking send does. "buffered": issuing never blocks, only `wait` does, as streams do. When no rank
can advance, the schedule deadlocks, and the error shows where every rank stands.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from fparallel.errors import ExecutionError
from fparallel.mesh import Axis
from fparallel.runtime.exchange import Exchange, deliver
from fparallel.runtime.transport.base import Issue, Task, failure
from fparallel.schedule.ir import Schedule

MODES = ("rendezvous", "buffered")


class _Post:
    """A step that one rank has issued."""

    __slots__ = ("done", "exchange", "inputs", "outputs", "rank", "signature")

    def __init__(
        self,
        rank: int,
        signature: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        exchange: Exchange | None,
    ) -> None:
        self.rank, self.signature, self.exchange = rank, signature, exchange
        self.inputs, self.outputs = inputs, outputs
        self.done = False

    def wait(self) -> None:
        assert self.done, "the simulated transport waits in `execute`"


class SimulatedTransport:
    """Runs all ranks of a mesh in this process.

    Args:
      num_ranks: ranks of the mesh.
      mode: "buffered" or "rendezvous".
      seed: None to advance the ranks in turn, a number to choose the next one at random.
    """

    def __init__(self, num_ranks: int, mode: str = "buffered", *, seed: int | None = None) -> None:
        if mode not in MODES:
            raise ExecutionError(f"there is no mode {mode!r}", fix=f"use one of {', '.join(MODES)}")
        self.ranks = tuple(range(num_ranks))
        self.rendezvous = mode == "rendezvous"
        self.seed = seed
        self.queues: dict[Any, dict[int, collections.deque[_Post]]] = {}

    def prepare(self, schedule: Schedule) -> None:
        """Nothing is made ahead."""

    def collective(self, rank: int, exchange: Exchange) -> Issue:
        queues = self._queues(("group", exchange.members), exchange.members)

        def issue(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> _Post:
            post = _Post(rank, exchange.signature, tuple(inputs), tuple(outputs), exchange)
            queues[rank].append(post)
            _match(queues)
            return post

        return issue

    def send(self, rank: int, peer: int, axis: Axis, signature: str) -> Issue:
        return self._one_way(rank, peer, f"send {signature}")

    def recv(self, rank: int, peer: int, axis: Axis, signature: str) -> Issue:
        return self._one_way(rank, peer, f"recv {signature}")

    def _one_way(self, rank: int, peer: int, signature: str) -> Issue:
        pair = (min(rank, peer), max(rank, peer))
        queues = self._queues(("pair", pair), pair)

        def issue(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> _Post:
            post = _Post(rank, signature, tuple(inputs), tuple(outputs), None)
            queues[rank].append(post)
            _match(queues)
            return post

        return issue

    def _queues(self, key: Any, members: Sequence[int]) -> dict[int, collections.deque[_Post]]:
        return self.queues.setdefault(key, {rank: collections.deque() for rank in members})

    def execute(self, tasks: Sequence[Task]) -> None:
        """Advances all tasks to their end; see `Transport.execute`."""
        for queues in self.queues.values():
            for queue in queues.values():
                queue.clear()  # what an earlier, failed run left
        order = random.Random(self.seed)
        running = {task.rank: (task, _advance(task)) for task in tasks}
        blocked: dict[int, Sequence[_Post]] = {}
        while running:
            ready = [rank for rank in running if all(post.done for post in blocked.get(rank, ()))]
            if not ready:
                raise self._deadlock([running[rank][0] for rank in running], blocked)
            for rank in ready if self.seed is None else [order.choice(ready)]:
                try:
                    blocked[rank] = next(running[rank][1])
                except StopIteration:
                    del running[rank]

    def _deadlock(self, tasks: Sequence[Task], blocked: dict[int, Sequence[_Post]]) -> ExecutionError:
        lines = []
        for task in tasks:
            missing = set()
            for queues in self.queues.values():
                for queue in queues.values():
                    if any(post in queue for post in blocked[task.rank]):
                        missing |= {rank for rank, other in queues.items() if not other}
            lines.append(task.report(task.at))
            if missing:
                lines.append(f"    not yet there: {', '.join(f'rank {rank}' for rank in sorted(missing))}")
        mode = "rendezvous" if self.rendezvous else "buffered"
        return ExecutionError(
            f"deadlock: no rank can go on ({mode} mode)\n" + "\n".join(lines),
            fix="order the steps so that all members of a group reach each; schedule.verify() finds cycles",
        )

    def handshake(self, fingerprint: str, parts: dict[str, str]) -> None:
        """All ranks live here and share one schedule: there is nothing to compare."""


def _advance(task: Task) -> Iterator[Sequence[_Post]]:
    try:
        for number, step in enumerate(task.steps):
            task.at = number
            waiting: Any = step(task.slots)
            if waiting is not None and not all(post.done for post in waiting):
                yield waiting
    except Exception as error:
        raise failure(task, error) from error


def _match(queues: dict[int, collections.deque[_Post]]) -> None:
    """Executes the step at the head of the queues if all members have issued one."""
    if not all(queues.values()):
        return
    posts = [queue[0] for queue in queues.values()]
    kinds = {post.signature[:4] for post in posts}
    if posts[0].exchange is None and len(kinds) == 1:
        return  # both send, or both receive: the pair's queue is stuck
    for queue in queues.values():
        queue.popleft()
    if len({post.signature.removeprefix("send").removeprefix("recv") for post in posts}) > 1:
        shown = "\n".join(f"  rank {post.rank}: {post.signature}" for post in posts)
        raise ExecutionError(
            f"the members of a group do not agree on their next step\n{shown}",
            fix="give all members the same collectives in the same order; schedule.verify() compares them",
        )
    exchanges = [post.exchange for post in posts if post.exchange is not None]
    for post in posts:
        if any(x is out for x, out in zip(post.inputs, post.outputs, strict=False)):
            post.inputs = tuple(
                x.clone() for x in post.inputs
            )  # in place: others read it after it is written
    if not exchanges:
        source, target = sorted(posts, key=lambda post: not post.inputs)
        for x, out in zip(source.inputs, target.outputs, strict=True):
            out.copy_(x)
    for post, exchange in zip(posts, exchanges, strict=False):
        for tensor, out in enumerate(post.outputs):
            parts: list[Tensor | None] = []
            for giver, theirs in zip(posts, exchanges, strict=True):
                cut = theirs.moves[tensor].sends[exchange.me]
                parts.append(None if cut is None else cut.of(giver.inputs[tensor]))
            deliver(exchange, tensor, parts, out)
    for post in posts:
        post.done = True
        post.inputs = post.outputs = ()
