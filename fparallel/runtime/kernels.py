"""Fused kernels that run an elementwise segment in one pass over memory, where torch has one.

The segment's own ops stay its meaning: a kernel agrees with them up to rounding, and where it does not apply (another
device, mixed dtypes, strided tensors) they run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fparallel._compat import fused_adamw
from fparallel.schedule.segment import AdamW, Operand

CHUNK = 65536  # elements: the scaled gradient of one chunk stays in cache until the kernel reads it
_FOREVER = torch.tensor(1e9)  # a step count at which the kernel's own bias corrections are 1


def applies(kernel: AdamW, inputs: Sequence[Tensor]) -> bool:
    """Whether the kernel can run on these inputs."""
    first = inputs[kernel.ins[0]]
    if first.device.type != "cpu" or first.dtype not in (torch.float32, torch.float64) or not first.dim():
        return False
    return all(
        x.dtype == first.dtype and x.shape == first.shape and x.is_contiguous()
        for x in (inputs[i] for i in kernel.ins)
    )


def run_adamw(kernel: AdamW, inputs: Sequence[Tensor], into: Mapping[int, int]) -> tuple[Tensor, ...]:
    """One AdamW update by torch's fused kernel.

    The kernel's bias corrections are folded into its learning rate, epsilon and decay, since here they are computed
    once for all leaves. With r = sqrt(correct2):

        lr / correct1 * m / (sqrt(nu) / r + eps) = (lr * r / correct1) * m / (sqrt(nu) + r * eps)

    Args:
      into: output -> input whose storage it takes over; other outputs are new tensors.
    """

    def number(given: float | Operand) -> float:
        return float(inputs[given.index]) if isinstance(given, Operand) else given

    update, *state = (inputs[i] for i in kernel.ins)
    state = [
        x if into.get(out) == i else x.clone()
        for x, out, i in zip(state, kernel.outs, kernel.ins[1:], strict=True)
    ]
    lr, root = -number(kernel.step_size), math.sqrt(number(kernel.correct2))
    rate = lr * root / number(kernel.correct1)
    decay = kernel.weight_decay * lr / rate if rate else 0.0
    grads = update.view(-1).split(CHUNK)
    mus, nus, params = (x.view(-1).split(CHUNK) for x in state)
    clip = number(kernel.clip)
    settings = {
        "lr": rate,
        "beta1": kernel.b1,
        "beta2": kernel.b2,
        "weight_decay": decay,
        "eps": kernel.eps * root,
        "amsgrad": False,
        "maximize": False,
    }
    if clip == 1.0:
        fused_adamw(params, grads, mus, nus, [], [_FOREVER] * len(grads), **settings)
    else:
        scratch = torch.empty(min(CHUNK, update.numel()), dtype=update.dtype)
        for p, g, mu, nu in zip(params, grads, mus, nus, strict=True):
            scaled = torch.mul(g, clip, out=scratch[: g.numel()])
            fused_adamw([p], [scaled], [mu], [nu], [], [_FOREVER], **settings)
    outs: list[Tensor] = [update] * len(kernel.outs)
    for tensor, out in zip(state, kernel.outs, strict=True):
        outs[out] = tensor
    return tuple(outs)
