"""What keeping freed memory mapped gains on a CPU: a training step with and without `tune_allocator`.

    python -m benchmarks.allocator

Each setting runs in processes of its own, taking turns. The step is forward, backward and AdamW of a small
transformer. Page faults are what the setting avoids; they count even where a busy machine blurs the times.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time


def step_time() -> tuple[float, float, float]:
    """(milliseconds of the fastest of eight steps, page faults per step, peak resident MB)."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True)
    model = torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    head = torch.nn.Linear(256, 8192)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], fused=True)
    x = torch.randn(8, 128, 256)
    best, faults = float("inf"), 0
    for number in range(10):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        start = time.perf_counter()
        head(model(x)).logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number >= 2:
            best = min(best, time.perf_counter() - start)
            faults += resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return best * 1e3, faults / 8, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def main() -> None:
    if len(sys.argv) > 1:
        if sys.argv[1] == "tuned":
            from fparallel.runtime.transport.distributed import tune_allocator

            assert tune_allocator(), "this C library has no mallopt"
        print(*step_time())
        return
    best: dict[str, tuple[float, ...]] = {}
    for _ in range(3):
        for setting in ("default", "tuned"):
            command = [sys.executable, "-m", "benchmarks.allocator", setting]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            took = tuple(map(float, output.split()))
            best[setting] = min(best.get(setting, took), took)
    for setting, (took, faults, peak) in best.items():
        ratio = took / best["default"][0]
        print(f"{setting:<8} {took:6.0f} ms a step  {faults:7.0f} faults  peak {peak:5.0f} MB  {ratio:.2f} x")


if __name__ == "__main__":
    main()
