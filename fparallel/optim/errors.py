"""The error of this package."""

from fparallel.errors import FparallelError

__all__ = ["OptimError"]


class OptimError(FparallelError, ValueError):
    """An optimizer or a learning-rate schedule was given something that it cannot mean."""
