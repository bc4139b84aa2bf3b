"""Schedules: plain data about per-rank steps. Knows meshes and layouts, not graphs."""

from fparallel.schedule.cluster import Cluster, Link
from fparallel.schedule.ir import (
    COLLECTIVES,
    Buffer,
    Collective,
    Free,
    Instr,
    Program,
    Recv,
    Run,
    Schedule,
    Send,
    Wait,
    is_async,
)
from fparallel.schedule.segment import LocalOp, Ref, Segment

__all__ = [
    "COLLECTIVES", "Buffer", "Cluster", "Collective", "Free", "Instr", "Link", "LocalOp", "Program", "Recv", "Ref",
    "Run", "Schedule", "Segment", "Send", "Wait", "is_async",
]  # fmt: skip
