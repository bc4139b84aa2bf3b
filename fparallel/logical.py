"""Logical axis names: the text in which they are written, and what the text means.

``"embed (3 heads 64)"`` names the dims of a tensor. Each word is one dim; parentheses split a dim into
factors, as in einops. The same text is read from jaxtyping annotations (``Float[Tensor, "embed mlp"]``,
without parentheses), from ``Annotated[...]``, and from rules.

=================  ===========================================================================
``embed``          a dim named ``embed``
``embed=512``      the same, of a known size
``(3 heads 64)``   a composite: a dim of three factors, the middle one named; one size may be unknown
``_``, ``None``    an unnamed dim; so is a word starting with ``_`` or an expression such as ``dim+1``
``3``              an unnamed dim of size 3
``...``, ``*b``    any number of unnamed dims, at most once in a text
``#dim``, ``?dim`` jaxtyping's modifiers, which name nothing here: the same as ``dim``
=================  ===========================================================================
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import TypeAlias

from fparallel.errors import TreeError

__all__ = ["UNNAMED", "VARIADIC", "LogicalDim", "LogicalSpec", "parse_jaxtyping", "parse_logical"]

Factor: TypeAlias = tuple[str | None, int | None]
"""The logical name of a factor of a dim, and its size; either may be unknown."""

LogicalDim: TypeAlias = tuple[Factor, ...]
"""The factors of one dim, major first; a plain dim has one."""

UNNAMED: LogicalDim = ((None, None),)
VARIADIC: LogicalDim = ()
"""Stands for any number of unnamed dims, until the number of dims of the leaf is known."""

_WORD = re.compile(r"[()]|[^\s()]+")
_NAMED = re.compile(r"([A-Za-z]\w*)(?:=(\d+))?")


@dataclasses.dataclass(frozen=True)
class LogicalSpec:
    """The logical axes of one leaf.

    Attributes:
        dims: the factors of each dim. ``VARIADIC`` occurs in it only where the leaf has no ``ndim``.
        index_axes: ``(name, index, length)`` for every list on the way to the leaf whose index is a logical
            axis, outermost first.
    """

    dims: tuple[LogicalDim, ...]
    index_axes: tuple[tuple[str, int, int], ...] = ()

    def fits(self, ndim: int) -> bool:
        """Whether these dims can describe a leaf of ``ndim`` dims."""
        return len(self.dims) - 1 <= ndim if VARIADIC in self.dims else len(self.dims) == ndim

    def for_ndim(self, ndim: int) -> LogicalSpec:
        """The same with ``VARIADIC`` replaced by the unnamed dims that are left of ``ndim``."""
        if VARIADIC not in self.dims:
            return self
        at = self.dims.index(VARIADIC)
        filler = (UNNAMED,) * max(0, ndim - len(self.dims) + 1)
        return dataclasses.replace(self, dims=self.dims[:at] + filler + self.dims[at + 1 :])

    @property
    def names(self) -> frozenset[str]:
        """Every logical name in it, those of list indices included."""
        own = names_of(self.dims)
        return own.union(name for name, _, _ in self.index_axes) if self.index_axes else own

    def __str__(self) -> str:
        index = "".join(f" of {name} {i}/{n}" for name, i, n in self.index_axes)
        return f"{_render_dims(self.dims)}{index}".strip()


@functools.lru_cache(maxsize=4096)
def parse_logical(text: str) -> tuple[LogicalDim, ...]:
    """The dims that a text of logical names describes, one per word or parenthesised group.

    Raises:
        TreeError: parentheses do not match or are nested, a composite leaves two sizes unknown, or the text
            has two variadic words.

    >>> parse_logical("embed (3 heads 64)")
    ((('embed', None),), ((None, 3), ('heads', None), (None, 64)))
    """
    dims: list[LogicalDim] = []
    group: list[Factor] | None = None
    for word in _WORD.findall(text):
        if word == "(":
            if group is not None:
                raise _bad(text, "parentheses are nested", "write all factors of a dim in one pair of them")
            group = []
        elif word == ")":
            if group is None:
                raise _bad(text, "')' has no '('", "balance the parentheses")
            dims.append(_composite(text, group))
            group = None
        elif word == "..." or word.startswith("*"):
            if group is not None:
                raise _bad(text, f"{word!r} stands in parentheses", "name each factor of a composite dim")
            if VARIADIC in dims:
                raise _bad(text, "two words stand for any number of dims", "keep one of them")
            dims.append(VARIADIC)
        elif group is not None:
            group.append(_factor(text, word))
        else:
            dims.append((_factor(text, word),))
    if group is not None:
        raise _bad(text, "'(' has no ')'", "balance the parentheses")
    return tuple(dims)


def parse_jaxtyping(dim_str: str) -> tuple[LogicalDim, ...]:
    """The same for the text of a jaxtyping annotation, in which parentheses would mean four dims, not one.

    Raises:
        TreeError: the text holds parentheses, or for the reasons of :func:`parse_logical`.
    """
    if "(" in dim_str or ")" in dim_str:
        raise TreeError(
            f"the jaxtyping annotation {dim_str!r} holds parentheses, and jaxtyping reads each word as a dim",
            fix="name the whole dim in jaxtyping and its factors beside it, as in "
            f'Annotated[Float[Tensor, "embed qkv"], "{dim_str}"]',
        )
    return parse_logical(dim_str)


@functools.lru_cache(maxsize=4096)
def _render_dims(dims: tuple[LogicalDim, ...]) -> str:
    return " ".join(map(_render, dims))


@functools.lru_cache(maxsize=4096)
def names_of(dims: tuple[LogicalDim, ...]) -> frozenset[str]:
    """The logical names in ``dims``."""
    return frozenset(name for dim in dims for name, _ in dim if name is not None)


def _factor(text: str, word: str) -> Factor:
    word = word.lstrip("#?")
    if word.isdecimal():
        return (None, int(word))
    match = _NAMED.fullmatch(word)
    if match is None or word == "None":
        if "=" in word and not word.startswith("_"):
            raise _bad(text, f"{word!r} is no name with a size", "write name=size, such as heads=12")
        return (None, None)
    name, size = match.groups()
    return (name, None if size is None else int(size))


def _composite(text: str, factors: list[Factor]) -> LogicalDim:
    if not factors:
        raise _bad(text, "a pair of parentheses is empty", "write the factors of the dim in it")
    unknown = [name or "_" for name, size in factors if size is None]
    if len(unknown) > 1:
        found = f"a composite leaves the sizes of {' and '.join(unknown)} unknown, and at most one may be"
        raise _bad(text, found, f"give sizes, such as {unknown[-1].replace('_', 'heads')}=64")
    if any(size == 0 for _, size in factors):
        raise _bad(text, "a composite has a factor of size 0", "give every factor a size of at least 1")
    return tuple(factors)


def _bad(text: str, found: str, fix: str) -> TreeError:
    return TreeError(f"the logical names {text!r} cannot be read: {found}", fix=fix)


def _render(dim: LogicalDim) -> str:
    words = [_render_factor(*factor) for factor in dim]
    if len(words) == 1:
        return words[0]
    return f"({' '.join(words)})" if words else "..."


def _render_factor(name: str | None, size: int | None) -> str:
    if name is None:
        return "_" if size is None else str(size)
    return name if size is None else f"{name}={size}"
