"""Ops on trailing dims, which shard over everything in front: linear algebra, FFTs, pooling, resizing.

The tables below give, per operand and result, how many trailing dims belong to the op: "2 -> 1 2" takes
matrices and gives a vector and a matrix. The dims in front are batch dims; they broadcast.
"""

from __future__ import annotations

import torch

from fparallel.compiler.graph import Node, Value
from fparallel.compiler.rules.pointwise import broadcast_dims
from fparallel.compiler.rules.registry import (
    Dims,
    Factors,
    LocalCall,
    Placed,
    Rule,
    argument,
    local_or_empty,
    rule,
)
from fparallel.schedule.segment import LocalShape

_TAILS = {
    "aten.linalg_cholesky_ex.default": "2 -> 2 0", "aten.cholesky.default": "2 -> 2",
    "aten.cholesky_inverse.default": "2 -> 2", "aten.cholesky_solve.default": "2 2 -> 2",
    "aten.linalg_inv_ex.default": "2 -> 2 0", "aten._linalg_det.default": "2 -> 0 2 1",
    "aten._linalg_slogdet.default": "2 -> 0 0 2 1", "aten._linalg_eigh.default": "2 -> 1 2",
    "aten._linalg_eigvals.default": "2 -> 1", "aten.linalg_eig.default": "2 -> 1 2",
    "aten._linalg_svd.default": "2 -> 2 1 2", "aten.linalg_qr.default": "2 -> 2 2",
    "aten.geqrf.default": "2 -> 2 1",
    "aten.linalg_lu.default": "2 -> 2 2 2", "aten.linalg_lu_factor_ex.default": "2 -> 2 1 0",
    "aten.linalg_lu_solve.default": "2 1 2 -> 2", "aten.lu_unpack.default": "2 1 -> 2 2 2",
    "aten.linalg_ldl_factor_ex.default": "2 -> 2 1 0", "aten.linalg_ldl_solve.default": "2 1 2 -> 2",
    "aten.linalg_householder_product.default": "2 1 -> 2", "aten.ormqr.default": "2 1 2 -> 2",
    "aten.linalg_solve_triangular.default": "2 2 -> 2", "aten.triangular_solve.default": "2 2 -> 2 2",
    "aten.linalg_matrix_exp.default": "2 -> 2", "aten.linalg_pinv.atol_rtol_tensor": "2 0 0 -> 2",
}  # fmt: skip
_SPATIAL = {
    "avg_pool2d": "2 -> 2", "avg_pool2d_backward": "2 2 -> 2",
    "avg_pool3d": "3 -> 3", "avg_pool3d_backward": "3 3 -> 3",
    "_adaptive_avg_pool2d": "2 -> 2", "_adaptive_avg_pool2d_backward": "2 2 -> 2",
    "_adaptive_avg_pool3d": "3 -> 3", "_adaptive_avg_pool3d_backward": "3 3 -> 3",
    "adaptive_max_pool2d": "2 -> 2 2", "adaptive_max_pool2d_backward": "2 2 2 -> 2",
    "adaptive_max_pool3d": "3 -> 3 3", "adaptive_max_pool3d_backward": "3 3 3 -> 3",
    "max_pool2d_with_indices": "2 -> 2 2", "max_pool2d_with_indices_backward": "2 2 2 -> 2",
    "max_pool3d_with_indices": "3 -> 3 3", "max_pool3d_with_indices_backward": "3 3 3 -> 3",
    "fractional_max_pool2d": "2 1 -> 2 2", "fractional_max_pool2d_backward": "2 2 2 -> 2",
    "fractional_max_pool3d": "3 1 -> 3 3", "fractional_max_pool3d_backward": "3 3 3 -> 3",
    "max_unpool2d": "2 2 -> 2", "max_unpool3d": "3 3 -> 3",
    "reflection_pad1d_backward": "1 1 -> 1", "reflection_pad2d_backward": "2 2 -> 2",
    "reflection_pad3d_backward": "3 3 -> 3",
    "replication_pad1d_backward": "1 1 -> 1", "replication_pad2d_backward": "2 2 -> 2",
    "replication_pad3d_backward": "3 3 -> 3",
    "_upsample_bilinear2d_aa": "2 -> 2", "_upsample_bicubic2d_aa": "2 -> 2",
    "im2col": "3 -> 2", "col2im": "2 -> 3",
}  # fmt: skip
_TAILS.update({f"aten.{name}.default": tails for name, tails in _SPATIAL.items()})
_RESIZE_BACKWARD = {
    "upsample_nearest1d": 1, "upsample_linear1d": 1, "upsample_nearest2d": 2, "upsample_bilinear2d": 2,
    "upsample_bicubic2d": 2, "_upsample_bilinear2d_aa": 2, "_upsample_bicubic2d_aa": 2,
    "_upsample_nearest_exact1d": 1,
    "_upsample_nearest_exact2d": 2, "_upsample_nearest_exact3d": 3, "upsample_nearest3d": 3,
    "upsample_trilinear3d": 3,
}  # fmt: skip
_TAILS.update({f"aten.{name}_backward.default": f"{n} -> {n}" for name, n in _RESIZE_BACKWARD.items()})


def batched(node: Node, ins: list[int], outs: list[int]) -> Rule:
    """Leading dims shard, the last ins[i] dims of operand i (outs[i] of result i) are whole."""
    factors = Factors()

    def lead(value: Value, tail: int) -> tuple[int, ...]:
        return value.shape[: len(value.shape) - tail] if len(value.shape) >= tail else ()

    batch = tuple(torch.broadcast_shapes(*(lead(v, n) for v, n in zip(node.inputs, ins, strict=True))))
    leading = factors.dims(batch)
    locked: set[int] = set()

    def dims(value: Value, tail: int) -> Dims:
        own = lead(value, tail)
        rest = tuple((factors.new(size),) for size in value.shape[len(own) :])
        locked.update(f for (f,) in rest)
        return (*broadcast_dims(leading, own, batch), *rest)

    in_dims = [dims(v, n) for v, n in zip(node.inputs, ins, strict=True)]
    out_dims = [dims(v, n) for v, n in zip(node.outs, outs, strict=True)]
    return Rule(factors.sizes, in_dims, out_dims, locked=locked, local=local_or_empty)


def _from_table(node: Node) -> Rule | None:
    left, _, right = _TAILS[node.target].partition(" -> ")
    ins = [int(n) for n in left.split()][: len(node.inputs)]
    made = batched(node, ins, [int(n) for n in right.split()])
    if "pool" in node.target and "_backward" in node.target:
        made.local = lambda placed: local_or_empty(placed, dense=True)
    if (
        node.target.endswith("_backward.default")
        and node.target.removeprefix("aten.").removesuffix("_backward.default") in _RESIZE_BACKWARD
    ):

        def local(placed: Placed) -> LocalCall:
            args = list(node.args)
            args[2] = LocalShape(placed.outs[0])
            return local_or_empty(placed, tuple(args))

        made.local = local
    return made


rule(*_TAILS)(_from_table)


@rule("aten._linalg_solve_ex.default")
def solve(node: Node) -> Rule:
    a, b = node.inputs
    vector = len(b.shape) == 1 or (len(a.shape) - 1 == len(b.shape) and b.shape == a.shape[:-1])
    return batched(node, [2, 1 if vector else 2], [1 if vector else 2, 2, 1, 0])


@rule("aten._fft_r2c.default", "aten._fft_c2c.default", "aten._fft_c2r.default")
def fft(node: Node) -> Rule:
    """The transformed dims are whole."""
    factors = Factors()
    shape, out = node.inputs[0].shape, node.outs[0].shape
    along = {d % len(shape) for d in node.args[1]}
    src = factors.dims(shape)
    dst = tuple((factors.new(out[d]),) if d in along else src[d] for d in range(len(shape)))
    locked = {dims[d][0] for dims in (src, dst) for d in along}
    return Rule(factors.sizes, [src], [dst], locked=locked, linear=[frozenset((0,))], local=local_or_empty)


@rule("aten.view_as_complex.default")
def view_as_complex(node: Node) -> Rule:
    factors = Factors()
    out = factors.dims(node.outs[0].shape)
    pair = factors.new(2)
    return Rule(factors.sizes, [(*out, (pair,))], [out], locked={pair}, local=_contiguous)


@rule("aten.view_as_real.default")
def view_as_real(node: Node) -> Rule:
    factors = Factors()
    src = factors.dims(node.inputs[0].shape)
    pair = factors.new(2)
    return Rule(factors.sizes, [src], [(*src, (pair,))], locked={pair}, view=True)


def _contiguous(placed: Placed) -> LocalCall:
    return "local.as_complex", (placed.node.inputs[0],), {}


@rule("aten._cdist_forward.default")
def cdist(node: Node) -> Rule:
    """(..., p, m) and (..., r, m) to (..., p, r): all but m shard."""
    made, p, r, _ = _cdist(node, node.inputs[0], node.inputs[1], node.outs[0])
    made.outs = [(*made.outs[0], (p,), (r,))]
    return made


@rule("aten._cdist_backward.default")
def cdist_backward(node: Node) -> Rule:
    grad, x1, x2, _ = node.inputs
    made, p, r, _ = _cdist(node, x1, x2, grad)
    lead = made.outs[0]
    full = (*lead, (p,), (r,))
    out = node.outs[0]
    made.ins = [full, made.ins[0], made.ins[1], full]
    made.outs = [(*broadcast_dims(lead, out.shape[:-2], grad.shape[:-2]), *made.ins[1][-2:])]
    made.reduce = {r: "sum"}
    return made


def _cdist(node: Node, x1: Value, x2: Value, full: Value) -> tuple[Rule, int, int, int]:
    factors = Factors()
    batch = full.shape[:-2]
    lead = factors.dims(batch)
    p, r, m = factors.new(x1.shape[-2]), factors.new(x2.shape[-2]), factors.new(x1.shape[-1])
    ins: list[Dims] = [
        (*broadcast_dims(lead, x1.shape[:-2], batch), (p,), (m,)),
        (*broadcast_dims(lead, x2.shape[:-2], batch), (r,), (m,)),
    ]
    return Rule(factors.sizes, ins, [lead], locked={m}, local=local_or_empty), p, r, m


@rule("aten.grid_sampler_2d.default", "aten.grid_sampler_3d.default")
def grid_sampler(node: Node) -> Rule:
    """Batch, channels and the points of the grid shard; the sampled space is whole."""
    factors, src, grid, out, locked = _grid(node.inputs[0], node.inputs[1])
    return Rule(factors.sizes, [src, grid], [out], locked=locked, local=local_or_empty)


@rule("aten.grid_sampler_2d_backward.default", "aten.grid_sampler_3d_backward.default")
def grid_sampler_backward(node: Node) -> Rule:
    factors, src, grid, out, locked = _grid(node.inputs[1], node.inputs[2])
    mask = node.args[-1]
    outs: list[Dims] = [src if mask[0] else (), grid if mask[1] else ()]
    sums = {f for (f,) in out[1:]}
    return Rule(
        factors.sizes,
        [out, src, grid],
        outs,
        reduce=dict.fromkeys(sums, "sum"),
        locked=locked,
        local=local_or_empty,
    )


def _grid(x: Value, grid: Value) -> tuple[Factors, Dims, Dims, Dims, set[int]]:
    factors = Factors()
    n, c = factors.new(x.shape[0]), factors.new(x.shape[1])
    space = factors.dims(x.shape[2:])
    points = factors.dims(grid.shape[1:-1])
    last = factors.new(grid.shape[-1])
    locked = {f for (f,) in space} | {last}
    return factors, ((n,), (c,), *space), ((n,), *points, (last,)), ((n,), (c,), *points), locked


@rule("aten.unfold.default")
def unfold(node: Node) -> Rule:
    """Windows along a dim, which is whole."""
    factors = Factors()
    shape = node.inputs[0].shape
    if not shape:
        return Rule([1], [()], [((0,),)], locked={0}, view=True)
    dim = node.args[1] % len(shape)
    src = factors.dims(shape)
    windows, size = factors.new(node.outs[0].shape[dim]), factors.new(node.outs[0].shape[-1])
    out = (*src[:dim], (windows,), *src[dim + 1 :], (size,))
    return Rule(
        factors.sizes, [src], [out], locked={src[dim][0], windows, size}, linear=[frozenset((0,))], view=True
    )


@rule("aten.unfold_backward.default")
def unfold_backward(node: Node) -> Rule:
    grad, shape, dim, size, step = node.args
    factors = Factors()
    out = factors.dims(shape)
    if not shape:
        return Rule([1], [((0,),)], [()], locked={0})
    dim %= len(shape)
    windows, tail = factors.new(grad.shape[dim]), factors.new(grad.shape[-1])
    src = (*out[:dim], (windows,), *out[dim + 1 :], (tail,))

    def local(placed: Placed) -> LocalCall:
        return local_or_empty(placed, (grad, LocalShape(placed.outs[0]), dim, size, step))

    return Rule(
        factors.sizes,
        [src],
        [out],
        locked={out[dim][0], windows, tail},
        linear=[frozenset((0,))],
        local=local,
    )


@rule("aten.searchsorted.Tensor")
def searchsorted(node: Node) -> Rule:
    """The sorted sequences are whole; the values that are looked up shard."""
    sequence, values = node.inputs[:2]
    factors = Factors()
    out = factors.dims(node.outs[0].shape)
    locked = set()

    def dims(value: Value) -> Dims:
        last = factors.new(value.shape[-1])
        locked.add(last)
        return (*(out[:-1] if len(value.shape) > 1 else ()), (last,))

    ins = [dims(sequence), out if len(values.shape) else ()] + [dims(v) for v in node.inputs[2:]]
    return Rule(factors.sizes, ins, [out], locked=locked)


@rule("aten.bucketize.Tensor")
def bucketize(node: Node) -> Rule:
    factors = Factors()
    out = factors.dims(node.inputs[0].shape)
    last = factors.new(node.inputs[1].shape[0])
    return Rule(factors.sizes, [out, ((last,),)], [out], locked={last})


@rule("aten.histc.default")
def histc(node: Node) -> Rule:
    """With given bounds the counts of the shards add up."""
    bins, low, high = argument(node, "bins"), argument(node, "min"), argument(node, "max")
    factors = Factors()
    src = factors.dims(node.inputs[0].shape)
    own = {f for (f,) in src}
    count = factors.new(bins)
    bounded = low < high
    return Rule(
        factors.sizes,
        [src],
        [((count,),)],
        reduce=dict.fromkeys(own, "sum") if bounded else {},
        locked={count} | (set() if bounded else own),
        local=local_or_empty,
    )


@rule(
    "aten.median.default",
    "aten.nanmedian.default",
    "aten.hash_tensor.default",
    "aten.put.default",
    "aten.masked_scatter.default",
    "aten.masked_scatter_backward.default",
    "aten.nonzero_static.default",
    "aten._pdist_forward.default",
    "aten._pdist_backward.default",
    "aten.segment_reduce.default",
    "aten._segment_reduce_backward.default",
    "aten.histogram.bin_ct",
    "aten.histogram.bins_tensor",
    "aten._embedding_bag.default",
    "aten._embedding_bag_forward_only.default",
    "aten._histogramdd_bin_edges.default",
    "aten._histogramdd_from_bin_cts.default",
    "aten._histogramdd_from_bin_tensors.default",
    "aten._ctc_loss.default",
    "aten._ctc_loss.Tensor",
    "aten._ctc_loss_backward.default",
    "aten._ctc_loss_backward.Tensor",
    "aten._embedding_bag_backward.default",
    "aten._embedding_bag_dense_backward.default",
    "aten._embedding_bag_per_sample_weights_backward.default",
)
def whole(node: Node) -> Rule:
    """Every operand is gathered: each result needs all of it."""
    factors = Factors()
    ins = [tuple((factors.new(s),) for s in v.shape) for v in node.inputs]
    outs = [tuple((factors.new(s),) for s in v.shape) for v in node.outs]
    return Rule(factors.sizes, ins, outs, locked=set(range(len(factors.sizes))))
