"""Named sizes: what the tests, the benchmarks and the command line mean by "tiny", "S" and "M".

``S`` and ``M`` are the sizes of the benchmarks; as a GPT they are the network that the peers train (biases
everywhere, an untied head without one).
"""

from __future__ import annotations

from fparallel.models import gpt, llama

__all__ = ["GPT", "LLAMA"]

GPT: dict[str, gpt.Config] = {
    "tiny": gpt.Config(vocab=256, seq=32, layers=2, dim=64, heads=4, tie=False),
    "S": gpt.Config(vocab=256, seq=256, layers=6, dim=384, heads=6, tie=False),
    "M": gpt.Config(vocab=8192, seq=256, layers=12, dim=768, heads=12, tie=False),
}

LLAMA: dict[str, llama.Config] = {
    "tiny": llama.Config(vocab=256, layers=2, dim=64, heads=4, kv_heads=2),
    "S": llama.Config(vocab=256, layers=6, dim=384, heads=6, kv_heads=2),
    "M": llama.Config(vocab=8192, layers=12, dim=768, heads=12, kv_heads=4),
}
