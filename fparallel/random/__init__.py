"""Randomness as values: draws are pure functions of (key, position in the global array).

Explicit draws take a key (``normal(key, shape)``); ambient draws (``torch.randn``, ``F.dropout``) take theirs
from the scope that ``with use(key):`` opens. Both are bit-identical however the array is sharded, on every
device, jitted or not.
"""

from fparallel.random.ambient import Scope, block_scope, current_scope, loop_scope, scope_child, use
from fparallel.random.keyed import (
    bernoulli,
    bits,
    exponential,
    fold_in,
    key,
    normal,
    permutation,
    randint,
    split,
    uniform,
)
from fparallel.random.ops import random_shard
from fparallel.random.stateful import is_stateful_random

__all__ = [
    "Scope",
    "bernoulli",
    "bits",
    "block_scope",
    "current_scope",
    "exponential",
    "fold_in",
    "is_stateful_random",
    "key",
    "loop_scope",
    "normal",
    "permutation",
    "randint",
    "random_shard",
    "scope_child",
    "split",
    "uniform",
    "use",
]
