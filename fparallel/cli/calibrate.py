"""``fparallel calibrate``: what this machine can do, measured, as a `Cluster` for `schedule.simulate`."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import fparallel as fp
from fparallel.cli import launch
from fparallel.cli.op_factors import op_factors
from fparallel.errors import ClusterError
from fparallel.factors import Factor
from fparallel.layout import Layout
from fparallel.runtime.executor import Executor
from fparallel.runtime.transport.distributed import DistributedTransport
from fparallel.runtime.transport.simulated import SimulatedTransport
from fparallel.schedule import (
    Buffer,
    Cluster,
    Collective,
    Free,
    Instr,
    Link,
    LocalOp,
    Program,
    Ref,
    Run,
    Schedule,
    Segment,
    Wait,
)
from fparallel.schedule.simulate import seconds_text
from fparallel.schedule.text import bytes_text

__all__ = ["Calibrate", "calibrate", "measure_link", "measure_rank"]

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_PRODUCTS = {"cpu": (256, 512, 1024), "cuda": (2048, 4096, 8192)}  # rows of square matrices
_STREAM_BYTES = 1 << 27  # of each tensor of an addition: beyond any cache
_SMALL, _LARGE = 1 << 10, (1 << 20, 1 << 22, 1 << 24)  # bytes that a rank sends
_BUDGET = 0.3  # seconds for each thing measured
_ALL = 1 << 20  # ranks of a CPU host: as many as a mesh has
_WORKER = "from fparallel.cli import calibrate, main; main.guard(calibrate.{})"


@dataclass(frozen=True, kw_only=True)
class Calibrate:
    """Measure this machine and write a JSON file for fp.Cluster.load, to simulate schedules on."""

    out: str = "~/.cache/fparallel/cluster.json"
    """The file to write."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What to measure; auto is cuda where there is one."""


def calibrate(options: Calibrate) -> None:
    """Measures all ranks of this machine at once, then the link between two of them, and writes the file.

    Raises:
        ClusterError: the file cannot be written, or there is no such device.
    """
    has_cuda = torch.cuda.is_available()
    if options.device == "cuda" and not has_cuda:
        raise ClusterError("--device cuda, but torch finds no GPU here", fix="use --device cpu")
    path = Path(options.out).expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        existed = path.exists()
        path.open("a").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise ClusterError(
            f"cannot write {path}: {error.strerror or error}", fix="choose another --out"
        ) from error
    device = "cuda" if options.device != "cpu" and has_cuda else "cpu"
    cluster, notes = _measure(device)
    cluster.save(path)
    rates = ", ".join(f"{name} {rate / 1e9:,.1f}" for name, rate in cluster.flops.items())
    print(
        f"{cluster.name}: "
        + (f"{cluster.cores} cores" if cluster.cores else f"{cluster.ranks_per_node} ranks")
    )
    print(f"  10^9 operations/s of a rank  {rates}")
    print(f"  memory                       {bytes_text(cluster.bandwidth)}/s, {bytes_text(cluster.memory)}")
    for name in ("intra", "host"):
        link = getattr(cluster, name)
        print(f"  {name + ' link':<27}  {seconds_text(link.latency)}, {bytes_text(link.bandwidth)}/s")
    print(f"  overhead                     {seconds_text(cluster.run_overhead)} a run, ", end="")
    print(f"{seconds_text(cluster.op_overhead)} an op")
    slow = sorted(cluster.factors.items(), key=lambda item: -item[1])
    print(
        f"  times the roofline           {', '.join(f'{name} {factor:.1f}' for name, factor in slow[:4])}, ..."
    )
    for note in notes:
        print(f"  {note}")
    print(f'wrote {path}; use schedule.simulate(fp.Cluster.load("{path}"))')


def _measure(device: str) -> tuple[Cluster, list[str]]:
    notes = ["the link between nodes is not measured: it is set to that inside a node"]
    cores = None
    if device == "cpu":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        num_ranks, per_node = cores, _ALL
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // num_ranks
        name = "this host"
    else:
        num_ranks = per_node = torch.cuda.device_count()
        memory, name = torch.cuda.get_device_properties(0).total_memory, torch.cuda.get_device_name(0)
    found = _ranks(device, num_ranks)
    host = Link(**found.pop("host"))
    if device == "cuda" and num_ranks < 2:
        link = host
        notes.append("one GPU: the link between ranks is set to that to the host")
    else:
        link = _link(device)
    return Cluster(
        name, memory=memory, ranks_per_node=per_node, intra=link, inter=link, host=host,
        overlap=device != "cpu", cores=cores, **found,
    ), notes  # fmt: skip


def _ranks(device: str, num_ranks: int) -> dict[str, Any]:
    """What a rank can do while all others of the node are as busy: medians over the ranks."""
    with tempfile.TemporaryDirectory() as folder:
        settings = json.dumps([_BUDGET, _STREAM_BYTES])
        code = launch.launch([device, folder, settings], num_ranks, worker=_WORKER.format("measure_rank"))
        found = [json.loads(path.read_text()) for path in Path(folder).glob("rank*.json")]
    if code or len(found) != num_ranks:
        raise ClusterError(f"the ranks that measure ended with exit code {code}", fix="start it again")
    return _median(found)


def _median(values: Sequence[Any]) -> Any:
    """The medians of numbers in equal trees of dicts."""
    if isinstance(values[0], dict):
        return {key: _median([value[key] for value in values]) for key in values[0]}
    return statistics.median(values)


def measure_rank() -> int:
    """A rank of the measurement of compute; writes what it found to the folder named on the command line."""
    global _BUDGET, _STREAM_BYTES
    launch.die_with_parent()
    device, folder, settings = sys.argv[1:]
    _BUDGET, _STREAM_BYTES = json.loads(settings)
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")  # for barriers: all measure the same at the same time

    def together(measure: Callable[..., Any], *args: Any) -> Any:
        torch.distributed.barrier()
        return measure(*args)

    flops = {str(dtype).removeprefix("torch."): together(_product_rate, dtype, device) for dtype in _DTYPES}
    bandwidth = together(_bandwidth, device)
    run_overhead, op_overhead = together(_overheads, device)
    host = together(_host_link) if device == "cuda" else Link(0.0, bandwidth)
    cluster = Cluster("", flops, bandwidth, 1, num_ranks, host, host, host, run_overhead, op_overhead)
    factors = together(op_factors, cluster, device)
    found = {
        "flops": flops,
        "bandwidth": bandwidth,
        "run_overhead": run_overhead,
        "op_overhead": op_overhead,
        "host": dataclasses.asdict(host),
        "factors": factors,
    }
    Path(folder, f"rank{rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return 0


def _best(work: Callable[[], object], device: str) -> float:
    """Seconds of the fastest of several calls, after one that does not count."""

    def timed() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    timed()
    end = time.perf_counter() + _BUDGET
    found = [timed()]
    while time.perf_counter() < end:
        found.append(timed())
    return min(found)


def _product_rate(dtype: torch.dtype, device: str) -> float:
    """Operations per second in the best of a few square matrix products."""
    rate = 0.0
    for rows in _PRODUCTS[device]:
        a, b = (torch.randn(rows, rows, device=device).to(dtype) for _ in range(2))
        seconds = _best(lambda a=a, b=b: a @ b, device)  # type: ignore[misc]
        rate = max(rate, 2 * rows**3 / seconds)
        if 8 * seconds > _BUDGET:  # so long would one product of the next size take
            break
    return rate


def _bandwidth(device: str) -> float:
    """Bytes per second that an addition reads and writes."""
    a, b, out = (torch.ones(_STREAM_BYTES // 4, device=device) for _ in range(3))
    return 3 * _STREAM_BYTES / _best(lambda: torch.add(a, b, out=out), device)


def _host_link() -> Link:
    """Copies from pinned memory to the GPU."""
    times = []
    for nbytes in (_SMALL, _STREAM_BYTES):
        source = torch.empty(nbytes, dtype=torch.uint8).pin_memory()
        target = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        times.append(_best(lambda s=source, t=target: t.copy_(s), "cuda"))  # type: ignore[misc]
    return Link(times[0], _STREAM_BYTES / max(times[1] - times[0], 1e-9))


def _overheads(device: str) -> tuple[float, float]:
    """Seconds that the executor adds to a run (and the free after it), and that an op on one number takes."""
    few, many = (_run_seconds(num_ops, device) for num_ops in (1, 17))
    op = max(0.0, (many - few) / 16)
    return max(0.0, few - op), op


def _run_seconds(num_ops: int, device: str, num_runs: int = 200) -> float:
    mesh = fp.make_mesh((1,), ("dp",), kind="simulated", device=device)
    value = (torch.float32, Layout.replicated((1,)))
    ops = tuple(LocalOp("aten.mul.Tensor", (Ref(i), 2), (i + 1,)) for i in range(num_ops))
    segment = Segment("ops", (value,), (value,), ops, (num_ops,))
    buffers = {"x": Buffer("x", *value, "argument")}
    instrs: list[Instr] = []
    for i in range(num_runs):
        buffers[f"y{i}"] = Buffer(f"y{i}", *value)
        instrs += [Run("ops", ("x",), (f"y{i}",)), Free((f"y{i}",))]
    program = Program((), ("x",), (), frozenset(), tuple(instrs))
    executor = Executor(Schedule(mesh, buffers, {"ops": segment}, (program,)), SimulatedTransport(1))
    x = torch.ones(1, device=device)
    return _best(lambda: executor.run([[x]]), device) / num_runs


# ---------------------------------------------------------------- two ranks


def _link(device: str) -> Link:
    """Measured by two local ranks, as `fparallel train` would start them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "link.json"
        code = launch.launch([device, str(path)], 2, worker=_WORKER.format("measure_link"))
        if code or not path.exists():
            raise ClusterError(
                f"the two ranks that measure the link ended with exit code {code}", fix="start it again"
            )
        return Link(**json.loads(path.read_text()))


def measure_link() -> int:
    """A rank of the measurement; the first writes latency and bandwidth to the file named on the command line."""
    launch.die_with_parent()
    device, path = sys.argv[1:]
    if device == "cpu":
        torch.set_num_threads(1)
    latency = _gather_seconds(_SMALL, device, repeats=100)
    rates = [
        nbytes / max(_gather_seconds(nbytes, device, repeats=(1 << 25) // nbytes) - latency, 1e-9)
        for nbytes in _LARGE
    ]
    if torch.distributed.get_rank() == 0:
        Path(path).write_text(json.dumps({"latency": latency, "bandwidth": statistics.median(rates)}))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return 0


def _gather_seconds(nbytes: int, device: str, repeats: int) -> float:
    """An all_gather to which each of the two ranks gives `nbytes`, through the executor; best of five rounds."""
    mesh = fp.make_mesh((2,), ("dp",), device=device)
    dp, numel = mesh.axis("dp"), nbytes // 2  # float32, over two ranks
    part, whole = Layout.of([[Factor(numel, (dp,))]]), Layout.replicated((numel,))
    buffers = {
        "x": Buffer("x", torch.float32, part, "argument"),
        "y": Buffer("y", torch.float32, whole, "result"),
    }
    instrs: tuple[Instr, ...] = (Collective("all_gather", (dp,), ("x",), ("y",)), Wait(("y",)))
    schedule = Schedule(mesh, buffers, {}, (Program((), ("x",), ("y",), frozenset(), instrs),))
    executor = Executor(schedule, DistributedTransport(mesh))
    x = torch.ones(numel // 2, device=mesh.device)

    def gather() -> None:
        executor.run([[x]])
        if device == "cuda":
            torch.cuda.synchronize()

    gather()
    best = float("inf")
    for _ in range(5):
        torch.distributed.barrier()
        start = time.perf_counter()
        for _ in range(repeats):
            gather()
        best = min(best, (time.perf_counter() - start) / repeats)
    return best
