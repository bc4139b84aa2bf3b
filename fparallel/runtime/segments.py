"""Segments as Python functions: one function per distinct body, made before the first step.

A segment is turned into source text, one line per op, with its symbols resolved for one rank:

    def run(v0, v1):
        v2 = aten_mm_default(v0, v1); del v0, v1
        v3 = aten_relu_default(v2); del v2
        return v3,

Locals are deleted after their last use, so that memory is freed as early as the data flow allows. Equal text
with equal constants is one function, whichever segment, rank or layer asks for it.
"""

from __future__ import annotations

import linecache
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from fparallel._compat import returns_list
from fparallel.errors import ExecutionError
from fparallel.schedule import local_ops
from fparallel.schedule.segment import SUMS, LocalOp, Ref, Segment, refs_of

Coords = Mapping[str, int]
Bound = Callable[..., tuple[torch.Tensor, ...]]

_FUNCTIONS: dict[Any, Bound] = {}
_FILE = "<segment "


def bind(
    segment: Segment,
    segments: Mapping[str, Segment],
    coords: Coords,
    inplace: Sequence[tuple[int, int]] = (),
    *,
    compile: str = "eager",
) -> Bound:
    """The function that runs a segment on the rank at `coords`.

    Args:
      segment: what to run.
      segments: the schedule's segments, for the `map.NAME` ops.
      coords: the rank's coordinates, which resolve the symbols among the arguments.
      inplace: (position in outputs, position in inputs): the output is written into that input's storage, and
        the function returns that input.
      compile: "eager", or "inductor" to compile the function with torch.compile at its first call.

    Returns:
      A function from the local inputs to a tuple of the local outputs. Equal bodies share one function.

    Raises:
      ExecutionError: an op of the segment does not exist here.
    """
    compile = compile if compiles(segment) else "eager"
    code = _Code(segment, segments, coords, tuple(inplace))
    key = (code.text, tuple(code.constants.values()), compile, code.shapes() if compile == "inductor" else ())
    bound = _FUNCTIONS.get(key)
    if bound is None:
        bound = code.function()
        if compile == "inductor":
            bound = torch.compile(bound, fullgraph=True, dynamic=False)
        elif compile != "eager":
            raise ExecutionError(
                f"there is no way to compile called {compile!r}", fix='use "eager" or "inductor"'
            )
        _FUNCTIONS[key] = bound
    return bound


def compiles(segment: Segment) -> bool:
    """Whether a segment is one for torch.compile.

    What goes leaf by leaf over parameters or gradients is one pass over memory already, and would be compiled for every
    leaf: compile time would grow with depth.
    """
    return not any(op.target.startswith("map.") or op.target == "local.sum_squares" for op in segment.ops)


def resolve_target(name: str) -> Callable[..., Any]:
    """The operator `aten.mm.default`, or the local function `local.narrow`.

    Raises:
      ExecutionError: there is no such operator.
    """
    namespace, _, rest = name.partition(".")
    if namespace == "fparallel":
        import fparallel.random  # noqa: F401  (registers the namespace)
    found: Any = local_ops if namespace == "local" else getattr(torch.ops, namespace)
    try:
        for part in rest.split("."):
            found = getattr(found, part)
    except AttributeError:
        raise ExecutionError(
            f"the schedule calls {name}, which does not exist in torch {torch.__version__}",
            fix="lower the step with the versions of torch and fparallel that run it",
        ) from None
    return found


def failing_op(segment: Segment, traceback: TracebackType | None) -> LocalOp | None:
    """The op of `segment` that raised, found from the line of the generated function in a traceback."""
    found = None
    while traceback is not None:
        line = traceback.tb_lineno - 2
        if traceback.tb_frame.f_code.co_filename.startswith(_FILE) and 0 <= line < len(segment.ops):
            found = found or segment.ops[line]
        traceback = traceback.tb_next
    return found


def resolve(arg: Any, coords: Coords) -> Any:
    """`arg` with every symbol in it replaced by its value on the rank at `coords`."""
    if isinstance(arg, Ref):
        return arg
    if hasattr(arg, "resolve"):
        return arg.resolve(coords)
    if isinstance(arg, (tuple, list)):
        return type(arg)(resolve(a, coords) for a in arg)
    if isinstance(arg, dict):
        return {key: resolve(a, coords) for key, a in arg.items()}
    return arg


def last_uses(segment: Segment) -> dict[int, int]:
    """The position of the op that reads each value last (unread: that makes it); results are left out."""
    last = {out: at for at, op in enumerate(segment.ops) for out in op.outs if out is not None}
    for at, op in enumerate(segment.ops):
        for ref in refs_of([list(op.args), [v for _, v in op.kwargs]]):
            last[ref.index] = at
    for result in segment.results:
        last.pop(result, None)
    return last


@dataclass(frozen=True)
class Text:
    """An argument that is written as it stands."""

    text: str


@dataclass
class Names:
    """Global names of a generated function, one per distinct value."""

    values: dict[str, Any]

    def constant(self, value: Any) -> str:
        """The text of a constant; objects that have none become globals."""
        if (
            value is None
            or isinstance(value, (bool, int, str))
            or (isinstance(value, float) and math.isfinite(value))
        ):
            return repr(value)
        if isinstance(value, torch.dtype):
            return str(value)
        if isinstance(value, Text):
            return value.text
        if isinstance(value, Ref):
            return f"v{value.index}"
        if isinstance(value, (list, tuple)):
            inner = ", ".join(map(self.constant, value))
            return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if value else ''})"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k!r}: {self.constant(v)}" for k, v in value.items()) + "}"
        assert not isinstance(value, torch.Tensor), "tensors are inputs of a segment, not constants in it"
        return self.named("k", value)

    def named(self, prefix: str, value: Any) -> str:
        for name, known in self.values.items():
            if known is value or (
                type(known) is type(value) and name.startswith(f"{prefix}_") and known == value
            ):
                return name
        name = f"{prefix}_{len(self.values)}"
        self.values[name] = value
        return name

    def call(self, target: str, function: Any, args: Iterable[Any], kwargs: Iterable[tuple[str, Any]]) -> str:
        texts = [self.constant(a) for a in args] + [f"{k}={self.constant(v)}" for k, v in kwargs]
        name = target.replace(".", "_")
        self.values.setdefault(name, function)
        return f"{name}({', '.join(texts)})"


def compile_text(text: str, file: str, values: dict[str, Any]) -> Callable[..., Any]:
    """The function `run` that the text defines; its lines show in tracebacks."""
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    space = {"torch": torch, **values}
    exec(compile(text, file, "exec"), space)
    return space["run"]


class _Code:
    """The text of a segment's function, and the constants that it names."""

    def __init__(
        self,
        segment: Segment,
        segments: Mapping[str, Segment],
        coords: Coords,
        inplace: tuple[tuple[int, int], ...],
    ) -> None:
        self.segment, self.segments, self.coords, self.inplace = segment, segments, coords, inplace
        self.names = Names({})
        self.done: set[tuple[int, int]] = set()  # the pairs of `inplace` that an op writes itself
        self.sums: set[tuple[int, int]] = set()  # those of them that are sums: the op gives the input itself
        self.readers: dict[int, list[int]] = {}  # of every value, the ops that read it
        for at, op in enumerate(segment.ops):
            for ref in refs_of(list(op.args)):
                self.readers.setdefault(ref.index, []).append(at)
        self.pairs: dict[int, list[tuple[int, int]]] = {}  # of every value that is a result in place
        last = last_uses(segment)
        for out, into in self.inplace:
            last.pop(into, None)
            self.pairs.setdefault(segment.results[out], []).append((out, into))
        lines = []
        for at, op in enumerate(segment.ops):
            line = self.line(op, at)
            dead = [f"v{value}" for value, use in sorted(last.items()) if use == at]
            dead += ["_"] if None in op.outs else []
            lines.append("    " + line + (f"; del {', '.join(dead)}" if dead else ""))
        inputs = ", ".join(f"v{i}" for i in range(len(segment.inputs)))
        results = [f"v{r}" for r in segment.results]
        for out, into in self.inplace:
            if (out, into) not in self.done:
                results[out] = f"v{into}.copy_(v{segment.results[out]})"
            elif (out, into) not in self.sums:
                results[out] = f"v{into}"
        lines.append(f"    return {''.join(r + ', ' for r in results) or '()'}")
        self.text = f"def run({inputs}):\n" + "\n".join(lines) + "\n"
        self.constants = self.names.values

    def line(self, op: LocalOp, at: int) -> str:
        args = [resolve(a, self.coords) for a in op.args]
        kwargs = [(k, resolve(v, self.coords)) for k, v in op.kwargs]
        if op.target.startswith("map."):
            function: Any = self.map_function(op, at)
            call = f"{self.names.named('map', function)}({', '.join(map(self.names.constant, args))})"
            several = True
        else:
            function = resolve_target(op.target)
            call = self.names.call(op.target, function, args, kwargs)
            several = len(op.outs) != 1 or returns_list(function)
        if not op.outs:
            return call
        if op.target in SUMS and op.outs[0] is not None:
            for pair in self.pairs.get(op.outs[0], ()):
                into = op.args[0].index
                if pair[1] == into and self.readers[into] == [at]:
                    self.done.add(pair)
                    self.sums.add(pair)
                    target = f"{op.target}_"
                    return f"v{op.outs[0]} = {self.names.call(target, resolve_target(target), args, kwargs)}"
        outs = ["_" if o is None else f"v{o}" for o in op.outs]
        return f"{', '.join(outs)}{',' if several and len(outs) == 1 else ''} = {call}"

    def map_function(self, op: LocalOp, at: int) -> Bound:
        from fparallel.runtime.blocked import blocked

        body = self.segments[op.target.removeprefix("map.")]
        args, pairs = [a.index for a in op.args], []
        for position, made in enumerate(op.outs):
            for out, into in self.pairs.get(-1 if made is None else made, ()):
                if into in args and self.only_in_maps(into, at):
                    pairs.append((position, args.index(into)))
                    self.done.add((out, into))
        return blocked(body, self.segments, self.coords, tuple(pairs))

    def only_in_maps(self, value: int, at: int) -> bool:
        """Whether the op at `at` is the last to read `value`, and only maps, which make no views, ever do."""
        uses = self.readers.get(value, [])
        return uses[-1:] == [at] and all(self.segment.ops[use].target.startswith("map.") for use in uses)

    def shapes(self) -> tuple[Any, ...]:
        return tuple((dtype, layout.local_shape(self.coords)) for dtype, layout in self.segment.inputs)

    def function(self) -> Bound:
        return compile_text(
            self.text, f"{_FILE}{self.segment.name} {self.segment.fingerprint}>", self.constants
        )
