"""A training step, its data, a mesh and rules in plain values, whose `repr` makes them again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

KINDS = (
    "mlp",
    "relu",
    "glu",
    "attention",
    "parallel",
    "mixer",
    "einsum",
    "custom",
    "inplace",
    "slices",
    "vmap",
    "jvp",
    "energy",
    "linear",
    "encoder",
    "subclass",
)
LOSSES = ("ce", "mean", "means", "mse", "sum", "vmap", "gather", "smooth", "ignore")
OPTIMIZERS = ("sgd", "momentum", "adamw", "lion", "manual", "frozen")
EXTRAS = ("unused", "zero_size", "scalar", "nested", "fixed", "dotted")


@dataclass(frozen=True)
class Block:
    """One block of a model.

    Attributes:
      kind: one of `KINDS`.
      residual: added to its input, or in its place.
      norm: "layer", "rms" or "".
      bias: whether the norm and the MLP have biases.
      outlined: whether it is an `fp.block`.
      constrain: whether "batch seq embed" is asked of its output.
      skip: 0, or from how many blocks before an edge comes in.
      dropout: probability.
    """

    kind: str = "mlp"
    residual: bool = True
    norm: str = "layer"
    bias: bool = False
    outlined: bool = True
    constrain: bool = False
    skip: int = 0
    dropout: float = 0.0


@dataclass(frozen=True)
class Case:
    """A training step, its data, a mesh and rules.

    Attributes:
      mesh: (axis, size) pairs.
      names: (logical name, axis or axes) pairs of the rules.
      zero: None, or (stage, axis or axes, min_elements).
      vocab, rows, seq, dim, hidden, heads, kv_heads, head_dim: sizes.
      blocks: see `Block`.
      tied: the output head is the embedding.
      extras: odd leaves, of `EXTRAS`.
      loss, optimizer: of `LOSSES` and `OPTIMIZERS`.
      mask: "ones", "random", "first" (only the first row counts) or "none" (no token counts).
      whole: integer-valued parameters and data, for comparisons bit for bit.
      state: "dict" or "TrainState".
      seed: of the key from which parameters and data are drawn.
      donate, steps: see `assert_equivalent`.
      microbatches, group: see `fp.accumulate`; 0 is a step without it.
      pipeline: the order of `fp.jit`, for rules with "layers" on a mesh axis.
      features: the blocks after which a feature of the batch alone comes in that is expensive to make.
    """

    mesh: tuple[tuple[str, int], ...] = (("dp", 2),)
    names: tuple[tuple[str, Any], ...] = (("batch", "dp"),)
    zero: tuple[int, Any, int] | None = None
    vocab: int = 11
    rows: int = 2
    seq: int = 3
    dim: int = 4
    hidden: int = 8
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 2
    blocks: tuple[Block, ...] = (Block(),)
    tied: bool = True
    extras: tuple[str, ...] = ()
    loss: str = "mean"
    optimizer: str = "momentum"
    mask: str = "random"
    whole: bool = False
    state: str = "TrainState"
    seed: int = 0
    donate: bool = False
    steps: int = 1
    microbatches: int = 0
    group: int = 1
    pipeline: str | None = None
    features: tuple[int, ...] = ()

    def __repr__(self) -> str:
        """Only what is not the default."""
        return _short_repr(self)


def _short_repr(value: Any) -> str:
    if isinstance(value, (Case, Block)):
        kind = type(value)
        given = [
            (n, getattr(value, n))
            for n in kind.__dataclass_fields__
            if getattr(value, n) != getattr(kind(), n)
        ]
        return f"{kind.__name__}({', '.join(f'{n}={_short_repr(v)}' for n, v in given)})"
    if isinstance(value, tuple):
        return (
            "("
            + "".join(f"{_short_repr(v)}, " for v in value).removesuffix(" " if len(value) == 1 else ", ")
            + ")"
        )
    return repr(value)
