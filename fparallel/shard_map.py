"""`shard_map`: a function written for the shards of one rank, with its own collectives."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fparallel import random, tree
from fparallel.array import Array
from fparallel.errors import ShardingError, TraceError
from fparallel.mesh import Mesh
from fparallel.ranked import run_reference
from fparallel.recorder import current_recorder
from fparallel.region import ShardMapCall, current_region
from fparallel.shard_specs import Dims, check_spec, local_shape
from fparallel.sharding import PartitionSpec


def shard_map(
    f: Callable | None = None, *, mesh: Mesh, in_specs: Any, out_specs: Any, check_vma: bool = True
) -> Callable:
    """Makes of a function on one rank's shards a function on whole tensors; collectives in it are `fp.lax`.

    The escape hatch for communication that is written by hand. Under `fp.jit` the function is traced once, for the
    shapes of a shard, and every rank runs it; un-jitted, all ranks run in this process, op by op, with the same result.
    The gradient is that of the function on whole tensors. Blocks and sharding constraints inside it have no effect.

    Args:
      f: from trees of tensors to a tree of tensors. It may close over tensors, which are whole on every rank.
      mesh: whose axes the specs and collectives name; under `fp.jit` the mesh of the step.
      in_specs: a spec `fp.P(...)` for all arguments, or one tree per argument, a prefix of it: how each tensor is cut.
        Where no axis is named, every rank gets the whole. Shards must be even.
      out_specs: a prefix of the result: how the ranks' results make up the whole. Over an axis that is not named, all
        ranks must have the same.
      check_vma: refuse a result that may differ between ranks over an axis that out_specs do not name. What is known:
        psum and all_gather make equal values, every other op keeps the axes over which its operands differ. Values
        that are equal for another reason (a ring of ppermutes) need False; then the first rank's value is taken.

    Raises:
      ShardingError: a spec does not fit its tensor or the mesh, shards are uneven, or a result may differ.
      TraceError: shard_map inside shard_map.

    >>> import fparallel as fp
    >>> mesh = fp.make_mesh((2,), ("tp",), kind="simulated")
    >>> row_parallel = fp.shard_map(
    ...     lambda x, w: fp.lax.psum(x @ w, "tp"),
    ...     mesh=mesh, in_specs=(fp.P(None, "tp"), fp.P("tp")), out_specs=fp.P(),
    ... )
    >>> row_parallel(torch.ones(1, 4), torch.ones(4, 2))
    tensor([[4., 4.]])
    """
    if f is None:
        return functools.partial(
            shard_map, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
        )

    @functools.wraps(f)
    def mapped(*args: Any) -> Any:
        return _Mapped(f, mesh, in_specs, out_specs, check_vma).run(args)

    return mapped


class _Mapped:
    """One call of a function under shard_map."""

    def __init__(self, f: Callable, mesh: Mesh, in_specs: Any, out_specs: Any, check: bool) -> None:
        self.f, self.mesh, self.check = f, mesh, check
        self.name = str(getattr(f, "__name__", "the function")).strip("<>")
        self.in_specs, self.out_specs = in_specs, out_specs
        self.out_dims: list[Dims] = []
        self.out_treedef: Any = None
        outer = current_region()
        if outer is not None:
            raise TraceError(
                f"fp.shard_map of {self.name} inside fp.shard_map of {outer.name}",
                fix="use one fp.shard_map over all axes, and name in each collective those that it is over",
            )

    def run(self, args: tuple) -> Any:
        paths, leaves, treedef = tree.flatten_with_path(args)
        specs = self._in_specs(args)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        xs = [leaves[i] for i in places]
        dims = []
        for i in places:
            where = f"argument {paths[i]} of {self.name}"
            dims.append(check_spec(specs[i], leaves[i].shape, self.mesh, where))
            local_shape(leaves[i].shape, dims[-1], self.mesh, where)
        for path, leaf in zip(paths, leaves, strict=True):
            if isinstance(leaf, Array):
                raise TraceError(
                    f"argument {path} of {self.name} is an fp.Array, and nothing is being jitted",
                    fix="call it in a function under fp.jit, or pass fp.device_get(array)",
                )

        scope = (
            random.block_scope()
        )  # draws of the enclosing fp.random.use are made with its key, alike on all ranks
        if scope is not None:
            xs.append(scope)
            dims.append(((),))

        def body(shards: list[Tensor]) -> list[Tensor]:
            filled = list(leaves)
            for i, shard in zip(places, shards, strict=False):
                filled[i] = shard
            with contextlib.nullcontext() if scope is None else random.use(shards[-1]):
                return self._results(self.f(*tree.unflatten(treedef, filled)))

        call = ShardMapCall(self.name, self.mesh, body, dims, lambda: self.out_dims, self.check)
        recorder = current_recorder()
        outs = run_reference(call, xs) if recorder is None else recorder.shard_map(call, xs)
        return tree.unflatten(self.out_treedef, outs)

    def _in_specs(self, args: tuple) -> list[Any]:
        specs = self.in_specs
        if specs is None or isinstance(specs, PartitionSpec):
            specs = (specs,) * len(args)
        if not isinstance(specs, (tuple, list)) or len(specs) != len(args):
            count = len(specs) if isinstance(specs, (tuple, list)) else 1
            raise ShardingError(
                f"in_specs has {count} entries, {self.name} was called with {len(args)} arguments",
                fix="give one entry per argument, or one fp.P for all",
            )
        return [
            spec or PartitionSpec()
            for entry, arg in zip(specs, args, strict=True)
            for spec in tree.match_prefix(entry, arg, is_leaf=_is_spec)
        ]

    def _results(self, out: Any) -> list[Tensor]:
        paths, leaves, self.out_treedef = tree.flatten_with_path(out)
        specs = tree.match_prefix(self.out_specs, out, is_leaf=_is_spec)
        self.out_dims, tensors = [], []
        for path, leaf, spec in zip(paths, leaves, specs, strict=True):
            if isinstance(leaf, (bool, int, float)):
                leaf = torch.tensor(leaf)
            if not isinstance(leaf, Tensor):
                raise TraceError(
                    f"{self.name} returned {type(leaf).__name__} at {path or 'its result'}, expected a tensor",
                    fix="return trees of tensors from a function under fp.shard_map",
                )
            where = f"the result {path} of {self.name}" if path else f"the result of {self.name}"
            self.out_dims.append(check_spec(spec or PartitionSpec(), leaf.shape, self.mesh, where))
            tensors.append(leaf)
        return tensors


def _is_spec(x: Any) -> bool:
    return x is None or isinstance(x, PartitionSpec)
