"""What people see of a run: the progress bar, the JSON lines, and the files in the out folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from fparallel.errors import DataError

__all__ = ["Report", "make_folder", "peak_memory"]


def make_folder(path: str) -> Path:
    """The out folder, made if it is not there.

    Raises:
        DataError: it cannot be made, or is a file.
    """
    folder = Path(path).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(f"cannot make the folder {folder}: {reason}", fix="choose another --out") from error
    return folder


def peak_memory() -> int:
    """Peak bytes of this process so far: of the device where there is one, else resident."""
    import resource

    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Report:
    """The report of one run; a context manager that ends the progress bar and closes ``metrics.jsonl``.

    Args:
        folder: where the files go; ``None`` on every rank but the first, which then reports nothing.
        steps: how many steps will come.
        tokens: tokens in a step.
        json_lines: print one JSON object for each step on stdout, and everything for people on stderr.
    """

    def __init__(self, folder: Path | None, *, steps: int, tokens: int, json_lines: bool) -> None:
        self.folder, self.steps, self.tokens, self.json_lines = folder, steps, tokens, json_lines
        self.records: list[dict[str, Any]] = []
        self.console = Console(stderr=json_lines, quiet=folder is None, highlight=False)
        self._file = None if folder is None else (folder / "metrics.jsonl").open("w", encoding="utf-8")
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=folder is None or not self.console.is_terminal,
        )
        self._task = self._progress.add_task("train", total=steps, status="")

    def __enter__(self) -> Report:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
        if self._file is not None:
            self._file.close()

    def say(self, text: str) -> None:
        """A line for people, on the first rank."""
        self.console.print(Text(text), soft_wrap=True)

    def write(self, name: str, text: str) -> None:
        """A file in the out folder, on the first rank."""
        if self.folder is not None:
            (self.folder / name).write_text(text, encoding="utf-8")

    def step(self, step: int, loss: float, seconds: float, validation: float | None = None) -> None:
        """Records a finished step.

        Args:
            step: 1 for the first.
            loss: nats per token.
            seconds: wall-clock time of the step.
            validation: loss on the held-out text after this step, where it was measured.
        """
        if self._file is None:
            return
        record = {"step": step, "loss": loss, "tokens_per_s": self.tokens / seconds, "step_s": seconds}
        if validation is not None:
            record["val_loss"] = validation
        self.records.append(record)
        line = json.dumps(record)
        print(line, file=self._file, flush=True)
        if self.json_lines:
            print(line, flush=True)
        status = self._status(record)
        self._progress.update(self._task, completed=step, status=status)
        if not self.console.is_terminal and (validation is not None or step in (1, self.steps)):
            self.say(f"step {step}/{self.steps}  {status}")

    def _status(self, record: dict[str, Any]) -> str:
        recent = self.records[-10:]
        speed = self.tokens * len(recent) / sum(r["step_s"] for r in recent)
        measured = [r["val_loss"] for r in self.records if "val_loss" in r]
        validation = f"  val {measured[-1]:.3f}" if measured else ""
        memory = peak_memory() / 1e6
        return f"loss {record['loss']:.3f}{validation}  {speed:,.0f} tokens/s  peak {memory:,.0f} MB/rank"

    def draw(self) -> None:
        """Writes ``loss.png``: training and validation loss over steps."""
        if self.folder is None or not self.records:
            return
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot as plt

        figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
        axes.plot(
            [r["step"] for r in self.records], [r["loss"] for r in self.records], lw=1, label="training"
        )
        held_out = [(r["step"], r["val_loss"]) for r in self.records if "val_loss" in r]
        if held_out:
            axes.plot(*zip(*held_out, strict=True), "o-", ms=4, label="held-out files")
        axes.set(xlabel="step", ylabel="loss (nats per byte)")
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(self.folder / "loss.png", dpi=120)
        plt.close(figure)
