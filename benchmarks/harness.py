"""What the peers share: their flags, the measured loop, the report.

A peer makes `step(t) -> float loss` and hands it to `Peer.loop`. Started by `run.py` it warms up, says so,
and then runs bursts of steps when it is told to, so that bursts of several peers can be interleaved on the
same cores. Started by hand or by torchrun it runs by itself and prints its report.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from benchmarks import work

__all__ = ["Peer", "peak_rss_mb", "reset_peak_rss"]


def peak_rss_mb() -> float:
    """Largest resident set of this process since its start or the last reset."""
    return _status_mb("VmHWM")


def reset_peak_rss() -> None:
    """Makes the current resident set the peak; where the kernel refuses, it stays that of the whole life."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pass


def _status_mb(key: str) -> float:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(key + ":"):
                return round(int(line.split()[1]) / 1024, 1)
    return 0.0


class Peer:
    """One rank of a peer.

    Args:
      options: the peer's own flags and their defaults; a bool default makes a switch.

    Attributes:
      args: the flags, parsed. cfg: the sizes. rank, world: from the RANK and WORLD_SIZE environment.
      report: what is told at the end; a peer may add to it.
    """

    def __init__(self, **options: Any) -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("--config", default="S", choices=list(work.CONFIGS))
        parser.add_argument("--warm", type=int, default=5, help="steps before timing")
        parser.add_argument("--steps", type=int, default=10, help="timed steps, when run by hand")
        parser.add_argument("--profile", type=int, default=0, help="then so many steps under torch.profiler")
        for name, default in options.items():
            if isinstance(default, bool):
                parser.add_argument(f"--{name}", action="store_true")
            else:
                parser.add_argument(f"--{name}", type=type(default), default=default)
        self.args = parser.parse_args()
        self.cfg = work.CONFIGS[self.args.config]
        self.batches = work.Batches(self.cfg)
        self.rank = int(os.environ.get("RANK", "0"))
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.began = time.perf_counter()
        self.report: dict[str, Any] = {"rank": self.rank, "rss_imported_mb": _status_mb("VmRSS")}
        self.control = self.replies = None
        pipes = os.environ.get("PEER_CONTROL")
        if pipes:
            read, write = (int(fd) for fd in pipes.split(","))
            self.control, self.replies = os.fdopen(read, "r"), os.fdopen(write, "w")

    def join(self) -> Any:
        """torch.distributed on gloo."""
        import torch.distributed as dist

        dist.init_process_group("gloo")
        return dist

    def rows(self, step: int, index: int = 0, parts: int = 1) -> tuple[Tensor, Tensor]:
        """Part `index` of `parts` of the global batch of a step."""
        n = self.cfg.batch // parts
        inputs, targets = (torch.from_numpy(a[index * n : (index + 1) * n]) for a in self.batches(step))
        return inputs, targets

    def local_rows(self, step: int) -> tuple[Tensor, Tensor]:
        """This data-parallel rank's rows."""
        return self.rows(step, self.rank, self.world)

    def skip(self, why: str) -> NoReturn:
        """Ends a peer that cannot run here."""
        self._say({"skipped": why})
        print(f"skipped: {why}")
        raise SystemExit(0)

    def loop(
        self, step: Callable[[int], float], after: Callable[[Callable[[], None]], str] | None = None
    ) -> None:
        """Warms up, runs the timed steps, reports.

        Args:
          step: runs step t and returns this rank's loss. Ranks that each hold a part of the batch return the
            mean of their part; the report averages over ranks.
          after: called at the end with a function that runs one more step; returns text to print.
        """
        times: list[float] = []
        losses: list[float] = []

        def run(count: int) -> None:
            for _ in range(count):
                start = time.perf_counter()
                loss = step(len(losses))
                times.append(time.perf_counter() - start)
                losses.append(loss)

        warm = self.args.warm
        self.report["setup_s"] = round(time.perf_counter() - self.began, 3)
        run(warm)
        self.report["rss_life_mb"] = peak_rss_mb()
        reset_peak_rss()
        cpu, usage = time.process_time(), resource.getrusage(resource.RUSAGE_SELF)
        if self.control is None:
            run(self.args.steps)
        else:
            self._say({"ready": True})
            for line in self.control:
                word, *numbers = line.split()
                if word != "go":
                    break
                run(int(numbers[0]))
                self._say({"done": True})
        now = resource.getrusage(resource.RUSAGE_SELF)
        self.report |= {
            "cpu_s": round(time.process_time() - cpu, 2),
            "system_s": round(now.ru_stime - usage.ru_stime, 2),
            "page_faults": now.ru_minflt - usage.ru_minflt,
            "rss_steps_mb": peak_rss_mb(),
            "warm_s": [round(x, 4) for x in times[:warm]],
            "step_s": [round(x, 5) for x in times[warm:]],
            "losses": list(losses),
        }
        if self.args.profile:
            print(_profile(lambda: run(1), self.args.profile), flush=True)
        if after is not None:
            print(after(lambda: run(1)), end="", flush=True)
        if self.replies is not None:
            self._say({"report": self.report})
        elif self.rank == 0:
            print(json.dumps(self.report), flush=True)

    def _say(self, message: dict[str, Any]) -> None:
        if self.replies is not None:
            self.replies.write(json.dumps(message) + "\n")
            self.replies.flush()


def _profile(step: Callable[[], None], count: int) -> str:
    """The operators of `count` steps by their own time; the columns are totals over these steps."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(count):
            step()
    table = found.key_averages().table(sort_by="self_cpu_time_total", row_limit=30, max_name_column_width=48)
    return f"{count} steps\n{table}"
