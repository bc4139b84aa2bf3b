"""The keyed draws as torch operators.

Three operators hold all of the randomness of a program, so a traced graph shows a draw as one opaque node:

    fparallel::random(key, kind, shape, dtype, a, b, index=None, device=None) -> Tensor
    fparallel::fold_in(key, data) / fold_in.int(key, data) -> Tensor
    fparallel::split(key, num) -> Tensor

None is differentiable (keys are integers), all take keys with leading batch dims ``[*batch, 2]``, and all
have fake and vmap rules. ``index`` restricts ``random`` to a part of the global array; see
:func:`random_shard`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.library import Library

from fparallel.random.distributions import draw, local_shape
from fparallel.random.philox import Factor, child_keys

__all__ = ["random_shard"]

_lib = Library("fparallel", "FRAGMENT")
_lib.define(
    "random(Tensor key, str kind, SymInt[] shape, ScalarType dtype, Scalar a, Scalar b, SymInt[]? index=None,"
    " Device? device=None) -> Tensor"
)
_lib.define("fold_in(Tensor key, Tensor data) -> Tensor")
_lib.define("fold_in.int(Tensor key, int data) -> Tensor")
_lib.define("split(Tensor key, int num) -> Tensor")


# An index [[(start, count, stride), ..], ..] travels through the operator as ints: per dim the number of
# factors, then the factors.


def _pack(index: Sequence[Sequence[Factor]]) -> list[int]:
    return [n for factors in index for n in (len(factors), *itertools.chain.from_iterable(factors))]


def _unpack(packed: Sequence[int] | None) -> list[list[Factor]] | None:
    if packed is None:
        return None
    numbers = iter(packed)
    return [[_factor(numbers) for _ in range(num_factors)] for num_factors in numbers]


def _factor(numbers: Iterator[int]) -> Factor:
    return next(numbers), next(numbers), next(numbers)


def _random(key, kind, shape, dtype, a, b, index=None, device=None):  # type: ignore[no-untyped-def]
    return draw(key, kind, shape, dtype, a, b, _unpack(index), device)


def _random_fake(key, kind, shape, dtype, a, b, index=None, device=None):  # type: ignore[no-untyped-def]
    size = (*key.shape[:-1], *local_shape(shape, _unpack(index)))
    return key.new_empty(size, dtype=dtype, device=key.device if device is None else device)


def _random_vmap(info, in_dims, key, *args, **kwargs):  # type: ignore[no-untyped-def]
    return torch.ops.fparallel.random(key.movedim(in_dims[0], 0), *args, **kwargs), 0


def _fold_in(key: Tensor, data: Tensor) -> Tensor:
    return child_keys(key, data, domain="fold_in")


def _fold_in_int(key: Tensor, data: int) -> Tensor:
    return child_keys(key, [data], domain="fold_in").squeeze(-2)


def _fold_in_fake(key: Tensor, data: Tensor) -> Tensor:
    return key.new_empty((*torch.broadcast_shapes(key.shape[:-1], data.shape), 2))


def _fold_in_vmap(info, in_dims, key, data):  # type: ignore[no-untyped-def]
    key_dim, data_dim = in_dims
    # Batch dims broadcast from the right, so put the new one in front of the longest.
    rank = max(key.dim() - 1 - (key_dim is not None), data.dim() - (data_dim is not None))
    if key_dim is not None:
        key = key.movedim(key_dim, 0)
        key = key.reshape(len(key), *[1] * (rank + 2 - key.dim()), *key.shape[1:])
    if data_dim is not None:
        data = data.movedim(data_dim, 0)
        data = data.reshape(len(data), *[1] * (rank + 1 - data.dim()), *data.shape[1:])
    return torch.ops.fparallel.fold_in(key, data), 0


def _fold_in_int_vmap(info, in_dims, key, data):  # type: ignore[no-untyped-def]
    return torch.ops.fparallel.fold_in.int(key.movedim(in_dims[0], 0), data), 0


def _split(key: Tensor, num: int) -> Tensor:
    return child_keys(key, range(num), domain="split")


def _split_fake(key: Tensor, num: int) -> Tensor:
    return key.new_empty((*key.shape[:-1], num, 2))


def _split_vmap(info, in_dims, key, num):  # type: ignore[no-untyped-def]
    return torch.ops.fparallel.split(key.movedim(in_dims[0], 0), num), 0


for _name, _real, _fake, _vmap in (
    ("random", _random, _random_fake, _random_vmap),
    ("fold_in", _fold_in, _fold_in_fake, _fold_in_vmap),
    ("fold_in.int", _fold_in_int, lambda key, data: torch.empty_like(key), _fold_in_int_vmap),
    ("split", _split, _split_fake, _split_vmap),
):
    _lib.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fparallel::{_name}", _fake, lib=_lib)
    torch.library.register_vmap(f"fparallel::{_name}", _vmap, lib=_lib)


def random_shard(
    key: Tensor,
    kind: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    a: float,
    b: float,
    index: Sequence[Sequence[Factor]],
    device: torch.device | None = None,
) -> Tensor:
    """The local part of the array that ``torch.ops.fparallel.random(key, kind, shape, dtype, a, b)`` draws.

    Args:
        key: int64 ``[*batch, 2]``.
        kind: one of :data:`~fparallel.random.distributions.KINDS`.
        shape: the GLOBAL shape.
        dtype: of the result.
        a: as the traced node has it.
        b: as the traced node has it.
        index: per dim a tuple of factors ``(start, count, stride)``, major first. The local indices are their
            mixed radix product: ``sum((start_f + j_f) * stride_f)`` for ``j_f`` in ``range(count_f)``.
        device: of the result; the key's by default.

    Returns:
        ``[*batch, *local]``, where a local dim is the product of its counts; bit for bit the slice of the
        whole.

    Rows 2 and 3 of an array of shape (4, 6), and columns 1, 2, 4 and 5:

    >>> args = torch.tensor([0, 0]), "uniform", (4, 6), torch.float32, 0, 1
    >>> part = random_shard(*args, [[(2, 2, 1)], [(0, 2, 3), (1, 2, 1)]])
    >>> torch.equal(part, torch.ops.fparallel.random(*args)[2:, [1, 2, 4, 5]])
    True
    """
    return torch.ops.fparallel.random(key, kind, shape, dtype, a, b, index=_pack(index), device=device)
