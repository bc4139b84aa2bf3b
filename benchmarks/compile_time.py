"""How long a step takes to compile, and how that grows with depth.

    python -m benchmarks.compile_time              # trace and lower at 12 and 48 layers; dp=2,tp=2, ZeRO-3
    python -m benchmarks.compile_time --inductor   # the first step under compile="inductor"; S, twice its layers

Every measurement is a fresh process, so that nothing is cached; medians of `--repeats`. Importing torch and
fparallel, and the shapes of the state (`fp.eval_shape`), are reported apart. Lowering runs on one thread: its
CPU time is what a quiet machine takes, and the targets are held against it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main"]

ROOT = Path(__file__).resolve().parent.parent
TRACE_AND_LOWER = 6.0  # seconds at the first depth
GROWTH = 1.5  # of them, at four times the depth
MESH, ZERO = ((2, 2), ("dp", "tp")), 3


class Stages:
    """Wall and CPU seconds of stages that follow each other."""

    def __init__(self) -> None:
        self.seconds: dict[str, tuple[float, float]] = {}
        self.at = self._now()

    def _now(self) -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    def end(self, name: str) -> None:
        now = self._now()
        self.seconds[name] = (now[0] - self.at[0], now[1] - self.at[1])
        self.at = self._now()


def measure_lowering(layers: int) -> dict[str, tuple[float, float]]:
    """(wall, CPU) seconds of each stage, in this process."""
    stages = Stages()
    import torch

    import fparallel as fp
    from benchmarks import training, work
    from fparallel.schedule.passes import PASSES

    stages.end("import")
    fp.eval_shape(lambda x: x + 1, fp.ShapeDtypeStruct((2,), torch.float32))
    stages.end("what torch imports to trace")
    cfg = dataclasses.replace(work.CONFIGS["S"], layers=layers)
    functions = training.make_functions(cfg)
    mesh = fp.make_mesh(*MESH, kind="abstract")
    rules = training.make_rules(MESH[1], ZERO)
    step = fp.jit(functions.train_step, mesh=mesh, rules=rules, donate_argnums=0)
    state = fp.eval_shape(functions.init_state, fp.ShapeDtypeStruct((2,), torch.int64))
    stages.end("shapes of the state")
    traced = step.trace(state, training.example_batch(cfg))
    stages.end("trace")
    lowered = traced.lower()
    stages.end("lower")
    str(lowered.schedule)
    stages.end("print the schedule")
    lowered.schedule.verify()
    stages.end("within lower: verify")
    schedule = lowered.program.schedule
    for name, run in PASSES.items():
        schedule = run(schedule)
        stages.end(f"within lower: pass {name}")
    seconds = stages.seconds
    (w1, c1), (w2, c2) = seconds["trace"], seconds["lower"]
    seconds["trace + lower"] = (w1 + w2, c1 + c2)
    return seconds


def measure_inductor(layers: int) -> dict[str, tuple[float, float]]:
    """(wall, CPU) seconds of lowering, of the first step on one rank, and of a later one, in this process."""
    import torch

    import fparallel as fp
    from benchmarks import training, work

    cfg = dataclasses.replace(work.CONFIGS["S"], layers=layers)
    functions = training.make_functions(cfg)
    mesh = fp.make_mesh((1,), ("dp",), kind="simulated")
    rules = training.make_rules(("dp",), 0)
    state = fp.jit(functions.init_state, mesh=mesh, rules=rules)(fp.random.key(0))
    step = fp.jit(functions.train_step, mesh=mesh, rules=rules, donate_argnums=0, compile="inductor")
    batch = training.batch_of(*(torch.from_numpy(a) for a in work.Batches(cfg)(0)))
    batch = fp.device_put(batch, fp.NamedSharding(mesh, fp.P("dp")))
    stages = Stages()
    compiled = step.lower(state, batch).compile()
    stages.end("trace + lower")
    for name in ("first step", "second step", "third step"):
        state, metrics = compiled(state, batch)
        float(metrics["loss"])
        stages.end(name)
    return stages.seconds


def fresh(what: str, depths: Sequence[int], repeats: int) -> list[dict[str, tuple[float, float]]]:
    """For each depth the medians over fresh processes; the depths take turns, so that drift meets all."""
    found: list[list[dict[str, tuple[float, float]]]] = [[] for _ in depths]
    for _ in range(repeats):
        for layers, runs in zip(depths, found, strict=True):
            runs.append(_child(what, layers))
    return [_medians(runs) for runs in found]


def _child(what: str, layers: int) -> dict[str, tuple[float, float]]:
    command = [sys.executable, "-m", "benchmarks.compile_time", "--child", what, "--layers", str(layers)]
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
        )
    return json.loads(done.stdout.splitlines()[-1])


def _medians(found: list[dict[str, tuple[float, float]]]) -> dict[str, tuple[float, float]]:
    wall = {name: statistics.median(one[name][0] for one in found) for name in found[0]}
    return {name: (wall[name], statistics.median(one[name][1] for one in found)) for name in wall}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table and a JSON line; returns 1 if a target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--inductor", action="store_true")
    parser.add_argument(
        "--depths", default="", help="two numbers of layers; 12,48 (inductor: 6,12) if not given"
    )
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        measure = measure_inductor if options.child == "inductor" else measure_lowering
        print(json.dumps(measure(options.layers)))
        return 0
    what = "inductor" if options.inductor else "lowering"
    few, many = (int(x) for x in (options.depths or ("6,12" if options.inductor else "12,48")).split(","))
    shallow, deep = fresh(what, (few, many), options.repeats)
    print(
        f"| seconds | {few} layers: wall | CPU | {many} layers: wall | CPU | ratio of CPU |\n{'| --- ' * 6}|"
    )
    for name, (wall, cpu) in shallow.items():
        more, most = deep[name]
        print(f"| {name} | {wall:.2f} | {cpu:.2f} | {more:.2f} | {most:.2f} | {most / max(cpu, 1e-9):.2f} |")
    print(json.dumps({"what": what, str(few): shallow, str(many): deep}))
    if options.inductor:
        return 0
    base, growth = shallow["trace + lower"][1], deep["trace + lower"][1] / shallow["trace + lower"][1]
    met = base < TRACE_AND_LOWER and growth <= GROWTH
    print(
        f"trace + lower: {base:.2f} s at {few} layers (target {TRACE_AND_LOWER:g}), "
        f"{growth:.2f} times that at {many} (target {GROWTH:g}): {'met' if met else 'MISSED'}"
    )
    return int(not met)


if __name__ == "__main__":
    sys.exit(main())
