"""Nothing hangs: a rank that dies, sleeps or runs another program ends the others with a report."""

import os
import signal
import time

import pytest

from tests.distributed import workers
from tests.distributed.ranks import CPU_TRANSPORTS, Job

transports = pytest.mark.parametrize("transport", CPU_TRANSPORTS)


def test_ranks_with_different_constants_are_named_before_the_first_step(tmp_path):
    for code, output in Job(workers.different_constants, 3, tmp_path).finish():
        assert code == 1
        assert "the ranks are about to run different programs" in output
        assert "rank 2: constants is" in output and "on rank 0 it is" in output
        assert "rank 1:" not in output


@transports
def test_a_killed_rank_ends_the_others_with_a_report(tmp_path, transport):
    job = Job(workers.step_forever, 3, tmp_path, 60.0, environment=CPU_TRANSPORTS[transport])
    job.until("stepping")
    start = time.monotonic()
    os.kill(job.processes[1].pid, signal.SIGKILL)
    (first, second, third) = job.finish(timeout=60)
    assert time.monotonic() - start < 60, "long before the deadline"
    assert second[0] == -signal.SIGKILL
    for rank, (code, output) in ((0, first), (2, third)):
        assert code == 1
        assert "a peer is gone" in output
        assert f"rank {rank}  (dp={rank})" in output and "peers: " in output and "buffer " in output
        assert "model.py:" in output, "the source line of the step that failed"


@transports
def test_a_rank_that_died_between_steps_is_missed_when_a_step_is_issued(tmp_path, transport):
    job = Job(workers.step_forever, 3, tmp_path, 60.0, 1, 1.5, environment=CPU_TRANSPORTS[transport])
    job.until("stepping")
    os.kill(job.processes[1].pid, signal.SIGKILL)
    (first, _, third) = job.finish(timeout=60)
    for rank, (code, output) in ((0, first), (2, third)):
        assert code == 1
        assert "a peer is gone" in output
        assert f"rank {rank}  (dp={rank})" in output and "peers: " in output


@transports
def test_a_silent_rank_ends_the_others_at_the_deadline(tmp_path, transport):
    job = Job(workers.step_forever, 2, tmp_path, 2.0, 1, environment=CPU_TRANSPORTS[transport])
    job.until("stepping")
    job.processes[0].join(30)
    os.kill(job.processes[1].pid, signal.SIGKILL)
    ((code, output), _) = job.finish()
    assert code == 1
    assert "no answer within the deadline of 2 s" in output
    assert "rank 0  (dp=0)" in output and "wait  w@full" in output and "peers: 1" in output


@transports
def test_ctrl_c_ends_a_waiting_rank(tmp_path, transport):
    job = Job(workers.step_forever, 2, tmp_path, 600.0, 1, environment=CPU_TRANSPORTS[transport])
    job.until("stepping")
    job.until("waiting", ranks=[0])
    os.kill(job.processes[0].pid, signal.SIGINT)
    job.processes[0].join(30)
    os.kill(job.processes[1].pid, signal.SIGKILL)
    ((code, output), _) = job.finish()
    assert code == 130
    assert "interrupted" in output and "wait  w@full" in output


def test_a_wait_that_is_stuck_ends_the_process(tmp_path):
    for rank, (code, output) in enumerate(Job(workers.stuck, 2, tmp_path).finish()):
        assert code == 70
        assert "no answer within the deadline of 0.5 s" in output and f"rank {rank}" in output
