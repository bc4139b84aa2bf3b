"""What the executor asks of a transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from fparallel.mesh import Axis
from fparallel.runtime.exchange import Exchange
from fparallel.schedule.ir import Schedule

Slots = list[Tensor | None]


class Pending(Protocol):
    """A communication step that has been issued. It holds the tensors that it reads and writes."""

    def wait(self) -> None:
        """Blocks until the outputs may be read and the inputs overwritten."""


Issue = Callable[[Sequence[Tensor], Sequence[Tensor]], Pending]
# A step returns what the rank must wait for before it goes on, or None.
Step = Callable[[Slots], Sequence[Pending] | None]


@dataclass
class Task:
    """The program of one rank, bound.

    Attributes:
      at: the number of the instruction that is running.
      report: describes an instruction for an error message, in lines.
    """

    rank: int
    steps: Sequence[Step]
    report: Callable[[int], str]
    slots: Slots = field(default_factory=list)
    at: int = 0


class Transport(Protocol):
    """Moves tensors between ranks."""

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that live in this process."""

    @property
    def rendezvous(self) -> bool:
        """Whether issuing a communication step blocks until its peers have issued theirs."""

    def prepare(self, schedule: Schedule) -> None:
        """Makes what the schedule needs; called on all ranks before anything is bound."""

    def collective(self, rank: int, exchange: Exchange) -> Issue:
        """The function that issues a collective at `rank`: (inputs, outputs) to a pending step."""

    def send(self, rank: int, peer: int, axis: Axis, signature: str) -> Issue:
        """The function that sends the inputs to `peer`, a rank along `axis`."""

    def recv(self, rank: int, peer: int, axis: Axis, signature: str) -> Issue:
        """The function that receives into the outputs from `peer`, a rank along `axis`."""

    def execute(self, tasks: Sequence[Task]) -> None:
        """Runs the tasks of this process to their end.

        Raises:
          ExecutionError: a rank failed, or waits for something that does not come.
        """

    def handshake(self, fingerprint: str, parts: dict[str, str]) -> None:
        """Compares digests across ranks; raises ExecutionError naming the ranks and the parts that differ."""


def failure(task: Task, error: BaseException) -> Any:
    """The ExecutionError for an error that a task's current instruction raised."""
    from fparallel.errors import ExecutionError

    if isinstance(error, ExecutionError):
        return error
    return ExecutionError(
        f"{type(error).__name__}: {error}\n{task.report(task.at)}",
        fix="the first line is torch's; the instruction and its source line say where it came from",
    )
