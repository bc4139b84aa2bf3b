"""Local functions that segments call beside ATen operators: `local.NAME` in a segment is `NAME` here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fparallel.leaf_maps import square_sum


def reshape(x: Tensor, shape: list[int]) -> Tensor:
    return x.reshape(shape)


def narrow(x: Tensor, how: tuple[list[int], list[tuple[int, int, int]], list[int]]) -> Tensor:
    """The part of a (less sharded) tensor that a more sharded layout holds; a view where possible."""
    sizes, cuts, shape = how
    if not cuts:
        return x
    x = x.reshape(sizes)
    for position, start, length in cuts:
        x = x.narrow(position, start, length)
    return x.reshape(shape)


def split(x: Tensor, shapes: list[list[int]], dim: int) -> tuple[Tensor, ...]:
    """The parts of `x` along a dim that have these shapes."""
    return x.split([shape[dim] for shape in shapes], dim)


def part(x: Tensor, shape: list[int], dim: int, before: int, units: int) -> Tensor:
    """The part of `x` along a dim that has this shape and `units` units, after `before` of them."""
    return x.narrow(dim, before * (shape[dim] // units), shape[dim])


def part_backward(grad: Tensor, shape: list[int], dim: int, before: int, units: int) -> Tensor:
    """Zeros of this shape but for `grad`, which has `units` units, after `before` of them."""
    whole = grad.new_zeros(shape)
    whole.narrow(dim, before * (grad.shape[dim] // units), grad.shape[dim]).copy_(grad)
    return whole


def keep_on_first(x: Tensor, first: bool) -> Tensor:
    """A replicated value as the unreduced sum that has it on the first rank and zeros elsewhere."""
    return x if first else torch.zeros_like(x)


def accumulate(total: Tensor, term: Tensor) -> Tensor:
    """A sum over micro-batches and its next term."""
    return total + term


def accumulate_(total: Tensor, term: Tensor) -> Tensor:
    """`accumulate` into the sum itself."""
    return total.add_(term)


def accumulate_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """A sum over micro-batches and its next term, the matrix product of a [m, k] and b [k, n] in any shape."""
    return torch.addmm(total.reshape(a.shape[0], b.shape[1]), a, b).reshape(total.shape)


def accumulate_product_(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`accumulate_product` into the sum itself."""
    if total.is_contiguous():
        total.view(a.shape[0], b.shape[1]).addmm_(a, b)
        return total
    return total.add_(torch.mm(a, b).reshape(total.shape))


def accumulate_rows(total: Tensor, grad: Tensor, rows: Tensor) -> Tensor:
    """A sum [v, ...] over micro-batches and its next term, the gradient `grad` of what `rows` picked of a table."""
    return accumulate_rows_(total.clone(), grad, rows)


def accumulate_rows_(total: Tensor, grad: Tensor, rows: Tensor) -> Tensor:
    """`accumulate_rows` into the sum itself. On a GPU in two steps: `index_add` has no fixed order there."""
    if total.device.type == "cpu":
        return total.index_add_(0, rows.reshape(-1), grad.reshape(rows.numel(), *total.shape[1:]))
    return total.add_(torch.ops.aten.embedding_dense_backward(grad, rows, total.shape[0], -1, False))


def boundary(x: Tensor) -> Tensor:
    """The tensor itself: where a pipeline was cut by hand."""
    return x


def own(x: Tensor) -> Tensor:
    """A tensor that shares no storage with another value."""
    return x.clone(memory_format=torch.contiguous_format)


def layer_norm_backward(
    grad: Tensor, x: Tensor, shape: list[int], mean: Tensor, rstd: Tensor, *rest: Any
) -> Any:
    """ATen's kernel on CPUs reads mean and rstd as contiguous; cut from larger ones they are not."""
    call = torch.ops.aten.native_layer_norm_backward.default
    return call(grad, x, shape, mean.contiguous(), rstd.contiguous(), *rest)


def global_index(runs: list[tuple[int, int, int]], device: torch.device | str) -> Tensor:
    """The global indices along one dim, int64."""
    index = torch.zeros(1, dtype=torch.int64, device=device)
    for start, count, stride in runs:
        step = (torch.arange(count, device=device) + start) * stride
        index = (index[:, None] + step[None, :]).reshape(-1)
    return index


def arange(
    runs: list[list[tuple[int, int, int]]], start: float, step: float, dtype: torch.dtype, device: str
) -> Tensor:
    index = global_index(runs[0], device)
    return (index * step + start).to(dtype)


Axis = list[tuple[int, int, int]]


def local_position(index: Tensor, runs: Axis) -> tuple[Tensor, Tensor | None]:
    """Where global indices along a dim lie in this rank's part, and which of them do (None: all).

    Those that lie elsewhere get some position that exists, if any does.
    """
    position, held, above = torch.zeros_like(index), None, 0
    for start, count, stride in runs:
        digit = index // stride
        if above:
            digit = digit % (above // stride)
        above = stride
        digit = digit - start
        inside = (digit >= 0) & (digit < count)
        held = inside if held is None else held & inside
        position = position * count + digit
    return (position, None) if held is None else (torch.where(held, position, 0), held)


def _masked(values: Tensor, held: Tensor) -> Tensor:
    """Zero where a row is not held here (also where the value is NaN)."""
    return torch.where(
        held.reshape(held.shape + (1,) * (values.dim() - held.dim())),
        values,
        torch.zeros((), dtype=values.dtype, device=values.device),
    )


def embedding(weight: Tensor, index: Tensor, runs: list[Axis]) -> Tensor:
    """Rows of a vocabulary-sharded table; zero where the row lies on another rank: an unreduced sum."""
    if not weight.shape[0]:
        return weight.new_zeros((*index.shape, weight.shape[1]))
    position, held = local_position(index, runs[0])
    rows = torch.nn.functional.embedding(position, weight)
    return rows if held is None else _masked(rows, held)


def embedding_backward(grad: Tensor, index: Tensor, runs: list[Axis], padding_idx: int) -> Tensor:
    """The gradient of the rows of a vocabulary-sharded table that this rank holds."""
    flat = index.reshape(-1)
    position, held = local_position(flat, runs[0])
    used = flat != padding_idx if held is None else held & (flat != padding_idx)
    rows = grad.reshape(flat.shape[0], grad.shape[-1])
    result = grad.new_zeros((_count(runs[0]), rows.shape[1]))
    return result.index_add_(0, position, _masked(rows, used)) if result.shape[0] else result


def _count(runs: Axis) -> int:
    held = 1
    for _, count, _ in runs:
        held *= count
    return held


def _local_indices(
    x: Tensor, indices: list[Tensor | None], sizes: list[int], runs: list[list[Axis] | None], lead: int
) -> tuple[list[Tensor | None], Tensor | None, list[int]]:
    """Indices local along sharded dims, a mask of what lies here (None: all), and the shape of x[indices]."""
    made: list[Tensor | None] = []
    held: Tensor | None = None
    for index, size, axis in zip(indices, sizes, runs, strict=True):
        if index is None or axis is None:
            made.append(index)
            continue
        position, mine = local_position(torch.where(index < 0, index + size, index), axis[0])
        made.append(position)
        if mine is not None:
            held = mine if held is None else held & mine
    common = torch.broadcast_shapes(*(i.shape for i in made if i is not None))
    rest = [n for n, i in zip(x.shape, made, strict=True) if i is None]
    if held is not None:
        held = held.reshape(held.shape + (1,) * (len(rest) - lead))
    return made, held, [*rest[:lead], *common, *rest[lead:]]


def index(
    x: Tensor, indices: list[Tensor | None], sizes: list[int], runs: list[list[Axis] | None], lead: int
) -> Tensor:
    """x[indices] of a tensor that is sharded along indexed dims: zero where the element lies on another rank.

    `lead`: how many dims of the result come before those of the indices.
    """
    made, held, shape = _local_indices(x, indices, sizes, runs, lead)
    if not x.numel():
        return x.new_zeros(shape)
    picked = torch.ops.aten.index.Tensor(x, made)
    return (
        picked
        if held is None
        else torch.where(held, picked, torch.zeros((), dtype=picked.dtype, device=picked.device))
    )


def index_put(
    x: Tensor,
    values: Tensor,
    indices: list[Tensor | None],
    sizes: list[int],
    runs: list[list[Axis] | None],
    lead: int,
) -> Tensor:
    """x with the values added whose positions lie on this rank."""
    made, held, shape = _local_indices(x, indices, sizes, runs, lead)
    if not x.numel():
        return x.clone()
    if held is not None:
        values = torch.where(
            held, values.expand(shape), torch.zeros((), dtype=values.dtype, device=values.device)
        )
    return torch.ops.aten.index_put.default(x, made, values, True)


def scatter_add(x: Tensor, dim: int, index: Tensor, src: Tensor, runs: list[Axis]) -> Tensor:
    """scatter_add along a sharded dim: each rank adds what falls on its part."""
    if not x.numel():
        return x.clone()
    position, held = local_position(index, runs[0])
    src = src[tuple(slice(n) for n in index.shape)]
    if held is not None:
        src = torch.where(held, src, torch.zeros((), dtype=src.dtype, device=src.device))
    return x.scatter_add(dim, position, src)


def sum_squares(tensors: list[Tensor], counted: list[bool], dtype: torch.dtype, device: str) -> Tensor:
    """The sum of squares over the local parts of the leaves that this rank counts, as a 0-d tensor."""
    total = torch.zeros((), dtype=dtype, device=device)
    for tensor, mine in zip(tensors, counted, strict=True):
        if mine and tensor.numel():
            total = total + square_sum(tensor.reshape(-1).to(dtype))
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
    key: Tensor,
    kind: str,
    shape: list[int],
    dtype: torch.dtype,
    low: float,
    high: float,
    runs: list[list[tuple[int, int, int]]],
) -> Tensor:
    """The part of a keyed draw of global `shape` that a shard holds."""
    from fparallel.random import random_shard

    return random_shard(key, kind, shape, dtype, low, high, [tuple(r) for r in runs])


def or_empty(
    target: str,
    args: list,
    kwargs: list[tuple[str, object]],
    operands: list[Tensor],
    shapes: list[list[int]],
    dtypes: list[torch.dtype],
    reduce: str,
) -> Tensor | tuple[Tensor, ...]:
    """An operator, or what leaves `reduce` unchanged where this rank holds nothing of one of `operands`.

    Few kernels take empty batches.
    """
    from fparallel.layout import identity

    if all(t.numel() for t in operands):
        out = operator(target)(*args, **dict(kwargs))
        return out if isinstance(out, Tensor) else tuple(out[: len(shapes)])
    made = tuple(
        operands[0].new_full(shape, identity(reduce, dtype), dtype=dtype)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )
    return made if len(made) > 1 else made[0]


def dense(target: str, args: list, *rest: Any) -> Tensor | tuple[Tensor, ...]:
    """`or_empty` on contiguous operands."""
    return or_empty(target, [a.contiguous() if isinstance(a, Tensor) else a for a in args], *rest)


def operator(target: str) -> Callable[..., Any]:
    """The operator `aten.mm.default`."""
    namespace, name, overload = target.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def as_complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.contiguous()).clone()


def as_strided(x: Tensor, size: list[int], stride: list[int], offset: int | None) -> Tensor:
    """The strides are those of a contiguous tensor, which a gathered one need not be."""
    return x.contiguous().as_strided(size, stride, offset or 0).clone()


def as_vector(x: Tensor) -> Tensor:
    """A 0-d tensor as one of one element."""
    return x.reshape(1).clone()
