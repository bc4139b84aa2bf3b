"""A schedule as a picture, by matplotlib: rows in time, and the memory of every role below."""

from __future__ import annotations

import io
import statistics
from typing import TYPE_CHECKING

from fparallel.schedule.drawing.chart import SLOTS, Box, Chart, Lane
from fparallel.schedule.drawing.kinds import IDLE, STYLES, Style
from fparallel.schedule.ir import Run
from fparallel.schedule.text import bytes_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DPI = 120
COMPUTE, COMM, GAP = 0.30, 0.14, 0.10  # inches: heights of rows, and between roles
NAMES = 0.15  # inches: the names of groups, above a row
MEMORY = 0.34  # inches of one role's memory
LEAST, MOST = 7.0, 40.0  # inches of the time axis
BOX = 0.30  # inches that the middle one of the runs is wide, if that fits
FONT = 7.0
TICK = 0.025  # inches of a communication step, at least


def png(chart: Chart) -> bytes:
    """The picture, at 120 dots to the inch, as wide as it takes to read the micro-batches (40 inches at most)."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    wide = _width(chart)
    tall = sum(_height(lane) for lane in chart.lanes)
    memory = MEMORY * len(chart.lanes)
    right, top, between, bottom = 0.9, 0.65, 0.45, 0.45
    letters = max((len(line) for lane in chart.lanes for line in lane.title.splitlines()), default=0)
    left = max(1.7, 0.3 + letters * 0.6 * FONT / 72)  # a letter is about 0.6 of its height wide
    width, height = left + wide + right, top + tall + between + memory + bottom
    with matplotlib.rc_context({"hatch.linewidth": 0.5, "font.size": FONT}):
        figure = Figure(figsize=(width, height), dpi=DPI)
        end = chart.end or 1.0
        upper = figure.add_axes(
            (left / width, (bottom + memory + between) / height, wide / width, max(tall, 0.01) / height)
        )
        lower = figure.add_axes((left / width, bottom / height, wide / width, max(memory, 0.01) / height))
        for axes in (upper, lower):
            axes.set_xlim(0, end)
            axes.set_yticks([])
            for side in ("left", "right", "top"):
                axes.spines[side].set_visible(False)
        _rows(upper, chart, end / wide)
        _memory(lower, chart)
        if chart.unit == SLOTS:
            for axes in (upper, lower):
                axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True))
        scale, unit = (1.0, "slots, one per run") if chart.unit == SLOTS else _time_unit(end)
        for axes in (upper, lower):
            axes.xaxis.set_major_formatter(lambda value, _: f"{value / scale:g}")
        lower.set_xlabel(unit)
        upper.set_title(f"schedule on {chart.mesh}", loc="left", fontsize=FONT + 3, pad=26)
        _legend(upper, chart, tall)
        file = io.BytesIO()
        figure.savefig(file, format="png")
    return file.getvalue()


def _time_unit(end: float) -> tuple[float, str]:
    for size, unit in ((1.0, "seconds"), (1e-3, "milliseconds")):
        if end >= size:
            return size, unit
    return 1e-6, "microseconds"


def _width(chart: Chart) -> float:
    """Inches of the time axis."""
    runs = [b.end - b.start for lane in chart.lanes for b in lane.boxes if isinstance(b.instr, Run)]
    runs = [length for length in runs if length > 0]
    return min(MOST, max(LEAST, BOX * chart.end / statistics.median(runs))) if runs else LEAST


def _height(lane: Lane) -> float:
    return (NAMES if lane.spans() else 0) + COMPUTE + COMM * (len(lane.rows) - 1) + GAP


def _rows(axes: Axes, chart: Chart, inch: float) -> None:
    """The rows of every role. The y axis is in inches from the top; `inch` is one on the time axis."""
    tops = [0.0]
    for lane in chart.lanes:
        tops.append(tops[-1] + _height(lane))
    axes.set_ylim(max(tops[-1], 0.01), 0)
    drawn: dict[str, list[tuple[float, float, float, float]]] = {}
    for lane, top in zip(chart.lanes, tops, strict=False):
        at = top + GAP / 2
        if lane.spans():
            at += NAMES
            _groups(axes, lane, at - NAMES / 2, inch)
        places = [(at, COMPUTE)] + [(at + COMPUTE + COMM * k, COMM) for k in range(len(lane.rows) - 1)]
        for row, (y, height) in zip(lane.rows, places, strict=True):
            axes.broken_barh([(0, chart.end)], (y, height * 0.96), facecolor=IDLE.colour, zorder=0)
            if row != "compute":
                axes.annotate(
                    row, (0, y + height / 2), (-4, 0), textcoords="offset points", ha="right", va="center",
                    fontsize=FONT - 2, color="#555555", annotation_clip=False,
                )  # fmt: skip
        axes.annotate(
            f"{lane.title}\nidle {1 - lane.busy / chart.end if chart.end else 0:.0%}",
            (0, at + COMPUTE / 2), (-4, 0), textcoords="offset points", ha="right", va="center",
            fontsize=FONT - 0.5, annotation_clip=False,
        )  # fmt: skip
        seen: dict[tuple[int, float], int] = {}  # how many steps of no length there are at a place
        for box in lane.boxes:
            y, height = places[box.row]
            if box.end > box.start:
                length = max(box.end - box.start, TICK * inch) if box.row else box.end - box.start
                drawn.setdefault(box.kind, []).append((box.start, length, y, height * 0.96))
                _name(axes, box, (y + height * 0.48, height), inch)
            elif box.row:
                count = seen[box.row, box.start] = seen.get((box.row, box.start), -1) + 1
                start = min(box.start + count * 1.2 * TICK * inch, chart.end - TICK * inch)
                drawn.setdefault(box.kind, []).append((start, TICK * inch, y, height * 0.96))
    for kind, rectangles in drawn.items():
        _fill(axes, STYLES[kind], rectangles)


def _groups(axes: Axes, lane: Lane, y: float, inch: float) -> None:
    """A line over every group, and its name where it fits."""
    spans = lane.spans()
    margins = [min(0.015 * inch, (end - start) / 4) for _, start, end in spans]
    starts = [start + margin for (_, start, _), margin in zip(spans, margins, strict=True)]
    ends = [end - margin for (_, _, end), margin in zip(spans, margins, strict=True)]
    axes.hlines([y + NAMES * 0.35] * len(spans), starts, ends, colors="#333333", linewidth=0.8)
    for name, start, end in spans:
        if _fits(name, FONT - 1, end - start, inch):
            axes.text((start + end) / 2, y + NAMES * 0.22, name, ha="center", va="bottom", fontsize=FONT - 1)


def _fits(text: str, size: float, time: float, inch: float) -> bool:
    return len(text) * 0.62 * size / 72 <= 0.9 * time / inch


def _fill(axes: Axes, style: Style, rectangles: list[tuple[float, float, float, float]]) -> None:
    from matplotlib.collections import PolyCollection

    corners = [((x, y), (x + w, y), (x + w, y + h), (x, y + h)) for x, w, y, h in rectangles]
    boxes = PolyCollection(corners, facecolor=style.colour, edgecolor=_edge(style), linewidth=0.4, zorder=2)
    if style.hatch:
        boxes.set_hatch(style.hatch * 2)
    axes.add_collection(boxes, autolim=False)


def _edge(style: Style) -> str:
    """The colour of outlines and of the hatching."""
    return "#333333" if style.hatch else "#ffffff"


def _name(axes: Axes, box: Box, at: tuple[float, float], inch: float) -> None:
    """Writes the longest name that fits into a box; a wait has none."""
    if box.kind == "wait":
        return
    style = STYLES[box.kind]
    y, height = at
    size = FONT if height > 0.2 else FONT - 2
    micro = "" if box.micro is None else str(box.micro)
    for text in (box.label, style.letter + micro, micro):
        if text and _fits(text, size, box.end - box.start, inch):
            shade = {"boxstyle": "round,pad=0.1", "facecolor": style.colour, "edgecolor": "none"}
            axes.text(
                (box.start + box.end) / 2, y, text, ha="center", va="center", fontsize=size, color=style.ink,
                zorder=3, bbox=shade if style.hatch else None,
            )  # fmt: skip
            return


def _memory(axes: Axes, chart: Chart) -> None:
    """Live bytes of every role, one above the other, all to one scale."""
    most = max((lane.peak for lane in chart.lanes), default=0) or 1
    axes.set_ylim(max(len(chart.lanes), 0.01), 0)
    for place, lane in enumerate(chart.lanes):
        floor = place + 0.95
        points = lane.memory()
        times = [at for at, _ in points] + [chart.end]
        heights = [floor - 0.85 * live / most for _, live in points]
        axes.fill_between(times, [*heights, heights[-1]], floor, step="post", color="#56b4e9", linewidth=0)
        axes.step(times, [*heights, heights[-1]], where="post", color="#0072b2", linewidth=0.8)
        axes.axhline(floor, color="#cccccc", linewidth=0.5, zorder=0)
        for side, text in ((0, f"memory of rank {lane.rank}"), (1, f"peak {bytes_text(lane.peak)}")):
            axes.annotate(
                text, (side, floor - 0.4), (8 * side - 4, 0), xycoords=("axes fraction", "data"),
                textcoords="offset points", ha="left" if side else "right", va="center", fontsize=FONT - 0.5,
                annotation_clip=False,
            )  # fmt: skip


def _legend(axes: Axes, chart: Chart, tall: float) -> None:
    from matplotlib.patches import Patch

    used = {box.kind for lane in chart.lanes for box in lane.boxes if box.row or box.end > box.start}
    handles = [
        Patch(fc=style.colour, ec="#333333", lw=0.4, hatch=style.hatch * 2, label=style.title)
        for style in [*(style for kind, style in STYLES.items() if kind in used), IDLE]
    ]
    axes.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0, 1 + 0.04 / max(tall, 0.01)), ncols=len(handles),
        frameon=False, borderaxespad=0, handlelength=1.6, columnspacing=1.2,
    )  # fmt: skip
