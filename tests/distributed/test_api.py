"""The public API on real gloo processes."""

from tests.distributed import api_workers
from tests.distributed.ranks import Job, check


def test_dtensor_state_comes_in_and_goes_out(tmp_path):
    check(Job(api_workers.dtensors, 4, tmp_path).finish())


def test_rows_of_each_process_make_one_batch(tmp_path):
    check(Job(api_workers.local_data, 2, tmp_path).finish())


def test_ranks_with_different_plain_batches_are_named(tmp_path):
    check(Job(api_workers.different_batches, 2, tmp_path).finish())


def test_ranks_with_different_programs_stop_before_the_first_step(tmp_path):
    check(Job(api_workers.different_programs, 2, tmp_path).finish())
