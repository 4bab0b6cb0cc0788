"""Messages between clients, the coordinator and tasks: a fixed header, plain data, and values.

A message that starts a step is its header alone, unless it brings values. Nothing received is
unpickled: programs travel as StableHLO, everything else as plain data that is checked.
"""

from __future__ import annotations

import math
import struct
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from stepcache.errors import TaskError
from stepcache.link import plain
from stepcache.serving.messages import DTYPES, MalformedMessageError
from stepcache.serving.shared_memory import Block, Opened, Place, Pool, private
from stepcache.units import readable_bytes

_HEADER = struct.Struct("<2sBBIIIIQQ")
_MAGIC, _VERSION = b"sc", 5
_ALIGNED_BYTES = 8  # Where values begin in a blob.
HEADER_BYTES = _HEADER.size
"""Size of the message that starts a step, if it brings no values."""
MAX_MESSAGE_BYTES = 1 << 30
_ARRAY = tuple[str, list[int], int]  # Dtype, shape and place.
BLOCKS = "blocks"
"""Field of a body: where blocks of shared memory are."""


class Kind(IntEnum):
    """What a message says. Those up to `DROP` are commands, which all tasks carry out in order."""

    PROGRAM = 1  # Compile a program, and keep it as number `value`.
    RUN = 2  # Run the call form `value`, as number `number` of the client.
    PUT = 3  # Keep arrays, as the outputs of number `number`.
    BIND = 4  # Make arrays the value of a variable.
    FETCH = 5  # Send arrays.
    FREE = 6  # Drop arrays.
    DROP = 7  # Drop everything that a client holds.
    HELLO = 20  # A client or a task introduces itself.
    WELCOME = 21
    OPEN = 22  # Asks for variables by name.
    OPENED = 23
    NEED_PROGRAM = 24  # The coordinator does not have a program that a client names.
    READY = 25  # A program is compiled.
    DONE = 26  # Runs of a client up to `number` are done.
    FAILED = 27  # The command `number` failed.
    DATA = 28  # Arrays that were asked for.
    LOST = 29  # A task has ended.
    STATUS = 30
    REFUSED = 31
    HANG = 32  # Nothing has come of a client's commands for long: where are the tasks?


COMMANDS = frozenset(Kind(number) for number in range(Kind.PROGRAM, Kind.DROP + 1))


RUNS = frozenset((Kind.RUN, Kind.PUT, Kind.BIND))
"""Commands that fail as a run does: an error of who looks at what they make."""
_KINDS: dict[int, Kind] = {int(kind): kind for kind in Kind}


class Message(NamedTuple):
    """One message.

    Attributes:
        kind: what it says.
        client: number of the client that it is from, about or for; 0 for none.
        incarnation: of the tasks: raised each time they are started.
        number: of a command.
        value: another number; `Kind` says which.
        body: plain data, packed; empty for none.
        blob: a program, or values; empty for none.
    """

    kind: Kind
    client: int = 0
    incarnation: int = 0
    number: int = 0
    value: int = 0
    body: bytes = b""
    blob: bytes | bytearray = b""

    def encoded(self) -> bytes:
        """Returns the message as bytes, for `decode`. Raises `TaskError` if they are too many."""
        kind, client, incarnation, number, value, body, blob = self
        sizes = len(body), len(blob)
        if (body or blob) and self.size_bytes > MAX_MESSAGE_BYTES:
            raise TaskError(
                f"a message would have {readable_bytes(self.size_bytes)}",
                expected=f"at most {readable_bytes(MAX_MESSAGE_BYTES)}",
            )
        header = _HEADER.pack(_MAGIC, _VERSION, kind, client, incarnation, *sizes, number, value)
        return header + body + blob if body or blob else header

    @property
    def size_bytes(self) -> int:
        """Size of the message, without values in shared memory."""
        return HEADER_BYTES + len(self.body) + len(self.blob)

    def data(self, kind: Any = Any) -> Any:
        """Returns the body, unpacked. Raises `MalformedMessageError` if it is not of this kind."""
        try:
            found = plain.unpack(self.body)
        except Exception:
            raise MalformedMessageError("its body cannot be decoded") from None
        if not plain.fits(found, kind):
            raise MalformedMessageError("a field of its body has another type")
        return found


def decode(received: bytearray) -> Message | None:
    """Takes the first message out of what was received; None if it has not arrived as a whole.

    After a `MalformedMessageError`, nothing that follows can be decoded.
    """
    if len(received) < HEADER_BYTES:
        return None
    fields = _HEADER.unpack_from(received)
    magic, version, kind, client, incarnation, body_bytes, blob_bytes, number, value = fields
    if magic != _MAGIC or version != _VERSION:
        raise MalformedMessageError("it is of another protocol, or version")
    end = HEADER_BYTES + body_bytes + blob_bytes
    if end > MAX_MESSAGE_BYTES:
        raise MalformedMessageError(f"it has {end:,} bytes")
    if kind not in _KINDS:
        raise MalformedMessageError(f"there is no message {kind}")
    if len(received) < end:
        return None
    body = blob = b""
    if end > HEADER_BYTES:
        body = bytes(received[HEADER_BYTES : end - blob_bytes])
        blob = bytes(received[end - blob_bytes : end])
    del received[:end]
    return Message(_KINDS[kind], client, incarnation, number, value, body, blob)


def packed(**fields: Any) -> bytes:
    """Packs the fields of a body."""
    return plain.pack(fields)


class Values:
    """The values that a message brings: small ones in its blob, large ones in shared memory.

    Args:
        pool: allocates shared memory; None to put all values into the blob.

    Attributes:
        blob: of the message.
        fields: more fields of its body: the places of blocks of shared memory.
        kept: these blocks, which have to live until the message is answered.
    """

    def __init__(self, pool: Pool | None):
        self._pool = pool
        self.blob = bytearray()
        self.fields: dict[str, list[Any]] = {}
        self.kept: list[Block] = []

    def add(self, array: np.ndarray) -> list[Any]:
        """Adds an array. Returns how the body describes it: its dtype, its shape, and its place.

        The place is an offset in the blob, or -1 - the number of a block of shared memory.
        """
        array = np.asarray(array)
        if not array.flags.c_contiguous:
            array = array.copy()
        raw = array.reshape(-1).view(np.uint8)
        block = (self._pool.allocate if self._pool is not None else private)(raw.size)
        place = block.place
        if place is None:
            self.blob += bytes(-len(self.blob) % _ALIGNED_BYTES)
            where = len(self.blob)
            self.blob += raw.data
        else:
            block.data[:] = raw
            self.kept.append(block)
            where = -len(self.kept)
            self.fields.setdefault(BLOCKS, []).append(place)
        return [array.dtype.name, list(array.shape), where]


def places_in(about: dict[str, Any]) -> list[Place]:
    """Returns the places of the blocks that a body names."""
    rows = about.get(BLOCKS, [])
    if not isinstance(rows, list):
        raise MalformedMessageError("a block has no place")
    return list(map(Place.of, rows))


def receive_array(
    row: Any, about: dict[str, Any], opened: Opened, blob: bytes | bytearray
) -> np.ndarray:
    """Returns an array that `Values.add` has described by `row`, without a copy. It is read only.

    Raises:
        MalformedMessageError: there is no such array.
        OSError: its memory is gone.
    """
    if not plain.fits(row, _ARRAY):
        raise MalformedMessageError("an array has no type, shape and place")
    name, shape, place = row
    if name not in DTYPES or any(n < 0 for n in shape):
        raise MalformedMessageError(f"no array can be {name}{shape}")
    dtype = DTYPES[name]
    count = math.prod(shape)
    size_bytes = dtype.itemsize * count
    if place >= 0:
        if place > len(blob) - size_bytes:
            raise MalformedMessageError(f"there are no {size_bytes} bytes at {place} of the blob")
        return np.frombuffer(blob, dtype, count, place).reshape(shape)
    rows, number = about.get(BLOCKS), -1 - place
    if not isinstance(rows, list) or number >= len(rows):
        raise MalformedMessageError(f"there is no block {number}")
    raw = opened.locked(Place.of(rows[number]))
    if raw.size != size_bytes:
        raise MalformedMessageError(f"{raw.size} bytes are no {name}{shape}")
    return raw.view(dtype).reshape(shape)
