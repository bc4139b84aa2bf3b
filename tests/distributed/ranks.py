"""Starts real ranks: one process each, meeting through a file, with a deadline.

The processes are forked from a server that has imported torch once: a job starts in a fraction of a second.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["torch.distributed", "fparallel.runtime.transport.distributed", "tests.runtime.cases"]
)

# By name, the environment that makes ranks on one host use it.
CPU_TRANSPORTS = {"reads": {}, "messages": {"FPARALLEL_HOST_READS": "0"}}


class Job:
    """Processes that run `function(rank, num_ranks, *args)` in a gloo process group.

    Args:
      function: a function at the top level of an importable module.
      folder: an empty folder, for the meeting point and the output of the ranks.
      join: whether the ranks are in a process group before the function is called.
      environment: of the ranks, besides this process's.
    """

    def __init__(
        self,
        function: Callable[..., None],
        num_ranks: int,
        folder: Path,
        *args: Any,
        join: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.outputs = [folder / f"rank{rank}.txt" for rank in range(num_ranks)]
        store = str(folder / "store") if join else ""
        self.processes = [
            _CONTEXT.Process(
                target=_rank,
                args=(function, rank, num_ranks, store, str(output), args, dict(environment or {})),
                daemon=True,
            )
            for rank, output in enumerate(self.outputs)
        ]
        for process in self.processes:
            process.start()

    def finish(self, timeout: float = 100) -> list[tuple[int, str]]:
        """Per rank (exit code, output); a rank that is still there after `timeout` seconds is killed (-9)."""
        end = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        for process in self.processes:
            if process.exitcode is None:
                process.kill()
                process.join()
        codes = [process.exitcode for process in self.processes]
        return [(code or 0, output.read_text()) for code, output in zip(codes, self.outputs, strict=True)]

    def until(self, text: str, ranks: Sequence[int] | None = None, timeout: float = 100) -> None:
        """Waits until every one of `ranks` (by default all) has printed `text`."""
        end = time.monotonic() + timeout
        outputs = self.outputs if ranks is None else [self.outputs[rank] for rank in ranks]
        while not all(output.exists() and text in output.read_text() for output in outputs):
            shown = "\n".join(output.read_text() for output in outputs if output.exists())
            assert time.monotonic() < end, f"not every rank printed {text!r}:\n{shown}"
            time.sleep(0.02)


def _rank(
    function: Callable[..., None],
    rank: int,
    num_ranks: int,
    store: str,
    output: str,
    args: Any,
    environment: Mapping[str, str],
) -> None:
    os.environ.update(environment)
    file = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115  (open until the process ends)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if store:
        file_store = dist.FileStore(store, num_ranks)
        dist.init_process_group("gloo", store=file_store, rank=rank, world_size=num_ranks)
        dist.barrier()  # all are connected before one can end
    try:
        function(rank, num_ranks, *args)
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    except KeyboardInterrupt:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(130)  # as the interpreter does; multiprocessing makes it 1
    finally:
        sys.stdout.flush()


def check(results: list[tuple[int, str]]) -> None:
    """Every rank has ended well."""
    for rank, (code, output) in enumerate(results):
        assert code == 0, f"rank {rank} exited with {code}:\n{output}"
