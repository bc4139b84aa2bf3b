"""``--check``: the parallel run beside the same functions un-jitted on one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

import fparallel as fp
from fparallel.cli.job import Functions

__all__ = ["Check"]


@dataclass
class _Largest:
    """The largest absolute difference seen, where it was, and the largest magnitude beside it."""

    difference: float = 0.0
    magnitude: float = 0.0
    where: str = ""

    def see(self, got: Any, expected: Any) -> None:
        paths, ours, _ = fp.tree.flatten_with_path(got)
        for path, a, b in zip(paths, ours, fp.tree.leaves(expected), strict=True):
            if not a.numel():
                continue
            gap = float((a.double() - b.double()).abs().max())
            if not gap <= self.difference:  # also where it is NaN
                self.difference, self.where = gap, path
            self.magnitude = max(self.magnitude, float(b.abs().max()))

    def __str__(self) -> str:
        at = f" at {self.where}" if self.where else ""
        return f"{self.difference:.3e} (largest value {self.magnitude:.3e}){at}"


class Check:
    """Runs every step a second time on one device and keeps the largest differences.

    Args:
        functions: the run's functions; called un-jitted, they are the reference.
        gradients: the compiled ``functions.gradients``.
        key: what the compiled initial state was made from.
        reference: whether this rank computes the reference; the others only take part in the exchange.
    """

    def __init__(
        self, functions: Functions, gradients: Callable[..., Any], key: Tensor, *, reference: bool
    ) -> None:
        self.functions, self.compiled_gradients, self.reference = functions, gradients, reference
        self.loss, self.gradients, self.parameters = _Largest(), _Largest(), _Largest()
        self.state = functions.init_state(key) if reference else None
        self.steps = 0

    def before(self, params: Any, batch: dict[str, Tensor]) -> None:
        """Compares the gradients of the step to come (collective)."""
        grads = fp.device_get(self.compiled_gradients(params, batch)[1])
        if self.state is not None:
            self.gradients.see(grads, self.functions.gradients(self.state.params, batch)[1])

    def after(self, params: Any, loss: float, batch: dict[str, Tensor]) -> None:
        """Takes the reference step and compares its loss and the new parameters (collective)."""
        self.steps += 1
        params = fp.device_get(params)
        if self.state is None:
            return
        self.state, metrics = self.functions.train_step(self.state, batch)
        expected = float(metrics["loss"])
        self.loss.difference = max(self.loss.difference, abs(loss - expected))
        self.loss.magnitude = max(self.loss.magnitude, abs(expected))
        self.parameters.see(params, self.state.params)

    def text(self) -> str:
        """The largest differences so far, one line each."""
        return (
            f"check: {self.steps} steps against the un-jitted step on one device, largest differences\n"
            f"  loss        {self.loss}\n  gradients   {self.gradients}\n  parameters  {self.parameters}"
        )
