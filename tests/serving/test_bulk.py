"""Copies and sums in several threads."""

import numpy as np
import pytest

from stepcache.serving import bulk

SHAPES = [(), (3,), (7, 1_000_003), (13, 5, 100_001)]


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    monkeypatch.setattr(bulk, "_THREADS", 3)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [np.float32, np.int8])
def test_a_copy_is_the_source_in_the_dtype_of_the_target(shape, dtype):
    source = np.arange(np.prod(shape, dtype=int), dtype=np.float64).reshape(shape) % 100
    out = np.full(shape, -1, dtype)
    bulk.copy(source, out)
    assert np.array_equal(out, source.astype(dtype))


def test_what_is_not_contiguous_is_copied():
    source = np.arange(12_000_000, dtype=np.float32).reshape(3000, 4000).T
    out = np.zeros(source.shape, np.float32)
    bulk.copy(source, out)
    assert np.array_equal(out, source)


def test_another_shape_is_broadcast_or_refused():
    out = np.zeros((1000, 10_000), np.float32)
    bulk.copy(3.0, out)
    assert (out == 3).all()
    with pytest.raises(ValueError, match="broadcast"):
        bulk.copy(np.zeros(7), out)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_sum(shape):
    first = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    out = np.zeros(shape, np.float32)
    bulk.add(first, first, out)
    assert np.array_equal(out, 2 * first)


def test_an_error_of_a_thread_is_raised():
    source = np.zeros(12_000_000, np.float32).astype(object)
    source[-1] = "no number"
    with pytest.raises(ValueError, match="no number"):
        bulk.copy(source, np.zeros(12_000_000, np.float32))
