"""The messages between clients and a host of variables: plain data, checked when they arrive.

A value is sent beside its message, as one block of bytes that holds its leaves in the order of
their types.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, get_args

import ml_dtypes
import numpy as np

from stepcache.link import plain
from stepcache.serving import bulk

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


class RefusalError(Exception):
    """The host refuses a request, and changes nothing. `kind` is that of `Refused`."""

    def __init__(self, kind: str, why: str):
        super().__init__(why)
        self.kind = kind


class MalformedMessageError(RefusalError):
    """A message that cannot be decoded, or that describes a value which cannot be held."""

    def __init__(self, why: str):
        super().__init__("malformed", why)


def is_text(text: str) -> bool:
    """Returns whether UTF-8 can write a text, as snapshots must: it has no half of a pair."""
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


def check_name(name: str, held: Sized = ()) -> None:
    """Raises `MalformedMessageError` for what is no name, or if too many are held."""
    if not name or not is_text(name) or len(held) >= MAX_NAMES:
        raise MalformedMessageError(f"it is no name, or there are {MAX_NAMES:,} already")


class BlockLayout:
    """Layout of the leaves of a value in its block.

    Attributes:
        types: path, shape and dtype of each leaf.
        size_bytes: size of the block.

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
            if dtype not in DTYPES or any(size < 0 for size in shape) or not is_text(path):
                raise MalformedMessageError(f"{path!r}: {dtype}{shape} is not the type of an array")
            size_bytes = math.prod(shape) * DTYPES[dtype].itemsize
            self._places.append((offset, size_bytes, tuple(shape), DTYPES[dtype]))
            offset += -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
            if offset > MAX_BLOCK_BYTES:
                raise MalformedMessageError(f"{path}: a value of more than {MAX_BLOCK_BYTES} bytes")
        self.size_bytes = offset

    def has(self, types: Sequence[LeafType]) -> bool:
        """Returns whether these are its types."""
        return [*map(tuple, types)] == self.types

    def views(self, data: np.ndarray) -> list[np.ndarray]:
        """Returns the leaves of a block as views of its bytes."""
        return [
            data[offset : offset + size_bytes].view(dtype).reshape(shape)
            for offset, size_bytes, shape, dtype in self._places
        ]

    def fill(self, data: np.ndarray, leaves: Sequence[Any]) -> None:
        """Writes leaves into a block; casts them to the dtypes of the layout."""
        for view, leaf in zip(self.views(data), leaves, strict=True):
            bulk.copy(leaf, view)

    def difference(self, other: BlockLayout) -> str:
        """Describes the first leaf that differs from the leaves of an unequal layout."""
        held, given = (
            {path: f"{dtype}{shape}" for path, shape, dtype in each.types} for each in (self, other)
        )
        for path in held | given:
            there, here = held.get(path), given.get(path)
            if there is None or here is None:
                return f"has {'no' if there is None else 'a'} leaf {path!r}"
            if there != here:
                return f"its leaf {path!r} is {there}, not {here}"
        return "has its leaves in another order"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockLayout) and self.types == other.types

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """Registers a client with the host, also each time the host has restarted.

    Attributes:
        client: a unique name of the client.
        process: its process, as `storage.load_markers.Process` writes it; empty if the client
            leaves, and after a crash the host need not wait for it.
        first: number of the oldest write that the client has kept.
        complete: epoch of the host to which the client has repeated all lost writes; 0 before that.
    """

    client: str
    process: str
    first: int
    complete: int = 0


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """One write. A client numbers its writes from 1; the host applies each exactly once, in order.

    Attributes:
        client: name of the client.
        sequence: number of the write.
        epoch: epoch of the host that the client has joined.
        name: name of the variables or of the table.
        mode: for variables, "create" (does nothing if they exist), "assign", "add", "apply" or
            "replace optimizer"; for tables, "create table", "alter table" (creates it, or replaces
            its optimizer) or "rows" (updates some rows).
        base: token of the version that the value was computed from; 0 accepts any version.
        types: types of the leaves; of "create" and "rows" only.
        rule: of "create" and "replace optimizer", the optimizer, as `optimizers.export_rule`
            returns it; of "create table" and "alter table", the type of the table, as
            `TableType.packed` returns it.
        stamp: of a repeated write, epoch and moment of the host when it was first applied.
        serial: number among all writes of the client, refused ones included. The next write after a
            refused one has the same `sequence`, and another serial.
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
    serial: int = 0


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Reads several variables as of one moment.

    Attributes:
        names: names of the variables.
        known: tokens of the versions that the client has; 0 for none.
        values: whether to send the values of newer versions, or the versions alone.
    """

    names: list[str]
    known: list[int]
    values: bool = True


@dataclass(frozen=True, slots=True)
class RowsRequest:
    """Reads rows of a table. Its block holds the row numbers as int64.

    Attributes:
        name: name of the table.
        epoch: -1 to get all rows. Otherwise the epoch in which the client compared its copies of
            the rows, or 0 if it has none: then the block also holds, for each row, the version of
            the table when its copy was compared, or -1; and the reply holds one byte for each row,
            which is 1 if the row was updated since, and those rows.
    """

    name: str
    epoch: int = -1


@dataclass(frozen=True, slots=True)
class DescribeRequest:
    """Asks for the types and the version of some variables."""

    name: str


@dataclass(frozen=True, slots=True)
class StatusRequest:
    """Asks for the contents and the counters of the host."""


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """Asks for a snapshot. The reply does not wait for it.

    Attributes:
        on_disk: whether it must be on disk. If not, an image may be written instead.
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
    """Reply to a `JoinRequest`.

    Attributes:
        epoch: epoch of the host; each start of the host has a higher one.
        applied: number of the client's last write that the host has applied.
        saved: number of the client's last write that a snapshot or an image holds.
        lost: how many writes the client has forgotten and the host does not have.
    """

    epoch: int
    applied: int
    saved: int
    lost: int = 0


@dataclass(frozen=True, slots=True)
class Written:
    """The host has applied a write, now or earlier.

    Attributes:
        moment: how many writes the host had applied after this one.
        number, token: version of the variables or of the table after this one. Others may have
            written since, if the host confirms it once more.
        saved: number of the client's last write that a snapshot or an image holds.
    """

    epoch: int
    moment: int
    number: int
    token: int
    saved: int


@dataclass(frozen=True, slots=True)
class Values:
    """Reply to a read: the versions, and beside them the blocks of those that the client lacks.

    Attributes:
        moment: how many writes the host has applied.
        numbers: the versions: how often each was written.
        tokens: tokens of the versions. Equal tokens stand for the same sequence of writes, and so
            for the same value.
        sent: whether each has a block.
    """

    epoch: int
    moment: int
    numbers: list[int]
    tokens: list[int]
    sent: list[bool]


@dataclass(frozen=True, slots=True)
class Described:
    """Reply to a `DescribeRequest`.

    Attributes:
        number: version of the variables or of the table.
        types: types of the leaves; empty for a table.
        has_rule: whether they have an optimizer.
        is_saved: whether a snapshot or an image holds them.
        optimizer: `ExportedRule.identity` of their optimizer; empty if it has none or for a table.
    """

    epoch: int
    number: int
    types: list[LeafType]
    has_rule: bool
    is_saved: bool
    optimizer: str = ""


@dataclass(frozen=True, slots=True)
class Status:
    """Contents and counters of a host.

    Attributes:
        variables: of each, name, version, bytes of the value and of the optimizer's state, and
            number of leaves.
        clients: of each, name, process, number of the last write applied, and of the last one that
            a snapshot or an image holds.
        counts: counters, in bytes, seconds or numbers, by name.
        snapshot: name of the latest snapshot; empty for none.
        stored: how many writes of the host that snapshot holds.
        hosts: how many hosts share the variables.
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
    """The host refuses a request, and has changed nothing.

    Attributes:
        kind: "unknown" variables, another "type", a "conflict" with another client's write, an old
            "epoch", a "gap" in the client's writes, a write that "failed", or a "malformed"
            message; "recovering" while the host waits for clients to repeat lost writes.
        why: the reason, as text.
    """

    kind: str
    why: str
    epoch: int


Reply = Joined | Written | Values | Described | Status | Refused
"""Each has the epoch of the host."""

_KINDS: dict[str, type] = {each.__name__: each for each in (*get_args(Request), *get_args(Reply))}


def to_plain(message: Request | Reply) -> list[Any]:
    """Converts a message to plain data."""
    names = message.__slots__
    return [type(message).__name__, {name: getattr(message, name) for name in names}]


def from_plain(data: Any) -> Any:
    """Converts plain data to a message. Raises `MalformedMessageError` for what is none."""
    try:
        name, values = data
        kind = _KINDS[name]
        message = kind(**values)
    except (TypeError, ValueError, KeyError):
        raise MalformedMessageError("the data is not a message") from None
    if not plain.fits(message, kind):
        raise MalformedMessageError(f"a field of {name} has another type")
    return message
