"""``fparallel train``: one rank of a training run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fparallel as fp
from fparallel.cli.check import Check
from fparallel.cli.job import Data, example_batch, load_data, make_functions
from fparallel.cli.launch import is_joined
from fparallel.cli.options import Options
from fparallel.cli.report import Report, make_folder
from fparallel.data import END_OF_FILE
from fparallel.errors import ExecutionError
from fparallel.models import generate

__all__ = ["train", "validate"]

_EVAL_BATCHES = 4
_PROMPT = b"def "


def validate(options: Options) -> None:
    """Everything that can be wrong before a rank is started.

    Raises:
        FparallelError: the mesh, the rules, the model, the data or the out folder.
    """
    _ = options.model_config, options.make_rules(), options.make_optimizer()
    load_data(options)
    make_folder(options.out)


def train(options: Options) -> None:
    """Trains on the ranks of this job, or on simulated ones; reports on rank 0."""
    alone = options.simulate or (options.num_ranks == 1 and not is_joined())
    mesh, rules = options.make_mesh("simulated" if alone else "job"), options.make_rules()
    functions, data = make_functions(options), load_data(options)
    first = fp.process_index() == 0

    def jit(function: Callable[..., Any], rules: Any = rules, **kw: Any) -> Any:
        return fp.jit(
            function, mesh=mesh, rules=rules, pipeline=options.pipeline, compile=options.compile, **kw
        )

    init = jit(functions.init_state, rules)
    step = jit(functions.train_step, donate_argnums=0)
    evaluate = jit(functions.evaluate)
    key = fp.random.key(options.seed)
    keys = {
        name: fp.random.fold_in(key, i) for i, name in enumerate(("init", "data", "validation", "sample"))
    }
    folder = make_folder(options.out) if first else None
    tokens = options.batch_size * options.seq
    with Report(folder, steps=options.steps, tokens=tokens, json_lines=options.json) as report:
        report.say(options.describe())
        report.say(data.summary)
        began = time.perf_counter()
        state = init(keys["init"])
        schedule = step.lower(state, example_batch(options)).schedule
        report.write("schedule.txt", str(schedule))
        report.say(
            f"compiled in {time.perf_counter() - began:.1f} s; per step and rank: {_traffic(schedule, mesh)}"
        )
        check = None
        if options.check:
            check = Check(functions, jit(functions.gradients), keys["init"], reference=first)

        for index in range(options.steps):
            batch = data.train(keys["data"], index)
            if check and index < options.check:
                check.before(state.params, batch)
            began = time.perf_counter()
            state, metrics = step(state, batch)
            loss = float(metrics["loss"])
            seconds = time.perf_counter() - began
            if not math.isfinite(loss):
                raise ExecutionError(
                    f"the loss of step {index + 1} is {loss}", fix="use a smaller --lr, or --clip 1.0"
                )
            if check and index < options.check:
                check.after(state.params, loss, batch)
                if check.steps == min(options.check, options.steps):
                    report.say(check.text())
            held_out = None
            if (index + 1) % options.eval_every == 0 or index + 1 == options.steps:
                held_out = _validation_loss(evaluate, state.params, data, keys["validation"])
            report.step(index + 1, loss, seconds, held_out)

        params = fp.device_get(state.params)
        if first:
            report.draw()
            _finish(report, options, params, keys["sample"])


def _traffic(schedule: Any, mesh: Any) -> str:
    """What a rank sends in a step, by mesh axis."""
    parts = [f"{schedule.bytes(axis=name) / 1e6:.1f} MB over {name}" for name in mesh.names]
    return ", ".join(parts) or "nothing"


def _validation_loss(evaluate: Callable[..., Any], params: Any, data: Data, key: Tensor) -> float:
    """Nats per byte over the same few batches of held-out text each time."""
    means = [evaluate(params, data.validation(key, i)) for i in range(_EVAL_BATCHES)]
    weight = sum(float(mean.weight) for mean in means)
    return sum(float(mean.sum) for mean in means) / weight if weight else math.nan


def _finish(report: Report, options: Options, params: Any, key: Tensor) -> None:
    """The sample of text and the closing lines."""
    if options.sample:
        prompt = torch.tensor([list(_PROMPT)])
        drawn = generate(
            options.architecture.forward,
            params,
            prompt,
            num_tokens=options.sample,
            key=key,
            temperature=0.8,
            context=options.seq,
        )
        text = bytes(drawn[0].tolist()).split(bytes([END_OF_FILE]))[0].decode("utf-8", errors="replace")
        report.write("sample.txt", text)
        report.say(f"\na sample:\n{text}\n")
    last = report.records[-1]
    speeds = sorted(r["tokens_per_s"] for r in report.records)
    report.say(
        f"loss {last['loss']:.3f}, held-out {last['val_loss']:.3f} nats per byte, "
        f"median {speeds[len(speeds) // 2]:,.0f} tokens/s; files in {report.folder}"
    )
