"""Joining a job: the ranks that torchrun, Slurm or Kubernetes started."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from datetime import timedelta

import torch
import torch.distributed as dist

from fparallel.errors import MeshError

DEADLINE = 300.0


def join_job(device: str | None = None) -> tuple[int, str]:
    """Joins the job that started this process, or the process group that exists; safe to call again.

    The environment is torchrun's (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) or Slurm's
    (SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID). Without either, the process is a job of one rank.

    Args:
      device: "cpu" (gloo) or "cuda" (NCCL; selects the device of the local rank); by default cuda where there
        is one.

    Returns:
      (number of ranks, device).

    Raises:
      MeshError: the environment is incomplete, the device is not there, or the existing group uses another
        device.
    """
    if device not in (None, "cpu", "cuda"):
        raise MeshError(f"a job cannot run on the device {device!r}", fix='use "cpu" or "cuda"')
    if dist.is_initialized():
        return dist.get_world_size(), _existing_device(device)
    environment = dict(os.environ)
    _adopt_slurm(environment)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    rank, num_ranks = _position(environment)
    if device == "cuda":
        _select_device(int(environment.get("LOCAL_RANK", "0")))
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    timeout = timedelta(seconds=DEADLINE)
    if num_ranks == 1 and "MASTER_ADDR" not in environment:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return 1, device
    address, port = environment["MASTER_ADDR"], environment["MASTER_PORT"]
    os.environ.update({"MASTER_ADDR": address, "MASTER_PORT": port})
    dist.init_process_group(backend, init_method="env://", rank=rank, world_size=num_ranks, timeout=timeout)
    return num_ranks, device


def _existing_device(device: str | None) -> str:
    backend = str(dist.get_backend_config())
    has = {"cpu": "gloo" in backend, "cuda": "nccl" in backend}
    found = device or ("cuda" if has["cuda"] else "cpu")
    if not has[found]:
        raise MeshError(
            f"the process group that exists runs {backend}, which does not serve {found}",
            fix='initialise it with "gloo" (CPU) or "cpu:gloo,cuda:nccl" (CUDA), or leave that to make_mesh',
        )
    return found


def _position(environment: Mapping[str, str]) -> tuple[int, int]:
    """(rank, number of ranks)."""
    given = [name for name in ("RANK", "WORLD_SIZE") if name in environment]
    if not given:
        return 0, 1
    needed = ["RANK", "WORLD_SIZE"]
    try:
        alone = int(environment.get("WORLD_SIZE", "2")) == 1
        needed += [] if alone and "MASTER_ADDR" not in environment else ["MASTER_ADDR", "MASTER_PORT"]
        missing = [name for name in needed if name not in environment]
        if missing:
            raise MeshError(
                f"{', '.join(given)} is set, as in a rank of a job, but {', '.join(missing)} is not",
                fix="start it with torchrun --nproc-per-node=N, or unset the variables to run alone",
            )
        rank, num_ranks = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    except ValueError as error:
        if isinstance(error, MeshError):
            raise
        raise MeshError(
            f"RANK or WORLD_SIZE is no number: {error}", fix="start the job with torchrun"
        ) from None
    if not 0 <= rank < num_ranks:
        raise MeshError(f"RANK={rank} is not a rank of WORLD_SIZE={num_ranks}", fix="number the ranks from 0")
    return rank, num_ranks


def _select_device(local_rank: int) -> None:
    if not torch.cuda.is_available():
        raise MeshError('device "cuda" was asked for and torch finds no CUDA device', fix='use device="cpu"')
    if local_rank >= torch.cuda.device_count():
        raise MeshError(
            f"local rank {local_rank} has no device: this node has {torch.cuda.device_count()}",
            fix="start at most one rank per GPU on a node (torchrun --nproc-per-node)",
        )
    torch.cuda.set_device(local_rank)


def _adopt_slurm(environment: MutableMapping[str, str]) -> None:
    """Fills in torchrun's names from Slurm's, inside a job step of several tasks."""
    if (
        "RANK" in environment
        or "SLURM_PROCID" not in environment
        or int(environment.get("SLURM_NTASKS", "1")) == 1
    ):
        return
    environment["RANK"] = environment["SLURM_PROCID"]
    environment["WORLD_SIZE"] = environment["SLURM_NTASKS"]
    environment.setdefault("LOCAL_RANK", environment.get("SLURM_LOCALID", "0"))
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if nodes:
        environment.setdefault("MASTER_ADDR", first_host(nodes))
    job = re.sub(r"\D", "", environment.get("SLURM_JOB_ID", ""))
    if job:
        environment.setdefault("MASTER_PORT", str(20000 + int(job) % 20000))


def first_host(nodes: str) -> str:
    """The first host of Slurm's list: `gpu[07-09,12],cpu1` begins with gpu07."""
    match = re.match(r"([^,\[]+)(?:\[(\d+))?", nodes)
    assert match is not None
    return match.group(1) + (match.group(2) or "")
