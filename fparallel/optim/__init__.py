"""Optimizers as pure functions, in optax's protocol and under optax's names.

A :class:`GradientTransformation` is ``init(params) -> state`` and ``update(updates, state, params=None) ->
(updates, state)``; :func:`chain` composes them, :func:`apply_updates` adds the result to the parameters.
States are pytrees whose leaves mirror the parameters, so they shard as the parameters do.
"""

from fparallel.optim.adaptive import ScaleByAdamState, scale_by_adam
from fparallel.optim.base import (
    EmptyState,
    GradientTransformation,
    ScalarOrSchedule,
    Schedule,
    apply_updates,
    identity,
    set_to_zero,
    stateless,
)
from fparallel.optim.clipping import clip, clip_by_global_norm, global_norm
from fparallel.optim.combining import chain
from fparallel.optim.decay import add_decayed_weights
from fparallel.optim.errors import OptimError
from fparallel.optim.labels import MaskedNode
from fparallel.optim.masking import MaskedState, masked
from fparallel.optim.momentum import TraceState, trace
from fparallel.optim.optimizers import adam, adamw, lion, sgd
from fparallel.optim.partitioning import MultiTransformState, multi_transform
from fparallel.optim.scaling import ScaleByScheduleState, scale, scale_by_learning_rate, scale_by_schedule
from fparallel.optim.schedules import (
    constant_schedule,
    cosine_decay_schedule,
    join_schedules,
    linear_schedule,
    warmup_constant_schedule,
    warmup_cosine_decay_schedule,
)
from fparallel.optim.signed import ScaleByLionState, scale_by_lion

__all__ = [
    "EmptyState",
    "GradientTransformation",
    "MaskedNode",
    "MaskedState",
    "MultiTransformState",
    "OptimError",
    "ScalarOrSchedule",
    "ScaleByAdamState",
    "ScaleByLionState",
    "ScaleByScheduleState",
    "Schedule",
    "TraceState",
    "adam",
    "adamw",
    "add_decayed_weights",
    "apply_updates",
    "chain",
    "clip",
    "clip_by_global_norm",
    "constant_schedule",
    "cosine_decay_schedule",
    "global_norm",
    "identity",
    "join_schedules",
    "linear_schedule",
    "lion",
    "masked",
    "multi_transform",
    "scale",
    "scale_by_adam",
    "scale_by_learning_rate",
    "scale_by_lion",
    "scale_by_schedule",
    "set_to_zero",
    "sgd",
    "stateless",
    "trace",
    "warmup_constant_schedule",
    "warmup_cosine_decay_schedule",
]
