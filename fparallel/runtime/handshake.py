"""What all ranks must agree on before the first step, as digests."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fparallel.schedule.ir import Schedule


def parts_of(schedule: Schedule, constants: Mapping[str, Tensor]) -> dict[str, str]:
    """The parts of a program, each a digest or a version; a difference between ranks is named by its part."""
    programs = [
        (p.role, p.arguments, p.results, sorted(p.donated), [repr(instr) for instr in p.instrs])
        for p in schedule.programs
    ]
    arguments = [
        str(schedule.buffers[name])
        for p in schedule.programs
        for name in p.arguments
        if schedule.buffers[name].kind != "constant"
    ]
    segments = [f"{name} {s.signature} {s.fingerprint}" for name, s in sorted(schedule.segments.items())]
    return {
        "mesh": str(schedule.mesh),
        "arguments": digest(arguments),
        "schedule": digest([repr(programs), *map(repr, schedule.buffers.values())]),
        "segments": digest(segments),
        "constants": digest(f"{name} {_bytes_digest(value)}" for name, value in sorted(constants.items())),
        "torch": torch.__version__,
        "fparallel": _version(),
    }


def fingerprint(parts: Mapping[str, str]) -> str:
    """One digest of all parts."""
    return digest(f"{name}={value}" for name, value in sorted(parts.items()))


def digest(lines: Iterable[str]) -> str:
    total = hashlib.sha256()
    for line in lines:
        total.update(line.encode() + b"\n")
    return total.hexdigest()[:16]


def _bytes_digest(value: Tensor) -> str:
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(flat.numpy().data).hexdigest()}"


def _version() -> str:
    try:
        return importlib.metadata.version("fparallel")
    except importlib.metadata.PackageNotFoundError:
        return "a source tree"
