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
from fparallel.recorder import Loop, current_recorder, recording

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

    def accumulate(self, loop: Loop) -> list[Tensor]:
        """Records a loop, and gives its results."""
        lifted: list[Tensor] = []
        for _ in range(2):
            pending: list[Tensor] = []
            graph = self._trace_loop(loop, lifted, pending)
            if not pending:
                break
            lifted += [x for i, x in enumerate(pending) if all(x is not y for y in pending[:i])]
        else:
            raise TraceError(
                f"{loop.name} uses a tensor from outside that cannot be lifted to an argument",
                fix="pass the tensor to the accumulated function as an argument",
            )
        whole, kinds = [*loop.whole, *lifted], list(loop.kinds())
        traced = LoopGraph(
            loop.name, graph, loop.num, loop.group, len(whole), len(loop.batch), kinds, list(loop.means())
        )
        self.loops.append(traced)
        like = [
            Value((out.shape[0] * loop.num, *out.shape[1:]) if kind == "rows" else out.shape, out.dtype)
            for out, kind in zip(graph.outputs, kinds, strict=True)
        ]
        args = (whole, loop.batch, loop.keys, len(self.loops) - 1)
        return self.emit(torch.ops.fparallel.accumulate.default, args, like)

    def _trace_loop(self, loop: Loop, lifted: list[Tensor], pending: list[Tensor]) -> Any:
        whole = [*loop.whole, *lifted]
        shapes = [tuple(x.shape) for x in whole]
        shapes += [(x.shape[0] // loop.num, *x.shape[1:]) for x in loop.batch] + [(2,)] * len(loop.keys)
        given = [*whole, *loop.batch, *loop.keys]
        fakes = [self.fake(shape, x.dtype) for shape, x in zip(shapes, given, strict=True)]
        own, first, second = len(loop.whole), len(whole), len(whole) + len(loop.batch)

        def lift(tensor: Tensor) -> Value:
            pending.append(tensor)
            return Value(tuple(tensor.shape), tensor.dtype, "lifted")

        def run(*flat: Tensor) -> list[Tensor]:
            swap = Substitute({id(old): new for old, new in zip(lifted, flat[own:first], strict=True)})
            with swap if lifted else contextlib.nullcontext():
                outs = loop.body(list(flat[:own]), list(flat[first:second]), list(flat[second:]))
            return [out.detach() if out.requires_grad else out for out in outs]

        phase = self.phase
        try:
            with recording(current_recorder()):
                graph = self.new_tracer(lift).capture(run, fakes, [f"in{i}" for i in range(len(fakes))])
        finally:
            self.phase = phase
        graph.drop_dead()
        return graph
