"""The recorder: what a tracer offers to the functions that users call inside a step, while it traces."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fparallel.region import ShardMapCall


@dataclass(frozen=True)
class Stage:
    """What a mapped function is, for the update to be run by one fused kernel: the function stays its meaning.

    Attributes:
      name: "scale", "adam", "decay" or "apply".
      ins, outs: the role of each tree that goes in and comes out: "u" (the update), "mu", "nu", "p" (the parameter).
      constants: its Python numbers.
    """

    name: str
    ins: tuple[str, ...]
    outs: tuple[str, ...]
    constants: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Loop:
    """A function over micro-batches: see `microbatches.accumulate`.

    Attributes:
      body: from the tensors that pass whole, those of a micro-batch and its keys to flat results.
      kinds: after a call of the body, per result "sum" or "rows".
      means: after a call of the body, per result the name of a plain value of which the micro-batches' mean is
        taken, "" for any other.
      num, group: micro-batches, and neighbouring rows that stay together.
      whole, batch, keys: the tensors outside of the loop.
    """

    name: str
    body: Callable[[list[Tensor], list[Tensor], list[Tensor]], list[Tensor]]
    kinds: Callable[[], list[str]]
    means: Callable[[], list[str]]
    num: int
    group: int
    whole: list[Tensor]
    batch: list[Tensor]
    keys: list[Tensor]


class Recorder(Protocol):
    """What a tracer offers to the functions that users call inside a step."""

    def enter_grad(self, leaves: list[Tensor]) -> list[Tensor]: ...
    def mark_grads(self, grads: list[Tensor], leaves: list[Tensor], paths: list[str]) -> list[Tensor]: ...
    def backward_phase(self) -> contextlib.AbstractContextManager[None]: ...
    def call_block(self, fn: Callable, name: str, args: tuple, kwargs: dict) -> Any: ...
    def map_leaves(
        self, fn: Callable, leaves: list[list[Tensor]], shared: list[Any], stage: Stage | None
    ) -> tuple[list[list[Tensor]], bool]: ...
    def sum_squares(self, leaves: list[Tensor], dtype: torch.dtype) -> Tensor: ...
    def constrain(self, x: Tensor, spec: Any) -> Tensor: ...

    def stage_boundary(self, x: Tensor) -> Tensor: ...
    def untraced(self) -> contextlib.AbstractContextManager[None]: ...
    def accumulate(self, loop: Loop) -> list[Tensor]: ...
    def shard_map(self, call: ShardMapCall, xs: list[Tensor]) -> list[Tensor]: ...


_recorder: contextvars.ContextVar[Recorder | None] = contextvars.ContextVar(
    "fparallel_recorder", default=None
)
# how many gradients of gradients are being taken
grad_depth: contextvars.ContextVar[int] = contextvars.ContextVar("fparallelgrad_depth", default=0)


def current_recorder() -> Recorder | None:
    return _recorder.get()


@contextlib.contextmanager
def recording(recorder: Recorder | None) -> Iterator[None]:
    """Makes `recorder` the current one; None suspends recording."""
    token = _recorder.set(recorder)
    depth = grad_depth.set(0)
    try:
        yield
    finally:
        grad_depth.reset(depth)
        _recorder.reset(token)
