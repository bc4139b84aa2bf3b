"""The local program: what one rank does, as ops and collectives over local values, before it becomes a schedule."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch

from fparallel._compat import cached_property
from fparallel.layout import Layout, typed
from fparallel.mesh import Axis

BOUNDARY = "local.boundary"  # the identity; what depends on it is of the next stage

_ids = itertools.count()


class At(NamedTuple):
    """The place of an item in a pipeline: a task of a loop. `stage` None: every stage that needs it makes it."""

    loop: int
    stage: int | None = None
    kind: str = "F"
    micro: int = 0


class Local:
    """A value of the local program: a tensor of which every rank has its part.

    Attributes:
      pinned: a parameter in its compute layout (or a view or cast of one): it is not moved when activations can be.
      static: depends on parameters and constants alone, so a backward pass makes it again instead of keeping it.
    """

    __slots__ = ("dtype", "id", "layout", "name", "pinned", "static")

    def __init__(
        self,
        dtype: torch.dtype,
        layout: Layout,
        name: str = "",
        *,
        pinned: bool = False,
        static: bool = False,
    ) -> None:
        self.id = next(_ids)
        self.dtype = dtype
        self.layout = layout
        self.name = name
        self.pinned = pinned
        self.static = static

    @property
    def nbytes(self) -> int:
        """Bytes on the fullest rank."""
        return self.layout.max_local_numel * self.dtype.itemsize

    def __repr__(self) -> str:
        return f"{self.name or f'%{self.id}'}: {typed(self.dtype, self.layout)}"


@dataclass(eq=False)
class Op:
    """A local op; `args` hold Locals, symbols and constants.

    Attributes:
      view: it may share the first operand's memory.
      at_once: it should run before the next block, because that frees memory.
      micro: the micro-batch that it is of.
      task: in a loop of a pipeline.
    """

    target: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: list[Local | None]
    source: str = ""
    phase: str = "F"
    view: bool = False
    flops: int = 0
    at_once: bool = False
    micro: int | None = None
    task: At | None = None

    @cached_property
    def inputs(self) -> list[Local]:
        return locals_of(self.kwargs, locals_of(self.args, []))


@dataclass(eq=False)
class Comm:
    """A collective on one tensor; `early`: it was issued long before its output is read (see `early.py`).

    `sources`: see `schedule/ir.py`.
    """

    kind: str
    axes: tuple[Axis, ...]
    src: Local
    dst: Local
    reduce: str = ""
    cause: str = ""
    source: str = ""
    phase: str = "F"
    early: bool = False
    task: At | None = None
    sources: tuple[int, ...] = ()

    @property
    def inputs(self) -> list[Local]:
        return [self.src]

    @property
    def outs(self) -> list[Local]:
        return [self.dst]


@dataclass(eq=False)
class Packed:
    """Collectives alike, on a tensor each, that are one."""

    comms: list[Comm]
    phase: str = "U"
    task: At | None = None

    @property
    def inputs(self) -> list[Local]:
        return [comm.src for comm in self.comms]

    @property
    def outs(self) -> list[Local]:
        return [comm.dst for comm in self.comms]


@dataclass(eq=False)
class Call:
    """A call of a block's forward or backward. `saved` is shared by the two and carries the residuals.

    `unread` holds the positions in `ins` that this direction does not read. `half`: "B" for the gradients that earlier
    blocks wait for, "W" for those of parameters, "" for all.
    """

    block: Any
    backward: bool
    ins: list[Local]
    outs: list[Local]
    saved: Saved
    source: str = ""
    phase: str = "F"
    unread: frozenset[int] = frozenset()
    half: str = ""
    task: At | None = None

    @property
    def inputs(self) -> list[Local]:
        return [value for i, value in enumerate(self.ins) if i not in self.unread]


@dataclass(eq=False)
class Saved:
    """One instance of a block: its number among the calls of the block.

    In a loop every micro-batch has an instance of its own, `like` the one of the body.
    """

    index: int
    micro: int | None = None
    like: int | None = None
    names: dict[str, str] = field(default_factory=dict)


@dataclass(eq=False)
class Transfer:
    """Values sent to, or received from, the rank `peer` along the pipeline axis."""

    kind: str
    axis: Axis
    peer: int
    values: list[Local]
    cause: str = ""
    phase: str = "F"
    task: At | None = None

    @property
    def inputs(self) -> list[Local]:
        return self.values if self.kind == "send" else []

    @property
    def outs(self) -> list[Local]:
        return self.values if self.kind == "recv" else []


Item = Op | Comm | Call
Step = Item | Transfer | Packed


@dataclass
class Role:
    """What the ranks of one role run: all ranks, or those at one coordinate of a pipeline.

    Attributes:
      at: the coordinate, as in `Program.role`.
      arguments, results: which of the step's flattened arguments and outputs they hold.
    """

    at: tuple[tuple[str, int], ...]
    items: list[Step]
    arguments: list[bool]
    results: list[bool]


@dataclass
class Roles:
    """All roles, and the Locals of the outputs."""

    roles: list[Role]
    results: list[Local]


def locals_of(arg: Any, into: list[Local]) -> list[Local]:
    """Appends all Locals in a nest of lists, tuples and dicts."""
    if isinstance(arg, Local):
        into.append(arg)
    elif isinstance(arg, (list, tuple)):
        for item in arg:
            locals_of(item, into)
    elif isinstance(arg, dict):
        for item in arg.values():
            locals_of(item, into)
    return into


def map_locals(f: Any, arg: Any) -> Any:
    if isinstance(arg, Local):
        return f(arg)
    if isinstance(arg, (list, tuple)):
        return type(arg)(map_locals(f, item) for item in arg)
    if isinstance(arg, dict):
        return {key: map_locals(f, item) for key, item in arg.items()}
    return arg


AnyItem = TypeVar("AnyItem", bound=Item)


def drop_dead(items: Iterable[AnyItem], results: Iterable[Local]) -> list[AnyItem]:
    """The items on which the results depend, in order."""
    live: set[Local | None] = set(results)
    kept = []
    for item in reversed(list(items)):
        if not live.isdisjoint(item.outs):
            live.update(item.inputs)
            kept.append(item)
    return kept[::-1]
