"""A schedule as a page to explore: one file, no network. The page itself lies in the folder page."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib import resources
from typing import Any

from fparallel.schedule.drawing.chart import Chart, Lane
from fparallel.schedule.drawing.kinds import IDLE, STYLES


def html(chart: Chart) -> str:
    """The page. Its data is the JSON in the element `#schedule`; see `page_data`."""
    files = resources.files("fparallel.schedule.drawing") / "page"
    page = (files / "page.html").read_text("utf-8")
    data = json.dumps(page_data(chart), separators=(",", ":")).replace("<", "\\u003c")
    for mark in ("page.css", "draw.js", "explore.js"):
        page = page.replace(f"/*{mark}*/", (files / mark).read_text("utf-8"))
    return page.replace("/*data*/", data)


def page_data(chart: Chart) -> dict[str, Any]:
    """What the page draws.

    A role's steps are columns: `start[i]` belongs to instruction i. Kinds are positions in `kinds`, causes and
    sources positions in `strings`; a micro-batch is -1 if there is none.
    """
    strings: dict[str, int] = {"": 0}
    lanes = [_lane(lane, strings) for lane in chart.lanes]
    return {
        "mesh": chart.mesh,
        "unit": chart.unit,
        "end": chart.end,
        "kinds": [{"name": name, **asdict(style)} for name, style in STYLES.items()],
        "idle": asdict(IDLE),
        "lanes": lanes,
        "strings": list(strings),
    }


def _lane(lane: Lane, strings: dict[str, int]) -> dict[str, Any]:
    kinds = list(STYLES)
    boxes = lane.boxes
    return {
        "rank": lane.rank,
        "title": lane.title,
        "busy": lane.busy,
        "rows": lane.rows,
        "groups": lane.spans(),
        "held": lane.held,
        "live": lane.live,
        "row": [box.row for box in boxes],
        "kind": [kinds.index(box.kind) for box in boxes],
        "micro": [-1 if box.micro is None else box.micro for box in boxes],
        "issued": [box.issued for box in boxes],
        "start": [box.start for box in boxes],
        "end": [box.end for box in boxes],
        "bytes": [box.nbytes for box in boxes],
        "label": [strings.setdefault(box.label, len(strings)) for box in boxes],
        "text": [box.text for box in boxes],
        "cause": [strings.setdefault(box.cause, len(strings)) for box in boxes],
        "source": [strings.setdefault(box.source, len(strings)) for box in boxes],
    }
