"""Starting the ranks of a job on this machine, or finding out that somebody else has.

The ranks are started by torchrun's own machinery: one agent in this process, one worker process for each
rank, an ephemeral port for their rendezvous. When one worker dies the agent ends the others; when this
process dies, the kernel ends them.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping, MutableMapping, Sequence

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ProcessFailure,
    get_error_handler,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fparallel.errors import ExecutionError

__all__ = ["adopt_slurm", "die_with_parent", "is_joined", "launch", "report_failure"]

_WORKER = "from fparallel.cli.main import worker; worker()"
# The agent passes Ctrl-C on: a rank ends at once, even inside a collective, and prints no traceback.
_INTERRUPTIBLE = "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
_PARENT = "FPARALLEL_LAUNCHER_PID"


def is_joined(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is already a rank of a job (torchrun's variables)."""
    return "RANK" in environ and "WORLD_SIZE" in environ


def adopt_slurm(environ: MutableMapping[str, str] = os.environ) -> None:
    """Translates the variables of ``srun`` with more than one task into torchrun's, where those are not set.

    The ranks meet at the first host of the job, on a port made of the job's number.
    """
    if is_joined(environ) or int(environ.get("SLURM_NTASKS", 1)) < 2 or "SLURM_PROCID" not in environ:
        return
    environ["RANK"] = environ["SLURM_PROCID"]
    environ["WORLD_SIZE"] = environ["SLURM_NTASKS"]
    environ["LOCAL_RANK"] = environ.get("SLURM_LOCALID", "0")
    environ.setdefault("MASTER_ADDR", _first_host(environ.get("SLURM_JOB_NODELIST", "localhost")))
    environ.setdefault("MASTER_PORT", str(20_000 + int(environ.get("SLURM_JOB_ID", 0)) % 20_000))


def _first_host(nodes: str) -> str:
    """The first of Slurm's compressed host list: ``"a[07-09,12],b"`` is ``"a07"``."""
    found = re.match(r"([^,\[]+)(?:\[(\d+))?", nodes)
    return found[1] + (found[2] or "") if found else "localhost"


def launch(arguments: Sequence[str], num_ranks: int, *, worker: str = _WORKER) -> int:
    """Runs ``fparallel`` with these arguments as ``num_ranks`` local ranks and waits for them.

    Args:
        arguments: of the command line.
        num_ranks: processes to start.
        worker: the Python code that each runs.

    Returns:
        The exit code: 0, or 128 + the number of the signal that ended the job.

    Raises:
        ExecutionError: a rank failed; the message is that of the first one.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ[_PARENT] = str(os.getpid())
    _silence_agent()
    with tempfile.TemporaryDirectory(prefix="fparallel-") as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        try:
            elastic_launch(config, sys.executable)("-c", _INTERRUPTIBLE + worker, *arguments)
        except SignalException as stopped:
            return 128 + stopped.sigval
        except ChildFailedError as failed:
            raise _first_cause(failed.failures) from failed
        finally:
            _show_cursor()
    return 0


def _show_cursor() -> None:
    """The progress bar of a rank that was ended has left it hidden."""
    for stream in (sys.stdout, sys.stderr):
        if stream.isatty():
            stream.write("\x1b[?25h")


def _silence_agent() -> None:
    """The agent logs each signal and exit code; people get one message instead."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _first_cause(failures: Mapping[int, ProcessFailure]) -> ExecutionError:
    """The failure that the others follow from: a rank that was killed, else the first that failed."""
    killed = {r: f for r, f in failures.items() if f.exitcode < 0 and -f.exitcode != signal.SIGTERM}
    rank, failure = min((killed or failures).items(), key=lambda item: item[1].timestamp)
    recorded = failure.error_file_data.get("message")
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        return ExecutionError(
            f"rank {rank} (process {failure.pid}) was killed by {name}; the other ranks were stopped",
            fix="start it again; if it was the kernel, out of memory: a smaller model, batch or --seq",
        )
    if isinstance(recorded, Mapping):
        text = re.sub(r"^[A-Za-z]+Error: ", "", str(recorded["message"]))
        message, _, fix = text.rpartition("\nFix: ")
        return ExecutionError(message or fix, fix=fix if message else "see the message above")
    return ExecutionError(
        f"rank {rank} (process {failure.pid}) failed with exit code {failure.exitcode}",
        fix="see the traceback above",
    )


def report_failure(error: BaseException) -> bool:
    """Hands the error of this rank to the agent that started it; False where there is none to tell."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return False
    handler = get_error_handler()
    handler.initialize()
    handler.record_exception(error)
    return _PARENT in os.environ


def die_with_parent() -> None:
    """Asks the kernel to end this process when the launcher dies, even of ``kill -9`` (Linux only)."""
    parent = os.environ.get(_PARENT)
    if parent is None or not sys.platform.startswith("linux"):
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != int(parent):  # it died before we asked
        os._exit(1)
