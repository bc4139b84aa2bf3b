"""The bit generator: published answers, and parts of arrays that equal slices of the whole."""

import doctest
import importlib
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import fparallel as fp
from fparallel.random import philox
from fparallel.random.philox import Box, philox4x32

# Random123, tests/kat_vectors, lines "philox4x32 10": counter, key, answer.
KNOWN_ANSWERS = [
    (
        (0x00000000, 0x00000000, 0x00000000, 0x00000000),
        (0x00000000, 0x00000000),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

# kind, dtype, a, b
DRAWS = [
    ("bits", torch.int64, 0, 0),
    ("bits", torch.int32, 0, 0),
    ("bits", torch.uint8, 0, 0),
    ("uniform", torch.float32, 0.0, 1.0),
    ("uniform", torch.float64, -2.0, 3.0),
    ("uniform", torch.bfloat16, 0.0, 1.0),
    ("uniform", torch.float16, 1.0, 2.0),
    ("normal", torch.float32, 0.0, 1.0),
    ("normal", torch.float64, 0.0, 1.0),
    ("normal", torch.bfloat16, 0.0, 1.0),
    ("normal", torch.float16, 1.0, 2.0),
    ("exponential", torch.float32, 0.0, 1.0),
    ("exponential", torch.float64, 0.0, 2.0),
    ("bernoulli", torch.bool, 0.3, 0),
    ("randint", torch.int64, -5, 50),
    ("randint", torch.int32, 0, 10),
    ("randint", torch.float32, 0, 10),
]


def whole(key, draw, shape):
    kind, dtype, a, b = draw
    return torch.ops.fparallel.random(key, kind, shape, dtype, a, b)


def part(key, draw, shape, index):
    kind, dtype, a, b = draw
    return fp.random.random_shard(key, kind, shape, dtype, a, b, index)


def indices(factors):
    """The indices along one dim that factors (start, count, stride) stand for, major first."""
    values = [0]
    for start, count, stride in factors:
        values = [v + (start + j) * stride for v in values for j in range(count)]
    return values


@pytest.mark.parametrize("counter, key, answer", KNOWN_ANSWERS)
def test_known_answers_of_random123(counter, key, answer):
    assert philox4x32(counter, key) == answer
    words = philox4x32(tuple(torch.tensor([w, w]) for w in counter), tuple(torch.tensor(w) for w in key))
    assert [w.tolist() for w in words] == [[w, w] for w in answer]


def test_a_draw_reads_the_words_of_its_blocks_in_order():
    key = torch.tensor([0x299F31D0_A4093822, 0x03707344_13198A2E])
    upper, philox_key = (0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    words = [w for block in range(3) for w in philox4x32((block, 0, *upper), philox_key)]
    narrow = fp.random.bits(key, (12,), torch.int32)
    assert [w % 2**32 for w in narrow.tolist()] == words
    wide = fp.random.bits(key, (6,), torch.int64)
    assert [w % 2**64 for w in wide.tolist()] == [
        lo | hi << 32 for lo, hi in zip(words[::2], words[1::2], strict=True)
    ]


def test_positions_past_32_bits_use_the_upper_counter_word():
    key, size = torch.tensor([5, 0]), 2**50
    for start in (2**34 - 2, 2**40 + 1):  # the first straddles the block 2**32
        got = part(key, ("bits", torch.int32, 0, 0), (size,), [((start, 4, 1),)])
        for i, word in enumerate(got.tolist()):
            block, lane = divmod(start + i, 4)
            assert word % 2**32 == philox4x32((block % 2**32, block >> 32, 0, 0), (5, 0))[lane]


@st.composite
def boxes(draw):
    """A shape and, per dim, factors (start, count, stride) within some factorisation of its size."""
    shape, index = [], []
    for _ in range(draw(st.integers(0, 3))):
        radices = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
        factors = []
        for i, radix in enumerate(radices):
            start = draw(st.integers(0, radix))
            factors.append((start, draw(st.integers(0, radix - start)), math.prod(radices[i + 1 :])))
        shape.append(math.prod(radices))
        index.append(tuple(factors))
    return tuple(shape), index


@pytest.mark.parametrize("draw", DRAWS, ids=lambda d: f"{d[0]}-{d[1]}".replace("torch.", ""))
@given(box=boxes(), seed=st.integers(0, 2**63 - 1))
def test_a_part_is_the_slice_of_the_whole_bit_for_bit(draw, box, seed):
    shape, index = box
    key = fp.random.key(seed)
    expected = whole(key, draw, shape)
    for dim, factors in enumerate(index):
        expected = expected.index_select(dim, torch.tensor(indices(factors), dtype=torch.int64))
    got = part(key, draw, shape, index)
    assert got.dtype == draw[1]
    assert got.shape == expected.shape == tuple(math.prod(count for _, count, _ in f) for f in index)
    assert torch.equal(got, expected)


@given(
    cuts=st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=3),
    draw=st.sampled_from(DRAWS),
)
def test_the_tiles_of_any_partition_make_up_the_whole(cuts, draw):
    shape = tuple(sum(sizes) for sizes in cuts)

    def build(done):
        dim = len(done)
        if dim == len(cuts):
            return part(fp.random.key(3), draw, shape, done)
        starts = [sum(cuts[dim][:i]) for i in range(len(cuts[dim]))]
        tiles = [build([*done, ((s, n, 1),)]) for s, n in zip(starts, cuts[dim], strict=True)]
        rest = [math.prod(c for _, c, _ in f) for f in done] + [0] + list(shape[dim + 1 :])
        return torch.cat(tiles, dim) if tiles else torch.empty(rest, dtype=draw[1])

    assert torch.equal(build([]), whole(fp.random.key(3), draw, shape))


@pytest.mark.parametrize("blocks", [1, 3])
def test_the_chunk_size_does_not_show(blocks, monkeypatch):
    index = [((1, 2, 1),), ((0, 2, 6), (1, 5, 1))]
    keys = fp.random.split(fp.random.key(1), 3)
    for draw in DRAWS:
        expected = whole(keys, draw, (3, 12)), part(keys, draw, (3, 12), index)
        with monkeypatch.context() as patch:
            patch.setattr(philox, "_CPU_BLOCKS", blocks)
            got = whole(keys, draw, (3, 12)), part(keys, draw, (3, 12), index)
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


@given(words=st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 2), draw=st.sampled_from(DRAWS))
def test_many_blocks_and_few_blocks_agree(words, draw):
    """Few blocks go through Python's ints, many through tensors, and many keys through tensors of keys."""
    key = torch.tensor(words)
    many = whole(key, draw, (200,))
    few = part(key, draw, (200,), [((100, 8, 1),)])
    keys = whole(key.expand(2, 2), draw, (200,))
    assert torch.equal(many[100:108], few) and torch.equal(keys, many.expand(2, 200))


def test_words_that_are_all_ones():
    ones = torch.tensor([-1, -1])
    expected = [w for i in range(40) for w in philox4x32((i, 0, *[2**32 - 1] * 2), (2**32 - 1, 2**32 - 1))]
    assert [w % 2**32 for w in fp.random.bits(ones, (160,), torch.int32).tolist()] == expected


def test_a_contiguous_part_is_one_run():
    assert Box.of((4, 6, 5), [((2, 1, 1),), ((0, 6, 1),), ((0, 5, 1),)]) == Box(60, (), 30)
    assert Box.of((4, 6), [((0, 4, 1),), ((1, 1, 3), (0, 3, 1))]) == Box(3, ((4, 6),), 3)
    assert Box.of((0, 6)) == Box(0, (), 0)


@pytest.mark.parametrize("module", ["philox", "ops", "keyed", "ambient", "stateful"])
def test_the_examples_in_the_docstrings(module):
    result = doctest.testmod(importlib.import_module(f"fparallel.random.{module}"))
    assert result.attempted and not result.failed
