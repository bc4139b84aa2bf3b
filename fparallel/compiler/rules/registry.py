"""Op rules: for every op, how the dims of its operands and results are made of shared factors.

A rule for `mm` reads "m k, k n -> m n": a factor that is missing on the right is reduced, so sharding it
leaves an unreduced result; factors named in `replicate` must be whole; `linear` says through which operands
unreduced sums may pass. A rule is made per node, because the factors have the node's sizes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fparallel.compiler.graph import Node, Value
from fparallel.errors import RuleError
from fparallel.layout import Layout
from fparallel.mesh import Axis
from fparallel.schedule.segment import LocalShape

Dims = tuple[tuple[int, ...], ...]
LocalCall = tuple[str, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Placed:
    """A node with its chosen layouts, from which its local call is made.

    Attributes:
      ins, outs: the layout of every tensor operand (in the order of `node.inputs`) and result.
      axes: per factor of the rule, the axes that shard it (all parts of it together).
    """

    node: Node
    ins: tuple[Layout, ...]
    outs: tuple[Layout, ...]
    axes: tuple[tuple[Axis, ...], ...]

    def layout_of(self, value: Value) -> Layout:
        return self.ins[self.node.inputs.index(value)]


def same_call(placed: Placed) -> LocalCall:
    """The op itself on local tensors."""
    return placed.node.target, placed.node.args, placed.node.kwargs


def argument(node: Node, name: str, default: Any = None) -> Any:
    """An argument of a node by its name in the op's schema."""
    for i, spec in enumerate(node.op._schema.arguments):
        if spec.name == name:
            if i < len(node.args) and not spec.kwarg_only:
                return node.args[i]
            return node.kwargs.get(name, spec.default_value if spec.has_default_value() else default)
    return default


def local_or_empty(
    placed: Placed, args: tuple[Any, ...] | None = None, *, reduce: str = "sum", dense: bool = False
) -> LocalCall:
    """The op itself; where uneven shards leave a rank without any input, what does not change its `reduce`.

    `dense`: for kernels that read operands as if they were contiguous, which parts of larger tensors are not.
    """
    node = placed.node
    args = node.args if args is None else args
    uneven = [value for value, layout in zip(node.inputs, placed.ins, strict=True) if not layout.is_even]
    if any(0 in layout.shape for layout in placed.ins):
        uneven = []
    if not uneven and not dense:
        return node.target, args, node.kwargs
    shapes = [LocalShape(layout) for layout in placed.outs]
    dtypes = [out.dtype for out in node.outs]
    call = (node.target, list(args), sorted(node.kwargs.items()), uneven, shapes, dtypes, reduce)
    return "local.dense" if dense else "local.or_empty", call, {}


@dataclass
class Rule:
    """The factors of one node.

    Attributes:
      sizes: the size of each factor.
      ins, outs: per tensor operand (result) and dim, its factors, major first; a dim without any is whole.
      reduce: what unreduced value the result is when a factor that it lacks is sharded ("sum", "max", "min").
      locked: factors that must be whole.
      linear: sets of operands that may be unreduced sums together, giving an unreduced result.
      passes_any: whether also unreduced maxima and minima pass (views).
      expand: for a factor, an equivalent function of the node's arguments, used when the factor is sharded.
      local: makes the local call.
      view: whether the result may alias the first operand.
      flops: of the whole op.
      factory: whether the values of the operands do not matter (zeros_like), or there are none.
      elementwise: whether it computes every element from the operands' elements at its place.
    """

    sizes: list[int]
    ins: Sequence[Dims]
    outs: Sequence[Dims]
    reduce: dict[int, str] = field(default_factory=dict)
    locked: set[int] = field(default_factory=set)
    linear: Sequence[frozenset[int]] = ()
    passes_any: bool = False
    expand: dict[int, Callable] = field(default_factory=dict)
    local: Callable[[Placed], LocalCall] = same_call
    view: bool = False
    flops: int = 0
    factory: bool = False
    elementwise: bool = False


class Factors:
    """Makes factors while a rule is written."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def new(self, size: int) -> int:
        self.sizes.append(size)
        return len(self.sizes) - 1

    def dims(self, shape: Iterable[int]) -> Dims:
        """One new factor per dim."""
        return tuple((self.new(size),) for size in shape)


RuleMaker = Callable[[Node], "Rule | None"]
_RULES: dict[str, RuleMaker] = {}


def rule(*targets: str) -> Callable[[RuleMaker], RuleMaker]:
    """Registers the rule of ATen ops: `@rule("aten.mm.default")`."""

    def add(maker: RuleMaker) -> RuleMaker:
        for target in targets:
            _RULES[target] = maker
        return maker

    return add


def has_rule(target: str) -> bool:
    return target in _RULES


def find_rule(node: Node) -> Rule | None:
    """The rule of a node: registered, or pointwise by torch's own tag."""
    maker = _RULES.get(node.target)
    if maker is not None:
        return maker(node)
    tags = node.op.tags if isinstance(node.op, torch._ops.OpOverload) else ()
    if torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags:
        from fparallel.compiler.rules.pointwise import pointwise

        return pointwise(node)
    return None


_SIDE = re.compile(r"^[\w\s(),\[\]]*$")


def register_rule(
    op: Any, rule_text: str, *, replicate: str = "", linear: Sequence[int] = (), reduce: str = "sum"
) -> None:
    """Teaches the compiler how an op shards.

    Args:
      op: an operator such as `torch.ops.mylib.op.default`, or its name "mylib.op.default".
      rule_text: factors per dim, e.g. "b m k, k n -> b m n"; parentheses make a dim of several
        factors. Operands are the op's tensor arguments in order. A factor missing on the right is reduced.
      replicate: factors (separated by spaces) that must be whole.
      linear: tensor operands through which an unreduced sum may pass.
      reduce: the reduction over missing factors: "sum", "max" or "min".

    Raises:
      RuleError: the text is no rule, or names different ranks than the op gets.

    >>> register_rule("mylib.scale_rows.default", "m n, m -> m n")
    """
    target = op if isinstance(op, str) else str(op)
    left, arrow, right = rule_text.partition("->")
    if not arrow or not _SIDE.match(left + right):
        raise RuleError(f"{rule_text!r} is not a rule for {target}", fix='write it like "m k, k n -> m n"')
    ins, outs = ([_parse_operand(part) for part in side.split(",")] for side in (left, right))
    whole = replicate.split()
    names = {name for operand in ins + outs for dim in operand for name in dim}
    for name in whole:
        if name not in names:
            raise RuleError(
                f"replicate={name!r} is no factor of {rule_text!r}", fix="name factors of the rule"
            )

    given = {name for operand in ins for dim in operand for name in dim}
    for operand in (*ins, *outs):
        flat = [name for dim in operand for name in dim]
        twice = {name for name in flat if flat.count(name) > 1}
        if twice:
            raise RuleError(
                f"{rule_text!r} names {', '.join(sorted(twice))} twice in one tensor",
                fix="give each dim factors of its own",
            )
    unlocked = names - given - set(whole)
    if unlocked:
        raise RuleError(
            f"{rule_text!r}: {', '.join(sorted(unlocked))} is a factor of a result alone",
            fix=f"say that it is made whole: replicate={' '.join(sorted(unlocked))!r}",
        )

    def make(node: Node) -> Rule:
        ids: dict[str, int] = {}
        factors = Factors()
        values = [*zip(node.inputs, ins, strict=False), *zip(node.outs, outs, strict=False)]
        if len(node.inputs) != len(ins) or len(node.outs) != len(outs):
            raise RuleError(
                f"the rule {rule_text!r} is for {len(ins)} operands and {len(outs)} results; {target} has "
                f"{len(node.inputs)} and {len(node.outs)}",
                fix="mend the rule",
                where=node.source,
            )
        known: dict[str, int] = {}
        for value, operand in values:
            if len(value.shape) != len(operand):
                raise RuleError(
                    f"the rule {rule_text!r} does not fit {target}: {value}",
                    fix="mend the rule",
                    where=node.source,
                )
            for size, dim in zip(value.shape, operand, strict=True):
                if len(dim) == 1:
                    known[dim[0]] = size
        for value, operand in values:
            for size, dim in zip(value.shape, operand, strict=True):
                open_names = [name for name in dim if name not in known]
                rest = size
                for name in dim:
                    rest = rest // known.get(name, 1) if known.get(name, 1) else 0
                if len(open_names) > 1:
                    raise RuleError(
                        f"{target}: the sizes of {open_names} in {rule_text!r} are unknown",
                        fix="give them dims of their own",
                    )
                if open_names:
                    known[open_names[0]] = rest
        for name, size in known.items():
            ids[name] = factors.new(size)

        def dims(operand: list[tuple[str, ...]]) -> Dims:
            return tuple(tuple(ids[name] for name in dim) for dim in operand)

        result_names = {name for operand in outs for dim in operand for name in dim}
        return Rule(
            factors.sizes,
            [dims(o) for o in ins],
            [dims(o) for o in outs],
            reduce={ids[name]: reduce for name in known if name not in result_names},
            locked={ids[name] for name in whole},
            linear=[frozenset([i]) for i in linear],
            local=lambda placed: local_or_empty(placed, reduce=reduce),
        )

    _RULES[target] = make


def _parse_operand(text: str) -> list[tuple[str, ...]]:
    dims: list[tuple[str, ...]] = []
    group: list[str] | None = None
    for token in re.findall(r"[()]|\w+", text):
        if token == "(":
            group = []
        elif token == ")":
            dims.append(tuple(group or ()))
            group = None
        elif group is not None:
            group.append(token)
        else:
            dims.append((token,))
    return dims
