"""Loops over micro-batches inside a trace: the body is traced once, and the loop is one node of the program."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fparallel.compiler.blocks import Substitute
from fparallel.compiler.graph import LoopGraph, Value
from fparallel.errors import TraceError
from fparallel.recorder import current_recorder, recording

if TYPE_CHECKING:
    from fparallel.compiler.trace import Tracer


class LoopTracing:
    """The part of a recorder that traces loops."""

    phase: str
    tracer: Tracer | None
    loops: list[LoopGraph]
    fake: Callable[..., Tensor]
    emit: Callable[..., list[Tensor]]
    new_tracer: Callable[..., Tracer]

    def accumulate(
        self,
        body: Callable[[list[Tensor], list[Tensor], list[Tensor]], list[Tensor]],
        name: str,
        num: int,
        group: int,
        whole: list[Tensor],
        batch: list[Tensor],
        keys: list[Tensor],
        kinds: Callable[[], list[str]],
    ) -> list[Tensor]:
        """Records a loop: see `microbatches.accumulate`."""
        lifted: list[Tensor] = []
        for _ in range(2):
            pending: list[Tensor] = []
            graph = self._trace_loop(body, num, whole, batch, keys, lifted, pending)
            if not pending:
                break
            lifted += [x for i, x in enumerate(pending) if all(x is not y for y in pending[:i])]
        else:
            raise TraceError(
                f"{name} uses a tensor from outside that cannot be lifted to an argument",
                fix="pass the tensor to the accumulated function as an argument",
            )
        loop = LoopGraph(name, graph, num, group, len(whole) + len(lifted), len(batch), list(kinds()))
        self.loops.append(loop)
        like = [
            Value((out.shape[0] * num, *out.shape[1:]) if kind == "rows" else out.shape, out.dtype)
            for out, kind in zip(graph.outputs, loop.kinds, strict=True)
        ]
        args = ([*whole, *lifted], batch, keys, len(self.loops) - 1)
        return self.emit(torch.ops.fparallel.accumulate.default, args, like)

    def _trace_loop(
        self,
        body: Callable[[list[Tensor], list[Tensor], list[Tensor]], list[Tensor]],
        num: int,
        whole: list[Tensor],
        batch: list[Tensor],
        keys: list[Tensor],
        lifted: list[Tensor],
        pending: list[Tensor],
    ) -> Any:
        shapes = [tuple(x.shape) for x in [*whole, *lifted]]
        shapes += [(x.shape[0] // num, *x.shape[1:]) for x in batch] + [(2,)] * len(keys)
        given = [*whole, *lifted, *batch, *keys]
        fakes = [self.fake(shape, x.dtype) for shape, x in zip(shapes, given, strict=True)]
        first, second = len(whole) + len(lifted), len(whole) + len(lifted) + len(batch)

        def lift(tensor: Tensor) -> Value:
            pending.append(tensor)
            return Value(tuple(tensor.shape), tensor.dtype, "lifted")

        def run(*flat: Tensor) -> list[Tensor]:
            swap = Substitute(
                {id(old): new for old, new in zip(lifted, flat[len(whole) : first], strict=True)}
            )
            with swap if lifted else contextlib.nullcontext():
                outs = body(list(flat[: len(whole)]), list(flat[first:second]), list(flat[second:]))
            return [out.detach() if out.requires_grad else out for out in outs]

        phase = self.phase
        try:
            with recording(current_recorder()):
                graph = self.new_tracer(lift).capture(run, fakes, [f"in{i}" for i in range(len(fakes))])
        finally:
            self.phase = phase
        graph.drop_dead()
        return graph
