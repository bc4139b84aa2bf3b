"""Joining a job: what the environment of torchrun and Slurm means, and what is said when it is incomplete."""

import pytest

from fparallel.errors import MeshError
from fparallel.runtime.handshake import fingerprint, parts_of
from fparallel.runtime.transport import job
from fparallel.runtime.transport.distributed import compare
from tests.runtime.schedules import matmul_over


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, (0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, (3, 4)),
    ],
)
def test_position_in_torchruns_environment(environment, expected):
    assert job._position(environment) == expected


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "MASTER_ADDR is not"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK=2 is not a rank"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "is no number"),
    ],
)
def test_an_incomplete_environment_is_an_error_with_a_fix(environment, message):
    with pytest.raises(MeshError, match=message) as caught:
        job._position(environment)
    assert "Fix: " in str(caught.value)


def test_slurms_names_become_torchruns():
    environment = {
        "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "123456",
        "SLURM_STEP_NODELIST": "gpu[007-009,012],cpu1",
    }  # fmt: skip
    job._adopt_slurm(environment)
    assert job._position(environment) == (5, 8)
    assert environment["LOCAL_RANK"] == "1"
    assert environment["MASTER_ADDR"] == "gpu007"
    assert environment["MASTER_PORT"] == str(20000 + 123456 % 20000)


def test_torchrun_inside_slurm_wins():
    environment = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "RANK": "5", "WORLD_SIZE": "16"}
    job._adopt_slurm(environment)
    assert environment["WORLD_SIZE"] == "16"


@pytest.mark.parametrize(
    ("nodes", "first"), [("n1", "n1"), ("n1,n2", "n1"), ("n[3-9]", "n3"), ("a-b[01],c", "a-b01")]
)
def test_first_host(nodes, first):
    assert job.first_host(nodes) == first


def test_a_device_that_is_no_device():
    with pytest.raises(MeshError, match="'tpu'"):
        job.join_job("tpu")


def test_what_ranks_compare_is_equal_for_equal_programs_and_names_what_is_not():
    """The digest does not depend on the order of sets, nor on which process makes it."""
    parts = [parts_of(matmul_over(size=2)[0], {}) for _ in range(2)]
    assert parts[0] == parts[1]
    other = parts_of(matmul_over(size=3)[0], {})
    assert {name for name in other if other[name] != parts[0][name]} >= {"mesh", "schedule"}
    given = [(fingerprint(p), p) for p in (parts[0], parts[1], {**parts[0], "torch": "2.11.0"})]
    assert compare(given[:2]) == ""
    assert compare(given) == f"  rank 2: torch is 2.11.0, on rank 0 it is {parts[0]['torch']}"
