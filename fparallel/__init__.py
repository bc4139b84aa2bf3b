"""fparallel: write the training step once, as a pure function for one device, and say where things live."""

from fparallel import lax, optim, random, testing, tree
from fparallel.api import Jitted, Lowered, Traced, eval_shape, jit
from fparallel.array import (
    Array,
    ShapeDtypeStruct,
    device_get,
    device_put,
    make_array_from_process_local_data,
)
from fparallel.compiled import Compiled
from fparallel.compiler.rules import register_rule
from fparallel.errors import FparallelError, FparallelWarning
from fparallel.layout import Layout
from fparallel.leaf_maps import map_leaves, sum_squares
from fparallel.mean import Mean
from fparallel.mesh import Mesh, make_mesh
from fparallel.microbatches import accumulate
from fparallel.process import process_count, process_index
from fparallel.rules import Rules
from fparallel.schedule import Cluster, Schedule
from fparallel.schedule.orders import register_order
from fparallel.schedule.tasks import Task
from fparallel.shard_map import shard_map
from fparallel.sharding import NamedSharding, P, PartitionSpec
from fparallel.transforms import block, grad, stage_boundary, value_and_grad, with_sharding_constraint
from fparallel.tree import TrainState, dataclass, static

__all__ = [
    "Array",
    "Cluster",
    "Compiled",
    "FparallelError",
    "FparallelWarning",
    "Jitted",
    "Layout",
    "Lowered",
    "Mean",
    "Mesh",
    "NamedSharding",
    "P",
    "PartitionSpec",
    "Rules",
    "Schedule",
    "ShapeDtypeStruct",
    "Task",
    "Traced",
    "TrainState",
    "accumulate",
    "block",
    "dataclass",
    "device_get",
    "device_put",
    "eval_shape",
    "grad",
    "jit",
    "lax",
    "make_array_from_process_local_data",
    "make_mesh",
    "map_leaves",
    "optim",
    "process_count",
    "process_index",
    "random",
    "register_order",
    "register_rule",
    "shard_map",
    "stage_boundary",
    "static",
    "sum_squares",
    "testing",
    "tree",
    "value_and_grad",
    "with_sharding_constraint",
]
