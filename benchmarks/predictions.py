"""What `schedule.simulate` predicts for this machine, beside what steps take on it.

    python -m benchmarks.predictions                       # calibrates first; about 6 minutes on 2 cores
    python -m benchmarks.predictions --cluster c.json      # as `fparallel calibrate --out c.json` measured before

The GPT of `benchmarks.run` on meshes of 2 and 4 ranks. Where there are more ranks than cores, they share these.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

import fparallel as fp
from benchmarks import run, training, work
from fparallel.cli.calibrate import Calibrate, calibrate

MESHES = {
    "dp=2": "",
    "tp=2": "",
    "pp=2": "--micro 4",
    "dp=2,tp=2": "--zero 1",
    "dp=2,pp=2": "--zero 3 --micro 4",
    "pp=2,tp=2": "--micro 4 --pipeline zb_h1",
}


def predicted(config: str, mesh: str, flags: str, cluster: fp.Cluster) -> float:
    """Seconds of a step by simulation."""
    options = argparse.ArgumentParser()
    options.add_argument("--zero", type=int, default=0)
    options.add_argument("--micro", type=int, default=1)
    options.add_argument("--pipeline", default="1f1b")
    args, cfg = options.parse_args(flags.split()), work.CONFIGS[config]
    sizes = _sizes(mesh)
    functions = training.make_functions(cfg, micro=args.micro)
    step = fp.jit(
        functions.train_step,
        mesh=fp.make_mesh(tuple(sizes.values()), tuple(sizes), kind="abstract"),
        rules=training.make_rules(tuple(sizes), args.zero),
        donate_argnums=0,
        pipeline=args.pipeline,
    )
    state = fp.eval_shape(functions.init_state, fp.ShapeDtypeStruct((2,), torch.int64))
    return step.lower(state, training.example_batch(cfg)).schedule.simulate(cluster).time


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table; returns 1 if a mesh could not be measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="S", choices=list(work.CONFIGS))
    parser.add_argument(
        "--cluster", default="", help="a file of `fparallel calibrate`; measured unless given"
    )
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        path, rows = options.cluster or f"{folder}/cluster.json", Path(folder) / "rows.json"
        if not options.cluster:
            calibrate(Calibrate(out=path, device="cpu"))
        cluster = fp.Cluster.load(path)
        command = [
            "--config",
            options.config,
            "--only",
            "",
            "--warm",
            "2",
            "--burst",
            "2",
            "--json",
            str(rows),
        ]
        command += ["--rounds", str(options.rounds), "--group", str(len(MESHES))]
        for mesh, flags in MESHES.items():
            ranks = math.prod(_sizes(mesh).values())
            command += ["--add", f"{_name(mesh)}={ranks}:1:fp --mesh {mesh} {flags}"]
        code = run.main(command)
        found = {row["name"]: row for row in map(json.loads, rows.read_text().splitlines())}
    print(
        "\n| mesh | flags | measured s | predicted s | predicted / measured |\n| --- | --- | --- | --- | --- |"
    )
    errors = []
    for mesh, flags in MESHES.items():
        measured = found[_name(mesh)].get("median_s", float("nan"))
        guess = predicted(options.config, mesh, flags, cluster)
        errors.append(abs(guess / measured - 1))
        print(f"| {mesh} | {flags} | {measured:.3f} | {guess:.3f} | {guess / measured:.2f} |")
    print(f"\nmedian error {statistics.median(errors):.1%}, largest {max(errors):.1%}")
    return code


def _sizes(mesh: str) -> dict[str, int]:
    return {name: int(size) for name, size in (part.split("=") for part in mesh.split(","))}


def _name(mesh: str) -> str:
    """ "dp2-tp2"."""
    return mesh.replace("=", "").replace(",", "-")


if __name__ == "__main__":
    raise SystemExit(main())
