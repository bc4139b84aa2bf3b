"""An elementwise segment in blocks, op by op, and as torch's fused kernel: AdamW over ten million parameters.

python -m benchmarks.elementwise [--numel 10000000] [--block 16384 32768 65536 131072]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from fparallel.layout import Layout
from fparallel.runtime import blocked
from fparallel.runtime.segments import bind
from fparallel.schedule import LocalOp, Ref, Segment


def adamw(numel: int) -> dict[str, Segment]:
    """Inputs p, g, m, v and 0-d scale, 1-b1^t, 1-b2^t, -lr; results p, m, v; seventeen ops."""
    ops: list[LocalOp] = []

    def op(name: str, *args: object) -> Ref:
        ops.append(LocalOp(f"aten.{name}", args, (8 + len(ops),)))
        return Ref(7 + len(ops))

    p, g, m, v, scale, c1, c2, lr = map(Ref, range(8))
    g = op("mul.Tensor", g, scale)
    m = op("add.Tensor", op("mul.Tensor", m, 0.9), op("mul.Tensor", g, 0.1))
    v = op("add.Tensor", op("mul.Tensor", v, 0.99), op("mul.Tensor", op("mul.Tensor", g, g), 0.01))
    root = op("add.Tensor", op("sqrt.default", op("div.Tensor", v, c2)), 1e-8)
    update = op("add.Tensor", op("div.Tensor", op("div.Tensor", m, c1), root), op("mul.Tensor", p, 0.01))
    p = op("add.Tensor", p, op("mul.Tensor", update, lr))
    leaf, scalar = (torch.float32, Layout.replicated((numel,))), (torch.float32, Layout.replicated(()))
    inputs, outputs = (leaf,) * 4 + (scalar,) * 4, (leaf,) * 3
    body = Segment("body", inputs, outputs, tuple(ops), (p.index, m.index, v.index))
    call = LocalOp("map.body", tuple(map(Ref, range(8))), (8, 9, 10))
    return {"body": body, "update": Segment("update", inputs, outputs, (call,), (8, 9, 10))}


def milliseconds(function: Callable[[], object], rounds: int = 5) -> float:
    function()
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - start)
    return best * 1e3


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=10_000_000)
    parser.add_argument("--block", type=int, nargs="+", default=[16384, 32768, 65536, 131072])
    options = parser.parse_args()
    torch.set_num_threads(1)
    segments = adamw(options.numel)
    p, g, m, v = (torch.rand(options.numel) for _ in range(4))
    scalars = [torch.tensor(x) for x in (0.7, 0.5, 0.3, -1e-3)]
    rates = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.01, "eps": 1e-8}
    lists, step = [[x] for x in (p, g, m, v)], [torch.tensor(3.0)]
    kernel = torch.ops.aten._fused_adamw_.default
    fused = milliseconds(lambda: kernel(*lists, [], step, **rates, amsgrad=False, maximize=False))
    body, update = (
        bind(segments["body"], segments, {}),
        bind(segments["update"], segments, {}, ((0, 0), (1, 2), (2, 3))),
    )
    print(f"fused kernel       {fused:7.1f} ms")
    for block in options.block:
        blocked.BLOCK = block
        took = milliseconds(lambda: update(p, g, m, v, *scalars))
        print(f"blocks of {block:<7}  {took:7.1f} ms   {took / fused:.1f} x")
    plain = milliseconds(lambda: body(p, g, m, v, *scalars), rounds=2)
    print(f"op by op           {plain:7.1f} ms   {plain / fused:.1f} x")


if __name__ == "__main__":
    main()
