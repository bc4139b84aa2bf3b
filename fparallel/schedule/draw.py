"""Draws schedules. What is drawn is the same everywhere (`drawing/chart.py`); the suffix of the path says how."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from pathlib import Path

from fparallel.errors import ScheduleError
from fparallel.schedule.cluster import Cluster
from fparallel.schedule.drawing.chart import Chart, chart
from fparallel.schedule.ir import Schedule


def draw(schedule: Schedule, path: str | PathLike[str], cluster: Cluster | None = None) -> None:
    """Writes a drawing of ranks by time.

    `.html` is a page to explore, in one file that needs no network; `.png` a picture; `.json` a trace for
    chrome://tracing and ui.perfetto.dev; `.txt` the table of `schedule.table()`, which is always in slots.

    Args:
      schedule: the schedule; every role is shown on its first rank.
      path: where to write.
      cluster: times are those of `schedule.simulate(cluster)`. None: every run takes one slot, all else no time.

    Raises:
      ScheduleError: the suffix is none of these, or ranks wait for each other for ever.
    """
    path = Path(path)
    writer = _WRITERS.get(path.suffix.lower())
    if writer is None:
        raise ScheduleError(
            f"cannot draw a schedule to {path}: {f'no {path.suffix} is known' if path.suffix else 'no suffix'}",
            fix=f"end the path in one of {', '.join(_WRITERS)}",
        )
    path.write_bytes(writer(schedule, cluster))


def _html(schedule: Schedule, cluster: Cluster | None) -> bytes:
    from fparallel.schedule.drawing.html import html

    return html(_chart(schedule, cluster)).encode()


def _png(schedule: Schedule, cluster: Cluster | None) -> bytes:
    from fparallel.schedule.drawing.png import png

    return png(_chart(schedule, cluster))


def _json(schedule: Schedule, cluster: Cluster | None) -> bytes:
    from fparallel.schedule.drawing.trace import trace_json

    return trace_json(_chart(schedule, cluster)).encode()


def _txt(schedule: Schedule, cluster: Cluster | None) -> bytes:
    return schedule.table().encode()


def _chart(schedule: Schedule, cluster: Cluster | None) -> Chart:
    if cluster is None:
        return chart(schedule)
    return chart(schedule, schedule.simulate(cluster).events)


_WRITERS: dict[str, Callable[[Schedule, Cluster | None], bytes]] = {
    ".html": _html,
    ".png": _png,
    ".json": _json,
    ".txt": _txt,
}
