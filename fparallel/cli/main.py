"""The ``fparallel`` command: ``train``, ``lower`` and ``calibrate``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from fparallel.cli import launch
from fparallel.cli.calibrate import Calibrate, calibrate
from fparallel.cli.lower import lower
from fparallel.cli.options import Options
from fparallel.cli.train import train, validate
from fparallel.errors import FparallelError

__all__ = ["guard", "main", "worker"]

_INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True)
class Train(Options):
    """Train a byte-level language model on local ranks, or on those of torchrun or Slurm."""


@dataclass(frozen=True, kw_only=True)
class Lower(Options):
    """Print the program of the training step on any mesh, its memory and its traffic; needs no ranks."""


def _parse(arguments: Sequence[str]) -> Options | Calibrate:
    commands = (
        Annotated[Train, tyro.conf.subcommand("train", description=Train.__doc__)]
        | Annotated[Lower, tyro.conf.subcommand("lower", description=Lower.__doc__)]
        | Annotated[Calibrate, tyro.conf.subcommand("calibrate", description=Calibrate.__doc__)]
    )
    return tyro.cli(
        commands,  # type: ignore[arg-type]
        prog="fparallel",
        description="Write the training step once, for one device; say where things live.",
        args=list(arguments),
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
    )


def main() -> int:
    """The console script; returns the exit code."""
    return guard(_main)


def worker() -> None:
    """A rank that ``launch`` started; ends the process."""
    launch.die_with_parent()
    code = guard(_main)
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)


def _main() -> int:
    arguments = sys.argv[1:]
    options = _parse(arguments)
    if isinstance(options, Calibrate):
        calibrate(options)
        return 0
    options.check_values()
    if isinstance(options, Lower):
        lower(options)
        return 0
    launch.adopt_slurm()
    if not launch.is_joined():
        validate(options)
        if options.num_ranks > 1 and not options.simulate:
            return launch.launch(arguments, options.num_ranks)
    train(options)
    return 0


def guard(run: Callable[[], int]) -> int:
    """Exit codes and one-screen messages for what a person can cause, of this process or of the rank that it is."""
    try:
        return run()
    except FparallelError as error:
        if not launch.report_failure(error):
            rank = f"rank {os.environ['RANK']}: " if launch.is_joined() else ""
            print(f"{rank}error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:  # the reader of stdout has gone, as in `fparallel train --json | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
