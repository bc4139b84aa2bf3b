"""Every error that fparallel raises on purpose, and the warning it gives.

A message says what was found and what was expected, names the leaf path or source line, and ends with a line
``Fix: ...``. Errors that a user can cause are ``ValueError``s as well.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

__all__ = [
    "ClusterError",
    "DataError",
    "ExecutionError",
    "FparallelError",
    "FparallelWarning",
    "LayoutError",
    "MeshError",
    "RandomError",
    "RuleError",
    "ScheduleError",
    "ShardingError",
    "TraceError",
    "TreeError",
    "did_you_mean",
]


class FparallelError(Exception):
    """The base of every error raised by fparallel.

    Args:
        message: what was found and what was expected.
        fix: what to change; printed as the last line.
        where: the leaf path or source line, if there is one.

    ``str(error)`` is the message, then ``at <where>`` on a line of its own, then ``Fix: <fix>``.
    """

    def __init__(self, message: str, *, fix: str, where: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix
        self.where = where

    def __str__(self) -> str:
        at = "" if self.where is None else f"\n  at {self.where}"
        return f"{self.message}{at}\nFix: {self.fix}"

    def __reduce__(self) -> tuple[Any, ...]:  # the keyword-only `fix` defeats BaseException's own pickling
        return _rebuild, (type(self), self.message, self.fix, self.where)


def _rebuild(cls: type[FparallelError], message: str, fix: str, where: str | None) -> FparallelError:
    return cls(message, fix=fix, where=where)


class TreeError(FparallelError, ValueError):
    """A pytree, a registered class or an annotation is malformed, or two trees do not match."""


class LayoutError(FparallelError, ValueError):
    """A layout is malformed, or does not fit the shape it is asked to describe."""


class ShardingError(FparallelError, ValueError):
    """A partition spec, a rule or a logical axis name does not fit the leaf or the mesh."""


class MeshError(FparallelError, ValueError):
    """A device mesh cannot be built, or has no such axis."""


class TraceError(FparallelError, ValueError):
    """A function cannot be traced into a program."""


class RuleError(FparallelError, ValueError):
    """An operator has no sharding rule, or a rule that does not cover this use of it."""


class ScheduleError(FparallelError, ValueError):
    """A schedule breaks one of the properties that the verifier checks."""


class ClusterError(FparallelError, ValueError):
    """A description of a cluster is malformed, cannot be read, or is not known by that name."""


class DataError(FparallelError, ValueError):
    """A data source or a loader was given something it cannot read."""


class RandomError(FparallelError, ValueError):
    """A random draw has no key, or a key that is not one."""


class ExecutionError(FparallelError, RuntimeError):
    """A schedule failed while it ran: a peer, a transport, a store or a deadline."""


class FparallelWarning(UserWarning):
    """Something legal that is probably not what was meant, such as a donation that cannot happen."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A phrase that offers the nearest of ``known`` to ``name``, or else lists what is known.

    >>> did_you_mean("embde", ["embed", "mlp"])
    "did you mean 'embed'?"
    >>> did_you_mean("zzz", ["mlp", "embed"])
    "known: 'embed', 'mlp'"
    >>> did_you_mean("zzz", [])
    'none are known'
    """
    names = sorted(set(known))
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    if not names:
        return "none are known"
    shown = ", ".join(repr(n) for n in names[:12])
    return f"known: {shown}" + (f" and {len(names) - 12} more" if len(names) > 12 else "")
