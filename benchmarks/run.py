"""Runs fparallel and its peers side by side on this machine, and prints ratios.

    python -m benchmarks.run --config S                      # fparallel and the main peers
    python -m benchmarks.run --config S --only fp-zero3,fsdp2
    python -m benchmarks.run --list

Peers are started in small groups, each with the reference, DDP. The members of a group warm up one at a time;
then bursts of a few steps are interleaved (A B C A B C ...), so that a change of the machine's speed touches
all of them. Whoever does not run is blocked on a pipe. A step's time is its slowest rank's; compare peers by
their ratio to DDP's median in the same group. Each warm-up and each burst holds a lock file, so that two runs
take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import platform
import select
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import work

__all__ = ["PEERS", "Spec", "main"]

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = "ddp"


@dataclass(frozen=True)
class Spec:
    """How a peer is started: its ranks, the threads of each, and its module with flags."""

    ranks: int
    threads: int
    command: str

    @staticmethod
    def parse(text: str) -> Spec:
        ranks, threads, command = text.split(":", 2)
        return Spec(int(ranks), int(threads), command)


PEERS: dict[str, Spec] = {
    "single": Spec(1, 2, "single"),
    "single-compile": Spec(1, 2, "single --compile"),
    "ddp": Spec(2, 1, "ddp"),
    "ddp-compile": Spec(2, 1, "ddp --compile"),
    "ddp-zero1": Spec(2, 1, "ddp --zero1"),
    "fsdp2": Spec(2, 1, "fsdp2"),
    "fsdp2-compile": Spec(2, 1, "fsdp2 --compile"),
    "tp2": Spec(2, 1, "tp"),
    "tp2-compile": Spec(2, 1, "tp --compile"),
    "ds-zero1": Spec(2, 1, "deepspeed --zero 1"),
    "ds-zero3": Spec(2, 1, "deepspeed --zero 3"),
    "fp-single": Spec(1, 2, "fp --mesh dp=1"),
    "fp-zero0": Spec(2, 1, "fp --zero 0"),
    "fp-zero1": Spec(2, 1, "fp --zero 1"),
    "fp-zero2": Spec(2, 1, "fp --zero 2"),
    "fp-zero3": Spec(2, 1, "fp --zero 3"),
    "fp-tp2": Spec(2, 1, "fp --mesh tp=2"),
    "pipelining": Spec(2, 1, "pipelining"),
    "ds-pipeline": Spec(2, 1, "deepspeed_pipeline"),
    "fp-pp2": Spec(2, 1, "fp --mesh pp=2 --micro 4"),
    "fp-pp2-zb": Spec(2, 1, "fp --mesh pp=2 --micro 4 --pipeline zb_h1"),
    "fp-pp2-zbv": Spec(2, 1, "fp --mesh pp=2 --micro 4 --pipeline zb_v"),
    "fp-pp2-interleaved": Spec(2, 1, "fp --mesh pp=2 --micro 4 --pipeline interleaved"),
    "fp-pp2-zero3": Spec(4, 1, "fp --mesh dp=2,pp=2 --zero 3 --micro 4"),
    "fp-zero0-inductor": Spec(2, 1, "fp --zero 0 --compile inductor"),
    "fp-zero3-inductor": Spec(2, 1, "fp --zero 3 --compile inductor"),
    "fp-tp2-inductor": Spec(2, 1, "fp --mesh tp=2 --compile inductor"),
}
DEFAULT = "single,fp-zero0,fp-zero1,ddp-zero1,fp-zero2,fp-zero3,fsdp2,fp-tp2,tp2"


class Failed(Exception):
    """A peer that died, or took too long."""


class Skipped(Exception):
    """A peer that cannot run on this machine."""


class Running:
    """The rank processes of a peer, and a pipe to and from each."""

    def __init__(self, name: str, spec: Spec, options: argparse.Namespace, logs: Path) -> None:
        self.timeout = options.timeout
        module, *flags = shlex.split(spec.command)
        command = [sys.executable, "-m", f"benchmarks.peers.{module}", *flags]
        command += ["--config", options.config, "--warm", str(options.warm)]
        self.ranks: list[tuple[subprocess.Popen[bytes], Any, Any]] = []
        self.logs = [logs / f"{name}.{rank}.log" for rank in range(spec.ranks)]
        port = _free_port()
        for rank, log in enumerate(self.logs):
            down, up = os.pipe(), os.pipe()
            environment = os.environ | {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(spec.ranks),
                "LOCAL_WORLD_SIZE": str(spec.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": str(spec.threads), "MKL_NUM_THREADS": str(spec.threads),
                "PEER_CONTROL": f"{down[0]},{up[1]}", "PYTHONPATH": str(ROOT),
                "TORCHINDUCTOR_CACHE_DIR": options.cache,
            }  # fmt: skip
            with open(log, "w") as out:
                process = subprocess.Popen(
                    command, env=environment, pass_fds=(down[0], up[1]), stdin=subprocess.DEVNULL, stdout=out,
                    stderr=subprocess.STDOUT, start_new_session=True, cwd=ROOT,
                )  # fmt: skip
            os.close(down[0])
            os.close(up[1])
            self.ranks.append((process, os.fdopen(down[1], "w"), os.fdopen(up[0], "r")))

    def hear(self, key: str) -> list[Any]:
        """What every rank says next, which must be `key`."""
        said, end = [], time.monotonic() + self.timeout
        for rank, (_, _, replies) in enumerate(self.ranks):
            ready, _, _ = select.select([replies], [], [], max(0.0, end - time.monotonic()))
            line = replies.readline() if ready else ""
            if not line:
                why = "died" if ready else "timed out"
                tail = self.logs[rank].read_text(errors="replace").strip().splitlines()[-4:]
                raise Failed(f"rank {rank} {why} before {key!r} (see {self.logs[rank]}): {' | '.join(tail)}")
            message = json.loads(line)
            if "skipped" in message:
                raise Skipped(message["skipped"])
            said.append(message[key])
        return said

    def tell(self, line: str) -> None:
        for _, control, _ in self.ranks:
            with contextlib.suppress(BrokenPipeError):
                control.write(line + "\n")
                control.flush()

    def burst(self, steps: int) -> None:
        self.tell(f"go {steps}")
        self.hear("done")

    def finish(self) -> list[dict[str, Any]]:
        self.tell("end")
        return self.hear("report")

    def stop(self) -> None:
        """Ends what is left of the peer; every rank leads a session of its own."""
        for process, control, replies in self.ranks:
            with contextlib.suppress(OSError):
                control.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            replies.close()


def run_group(names: Sequence[str], options: argparse.Namespace, logs: Path) -> list[dict[str, Any]]:
    """One row per peer; a row with an `error` for one that failed."""
    cfg = work.CONFIGS[options.config]
    live: dict[str, Running] = {}
    rows: list[dict[str, Any]] = []

    def lost(name: str, error: Exception) -> None:
        word = "skipped" if isinstance(error, Skipped) else "failed"
        print(f"  {name}: {word}: {error}", file=sys.stderr, flush=True)
        rows.append({"name": name, "config": cfg.name, "error": f"{word}: {error}"})
        live.pop(name).stop()

    try:
        for name in names:
            with _lock(options.lock):
                start = time.perf_counter()
                live[name] = Running(name, PEERS[name], options, logs)
                try:
                    live[name].hear("ready")
                except (Failed, Skipped) as error:
                    lost(name, error)
                    continue
                print(
                    f"  {name}: warm after {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True
                )
        for _ in range(options.rounds):
            for name in list(live):
                with _lock(options.lock):
                    try:
                        live[name].burst(options.burst)
                    except Failed as error:
                        lost(name, error)
        for name in list(live):
            try:
                rows.append(summarize(name, PEERS[name], live[name].finish(), cfg))
                live.pop(name).stop()
            except Failed as error:
                lost(name, error)
    finally:
        for running in live.values():
            running.stop()
    reference = next((row for row in rows if row["name"] == REFERENCE and "median_s" in row), None)
    for row in rows:
        if reference and "median_s" in row:
            row["vs_ddp"] = row["median_s"] / reference["median_s"]
    return rows


def summarize(name: str, spec: Spec, reports: Sequence[dict[str, Any]], cfg: work.Config) -> dict[str, Any]:
    """One row from the reports of all ranks."""
    steps = [max(x) for x in zip(*(r["step_s"] for r in reports), strict=True)]
    warm = [max(x) for x in zip(*(r["warm_s"] for r in reports), strict=True)]
    median = statistics.median(steps)
    extra: dict[str, Any] = {
        key: reports[0][key] for key in ("instructions", "predicted_mb") if key in reports[0]
    }
    return {
        "name": name, "config": cfg.name, "ranks": len(reports), "threads": spec.threads, "steps": len(steps),
        "median_s": median, "min_s": min(steps), "p90_s": sorted(steps)[int(0.9 * (len(steps) - 1))],
        "tokens_per_s": cfg.tokens / median,
        "compile_s": max(0.0, sum(w - median for w in warm[:2])),
        "setup_s": max(r["setup_s"] for r in reports),
        "cpu_s": sum(r["cpu_s"] for r in reports) / len(steps),
        "system_s": sum(r["system_s"] for r in reports) / len(steps),
        "page_faults": sum(r["page_faults"] for r in reports) / len(steps),
        "rss_steps_mb": max(r["rss_steps_mb"] for r in reports),
        "rss_life_mb": max(r["rss_life_mb"] for r in reports),
        "rss_imported_mb": max(r["rss_imported_mb"] for r in reports),
        "losses": [statistics.fmean(x) for x in zip(*(r["losses"] for r in reports), strict=True)],
        "step_s": steps, **extra,
    }  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown. `max diff` is over the first five losses, against `single` if it ran, else the first row."""
    measured = [row for row in rows if "median_s" in row]
    base = next((row["losses"] for row in measured if row["name"] == "single"), None)
    base = base or (measured[0]["losses"] if measured else [])
    head = (
        "peer|ranks x threads|median s|vs ddp|min..p90 s|CPU s|tokens/s|compile s|RSS MB|RSS life MB|max diff"
    )
    lines = [_row(head.split("|")), _row(["---"] * 11)]
    for row in rows:
        if "error" in row:
            lines.append(_row([row["name"], "", row["error"][:200].replace("|", "/"), *[""] * 8]))
            continue
        diff = max(abs(a - b) for a, b in zip(row["losses"][:5], base[:5], strict=True))
        cells = [
            row["name"], f"{row['ranks']} x {row['threads']}", f"{row['median_s']:.3f}",
            f"{row.get('vs_ddp', float('nan')):.3f}",
            f"{row['min_s']:.3f}..{row['p90_s']:.3f}", f"{row['cpu_s']:.2f}",
            f"{row['tokens_per_s']:.0f}", f"{row['compile_s']:.1f}", f"{row['rss_steps_mb']:.0f}",
            f"{row['rss_life_mb']:.0f}", f"{diff:.1e}",
        ]  # fmt: skip
        lines.append(_row(cells))
    return "\n".join(lines)


def machine() -> str:
    """What the numbers were measured on."""
    model = "unknown CPU"
    with contextlib.suppress(OSError, StopIteration), open("/proc/cpuinfo") as file:
        model = next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    load = os.getloadavg()[0]
    return (
        f"{os.cpu_count()} x {model}, Linux {platform.release()}, Python {platform.python_version()}, "
        f"torch {torch.__version__}; load average before the run {load:.1f}"
    )


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextlib.contextmanager
def _lock(path: str) -> Iterator[None]:
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if a peer failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="S", choices=list(work.CONFIGS))
    parser.add_argument("--only", default=DEFAULT, help="comma-separated peers; the reference always runs")
    parser.add_argument("--add", action="append", default=[], help="NAME=RANKS:THREADS:MODULE FLAGS")
    parser.add_argument("--group", type=int, default=3, help="peers alive at once, beside the reference")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--burst", type=int, default=3, help="steps that a peer runs in its turn")
    parser.add_argument(
        "--warm", type=int, default=5, help="steps before timing; the losses of five are compared"
    )
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds to wait for a peer")
    parser.add_argument("--lock", default=os.path.join(tempfile.gettempdir(), "fparallel-bench.lock"))
    parser.add_argument("--cache", default="", help="torch.compile's cache folder; a fresh one unless given")
    parser.add_argument("--json", default="", help="append one JSON object a peer to this file")
    parser.add_argument("--list", action="store_true", help="print the peers and exit")
    options = parser.parse_args(argv)
    names = [name for name in options.only.split(",") if name and name != REFERENCE]
    for added in options.add:
        name, _, spec = added.partition("=")
        PEERS[name] = Spec.parse(spec)
        names.append(name)
    if options.list:
        for name, spec in PEERS.items():
            print(f"{name:20} {spec.ranks} x {spec.threads}  {spec.command}")
        return 0
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        parser.error(f"no peer called {', '.join(unknown)}; --list shows them")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the peers are stopped
    about = machine()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache:
        options.cache = options.cache or cache
        logs = Path(tempfile.mkdtemp(prefix="fparallel-bench-"))
        print(f"logs in {logs}", file=sys.stderr, flush=True)
        for at in range(0, max(len(names), 1), options.group):
            new = run_group([REFERENCE, *names[at : at + options.group]], options, logs)
            rows += new
            if options.json:
                with open(options.json, "a") as file:
                    file.writelines(json.dumps(row | {"machine": about}) + "\n" for row in new)
    print(
        f"{about}\nconfig {options.config}, {options.rounds} x {options.burst} steps after {options.warm}\n"
    )
    print(table(rows))
    return int(any(row.get("error", "").startswith("failed") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
