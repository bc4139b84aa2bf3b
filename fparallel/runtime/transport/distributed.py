"""The ranks of a job, one process each: NCCL between GPUs; between CPUs, memory reads on one host, else gloo."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fparallel.errors import ExecutionError
from fparallel.mesh import Axis, Mesh
from fparallel.runtime.exchange import Exchange
from fparallel.runtime.transport.base import Issue, Task, failure
from fparallel.runtime.transport.gloo import GlooCommunicator
from fparallel.runtime.transport.host import HostCommunicator
from fparallel.runtime.transport.job import DEADLINE, join_job
from fparallel.runtime.transport.links import connect
from fparallel.runtime.transport.messages import Pool
from fparallel.runtime.watchdog import Watch
from fparallel.schedule.ir import Collective, Recv, Schedule, Send, communicator

__all__ = ["DistributedTransport", "join_job", "return_freed_memory", "tune_allocator"]


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
        self.one_way: dict[Axis, tuple[Any, ...]] = {}
        self.watch = Watch(deadline, self._report)
        if mesh.device == "cpu":
            tune_allocator()

    def prepare(self, schedule: Schedule) -> None:
        """Makes the communicators of all programs; collective, in the same order on every rank."""
        groups = {
            communicator(i.axes) for p in schedule.programs for i in p.instrs if isinstance(i, Collective)
        }
        with self.watch:
            for axes in sorted(groups, key=str):
                self._group(axes)
            for axis, pairs in sorted(_talking(schedule).items(), key=str):
                self._one_way(axis, pairs)

    def _key(self, use: str, axes: str) -> tuple[Any, ...]:
        return (use, axes, self.mesh.sizes, self.mesh.names, self.mesh.device, self.deadline)

    def _group(self, axes: tuple[Axis, ...]) -> Any:
        """This rank's communicator for collectives over `axes`; the first call makes those of all ranks."""
        known, key = _communicators(), self._key("group", "*".join(map(str, axes)))
        if key not in known:
            for members in sorted({tuple(sorted(self.mesh.group(axes, at))) for at in self.mesh.rank_coords}):
                group = self._process_group(members)
                if self.rank in members:
                    known[key] = self._over(group, members)
        return known[key]

    def _over(self, group: Any, members: tuple[int, ...]) -> Any:
        if self.mesh.device == "cpu" or group is None:
            links = None if group is None else connect(group, members, self.deadline)
            if links is not None:
                dist.destroy_process_group(
                    group
                )  # its thread would wake a hundred times a second for nothing
                return HostCommunicator(links, members, members.index(self.rank), Pool(), self.deadline)
            return GlooCommunicator(group, members, Pool(), self.deadline)
        from fparallel.runtime.transport.nccl import NcclCommunicator

        return NcclCommunicator(group, members)

    def _one_way(self, axis: Axis, pairs: Sequence[tuple[int, int]]) -> Any:
        """This rank's communicator for sends and receives along an axis, between pairs of coordinates."""
        known, key = _communicators(), self._key("one way", f"{axis} {pairs}")
        self.one_way[axis] = key
        if key in known:
            return known[key]
        made: dict[tuple[int, int], dist.ProcessGroup | None] = {}
        for ranks in sorted({self.mesh.group((axis,), at) for at in self.mesh.rank_coords}):
            if self.mesh.device == "cpu":
                group = self._process_group(tuple(sorted(ranks)))
                if self.rank in ranks:
                    known[key] = self._over(group, tuple(sorted(ranks)))
            else:
                for low, high in pairs:
                    pair = (min(ranks[low], ranks[high]), max(ranks[low], ranks[high]))
                    made[pair] = self._process_group(pair)
        if self.mesh.device != "cpu":
            from fparallel.runtime.transport.nccl import NcclPairs

            known[key] = NcclPairs(
                {p: g for p, g in made.items() if g is not None and self.rank in p}, self.rank
            )
        return known.get(key)

    def _process_group(self, members: tuple[int, ...]) -> dist.ProcessGroup | None:
        if len(members) == 1:
            return None  # nothing travels
        backend = "gloo" if self.mesh.device == "cpu" else "nccl"
        return dist.new_group(list(members), timeout=timedelta(seconds=self.deadline), backend=backend)

    def collective(self, rank: int, exchange: Exchange) -> Issue:
        return self._issued(self._group(communicator(exchange.axes)).collective(exchange))

    def send(self, rank: int, peer: int, axis: Axis, signature: str) -> Issue:
        return self._issued(_communicators()[self.one_way[axis]].send(peer))

    def recv(self, rank: int, peer: int, axis: Axis, signature: str) -> Issue:
        return self._issued(_communicators()[self.one_way[axis]].recv(peer))

    def _issued(self, issue: Issue) -> Issue:
        """A peer that died may first be missed where a step is issued, not where one is waited for."""

        def step(given: Sequence[Tensor], made: Sequence[Tensor]) -> Any:
            try:
                return issue(given, made)
            except (RuntimeError, OSError) as error:
                if isinstance(error, (OSError, dist.DistError)) or any(word in str(error) for word in _LOST):
                    raise self._lost(error) from error
                raise

        return step

    def execute(self, tasks: Sequence[Task]) -> None:
        """Runs this rank's task to its end; see `Transport.execute`."""
        (task,) = tasks
        self.task = task
        try:
            for number, step in enumerate(task.steps):
                task.at = number
                waiting: Any = step(task.slots)
                if waiting:
                    with self.watch:
                        self._join(waiting)
        except Exception as error:
            raise failure(task, error) from error
        finally:
            self.task = None

    def _join(self, waiting: Sequence[Any]) -> None:
        try:
            for pending in waiting:
                pending.wait()
        except KeyboardInterrupt:
            print(f"fparallel: interrupted in a wait\n{self._report()}", file=sys.stderr, flush=True)
            raise
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> ExecutionError:
        """What an error of the network means."""
        text = str(error).splitlines()[0]
        late = "imed out" in text or "timeout" in text.lower()
        why = f"no answer within the deadline of {self.deadline:g} s" if late else "a peer is gone"
        return ExecutionError(
            f"{why}: {text}\n{self._report()}",
            fix="look for the rank that failed first; this one only waited for it"
            + (", or raise the deadline if a step takes longer" if late else ""),
        )

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
        if dist.get_world_size() == 1:
            return
        difference = compare(self.gather((fingerprint, parts), "compare schedules"))
        if difference:
            raise ExecutionError(
                f"the ranks are about to run different programs\n{difference}",
                fix="give every rank the same code, versions, arguments and constants",
            )

    def gather(self, value: Any, purpose: str) -> list[Any]:
        """One picklable value from every rank, in rank order, within the deadline.

        Raises:
          ExecutionError: a rank did not come.
        """
        num_ranks = dist.get_world_size()
        given: list[Any] = [None] * num_ranks
        try:
            with self.watch:
                dist.all_gather_object(given, value, group=self._control())
        except RuntimeError as error:
            raise ExecutionError(
                f"rank {self.rank}: not all of the {num_ranks} ranks came to {purpose}: {error}",
                fix="look for the rank that failed first, or that runs other code before this step",
            ) from error
        return given

    def _control(self) -> dist.ProcessGroup:
        known = _communicators()
        key = ("control", self.deadline)
        if key not in known:
            timeout = timedelta(seconds=self.deadline)
            known[key] = dist.new_group(list(range(dist.get_world_size())), timeout=timeout, backend="gloo")
        return known[key]


_LOST = ("gloo", "NCCL", "onnection", "ocket")  # of errors in which torch says no more than RuntimeError
_COMMUNICATORS: dict[Any, Any] = {}
_WORLD: list[Any] = [None]


def _communicators() -> dict[Any, Any]:
    """The communicators of the process group that exists now."""
    if _WORLD[0] is not dist.group.WORLD:
        _COMMUNICATORS.clear()
        _WORLD[0] = dist.group.WORLD
    return _COMMUNICATORS


def _talking(schedule: Schedule) -> dict[Axis, list[tuple[int, int]]]:
    """Per axis the pairs of coordinates, lower first, between which something is sent."""
    found: dict[Axis, set[tuple[int, int]]] = {}
    for program in schedule.programs:
        for instr in program.instrs:
            if isinstance(instr, (Send, Recv)):
                here = {instr.axis.digit(schedule.mesh.coords(rank)) for rank in schedule.ranks(program)}
                pairs = {(min(c, instr.peer), max(c, instr.peer)) for c in here if c != instr.peer}
                found.setdefault(instr.axis, set()).update(pairs)
    return {axis: sorted(pairs) for axis, pairs in found.items()}


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
    """Makes glibc keep freed memory mapped, so that the next step need not fault it in again.

    A training step allocates and frees the same sizes again and again; by default glibc returns large blocks
    to the system each time, and the kernel zeroes them anew. Measured (`benchmarks/allocator.py`, and the GPT
    of config S on two ranks): half to all of the page faults of a step and 2 to 3 % of its time, for at most
    6 % more resident memory. Blocks above 8 MiB still come and go one by one: among smaller ones they leave holes that
    nothing fills. (Config M in a pipeline of two ranks: 1,317 MB with 32 MiB, glibc's limit, 1,253 MB with 8, in the
    same time.)

    Returns:
          Whether the C library took the setting (glibc does, others have no such function).
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3
    largest = 8 << 20
    return bool(
        mallopt(mmap_threshold, largest) and mallopt(trim_threshold, 2**31 - 1) and mallopt(top_pad, 64 << 20)
    )


def return_freed_memory() -> None:
    """Gives what initialisation and compilation have freed back to the system: `tune_allocator` would keep it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
