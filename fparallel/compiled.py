"""A lowered step bound to the ranks of its mesh: takes arguments to where the step wants them, and runs it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fparallel import tree
from fparallel.arguments import Arguments
from fparallel.array import Array, ShapeDtypeStruct, move, put
from fparallel.errors import ExecutionError, ShardingError
from fparallel.layout import same, typed
from fparallel.rules import LeafPlan
from fparallel.runtime.run import Runner
from fparallel.sharding import sharding_of

if TYPE_CHECKING:
    from fparallel.api import Lowered


class Compiled:
    """A step bound to its ranks."""

    def __init__(self, lowered: Lowered, transport: Any = None, check: bool = False) -> None:
        self.lowered = lowered
        jitted = lowered.jitted
        self.runner = Runner(
            lowered.schedule,
            lowered.program.constants,
            compile=jitted.compile,
            transport=transport,
            check=check,
        )
        self.calls = 0

    @property
    def shardings(self) -> tuple[Any, Any]:
        """The shardings of the arguments (by path) and of the outputs (as their tree)."""
        low = self.lowered
        mesh = low.jitted.mesh
        ins = {plan.path: sharding_of(plan.storage, mesh) for plan in low.plans}
        outs = [sharding_of(layout, mesh) for layout in low.program.out_layouts]
        return ins, tree.unflatten(low.traced.out_treedef, outs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.lowered.jitted.binder.bind(args, kwargs))

    def run(self, arguments: Arguments) -> Any:
        low = self.lowered
        mesh = low.jitted.mesh
        self.runner.check_equal_on_ranks(arguments.paths, arguments.leaves, always=low.jitted.strict)
        shards: list[list[Tensor | None]] = [[] for _ in self.runner.ranks]
        nan: list[str] = []
        for plan, leaf, donated in zip(low.plans, arguments.leaves, low.donated, strict=True):
            held = self._place(plan, leaf, donated)
            for position, rank in enumerate(self.runner.ranks):
                if low.holds(rank, plan.home):
                    shards[position].append(held[rank])
            if self.calls == 0 and any(map(_has_nan, held.values())):
                nan.append(plan.path)
        outs = [iter(results) for results in self.runner(shards)]
        arrays: list[Any] = []
        for layout, home, (_, dtype) in zip(
            low.program.out_layouts, low.program.out_homes, low.traced.out_avals, strict=True
        ):
            parts = {
                rank: next(outs[position])
                for position, rank in enumerate(self.runner.ranks)
                if low.holds(rank, home)
            }
            arrays.append(
                Array(mesh, layout, dtype, parts, low.role(home))
                if low.jitted.distributed
                else parts[self.runner.ranks[0]]
            )
        if self.calls == 0:
            self._check_finite(arrays, nan)
        self.calls += 1
        return tree.unflatten(low.traced.out_treedef, arrays)

    def _place(self, plan: LeafPlan, leaf: Any, donated: bool) -> dict[int, Tensor]:
        mesh = self.lowered.jitted.mesh
        if isinstance(leaf, ShapeDtypeStruct):
            raise ExecutionError(
                f"{plan.path} is a ShapeDtypeStruct", fix="lower with shapes, run with arrays"
            )
        if not isinstance(leaf, Array):
            if (
                not donated
                and not plan.storage.sharded_axes
                and str(leaf.device) == mesh.device
                and leaf.is_contiguous()
            ):
                held = [rank for rank in self.runner.ranks if self.lowered.holds(rank, plan.home)]
                return dict.fromkeys(held, leaf)
            return put(leaf, mesh, plan.storage, self.lowered.role(plan.home)).shards
        if leaf.mesh != mesh:
            raise ShardingError(
                f"{plan.path} lies on the mesh {leaf.mesh}, the step runs on {mesh}",
                fix="use one mesh, or move the array with fp.device_put",
            )
        if not same(leaf.layout, plan.storage):
            raise ShardingError(
                f"{plan.path} arrives as {leaf.text}, the step expects {typed(plan.dtype, plan.storage)}",
                fix="make it with a function under the same rules, or move it with fp.device_put",
            )
        if leaf.home != plan.home:
            assert self.lowered.staging is not None
            moved = move(leaf, self.lowered.staging.axis, plan.home)
            if donated:
                leaf.take()
            return moved
        return leaf.take() if donated else leaf.shards

    def _check_finite(self, arrays: Sequence[Any], nan: Sequence[str]) -> None:
        """The first call names what is not finite, instead of training on it."""
        seen = f"; NaN came in with {', '.join(nan[:4])}{', ...' if len(nan) > 4 else ''}" if nan else ""
        paths = self.lowered.traced.out_paths
        for path, leaf in zip(paths, arrays, strict=True):
            if leaf.dtype.is_floating_point and tuple(leaf.shape) == ():
                value = float(leaf)
                if math.isnan(value):
                    raise ExecutionError(
                        f"the first call of {self.lowered.jitted.name} returned NaN at {path or 'its result'}{seen}",
                        fix="give arguments without NaN"
                        if nan
                        else "look for a 0/0, inf - inf, the log of a negative number; lower the learning rate",
                    )


def _has_nan(x: Tensor | None) -> bool:
    return x is not None and x.dtype.is_floating_point and bool(x.isnan().any())
