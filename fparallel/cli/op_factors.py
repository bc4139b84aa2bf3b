"""How much longer than its roofline an op takes here: measured on the ops of training steps of the project's models."""

from __future__ import annotations

import collections
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

import fparallel as fp
from fparallel.cli.job import example_batch, make_functions
from fparallel.cli.options import Options
from fparallel.layout import Layout
from fparallel.runtime.segments import bind, resolve, resolve_target
from fparallel.schedule import Cluster, LocalOp, Ref, Segment
from fparallel.schedule.costs import factor_name, roofline
from fparallel.schedule.segment import SUMS, map_refs

__all__ = ["op_factors"]

_REPEATS = 5
_RANK = {"dp": 0}


def op_factors(cluster: Cluster, device: str) -> dict[str, float]:
    """By name of an op: the time that it takes, without `op_overhead`, over that of its roofline on `cluster`.

    All calls of an op in a training step of a GPT and of a Llama with micro-batches count together, but those whose
    roofline is below the overhead of an op.
    """
    measured: dict[str, float] = collections.defaultdict(float)
    expected: dict[str, float] = collections.defaultdict(float)
    for segments in _steps(device):
        for segment in segments.values():
            for op, seconds in _times(segment, segments, device):
                assert op.work is not None
                name = factor_name(op.target)
                least = roofline(op.work, cluster)
                if least > cluster.op_overhead:
                    measured[name] += max(0.0, seconds - cluster.op_overhead)
                    expected[name] += least
    return {name: measured[name] / expected[name] for name in sorted(measured) if expected[name] > 0}


def _steps(device: str) -> Iterator[Mapping[str, Segment]]:
    """The segments of a training step of every model on one rank."""
    dim, seq, batch = (2048, 1024, 8) if device == "cuda" else (512, 256, 4)
    for model in ("gpt", "llama"):
        options = Options(
            mesh="dp=1", zero=0, model=model, layers=1, dim=dim, heads=dim // 64, seq=seq, batch=batch,
            microbatches=2,
        )  # fmt: skip
        functions = make_functions(options)
        mesh = fp.make_mesh((1,), ("dp",), kind="simulated", device=device)
        step = fp.jit(functions.train_step, mesh=mesh, rules=options.make_rules(), donate_argnums=0)
        state = fp.eval_shape(functions.init_state, fp.ShapeDtypeStruct((2,), torch.int64))
        yield step.lower(state, example_batch(options)).schedule.segments


def _times(segment: Segment, segments: Mapping[str, Segment], device: str) -> Iterator[tuple[LocalOp, float]]:
    """The ops of a segment that do more than view, each with its seconds on some values."""
    if segment.kernel is not None or not any(op.work for op in segment.ops):
        return
    values = {i: _value(*typed, device) for i, typed in enumerate(segment.inputs)}
    left = collections.Counter(ref.index for op in segment.ops for ref in _refs(op))
    for op in segment.ops:
        if op.target.startswith("map."):
            run = _map_runner(op, segment, segments, values)
            if run is not None and op.work is not None:
                yield op, _seconds(run, device)
            return  # what such an op makes is read by nothing but other maps
        call = _runner(op, values)
        made = call()
        if op.work is not None:
            yield op, _seconds(call, device)
        outs = made if isinstance(made, (tuple, list)) else [made]
        values.update((out, value) for out, value in zip(op.outs, outs, strict=True) if out is not None)
        for ref in _refs(op):
            left[ref.index] -= 1
            if not left[ref.index]:
                values.pop(ref.index, None)


def _refs(op: LocalOp) -> list[Ref]:
    found: list[Ref] = []
    map_refs(found.append, [*op.args, *(value for _, value in op.kwargs)])
    return found


def _value(dtype: torch.dtype, layout: Layout, device: str) -> torch.Tensor:
    shape = layout.local_shape(_RANK)
    if dtype.is_floating_point:
        return torch.rand(shape, device=device).to(dtype)
    return torch.randint(0, 2, shape, device=device).to(dtype)


def _runner(op: LocalOp, values: Mapping[int, torch.Tensor]) -> Callable[[], Any]:
    target = resolve_target(f"{op.target}_" if op.target in SUMS else op.target)
    args = map_refs(lambda ref: values[ref.index], resolve(op.args, _RANK))
    kwargs = {key: map_refs(lambda ref: values[ref.index], resolve(v, _RANK)) for key, v in op.kwargs}
    return lambda: target(*args, **kwargs)


def _map_runner(
    op: LocalOp, segment: Segment, segments: Mapping[str, Segment], values: Mapping[int, torch.Tensor]
) -> Callable[[], Any] | None:
    """An elementwise map over leaves, written over what the step writes it over; None if it reads what others make."""
    ins = [ref.index for ref in _refs(op)]
    body = segments[op.target.removeprefix("map.")]
    if any(i >= len(segment.inputs) for i in ins):
        return None
    inputs = tuple(segment.inputs[i] for i in ins)
    outs = tuple(range(len(ins), len(ins) + len(op.outs)))
    layout = next(layout for (_, layout) in inputs if layout.shape)
    outputs = tuple((body.outputs[i][0], layout) for i in range(len(op.outs)))
    alone = LocalOp(op.target, tuple(map(Ref, range(len(ins)))), outs)
    one = Segment(f"{segment.name} alone", inputs, outputs, (alone,), outs)
    over = body.kernel and tuple(zip(range(3), body.kernel.ins[1:], strict=True))
    run = bind(one, segments, _RANK, over or ())
    return lambda: run(*(values[i] for i in ins))


def _seconds(call: Callable[[], Any], device: str) -> float:
    """The median of a few calls."""
    times = []
    for _ in range(_REPEATS):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
