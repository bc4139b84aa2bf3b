"""A schedule as a trace that chrome://tracing and ui.perfetto.dev show.

The format is the JSON object form of Google's "Trace Event Format": a process per rank, a thread per stream, complete
events (`X`) for what lasts, instant events (`i`) for what does not, a counter (`C`) for memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from fparallel.schedule.drawing.chart import SLOTS, Box, Chart, Lane


def trace_json(chart: Chart) -> str:
    """The trace. Times are in microseconds; without a simulation a slot counts as one."""
    scale = 1.0 if chart.unit == SLOTS else 1e6
    events = [event for lane in chart.lanes for event in _lane_events(lane, scale)]
    meta = {"mesh": chart.mesh, "time": "1 us is one run" if chart.unit == SLOTS else "simulated"}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": meta}, indent=None)


def _lane_events(lane: Lane, scale: float) -> Iterator[dict[str, Any]]:
    pid = lane.rank
    yield _meta(pid, 0, "process_name", {"name": lane.title})
    yield _meta(pid, 0, "process_sort_index", {"sort_index": pid})
    for tid, row in enumerate(lane.rows):
        yield _meta(pid, tid, "thread_name", {"name": row})
        yield _meta(pid, tid, "thread_sort_index", {"sort_index": tid})
    for box in lane.boxes:
        yield _event(pid, box, scale)
    for at, live in lane.memory():
        counter = {"ph": "C", "name": "live bytes", "pid": pid, "tid": 0}
        yield {**counter, "ts": at * scale, "args": {"bytes": live}}


def _meta(pid: int, tid: int, name: str, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


def _event(pid: int, box: Box, scale: float) -> dict[str, Any]:
    args: dict[str, Any] = {"number": box.number, "text": box.text, "bytes": box.nbytes}
    if box.micro is not None:
        args["micro-batch"] = box.micro
    for key, value in (("cause", box.cause), ("source", box.source)):
        if value:
            args[key] = value
    place = {"pid": pid, "tid": box.row, "ts": box.start * scale}
    event = {"name": box.label, "cat": box.kind, **place, "args": args}
    if box.end > box.start:
        return {"ph": "X", "dur": (box.end - box.start) * scale, **event}
    return {"ph": "i", "s": "t", **event}
