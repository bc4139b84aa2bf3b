"""Models as pure functions of a pytree of parameters, annotated with their logical axes.

Each has ``Config``, ``init_params(key, cfg)``, ``forward(params, tokens)`` and ``loss(params, batch)``.
"""

from fparallel.models import gpt, llama, presets
from fparallel.models.generate import generate

__all__ = ["generate", "gpt", "llama", "presets"]
