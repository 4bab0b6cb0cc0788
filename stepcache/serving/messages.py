"""The messages between clients and a host of variables: plain data, checked when they arrive.

A value travels beside its message as one block of bytes: its leaves one after the other, in the
order of their types.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import ml_dtypes
import numpy as np

from stepcache.storage import plain

MAX_BLOCK_BYTES = 1 << 40
MAX_LEAVES = 100_000
MAX_NAMES = 10_000
_ALIGNMENT = 64  # Of each leaf in a block, in bytes.

_NARROW = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
DTYPES = {
    name: np.dtype(getattr(ml_dtypes, name, name))
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128", *_NARROW),
    )
}

LeafType = tuple[str, list[int], str]
"""Path, shape and name of the dtype of a leaf."""


class MalformedMessageError(Exception):
    """What arrived is no message, or describes no value that could be held."""


class BlockLayout:
    """How the leaves of a value lie in its block.

    Attributes:
        types: the leaves.
        size_bytes: of the block.

    Raises:
        MalformedMessageError: a dtype is unknown, or the block would be too large.
    """

    def __init__(self, types: Sequence[LeafType]):
        if len(types) > MAX_LEAVES:
            raise MalformedMessageError(f"{len(types):,} leaves; at most {MAX_LEAVES:,} are held")
        self.types = [(path, list(shape), dtype) for path, shape, dtype in types]
        self._places: list[tuple[int, int, tuple[int, ...], np.dtype]] = []
        offset = 0
        for path, shape, dtype in self.types:
            if dtype not in DTYPES or any(size < 0 for size in shape):
                raise MalformedMessageError(f"{path}: no array can be {dtype}{shape}")
            size_bytes = math.prod(shape) * DTYPES[dtype].itemsize
            self._places.append((offset, size_bytes, tuple(shape), DTYPES[dtype]))
            offset += -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
            if offset > MAX_BLOCK_BYTES:
                raise MalformedMessageError(f"{path}: a value of more than {MAX_BLOCK_BYTES} bytes")
        self.size_bytes = offset

    def views(self, data: np.ndarray) -> list[np.ndarray]:
        """The leaves of a block of bytes, without a copy."""
        return [
            data[offset : offset + size_bytes].view(dtype).reshape(shape)
            for offset, size_bytes, shape, dtype in self._places
        ]

    def fill(self, data: np.ndarray, leaves: Sequence[Any]) -> None:
        """Writes leaves into a block, with the shapes and dtypes of its types."""
        for view, leaf in zip(self.views(data), leaves, strict=True):
            view[...] = leaf

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockLayout) and self.types == other.types

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """A client begins, or goes on with a host that was started anew.

    Attributes:
        client: its name, unlike that of any other client.
        process: its process, as `storage.load_markers.Process` writes it.
        first: the number of the first write that it can still send.
        complete: the epoch of the host that it has sent all again that this does not have; or 0.
    """

    client: str
    process: str
    first: int
    complete: int = 0


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """A write. The writes of a client are numbered from 1, and each is done once, in order.

    Attributes:
        client: who writes.
        sequence: the number of the write.
        epoch: of the host that the client has joined.
        name: of the variables.
        mode: "create" (where there are none yet), "assign", "add" or "apply"; for tables "create
            table", and "rows" to update some.
        base: the token of the version that a value was computed from; 0 for whatever version.
        types: of the leaves, to create them.
        rule: the optimizer to create them with, as `optimizers.export_rule` gives it; what a table
            is, as `TableType.packed` does.
        stamp: of a write that is repeated: epoch and moment of the host when it was done first.
        wire: how an update to add or apply is coded in its block; empty for not at all.
    """

    client: str
    sequence: int
    epoch: int
    name: str
    mode: str
    base: int = 0
    types: list[LeafType] = field(default_factory=list)
    rule: bytes = b""
    stamp: tuple[int, int] = (0, 0)
    wire: str = ""


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A look at several variables, as they are at one moment.

    Attributes:
        names: of the variables.
        known: the token of the version that the client has of each; 0 for none.
        values: whether to send the values of other versions.
        wires: how each is to be coded, as in `WriteRequest`; none of them if it is empty.
    """

    names: list[str]
    known: list[int]
    values: bool = True
    wires: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RowsRequest:
    """A look at some rows of a table. Its block has their numbers, of 64 bits.

    Attributes:
        name: of the table.
        epoch: of the host that the client has compared its copies of rows with; 0 for none. Then
            the block has a second number for each row: the table's version when its copy was
            compared, or -1. Only rows that were updated since are sent, after a byte for each row
            asked for: whether it is sent. With -1 for the epoch, all rows are sent, and no bytes.
    """

    name: str
    epoch: int = -1


@dataclass(frozen=True, slots=True)
class DescribeRequest:
    """Asks what some variables are."""

    name: str


@dataclass(frozen=True, slots=True)
class StatusRequest:
    """Asks what the host holds, and what it has done."""


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """Asks for a snapshot, without waiting for it.

    Attributes:
        on_disk: whether it has to be on the disk. If not, an image may be written instead.
    """

    on_disk: bool


Request = (
    JoinRequest
    | WriteRequest
    | ReadRequest
    | RowsRequest
    | DescribeRequest
    | StatusRequest
    | SnapshotRequest
)


@dataclass(frozen=True, slots=True)
class Joined:
    """What the host knows of a client.

    Attributes:
        epoch: of the host: each start has a higher one.
        applied: the number of the client's last write that is done.
        saved: that of the last one in a snapshot or an image.
        lost: the number of writes that the client cannot send any more and the host does not have.
    """

    epoch: int
    applied: int
    saved: int
    lost: int = 0


@dataclass(frozen=True, slots=True)
class Written:
    """A write is done, now or before.

    Attributes:
        epoch: of the host.
        moment: the number of writes of the host until then.
        number, token: the version after it.
        saved: the number of the client's last write in a snapshot or an image.
    """

    epoch: int
    moment: int
    number: int
    token: int
    saved: int


@dataclass(frozen=True, slots=True)
class Values:
    """The versions of what was read; with it come the blocks of those that the client lacks.

    Attributes:
        epoch: of the host.
        moment: the number of writes of the host until then.
        numbers: the versions, each the number of writes so far.
        tokens: of the versions: each stands for one sequence of writes, and so for one value.
        sent: which of them have a block.
    """

    epoch: int
    moment: int
    numbers: list[int]
    tokens: list[int]
    sent: list[bool]


@dataclass(frozen=True, slots=True)
class Described:
    """What some variables are, or a table.

    Attributes:
        epoch: of the host.
        number: their version.
        types: of the leaves; none, of a table.
        has_rule: whether they have an optimizer.
        is_saved: whether a snapshot or an image has them.
    """

    epoch: int
    number: int
    types: list[LeafType]
    has_rule: bool
    is_saved: bool


@dataclass(frozen=True, slots=True)
class Status:
    """What the host holds, and what it has done.

    Attributes:
        epoch: of the host.
        variables: name, version, bytes of the value and of the optimizer's state, and number of
            leaves.
        clients: name, process, number of the last write done, and of the last one that is in a
            snapshot or an image.
        counts: numbers, bytes and seconds, by name.
        snapshot: which was written last; empty for none.
        stored: the number of writes of the host that it has.
        hosts: how many share the set that this one belongs to.
    """

    epoch: int
    variables: list[tuple[str, int, int, int, int]]
    clients: list[tuple[str, str, int, int]]
    counts: dict[str, float]
    snapshot: str = ""
    stored: int = 0
    hosts: int = 1


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that nothing was done for.

    Attributes:
        kind: "unknown" variables, another "type", a "conflict" with another client's write, an old
            "epoch", a "gap" before the write, a write that "failed", or a "malformed" message; or
            it is "recovering": its clients have to send again what it lacks.
        why: in words.
        epoch: of the host.
    """

    kind: str
    why: str
    epoch: int


Reply = Joined | Written | Values | Described | Status | Refused

_KINDS: dict[str, type] = {
    each.__name__: each
    for each in (
        *(JoinRequest, WriteRequest, ReadRequest, RowsRequest, DescribeRequest),
        *(StatusRequest, SnapshotRequest),
        *(Joined, Written, Values, Described, Status, Refused),
    )
}


def to_plain(message: Request | Reply) -> list[Any]:
    """A message as plain data."""
    return [
        type(message).__name__,
        {name: getattr(message, name) for name in _names(type(message))},
    ]


def from_plain(data: Any) -> Any:
    """The message that was made plain.

    Raises:
        MalformedMessageError: it is none.
    """
    try:
        name, values = data
        kind = _KINDS[name]
        message = kind(**values)
    except (TypeError, ValueError, KeyError):
        raise MalformedMessageError("it is no message") from None
    if not plain.fits(message, kind):
        raise MalformedMessageError(f"a field of {name} is of another type")
    return message


@functools.cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind))
