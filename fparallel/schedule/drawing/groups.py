"""Runs that belong together: the work of a stage on one micro-batch, however many blocks it has."""

from __future__ import annotations

from dataclasses import dataclass

from fparallel.schedule.drawing.kinds import STYLES, kind_of, micro_of
from fparallel.schedule.ir import Program, Recv, Run, Wait

STAGE_KINDS = ("forward", "backward", "weight")


@dataclass(frozen=True)
class Group:
    """Consecutive runs of one kind on one micro-batch; `numbers` are those of the runs in the program."""

    kind: str
    micro: int | None
    numbers: tuple[int, ...]

    @property
    def text(self) -> str:
        """`F0`, `B12`; `U` and `x` without a micro-batch."""
        return STYLES[self.kind].letter + ("" if self.micro is None else str(self.micro))


def groups(program: Program) -> list[Group]:
    """The runs of a program in order, grouped.

    A wait for a `Recv` begins another stage, hence another group. A run with a micro-batch but no kind of its own
    (an embedding, a loss) counts to the forward, backward or weight gradient of its micro-batch right before or
    after it.
    """
    joined: list[tuple[Group, bool]] = []  # and whether a wait for a Recv comes before it
    received: set[str] = set()
    apart = True
    for number, instr in enumerate(program.instrs):
        if isinstance(instr, Recv):
            received.update(instr.outs)
        elif isinstance(instr, Wait):
            apart = apart or not received.isdisjoint(instr.bufs)
        elif isinstance(instr, Run):
            group = Group(kind_of(instr, program), micro_of(instr), (number,))
            joined.append((group, apart))
            _join(joined)
            apart = False
    return [group for group, _ in joined]


def _join(joined: list[tuple[Group, bool]]) -> None:
    """Makes one group of the last two if they belong together."""
    if len(joined) < 2 or joined[-1][1]:
        return
    (before, apart), (after, _) = joined[-2:]
    if before.micro != after.micro:
        return
    kinds = {before.kind, after.kind}
    if len(kinds) == 2:
        kinds.discard("other")
        if before.micro is None or len(kinds) == 2 or not kinds <= set(STAGE_KINDS):
            return
    joined[-2:] = [(Group(kinds.pop(), before.micro, before.numbers + after.numbers), apart)]
