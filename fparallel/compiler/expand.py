"""Writing one op as a graph of simpler ops: by a function that its rule gives, or by torch's own decomposition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fparallel._compat import decomposition
from fparallel.compiler.graph import Graph, Node, map_values
from fparallel.compiler.trace import StepRecorder
from fparallel.transforms import recording


def expand_node(node: Node, fn: Callable | None) -> Graph | None:
    """The graph of fn(*node.args, **node.kwargs) with `node.inputs` as inputs; None if fn is None and torch has none."""
    if fn is None:
        fn = decomposition(node.op)
        if fn is None:
            return None
    device = str(node.kwargs.get("device") or "cpu")
    recorder = StepRecorder(device)
    values = node.inputs
    fakes = [recorder.fake(v.shape, v.dtype) for v in values]
    recorder.phase, recorder.replay_source = node.phase, node.source or " "

    def run(*xs: Tensor) -> list[Tensor]:
        rest = iter(xs)
        args = map_values(lambda _: next(rest), node.args)
        kwargs: dict[str, Any] = map_values(lambda _: next(rest), node.kwargs)
        out = fn(*args, **kwargs)
        outs = list(out) if isinstance(out, (list, tuple)) else [out]
        return [o if isinstance(o, Tensor) else xs[0].new_zeros(()) for o in outs]

    with recording(recorder), recorder.fake_mode:
        graph = recorder.new_tracer().capture(run, fakes, [v.name for v in values])
    graph.drop_dead()
    if any(inner.target == node.target for inner in graph.nodes) and fn is None:
        return None
    return graph
