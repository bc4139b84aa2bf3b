"""Real processes compute what the reference says, bit for bit: over messages, and reading from each other."""

import pytest

from tests.distributed import workers
from tests.distributed.ranks import CPU_TRANSPORTS, Job, check

transports = pytest.mark.parametrize("transport", CPU_TRANSPORTS)


@transports
@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2)])
def test_random_collectives(tmp_path, sizes, transport):
    """Buckets, uneven and empty shards, sub-axes, every dtype and reduction."""
    num_ranks = 2 if sizes == (2,) else 4
    check(
        Job(
            workers.random_collectives,
            num_ranks,
            tmp_path,
            sizes,
            range(40),
            0,
            environment=CPU_TRANSPORTS[transport],
        ).finish()
    )


@transports
@pytest.mark.parametrize("sizes", [(2,), (4,)])
def test_large_collectives(tmp_path, sizes, transport):
    """Parts that travel alone and, over four ranks, all_reduces in two exchanges."""
    check(
        Job(
            workers.random_collectives,
            sizes[0],
            tmp_path,
            sizes,
            range(100, 110),
            90_000,
            environment=CPU_TRANSPORTS[transport],
        ).finish()
    )


@transports
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_steps_equal_the_simulated_transport(tmp_path, num_ranks, transport):
    check(Job(workers.steps, num_ranks, tmp_path, environment=CPU_TRANSPORTS[transport]).finish())


@transports
def test_a_pipeline_sends_and_receives(tmp_path, transport):
    check(Job(workers.sends, 2, tmp_path, environment=CPU_TRANSPORTS[transport]).finish())


@transports
def test_a_step_completes_when_all_have_issued_it(tmp_path, transport):
    check(Job(workers.crossed, 3, tmp_path, environment=CPU_TRANSPORTS[transport]).finish())


@pytest.mark.parametrize("sizes", [(4,), (2, 2)])
def test_what_nccl_packs_is_unpacked_in_place(tmp_path, sizes):
    """The packing of the NCCL transport, which pads uneven shards, without a GPU."""
    check(Job(workers.packed_collectives, 4, tmp_path, sizes, range(200, 240)).finish())


def test_a_mesh_over_an_existing_process_group(tmp_path):
    check(Job(workers.mesh_of_a_group, 4, tmp_path).finish())


@pytest.mark.parametrize(
    "environment",
    [{}, {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}],
    ids=["alone", "torchrun"],
)
def test_a_job_of_one_rank(tmp_path, environment):
    check(Job(workers.mesh_alone, 1, tmp_path, environment, join=False).finish())


@transports
@pytest.mark.parametrize("numel", [100, 50_000])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_sums_in_place(tmp_path, num_ranks, numel, transport):
    job = Job(workers.in_place, num_ranks, tmp_path, numel, environment=CPU_TRANSPORTS[transport])
    check(job.finish())


def test_where_tensors_lie_may_be_a_long_list(tmp_path):
    """A bucket of more tensors than a note holds."""
    check(Job(workers.a_bucket_of_many, 2, tmp_path).finish())
