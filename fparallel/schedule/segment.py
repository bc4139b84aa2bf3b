"""Segments: straight-line local compute between collectives, as plain data.

A segment is SSA: values 0..num_inputs-1 are its inputs, every op defines the next ones. What depends on the rank (the
local size of a dim, the offset of a shard) stands in the arguments as a symbol with `resolve(coords)`, so one segment
serves every rank of a mesh.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fparallel._compat import cached_property
from fparallel.factors import align
from fparallel.layout import Layout, typed
from fparallel.mesh import Axis

Coords = Mapping[str, int]


@dataclass(frozen=True)
class Ref:
    """A value of the segment."""

    index: int

    def __str__(self) -> str:
        return f"%{self.index}"


@dataclass(frozen=True)
class LocalShape:
    """The local shape of a layout, as a list of ints."""

    layout: Layout

    def resolve(self, coords: Coords) -> list[int]:
        return list(self.layout.local_shape(coords))

    def __str__(self) -> str:
        return f"shape{self.layout}"


@dataclass(frozen=True)
class LocalSize:
    """The local size of one dim of a layout."""

    layout: Layout
    dim: int

    def resolve(self, coords: Coords) -> int:
        return self.layout.local_shape(coords)[self.dim]

    def __str__(self) -> str:
        return f"size{self.layout}.{self.dim}"


@dataclass(frozen=True)
class Runs:
    """Which global indices a layout gives the rank: per dim the (start, count, stride) of each factor."""

    layout: Layout

    def resolve(self, coords: Coords) -> list[list[tuple[int, int, int]]]:
        return [list(runs) for runs in self.layout.runs(coords)]

    def __str__(self) -> str:
        return f"runs{self.layout}"


@dataclass(frozen=True)
class IsFirst:
    """Whether the rank is the first along every one of the axes."""

    axes: tuple[Axis, ...]

    def resolve(self, coords: Coords) -> bool:
        return not any(axis.digit(coords) for axis in self.axes)

    def __str__(self) -> str:
        return "first(" + ",".join(map(str, self.axes)) + ")"


@dataclass(frozen=True)
class IsMember:
    """Whether the rank's position along the axes, the last one fastest, is one of `positions`."""

    axes: tuple[Axis, ...]
    positions: tuple[int, ...]

    def resolve(self, coords: Coords) -> bool:
        at = 0
        for axis in self.axes:
            at = at * axis.size + axis.digit(coords)
        return at in self.positions

    def __str__(self) -> str:
        return f"member({','.join(map(str, self.axes))}: {','.join(map(str, self.positions))})"


@dataclass(frozen=True)
class Narrowing:
    """How to slice a local tensor of layout `src` to `dst` (some more axes on some factors).

    Resolves to (local factor sizes, [(position, start, length), ...], local shape of dst).
    """

    src: Layout
    dst: Layout

    def resolve(self, coords: Coords) -> tuple[list[int], list[tuple[int, int, int]], list[int]]:
        sizes: list[int] = []
        cuts: list[tuple[int, int, int]] = []
        for before, after in zip(self.src.dims, self.dst.dims, strict=True):
            pair = align(before, after)
            if pair is None:
                raise AssertionError(f"{self.src} does not narrow to {self.dst}")
            for x, y in zip(*pair, strict=True):
                (s0, n0), (s1, n1) = x.piece(coords), y.piece(coords)
                if (s0, n0) != (s1, n1):
                    cuts.append((len(sizes), s1 - s0, n1))
                sizes.append(n0)
        return sizes, cuts, list(self.dst.local_shape(coords))

    def __str__(self) -> str:
        return f"narrow{self.src}->{self.dst}"


Symbol = LocalShape | LocalSize | Runs | IsFirst | IsMember | Narrowing


def map_refs(f: Any, arg: Any) -> Any:
    """`arg` with every Ref replaced by f(ref); tuples and lists are walked."""
    if isinstance(arg, Ref):
        return f(arg)
    if isinstance(arg, (tuple, list)):
        return type(arg)(map_refs(f, a) for a in arg)
    return arg


def refs_of(arg: Any) -> Iterator[Ref]:
    if isinstance(arg, Ref):
        yield arg
    elif isinstance(arg, (tuple, list)):
        for a in arg:
            yield from refs_of(a)
    elif isinstance(arg, dict):
        for a in arg.values():
            yield from refs_of(a)


ADD, ADD_PRODUCT, ADD_ROWS = "local.accumulate", "local.accumulate_product", "local.accumulate_rows"
SUMS = (ADD, ADD_PRODUCT, ADD_ROWS)
"""Ops that add to their first operand, a sum over micro-batches; with a _ behind the name they do so in place."""


@dataclass(frozen=True)
class Work:
    """What an op does on the fullest rank.

    Attributes:
      flops: floating point operations.
      nbytes: bytes that it reads and writes.
      dtype: of what it computes.
    """

    flops: int
    nbytes: int
    dtype: torch.dtype


@dataclass(frozen=True)
class LocalOp:
    """One local op.

    Attributes:
      target: "aten.mm.default", the name of an operator; "local.slice", a function of `schedule/local_ops.py`; or
        "map.NAME", the elementwise segment NAME over leaves of one local shape.
      args, kwargs: constants, symbols, and `Ref`s, possibly in lists.
      outs: the index of each result; None where the result is unused (several results) .
      source: "file.py:12", the user's line that this comes from.
      work: what it costs; None for a view and where it is not known.
    """

    target: str
    args: tuple[Any, ...]
    outs: tuple[int | None, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    source: str = ""
    work: Work | None = field(default=None, compare=False)

    def __str__(self) -> str:
        outs = ", ".join("_" if o is None else f"%{o}" for o in self.outs)
        args = [_arg_text(a) for a in self.args] + [f"{k}={_arg_text(v)}" for k, v in self.kwargs]
        return f"{outs} = {self.target}({', '.join(args)})" + (f"  # {self.source}" if self.source else "")


def _arg_text(arg: Any) -> str:
    if isinstance(arg, (list, tuple)):
        return "[" + ", ".join(map(_arg_text, arg)) + "]"
    return str(arg)


@dataclass(frozen=True)
class Operand:
    """The position of an input of a segment."""

    index: int


@dataclass(frozen=True)
class AdamW:
    """An elementwise segment that is one AdamW update, which a fused kernel may run in its place.

        g = u * clip;  mu' = b1 mu + (1-b1) g;  nu' = b2 nu + (1-b2) g^2
        p' = p + step_size * ((mu'/correct1) / (sqrt(nu'/correct2) + eps) + weight_decay p)

    Attributes:
      ins: positions of u, mu, nu and p among the inputs.
      outs: positions of mu, nu and p among the outputs.
      others: a number, or the 0-d input that holds it; step_size is minus the learning rate.
    """

    ins: tuple[int, ...]
    outs: tuple[int, ...]
    b1: float
    b2: float
    eps: float
    correct1: Operand
    correct2: Operand
    step_size: float | Operand
    clip: float | Operand = 1.0
    weight_decay: float = 0.0


@dataclass(frozen=True)
class Segment:
    """Straight-line local compute.

    Attributes:
      name: unique in its schedule.
      inputs, outputs: per value its dtype and layout. No output aliases an input or another output.
      ops: what runs; not part of equality (the fingerprint is).
      results: the value of each output.
      flops: floating point operations on the fullest rank.
      kernel: a fused kernel that computes the same up to rounding; the ops stay the meaning.
    """

    name: str
    inputs: tuple[tuple[torch.dtype, Layout], ...]
    outputs: tuple[tuple[torch.dtype, Layout], ...]
    ops: tuple[LocalOp, ...] = field(compare=False, repr=False)
    results: tuple[int, ...] = field(compare=False, repr=False)
    flops: int = 0
    fingerprint: str = ""
    kernel: AdamW | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not self.fingerprint:
            text = "\n".join(str(op).split("  # ")[0] for op in self.ops) + str(self.results)
            digest = hashlib.sha256(text.encode()).hexdigest()[:12]
            object.__setattr__(self, "fingerprint", digest)

    @cached_property
    def signature(self) -> str:
        ins = ", ".join(typed(*value) for value in self.inputs)
        outs = ", ".join(typed(*value) for value in self.outputs)
        return f"({ins}) -> ({outs})"

    def __str__(self) -> str:
        body = "\n".join(f"  {op}" for op in self.ops)
        return f"segment {self.name} {self.signature}\n{body}\n  return {', '.join(f'%{r}' for r in self.results)}"
