"""The ranks of a job, one process each: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fparallel.errors import ExecutionError
from fparallel.mesh import Axis, Mesh
from fparallel.runtime.exchange import Exchange
from fparallel.runtime.transport.base import Issue, Task, failure
from fparallel.runtime.transport.gloo import GlooCommunicator
from fparallel.runtime.transport.job import DEADLINE, join_job
from fparallel.runtime.transport.messages import Pool
from fparallel.runtime.watchdog import Watchdog
from fparallel.schedule.ir import Collective, Recv, Schedule, Send

__all__ = ["DistributedTransport", "join_job", "tune_allocator"]

_P2P, _GROUP = "p2p", "group"


class DistributedTransport:
    """Moves tensors between the processes of a job.

    Args:
      mesh: a mesh of kind "job".
      deadline: seconds that any wait may take before the rank reports where it stands and fails.

    Raises:
      MeshError: the process cannot join the job.
    """

    rendezvous = False

    def __init__(self, mesh: Mesh, *, deadline: float = DEADLINE) -> None:
        join_job(mesh.device)
        self.mesh, self.deadline = mesh, deadline
        self.rank = dist.get_rank()
        self.ranks = (self.rank,)
        self.task: Task | None = None
        self.watchdog = Watchdog(deadline, self._report)
        if mesh.device == "cpu":
            tune_allocator()

    def prepare(self, schedule: Schedule) -> None:
        """Makes the communicators of all programs; collective, in the same order on every rank."""
        wanted: set[tuple[str, str]] = set()
        for program in schedule.programs:
            for instr in program.instrs:
                if isinstance(instr, Collective):
                    wanted.add((_GROUP, "*".join(map(str, instr.axes))))
                elif isinstance(instr, (Send, Recv)):
                    wanted.add((_P2P, str(instr.axis)))
        with self.watchdog:
            for use, axes in sorted(wanted):
                self._communicator(use, self.mesh.axes(axes))

    def _communicator(self, use: str, axes: tuple[Axis, ...]) -> Any:
        """The communicator of this rank over `axes`; the first call makes those of all ranks."""
        known = _communicators()
        key = (
            use,
            self.mesh.sizes,
            self.mesh.names,
            self.mesh.device,
            "*".join(map(str, axes)),
            self.deadline,
        )
        if key not in known:
            groups = sorted({tuple(sorted(self.mesh.group(axes, at))) for at in self.mesh.rank_coords})
            for members in groups:
                made = self._make(use, members)
                if self.rank in members:
                    known[key] = made
        return known[key]

    def _make(self, use: str, members: tuple[int, ...]) -> Any:
        timeout = timedelta(seconds=self.deadline)
        if self.mesh.device == "cpu":
            group = dist.new_group(list(members), timeout=timeout, backend="gloo")
            return GlooCommunicator(group, members, _POOL, self.deadline) if self.rank in members else None
        from fparallel.runtime.transport.nccl import NcclCommunicator, NcclPairs

        if use == _GROUP:
            group = dist.new_group(list(members), timeout=timeout, backend="nccl")
            return NcclCommunicator(group, members) if self.rank in members else None
        pairs = {
            (a, b): dist.new_group([a, b], timeout=timeout, backend="nccl")
            for a in members
            for b in members
            if a != b
        }
        return NcclPairs(pairs, members, self.rank) if self.rank in members else None

    def collective(self, rank: int, exchange: Exchange) -> Issue:
        return self._communicator(_GROUP, exchange.axes).collective(exchange)

    def send(self, rank: int, peer: int, axis: Axis, signature: str) -> Issue:
        communicator = self._communicator(_P2P, (axis,))
        return communicator.send(communicator.members.index(peer))

    def recv(self, rank: int, peer: int, axis: Axis, signature: str) -> Issue:
        communicator = self._communicator(_P2P, (axis,))
        return communicator.recv(communicator.members.index(peer))

    def execute(self, tasks: Sequence[Task]) -> None:
        """Runs this rank's task to its end; see `Transport.execute`."""
        (task,) = tasks
        self.task = task
        try:
            for number, step in enumerate(task.steps):
                task.at = number
                waiting: Any = step(task.slots)
                if waiting:
                    with self.watchdog:
                        self._join(waiting)
        except Exception as error:
            raise failure(task, error) from error
        finally:
            self.task = None

    def _join(self, waiting: Sequence[Any]) -> None:
        try:
            if len(waiting) > 1:
                for (
                    pending
                ) in waiting:  # starts the second halves of all before waiting for the first of them
                    pending.arrive()
            for pending in waiting:
                pending.wait()
        except RuntimeError as error:
            assert self.task is not None
            text = str(error).splitlines()[0]
            late = "imed out" in text or "timeout" in text.lower()
            why = f"no answer within the deadline of {self.deadline:g} s" if late else "a peer is gone"
            raise ExecutionError(
                f"{why}: {text}\n{self._report()}",
                fix="look for the rank that failed first; this one only waited for it"
                + (", or raise the deadline if a step takes longer" if late else ""),
            ) from error

    def _report(self) -> str:
        task = self.task
        return f"rank {self.rank}: before the first step" if task is None else task.report(task.at)

    def handshake(self, fingerprint: str, parts: dict[str, str]) -> None:
        """Compares what all ranks are about to run.

        Args:
          fingerprint: a digest of everything that must be equal.
          parts: what it was made of, by name: each a digest or a version.

        Raises:
          ExecutionError: names the ranks that differ from most, and the parts in which they do.
        """
        num_ranks = dist.get_world_size()
        if num_ranks == 1:
            return
        given: list[Any] = [None] * num_ranks
        try:
            with self.watchdog:
                dist.all_gather_object(given, (fingerprint, parts), group=self._control())
        except RuntimeError as error:
            raise ExecutionError(
                f"rank {self.rank}: not all of the {num_ranks} ranks came to compare their schedules: {error}",
                fix="look for the rank that failed first, or that runs other code before this step",
            ) from error
        difference = compare(given)
        if difference:
            raise ExecutionError(
                f"the ranks are about to run different programs\n{difference}",
                fix="give every rank the same code, versions, arguments and constants",
            )

    def _control(self) -> dist.ProcessGroup:
        known = _communicators()
        key = ("control", self.deadline)
        if key not in known:
            timeout = timedelta(seconds=self.deadline)
            known[key] = dist.new_group(list(range(dist.get_world_size())), timeout=timeout, backend="gloo")
        return known[key]


_POOL = Pool()
_COMMUNICATORS: dict[Any, Any] = {}
_WORLD: list[Any] = [None]


def _communicators() -> dict[Any, Any]:
    """The communicators of the process group that exists now."""
    if _WORLD[0] is not dist.group.WORLD:
        _COMMUNICATORS.clear()
        _WORLD[0] = dist.group.WORLD
    return _COMMUNICATORS


def compare(given: Sequence[tuple[str, dict[str, str]]]) -> str:
    """How ranks differ from the most common (fingerprint, parts), one line each; "" if none does."""
    fingerprints = [fingerprint for fingerprint, _ in given]
    usual = max(fingerprints, key=lambda f: (fingerprints.count(f), -fingerprints.index(f)))
    like = fingerprints.index(usual)
    lines = []
    for rank, (fingerprint, parts) in enumerate(given):
        if fingerprint == usual:
            continue
        for name in sorted(set(parts) | set(given[like][1])):
            mine, theirs = parts.get(name, "nothing"), given[like][1].get(name, "nothing")
            if mine != theirs:
                lines.append(f"  rank {rank}: {name} is {mine}, on rank {like} it is {theirs}")
    return "\n".join(lines)


@functools.cache
def tune_allocator() -> bool:
    """Makes glibc keep freed memory mapped, so that the next step does not fault it in again; once per
    process.

    A training step allocates and frees the same sizes again and again; by default glibc returns large blocks
    to the system each time, and the kernel zeroes them anew. Measured: benchmarks/allocator.py.

    Returns:
      Whether the C library took the setting (glibc does, others have no such function).
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3
    largest = 32 << 20  # glibc accepts no more on 64-bit systems; larger blocks stay mapped one by one
    return bool(
        mallopt(mmap_threshold, largest) and mallopt(trim_threshold, 2**31 - 1) and mallopt(top_pad, 64 << 20)
    )
