"""The work that every peer does: sizes, initial values by name, token batches. Knows numpy only.

`model.py` and `peers/fp.py` build the same network from these names and shapes.
"""

from __future__ import annotations

import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

__all__ = ["BETAS", "CLIP", "CONFIGS", "EPS", "LR", "WEIGHT_DECAY", "Batches", "Config", "init_value"]

SEED = 1234
LR, BETAS, EPS, WEIGHT_DECAY, CLIP = 3e-4, (0.9, 0.95), 1e-8, 0.1, 1.0


@dataclass(frozen=True)
class Config:
    """The sizes of a GPT and of its global batch, in sequences."""

    name: str
    layers: int
    dim: int
    heads: int
    seq: int
    vocab: int
    batch: int

    @property
    def tokens(self) -> int:
        return self.batch * self.seq


CONFIGS = {
    "S": Config("S", layers=6, dim=384, heads=6, seq=256, vocab=256, batch=8),
    "M": Config("M", layers=12, dim=768, heads=12, seq=256, vocab=8192, batch=4),
    # Only to see quickly that a peer works; its times mean nothing.
    "tiny": Config("tiny", layers=2, dim=64, heads=4, seq=32, vocab=256, batch=8),
}


def init_value(cfg: Config, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The initial value of a parameter. It depends on its name alone: any rank can make any of them.

    A Linear's weight is (out, in). The rows of `attn.qkv` are ordered (head, q|k|v, head_dim): a contiguous
    half of them is a whole number of heads, which tensor parallelism needs.
    """
    if name.endswith("bias"):
        return np.zeros(shape, np.float32)
    if ".ln" in name:
        return np.ones(shape, np.float32)
    rng = np.random.default_rng([SEED, zlib.crc32(name.encode())])
    std = 0.02
    if name.endswith(("attn.out.weight", "mlp.down.weight")):
        std /= (2 * cfg.layers) ** 0.5
    value = rng.standard_normal(shape, dtype=np.float32)
    value *= np.float32(std)
    return value


class Batches:
    """`batches(t)` is the global batch of step t: (inputs, targets), int64 `[batch, seq]`.

    Bytes of the standard library; with a larger vocabulary, pairs of bytes folded into it.
    """

    def __init__(self, cfg: Config) -> None:
        raw = _bytes(2_000_000)
        if cfg.vocab > 256:
            raw = raw[: len(raw) // 2 * 2].astype(np.int64)
            self.stream = (raw[0::2] * 256 + raw[1::2]) % cfg.vocab
        else:
            self.stream = raw.astype(np.int64)
        self.cfg = cfg
        self.windows = (len(self.stream) - 1) // cfg.seq

    def __call__(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        cfg = self.cfg
        starts = [((step * cfg.batch + i) % self.windows) * cfg.seq for i in range(cfg.batch)]
        block = np.stack([self.stream[at : at + cfg.seq + 1] for at in starts])
        return block[:, :-1].copy(), block[:, 1:].copy()


def _bytes(limit: int) -> np.ndarray:
    chunks, size = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        chunks.append(path.read_bytes())
        size += len(chunks[-1])
        if size >= limit:
            break
    return np.frombuffer(b"".join(chunks), np.uint8)[:limit]
