"""What is drawn is the schedule: every step of every role, at its time, with its text."""

import dataclasses
import io
import itertools
import json
import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest
from hypothesis import given

from fparallel.errors import ScheduleError
from fparallel.schedule import Free, Run, Schedule, Wait
from fparallel.schedule.drawing.chart import chart
from fparallel.schedule.drawing.html import html, page_data
from fparallel.schedule.drawing.kinds import STYLES, kind_of
from fparallel.schedule.drawing.png import png
from fparallel.schedule.drawing.timeline import in_slots
from fparallel.schedule.drawing.trace import trace_json
from fparallel.schedule.memory import live_bytes, memory
from fparallel.schedule.text import instr_text
from tests.runtime import schedules
from tests.schedule.examples import example
from tests.schedule.pipeline_orders import gpipe, one_f_one_b, pipeline
from tests.schedule.strategies import any_schedules


def embedded(page: str) -> dict:
    (data,) = re.findall(r'<script type="application/json" id="schedule">(.*?)</script>', page, re.DOTALL)
    return json.loads(data)


def pixels(picture: bytes):
    from matplotlib import image

    return image.imread(io.BytesIO(picture), format="png")


# ---------------------------------------------------------------- the chart


@pytest.fixture(scope="module")
def big() -> Schedule:
    return pipeline(one_f_one_b, stages=8, micros=16)


def test_the_pipelines_of_these_tests_are_valid(big):
    big.verify()
    pipeline(gpipe, stages=4, micros=4, blocks=3).verify()
    pipeline(one_f_one_b, stages=3, micros=2, blocks=2).verify()


def test_1f1b_is_idle_as_the_literature_says(big):
    """A bubble of 2(p - 1) slots beside m forwards and m backwards, and the update."""
    drawn = chart(big)
    assert drawn.end == 2 * 16 + 2 * 7 + 1
    assert [drawn.end - lane.busy for lane in drawn.lanes] == [2 * 7] * 8


@given(any_schedules())
def test_page_data_is_the_schedule(schedule):
    data = embedded(html(chart(schedule)))
    assert data == json.loads(json.dumps(page_data(chart(schedule))))
    assert (data["mesh"], data["unit"], len(data["lanes"])) == (
        str(schedule.mesh), "slots", len(schedule.programs),
    )  # fmt: skip
    events = {(e.rank, e.number): e for e in in_slots(schedule)}
    for lane, p in zip(data["lanes"], schedule.programs, strict=True):
        rank, coords = schedule.first_rank(p), schedule.mesh.coords(schedule.first_rank(p))
        assert lane["rank"] == rank
        assert lane["text"] == [instr_text(i) for i in p.instrs]
        assert [data["kinds"][k]["name"] for k in lane["kind"]] == [kind_of(i, p) for i in p.instrs]
        assert [data["strings"][k] for k in lane["cause"]] == [i.cause for i in p.instrs]
        assert [lane["rows"][k] for k in lane["row"]] == [i.stream for i in p.instrs]
        assert lane["live"] == live_bytes(schedule, rank)
        for number, instr in enumerate(p.instrs):
            event = events[rank, number]
            assert (lane["start"][number], lane["end"][number]) == (event.start, event.end)
            sizes = [
                sum(schedule.buffers[name].local_bytes(coords) for name in names)
                for names in (instr.reads, instr.writes, getattr(instr, "bufs", ()))
            ]
            expected = sizes[2] if isinstance(instr, Free) else sizes[1]
            if not isinstance(instr, (Run, Wait, Free)):
                expected = max(sizes)
            assert lane["bytes"][number] == expected


def test_the_lines_of_a_step_are_those_of_its_ops():
    schedule, _, _ = schedules.matmul_over()
    data = page_data(chart(schedule))
    sources = [data["strings"][k] for k in data["lanes"][0]["source"]]
    assert sources[0] == "model.py:2" and sources[3] == "model.py:3, model.py:4"
    assert data["lanes"][0]["title"] == "rank 0 (dp=0) and 1 more"


def test_the_memory_curve_has_the_peak_of_the_report(big):
    drawn = chart(big)
    assert [lane.peak for lane in drawn.lanes] == [row.peak for row in memory(big).rows]
    for lane in drawn.lanes:
        times, sizes = zip(*lane.memory(), strict=True)
        assert list(times) == sorted(times) and max(sizes) == lane.peak and sizes[-1] == lane.live[-1]


# ---------------------------------------------------------------- simulated times


class Simulated(Schedule):
    """A run takes 2 ms; communication takes 1 ms from 2 ms per slot on. Waits and frees are no events."""

    def simulate(self, cluster):
        assert cluster == "a cluster"
        events = []
        for event in in_slots(self):
            instr = self.program(event.rank).instrs[event.number]
            if not isinstance(instr, (Wait, Free)):
                start, time = event.start * 2e-3, 2e-3 if isinstance(instr, Run) else 1e-3
                events.append(
                    SimpleNamespace(
                        rank=event.rank,
                        number=event.number,
                        stream=event.stream,
                        start=start,
                        end=start + time,
                    )
                )
        return SimpleNamespace(events=tuple(events))


def simulated(schedule: Schedule) -> Simulated:
    return Simulated(**{f.name: getattr(schedule, f.name) for f in dataclasses.fields(schedule)})


def test_a_wait_lasts_until_what_it_waits_for_is_over(tmp_path):
    simulated(schedules.pipeline()).draw(tmp_path / "s.html", "a cluster")
    data = embedded((tmp_path / "s.html").read_text())
    assert data["unit"] == "s"
    first = data["lanes"][0]
    # run, send from 2 to 3 ms, wait for it, free, receive from 4 to 5 ms, wait for it
    assert first["start"] == pytest.approx([0, 2e-3, 2e-3, 3e-3, 4e-3, 3e-3])
    assert first["end"] == pytest.approx([2e-3, 3e-3, 3e-3, 3e-3, 5e-3, 5e-3])
    assert first["issued"] == pytest.approx([0, 2e-3, 2e-3, 3e-3, 3e-3, 3e-3])
    assert data["end"] == pytest.approx(5e-3)


def test_steps_of_one_stream_that_overlap_have_rows_of_their_own():
    schedule = pipeline(one_f_one_b, stages=3, micros=4)
    drawn = chart(schedule, simulated(schedule).simulate("a cluster").events)
    middle = drawn.lanes[1]
    assert middle.rows == ("compute", "p2p:pp", "p2p:pp (2)")
    for row in range(1, 3):
        spans = sorted((b.start, b.end) for b in middle.boxes if b.row == row)
        assert spans and all(a[1] <= b[0] + 1e-12 for a, b in itertools.pairwise(spans))


# ---------------------------------------------------------------- the files


def test_the_page_needs_no_network_and_its_script_is_a_script(big, tmp_path):
    big.draw(tmp_path / "s.html")
    page = (tmp_path / "s.html").read_text()
    assert not re.search(r"""https?:|src=|href=|@import|url\(|fetch\(|XMLHttp""", page)
    assert "/*" not in page  # every part has been put in
    script = page.split("<script>")[1].split("</script>")[0]
    for name in re.findall(r'(?:find|getElementById)\("(\w+)"\)', script):
        assert f'id="{name}"' in page
    if node := shutil.which("node"):
        (tmp_path / "s.js").write_text(script)
        subprocess.run([node, "--check", tmp_path / "s.js"], check=True)


def test_text_in_the_page_cannot_end_the_data():
    schedule = example("run F <f> (x) -> y")
    instr = dataclasses.replace(schedule.programs[0].instrs[0], label="F </script><b>", cause="<!--")
    programs = (dataclasses.replace(schedule.programs[0], instrs=(instr,)),)
    data = embedded(html(chart(dataclasses.replace(schedule, programs=programs))))
    assert data["lanes"][0]["text"] == [instr_text(instr)]
    assert {"F </script><b>", "<!--"} <= set(data["strings"])


@given(any_schedules())
def test_the_trace_has_every_step(schedule):
    trace = json.loads(trace_json(chart(schedule)))
    events = trace["traceEvents"]
    assert {e["ph"] for e in events} <= {"M", "X", "i", "C"}
    assert all({"name", "pid", "tid"} <= e.keys() and (e["ph"] == "M" or e["ts"] >= 0) for e in events)
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    for p in schedule.programs:
        rank = schedule.first_rank(p)
        steps = [e for e in events if e["ph"] in "Xi" and e["pid"] == rank]
        assert [(e["args"]["number"], e["args"]["text"]) for e in steps] == [
            (number, instr_text(instr)) for number, instr in enumerate(p.instrs)
        ]
        assert [threads[rank, e["tid"]] for e in steps] == [instr.stream for instr in p.instrs]
        assert all(e["dur"] == 1 for e, i in zip(steps, p.instrs, strict=True) if isinstance(i, Run))
        counts = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["pid"] == rank]
        assert max(counts) == max([counts[0], *live_bytes(schedule, rank)])


def test_trace_times_are_microseconds(tmp_path):
    simulated(schedules.pipeline()).draw(tmp_path / "s.json", "a cluster")
    events = json.loads((tmp_path / "s.json").read_text())["traceEvents"]
    (double,) = [e for e in events if e["name"] == "double"]
    assert double == {
        "name": "double", "cat": "other", "ph": "X", "pid": 0, "tid": 0, "ts": 0.0, "dur": 2000.0,
        "args": {"number": 0, "text": "run <double>  (x) -> y", "bytes": 16},
    }  # fmt: skip
    (send,) = [e for e in events if e["name"] == "send" and e["pid"] == 0]
    assert (send["ts"], send["dur"]) == pytest.approx((2000, 1000))


def test_the_picture_has_room_for_every_micro_batch(big, tmp_path):
    big.draw(tmp_path / "s.png")
    picture = pixels((tmp_path / "s.png").read_bytes())
    height, width, _ = picture.shape
    assert 47 * 0.30 * 120 < width < 2400 and 700 < height < 1400  # 36 pixels and more for a run
    for kind in ("forward", "backward"):  # half of the 47 x 36 pixels of 8 rows of 36 are of either colour
        colour = [int(STYLES[kind].colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        found = (abs(picture[..., :3] - colour).max(-1) < 0.02).sum()
        assert found > 16 * 8 * 36 * 36 / 2, kind


def test_simulated_times_and_groups_fit_in_a_picture():
    schedule = pipeline(gpipe, stages=2, micros=2, blocks=3)
    small = pixels(png(chart(schedule)))
    timed = pixels(png(chart(schedule, simulated(schedule).simulate("a cluster").events)))
    assert small.std() > 0.05 and timed.std() > 0.05
    empty = dataclasses.replace(
        schedule, programs=tuple(dataclasses.replace(p, instrs=()) for p in schedule.programs)
    )
    assert pixels(png(chart(empty))).shape[2] == 4


def test_the_suffix_says_what_is_drawn(big, tmp_path):
    big.draw(str(tmp_path / "s.TXT"))
    assert (tmp_path / "s.TXT").read_text() == big.table()
    with pytest.raises(ScheduleError, match=r"no \.pdf is known\nFix: end the path in one of \.html, \.png"):
        big.draw(tmp_path / "s.pdf")
    with pytest.raises(ScheduleError, match="no suffix"):
        big.draw(tmp_path / "schedule")
    assert list(tmp_path.iterdir()) == [tmp_path / "s.TXT"]
