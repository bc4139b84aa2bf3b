"""Collectives of small values that depend on arguments alone go first, so that nobody has to wait for them.

The weight of an `fp.Mean` is the usual one: a sum over the batch's mask that every rank needs between forward and
backward. Computed where the program computes it, it would make all ranks meet there in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fparallel.compiler.local import Comm, Item, Local, Op

MOST_ELEMENTS = 1 << 20  # of all that is computed on the way to such a value
MOST_SENT = 1 << 10  # elements of the value itself


def early_collectives(items: Sequence[Item], arguments: Sequence[Local]) -> list[Item]:
    """The items with such collectives, and the ops that they need, in front.

    ::

        y = F(x)                       n = sum(mask)
        n = sum(mask)                  n' = all_reduce(n)
        n' = all_reduce(n)             y = F(x)
        z = y / n'                     z = y / n'
    """
    maker: dict[Local, Item] = {out: item for item in items for out in item.outs if out is not None}
    given = {local for local in arguments if not local.pinned}
    ops: dict[int, Op] = {}
    comms: list[Comm] = []
    for item in items:
        if isinstance(item, Comm) and item.dst.layout.max_local_numel <= MOST_SENT:
            cone = _cone(item.src, maker, given)
            if cone is not None:
                ops |= cone
                comms.append(item)
    if not comms:
        return list(items)
    moved = set(ops) | {id(comm) for comm in comms}
    first = [item for item in items if id(item) in ops]
    rest = [item for item in items if id(item) not in moved]
    return [*first, *(replace(comm, early=True) for comm in comms), *rest]


def _cone(value: Local, maker: dict[Local, Item], given: set[Local]) -> dict[int, Op] | None:
    """The ops on which a value depends, if they read nothing but arguments and make little."""
    found: dict[int, Op] = {}
    left, elements = [value], 0
    while left:
        local = left.pop()
        item = maker.get(local)
        if item is None:
            if local not in given:
                return None
            continue
        if not isinstance(item, Op):
            return None
        if id(item) in found:
            continue
        found[id(item)] = item
        elements += (
            0 if item.view else sum(out.layout.max_local_numel for out in item.outs if out is not None)
        )
        if elements > MOST_ELEMENTS:
            return None
        left += item.inputs
    return found
