"""Local functions that segments call beside ATen operators: `local.NAME` in a segment is `NAME` here."""

from __future__ import annotations

import torch
from torch import Tensor


def reshape(x: Tensor, shape: list[int]) -> Tensor:
    return x.reshape(shape)


def narrow(x: Tensor, how: tuple[list[int], list[tuple[int, int, int]], list[int]]) -> Tensor:
    """The part of a replicated (or less sharded) tensor that a more sharded layout holds; a view where possible."""
    sizes, cuts, shape = how
    if not cuts:
        return x
    x = x.reshape(sizes)
    for position, start, length in cuts:
        x = x.narrow(position, start, length)
    return x.reshape(shape)


def keep_on_first(x: Tensor, first: bool) -> Tensor:
    """A replicated value as the unreduced sum that has it on the first rank and zeros elsewhere."""
    return x if first else torch.zeros_like(x)


def own(x: Tensor) -> Tensor:
    """A tensor that shares no storage with another value."""
    return x.clone(memory_format=torch.contiguous_format)


def global_index(runs: list[tuple[int, int, int]], device: torch.device | str) -> Tensor:
    """The global indices along one dim, int64."""
    index = torch.zeros(1, dtype=torch.int64, device=device)
    for start, count, stride in runs:
        step = (torch.arange(count, device=device) + start) * stride
        index = (index[:, None] + step[None, :]).reshape(-1)
    return index


def arange(runs: list[list[tuple[int, int, int]]], start: float, step: float, dtype: torch.dtype, device: str) -> Tensor:
    index = global_index(runs[0], device)
    return (index * step + start).to(dtype)


def embedding(weight: Tensor, index: Tensor, runs: list[list[tuple[int, int, int]]]) -> Tensor:
    """Rows of a vocabulary-sharded table; zero where the row lies on another rank: an unreduced sum."""
    start, count, _ = runs[0][0]
    local = index - start
    held = (local >= 0) & (local < count)
    if count == 0:
        return weight.new_zeros((*index.shape, weight.shape[1]))
    rows = torch.nn.functional.embedding(torch.where(held, local, 0), weight)
    return rows * held.unsqueeze(-1).to(rows.dtype)


def embedding_backward(
    grad: Tensor, index: Tensor, runs: list[list[tuple[int, int, int]]], padding_idx: int
) -> Tensor:
    """The gradient of the rows of a vocabulary-sharded table that this rank holds."""
    start, count, _ = runs[0][0]
    flat = index.reshape(-1)
    local = flat - start
    held = (local >= 0) & (local < count) & (flat != padding_idx)
    rows = grad.reshape(flat.shape[0], grad.shape[-1])
    result = grad.new_zeros((count, rows.shape[1]))
    if count == 0:
        return result
    return result.index_add_(0, torch.where(held, local, 0), rows * held.unsqueeze(-1).to(rows.dtype))


def sum_squares(tensors: list[Tensor], counted: list[bool], dtype: torch.dtype, device: str) -> Tensor:
    """The sum of squares over the local parts of the leaves that this rank counts, as a 0-d tensor."""
    total = torch.zeros((), dtype=dtype, device=device)
    for tensor, mine in zip(tensors, counted, strict=True):
        if mine and tensor.numel():
            flat = tensor.reshape(-1).to(dtype)
            total = total + torch.dot(flat, flat)
    return total


def full_if_empty(x: Tensor, dims: list[int], value: float) -> Tensor:
    """`x`, or, where a dim to be reduced is empty here, one slice of the reduction's identity."""
    if all(x.shape[d] for d in dims):
        return x
    shape = [1 if d in dims else s for d, s in enumerate(x.shape)]
    return x.new_full(shape, value)


def extremum(x: Tensor, kind: str, dims: list[int], keepdim: bool) -> Tensor:
    """amax or amin over dims, the identity where a reduced dim is empty on this rank."""
    from fparallel.layout import identity

    x = full_if_empty(x, dims, identity(kind, x.dtype))
    return torch.amax(x, dims, keepdim) if kind == "max" else torch.amin(x, dims, keepdim)


def random(
    key: Tensor, kind: str, shape: list[int], dtype: torch.dtype, low: float, high: float, runs: list[list[tuple[int, int, int]]]
) -> Tensor:
    """The part of a keyed draw of global `shape` that a shard holds."""
    from fparallel.random import random_shard

    return random_shard(key, kind, shape, dtype, low, high, [tuple(r) for r in runs])


def unless_empty(target: str, args: list, kwargs: list[tuple[str, object]], num_outs: int) -> tuple[Tensor, ...]:
    """An attention kernel, or empty results where this rank has no batch or no heads."""
    namespace, name, overload = target.split(".")
    op = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    tensors = [a for a in args if isinstance(a, Tensor)]
    if all(t.numel() for t in tensors[:3]):
        return op(*args, **dict(kwargs))[:num_outs]
    if "backward" in name:
        return tuple(torch.zeros_like(t) for t in tensors[1:4])
    query, _, value = tensors[:3]
    return query.new_zeros((*query.shape[:3], value.shape[3])), query.new_zeros(query.shape[:3])
