"""Writing one op as a graph of simpler ops: by a function of its rule, or by torch's own decomposition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fparallel._compat import decomposition
from fparallel.compiler.graph import Graph, Node, map_values
from fparallel.compiler.trace import StepRecorder
from fparallel.recorder import recording


class _NotApplicableError(Exception):
    """The decomposition does not cover these arguments."""


def expand_node(node: Node, fn: Callable | None, device: str = "cpu") -> Graph | None:
    """The graph of fn(*node.args, **node.kwargs), with `node.inputs` as inputs, traced on `device`.

    Without `fn` it is torch's decomposition: None if there is none, or none for these arguments.

    Raises:
      TraceError: the decomposition writes into an operand (batch norm's statistics), or reads a value.
    """
    if fn is not None:
        return _trace(node, fn, device)
    fn = decomposition(node.op)
    if fn is None:
        return None
    try:
        graph = _trace(node, fn, device)
    except (_NotApplicableError, NotImplementedError, RuntimeError):
        return None  # it needs what fake tensors lack: the op stays whole
    return None if any(inner.target == node.target for inner in graph.nodes) else graph


def _trace(node: Node, fn: Callable, device: str) -> Graph:
    recorder = StepRecorder(device)
    values = node.inputs
    fakes = [recorder.fake(v.shape, v.dtype) for v in values]
    recorder.phase, recorder.replay_source = node.phase, node.source or " "

    def run(*xs: Tensor) -> list[Tensor]:
        rest = iter(xs)
        args = map_values(lambda _: next(rest), node.args)
        kwargs: dict[str, Any] = map_values(lambda _: next(rest), node.kwargs)
        out = fn(*args, **kwargs)
        if out is NotImplemented:
            raise _NotApplicableError
        outs = list(out) if isinstance(out, (list, tuple)) else [out]
        return [o if isinstance(o, Tensor) else xs[0].new_zeros(()) for o in outs]

    with recording(recorder), recorder.fake_mode:
        graph = recorder.new_tracer().capture(run, fakes, [v.name for v in values])
    graph.drop_dead()
    return graph
