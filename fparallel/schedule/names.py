"""Names in the text of a schedule: `a.{b,c}d` and `a.{0..3}` for the names that they expand to.

Braces follow a common prefix; the leftmost one varies slowest. What a name may not contain (white space and
`,(){}#<>`) is written %XX.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from urllib.parse import quote, unquote

BANNED = re.compile(r"[\s,(){}#<>]|%(?=[0-9A-Fa-f]{2})")
BANNED_LABEL = re.compile(r"[\r\n#<>]|^\s|\s$|%(?=[0-9A-Fa-f]{2})")
BANNED_CAUSE = re.compile(r"[\r\n]|^\s|\s$|#(?=#)|(?<=#)#|%(?=[0-9A-Fa-f]{2})")


def escape(text: str, banned: re.Pattern[str] = BANNED) -> str:
    """`text` with every banned character written %XX; `urllib.parse.unquote` undoes it."""
    return banned.sub(lambda m: quote(m.group(), safe=""), text) if banned.search(text) else text


def _ranges(items: list[str]) -> str:
    """The items of a brace: 0,1,2,7 is written 0..2,7."""
    parts: list[str] = []
    start = 0
    while start < len(items):
        stop = start + 1
        if items[start].isascii() and items[start].isdigit() and str(int(items[start])) == items[start]:
            while stop < len(items) and items[stop] == str(int(items[start]) + stop - start):
                stop += 1
        if stop - start > 2:
            parts.append(f"{items[start]}..{items[stop - 1]}")
        else:
            parts += items[start:stop]
        start = stop
    return ",".join(parts)


def _fold(rows: list[tuple[list[str], int]]) -> list[tuple[list[str], int]]:
    """Joins neighbouring rows (tokens, first brace) that differ in one token, left of every brace so far."""
    result: list[tuple[list[str], int]] = []
    items: list[str] = []
    at = -1
    first, limit = rows[0]

    def close() -> None:
        if items:
            result.append(([*first[:at], "{" + _ranges(items) + "}", *first[at + 1 :]], at))
        else:
            result.append((first, limit))

    for tokens, brace in rows[1:]:
        differ = -1
        if brace == limit and len(tokens) == len(first):
            where = [i for i, (a, b) in enumerate(zip(first, tokens, strict=True)) if a != b]
            if len(where) == 1 and 0 < where[0] < limit and where[0] % 2 == 0 and at in (-1, where[0]):
                differ = where[0]
        if differ < 0:
            close()
            first, limit, items, at = tokens, brace, [], -1
        else:
            items = items or [first[differ]]
            items.append(tokens[differ])
            at = differ
    close()
    return result


_SPLIT = re.compile(r"([.@])")


def names_text(names: Sequence[str]) -> str:
    """`a.{b,c}, d` for ("a.b", "a.c", "d"); `()` for none."""
    if len(names) == 1:
        return escape(names[0])
    if not names:
        return "()"
    rows = [(tokens, len(tokens)) for tokens in (_SPLIT.split(escape(name)) for name in names)]
    while len(rows) > 1:
        folded = _fold(rows)
        if len(folded) == len(rows):
            break
        rows = folded
    return ", ".join("".join(tokens) for tokens, _ in rows)


_BRACE = re.compile(r"\{([^{}]*)\}")


def _expand(word: str) -> Iterator[str]:
    match = _BRACE.search(word)
    if match is None:
        yield unquote(word) if "%" in word else word
        return
    for item in match.group(1).split(","):
        low, dots, high = item.partition("..")
        middles = [str(i) for i in range(int(low), int(high) + 1)] if dots else [item]
        for middle in middles:
            yield from _expand(word[: match.start()] + middle + word[match.end() :])


def parse_names(text: str) -> tuple[str, ...]:
    """Reads what `names_text` writes."""
    text = text.strip()
    if text in ("", "()"):
        return ()
    return tuple(name for word in re.split(r",\s+", text) for name in _expand(word))
