"""The reference meaning of `fp.shard_map`: the shards of all ranks at once, op by op, in one process.

A `Ranked` tensor holds one tensor per rank of the mesh and runs every op on each. Autograd sees one tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fparallel import tree
from fparallel._compat import FakeTensor, correct_aliasing, unwrapped, without_functorch
from fparallel.errors import ShardingError, TraceError
from fparallel.mesh import Mesh
from fparallel.region import (
    ALL_GATHER,
    ALL_TO_ALL,
    ANY_ONE,
    MASK,
    NOWHERE,
    PPERMUTE,
    PSUM,
    PSUM_SCATTER,
    PVARY,
    Meeting,
    Region,
    ShardMapCall,
    Step,
    entered,
    map_tensors,
)
from fparallel.shard_specs import Axes, Dims, axes_in, global_shape, local_shape


@dataclass
class _Varying:
    """`Region.varying` of a tensor and of all that share its memory."""

    varies: Axes = NOWHERE
    differs: Axes = NOWHERE


class Ranked(Tensor):
    """A tensor of each rank of a mesh, all of one shape."""

    parts: list[Tensor]
    mesh: Mesh
    axes: _Varying

    @staticmethod
    def __new__(cls, parts: list[Tensor], mesh: Mesh, axes: _Varying) -> Ranked:
        like = parts[0]
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            like.shape,
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device=like.device,
        )
        made.parts, made.mesh, made.axes = parts, mesh, axes
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"Ranked({self.parts})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func is torch.ops.fparallel.collective.default:
            x, kind, names, params = args
            step = Step(kind, tuple(names), tuple(params))
            axes = _Varying(*step.varying(x.axes.varies, x.axes.differs))
            return Ranked(_collective(step, [part.contiguous() for part in x.parts], x.mesh), x.mesh, axes)
        given = [x for x in tree.leaves((args, kwargs)) if isinstance(x, Ranked)]
        mesh = given[0].mesh
        axes = _Varying(
            *(NOWHERE.union(*s) for s in zip(*((x.axes.varies, x.axes.differs) for x in given), strict=True))
        )
        shared = _memory_of(func, args, axes)

        def of(rank: int, nest: Any) -> Any:
            return tree.map(lambda x: x.parts[rank] if isinstance(x, Ranked) else x, nest)

        outs = [func(*of(rank, list(args)), **of(rank, kwargs)) for rank in range(mesh.size)]
        return correct_aliasing(func, args, kwargs, _together(func, outs, mesh, shared or axes))


def _together(func: Any, outs: list[Any], mesh: Mesh, axes: _Varying) -> Any:
    first = outs[0]
    if isinstance(first, Tensor):
        return Ranked(outs, mesh, axes)
    if isinstance(first, (list, tuple)):
        return type(first)(_together(func, list(column), mesh, axes) for column in zip(*outs, strict=True))
    if any(out != first and not (out != out and first != first) for out in outs):
        raise TraceError(
            f"{func} reads a value that differs between ranks: {', '.join(map(str, outs[:8]))}",
            fix="keep the value a tensor: use torch.where instead of `if`",
        )
    return first


def _memory_of(func: Any, args: Sequence[Any], axes: _Varying) -> _Varying | None:
    """The `axes` of the operand whose memory the result shares, if any; what is written varies as all operands do."""
    shared = None
    for arg, spec in zip(args, func._schema.arguments, strict=False):
        if not isinstance(arg, Tensor) or spec.alias_info is None:
            continue
        if not isinstance(arg, Ranked):
            if not spec.alias_info.is_write:
                continue
            raise TraceError(
                f"{func} writes into a tensor that the function under fp.shard_map closes over",
                fix="compute a new tensor and return it",
            )
        if spec.alias_info.is_write:
            arg.axes.varies, arg.axes.differs = axes.varies, axes.differs
        shared = arg.axes
    return shared


def _collective(step: Step, parts: list[Tensor], mesh: Mesh) -> list[Tensor]:
    """The results of all ranks, in memory of their own."""
    along = tuple(mesh.axis(name) for name in step.axes)
    made = []
    for coords in mesh.rank_coords:
        rank, group = mesh.rank(coords), mesh.group(along, coords)
        me = group.index(rank)
        if step.kind in (PSUM, PSUM_SCATTER):
            total = parts[min(group)].clone()
            for other in sorted(group)[1:]:
                total = total + parts[other]
            if step.kind == PSUM_SCATTER:
                size, dim = step.params
                total = total.chunk(size, dim)[me].clone()
            made.append(total)
        elif step.kind == ALL_GATHER:
            made.append(torch.cat([parts[other] for other in group], step.params[1]))
        elif step.kind == ALL_TO_ALL:
            size, split, concat = step.params
            made.append(torch.cat([parts[other].chunk(size, split)[me] for other in group], concat))
        elif step.kind == PPERMUTE:
            source = step.params[me]
            made.append(torch.zeros_like(parts[rank]) if source < 0 else parts[group[source]].clone())
        else:
            assert step.kind in (PVARY, ANY_ONE, MASK), step.kind
            keep = step.kind != MASK or me == 0
            made.append(parts[rank].clone() if keep else torch.zeros_like(parts[rank]))
    return made


class ReferenceRegion(Region):
    """All ranks of the mesh in this process, on real tensors."""

    def __init__(self, name: str, mesh: Mesh, device: torch.device | str) -> None:
        super().__init__(name, mesh)
        self.device = device
        self.lifted: dict[int, tuple[Tensor, Tensor]] = {}  # what is differentiated, and what stands for it

    def varying(self, x: Tensor) -> tuple[Axes, Axes]:
        x = unwrapped(x)
        return (x.axes.varies, x.axes.differs) if isinstance(x, Ranked) else (NOWHERE, NOWHERE)

    def own(self, x: Tensor) -> Tensor:
        return self.lift(x) if x.requires_grad else x

    def lift(self, x: Tensor) -> Tensor:
        if isinstance(unwrapped(x), Ranked):
            return x
        if not x.requires_grad:
            return self.split(x)
        if id(x) not in self.lifted:
            self.lifted[id(x)] = x, self.split(x)
        return self.lifted[id(x)][1]

    def split(self, x: Tensor, dims: Dims | None = None) -> Tensor:
        with torch._C.DisableTorchFunction():
            return _Place.apply(
                x, _Placing(_SPLIT, ((),) * x.dim() if dims is None else dims, self, self.name)
            )

    def axis_index(self, axes: tuple[str, ...]) -> Tensor:
        along = tuple(self.mesh.axis(name) for name in axes)
        groups = (self.mesh.group(along, coords) for coords in self.mesh.rank_coords)
        positions = [group.index(rank) for rank, group in enumerate(groups)]
        with torch._C.DisableTorchFunction(), without_functorch():
            parts = [torch.tensor(at, device=self.device) for at in positions]
            return Ranked(parts, self.mesh, _Varying(frozenset(axes), frozenset(axes)))


class _Lifting(Meeting):
    """Also gives every rank its own copy of each tensor that the function makes."""

    def made(self, out: Any) -> Any:
        return map_tensors(self.region.lift, out)


# ---------------------------------------------------------------- into and out of the ranks

_SPLIT, _JOIN = "split", "join"


@dataclass(frozen=True)
class _Placing:
    """How a global tensor and one of each rank belong together.

    "split" gives each rank its shard, "join" takes each shard from the first of the ranks that hold it. Each is the
    transpose of the other, for what is equal on the ranks that hold a shard.
    """

    kind: str
    dims: Dims
    region: ReferenceRegion
    where: str

    @property
    def mesh(self) -> Mesh:
        return self.region.mesh

    def part(self, shape: Sequence[int], coords: dict[str, int]) -> tuple[slice, ...]:
        """Where the shard of a rank lies, of this shape."""
        found = []
        for size, names in zip(shape, self.dims, strict=True):
            at = 0
            for name in names:
                at = at * self.mesh.shape[name] + coords[name]
            found.append(slice(at * size, (at + 1) * size))
        return tuple(found)

    def first(self, coords: dict[str, int]) -> dict[str, int]:
        """The first rank that holds the same shard."""
        named = axes_in(self.dims)
        return {name: at if name in named else 0 for name, at in coords.items()}


class _Place(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, how: _Placing) -> Tensor:
        coords, named = how.mesh.rank_coords, axes_in(how.dims)
        if how.kind == _SPLIT:
            shape = local_shape(x.shape, how.dims, how.mesh, how.where)
            parts = [x[how.part(shape, at)].clone(memory_format=torch.contiguous_format) for at in coords]
            return Ranked(parts, how.mesh, _Varying(named, named))
        held = x.parts if isinstance(x, Ranked) else [x] * how.mesh.size
        _check_equal(held, how)
        whole = torch.empty(global_shape(x.shape, how.dims, how.mesh), dtype=x.dtype, device=x.device)
        for part, at in zip(held, coords, strict=True):
            if how.first(at) == at:
                whole[how.part(x.shape, at)] = part
        return whole

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.how = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        how: _Placing = ctx.how
        if how.kind == _SPLIT:
            how.region.check_cotangent(grad, axes_in(how.dims), "a tensor")
        kind = _JOIN if how.kind == _SPLIT else _SPLIT
        return _Place.apply(grad, _Placing(kind, how.dims, how.region, how.where)), None


def _check_equal(parts: Sequence[Tensor], how: _Placing) -> None:
    for rank, at in enumerate(how.mesh.rank_coords):
        first = how.mesh.rank(how.first(at))
        a, b = parts[first], parts[rank]
        if isinstance(a, FakeTensor) or first == rank:
            continue
        small = math.sqrt(torch.finfo(a.dtype).eps) if a.dtype.is_floating_point else 0.0
        if not torch.allclose(a, b, rtol=small, atol=small, equal_nan=True):
            axes = [name for name, index in how.first(at).items() if index != at[name]]
            raise ShardingError(
                f"{how.where} differs between ranks {first} and {rank}; its out_spec does not name {', '.join(axes)}",
                fix="name the axis in out_specs, or make the result equal with fp.lax.psum, pmean or all_gather",
            )


def run_reference(call: ShardMapCall, xs: Sequence[Tensor]) -> list[Tensor]:
    """The results of a call, with all ranks in this process."""
    region = ReferenceRegion(call.name, call.mesh, xs[0].device if xs else "cpu")
    given = [region.split(x, dims) for x, dims in zip(xs, call.in_dims, strict=True)]
    with entered(region), _Lifting(region):
        outs = region.leave(call, call.body(given))
    return [
        _Place.apply(out, _Placing(_JOIN, dims, region, f"result {i} of {call.name}"))
        for i, (out, dims) in enumerate(zip(outs, call.out_dims(), strict=True))
    ]
