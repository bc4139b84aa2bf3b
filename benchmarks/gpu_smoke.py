"""Does fparallel compute the right thing on a CUDA device, through NCCL, and how fast? Under five minutes.

    python -m benchmarks.gpu_smoke              # from the repository's root, on a machine with one NVIDIA GPU

Needs torch >= 2.11 built for CUDA and the package's other dependencies; with the repository's root on
PYTHONPATH nothing need be installed. It checks, and exits with 1 if any check fails:

* a training step under fp.jit against the same step un-jitted on the device, from the same state, in float64
  (1e-10) and float32, on a job's mesh of one rank (the process group is NCCL) and on four simulated ranks,
  dp=2,tp=2 with ZeRO-3;
* every kind of collective of the NCCL transport, world size 1, issued behind a busy compute stream.

It then measures S and M: torch's eager step beside fp.jit's on one device, and the peak memory that the
schedule predicts beside the one that the allocator saw. The last line is one JSON object. Without a CUDA
device it says so and exits with 0. `--rehearse` runs the same on the CPU with the smallest sizes, to try the
script itself.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fparallel as fp
from benchmarks import model, training, work
from fparallel.factors import Factor
from fparallel.layout import Layout
from fparallel.models import gpt
from fparallel.runtime.exchange import exchange_of
from fparallel.schedule import Buffer, Collective, Program, Schedule

__all__ = ["main"]

STEPS = 3
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-4}


class Smoke:
    """The checks and what they found.

    Args:
      device: "cuda", or "cpu" for a rehearsal.
    """

    def __init__(self, device: str) -> None:
        self.device, self.real = device, device == "cuda"
        self.found: dict[str, Any] = {}
        self.failed: list[str] = []

    def check(self, name: str, function: Callable[[], Any]) -> None:
        """Runs one check; an exception fails it, and the others go on."""
        start = time.perf_counter()
        try:
            self.found[name] = function()
            verdict = "ok"
        except Exception as error:
            traceback.print_exc()
            self.failed.append(name)
            self.found[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            verdict = "FAILED"
        print(f"{verdict:6} {name} ({time.perf_counter() - start:.1f} s): {self.found[name]}", flush=True)

    def synchronize(self) -> None:
        if self.real:
            torch.cuda.synchronize()

    def on_device(self, values: Any) -> Any:
        return fp.tree.map(lambda x: x.to(self.device) if isinstance(x, Tensor) else x, values)

    # ------------------------------------------------------------ equality

    def equal(self, mesh: Any, zero: int, dtype: torch.dtype) -> dict[str, float]:
        """A few steps under fp.jit against the un-jitted ones on the device.

        Returns:
          The largest differences of losses, of the first gradients (beside the largest of them) and, in
          float64, of the whole state after the last step.
        """
        cfg = work.CONFIGS["tiny"]
        functions, rules = training.make_functions(cfg, dtype=dtype), training.make_rules(mesh.names, zero)
        init = fp.jit(functions.init_state, mesh=mesh, rules=rules)
        train = fp.jit(functions.train_step, mesh=mesh, rules=rules, donate_argnums=0)
        gradients = fp.jit(_gradients, mesh=mesh, rules=rules)
        batches = [self.batch(cfg, t, dtype) for t in range(STEPS)]
        state = init(fp.random.key(0))
        expected = self.on_device(fp.device_get(state))
        grads = fp.device_get(gradients(state.params, batches[0])[1])
        grad_gap, largest = _gap(grads, _gradients(expected.params, batches[0])[1])
        loss_gap = 0.0
        for batch in batches:
            state, metrics = train(state, batch)
            expected, wanted = functions.train_step(expected, batch)
            loss_gap = max(loss_gap, abs(float(metrics["loss"]) - float(wanted["loss"])))
        state_gap, _ = _gap(fp.device_get(state), expected)
        bound = BOUNDS[dtype]
        found = {"loss": loss_gap, "gradients": grad_gap, "largest gradient": largest, "state": state_gap}
        if not (loss_gap <= bound and grad_gap <= bound * max(1.0, largest)):
            raise AssertionError(f"losses or gradients differ by more than {bound}: {found}")
        # In float32 Adam turns rounding into whole steps where a gradient is zero but for rounding.
        if dtype == torch.float64 and not state_gap <= bound:
            raise AssertionError(f"the states differ by more than {bound}: {found}")
        return found

    def batch(self, cfg: work.Config, t: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        batch = training.batch_of(*(torch.from_numpy(a) for a in work.Batches(cfg)(t)))
        return self.on_device(batch | {"mask": batch["mask"].to(dtype)})

    # ------------------------------------------------------------ collectives

    def collectives(self) -> str:
        """Each kind of collective over one rank gives what it was given, in order with the compute stream."""
        mesh = fp.make_mesh((1,), ("dp",), device=self.device)
        dp = mesh.axis("dp")
        n = 1000 if self.real else 10
        communicator = self.communicator()
        whole = Layout.replicated((n, n))
        rows, columns = (
            Layout.of([[Factor(n, (dp,))], [Factor(n)]]),
            Layout.of([[Factor(n)], [Factor(n, (dp,))]]),
        )
        partial = Layout.of([[Factor(n)], [Factor(n)]], [(dp, "sum")])
        cases = {
            "all_gather": (rows, whole),
            "reduce_scatter": (partial, rows),
            "all_reduce": (partial, whole),
            "all_to_all": (rows, columns),
            "permute": (rows, rows),
        }
        for kind, (src, dst) in cases.items():
            buffers = {name: Buffer(name, torch.float32, src) for name in ("a", "b")}
            buffers |= {name: Buffer(name, torch.float32, dst) for name in ("c", "d")}
            reduce = "sum" if kind in ("reduce_scatter", "all_reduce") else ""
            instr = Collective(kind, (dp,), ("a", "b"), ("c", "d"), reduce)
            schedule = Schedule(
                mesh, buffers, {}, (Program((), ("a", "b"), ("c", "d"), frozenset(), (instr,)),)
            )
            issue = communicator.collective(exchange_of(instr, schedule, 0))
            for _ in range(3):
                x = torch.eye(n, device=self.device)
                for _ in range(30):  # keeps the compute stream busy behind the host
                    x = x @ torch.eye(n, device=self.device)
                given = [x + 1, x + 2]
                taken = [torch.zeros(n, n, device=self.device) for _ in given]
                issue(given, taken).wait()
                after = [y * 2 for y in taken]
                for i, y in enumerate(after):
                    torch.testing.assert_close(y, (torch.eye(n, device=self.device) + i + 1) * 2)
        return ", ".join(cases)

    def communicator(self) -> Any:
        if self.real:
            from fparallel.runtime.transport.nccl import NcclCommunicator

            return NcclCommunicator(dist.new_group([0], backend="nccl"), [0])
        from fparallel.runtime.transport.gloo import GlooCommunicator
        from fparallel.runtime.transport.messages import Pool

        return GlooCommunicator(None, [0], Pool(), 60.0)

    # ------------------------------------------------------------ speed and memory

    def speed(self, name: str) -> dict[str, float]:
        """Median milliseconds of a step, torch's eager one beside fp.jit's, interleaved; peaks in MB."""
        cfg = work.CONFIGS[name]
        eager, (jitted, lowered) = self.eager(cfg), self.jitted(cfg)
        steps = {"eager": eager, "fp": jitted}
        times: dict[str, list[float]] = {which: [] for which in steps}
        losses: dict[str, list[float]] = {which: [] for which in steps}
        peaks = {}
        for t in range(15):
            batch = self.batch(cfg, t)
            for which, step in steps.items():
                self.synchronize()
                if self.real and t == 5:
                    before = torch.cuda.memory_allocated()
                    torch.cuda.reset_peak_memory_stats()
                start = time.perf_counter()
                loss = step(batch)
                self.synchronize()
                times[which].append(time.perf_counter() - start)
                losses[which].append(float(loss))
                if self.real and t == 5:
                    peaks[which] = (torch.cuda.max_memory_allocated() - before) / 1e6
        gap = max(abs(a - b) for a, b in zip(losses["eager"][:5], losses["fp"][:5], strict=True))
        if not gap <= 1e-3:
            raise AssertionError(f"the losses of the first five steps differ by {gap}: {losses}")
        eager_ms, fp_ms = (statistics.median(times[which][5:]) * 1e3 for which in steps)
        found = {
            "eager ms": round(eager_ms, 3),
            "fp ms": round(fp_ms, 3),
            "fp / eager": round(fp_ms / eager_ms, 4),
            "loss gap": gap,
            "predicted peak MB": round(lowered.memory().peak() / 1e6, 1),
        }
        if self.real:  # the state at rest is of equal size on both sides
            found |= {f"{which}: peak MB": round(peak + self.rest / 1e6, 1) for which, peak in peaks.items()}
        return found

    def eager(self, cfg: work.Config) -> Callable[[dict[str, Tensor]], Tensor]:
        net = model.init_(model.GPT(cfg), cfg).to(self.device)
        optimizer = model.adamw(net.parameters())

        def step(batch: dict[str, Tensor]) -> Tensor:
            loss = net(batch["tokens"], batch["targets"])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), work.CLIP)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    def jitted(self, cfg: work.Config) -> tuple[Callable[[dict[str, Tensor]], Any], Any]:
        mesh = fp.make_mesh((1,), ("dp",), device=self.device)
        rules, functions = training.make_rules(mesh.names, 0), training.make_functions(cfg)
        state = fp.jit(functions.init_state, mesh=mesh, rules=rules)(fp.random.key(0))
        state = state.replace(params=training.initial_params(cfg, state.params))
        self.rest = sum(x.numel() * x.dtype.itemsize for x in fp.tree.leaves(state))
        step = fp.jit(functions.train_step, mesh=mesh, rules=rules, donate_argnums=0)
        lowered = step.lower(state, self.batch(cfg, 0))
        compiled = lowered.compile()

        def run(batch: dict[str, Tensor]) -> Any:
            nonlocal state
            state, metrics = compiled(state, batch)
            return metrics["loss"]

        return run, lowered


def _gradients(params: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Any]:
    return fp.value_and_grad(gpt.loss)(params, batch)


def _gap(got: Any, expected: Any) -> tuple[float, float]:
    """The largest difference between two trees, and the largest magnitude in the second."""
    gap = largest = 0.0
    for a, b in zip(fp.tree.leaves(got), fp.tree.leaves(expected), strict=True):
        a, b = torch.as_tensor(a).double().cpu(), torch.as_tensor(b).double().cpu()
        if b.numel():
            gap, largest = max(gap, float((a - b).abs().max())), max(largest, float(b.abs().max()))
    return gap, largest


def versions(device: str) -> dict[str, Any]:
    """What the numbers were measured with."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": device,
    }
    if device == "cuda":
        found |= {
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "gpu": torch.cuda.get_device_name(0),
            "tf32": torch.backends.cuda.matmul.allow_tf32,
        }
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if a check failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rehearse", action="store_true", help="the smallest sizes, on the CPU")
    options = parser.parse_args(argv)
    if not options.rehearse and not torch.cuda.is_available():
        print("no CUDA device: nothing checked")
        return 0
    began = time.perf_counter()
    smoke = Smoke("cpu" if options.rehearse else "cuda")
    about = versions(smoke.device)
    print(json.dumps(about), flush=True)
    for dtype in (torch.float64, torch.float32):
        for name, sizes, kind in (("one rank", (1, 1), "job"), ("four ranks", (2, 2), "simulated")):

            def equal(sizes: tuple[int, int] = sizes, kind: str = kind, dtype: torch.dtype = dtype) -> Any:
                mesh = fp.make_mesh(sizes, ("dp", "tp"), kind=kind, device=smoke.device)
                return smoke.equal(mesh, 3, dtype)

            smoke.check(f"{name}, {str(dtype).removeprefix('torch.')}", equal)
    smoke.check("collectives", smoke.collectives)
    for name in ("tiny",) if options.rehearse else ("S", "M"):
        smoke.check(f"speed of {name}", lambda name=name: smoke.speed(name))
    seconds = round(time.perf_counter() - began, 1)
    print(json.dumps({"versions": about, "failed": smoke.failed, "seconds": seconds, "found": smoke.found}))
    if dist.is_initialized():
        dist.destroy_process_group()
    return int(bool(smoke.failed))


if __name__ == "__main__":
    sys.exit(main())
