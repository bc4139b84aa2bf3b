"""What a run leaves behind: JSON lines on stdout and in a file, a drawing, lines for people."""

import json
import os

import pytest

from fparallel.cli.report import Report, make_folder, peak_memory
from fparallel.errors import DataError


def run(folder, *, json_lines: bool = False) -> None:
    with Report(folder, steps=3, tokens=100, json_lines=json_lines) as report:
        report.say("hello")
        report.step(1, 5.5, 0.5)
        report.step(2, 5.0, 0.25, validation=5.2)
        report.step(3, 4.0, 0.5)
        report.write("schedule.txt", "the schedule")
        report.draw()


RECORDS = [
    {"step": 1, "loss": 5.5, "tokens_per_s": 200.0, "step_s": 0.5},
    {"step": 2, "loss": 5.0, "tokens_per_s": 400.0, "step_s": 0.25, "val_loss": 5.2},
    {"step": 3, "loss": 4.0, "tokens_per_s": 200.0, "step_s": 0.5},
]


def test_stdout_has_one_json_object_for_each_step_and_nothing_else(tmp_path, capsys):
    run(tmp_path, json_lines=True)
    out, err = capsys.readouterr()
    assert [json.loads(line) for line in out.splitlines()] == RECORDS
    assert "hello" in err


def test_people_see_loss_speed_memory_and_validation_loss(tmp_path, capsys):
    run(tmp_path)
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0] == "hello" and err == ""
    assert lines[1].startswith("step 1/3  loss 5.500  200 tokens/s  peak ") and lines[1].endswith("MB/rank")
    assert lines[2].startswith("step 2/3  loss 5.000  val 5.200  267 tokens/s")


def test_the_files(tmp_path):
    run(tmp_path)
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == RECORDS
    assert (tmp_path / "schedule.txt").read_text() == "the schedule"
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_other_ranks_report_nothing(capsys):
    run(None)
    run(None, json_lines=True)
    assert capsys.readouterr() == ("", "")


def test_the_out_folder_is_made_or_refused(tmp_path):
    assert make_folder(str(tmp_path / "a" / "b")).is_dir()
    (tmp_path / "file").write_text("")
    for path in ("file", "file/below"):
        with pytest.raises(DataError, match="cannot make the folder") as error:
            make_folder(str(tmp_path / path))
        assert str(error.value).endswith("Fix: choose another --out")


def test_peak_memory_is_at_least_what_is_resident_now():
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert 0.9 * resident <= peak_memory() < 100 * resident
