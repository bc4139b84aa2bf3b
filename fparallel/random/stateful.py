"""Which operators draw from torch's own generators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = ["is_stateful_random"]


def is_stateful_random(
    op: Any, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
) -> bool:
    """Whether an operator draws from a torch generator, by ``torch.Tag.nondeterministic_seeded``.

    Args:
        op: a ``torch._ops.OpOverload``, such as a graph node's target; anything else is not random.
        args: its arguments. With them, a call whose dropout is off (attention with ``dropout_p=0``, an LSTM
            without dropout) is not random.
        kwargs: its keyword arguments.

    >>> is_stateful_random(torch.ops.aten.bernoulli.default)
    True
    >>> is_stateful_random(torch.ops.fparallel.random.default)
    False
    """
    if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ()):
        return False
    if args is None:
        return True
    # the backward of a fused attention replays the forward's offsets
    named = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
    named.update(zip((a.name for a in op._schema.arguments), args, strict=False), **(kwargs or {}))
    for probability in ("dropout_p", "dropout"):
        if probability in named and named[probability] == 0:
            return False
    return all(named.get(flag) is not False for flag in ("train", "training", "is_training"))
