"""What the partitioners of one lowering share, and what they note down for `build` and `explain`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from fparallel.compiler.graph import Node, Program, Value
from fparallel.compiler.local import Item, Local
from fparallel.compiler.propagate import Choice
from fparallel.compiler.rules import Rule
from fparallel.layout import Layout
from fparallel.mesh import Axis, Mesh

if TYPE_CHECKING:
    from fparallel.compiler.memory import Halves, Split
    from fparallel.compiler.stages import Pipeline


@dataclass
class Decision:
    """One reshard that the compiler inserted, or how a pipeline's ranks come by a value, for `explain`."""

    value: str
    src: Layout
    dst: Layout
    dtype: torch.dtype
    nbytes: float
    cause: str
    source: str
    kinds: tuple[str, ...]


@dataclass
class Template:
    """A block partitioned once for given input layouts: its joint local program."""

    name: str
    index: int
    items: list[Item]
    inputs: list[Local]
    tangents: list[Local]
    outputs: list[Local]
    grads: list[Local]
    grad_inputs: tuple[int, ...]
    calls: int = 0
    parts: Split | None = None
    halves: Halves | None = None


@dataclass
class Roles:
    """What the program's inputs are, by Value: layouts for computing with a parameter, and for its gradient.

    Attributes:
      reduced_early: those whose gradients are reduced over ranks for each micro-batch, not once after all.
    """

    compute: dict[Value, Layout] = field(default_factory=dict)
    gradient: dict[Value, Layout] = field(default_factory=dict)
    gradient_by_path: Callable[[str, tuple[int, ...]], Layout | None] = lambda path, shape: None
    reduced_early: set[Value] = field(default_factory=set)


class Context:
    """What all partitioners of one lowering share."""

    def __init__(
        self,
        mesh: Mesh,
        atoms: Mapping[str, tuple[Axis, ...]],
        program: Program,
        constrain: Callable[[Any, tuple[int, ...]], Layout],
        pipeline: Pipeline | None = None,
    ) -> None:
        self.mesh = mesh
        self.pipeline = pipeline
        self.atoms = atoms
        self.program = program
        self.constrain = constrain
        self.templates: dict[Any, Template] = {}
        self.decisions: list[Decision] = []
        self.map_bodies: dict[str, Any] = {}
        self.map_choices: dict[Any, Choice] = {}
        self.constants: dict[Local, torch.Tensor] = {}

    def constant(self, value: Value, tensor: torch.Tensor) -> Local:
        """The Local of a closed-over tensor, one per tensor."""
        for local, known in self.constants.items():
            if known is tensor:
                return local
        local = Local(
            tensor.dtype, Layout.replicated(tensor.shape), f"const.{len(self.constants)}", static=True
        )
        self.constants[local] = tensor
        return local


class Lazy:
    """A value that depends on no data (a constant, a range, a keyed draw): made where and how it is needed."""

    def __init__(self, node: Node, rule: Rule) -> None:
        self.node = node
        self.rule = rule
