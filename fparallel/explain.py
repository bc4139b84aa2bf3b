"""Why things are where they are: the layouts of a leaf and the collectives that touch it, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fparallel.errors import ShardingError, did_you_mean
from fparallel.layout import same, typed
from fparallel.rules import LeafPlan
from fparallel.schedule.ir import Collective, Run, Schedule

if TYPE_CHECKING:
    from fparallel.compiler.context import Decision


def explain_leaf(
    path: str, plans: Sequence[LeafPlan], schedule: Schedule, decisions: Sequence[Decision]
) -> str:
    """The text of `lowered.explain(path)`; a path may leave out leading components.

    Raises:
      ShardingError: no leaf has the path.
    """
    plan = next((p for p in plans if p.path == path or p.path.endswith("." + path)), None)
    if plan is None:
        known = [p.path for p in plans]
        raise ShardingError(
            f"there is no leaf {path!r}", fix=f"use a path of the step; {did_you_mean(path, known)}"
        )
    lines = [
        f"{plan.path}  ({plan.role or 'no role'}; {plan.cause})",
        f"  at rest   {typed(plan.dtype, plan.storage)}",
    ]
    if not same(plan.compute, plan.storage):
        lines.append(f"  compute   {typed(plan.dtype, plan.compute)}")
    if plan.role == "params":
        lines.append(f"  gradient  {typed(plan.dtype, plan.gradient)}")
    lines += _touching(plan.path, schedule)
    return "\n".join(lines)


def _touching(path: str, schedule: Schedule) -> list[str]:
    """Collectives on buffers that come from the leaf or end in its gradient, in program order."""
    lines = []
    own = {path, f"{path}@full"}
    tail = ".".join(path.split(".")[1:]) or path
    for number, instr in enumerate(schedule.programs[0].instrs):
        if isinstance(instr, Collective):
            for src, dst in zip(instr.ins, instr.outs, strict=True):
                causes = instr.cause.split("; ")
                about = any(
                    c in (f"gradient of {tail}", f"gradient of {path}")
                    or (path.endswith(c.removeprefix("gradient of ")) and c.startswith("gradient of "))
                    for c in causes
                )
                if src in own or dst in own or (about and len(instr.ins) == 1):
                    a, b = schedule.buffers[src], schedule.buffers[dst]
                    where = f"  at {instr.source}" if instr.source else ""
                    lines.append(
                        f"  {number:04d} {instr.kind}[{'*'.join(map(str, instr.axes))}] "
                        f"{typed(a.dtype, a.layout)} -> {typed(b.dtype, b.layout)}  # {instr.cause}{where}"
                    )
        elif isinstance(instr, Run) and own & set(instr.ins):
            lines.append(f"  {number:04d} run {instr.label}")
    return lines


def replicated_text(plans: Sequence[LeafPlan]) -> str:
    """The leaves that no rule names, largest first."""
    rows = [
        (p.storage.max_local_numel * p.dtype.itemsize, p)
        for p in plans
        if not p.named and not p.storage.sharded_axes
    ]
    rows.sort(key=lambda row: (-row[0], row[1].path))
    return "\n".join(f"{nbytes:>14,} B  {typed(p.dtype, p.storage)}  {p.path}" for nbytes, p in rows)
