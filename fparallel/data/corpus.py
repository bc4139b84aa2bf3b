"""Text as bytes, split into training and validation text by file.

A corpus is one array of bytes for each split: the files one after the other, each followed by a zero byte. No
text contains a zero byte, so it marks where a file ends.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fparallel.errors import DataError

__all__ = ["END_OF_FILE", "VOCAB", "Corpus", "load_corpus"]

VOCAB = 256
"""Number of token ids of byte-level text."""

END_OF_FILE = 0
"""The byte that follows each file."""

_MAX_BYTES = 2**32
_NOT_STDLIB = frozenset(("site-packages", "dist-packages", "test", "tests", "idle_test"))


@dataclass(frozen=True)
class Corpus:
    """The bytes of both splits and the files that they come from.

    Args:
        train, validation: uint8 ``[N]``.
        train_files, validation_files: paths relative to the source, in the order of their bytes.
        skipped: files of a folder that are not text.
    """

    train: NDArray[np.uint8]
    validation: NDArray[np.uint8]
    train_files: tuple[str, ...]
    validation_files: tuple[str, ...]
    skipped: tuple[str, ...] = ()


def load_corpus(source: str = "stdlib", *, validation: float = 0.1) -> Corpus:
    """Reads the text of ``source``.

    Args:
        source: ``"stdlib"`` for the Python files of the standard library (without its tests), or the path of
            a text file or of a folder, whose text files are all read; hidden ones are not.
        validation: about which share of the files is held out. A hash of its relative path decides where a
            file goes, so adding files moves no other. Of a single file, the last part is held out.

    Raises:
        DataError: the path does not exist, cannot be read, has no text in it, or holds more than 4 GiB.
    """
    if not 0 < validation < 1:
        raise DataError(f"validation={validation} is no share", fix="use one between 0 and 1")
    if source == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        names = [name for name in _walk(root, skip=_NOT_STDLIB) if name.endswith(".py")]
    else:
        root = Path(source).expanduser()
        if not root.exists():
            raise DataError(f"there is no file or folder {source!r}", fix="check the path")
        if not root.is_dir():
            return _single_file(root, validation)
        names = _walk(root)
    _check_size(root, names)
    texts: dict[str, bytes] = {}
    skipped = []
    for name in names:
        text = _read(root / name)
        if text and _is_text(text):
            texts[name] = text
        elif text:
            skipped.append(name)
    if not texts:
        found = f"{len(skipped)} binary files and no text file" if skipped else "no file with anything in it"
        raise DataError(f"the folder {root} has {found}", fix="name a text file or a folder of text files")
    if len(texts) == 1:
        return _single_file(root / next(iter(texts)), validation)
    held_out = _held_out(list(texts), validation)
    train = [name for name in texts if name not in held_out]
    return Corpus(
        train=_join([texts[name] for name in train]),
        validation=_join([texts[name] for name in texts if name in held_out]),
        train_files=tuple(train),
        validation_files=tuple(name for name in texts if name in held_out),
        skipped=tuple(skipped),
    )


def _walk(root: Path, skip: frozenset[str] = frozenset()) -> list[str]:
    """Relative paths of the files below ``root``, with forward slashes, sorted; no hidden ones, no caches."""
    skip |= {"__pycache__"}
    names: list[str] = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [s for s in subfolders if s not in skip and not s.startswith(".")]
        relative = Path(folder).relative_to(root)
        names += [(relative / f).as_posix() for f in files if not f.startswith(".")]
    return sorted(name for name in names if (root / name).is_file())


def _check_size(root: Path, names: list[str]) -> None:
    total = sum((root / name).stat().st_size for name in names)
    if total > _MAX_BYTES:
        raise DataError(
            f"{root} holds {total / 2**30:.1f} GiB; byte-level text is read into memory, up to 4 GiB",
            fix="name a smaller folder or a single file",
        )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(f"cannot read {path}: {reason}", fix="name a file that can be read") from error


def _is_text(text: bytes) -> bool:
    if 0 in text:
        return False
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _held_out(names: list[str], share: float) -> set[str]:
    """The names whose hash falls below ``share``; never none and never all of two or more."""
    draws = {n: int.from_bytes(hashlib.sha256(n.encode()).digest()[:8], "big") / 2**64 for n in names}
    ordered = sorted(names, key=draws.__getitem__)
    count = sum(draws[n] < share for n in names)
    return set(ordered[: min(max(count, 1), len(names) - 1)])


def _join(texts: list[bytes]) -> NDArray[np.uint8]:
    end = bytes([END_OF_FILE])
    return np.frombuffer(end.join(texts) + end, dtype=np.uint8)


def _single_file(path: Path, share: float) -> Corpus:
    if not path.is_file():
        raise DataError(f"{path} is neither a file nor a folder", fix="name a text file or a folder of them")
    _check_size(path.parent, [path.name])
    text = _read(path)
    if not text:
        raise DataError(f"the file {path} is empty", fix="name a text file with something in it")
    if not _is_text(text):
        what = "has a zero byte" if 0 in text else "is not UTF-8"
        raise DataError(f"the file {path} is not text: it {what}", fix="name a UTF-8 text file")
    cut = max(1, len(text) - max(1, round(len(text) * share)))
    return Corpus(
        train=_join([text[:cut]]),
        validation=_join([text[cut:]]),
        train_files=(path.name,),
        validation_files=(path.name,),
    )
