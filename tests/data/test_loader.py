"""A batch is a function of (key, step): every window once an epoch, in an order that the key decides."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fparallel.data import Loader
from fparallel.errors import DataError


def key(seed: int, stream: int = 0) -> torch.Tensor:
    return torch.tensor([seed, stream])


def counting(length: int) -> np.ndarray:
    """Bytes 1, 2, 3 ... 255, 1, 2 ..."""
    return (np.arange(length) % 255 + 1).astype(np.uint8)


def test_shapes_dtypes_and_targets_one_byte_ahead():
    batch = Loader(counting(1000), batch=3, seq=16)(key(0), 5)
    assert {k: (v.dtype, tuple(v.shape)) for k, v in batch.items()} == {
        "tokens": (torch.int64, (3, 16)),
        "targets": (torch.int64, (3, 16)),
        "mask": (torch.float32, (3, 16)),
    }
    assert torch.equal(batch["targets"], batch["tokens"] % 255 + 1)
    assert torch.equal(batch["mask"], torch.ones(3, 16))


def test_the_first_byte_of_another_file_is_masked():
    data = np.frombuffer(b"ab\0cd\0ef\0", dtype=np.uint8)
    batch = Loader(data, batch=1, seq=8)(key(0), 0)
    assert batch["tokens"].tolist() == [list(b"ab\0cd\0ef")]
    assert batch["targets"].tolist() == [list(b"b\0cd\0ef\0")]
    assert batch["mask"].tolist() == [[1, 1, 0, 1, 1, 0, 1, 1]]


@given(
    st.integers(2, 2000),
    st.integers(1, 50),
    st.integers(1, 9),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 3),
)
def test_an_epoch_takes_every_window_once(length, seq, batch, seed, epoch):
    seq = min(seq, length - 1)
    loader = Loader(np.zeros(length, np.uint8), batch=batch, seq=seq)
    rows = np.arange(epoch * loader.windows, (epoch + 1) * loader.windows, dtype=np.uint64)
    starts = np.sort(loader._starts(key(seed).numpy().view(np.uint64), rows))
    assert starts[0] >= 0 and starts[-1] + seq + 1 <= length
    assert np.array_equal(np.diff(starts), np.full(loader.windows - 1, seq))
    assert loader.windows == (length - 1) // seq


@given(st.integers(0, 10**12), st.integers(1, 8), st.integers(0, 2**63 - 1))
def test_any_step_is_the_same_whatever_came_before(step, batch, seed):
    data = np.random.default_rng(0).integers(1, 255, 5000, dtype=np.uint8)
    first, second = (Loader(data, batch=batch, seq=8) for _ in range(2))
    second(key(1), 0)
    for name, value in first(key(seed), step).items():
        assert torch.equal(value, second(key(seed), step)[name])


def test_rows_depend_on_their_position_in_the_stream_not_on_the_batch_size():
    data = counting(5000)
    small = [Loader(data, batch=2, seq=8)(key(3), step)["tokens"] for step in range(6)]
    large = [Loader(data, batch=4, seq=8)(key(3), step)["tokens"] for step in range(3)]
    assert torch.equal(torch.cat(small), torch.cat(large))


def test_the_order_differs_between_keys_and_between_epochs():
    loader = Loader(counting(1024 * 8 + 8), batch=1024, seq=8)
    assert loader.windows == 1024

    def starts(k: torch.Tensor, epoch: int) -> np.ndarray:
        rows = np.arange(epoch * 1024, (epoch + 1) * 1024, dtype=np.uint64)
        return loader._starts(k.numpy().view(np.uint64), rows) // 8

    orders = [starts(key(0), 0), starts(key(1), 0), starts(key(0, 1), 0), starts(key(0), 1), np.arange(1024)]
    for i, a in enumerate(orders):
        for b in orders[:i]:
            assert (a == b).sum() < 12  # two random orders of 1024 agree in one place on average


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"batch": 1, "seq": 10}, "needs 11 bytes, the text has 10"),
        ({"batch": 0, "seq": 1}, "batch=0"),
        ({"batch": 1, "seq": 0}, "seq=0"),
    ],
)
def test_impossible_sizes_are_refused(arguments, found):
    with pytest.raises(DataError, match=found):
        Loader(counting(10), **arguments)


def test_a_key_is_two_integers():
    with pytest.raises(DataError, match="key"):
        Loader(counting(10), batch=1, seq=2)(torch.tensor(0), 0)
