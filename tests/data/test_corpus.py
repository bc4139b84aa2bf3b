"""A corpus is text only, split by file, and the same wherever it is read."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fparallel.data import END_OF_FILE, load_corpus
from fparallel.data.corpus import _held_out
from fparallel.errors import DataError


def write(root: Path, files: dict[str, bytes]) -> str:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text)
    return str(root)


def test_a_folder_is_read_in_the_order_of_its_paths_and_split_by_file(tmp_path):
    files = {f"{folder}/{i}.txt": f"{folder}{i}".encode() for folder in "ba" for i in range(20)}
    corpus = load_corpus(write(tmp_path, files), validation=0.25)
    assert sorted(corpus.train_files + corpus.validation_files) == sorted(files)
    assert list(corpus.train_files) == sorted(corpus.train_files)
    for split, names in ((corpus.train, corpus.train_files), (corpus.validation, corpus.validation_files)):
        assert bytes(split) == b"".join(files[name] + bytes([END_OF_FILE]) for name in names)


def test_hidden_files_caches_and_empty_files_are_not_text(tmp_path):
    source = write(
        tmp_path,
        {"a.txt": b"a", "b.txt": b"b", ".hidden": b"x", ".git/c": b"x", "__pycache__/d": b"x", "empty": b""},
    )
    corpus = load_corpus(source)
    assert sorted(corpus.train_files + corpus.validation_files) == ["a.txt", "b.txt"]
    assert corpus.skipped == ()


def test_binary_files_of_a_folder_are_skipped_and_named(tmp_path):
    corpus = load_corpus(
        write(tmp_path, {"a": b"text", "b": b"more", "c.png": b"\x89PNG\0", "d": b"\xff\xfe"})
    )
    assert corpus.skipped == ("c.png", "d")


def test_the_last_tenth_of_a_single_file_is_held_out(tmp_path):
    (tmp_path / "one.txt").write_bytes(bytes(range(1, 101)))
    corpus = load_corpus(str(tmp_path / "one.txt"))
    assert bytes(corpus.train) == bytes(range(1, 91)) + b"\0"
    assert bytes(corpus.validation) == bytes(range(91, 101)) + b"\0"
    assert load_corpus(str(tmp_path)).train_files == ("one.txt",)


def test_the_standard_library_is_python_source_without_its_tests():
    corpus = load_corpus("stdlib")
    names = corpus.train_files + corpus.validation_files
    assert {"dataclasses.py", "json/decoder.py"} <= set(names)
    assert not {"test", "tests", "site-packages"} & {folder for name in names for folder in name.split("/")}
    assert 0.02 < len(corpus.validation) / (len(corpus.train) + len(corpus.validation)) < 0.3
    assert b"class JSONDecoder" in bytes(corpus.train) + bytes(corpus.validation)


@given(st.sets(st.text(min_size=1), min_size=2, max_size=30), st.floats(0.01, 0.99))
def test_both_splits_get_a_file_and_files_stay_when_others_come(names, share):
    names = sorted(names)
    held_out = _held_out(names, share)
    assert 1 <= len(held_out) < len(names)
    fewer = _held_out(names[:-1], share) if len(names) > 2 else held_out
    moved = (held_out ^ fewer) - {names[-1]}
    assert len(moved) <= 1  # one, where a split would otherwise be empty


@pytest.mark.parametrize(
    ("files", "target", "found"),
    [
        ({}, "nowhere", "no file or folder"),
        ({}, "", "no file with anything in it"),
        ({"x": b""}, "x", "is empty"),
        ({"x": b""}, "", "no file with anything in it"),
        ({"x": b"a\0b"}, "x", "zero byte"),
        ({"x": "gr\u00fcn".encode("latin-1")}, "x", "not UTF-8"),
        ({"x": b"\0", "y": b"\xff"}, "", "2 binary files and no text"),
    ],
)
def test_what_is_not_text_is_refused(tmp_path, files, target, found):
    write(tmp_path, files)
    with pytest.raises(DataError, match=found) as error:
        load_corpus(str(tmp_path / target))
    assert str(error.value).splitlines()[-1].startswith("Fix: ")


def test_a_device_and_an_impossible_share_are_refused():
    with pytest.raises(DataError, match="neither a file nor a folder"):
        load_corpus("/dev/null")
    with pytest.raises(DataError, match="validation=1"):
        load_corpus("stdlib", validation=1.0)
