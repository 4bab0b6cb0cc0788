"""`Coding`: how values are coded in the blocks that are sent. `ErrorFeedback`: for updates."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stepcache.serving.messages import DTYPES, BlockLayout, LeafType, MalformedMessageError
from stepcache.variables.policy import WIRES
from stepcache.variables.wire import coded_arrays, codes, decode, encode


class CodedLeaf:
    """How one leaf is coded: as several arrays, or not at all.

    Attributes:
        shape, dtype: shape and dtype of the leaf.
        wire: wire of this leaf; None if it is not coded.
        arrays: shape and dtype of each array in the block.
    """

    def __init__(self, shape: Sequence[int], dtype: np.dtype, wire: str | None):
        self.shape, self.dtype = tuple(shape), dtype
        size = math.prod(shape)
        self.wire = wire if codes(wire, dtype, size) else None
        self.arrays: list[tuple[tuple[int, ...], np.dtype]] = [(self.shape, dtype)]
        if self.wire:
            self.arrays = [((count,), each) for count, each in coded_arrays(self.wire, size)]

    @property
    def size_bytes(self) -> int:
        """Total size of its arrays."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.arrays)

    def encode(self, value: np.ndarray) -> list[np.ndarray]:
        """Codes a value with numpy."""
        if self.wire is None:
            return [value]
        return list(encode(self.wire, value.reshape(-1), xp=np))

    def decode(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Decodes a value with numpy."""
        if self.wire is None:
            return arrays[0]
        return decode(self.wire, arrays, self.shape, self.dtype, xp=np)


class Coding:
    """How a value is coded in the block that is sent.

    Args:
        types: types of its leaves.
        wire: as in `Read` and `Write`; None or "" for none.

    Attributes:
        wire: as given, or None.
        leaves: coding of each leaf.
        layout: layout of the block.
        size_bytes: size of the arrays in the block, without padding.

    Raises:
        MalformedMessageError: there is no such wire.
    """

    def __init__(self, types: Sequence[LeafType], wire: str | None = None):
        self.wire = wire or None
        if self.wire not in WIRES:
            raise MalformedMessageError(f"unknown wire {wire!r}")
        self.leaves = [CodedLeaf(shape, DTYPES[dtype], self.wire) for _, shape, dtype in types]
        rows = [
            (path, list(shape), dtype.name)
            for (path, _, _), leaf in zip(types, self.leaves, strict=True)
            for shape, dtype in leaf.arrays
        ]
        self.layout = BlockLayout(rows)
        self.size_bytes = sum(leaf.size_bytes for leaf in self.leaves)

    def of_leaves(self, arrays: Sequence[Any]) -> list[Sequence[Any]]:
        """Groups the arrays of a block by leaf."""
        rest = iter(arrays)
        return [[next(rest) for _ in leaf.arrays] for leaf in self.leaves]

    def encode(self, leaves: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Codes leaves with numpy; returns the arrays of the block."""
        rows = zip(self.leaves, leaves, strict=True)
        return [array for leaf, value in rows for array in leaf.encode(value)]

    def decode(self, data: np.ndarray) -> list[np.ndarray]:
        """Decodes the leaves of a block with numpy. Leaves that are not coded are views."""
        rows = zip(self.leaves, self.of_leaves(self.layout.views(data)), strict=True)
        return [leaf.decode(arrays) for leaf, arrays in rows]


class ErrorFeedback:
    """Codes the updates of one process, and adds the rounding error of each to the next one.

    So the sum of the coded updates is the sum of the updates, up to the last rounding error. The
    error is kept in float32, on the devices, or in host memory for updates of numpy arrays.

    The idea is that of 1-bit SGD (Seide et al., Interspeech 2014). Karimireddy et al. (ICML 2019)
    show that SGD with it converges as fast as without rounding.
    """

    def __init__(self, coding: Coding):
        self.coding = coding
        sizes = [math.prod(leaf.shape) if leaf.wire else 0 for leaf in coding.leaves]
        self._left: list[Any] = [np.zeros(size, np.float32) for size in sizes]

    def encode(self, leaves: Sequence[Any]) -> tuple[list[np.ndarray], list[Any]]:
        """Codes an update. Returns the arrays of its block, and the rounding errors for `keep`."""
        arrays, left = [], []
        for leaf, value, before in zip(self.coding.leaves, leaves, self._left, strict=True):
            if leaf.wire is None:
                arrays.append(np.asarray(value))
                left.append(before)
                continue
            if isinstance(value, jax.Array):
                coded, rest = _encoder(leaf.wire, leaf.dtype)(value, before)
            else:
                value, before = np.asarray(value), np.asarray(before)
                coded, rest = _coded(leaf.wire, leaf.dtype, value, before, np)
            arrays += map(np.asarray, coded)
            left.append(rest)
        return arrays, left

    def keep(self, left: list[Any]) -> None:
        """Stores the rounding errors of an update that is sent, to add them to the next one."""
        self._left = left

    def host_bytes(self, leaves: Sequence[Any]) -> int:
        """Returns how many bytes of an update are moved from the devices to the host."""
        return sum(
            leaf.size_bytes if leaf.wire else value.nbytes
            for leaf, value in zip(self.coding.leaves, leaves, strict=True)
            if isinstance(value, jax.Array)
        )


def _coded(wire: str, dtype: Any, update: Any, left: Any, xp: Any) -> tuple[tuple[Any, ...], Any]:
    """Codes an update plus an earlier rounding error; returns its arrays and the new error."""
    wide = dtype if dtype.itemsize > 4 else np.dtype(np.float32)
    wanted = update.astype(dtype).astype(wide).reshape(-1) + left
    coded = encode(wire, wanted, xp=xp)
    left = wanted - decode(wire, coded, wanted.shape, dtype, xp=xp).astype(wide)
    return coded, xp.where(xp.isfinite(left), left, 0)


@functools.lru_cache(maxsize=64)
def _encoder(wire: str, dtype: np.dtype) -> Any:
    return jax.jit(lambda update, left: _coded(wire, dtype, update, left, jnp))
