"""Weighted means as values: divided once, by the weight of everything."""

from __future__ import annotations

import abc
import functools
from typing import Any

import torch
from torch import Tensor

from fparallel import tree
from fparallel.array import Array, get


class Weighted(abc.ABC):
    """Arithmetic that Mean and sums of Means share."""

    @abc.abstractmethod
    def weighted(self) -> tuple[tuple[float, Mean], ...]:
        """The Means with their factors."""

    def value(self) -> Tensor:
        """The 0-d value: every term divided once by its own weight, 0/0 being 0."""
        parts = []
        for scale, mean in self.weighted():  # where a jitted step returned them, the factors are arrays too
            factor = scale if isinstance(scale, (int, float)) else _tensor(scale)
            parts.append(
                mean.ratio() if isinstance(factor, int | float) and factor == 1 else mean.ratio() * factor
            )
        return functools.reduce(torch.add, parts)

    def __add__(self, other: Any) -> MeanSum:
        if not isinstance(other, Weighted):
            return NotImplemented
        return MeanSum(self.weighted() + other.weighted())

    def __radd__(self, other: Any) -> Any:
        return self if isinstance(other, (int, float)) and other == 0 else NotImplemented

    def __mul__(self, scale: float) -> MeanSum:
        if not isinstance(scale, (int, float)):
            return NotImplemented
        return MeanSum(tuple((s * scale, m) for s, m in self.weighted()))

    __rmul__ = __mul__

    def __float__(self) -> float:
        return float(self.value())

    def item(self) -> float:
        return float(self)


@tree.dataclass
class Mean(Weighted):
    """A weighted mean over everything, whoever holds it: `sum / weight`, divided once by the global weight.

    Legal as a loss, as an aux value and as a metric. `sum` is differentiated, `weight` is not; where the weight is 0
    the value is 0 with zero gradient. `Mean + c * Mean` keeps each denominator.

    Attributes:
      sum: 0-d float tensor, the weighted sum over all examples or tokens.
      weight: 0-d tensor, the sum of the weights (e.g. the number of unmasked tokens).

    >>> float(Mean(torch.tensor(92.0, dtype=torch.float64), torch.tensor(10)))
    9.2
    """

    sum: Any
    weight: Any

    def weighted(self) -> tuple[tuple[float, Mean], ...]:
        return ((1.0, self),)

    def ratio(self) -> Tensor:
        total = _tensor(self.sum)
        weight = _tensor(self.weight).detach().to(total.dtype)
        empty = weight == 0
        return total / torch.where(empty, torch.ones_like(weight), weight) * (~empty).to(total.dtype)


def _tensor(value: Any) -> Tensor:
    """A number, a tensor, or what a jitted step returned, as a tensor."""
    return get(value) if isinstance(value, Array) else torch.as_tensor(value)


@tree.dataclass
class MeanSum(Weighted):
    """A weighted sum of Means, each with its own denominator. Made by adding and scaling Means."""

    terms: Any

    def weighted(self) -> tuple[tuple[float, Mean], ...]:
        return self.terms
