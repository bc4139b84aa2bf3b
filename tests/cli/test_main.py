"""Exit codes and messages: one screen and no traceback for what a person can cause."""

import pytest

from fparallel.cli import main as command
from fparallel.cli.main import main
from fparallel.errors import MeshError


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs the command in this process; gives exit code, stdout, stderr."""
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)

    def go(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["fparallel", *arguments])
        return main(), *capsys.readouterr()

    return go


def test_an_error_is_its_message_and_its_fix(run):
    code, out, err = run("train", "--mesh", "dp")
    assert (code, out) == (1, "")
    assert err == "error: --mesh 'dp': cannot read 'dp'\nFix: write --mesh dp=2,tp=2\n"


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["train", "--data", "nowhere"], "there is no file or folder 'nowhere'"),
        (["train", "--data", "/dev/null"], "neither a file nor a folder"),
        (["train", "--dim", "100"], "dim=100 is not a multiple of heads=8"),
        (["train", "--batch", "1"], "a batch of 1 over dp=2"),
        (["train", "--out", "/dev/null/x"], "cannot make the folder"),
        (["lower", "--mesh", "x=2"], "no rule shards anything over 'x'"),
        (["lower", "--steps", "0"], "--steps 0"),
        (["calibrate", "--out", "/dev/null/x"], "cannot write /dev/null/x"),
    ],
)
def test_bad_input_is_refused_before_a_rank_starts(run, monkeypatch, arguments, found):
    monkeypatch.setattr(command.launch, "launch", lambda *a, **kw: pytest.fail("a rank was started"))
    code, out, err = run(*arguments)
    assert (code, out) == (1, "")
    assert found in err and err.splitlines()[-1].startswith("Fix: ") and "Traceback" not in err


def test_an_empty_and_a_binary_file_are_refused(run, tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "binary").write_bytes(b"\x7fELF\0\0")
    assert "is empty" in run("train", "--data", "empty")[2]
    assert "is not text" in run("train", "--data", "binary")[2]


def test_ranks_are_started_with_the_arguments_given(run, monkeypatch):
    started = []
    monkeypatch.setattr(command.launch, "launch", lambda *a: started.append(a) or 7)
    assert run("train", "--mesh", "dp=2,tp=3", "--layers", "1")[0] == 7
    assert started == [(["train", "--mesh", "dp=2,tp=3", "--layers", "1"], 6)]


def test_a_rank_of_a_running_job_starts_none(run, monkeypatch):
    trained = []
    monkeypatch.setattr(command, "train", trained.append)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert run("train")[0] == 0 and len(trained) == 1


def test_the_rank_of_a_running_job_says_which_it_is(run, monkeypatch):
    def fail(options):
        raise MeshError("no such axis", fix="name one")

    monkeypatch.setattr(command, "train", fail)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert run("train") == (1, "", "rank 3: error: no such axis\nFix: name one\n")


def test_ctrl_c_is_130(run, monkeypatch):
    def interrupt(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "train", interrupt)
    assert run("train", "--simulate") == (130, "", "interrupted\n")
