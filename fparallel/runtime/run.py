"""Running a schedule on the ranks of its mesh: chooses the transport, and checks what the ranks are given."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, MutableSequence, Sequence
from typing import Any

import torch
from torch import Tensor

from fparallel.errors import ExecutionError
from fparallel.runtime.executor import Executor
from fparallel.runtime.transport.distributed import DistributedTransport, return_freed_memory, tune_allocator
from fparallel.runtime.transport.simulated import SimulatedTransport
from fparallel.schedule.ir import Schedule

_CHECKED_CALLS = 3


class Runner:
    """An executor for the mesh of a schedule. `ranks` are the ranks of this process."""

    def __init__(
        self,
        schedule: Schedule,
        constants: Mapping[str, Tensor],
        *,
        compile: str = "eager",
        transport: Any = None,
        check: bool = False,
    ) -> None:
        mesh = schedule.mesh
        if mesh.kind == "abstract":
            raise ExecutionError(
                f"the mesh {mesh} is abstract: a step can be lowered for it, not run",
                fix='make the mesh with kind="job" or "simulated"',
            )
        if mesh.device == "cpu":
            tune_allocator()
            return_freed_memory()
        if transport is None:
            transport = (
                SimulatedTransport(mesh.size) if mesh.kind == "simulated" else DistributedTransport(mesh)
            )
        self.transport = transport
        self.executor = Executor(schedule, transport, constants, compile=compile, check=check)
        self.ranks = self.executor.ranks
        self.is_job = mesh.kind == "job" and mesh.size > 1
        self.calls = 0

    def __call__(self, shards: Sequence[MutableSequence[Tensor | None]]) -> list[list[Tensor]]:
        self.calls += 1
        return self.executor.run(shards)

    def check_equal_on_ranks(self, paths: Sequence[str], leaves: Sequence[Any], *, always: bool) -> None:
        """A plain tensor argument is the global value: in the first calls its checksum is compared across ranks.

        Raises:
          ExecutionError: the ranks of a job were given different values.
        """
        if not self.is_job or (self.calls >= _CHECKED_CALLS and not always):
            return
        sums = {
            path: _checksum(leaf)
            for path, leaf in zip(paths, leaves, strict=True)
            if isinstance(leaf, Tensor)
        }
        if not sums:
            return
        gathered = self.transport.gather(sums, "compare the arguments of the step")
        for path in sums:
            different = [
                rank for rank, other in enumerate(gathered) if other.get(path) != gathered[0].get(path)
            ]
            if different:
                raise ExecutionError(
                    f"{path} is a plain tensor, which must be the global value on every rank, but rank(s) "
                    f"{', '.join(map(str, different))} have another value than rank 0",
                    fix="give all ranks the same value (a loader keyed by the step alone), or pass per-process data "
                    "through fp.make_array_from_process_local_data",
                )


def _checksum(tensor: Tensor) -> str:
    data = tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8)
    return hashlib.sha1(data.numpy().tobytes()).hexdigest()
