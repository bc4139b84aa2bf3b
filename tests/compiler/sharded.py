"""Runs a function under fp.jit with given shardings, compares with one device, and reads the collectives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fparallel as fp
from fparallel.layout import typed
from fparallel.schedule.ir import Schedule


@dataclass
class Sharded:
    """A sharded run that agreed with the run on one device."""

    schedule: Schedule
    outs: list[Any]

    @property
    def collectives(self) -> list[str]:
        """`all_reduce[tp] sum f64[8]` of every collective, with the global shape of what it moves."""
        result = []
        for step in self.schedule.collectives():
            for name in step.ins:
                buffer = self.schedule.buffers[name]
                shape = ",".join(map(str, buffer.layout.shape))
                axes = "*".join(map(str, step.axes))
                result.append(" ".join(filter(None, [f"{step.kind}[{axes}]", step.reduce, f"[{shape}]"])))
        return result

    @property
    def layouts(self) -> list[str]:
        return [typed(out.dtype, out.layout) for out in self.outs]


def run(
    fn: Callable[..., Any],
    args: Sequence[Any],
    specs: Sequence[Any],
    mesh: Any,
    *,
    exact: bool = False,
    rules: Any = None,
) -> Sharded:
    """Compares `fn` under fp.jit with the plain function."""

    def step(*args: Any) -> Any:
        return {"out": fn(*args)}  # unlike any argument, so that the results lie as they come out

    jitted = (
        fp.jit(step, mesh=mesh, rules=rules)
        if rules is not None
        else fp.jit(step, mesh=mesh, in_shardings=tuple(specs))
    )
    lowered = jitted.lower(*args)
    outs = fp.tree.leaves(jitted(*args))
    expected = fp.tree.leaves(fn(*args))
    assert len(outs) == len(expected)
    for out, want in zip(outs, expected, strict=True):
        got = fp.device_get(out)
        assert got.shape == want.shape
        assert got.dtype == want.dtype
        if exact:
            assert torch.equal(got, want)
        else:
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10, equal_nan=True)
    return Sharded(lowered.schedule, outs)


def simulated(**axes: int) -> Any:
    return fp.make_mesh(tuple(axes.values()), tuple(axes), kind="simulated")


def whole(seed: int, *shape: int, low: int = -3, high: int = 4) -> Tensor:
    """Small integers in float64, whose sums are exact in any order."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(torch.float64)


def real(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def index(seed: int, high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))
