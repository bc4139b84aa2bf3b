"""What a block keeps from its forward for its backward.

The joint local program of a block is split into a forward F and a backward B. B reads residuals, which F gives out.
What depends on parameters and constants alone is made again in B, a view is taken again of what it views, and a
gathered activation is gathered again from its shard, so that what is kept is always the shard. Views that together
are a small part of their base are kept instead of the base. A norm, a sum or a product of what is kept anyway is made
again, too: that is one pass over memory. Where a pipeline's order asks for it, the backward is cut
once more in the same way, into the gradients that earlier blocks wait for and those of the block's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from fparallel.compiler.context import Template
from fparallel.compiler.local import Call, Comm, Item, Local, Op, drop_dead, map_locals

CHEAP = frozenset(
    {
        "aten.native_layer_norm.default",
        "aten._fused_rms_norm.default",
        "aten.add.Tensor",
        "aten.sub.Tensor",
        "aten.mul.Tensor",
    }
)
"""Ops that one pass over memory makes again."""


@dataclass
class Split:
    """A block's forward and backward.

    Attributes:
      forward, backward: their items.
      residuals: what F gives out for B beside its outputs.
    """

    forward: list[Item]
    backward: list[Item]
    residuals: list[Local]


@dataclass
class Halves:
    """A backward split into B, the gradients that other blocks wait for, and W, those of parameters.

    Attributes:
      first, second: the items of B and W.
      carried: what B gives out for W beside its gradients.
      grads: the gradients of the block.
      gives: per gradient whether B gives it; W gives the others.
    """

    first: list[Item]
    second: list[Item]
    carried: list[Local]
    grads: list[Local]
    gives: list[bool]

    def given(self, half: str) -> list[Local]:
        """The gradients that B (or W) gives."""
        return [grad for grad, first in zip(self.grads, self.gives, strict=True) if first == (half == "B")]


def whole_view(op: Item) -> bool:
    """Whether an op is a view of (most of) its operand, so that keeping the operand keeps the view."""
    if not isinstance(op, Op) or not op.view or len(op.outs) != 1 or not op.inputs:
        return False
    out = op.outs[0]
    return out is not None and 2 * out.layout.max_local_numel >= op.inputs[0].layout.max_local_numel


def split(template: Template) -> Split:
    """A block's forward and backward; see the module docstring for what is kept."""
    if template.parts is None:
        template.parts = _split(template)
    return template.parts


def _split(template: Template) -> Split:
    forward, backward, residuals, template.grads = divide(template.items, template.outputs, template.grads)
    return Split(forward, backward, residuals)


def halve(template: Template) -> Halves:
    """The backward of a block in two; what B makes on the way to other gradients it gives, too."""
    if template.halves is None:
        backward = split(template).backward
        grads = template.grads
        pinned = [template.inputs[i].pinned for i in template.grad_inputs]
        needed = drop_dead(backward, [g for g, of_param in zip(grads, pinned, strict=True) if not of_param])
        made = {out for item in needed for out in item.outs}
        gives = [not of_param or g in made for g, of_param in zip(grads, pinned, strict=True)]
        first = [g for g, now in zip(grads, gives, strict=True) if now]
        second = [g for g, now in zip(grads, gives, strict=True) if not now]
        one, two, carried, second = divide(backward, first, second)
        left = iter(second)
        grads = [g if now else next(left) for g, now in zip(grads, gives, strict=True)]
        template.halves = Halves(one, two, carried, grads, gives)
    return template.halves


def divide(
    items: Sequence[Item], outputs: Sequence[Local], results: Sequence[Local]
) -> tuple[list[Item], list[Item], list[Local], list[Local]]:
    """Cuts items into those on which `outputs` depend, and then those for `results`.

    Returns:
      (first items, second items, what the second read of the first beside `outputs`, the results as the second make
      them).
    """
    forward = drop_dead(items, outputs)
    in_forward = {id(item) for item in forward}
    maker = {out: item for item in items for out in item.outs if out is not None}
    given = set(outputs)
    residuals: list[Local] = []
    again: dict[Local, Local] = {}
    backward: list[Item] = []
    read = [v for x in items if id(x) not in in_forward for v in x.inputs] + [*results]
    again_in_second = _made_again(forward, read)

    def fetch(value: Local) -> Local:
        """The value as the second part sees it: a residual, an input, or made again."""
        if value in again:
            return again[value]
        item = maker.get(value)
        if item is None or id(item) not in in_forward:
            again[value] = value
            return value
        remade = isinstance(item, Op) and (
            id(item) in again_in_second or all(x.static for x in item.outs if x is not None)
        )
        if value in given and not remade:
            again[value] = value
            return value
        regathered = isinstance(item, Comm) and item.kind == "all_gather"
        if not remade and not regathered:
            residuals.append(value)
            again[value] = value
            return value
        assert not isinstance(item, Call)
        copy = _copy(item, fetch)
        backward.append(copy)
        for old, new in zip(item.outs, copy.outs, strict=True):
            if old is not None and new is not None:
                again[old] = new
        return again[value]

    for item in items:
        if id(item) in in_forward:
            continue
        backward.append(_with_inputs(item, fetch))
    made = [fetch(result) for result in results]
    backward = drop_dead(backward, made)
    used = {value for item in backward for value in item.inputs} | set(made)
    return forward, backward, [value for value in residuals if value in used], made


def _made_again(items: Sequence[Item], read: Iterable[Local]) -> set[int]:
    """The ids of the ops to run again where the values `read` are read.

    Views that need (most of) their base: q, k, v = unbind(x) keeps x if all of q, k and v are read, and q alone if only
    that is. `CHEAP` ops whose operands are there anyway.
    """
    wanted = set(read)
    found: set[int] = set()
    for item in reversed(items):
        outs = [out for out in item.outs if out in wanted]
        if isinstance(item, Op) and item.view and item.inputs:
            if outs and 2 * sum(out.nbytes for out in outs if out is not None) >= item.inputs[0].nbytes:
                found.add(id(item))
                wanted.update(item.inputs)
        elif isinstance(item, Op) and item.target in CHEAP:
            if item.outs[0] in wanted and all(v in wanted or v.static for v in item.inputs):
                found.add(id(item))
        elif outs and isinstance(item, Comm) and item.kind == "all_gather":
            wanted.update(item.inputs)
    return found


def _copy(item: Op | Comm, fetch: Callable[[Local], Local]) -> Op | Comm:
    def fresh(out: Local | None) -> Local | None:
        return (
            None
            if out is None
            else Local(out.dtype, out.layout, out.name, pinned=out.pinned, static=out.static)
        )

    if isinstance(item, Comm):
        dst = fresh(item.dst)
        assert dst is not None
        return Comm(
            item.kind, item.axes, fetch(item.src), dst, item.reduce, item.cause + ", again", item.source, "B"
        )
    return Op(
        item.target,
        map_locals(fetch, item.args),
        map_locals(fetch, item.kwargs),
        [fresh(out) for out in item.outs],
        item.source,
        "B",
        item.view,
        item.flops,
    )


def _with_inputs(item: Item, fetch: Callable[[Local], Local]) -> Item:
    if isinstance(item, Comm):
        return replace(item, src=fetch(item.src))
    if isinstance(item, Op):
        return replace(item, args=map_locals(fetch, item.args), kwargs=map_locals(fetch, item.kwargs))
    return replace(item, ins=[fetch(value) for value in item.ins])
