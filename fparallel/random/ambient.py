"""Ambient draws: ``torch.randn``, ``F.dropout`` and the like, drawn from a key while one is in scope.

``with use(key):`` gives torch's own random functions a key. The n-th draw of a scope uses ``fold_in(key,
n)``, and the i-th call of a block inside a scope gets a key of its own from :func:`block_scope`, with a scope
of its own, so that a draw is a function of (key, path of block calls, index of the draw) and not of what ran
before it elsewhere.

Calls are intercepted as functions (a ``TorchFunctionMode``), above autograd and ``torch.func``; those that no
key can serve raise. A call with an explicit ``generator=`` keeps that generator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from fparallel.random.handlers import HANDLERS
from fparallel.random.keyed import check_key, fold_in

__all__ = ["Scope", "block_scope", "current_scope", "loop_scope", "scope_child", "use"]

BLOCK_TAG = 0x626C6F63  # "bloc"
LOOP_TAG = 0x6C6F6F70  # "loop"


@dataclass(eq=False)
class Scope:
    """What ``use(key)`` opens.

    Attributes:
        key: int64 ``[2]``.
        draws: how many ambient draws it has served.
        children: by tag, to how many block calls and loops over micro-batches it has given keys.
    """

    key: Tensor
    draws: int = 0
    children: dict[int, int] = field(default_factory=dict)

    def next_key(self) -> Tensor:
        """The key of the next draw, int64 ``[2]``."""
        key = fold_in(self.key, self.draws)
        self.draws += 1
        return key


_scope: ContextVar[Scope | None] = ContextVar("fparallel_random_scope", default=None)


@contextmanager
def use(key: Tensor) -> Iterator[Scope]:
    """Draws torch's ambient randomness from a key.

    Inside, ``torch.rand``, ``randn``, ``randint``, ``randperm``, ``normal``, ``bernoulli``, ``multinomial``,
    their ``_like`` and in-place forms, ``torch.nn.init``, ``F.dropout`` and its kin, and every module made of
    these, are functions of ``key``. Scopes nest; the innermost serves.

    Args:
        key: int64 ``[2]``.

    Raises:
        RandomError: ``key`` is not a key; or, inside, a function draws that cannot be served (such as
            attention with its own dropout).

    >>> import torch
    >>> with use(torch.tensor([0, 0])):
    ...     a = torch.randn(3)
    >>> with use(torch.tensor([0, 0])):
    ...     torch.equal(a, torch.randn(3))
    True
    """
    check_key(key)
    scope = Scope(key)
    token = _scope.set(scope)
    try:
        with _AmbientDraws(scope):
            yield scope
    finally:
        _scope.reset(token)


def current_scope() -> Scope | None:
    """The innermost scope, or ``None``."""
    return _scope.get()


def scope_child(tag: int | Tensor) -> Tensor | None:
    """``fold_in(key, tag)`` of the current scope, int64 ``[2]``; ``None`` without a scope.

    Draws use the tags 0, 1, 2 ..., so children of other kinds take large ones.
    """
    scope = _scope.get()
    return None if scope is None else fold_in(scope.key, tag)


def block_scope() -> Tensor | None:
    """The key for the next block call of the current scope, int64 ``[2]``; ``None`` without a scope.

    The i-th call gives ``fold_in(fold_in(key, 0x626c6f63), i)``. The caller hands it to the block as an input
    and opens ``use`` on it inside, so that a block traced once draws differently at each call, and as the
    un-traced one does.
    """
    return _numbered(BLOCK_TAG)


def loop_scope() -> Tensor | None:
    """The key for the next loop over micro-batches of the current scope, int64 ``[2]``; ``None`` without a scope.

    The i-th loop gives ``fold_in(fold_in(key, 0x6c6f6f70), i)``, and micro-batch m of it a child of that.
    """
    return _numbered(LOOP_TAG)


def _numbered(tag: int) -> Tensor | None:
    """The next of the current scope's children of one kind."""
    scope = _scope.get()
    if scope is None:
        return None
    number = scope.children.get(tag, 0)
    scope.children[tag] = number + 1
    return fold_in(fold_in(scope.key, tag), number)


class _AmbientDraws(TorchFunctionMode):
    def __init__(self, scope: Scope) -> None:
        super().__init__()
        self.scope = scope

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        handler = HANDLERS.get(func)
        if handler is None or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        result = handler(self.scope.next_key, *args, **kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result
