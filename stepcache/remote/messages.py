"""Messages between clients, the coordinator and tasks: a fixed header, plain data, and values.

A message that starts a step is its header alone, unless it brings values. Nothing received is
unpickled: programs travel as StableHLO, everything else as plain data that is checked.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from stepcache.serving.messages import DTYPES, MalformedMessageError
from stepcache.serving.shared_memory import Place
from stepcache.storage import plain

_HEADER = struct.Struct("<2sBBIQQQ")
_MAGIC, _VERSION = b"sc", 1
HEADER_BYTES = _HEADER.size
"""Size of the message that starts a step, if it brings no values."""
MAX_BODY_BYTES = 1 << 30


class Kind(IntEnum):
    """What a message says. Those up to `DROP` are commands, which all tasks carry out in order."""

    PROGRAM = 1  # Compile a program, and keep it as number `value`.
    RUN = 2  # Run the call form `value`, as number `number` of the client.
    PUT = 3  # Keep arrays, as the outputs of number `number`.
    BIND = 4  # Make arrays the value of a variable.
    FETCH = 5  # Send arrays.
    FREE = 6  # Drop arrays.
    SAVE = 7  # Write variables and arrays to a checkpoint.
    RESTORE = 8  # Read them.
    DROP = 9  # Drop everything that a client holds.
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
    BYE = 32
    STOP = 33


COMMANDS = frozenset(Kind(number) for number in range(Kind.PROGRAM, Kind.DROP + 1))


class Message(NamedTuple):
    """One message.

    Attributes:
        kind: what it says.
        client: number of the client that it is from, about or for; 0 for none.
        incarnation: of the tasks: raised each time they are started.
        number: of a command.
        value: another number; `Kind` says which.
        body: plain data, packed; empty for none.
        blobs: values that travel with the message.
    """

    kind: Kind
    client: int = 0
    incarnation: int = 0
    number: int = 0
    value: int = 0
    body: bytes = b""
    blobs: Sequence[Any] = ()

    def frames(self) -> list[Any]:
        """Returns the frames of a ZeroMQ message."""
        header = _HEADER.pack(
            _MAGIC, _VERSION, self.kind, self.client, self.incarnation, self.number, self.value
        )
        if not self.body and not self.blobs:
            return [header]
        return [header, self.body, *self.blobs]

    @property
    def size_bytes(self) -> int:
        """Size of the message, without values in shared memory."""
        return HEADER_BYTES + len(self.body) + sum(len(memoryview(x)) for x in self.blobs)

    def data(self, kind: Any = Any) -> Any:
        """Returns the body, unpacked.

        Raises:
            MalformedMessageError: it is no plain data of this kind.
        """
        try:
            found = plain.unpack(self.body)
        except Exception:
            raise MalformedMessageError("its body cannot be decoded") from None
        if not plain.fits(found, kind):
            raise MalformedMessageError("a field of its body has another type")
        return found


def parse(frames: Sequence[Any]) -> Message:
    """Decodes the frames of a message.

    Raises:
        MalformedMessageError: they are none.
    """
    if not frames:
        raise MalformedMessageError("it has no frames")
    header = bytes(frames[0])
    if len(header) != HEADER_BYTES:
        raise MalformedMessageError(f"its header has {len(header)} bytes")
    magic, version, kind, *numbers = _HEADER.unpack(header)
    if (magic, version) != (_MAGIC, _VERSION):
        raise MalformedMessageError("it is of another protocol, or version")
    if kind not in Kind._value2member_map_:
        raise MalformedMessageError(f"there is no message {kind}")
    client, incarnation, number, value = numbers
    body = bytes(frames[1]) if len(frames) > 1 else b""
    return Message(Kind(kind), client, incarnation, number, value, body, tuple(frames[2:]))


def packed(**fields: Any) -> bytes:
    """Packs the fields of a body."""
    return plain.pack(fields)


# ---- values ------------------------------------------------------------------------------------


def send_array(array: np.ndarray, pool: Any, blobs: list[Any], kept: list[Any]) -> list[Any]:
    """Describes an array for a message; large ones go to shared memory.

    Returns:
        Its type, its shape, and the place of its bytes: process, descriptor, inode, offset and size
        of shared memory, or the number of a blob.

    Args:
        array: the array.
        pool: allocates shared memory.
        blobs: of the message; small arrays are added.
        kept: what has to live until the message is answered; blocks are added.
    """
    array = np.asarray(array)
    if not array.flags.c_contiguous:
        array = array.copy()
    raw = array.reshape(-1).view(np.uint8)
    block = pool.allocate(raw.size)
    if block.place is None:
        blobs.append(raw.tobytes())
        return [array.dtype.name, list(array.shape), len(blobs) - 1]
    block.data[:] = raw
    kept.append(block)
    place = block.place
    return [
        array.dtype.name,
        list(array.shape),
        [place.pid, place.descriptor, place.inode, place.offset, place.size_bytes],
    ]


def receive_array(row: Any, opened: Any, blobs: Sequence[Any]) -> np.ndarray:
    """Returns an array that `send_array` has described, without a copy. It is read only.

    Raises:
        MalformedMessageError: there is no such array.
        OSError: its memory is gone.
    """
    if not plain.fits(row, list[Any]) or len(row) != 3:
        raise MalformedMessageError("an array has no type, shape and place")
    name, shape, place = row
    if name not in DTYPES or not plain.fits(shape, list[int]) or any(n < 0 for n in shape):
        raise MalformedMessageError(f"no array can be {name}{shape}")
    if plain.fits(place, int):
        if not 0 <= place < len(blobs):
            raise MalformedMessageError(f"there is no value {place}")
        raw = np.frombuffer(blobs[place], np.uint8) if len(blobs[place]) else np.empty(0, np.uint8)
    elif plain.fits(place, tuple[int, int, int, int, int]):
        raw = opened.locked(Place(*place))
    else:
        raise MalformedMessageError("an array has no place")
    dtype = DTYPES[name]
    if raw.size != dtype.itemsize * int(np.prod(shape, dtype=np.int64)):
        raise MalformedMessageError(f"{raw.size} bytes are no {name}{shape}")
    return raw.view(dtype).reshape(shape)
