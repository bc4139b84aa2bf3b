"""Global arrays: a tensor of which every rank holds the part that its layout gives it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fparallel import tree
from fparallel.errors import ExecutionError, ShardingError
from fparallel.layout import Layout, same, typed
from fparallel.mesh import Mesh
from fparallel.sharding import NamedSharding, PartitionSpec, Sharding, sharding_of


@dataclass(frozen=True)
class ShapeDtypeStruct:
    """The shape and dtype of an array that need not exist."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    sharding: Any = None

    @property
    def ndim(self) -> int:
        return len(self.shape)


class Array:
    """A global array: shape, dtype, sharding, and this process's shards.

    Prints as `f32[8@dp,4@tp]`. `float()`, `.item()` and formatting work on replicated values; any other torch function
    on it raises and names `fp.jit` and `fp.device_get`.

    Attributes:
      role: the coordinates of the ranks that hold it, as in (("pp", 1),) for what lies on one stage of a pipeline;
        () for all ranks.
    """

    __slots__ = ("_shards", "dtype", "layout", "mesh", "role")

    def __init__(
        self,
        mesh: Mesh,
        layout: Layout,
        dtype: torch.dtype,
        shards: Mapping[int, Tensor],
        role: tuple[tuple[str, int], ...] = (),
    ) -> None:
        self.role = role
        self.mesh = mesh
        self.layout = layout
        self.dtype = dtype
        self._shards: dict[int, Tensor] | None = dict(shards)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def ndim(self) -> int:
        return len(self.layout.dims)

    def numel(self) -> int:
        result = 1
        for size in self.shape:
            result *= size
        return result

    @property
    def sharding(self) -> Sharding:
        return sharding_of(self.layout, self.mesh)

    @property
    def shards(self) -> dict[int, Tensor]:
        """This process's shards, by rank.

        Raises:
          ExecutionError: the array was donated.
        """
        if self._shards is None:
            raise ExecutionError(
                f"{self.text} was donated to a step that has run, and its memory reused",
                fix="use the array that the step returned, or do not donate the argument (donate_argnums)",
            )
        return self._shards

    @property
    def is_deleted(self) -> bool:
        return self._shards is None

    def take(self) -> dict[int, Tensor]:
        """The shards, leaving the array donated."""
        shards = self.shards
        self._shards = None
        return shards

    @property
    def home(self) -> int | None:
        """The rank of the pipeline axis that holds it; None for all."""
        return self.role[0][1] if self.role else None

    @property
    def text(self) -> str:
        where = ",".join(f"{axis}={at}" for axis, at in self.role)
        return typed(self.dtype, self.layout) + (f"{{{where}}}" if where else "")

    def item(self) -> Any:
        """The Python number of a replicated array of one element."""
        if self.layout.sharded_axes or self.numel() != 1:
            raise ExecutionError(
                f"{self.text} is no replicated single value",
                fix="use fp.device_get(array) for the whole value",
            )
        if not self.shards:
            raise ExecutionError(
                f"{self.text} lies on other ranks than this one",
                fix="use fp.device_get(array) on all ranks for the whole value",
            )
        return next(iter(self.shards.values())).item()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec else str(self)

    def __repr__(self) -> str:
        if self._shards is None:
            return f"{self.text} (donated)"
        if self.numel() == 1 and not self.layout.sharded_axes and self.shards:
            return f"{self.text}({self.item()})"
        return self.text

    def _refuse(self, what: str) -> ExecutionError:
        return ExecutionError(
            f"{what} on the global array {self.text}, of which this process may hold a part only",
            fix="do it inside a function under fp.jit, or on fp.device_get(array)",
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(name)
        raise self._refuse(f".{name}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        found = next(a for a in tree.leaves([args, kwargs or {}]) if isinstance(a, Array))
        raise found._refuse(getattr(func, "__name__", str(func)))

    def _operator(self, *_: Any) -> Any:
        raise self._refuse("arithmetic")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _operator
    __matmul__ = __rmatmul__ = __pow__ = __neg__ = __getitem__ = __lt__ = __le__ = __gt__ = __ge__ = _operator

    # -------------------------------------------------------------- DTensor

    def to_dtensor(self) -> Any:
        """This array as a `torch.distributed.tensor.DTensor` that shares its memory.

        Raises:
          ShardingError: the layout has no DTensor placement (factored dims, sub-axes, several axes on a dim out of mesh
            order, uneven nested shards), or the mesh is not a job's.
        """
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Replicate, Shard

        if self.role:
            raise ShardingError(
                f"{self.text} lies on one stage of a pipeline only", fix="DTensors lie on all ranks"
            )
        if self.mesh.kind != "job":
            raise ShardingError(
                f"{self.text} lies on a {self.mesh.kind} mesh", fix="DTensors need a mesh of kind 'job'"
            )
        placements: list[Any] = [Replicate() for _ in self.mesh.names]
        for d, dim in enumerate(self.layout.dims):
            order = [self.mesh.names.index(axis.name) for f in dim for axis in f.axes]
            whole = all(axis.whole for f in dim for axis in f.axes)
            if order and (len(dim) > 1 or order != sorted(order) or not whole):
                raise ShardingError(
                    f"{self.text} has no DTensor placement", fix="reshard it first (fp.device_put)"
                )
            for i in order:
                placements[i] = Shard(d)
        ranks = torch.arange(self.mesh.size).reshape(self.mesh.sizes)
        device_mesh = DeviceMesh(self.mesh.device, ranks, mesh_dim_names=self.mesh.names)
        stride = torch.empty(self.shape, device="meta").stride()
        (local,) = self.shards.values()
        return DTensor.from_local(
            local, device_mesh, placements, run_check=False, shape=torch.Size(self.shape), stride=stride
        )

    @staticmethod
    def from_dtensor(value: Any, mesh: Mesh) -> Array:
        """An Array that shares the memory of a DTensor whose device mesh has the same axes and ranks."""
        names = tuple(value.device_mesh.mesh_dim_names or ())
        if names != mesh.names or tuple(value.device_mesh.mesh.shape) != mesh.sizes:
            raise ShardingError(
                f"the DTensor lies on a device mesh {names} of {tuple(value.device_mesh.mesh.shape)}, not on {mesh}",
                fix="make the fp mesh with the same axis names and sizes",
            )
        spec: list[list[str]] = [[] for _ in value.shape]
        for name, placement in zip(names, value.placements, strict=True):
            if placement.is_partial():
                raise ShardingError(
                    "a DTensor with partial placements is no array", fix="redistribute it first"
                )
            if placement.is_shard():
                spec[placement.dim].append(name)
        named = NamedSharding(mesh, PartitionSpec(*(tuple(s) or None for s in spec)))
        rank = torch.distributed.get_rank()
        return Array(mesh, named.layout(value.shape), value.dtype, {rank: value.to_local()})


def process_ranks(mesh: Mesh) -> Sequence[int]:
    """The ranks of a mesh that this process holds shards for."""
    if mesh.kind == "simulated":
        return range(mesh.size)
    if mesh.kind == "job":
        return (torch.distributed.get_rank(),)
    raise ExecutionError(
        f"the mesh {mesh} is abstract: nothing can be put on it", fix='make it with kind="job" or "simulated"'
    )


def put(value: Tensor, mesh: Mesh, layout: Layout, role: tuple[tuple[str, int], ...] = ()) -> Array:
    """The array of a global tensor, which must be equal on all ranks, on those of a role."""
    shards = {}
    for rank in process_ranks(mesh):
        if any(mesh.coords(rank)[axis] != at for axis, at in role):
            continue
        part = layout.shard(value, mesh.coords(rank))
        shards[rank] = part.to(mesh.device, copy=True).contiguous()
    return Array(mesh, layout, value.dtype, shards, role)


def device_put(value: Any, sharding: Any) -> Any:
    """Puts a tree of global tensors (equal on all ranks) or Arrays onto a mesh.

    Args:
      sharding: a NamedSharding for all leaves, or a tree prefix of them.
    """
    leaves, treedef = tree.flatten(value)
    shardings = tree.match_prefix(sharding, value)
    return tree.unflatten(treedef, [_put_leaf(leaf, s) for leaf, s in zip(leaves, shardings, strict=True)])


def _put_leaf(leaf: Any, sharding: Sharding) -> Array:
    if isinstance(leaf, Array):
        if leaf.mesh == sharding.mesh and same(leaf.layout, sharding.layout(leaf.shape)):
            return leaf
        leaf = get(leaf)
    tensor = torch.as_tensor(leaf)
    return put(tensor, sharding.mesh, sharding.layout(tensor.shape))


def get(array: Array) -> Tensor:
    """The global value as a CPU tensor; collective in a job."""
    shards = {rank: shard.detach().cpu() for rank, shard in array.shards.items()}
    if array.mesh.kind == "job" and array.mesh.size > 1:
        if not array.layout.sharded_axes and not array.role:
            return next(iter(shards.values())).clone()
        gathered: list[Any] = [None] * array.mesh.size
        torch.distributed.all_gather_object(gathered, next(iter(shards.values()), None))
        shards = {rank: part for rank, part in enumerate(gathered) if part is not None}
    role = dict(array.role)
    holders = [array.mesh.rank({**coords, **role}) for coords in array.mesh.rank_coords]
    return array.layout.unshard([shards[rank] for rank in holders], array.mesh)


def move(array: Array, axis: str, home: int | None) -> dict[int, Tensor]:
    """The shards of an array on another rank of a pipeline axis (None: on all); collective in a job.

    Every rank of the old home sends to the ranks that differ from it along the axis alone.
    """
    mesh, old = array.mesh, array.home
    if old is None:
        return {r: s for r, s in array.shards.items() if home is None or mesh.coords(r)[axis] == home}
    shards: dict[int, Tensor] = {}
    works: list[Any] = []
    for rank in process_ranks(mesh):
        coords = mesh.coords(rank)
        source = mesh.rank({**coords, axis: old})
        wanted = home is None or coords[axis] == home
        if source in array.shards:
            if wanted:
                shards[rank] = array.shards[source] if source == rank else array.shards[source].clone()
            if source == rank and mesh.kind == "job":
                targets = [c for c in range(mesh.shape[axis]) if c != old and home in (None, c)]
                ranks = [mesh.rank({**coords, axis: c}) for c in targets]
                works += [torch.distributed.isend(array.shards[rank].contiguous(), r) for r in ranks]
        elif wanted:
            shards[rank] = torch.empty(
                array.layout.local_shape(coords), dtype=array.dtype, device=mesh.device
            )
            works.append(torch.distributed.irecv(shards[rank], source))
    for work in works:
        work.wait()
    return shards


def device_get(value: Any) -> Any:
    """A tree of Arrays as CPU tensors with their global values; other leaves pass. Collective in a job."""
    return tree.map(lambda leaf: get(leaf) if isinstance(leaf, Array) else leaf, value)


def make_array_from_process_local_data(
    sharding: Sharding, local: Tensor, global_shape: Sequence[int] | None = None
) -> Array:
    """An array from the part that this process holds already.

    Args:
      local: this rank's shard, or, on a simulated mesh, is not supported: put the global value instead.
      global_shape: by default derived from the shard, if all shards are of equal size.
    """
    mesh = sharding.mesh
    if mesh.kind != "job" and mesh.size > 1:
        raise ExecutionError(
            "per-process data needs a mesh of kind 'job'", fix="use fp.device_put with the global value"
        )
    if global_shape is None:
        probe = sharding.layout([mesh.size**2] * local.dim())
        counts = [1] * local.dim()
        for d, dim in enumerate(probe.dims):
            for factor in dim:
                counts[d] *= factor.num_shards
        global_shape = [n * c for n, c in zip(local.shape, counts, strict=True)]
    layout = sharding.layout(tuple(global_shape))
    (rank,) = process_ranks(mesh)
    expected = layout.local_shape(mesh.coords(rank))
    if tuple(local.shape) != expected:
        raise ShardingError(
            f"this process holds {list(local.shape)} of {typed(local.dtype, layout)}, expected {list(expected)}",
            fix="pass the rows that the sharding gives this rank, or global_shape",
        )
    return Array(mesh, layout, local.dtype, {rank: local.to(mesh.device)})
