"""The tasks of a loop's body in a pipeline: forward, backward and weight gradients of the stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fparallel.compiler.local import At, Call, Comm, Item, Local, Op, drop_dead
from fparallel.compiler.memory import halve
from fparallel.compiler.stages import forward_items


def spread(
    items: Sequence[Item],
    stages: Sequence[int | None],
    terms: dict[int, list[Local]],
    rows: set[int],
    loop: int,
    splits: bool,
) -> tuple[list[Item], dict[int, list[Local]], dict[int, At | None]]:
    """The items with their tasks, and per result the terms of which it is the sum.

    A gradient that is a sum over stages (of a parameter that several read) is added up per stage over all
    micro-batches, so that it is sent once a step and not once for each.
    """
    stage_of = {id(item): stage for item, stage in zip(items, stages, strict=True)}
    maker = {out: item for item in items for out in item.outs if out is not None}
    more: list[Item] = []

    def of(local: Local) -> int | None:
        return stage_of[id(maker[local])] if local in maker else None

    def split(local: Local) -> list[Local]:
        item = maker.get(local)
        if isinstance(item, Comm) and item.kind in ("reduce_scatter", "all_reduce") and item.reduce == "sum":
            parts = split(item.src)
            if len(parts) == 1:
                return [local]
            made = [replace(item, src=part, dst=Local(local.dtype, local.layout)) for part in parts]
            for part, comm in zip(parts, made, strict=True):
                stage_of[id(comm)] = of(part)
                maker[comm.dst] = comm
            more.extend(made)
            return [comm.dst for comm in made]
        adds = (
            isinstance(item, Op)
            and item.target == "aten.add.Tensor"
            and len(item.args) == 2
            and not item.kwargs
        )
        if (
            not adds
            or item is None
            or any(x.layout != local.layout for x in item.inputs)
            or len(item.inputs) != 2
        ):
            return [local]
        parts = [part for value in item.inputs for part in split(value)]
        return parts if len({of(part) for part in parts}) > 1 else [local]

    found: dict[int, list[Local]] = {}
    for k, (local,) in terms.items():
        found[k] = [local] if k in rows else split(local)
    wanted = [local for locals_ in found.values() for local in locals_]
    items = drop_dead([*items, *more], wanted)
    forward = forward_items(items)
    readers: dict[Local, list[Item]] = {}
    awaited: set[int] = set()  # backward items that other stages, or gradients of earlier blocks, wait for
    at: dict[int, At | None] = {}
    for item in reversed(items):
        stage = stage_of[id(item)]
        reading = [reader for out in item.outs if out is not None for reader in readers.get(out, ())]
        if isinstance(item, Call) and item.half:
            first = item.half == "B"
        else:
            first = any(id(reader) in awaited or stage_of[id(reader)] != stage for reader in reading)
        if first:
            awaited.add(id(item))
        for value in item.inputs:
            readers.setdefault(value, []).append(item)
        kind = "F" if id(item) in forward else "B" if first or not splits else "W"
        at[id(item)] = At(loop, stage, kind)
    return items, found, at


def halve_calls(
    items: Sequence[Item], stages: Sequence[int | None], first: int
) -> tuple[list[Item], list[int | None]]:
    """Backwards of blocks as two: B, the gradients that earlier blocks wait for, and W, those of parameters.

    Args:
      first: the first stage whose backwards are cut. For no stage before stage 0 does one wait: where an order leaves
        B and W together, cutting helps from stage 1 on, which sends the gradient that B makes before W runs.

    Returns:
      the items and their stages.
    """
    made: list[tuple[Item, int | None]] = []
    for item, stage in zip(items, stages, strict=True):
        if not isinstance(item, Call) or not item.backward or stage is None or stage < first:
            made.append((item, stage))
            continue
        gives = halve(item.block).gives
        for half in "BW":
            outs = [out for out, now in zip(item.outs, gives, strict=True) if now == (half == "B")]
            if outs:
                made.append((replace(item, outs=outs, half=half), stage))
    return [item for item, _ in made], [stage for _, stage in made]
