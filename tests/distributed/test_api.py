"""The public API on real gloo processes."""

import pytest

from tests.distributed import api_workers
from tests.distributed.ranks import CPU_TRANSPORTS, Job, check


def test_dtensor_state_comes_in_and_goes_out(tmp_path):
    check(Job(api_workers.dtensors, 4, tmp_path).finish())


def test_rows_of_each_process_make_one_batch(tmp_path):
    check(Job(api_workers.local_data, 2, tmp_path).finish())


def test_ranks_with_different_plain_batches_are_named(tmp_path):
    check(Job(api_workers.different_batches, 2, tmp_path).finish())


def test_ranks_with_different_programs_stop_before_the_first_step(tmp_path):
    check(Job(api_workers.different_programs, 2, tmp_path).finish())


@pytest.mark.parametrize("transport", CPU_TRANSPORTS)
def test_shard_map(tmp_path, transport):
    check(Job(api_workers.shard_maps, 2, tmp_path, environment=CPU_TRANSPORTS[transport]).finish())
