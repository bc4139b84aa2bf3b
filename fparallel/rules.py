"""Rules: from logical axis names and globs over leaf paths to where every leaf of a tree lives, ZeRO included."""

from __future__ import annotations

import fnmatch
import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fparallel import tree
from fparallel.errors import ShardingError
from fparallel.factors import Factor
from fparallel.layout import Layout
from fparallel.logical import LogicalSpec, names_of
from fparallel.mesh import Axis, Mesh
from fparallel.sharding import PartitionSpec, check_axes_once, hint, named_axes, sharding_of, spec_layout


@dataclass(frozen=True)
class Zero:
    """ZeRO as storage layouts: from stage 1 the optimizer state, from 2 the gradients, from 3 the parameters."""

    stage: int
    axes: tuple[str, ...]
    min_elements: int = 0
    params: str = "params"
    opt_state: str = "opt_state"


@dataclass(frozen=True)
class Layer:
    """A layer of a list whose index, of the logical name `name`, lies on a pipeline axis.

    `length` is 0 where the leaf does not tell.
    """

    name: str
    axis: str
    list: str
    index: int
    length: int


@dataclass
class LeafPlan:
    """What rules decide for one leaf: how it rests, how it is computed with, where its gradient goes, and why.

    Attributes:
      reduced_early: its gradient is reduced over ranks for each micro-batch, not once for all.
      layer: the layer of a pipeline that it belongs to.
      home: the rank of the pipeline axis that it lies on; None for all.
      mirrors: the path of the parameter that an optimizer's leaf mirrors.
    """

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    storage: Layout
    compute: Layout
    gradient: Layout
    role: str = ""
    cause: str = "replicated: no rule names it"
    named: bool = False
    reduced_early: bool = False
    layer: Layer | None = None
    home: int | None = None
    mirrors: str = ""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def at(self, path: str) -> LeafPlan:
        """The same plan for a leaf at another path."""
        return LeafPlan(
            path,
            self.shape,
            self.dtype,
            self.storage,
            self.compute,
            self.gradient,
            self.role,
            self.cause,
            self.named,
            self.reduced_early,
            self.layer,
            self.home,
            self.mirrors,
        )


@dataclass(frozen=True)
class Rules:
    """Rules from logical axis names, and from globs over leaf paths, to mesh axes.

    `Rules(batch="dp", mlp="tp")` shards every dim named `batch` over dp and every dim named `mlp` over tp. Globs map
    a leaf to a `P` or to a string of logical names: `Rules({"q_proj.weight": P("tp", None)})`. A glob matches a
    dot-aligned suffix, or the whole, of a path; `*` crosses dots; the last match wins; a glob beats an annotation.
    `name=None` says replicate, and do not list.
    """

    globs: Mapping[str, PartitionSpec | str] = field(default_factory=dict)
    names: Mapping[str, str | tuple[str, ...] | None] = field(default_factory=dict)
    zero_options: Zero | None = None
    _layouts: dict[Any, Layout] = field(default_factory=dict, compare=False, repr=False)

    def __init__(
        self, globs: Mapping[str, PartitionSpec | str] | None = None, /, **names: str | tuple[str, ...] | None
    ) -> None:
        for pattern, value in (globs or {}).items():
            if not isinstance(value, (PartitionSpec, str)):
                raise ShardingError(
                    f"the glob {pattern!r} maps to {value!r}",
                    fix="map it to a P(...) or to a string of logical names",
                )
        for name, axes in names.items():
            parts = axes if isinstance(axes, tuple) else (axes,)
            if not all(p is None or isinstance(p, str) for p in parts):
                raise ShardingError(
                    f"the rule {name}={axes!r} names no mesh axis",
                    fix="use a string, a tuple of strings, or None",
                )
        object.__setattr__(self, "globs", dict(globs or {}))
        object.__setattr__(self, "names", dict(names))
        object.__setattr__(self, "zero_options", None)
        object.__setattr__(self, "_layouts", {})

    def __hash__(self) -> int:
        return hash((tuple(self.globs.items()), tuple(self.names.items()), self.zero_options))

    def zero(
        self,
        stage: int,
        *,
        axis: str | tuple[str, ...],
        min_elements: int = 0,
        params: str = "params",
        opt_state: str = "opt_state",
    ) -> Rules:
        """The same rules with ZeRO over mesh axes: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters.

        Args:
          min_elements: leaves with fewer elements stay as they are.
          params, opt_state: the path components under which parameters and optimizer state lie.
        """
        if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
            raise ShardingError(f"there is no ZeRO stage {stage!r}", fix="use 0, 1, 2 or 3")
        copy = Rules(self.globs, **self.names)
        axes = (axis,) if isinstance(axis, str) else tuple(axis)
        object.__setattr__(copy, "zero_options", Zero(stage, axes, min_elements, params, opt_state))
        return copy

    @property
    def opt_state_component(self) -> str:
        return (self.zero_options or Zero(0, ())).opt_state

    def shardings(self, value: Any, mesh: Mesh) -> Any:
        """How the rules shard every leaf of a tree at rest: a tree of shardings."""
        paths, leaves, treedef = tree.flatten_with_path(value)
        plans = self.plan(paths, leaves, tree.logical_specs(value), mesh)
        return tree.unflatten(treedef, [sharding_of(plan.storage, mesh) for plan in plans])

    # -------------------------------------------------------------- planning

    def check_names(self, mesh: Mesh, known: Iterable[str], *, has_activations: bool) -> None:
        """Every rule names axes of the mesh, and a logical name that occurs somewhere.

        Args:
          has_activations: whether the function names activations (it has constraints or takes a batch). One that does
            not, such as an initialiser, cannot know the names of activations: there only a likely misspelling is wrong.

        Raises:
          ShardingError: an unknown mesh axis or logical name.
        """
        known = set(known) | tree.known_logical_names() | {"batch"}
        for value in self.globs.values():
            if isinstance(value, str):
                known |= {name for dim in tree.parse_logical(value) for name, _ in dim if name}
        for name, axes in self.names.items():
            for axis in (axes,) if isinstance(axes, str) else axes or ():
                named_axes(axis, mesh, f"rule {name}={axes!r}")
            if name not in known and (has_activations or hint(name, known)):
                raise ShardingError(
                    f"the rule {name}={axes!r} names a logical axis that occurs in no annotation, constraint or glob",
                    fix=f"use a name that the model declares{hint(name, known)}",
                )
        if self.zero_options:
            for axis in self.zero_options.axes:
                _zero_axis(axis, self.zero_options, mesh)

    def logical_layout(self, spec: LogicalSpec, shape: Sequence[int], mesh: Mesh, path: str) -> Layout:
        """The layout of a tensor whose dims have logical names.

        A factor smaller than its axis, and dividing it, takes the major sub-axis and is replicated over the rest.
        """
        key = (spec.dims, tuple(shape), mesh)
        if key not in self._layouts:
            self._layouts[key] = self._logical_layout(spec, shape, mesh, path)
        return self._layouts[key]

    def _logical_layout(self, spec: LogicalSpec, shape: Sequence[int], mesh: Mesh, path: str) -> Layout:
        if not spec.fits(len(shape)):
            raise ShardingError(
                f"{path} has the logical axes '{spec}' but the shape {list(shape)}",
                fix="name every dim once (use _ for a dim without a name), or mend the tensor",
            )
        dims = []
        for size, factors in zip(shape, spec.for_ndim(len(shape)).dims, strict=True):
            dims.append(tuple(self._factor(*f, mesh, path) for f in _sized(factors, size, path)))
        layout = Layout.of(dims)
        check_axes_once(layout, path)
        return layout

    def _factor(self, name: str | None, size: int, mesh: Mesh, path: str) -> Factor:
        value = self.names.get(name) if name else None
        names = (value,) if isinstance(value, str) else value or ()
        whole = [a for n in names for a in named_axes(n, mesh, f"{path} ({name}={value!r})")]
        shards = math.prod(axis.size for axis in whole)
        if name == "batch" and size < shards:
            raise ShardingError(
                f"{path}: a batch of {size} over the {shards} ranks of {'*'.join(names)} "
                f"leaves {shards - size} without a row",
                fix=f"use a batch of at least {shards}, best a multiple of it, or shard it over fewer ranks",
            )
        axes: list[Axis] = []
        left = size
        for axis in whole:
            if 0 < left < axis.size and axis.size % left == 0:
                axis = Axis(axis.name, left, axis.pre, axis.total)
            axes.append(axis)
            left = -(-left // axis.size)
        return Factor(size, tuple(a for a in axes if a.size > 1))

    def _glob_for(self, path: str, used: set[str]) -> PartitionSpec | str | None:
        found = None
        for pattern, value in self.globs.items():
            if glob_matches(pattern, path):
                used.add(pattern)
                found = value
        return found

    def plan(
        self,
        paths: Sequence[str],
        leaves: Sequence[Any],
        specs: Sequence[LogicalSpec | None],
        mesh: Mesh,
        *,
        batch_paths: Iterable[str] = (),
        used_globs: set[str] | None = None,
    ) -> list[LeafPlan]:
        """The plan of every leaf (anything with shape and dtype); optimizer state takes the axes of what it mirrors."""
        used = set() if used_globs is None else used_globs
        batch = set(batch_paths)
        plans = []
        alike: dict[Any, LeafPlan] = {}  # leaves of one annotation, shape and glob lie alike
        lists = self._lists(paths, mesh, used)
        for path, leaf, spec in zip(paths, leaves, specs, strict=True):
            shape, dtype = tuple(leaf.shape), leaf.dtype
            glob = self._glob_for(path, used)
            key = (id(spec.dims) if spec is not None else None, id(glob), shape, dtype, path in batch)
            if key not in alike:
                alike[key] = self._leaf(path, shape, dtype, spec, glob, mesh, path in batch)
            plan = alike[key].at(path)
            if lists or (spec is not None and any(name in self.names for name, _, _ in spec.index_axes)):
                plan.layer = self._layer(path, spec, lists, mesh)
            plans.append(plan)
        zero = self.zero_options or Zero(0, ())
        params = {p.path.split(f"{zero.params}.", 1)[1]: p for p in plans if is_under(p.path, zero.params)}
        for plan in plans:
            if is_under(plan.path, zero.params):
                plan.role = "params"
            elif is_under(plan.path, zero.opt_state):
                plan.role = "opt_state"
                self._mirror(plan, params)
            self._apply_zero(plan, zero, mesh)
        return plans

    def _leaf(
        self,
        path: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        spec: LogicalSpec | None,
        glob: PartitionSpec | str | None,
        mesh: Mesh,
        batch: bool,
    ) -> LeafPlan:
        if isinstance(glob, PartitionSpec):
            layout, cause, named = spec_layout(glob, shape, mesh, path), f"glob {glob}", True
        elif isinstance(glob, str):
            logical = LogicalSpec(tree.parse_logical(glob))
            layout, cause, named = self.logical_layout(logical, shape, mesh, path), f"glob '{glob}'", True
        elif spec is not None and (spec.dims or not shape):
            layout = self.logical_layout(spec, shape, mesh, path)
            cause, named = (
                f"logical axes '{LogicalSpec(spec.dims)}'",
                not names_of(spec.dims).isdisjoint(self.names),
            )
        elif batch and shape and "batch" in self.names:
            batched = LogicalSpec(((("batch", None),), *(((None, None),) for _ in shape[1:])))
            layout, cause, named = (
                self.logical_layout(batched, shape, mesh, path),
                "leading dim of the batch",
                True,
            )
        else:
            layout, cause, named = Layout.replicated(shape), "replicated: no rule names it", False
        return LeafPlan(path, shape, dtype, layout, layout, layout, "", cause, named)

    def _layer(
        self, path: str, spec: LogicalSpec | None, lists: Mapping[str, tuple[str, str]], mesh: Mesh
    ) -> Layer | None:
        """The layer that a leaf belongs to, if a list on its way lies on a mesh axis of more than one rank."""
        parts = path.split(".")
        found: list[Layer] = []
        for name, index, length in spec.index_axes if spec is not None else ():
            axis = self._stage_axis(name, mesh, path)
            if axis is not None:
                at = parts.index(str(index))
                found.append(Layer(name, axis, ".".join(parts[:at]), index, length))
        for node, (name, on) in lists.items():
            if path.startswith(node + ".") and (number := path[len(node) + 1 :].split(".")[0]).isdigit():
                found.append(Layer(name, on, node, int(number), 0))
        if len({layer.list for layer in found}) > 1:
            raise ShardingError(
                f"{path} is in two lists that lie on a pipeline axis, {found[0].list} and {found[1].list}",
                fix="put the index of one of them on the axis",
            )
        return found[0] if found else None

    def _stage_axis(self, name: str, mesh: Mesh, path: str) -> str | None:
        """The mesh axis of the index of a list; None if it has one rank."""
        value = self.names.get(name)
        axes = (value,) if isinstance(value, str) else tuple(value or ())
        sized = [a for a in axes if named_axes(a, mesh, f"{path} ({name}={a!r})")[0].size > 1]
        if len(sized) > 1 or any(a not in mesh.names for a in sized):
            raise ShardingError(
                f"{path}: the rule {name}={value!r} puts the layers of a list on {len(axes)} axes",
                fix="layers lie on one whole mesh axis, the pipeline's",
            )
        return sized[0] if sized else None

    def _lists(self, paths: Sequence[str], mesh: Mesh, used: set[str]) -> dict[str, tuple[str, str]]:
        """The lists of layers that globs name, by path: the logical name and the mesh axis of the index."""
        if all(isinstance(value, PartitionSpec) for value in self.globs.values()):
            return {}
        nodes = {
            ".".join(parts[:i]) for path in paths for parts in [path.split(".")] for i in range(1, len(parts))
        }
        found: dict[str, tuple[str, str]] = {}
        for pattern, value in self.globs.items():
            named = [node for node in nodes if isinstance(value, str) and glob_matches(pattern, node)]
            for node in named:
                used.add(pattern)
                assert isinstance(value, str)
                axis = self._stage_axis(value, mesh, node)
                if axis is not None:
                    found[node] = value, axis
        return found

    @staticmethod
    def _mirror(plan: LeafPlan, params: Mapping[str, LeafPlan]) -> None:
        parts = plan.path.split(".")
        for i in range(len(parts)):
            twin = params.get(".".join(parts[i:]))
            if twin is not None and twin.shape == plan.shape:
                plan.storage = plan.compute = plan.gradient = twin.compute
                plan.cause, plan.named = f"mirrors {twin.path}", twin.named
                plan.layer, plan.mirrors = twin.layer, twin.path
                return

    @staticmethod
    def _apply_zero(plan: LeafPlan, zero: Zero, mesh: Mesh) -> None:
        least = {"params": 3, "opt_state": 1}.get(plan.role)
        if least is None or zero.stage == 0:
            return
        size = math.prod(plan.shape)
        if size == 0 or size < zero.min_elements or not plan.shape:
            return
        sharded = _zero_layout(plan.compute, zero, mesh)
        if sharded is plan.compute:
            return
        if zero.stage >= least:
            plan.storage = sharded
            plan.cause += f"; ZeRO-{zero.stage} over {'*'.join(zero.axes)}"
        if plan.role == "params":
            plan.gradient = sharded
            plan.reduced_early = zero.stage >= 2


@functools.lru_cache(maxsize=65536)
def _zero_axis(name: str, zero: Zero, mesh: Mesh) -> Axis:
    return named_axes(name, mesh, f"zero({zero.stage}, axis={name!r})")[0]


@functools.lru_cache(maxsize=65536)
def _zero_layout(compute: Layout, zero: Zero, mesh: Mesh) -> Layout:
    """A layout further sharded over what its ZeRO axes have left; itself if nothing is left."""
    free = [_free_digits(_zero_axis(name, zero, mesh), compute.sharded_axes) for name in zero.axes]
    axes = tuple(axis for digits in free for axis in digits)
    return add_axes(compute, axes) if axes else compute


def _free_digits(axis: Axis, used: Iterable[Axis]) -> tuple[Axis, ...]:
    """The digits of a mesh axis that no used (sub-)axis has: all of tp=4, or tp:(2)2 beside tp:(1)2."""
    free, pre = [], 1
    for other in sorted((a for a in used if a.name == axis.name), key=lambda a: a.pre):
        free.append(Axis(axis.name, other.pre // pre, pre, axis.total))
        pre = other.pre * other.size
    free.append(Axis(axis.name, axis.total // pre, pre, axis.total))
    return tuple(a for a in free if a.size > 1)


def add_axes(layout: Layout, axes: tuple[Axis, ...]) -> Layout:
    """The layout with `axes` added to the factor that they split with the least imbalance, ties to the first."""
    best: tuple[float, int, int] | None = None
    for d, dim in enumerate(layout.dims):
        for f, factor in enumerate(dim):
            local = -(-factor.size // factor.num_shards)
            piece, shards = local, 1
            for axis in axes:
                piece, shards = -(-piece // axis.size), shards * axis.size
            imbalance = piece * shards / max(1, local)
            if best is None or (imbalance, d, f) < best:
                best = (imbalance, d, f)
    assert best is not None
    _, d, f = best
    return layout.with_axes(d, f, layout.dims[d][f].axes + axes)


def _sized(
    factors: Sequence[tuple[str | None, int | None]], size: int, path: str
) -> list[tuple[str | None, int]]:
    if len(factors) == 1 and factors[0][1] is None:
        return [(factors[0][0], size)]
    known = 1
    for _, s in factors:
        known *= s or 1
    open_ = [name for name, s in factors if s is None]
    if len(open_) > 1 or (size % known if open_ else size != known):
        raise ShardingError(
            f"{path}: a dim of {size} is no product of {' '.join(str(s or n) for n, s in factors)}",
            fix="mend the sizes; at most one factor may be without a size",
        )
    return [(name, size // known if s is None else s) for name, s in factors]


def is_under(path: str, component: str) -> bool:
    """Whether a leaf lies under a component of its path."""
    return path.startswith(f"{component}.") or f".{component}." in path


_GLOBS: dict[str, re.Pattern[str]] = {}


def glob_matches(pattern: str, path: str) -> bool:
    """Whether a glob matches a whole path, or a suffix of it that begins at a dot."""
    if pattern not in _GLOBS:
        _GLOBS[pattern] = re.compile(r"(?s:(?:.*\.)?" + fnmatch.translate(pattern)[4:-3] + r")\Z")
    return _GLOBS[pattern].match(path) is not None
