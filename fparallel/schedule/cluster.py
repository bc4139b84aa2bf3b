"""Clusters: what the machines that run a schedule can do, as a few numbers.

fp.Cluster.preset("h100")                       # 8 GPUs a node, from the datasheet
fp.Cluster.preset("h100", ranks_per_node=4)
fp.Cluster.load("cluster.json")                 # as `fparallel calibrate` measured it
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fparallel.errors import ClusterError, did_you_mean
from fparallel.mesh import Axis, Mesh


@dataclass(frozen=True)
class Link:
    """What one rank sends through.

    Attributes:
      latency: seconds from sending a message to its arrival, without its bytes.
      bandwidth: bytes/s in one direction.
    """

    latency: float
    bandwidth: float

    def seconds(self, nbytes: float, messages: int = 1) -> float:
        """The time of so many messages one after the other, of `nbytes` together."""
        return messages * self.latency + nbytes / self.bandwidth


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal ranks; rank r is on node `r // ranks_per_node`.

    Attributes:
      name: what it is.
      flops: by dtype ("bfloat16") the floating point operations per second of a rank in matrix products.
      bandwidth: bytes/s that a rank reads and writes in its memory.
      memory: bytes of device memory of a rank.
      ranks_per_node: ranks that the `intra` link joins.
      intra: between ranks of a node.
      inter: between ranks of different nodes, as one rank sees it while all of its node send.
      host: between a device and the memory of its host.
      run_overhead: seconds that the executor adds to every `run`.
      op_overhead: seconds that every op adds that is not a view: dispatch, the gap between two kernels.
      overlap: whether communication goes on beside compute. False for a host with as many ranks as cores: the exchange
        takes the processor itself.
      cores: of a node, which its ranks share; None where every rank has a device of its own.
      factors: by name of an op ("aten.gelu.default"; "map" for elementwise maps over leaves, as optimizers are), how
        many times longer than its roofline it takes; 1 for all others.
    """

    name: str
    flops: dict[str, float]
    bandwidth: float
    memory: int
    ranks_per_node: int
    intra: Link
    inter: Link
    host: Link
    run_overhead: float = 0.0
    op_overhead: float = 0.0
    overlap: bool = True
    cores: int | None = None
    factors: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        positive = {f"flops[{name!r}]": rate for name, rate in self.flops.items()}
        positive |= {
            "bandwidth": self.bandwidth,
            "memory": self.memory,
            "ranks_per_node": self.ranks_per_node,
        }
        positive |= {"cores": self.cores} if self.cores is not None else {}
        least_zero = {"run_overhead": self.run_overhead, "op_overhead": self.op_overhead}
        least_zero |= {f"factors[{name!r}]": factor for name, factor in self.factors.items()}
        for name in ("intra", "inter", "host"):
            positive[f"{name}.bandwidth"] = getattr(self, name).bandwidth
            least_zero[f"{name}.latency"] = getattr(self, name).latency
        wrong = [name for name, value in positive.items() if not value > 0]
        wrong += [name for name, value in least_zero.items() if not 0 <= value < math.inf]
        if wrong:
            raise ClusterError(
                f"the cluster {self.name!r} has no usable {wrong[0]}",
                fix="rates and sizes are positive, seconds are at least 0",
            )
        if not self.flops:
            raise ClusterError(
                f"the cluster {self.name!r} computes in no dtype", fix='give flops, e.g. {"float32": 1e12}'
            )

    def rate(self, dtype: torch.dtype) -> float:
        """Floating point operations per second in a dtype; of one that is not listed, the lowest that is."""
        return self.flops.get(str(dtype).removeprefix("torch."), min(self.flops.values()))

    def nodes(self, mesh: Mesh, axes: Sequence[Axis]) -> int:
        """Over how many nodes a group along these axes spreads: the one that spreads most.

        A digit of n values and stride w in the rank number stays on a node exactly if all blocks of n w ranks do.
        """
        if mesh.size <= self.ranks_per_node:
            return 1
        strides = dict(zip(mesh.names, _strides(mesh.sizes), strict=True))
        count = 1
        for axis in axes:
            block = strides[axis.name] * (axis.total // axis.pre)
            if self.ranks_per_node % block:
                count *= min(axis.size, max(2, math.ceil(block / self.ranks_per_node)))
        return count

    def link_between(self, rank: int, peer: int) -> Link:
        """What a message from one rank to another goes through."""
        return self.intra if rank // self.ranks_per_node == peer // self.ranks_per_node else self.inter

    @staticmethod
    def preset(name: str, **changes: Any) -> Cluster:
        """A cluster of GPUs as their vendor describes them, dense peak rates: real steps take longer.

        Sources: NVIDIA's datasheets "V100 Tensor Core GPU" (2020, SXM2 32 GB), "A100 Tensor Core GPU" (2022, SXM),
        "H100 Tensor Core GPU" (2023, SXM), "H200 Tensor Core GPU" (2024, SXM), "L40S GPU" (2023), and the whitepaper
        "Ada GPU Architecture" (RTX 4090; 16-bit with 32-bit accumulation). float64 is that of the tensor cores
        where there are some, float32 that without TF32, as in torch by default. Link bandwidths are one direction of
        NVLink or PCIe x16. Between nodes: one InfiniBand port per GPU as in NVIDIA's DGX systems (V100 100 Gb/s, A100
        200, H100 and H200 400), 100 Gb/s per GPU assumed for the others. Latencies are those of NCCL's model of a ring
        with the protocol Simple (`hwLat` in its src/graph/tuning.cc). 2 us between kernels and 5 us per run
        are assumptions; `fparallel calibrate` measures.

        Args:
          name: "v100", "a100-40g", "a100-80g", "h100", "h200", "l40s" or "rtx4090".
          **changes: fields to replace, e.g. `ranks_per_node=4`.

        Raises:
          ClusterError: there is no such preset.
        """
        if name not in PRESETS:
            raise ClusterError(
                f"there is no preset {name!r}", fix=f"choose another; {did_you_mean(name, PRESETS)}"
            )
        return dataclasses.replace(PRESETS[name], **changes)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the cluster as JSON."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(dataclasses.asdict(self), file, indent=2)
            file.write("\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Cluster:
        """Reads what `save` wrote.

        Raises:
          ClusterError: the file is not there or is no cluster.
        """
        try:
            with open(path, encoding="utf-8") as file:
                found = json.load(file)
            for name in ("intra", "inter", "host"):
                found[name] = Link(**found[name])
            return Cluster(**found)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, ClusterError):
                raise
            raise ClusterError(
                f"cannot read a cluster from {os.fspath(path)}: {error}",
                fix="write it with `fparallel calibrate`",
            ) from error


def _strides(sizes: Sequence[int]) -> list[int]:
    return [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]


_NVLINK, _PCIE, _NET = 3.4e-6, 5.7e-6, 9.6e-6  # seconds per step of a ring


def _gpu(
    name: str, tera: tuple[float, float, float, float], bandwidth: float, memory: float,
    intra: Link, inter: float, pcie: float,
) -> Cluster:  # fmt: skip
    """`tera`: 1e12 operations per second in float64, float32, float16 and bfloat16 (0: not supported)."""
    names = ("float64", "float32", "float16", "bfloat16")
    flops = {dtype: rate * 1e12 for dtype, rate in zip(names, tera, strict=True) if rate}
    net, host = Link(_NET, inter), Link(_PCIE, pcie)
    return Cluster(
        name, flops, bandwidth, int(memory), 8, intra, net, host, run_overhead=5e-6, op_overhead=2e-6
    )


PRESETS: dict[str, Cluster] = {
    cluster.name: cluster
    for cluster in (
        _gpu("v100", (7.8, 15.7, 125, 0), 900e9, 32e9, Link(_NVLINK, 150e9), 12.5e9, 16e9),
        _gpu("a100-40g", (19.5, 19.5, 312, 312), 1555e9, 40e9, Link(_NVLINK, 300e9), 25e9, 32e9),
        _gpu("a100-80g", (19.5, 19.5, 312, 312), 2039e9, 80e9, Link(_NVLINK, 300e9), 25e9, 32e9),
        _gpu("h100", (67, 67, 989.5, 989.5), 3350e9, 80e9, Link(_NVLINK, 450e9), 50e9, 64e9),
        _gpu("h200", (67, 67, 989.5, 989.5), 4800e9, 141e9, Link(_NVLINK, 450e9), 50e9, 64e9),
        _gpu("l40s", (1.4, 91.6, 362.05, 362.05), 864e9, 48e9, Link(_PCIE, 32e9), 12.5e9, 32e9),
        _gpu("rtx4090", (1.3, 82.6, 165.2, 165.2), 1008e9, 24e9, Link(_PCIE, 32e9), 12.5e9, 32e9),
    )
}  # fmt: skip
