"""Pipelines on real processes: the results of one device, and reports that say where a pipeline stands."""

import os
import signal
import time

import pytest

from tests.distributed import pipeline_workers as workers
from tests.distributed.ranks import CPU_TRANSPORTS, Job, check

transports = pytest.mark.parametrize("transport", CPU_TRANSPORTS)


@transports
def test_data_pipeline_and_tensor_ranks_with_zero(tmp_path, transport):
    """Axes dp, pp and tp of two ranks each, and ZeRO-3."""
    job = Job(
        workers.gpt_steps, 8, tmp_path, (2, 2, 2), 2, [("1f1b", 2, 3)], environment=CPU_TRANSPORTS[transport]
    )
    check(job.finish())


@transports
def test_four_stages(tmp_path, transport):
    """Fewer micro-batches than stages, one, and more."""
    runs = [("1f1b", 1, 0), ("zb_h1", 8, 0)]
    if transport == "reads":
        runs += [("1f1b", 3, 0), ("zb_h1", 1, 0)]
    check(
        Job(
            workers.gpt_steps, 4, tmp_path, (1, 4, 1), 4, runs, environment=CPU_TRANSPORTS[transport]
        ).finish()
    )


def test_zero_and_orders(tmp_path):
    runs = [(order, 2, 3) for order in ("interleaved", "zb_h1", "zb_v")]
    check(Job(workers.gpt_steps, 4, tmp_path, (2, 2, 1), 4, runs).finish())


@transports
def test_a_rank_killed_in_the_middle_of_a_pipeline(tmp_path, transport):
    """The last of three stages waits for the forward of micro-batch 2, which the killed rank did not run."""
    job = Job(
        workers.stuck_in_a_pipeline, 3, tmp_path, 60.0, 1, "F", 2, environment=CPU_TRANSPORTS[transport]
    )
    job.until("stuck", ranks=[1])
    start = time.monotonic()
    os.kill(job.processes[1].pid, signal.SIGKILL)
    first, second, third = job.finish(timeout=60)
    assert time.monotonic() - start < 60, "long before the deadline"
    assert second[0] == -signal.SIGKILL
    for rank, (code, output) in ((0, first), (2, third)):
        assert code == 1, output
        assert "a peer is gone" in output
        assert f"rank {rank}  (pp={rank})" in output and "peers: 1" in output and "buffer " in output
    assert "pipeline rank 1 to 2, F stage 1 of micro-batch 2" in third[1]
    assert "of micro-batch" in first[1]


def test_a_silent_rank_of_a_pipeline(tmp_path):
    job = Job(workers.stuck_in_a_pipeline, 2, tmp_path, 2.0, 1, "B", 0)
    job.until("stuck", ranks=[1])
    job.processes[0].join(30)
    os.kill(job.processes[1].pid, signal.SIGKILL)
    (code, output), _ = job.finish()
    assert code == 1
    assert "no answer within the deadline of 2 s" in output
    assert "pipeline rank 1 to 0, B stage 1 of micro-batch 0" in output and "peers: 1" in output
