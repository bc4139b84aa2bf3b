"""``fparallel calibrate``: what it writes, and what it refuses before it measures."""

import os

import pytest
import torch

import fparallel as fp
from fparallel.cli import calibrate as command
from fparallel.cli.calibrate import Calibrate, calibrate
from fparallel.errors import ClusterError
from tests.runtime.schedules import matmul_over


def test_a_measured_host_is_a_cluster_to_simulate_on(tmp_path, monkeypatch, capsys):
    for name in (*os.environ,):
        if name.startswith(("TORCHELASTIC", "FPARALLEL", "SLURM")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("FPARALLEL_LAUNCHER_PID", "0")  # restored afterwards, whatever launch sets
    monkeypatch.setattr(command, "_BUDGET", 0.01)
    monkeypatch.setattr(command, "_STREAM_BYTES", 1 << 20)
    path = tmp_path / "made" / "cluster.json"
    threads = torch.get_num_threads()
    calibrate(Calibrate(out=str(path), device="cpu"))
    assert torch.get_num_threads() == threads
    cluster = fp.Cluster.load(path)
    assert set(cluster.flops) == {"float64", "float32", "bfloat16", "float16"}
    assert not cluster.overlap  # two ranks on two cores: the exchange takes the processor
    assert cluster.intra == cluster.inter
    assert 0 < cluster.intra.latency < 1
    schedule, _, _ = matmul_over("dp", 2)
    assert schedule.simulate(cluster).time > 2 * cluster.intra.latency
    printed = capsys.readouterr().out
    assert f'fp.Cluster.load("{path}")' in printed and "the link between nodes is not measured" in printed


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"out": "/dev/null/x"}, "cannot write /dev/null/x"),
        ({"device": "cuda"}, "torch finds no GPU here"),
    ],
)
def test_what_cannot_be_written_or_measured_is_refused_at_once(tmp_path, monkeypatch, changes, found):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(command, "_measure", lambda device: pytest.fail("something was measured"))
    with pytest.raises(ClusterError, match=found):
        calibrate(Calibrate(**{"out": str(tmp_path / "cluster.json"), **changes}))
