"""Which process of the job this is."""

from __future__ import annotations

import os

import torch


def process_index() -> int:
    """The rank of this process in its job; 0 outside of one."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", 0))


def process_count() -> int:
    """The number of processes in this job; 1 outside of one."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", 1))
