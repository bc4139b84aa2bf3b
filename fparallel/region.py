"""What runs under `fp.shard_map`: the region that a function for one rank's shards is in, and its linear collectives.

A region gives meaning to the functions of `fp.lax`. There are two: `ranked.py` holds the shards of all ranks at once
(the reference), `compiler/shard_maps.py` traces the function for one rank.
"""

from __future__ import annotations

import abc
import contextlib
import contextvars
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fparallel.compiler.sources import user_line, variable_of
from fparallel.errors import MeshError, ShardingError, TraceError, did_you_mean
from fparallel.mesh import Mesh
from fparallel.shard_specs import Axes, Dims, axes_in

PSUM, PVARY, MASK, ANY_ONE = "psum", "pvary", "mask", "any_one"
ALL_GATHER, PSUM_SCATTER = "all_gather", "psum_scatter"
PPERMUTE, ALL_TO_ALL = "ppermute", "all_to_all"
NOWHERE: Axes = frozenset()


@dataclass(frozen=True)
class ShardMapCall:
    """One call of a function under `fp.shard_map`, on flat tensors.

    Attributes:
      body: from the shards of one rank to flat results for one rank.
      in_dims: per tensor and dim the axes that shard it.
      out_dims: after a call of the body, the same for its results.
      check: whether a result that may differ between ranks must not be called replicated.
    """

    name: str
    mesh: Mesh
    body: Callable[[list[Tensor]], list[Tensor]]
    in_dims: list[Dims]
    out_dims: Callable[[], list[Dims]]
    check: bool


@dataclass(frozen=True)
class Step:
    """A linear collective of one tensor over mesh axes.

    | kind | a rank's result | params |
    |---|---|---|
    | psum | the sum of the members' tensors | |
    | all_gather | their concatenation along `dim` | size, dim |
    | psum_scatter | its part along `dim` of their sum | size, dim |
    | all_to_all | its parts along `split` of all, concatenated along `concat` | size, split, concat |
    | ppermute | what member `sources[me]` has; zeros if that is -1 | sources |
    | pvary | the same, said to differ between ranks | |
    | mask | the same on the first member, zeros elsewhere | |
    | any_one | the same, said to be equal on all ranks | |
    """

    kind: str
    axes: tuple[str, ...]
    params: tuple[int, ...] = ()

    @property
    def transpose(self) -> tuple[Step, ...]:
        """The steps from the cotangent of the result to that of the operand."""
        if self.kind == PSUM:
            return (Step(PVARY, self.axes),)
        if self.kind == PVARY:
            return (Step(PSUM, self.axes),)
        if self.kind == ANY_ONE:
            return (Step(PVARY, self.axes), Step(MASK, self.axes))
        return (self._moved_back(),)

    def _moved_back(self) -> Step:
        if self.kind == ALL_GATHER:
            return Step(PSUM_SCATTER, self.axes, self.params)
        if self.kind == PSUM_SCATTER:
            return Step(ALL_GATHER, self.axes, self.params)
        if self.kind == ALL_TO_ALL:
            size, split, concat = self.params
            return Step(ALL_TO_ALL, self.axes, (size, concat, split))
        if self.kind == PPERMUTE:
            sources = [-1] * len(self.params)
            for to, source in enumerate(self.params):
                if source >= 0:
                    sources[source] = to
            return Step(PPERMUTE, self.axes, tuple(sources))
        assert self.kind == MASK, self.kind
        return self

    def varying(self, varies: Axes, differs: Axes) -> tuple[Axes, Axes]:
        """`Region.varying` of the result, from that of the operand."""
        if self.kind in (PSUM, ANY_ONE):
            return varies.difference(self.axes), differs.difference(self.axes)
        if self.kind == PVARY:
            return varies.union(self.axes), differs
        if self.kind == ALL_GATHER:
            return varies.union(self.axes), differs.difference(self.axes)
        return varies.union(self.axes), differs.union(self.axes)

    def shape(self, shape: Sequence[int]) -> list[int]:
        """The shape of the result, from that of the operand."""
        made = list(shape)
        if self.kind == ALL_GATHER:
            made[self.params[1]] *= self.params[0]
        elif self.kind == PSUM_SCATTER:
            made[self.params[1]] //= self.params[0]
        elif self.kind == ALL_TO_ALL:
            size, split, concat = self.params
            made[split] //= size
            made[concat] *= size
        return made


class Region(abc.ABC):
    """Where a function under `fp.shard_map` runs.

    It knows of every tensor over which axes it varies: over which it counts as different, which decides where
    cotangents are summed over ranks (JAX's varying manual axes). Where a tensor that is equal on all ranks of an axis
    meets one that varies over it, a `pvary` is put before the op; its transpose is the psum of the cotangents. So
    gradients are those of the function on whole tensors, and no other sum is needed.
    """

    def __init__(self, name: str, mesh: Mesh) -> None:
        self.name = name
        self.mesh = mesh
        self.varied: dict[Any, tuple[Tensor, Tensor]] = {}

    def size(self, axes: Sequence[str]) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def ordered(self, axes: Iterable[str]) -> tuple[str, ...]:
        held = set(axes)
        return tuple(name for name in self.mesh.names if name in held)

    @abc.abstractmethod
    def varying(self, x: Tensor) -> tuple[Axes, Axes]:
        """Over which axes a tensor varies, and over which it may really differ.

        The result of an all_gather varies, but does not differ.
        """

    @abc.abstractmethod
    def own(self, x: Tensor) -> Tensor:
        """The tensor, or what stands here for one from outside that is differentiated."""

    @abc.abstractmethod
    def lift(self, x: Tensor) -> Tensor:
        """The tensor, or what stands here for one from outside."""

    @abc.abstractmethod
    def axis_index(self, axes: tuple[str, ...]) -> Tensor:
        """The 0-d int64 position of the rank along the axes, the last one fastest."""

    def enter(self, x: Tensor, axes: Iterable[str]) -> Tensor:
        """The tensor as one that varies over (at least) these axes."""
        x = self.lift(x)
        missing = self.ordered(NOWHERE.union(axes) - self.varying(x)[0])
        if not missing:
            return x
        key = (id(x), x._version, missing)
        if (
            key not in self.varied
        ):  # shared, so that its cotangents are added up before they are summed over ranks
            self.varied[key] = x, Collective.apply(x, Step(PVARY, missing), self)
        return self.varied[key][1]

    def leave(self, call: ShardMapCall, outs: list[Tensor]) -> list[Tensor]:
        """The results, varying over exactly the axes that their specs name."""
        results = []
        for i, (out, dims) in enumerate(zip(map(self.lift, outs), call.out_dims(), strict=True)):
            named, (varies, differs) = axes_in(dims), self.varying(out)
            over = [axis for axis in self.ordered(differs - named) if self.mesh.shape[axis] > 1]
            if over and call.check:
                raise ShardingError(
                    f"result {i} of {call.name} may differ between the ranks along {', '.join(over)}, which its "
                    "out_spec does not name",
                    fix="name the axis in out_specs, reduce it with fp.lax.psum or pmean, or say check_vma=False if it "
                    "is equal on all ranks",
                    where=user_line(),
                )
            claimed = self.ordered(varies - named)
            if claimed and out.requires_grad:
                out = Collective.apply(out, Step(ANY_ONE, claimed), self)
            results.append(self.enter(out, named) if out.requires_grad else out)
        return results

    def check_cotangent(self, grad: Tensor, allowed: Iterable[str], what: str) -> None:
        """A cotangent of what is equal on all ranks must not vary: it would be one rank's term of a sum.

        Raises:
          TraceError: it does.
        """
        over = self.ordered(self.varying(grad)[0].difference(allowed))
        if over:
            raise TraceError(
                f"in {self.name}, the gradient of {what} that is equal along {', '.join(over)} differs along it: an "
                "autograd.Function was given it together with a tensor that varies",
                fix=f"pass fp.lax.pvary(x, {over[0]!r}) to the autograd.Function instead",
            )


class Meeting(TorchFunctionMode):
    """Puts a pvary before every op whose operands vary over different axes, where one is differentiated."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self.region = region

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DIFFERENTIATE:
            return func(*args, **kwargs)
        args, kwargs = map_tensors(self.region.own, (args, kwargs))
        tensors: list[Tensor] = []
        map_tensors(lambda x: tensors.append(x) or x, (args, kwargs))  # type: ignore[func-returns-value]
        if len(tensors) > 1 and torch.is_grad_enabled():
            axes = NOWHERE.union(*(self.region.varying(x)[0] for x in tensors))
            if axes:
                self._refuse_write(func, args, axes)
                args, kwargs = map_tensors(lambda x: self._meet(x, axes), (args, kwargs))
        return self.made(func(*args, **kwargs))

    def made(self, out: Any) -> Any:
        return out

    def _meet(self, x: Tensor, axes: Axes) -> Tensor:
        return self.region.enter(x, axes) if x.requires_grad else x

    def _refuse_write(self, func: Any, args: tuple, axes: Axes) -> None:
        name = getattr(func, "__name__", "")
        writes = name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and name[:2] != "__")
        if writes and isinstance(args[0], Tensor) and args[0].requires_grad:
            missing = self.region.ordered(axes - self.region.varying(args[0])[0])
            if missing:
                raise TraceError(
                    f"{name} writes a tensor that varies over {', '.join(missing)} into {variable_of(args[0])}, which "
                    "does not",
                    fix=f"say that it varies before: x = fp.lax.pvary(x, {missing[0]!r})",
                    where=user_line(),
                )


_DIFFERENTIATE = {torch.autograd.grad, torch.autograd.backward, Tensor.backward}


def map_tensors(f: Callable[[Tensor], Tensor], nest: Any) -> Any:
    if isinstance(nest, Tensor):
        return f(nest)
    if type(nest) is dict:
        return {key: map_tensors(f, item) for key, item in nest.items()}
    if isinstance(nest, (list, tuple)):
        made = [map_tensors(f, item) for item in nest]
        return type(nest)(*made) if hasattr(nest, "_fields") else type(nest)(made)
    return nest


_region: contextvars.ContextVar[Region | None] = contextvars.ContextVar("fparallel_region", default=None)


def current_region() -> Region | None:
    return _region.get()


@contextlib.contextmanager
def entered(region: Region | None) -> Iterator[None]:
    """Makes `region` the current one."""
    token = _region.set(region)
    try:
        yield
    finally:
        _region.reset(token)


def axes_of(what: str, axis_name: Any) -> tuple[Region, tuple[str, ...]]:
    """The region and the mesh axes that `fp.lax.<what>(..., axis_name)` speaks of.

    Raises:
      TraceError: outside of `fp.shard_map`.
      MeshError: the mesh has no such axis, or an axis is named twice.
    """
    region = current_region()
    if region is None:
        raise TraceError(
            f"fp.lax.{what} over {axis_name!r} outside of fp.shard_map, where no mesh axis has a meaning",
            fix="call it in a function under fp.shard_map(f, mesh=..., in_specs=..., out_specs=...)",
        )
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    for axis in axes:
        if axis not in region.mesh.names:
            raise MeshError(
                f"fp.lax.{what} over {axis!r} in {region.name}: the mesh {region.mesh} has no such axis",
                fix=f"use one of its axes; {did_you_mean(str(axis), region.mesh.names)}",
            )
    if not axes or len(set(axes)) != len(axes):
        raise MeshError(
            f"fp.lax.{what} over {axis_name!r} in {region.name}", fix="name each of one or more axes once"
        )
    return region, axes


# ---------------------------------------------------------------- collectives in autograd


class Collective(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, step: Step, region: Region) -> Tensor:
        return torch.ops.fparallel.collective(x, step.kind, list(step.axes), list(step.params))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, ctx.step, ctx.region = inputs
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
        if grad is not None:
            grad = ctx.region.lift(grad)
            if ctx.step.kind in (PSUM, ANY_ONE):
                allowed = set(ctx.region.mesh.names).difference(ctx.step.axes)
                ctx.region.check_cotangent(grad, allowed, f"the result of a {ctx.step.kind}")
            for step in ctx.step.transpose:
                grad = Collective.apply(grad, step, ctx.region)
        return grad, None, None


def run_step(region: Region, step: Step, x: Tensor) -> Tensor:
    """The result of a collective, differentiable."""
    return Collective.apply(region.enter(x, step.axes), step, region)


def _refuse(*args: Any) -> Any:
    raise AssertionError("this operator only runs under fp.shard_map")


def _collective_fake(x: Tensor, kind: str, axes: list[str], params: list[int]) -> Tensor:
    return x.new_empty(Step(kind, tuple(axes), tuple(params)).shape(x.shape))


_library = torch.library.Library("fparallel", "FRAGMENT")
_library.define("collective(Tensor x, str kind, str[] axes, int[] params) -> Tensor")
_library.define("axis_index(str[] axes, str device) -> Tensor")
_library.impl("collective", _refuse, "CompositeExplicitAutograd")
_library.impl("axis_index", _refuse, "CompositeExplicitAutograd")
torch.library.register_fake("fparallel::collective", _collective_fake, lib=_library)
torch.library.register_fake(
    "fparallel::axis_index",
    lambda axes, device: torch.empty((), dtype=torch.int64, device=device),
    lib=_library,
)
