"""Which order of a pipeline a memory budget allows, and the least that would do where none fits.

What a schedule holds is known exactly once it is lowered, so orders are lowered one after the other until one fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

from fparallel.schedule.memory import highest_peak
from fparallel.schedule.passes import run_passes
from fparallel.schedule.verify import LESS_MEMORY, fail_at

if TYPE_CHECKING:
    from fparallel.api import Jitted, Lowered, Traced


def lower_within(jitted: Jitted, traced: Traced, budget: int) -> Lowered:
    """The schedule of a function, with at most `budget` bytes of device memory on every rank.

    With pipeline="auto" that of the fastest order that fits.

    Raises:
      ScheduleError: no schedule fits. It names the least that would do, and where that is needed.
    """
    least = None
    for lowered in _orders(jitted, traced):
        if _nbytes(lowered) <= budget:
            return lowered
        if least is None or _nbytes(lowered) < _nbytes(least):
            least = lowered
    assert least is not None
    _refuse(jitted, traced, least, budget)


def _orders(jitted: Jitted, traced: Traced) -> Iterator[Lowered]:
    """The schedule with the order that was asked for; with pipeline="auto" every order, the fastest first."""
    first = jitted.lower_as(traced, jitted.pipeline)
    yield first
    for candidate in first.program.candidates[1:]:
        yield jitted.lower_as(traced, jitted.pipeline, candidate)


def _nbytes(lowered: Lowered) -> int:
    return highest_peak(lowered.schedule).nbytes


def _refuse(jitted: Jitted, traced: Traced, least: Lowered, budget: int) -> NoReturn:
    """No schedule fits, so each holds nothing but what it needs: its peak is the least for its order."""
    peak, order = highest_peak(least.schedule), least.program.order
    need = f"{jitted.name} needs {peak.nbytes} bytes of device memory here"
    fix = f"memory_budget={peak.nbytes} is the least that would do"
    if jitted.pipeline == "auto" and order:
        need += f" with the order of the pipeline that needs least, {order}"
    elif order:
        need += f' with pipeline="{order}"'
        fix += " with this order"
        other, nbytes = _other(jitted, traced)
        if nbytes < peak.nbytes:
            fix += f', pipeline="{other}" needs {nbytes}'
    fail_at(
        least.schedule,
        least.schedule.mesh.coords(peak.rank),
        peak.instruction,
        f"memory budget exceeded: {need}, {peak.nbytes - budget} more than memory_budget={budget}",
        f"{fix}; or {LESS_MEMORY}",
    )


def _other(jitted: Jitted, traced: Traced) -> tuple[str, int]:
    """The order that needs least, as `pipeline` names it, and its bytes."""

    def least(lowered: Lowered) -> int:
        """With nothing kept and nothing ahead of its use: this order might fit."""
        schedule = run_passes(lowered.program.schedule, off=jitted.passes_off, memory_budget=0)
        return highest_peak(schedule).nbytes

    auto = jitted.lower_as(traced, "auto")
    needed = {"auto": least(auto)}
    for candidate in auto.program.candidates:
        made = candidate if candidate.rows is not None else None
        nbytes = least(jitted.lower_as(traced, candidate.order, made))
        needed[candidate.order] = min(nbytes, needed.get(candidate.order, nbytes))
    return min(needed.items(), key=lambda pair: (pair[1], pair[0] == "auto"))
