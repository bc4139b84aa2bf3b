"""What one instruction takes on a cluster, in seconds."""

from __future__ import annotations

import math

import torch

from fparallel.schedule.cluster import Cluster
from fparallel.schedule.ir import Collective, Run, Schedule, Send
from fparallel.schedule.segment import Segment, Work


def segment_seconds(segment: Segment, cluster: Cluster) -> float:
    """The roofline of a segment's ops one after the other: each max(flops / rate, bytes / bandwidth) times its factor.

    (Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", CACM 2009.) Where the ops are
    not known, as in a schedule read from text, the segment is one op that reads its inputs and writes its outputs.
    """
    ops = [(op.work, op.target) for op in segment.ops if op.work is not None]
    if not ops:
        values = [*segment.inputs, *segment.outputs]
        nbytes = sum(layout.max_local_numel * dtype.itemsize for dtype, layout in values)
        work = Work(segment.flops, nbytes, _compute_dtype(segment))
        return roofline(work, cluster) + cluster.op_overhead
    return sum(op_seconds(work, target, cluster) for work, target in ops)


def op_seconds(work: Work, target: str, cluster: Cluster) -> float:
    """Seconds of an op: its roofline times its factor, and the overhead of an op."""
    return roofline(work, cluster) * cluster.factors.get(factor_name(target), 1.0) + cluster.op_overhead


def roofline(work: Work, cluster: Cluster) -> float:
    """Seconds that an op takes at least."""
    return max(work.flops / cluster.rate(work.dtype), work.nbytes / cluster.bandwidth)


def factor_name(target: str) -> str:
    """The key of an op in `Cluster.factors`: "aten.gelu.default"; "map" for elementwise maps over leaves."""
    return "map" if target.startswith("map.") else target


def _compute_dtype(segment: Segment) -> torch.dtype:
    """The dtype of the largest floating value, inputs first."""
    values = [(layout.max_local_numel, dtype) for dtype, layout in (*segment.inputs, *segment.outputs)]
    floating = [value for value in values if value[1].is_floating_point]
    return max(floating, key=lambda value: value[0])[1] if floating else torch.float32


def run_seconds(schedule: Schedule, run: Run, segment: float, cluster: Cluster) -> float:
    """A run whose segment takes `segment` seconds; buffers off the device go through the host link."""
    away = [b for b in map(schedule.buffers.__getitem__, (*run.ins, *run.outs)) if b.memory != "device"]
    moved = cluster.host.seconds(sum(b.nbytes for b in away)) if away else 0.0
    return cluster.run_overhead + segment + moved


def collective_seconds(schedule: Schedule, instr: Collective, cluster: Cluster) -> float:
    """The time of a collective once all members have come. A bucket is one message.

    Inside a node, for n ranks, s bytes (as `Schedule.bytes` defines them), latency a and bandwidth 1/b, by the ring
    algorithms: all_gather, reduce_scatter and all_to_all (n-1) a + s (n-1)/n b, all_reduce twice that (Thakur,
    Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 2005; Patarasuk, Yuan,
    "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009). A permute is one message.

    A group over m nodes with k = n/m ranks on each, as in NCCL's own model (src/graph/tuning.cc): the ring leaves
    a node m-1 times and has the links of k ranks there; an all_reduce takes the faster of the ring and a tree over
    nodes, 2 ((k-1) a + log2(m) a_inter) + 2 s b. In an all_to_all each rank sends to the n-k on other nodes by itself.
    """
    n, m = math.prod(axis.size for axis in instr.axes), cluster.nodes(schedule.mesh, instr.axes)
    if n == 1:
        return 0.0
    k, intra, inter = n / m, cluster.intra, cluster.inter
    if instr.kind == "permute":
        return (intra if m == 1 else inter).seconds(sum(schedule.buffers[name].nbytes for name in instr.ins))
    payload = float(schedule.payload(instr))
    if instr.kind == "all_to_all":
        far = payload * (n - k) / (n - 1)
        latency = (k - 1) * intra.latency + (n - k) * inter.latency
        return latency + max((payload - far) / intra.bandwidth, far / inter.bandwidth)
    bandwidth = intra.bandwidth if m == 1 else min(intra.bandwidth, k * inter.bandwidth)
    rounds = 2 if instr.kind == "all_reduce" else 1
    ring = rounds * ((n - m) * intra.latency + (m - 1) * inter.latency) + payload / bandwidth
    if rounds == 1:
        return ring
    depth = (k - 1) * intra.latency + math.ceil(math.log2(m)) * inter.latency
    return min(ring, 2 * depth + payload * n / (n - 1) / bandwidth)


def send_seconds(schedule: Schedule, instr: Send, rank: int, peer: int, cluster: Cluster) -> float:
    """One message from a rank to another: latency + bytes / bandwidth."""
    nbytes = sum(schedule.buffers[name].nbytes for name in instr.ins)
    return cluster.link_between(rank, peer).seconds(nbytes)
