"""Copies and adds large arrays with several threads; numpy uses one."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

_LEAST_BYTES = 8 << 20  # A thread takes 0.1 ms to start, in which 1 MB is copied.
_THREADS = min(os.cpu_count() or 1, 4)  # A few saturate the memory of one processor.


def copy(source: Any, out: np.ndarray) -> None:
    """Copies an array into another one of its shape; casts it to the dtype of the other."""

    def copied(source: np.ndarray, out: np.ndarray) -> None:
        out[...] = source

    source = np.asarray(source)
    if source.shape != out.shape:
        copied(source, out)  # It is broadcast, or numpy says why it cannot be.
    else:
        _in_parts(copied, source, out)


def add(first: np.ndarray, second: np.ndarray, out: np.ndarray) -> None:
    """Writes the sum of two arrays of one shape into a third one."""
    _in_parts(lambda *parts: np.add(*parts[:2], out=parts[2]), first, second, out)


def _in_parts(operate: Callable[..., Any], *arrays: np.ndarray) -> None:
    """Calls a function with equal parts of arrays, each in a thread; the last array is large."""
    count = min(_THREADS, arrays[-1].nbytes // _LEAST_BYTES)
    if count < 2 or not all(each.flags.c_contiguous for each in arrays):
        operate(*arrays)
        return
    flat = [each.reshape(-1) for each in arrays]
    cuts = [flat[0].size * part // count for part in range(count + 1)]
    parts = [[each[a:b] for a, b in itertools.pairwise(cuts)] for each in flat]
    with ThreadPoolExecutor(count) as threads:
        try:
            list(threads.map(operate, *parts))  # It raises what an operation has raised.
        except RuntimeError:  # The process is about to end, and starts no thread any more.
            operate(*arrays)
