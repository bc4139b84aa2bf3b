"""Hypothesis strategies for meshes, rules and whole training steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from fparallel.mesh import Mesh, make_mesh
from fparallel.rules import Rules
from fparallel.testing.descriptions import EXTRAS, KINDS, Block, Case

AXES = ("dp", "tp", "sp", "x", "replica", "data_parallel")
EXACT_KINDS = ("relu", "mixer")


@st.composite
def meshes(
    draw: st.DrawFn,
    *,
    max_ranks: int = 8,
    axes: Sequence[str] = ("dp", "tp"),
    min_axes: int = 1,
    max_axes: int | None = None,
) -> Mesh:
    """A simulated mesh of at most `max_ranks` ranks over some of `axes`, in any order; sizes of 1 occur.

    Args:
      axes: the names to choose from.
      min_axes, max_axes: how many of them it has; by default from one to all.
    """
    number = draw(st.integers(min_axes, len(axes) if max_axes is None else max_axes))
    names = draw(st.permutations(list(axes)))[:number]
    sizes: list[int] = []
    for _ in names:
        room = max_ranks // math.prod(sizes)
        sizes.append(draw(st.sampled_from([s for s in (2, 1, 3, 4, 5, 6, 7, 8) if s <= room])))
    order = draw(st.permutations(list(zip(names, sizes, strict=True))))
    return make_mesh([size for _, size in order], [name for name, _ in order], kind="simulated")


@st.composite
def rules_for(
    draw: st.DrawFn,
    mesh: Mesh,
    *,
    zero: Sequence[int] = (0, 1, 2, 3),
    zero_axes: Sequence[str] | None = None,
    **choices: str | Sequence[str | None] | None,
) -> Rules:
    """Rules for a mesh: of every logical name one of the axes allowed for it, and ZeRO over some axis.

    Args:
      zero: the stages to choose from. zero_axes: the axes to choose from for it; by default all of the mesh.
      choices: per logical name an axis, or several to choose from (None: no rule). Axes that the mesh lacks
      are left
        out. Names that stand on one tensor must have no axis in common.

    >>> rules_for(mesh, batch="dp", mlp=("tp", None), vocab=("tp", None))                        # doctest:
    +SKIP
    """
    names: dict[str, Any] = {}
    for name, allowed in choices.items():
        options = [allowed] if allowed is None or isinstance(allowed, str) else list(allowed)
        options = [axis for axis in options if axis is None or axis in mesh.names]
        chosen = draw(st.sampled_from(options)) if options else None
        if chosen is not None:
            names[name] = chosen
    rules = Rules(**names)
    stage = draw(st.sampled_from(list(zero)))
    axes = [axis for axis in (mesh.names if zero_axes is None else zero_axes) if axis in mesh.names]
    return rules.zero(stage, axis=draw(st.sampled_from(axes))) if axes and stage else rules


@st.composite
def blocks(draw: st.DrawFn, kinds: Sequence[str], dropout: bool) -> Block:
    """A block of a model, of one of the kinds."""
    kind = draw(st.sampled_from(list(kinds)))
    bias = draw(st.booleans())
    return Block(
        kind,
        residual=draw(st.sampled_from([True, True, False])),
        norm=draw(st.sampled_from(["layer", "rms", ""])),
        bias=bias,
        outlined=draw(st.booleans()),
        constrain=draw(st.booleans()),
        skip=draw(st.sampled_from([0, 0, 2, 3])),
        dropout=draw(st.sampled_from([0.0, 0.3])) if dropout else 0.0,
    )


@st.composite
def models(
    draw: st.DrawFn, *, kinds: Sequence[str] = KINDS, max_blocks: int = 3, dropout: bool = False
) -> tuple[Block, ...]:
    """The blocks of a model: none to `max_blocks`; repeated ones share a trace."""
    made = draw(st.lists(blocks(kinds, dropout), min_size=0, max_size=max_blocks))
    if len(made) > 1 and draw(st.booleans()):
        made = [made[0]] * len(made)
    return tuple(made)


@st.composite
def _placed(draw: st.DrawFn, mesh: Mesh, constrained: bool) -> tuple[dict[str, Any], Any]:
    """Rules that put no axis twice on a tensor, and what shards the batch."""
    axes = list(draw(st.permutations(list(mesh.names))))
    cut = draw(st.integers(0, len(axes)))
    data, rest = axes[:cut], axes[cut:]
    names: dict[str, Any] = {}
    if data:
        names["batch"] = tuple(data) if len(data) > 1 else data[0]
    if rest:
        model = rest[0] if len(rest) == 1 or draw(st.booleans()) else tuple(rest[:2])
        for name in ("mlp", "heads", "kv_heads", "vocab"):
            if draw(st.sampled_from([True, True, True, False])):
                names[name] = model
        if draw(st.booleans()):
            names["seq"] = model
        spare = [axis for axis in rest if axis != model and axis not in model]
        if draw(st.booleans()) and spare:
            names["embed"] = spare[0]
    if data and not rest and not constrained and draw(st.booleans()):
        names["embed" if draw(st.booleans()) else "vocab"] = data[0]
    return names, data


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    kinds: Sequence[str] = KINDS,
    losses: Sequence[str] = ("ce", "mean", "sum"),
    masks: Sequence[str] = ("random",),
    optimizers: Sequence[str] = ("sgd", "momentum", "adamw"),
    extras: Sequence[str] = (),
    dropout: bool = False,
    max_blocks: int = 2,
    max_ranks: int = 8,
    max_axes: int = 3,
    min_axes: int = 1,
    microbatches: Sequence[int] = (0,),
) -> Case:
    """A whole training step: any model of these kinds, mesh, rules that fit, ZeRO stage and odd sizes."""
    mesh = draw(meshes(max_ranks=max_ranks, axes=AXES, min_axes=min_axes, max_axes=max_axes))
    made = draw(models(kinds=kinds, max_blocks=max_blocks, dropout=dropout))
    names, data = draw(_placed(mesh, any(b.constrain for b in made)))
    if not any(b.constrain for b in made):
        names.pop("seq", None)
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    zero = None
    stage = draw(st.integers(0, 3))
    if stage or draw(st.booleans()):
        several: Any = tuple(data) if len(data) > 1 and draw(st.booleans()) else None
        axis = several or draw(st.sampled_from(data or list(mesh.names)))
        zero = (stage, axis, draw(st.sampled_from([0, 0, 10])))
    shards = math.prod(mesh.shape[axis] for axis in data)
    number = draw(st.sampled_from(list(microbatches)))
    group = draw(st.sampled_from([1, 1, 2])) if number else 1
    rows = shards * number * group * draw(st.integers(1, 2)) if number else shards + draw(st.integers(0, 3))
    # Attention, and what a final norm cancels, have gradients of rounding alone: lion takes their sign.
    cancels = any(b.kind in ("attention", "parallel") for b in made) or bool(extras)
    return Case(
        mesh=tuple(zip(mesh.names, mesh.sizes, strict=True)),
        names=tuple(names.items()),
        zero=zero,
        vocab=draw(st.integers(5, 53)),
        rows=rows,
        microbatches=number,
        group=group,
        seq=draw(st.integers(1, 5)),
        dim=draw(st.sampled_from([4, 6, 5, 8])),
        hidden=draw(st.sampled_from([8, 6, 5, 3])),
        heads=kv_heads * draw(st.sampled_from([1, 2, 3])),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([2, 3, 4])),
        blocks=made,
        tied=draw(st.booleans()),
        extras=tuple(e for e in extras if draw(st.booleans())),
        loss=draw(st.sampled_from(list(losses))),
        optimizer=draw(st.sampled_from([o for o in optimizers if o != "lion" or not cancels])),
        mask=draw(st.sampled_from(list(masks))),
        state=draw(st.sampled_from(["TrainState", "dict"])),
        seed=draw(st.integers(0, 999)),
        donate=draw(st.booleans()),
        steps=draw(st.sampled_from([1, 2])),
    )


@st.composite
def pipelined_cases(
    draw: st.DrawFn,
    *,
    orders: Sequence[str] = ("1f1b", "gpipe", "interleaved", "zb_h1", "zb_v", "auto"),
    base: st.SearchStrategy[Case] | None = None,
) -> Case:
    """A training step of at least as many blocks as stages, on a mesh with a pipeline axis among the others."""
    case = draw(
        base
        if base is not None
        else cases(max_axes=2, max_ranks=4, microbatches=(0, 1, 2, 3, 4), dropout=True)
    )
    order = draw(st.sampled_from(list(orders)))
    ranks = draw(st.sampled_from([2, 2, 3, 4]))
    stages = ranks * (2 if order in ("interleaved", "zb_v") else 1)
    made = list(case.blocks) or [draw(blocks(("mlp",), False))]
    while len(made) < stages:
        made.append(draw(st.sampled_from(made)))
    mesh = list(case.mesh)
    mesh.insert(draw(st.integers(0, len(mesh))), ("pp", ranks))
    if (
        dict(case.names).get("embed") is not None
    ):  # an axis of the batch, perhaps, which constraints cannot have twice
        made = [replace(block, constrain=False) for block in made]
        case = replace(case, names=tuple(pair for pair in case.names if pair[0] != "seq"))
    names = (*case.names, ("layers", "pp"))
    some = st.sets(st.integers(0, len(made) - 1)).map(sorted)
    reading = draw(st.sampled_from([[], list(range(len(made)))]) | some)
    return replace(
        case,
        mesh=tuple(mesh),
        names=names,
        blocks=tuple(made),
        pipeline=order,
        features=tuple(reading),
    )


@st.composite
def whole_cases(draw: st.DrawFn) -> Case:
    """A training step on whole numbers, whose sums are exact in any order: it must be equal bit for bit."""
    case = draw(
        cases(
            kinds=EXACT_KINDS,
            losses=("sum",),
            optimizers=("sgd", "momentum"),
            extras=("unused", "zero_size", "fixed"),
            microbatches=(0, 2, 4),
        )
    )
    made = tuple(replace(b, norm="") for b in case.blocks)
    return replace(case, blocks=made, whole=True, steps=1)


__all__ = [
    "EXACT_KINDS",
    "EXTRAS",
    "blocks",
    "cases",
    "meshes",
    "models",
    "pipelined_cases",
    "rules_for",
    "whole_cases",
]
