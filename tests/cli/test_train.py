"""The main job, end to end: simulated ranks, real ones, and what happens when one is lost."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fparallel.cli.lower import lower
from fparallel.cli.options import Options
from fparallel.cli.train import train

TINY = {"layers": 2, "dim": 32, "heads": 4, "seq": 16, "batch": 4, "sample": 20}


def flags(**options) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]


def steps_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def simulated(tmp_path_factory) -> Path:
    """A run of twelve steps on four simulated ranks."""
    folder = tmp_path_factory.mktemp("simulated")
    train(Options(**TINY, simulate=True, steps=12, lr=1e-2, warmup=2, eval_every=6, out=str(folder)))
    return folder


def test_a_run_learns_and_leaves_its_files(simulated):
    records = steps_of(simulated)
    assert [r["step"] for r in records] == list(range(1, 13))
    assert [r["step"] for r in records if "val_loss" in r] == [6, 12]
    assert records[0]["loss"] == pytest.approx(5.545, abs=0.1)  # log 256
    assert records[-1]["loss"] < records[0]["loss"] - 0.5
    assert (simulated / "loss.png").stat().st_size > 1000
    assert (simulated / "sample.txt").read_text(encoding="utf-8").startswith("def ")
    schedule = (simulated / "schedule.txt").read_text()
    assert "all_gather[dp]" in schedule and "all_reduce[tp" in schedule


def test_the_same_seed_is_the_same_run_on_another_mesh(simulated, tmp_path):
    options = {**TINY, "steps": 12, "lr": 1e-2, "warmup": 2, "eval_every": 6, "out": str(tmp_path)}
    train(Options(**options, mesh="dp=1"))
    for ours, theirs in zip(steps_of(simulated), steps_of(tmp_path), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-4)


@pytest.mark.parametrize(
    "more", [{"model": "llama", "kv_heads": 2}, {"rules": "seq=tp", "zero": 1}, {"microbatches": 2}]
)
def test_check_finds_the_parallel_step_to_be_the_same_function(more, tmp_path, capsys):
    train(Options(**TINY, **more, simulate=True, steps=3, check=3, dtype="float64", out=str(tmp_path)))
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    found = {name: float(difference) for name, difference, *_ in lines if name in CHECKED}
    assert set(found) == CHECKED
    assert max(found.values()) < 1e-10


CHECKED = {"loss", "gradients", "parameters"}


def test_lower_prints_the_program_its_memory_and_its_traffic(capsys):
    lower(Options(**{**TINY, "heads": 8, "batch": None}, mesh="dp=256,tp=8"))
    out = capsys.readouterr().out
    assert "batch 2048 x 16, mesh dp=256,tp=8, ZeRO-3" in out
    assert "all_gather[dp]" in out and "memory of a rank" in out
    traffic = out[out.index("communication of a rank") :]
    assert "\n  dp " in traffic and "\n  tp " in traffic


def start(tmp_path: Path, **options) -> subprocess.Popen:
    environ = {
        k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "TORCHELASTIC_ERROR_FILE")
    }
    command = [sys.executable, "-m", "fparallel.cli.main", "train", "--json"]
    return subprocess.Popen(
        [*command, *flags(**{**TINY, "mesh": "dp=2", "out": tmp_path, **options})],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
    )


def ranks_of(job: subprocess.Popen) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()]


def assert_gone(handles: list[int]) -> None:
    for handle in handles:
        assert select.select([handle], [], [], 30)[0], "a rank has outlived its job"
        os.close(handle)


def test_real_ranks_do_what_simulated_ones_do(simulated, tmp_path):
    job = start(tmp_path, mesh="dp=2,tp=2", steps=12, lr=1e-2, warmup=2, eval_every=6)
    out, err = job.communicate(timeout=280)
    assert job.returncode == 0, err
    printed = [json.loads(line) for line in out.splitlines()]
    assert printed == steps_of(tmp_path)
    assert [r["loss"] for r in printed] == [r["loss"] for r in steps_of(simulated)]
    assert {"step", "loss", "tokens_per_s", "step_s"} <= set(printed[0])


def test_a_rule_that_names_no_axis_is_one_message_from_all_ranks(tmp_path):
    job = start(tmp_path, rules="seq=tpp", steps=1)
    out, err = job.communicate(timeout=280)
    assert (job.returncode, out) == (1, "")
    assert err.count("has no axis 'tpp'") == 1 and "Traceback" not in err
    assert err.splitlines()[-1].startswith("Fix: ")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the ranks in /proc")
@pytest.mark.parametrize("how", ["kill -9 of a rank", "Ctrl-C"])
def test_a_job_that_loses_a_rank_or_is_interrupted_ends_and_leaves_no_process(tmp_path, how):
    job = start(tmp_path, steps=1_000_000)
    assert [json.loads(job.stdout.readline())["step"] for _ in range(9)] == list(range(1, 10))
    ranks = ranks_of(job)
    handles = [os.pidfd_open(pid) for pid in ranks]
    assert len(ranks) == 2
    if how == "Ctrl-C":
        job.send_signal(signal.SIGINT)
    else:
        os.kill(ranks[1], signal.SIGKILL)
    _, err = job.communicate(timeout=60)
    assert_gone(handles)
    assert "Traceback" not in err
    if how == "Ctrl-C":
        assert job.returncode == 130
    else:
        assert job.returncode == 1
        assert "was killed by SIGKILL" in err and err.splitlines()[-1].startswith("Fix: ")
