"""Local ranks: started with torchrun's variables, ended together, reported by their first cause."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from fparallel.cli import launch
from fparallel.errors import ExecutionError

REPORTING = """
import sys
from fparallel.cli import launch
from fparallel.errors import MeshError
launch.die_with_parent()
{body}
"""

BLOCK = "import signal; signal.pause()"


def run(body: str, num_ranks: int = 2, *arguments: str) -> int:
    return launch.launch(arguments, num_ranks, worker=REPORTING.format(body=textwrap.dedent(body)))


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    for name in (*os.environ,):
        if name.startswith(("TORCHELASTIC", "FPARALLEL", "SLURM")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("FPARALLEL_LAUNCHER_PID", "0")  # restored afterwards, whatever launch sets


def test_every_rank_gets_its_arguments_and_torchruns_variables(tmp_path):
    body = f"""
    import json, os
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
    record = [sys.argv[1:], {{n: os.environ[n] for n in names}}, "MASTER_ADDR" in os.environ]
    open({str(tmp_path)!r} + "/" + os.environ["RANK"], "w").write(json.dumps(record))
    """
    assert run(body, 2, "train", "--mesh", "dp=2") == 0
    for rank in "01":
        arguments, names, has_address = json.loads((tmp_path / rank).read_text())
        assert arguments == ["train", "--mesh", "dp=2"]
        assert names == {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
        assert has_address


def test_the_error_of_a_rank_is_the_error_of_the_job():
    body = f"""
    import os
    if os.environ["RANK"] == "1":
        launch.report_failure(MeshError("no axis 'tpp'", fix="did you mean 'tp'?"))
        sys.exit(1)
    {BLOCK}
    """
    with pytest.raises(ExecutionError) as error:
        run(body)
    assert str(error.value) == "no axis 'tpp'\nFix: did you mean 'tp'?"


def test_a_killed_rank_ends_the_others_and_is_named(tmp_path):
    body = f"""
    import os
    open({str(tmp_path)!r} + "/" + os.environ["RANK"], "w").write(str(os.getpid()))
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), 9)
    {BLOCK}
    """
    with pytest.raises(ExecutionError, match=r"rank 1 \(process \d+\) was killed by SIGKILL"):
        run(body)
    for pid in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.read_text()), 0)


def start_blocked(tmp_path) -> tuple[subprocess.Popen, list[int]]:
    """A launcher of two ranks, all of them waiting, in processes of their own."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    worker = REPORTING.format(
        body=f"import os; open({str(pipe)!r}, 'w').write(str(os.getpid()) + ' '); {BLOCK}"
    )
    code = f"import sys; from fparallel.cli import launch; sys.exit(launch.launch([], 2, worker={worker!r}))"
    job = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)
    pids: list[int] = []
    while len(pids) < 2:
        pids += [int(word) for word in pipe.read_text().split()]
    return job, pids


def assert_gone(pids: list[int]) -> None:
    for pid in pids:
        fd = None
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        import select

        assert select.select([fd], [], [], 20)[0], f"process {pid} is still there"
        os.close(fd)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_all_ranks_with_its_exit_code(tmp_path, number, code):
    job, pids = start_blocked(tmp_path)
    job.send_signal(number)
    assert job.wait(timeout=30) == code
    assert job.stderr.read() == b""
    assert_gone(pids)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the Linux kernel")
def test_no_rank_outlives_a_killed_launcher(tmp_path):
    job, pids = start_blocked(tmp_path)
    job.kill()
    job.wait(timeout=30)
    assert_gone(pids)


def test_slurms_variables_become_torchruns():
    environ = {
        "SLURM_PROCID": "5",
        "SLURM_NTASKS": "8",
        "SLURM_LOCALID": "1",
        "SLURM_JOB_ID": "123",
        "SLURM_JOB_NODELIST": "gpu[07-09,12],big1",
    }
    launch.adopt_slurm(environ)
    assert launch.is_joined(environ)
    assert {k: v for k, v in environ.items() if not k.startswith("SLURM")} == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": "20123",
    }


@pytest.mark.parametrize("environ", [{}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, {"SLURM_NTASKS": "4"}])
def test_a_shell_that_is_no_srun_task_of_many_is_not_a_rank(environ):
    launch.adopt_slurm(environ)
    assert not launch.is_joined(environ)


def test_torchruns_variables_win_over_slurms():
    environ = {"RANK": "0", "WORLD_SIZE": "2", "SLURM_PROCID": "7", "SLURM_NTASKS": "8"}
    launch.adopt_slurm(environ)
    assert environ["RANK"] == "0"
