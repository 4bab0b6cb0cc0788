"""The file format of a stored entry, authenticated by an HMAC.

    magic, format version, header length │ header (msgpack) │ HMAC-SHA256 of all that │ payload

The header holds the SHA-256 of the payload as stored, which is compressed, so the HMAC covers the
payload too, and a header can be trusted without a look at what follows it. Nothing is decoded
before it is authenticated. File names are chosen in `directory.py`.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import zlib
from typing import Any, BinaryIO, NamedTuple

from stepcache.errors import OptionError
from stepcache.link import plain

FORMAT_VERSION = 2
KEY_BYTES = 32
MAX_HEADER_BYTES = 16 << 20

_MAGIC = b"stepcach"
_PREFIX = struct.Struct("<8sII")
_HMAC_BYTES = 32
# To compress a small payload takes longer than to write it.
_COMPRESSION_LEVEL, _SMALL_BYTES = 1, 64 << 10


class DamagedEntryError(Exception):
    """The bytes are not an entry as it was stored; the text says why. Users never see it raised."""


class Header(NamedTuple):
    """What an entry says of itself. The file holds these fields by their names."""

    kind: str  # What sort of thing is stored.
    digest: str  # The name of the thing, in hex.
    created_time: float  # When it was stored, in seconds since the epoch.
    stored_bytes: int  # Size of the payload as stored.
    sha256: bytes  # Of the payload as stored.
    about: dict[Any, Any]  # What the one who stored it had to say.


class EntryInfo(NamedTuple):
    """A stored entry, for its users. If it is damaged, header and `created_time` are None."""

    kind: str  # What sort of thing it is.
    digest: str  # Its name.
    header: dict[str, Any] | None  # The description given when it was stored.
    size_bytes: int  # Size of its file.
    created_time: float | None  # When it was stored, in seconds since the epoch.
    used_time: float  # When it was last used before, likewise, to the minute.
    problem: str | None = None  # What is wrong with it.
    payload: bytes = b""  # Empty if it is damaged, or only listed.


class Refusal(NamedTuple):
    """An entry that was not handed out, and why."""

    kind: str
    digest: str
    reason: str


def encode(
    key: bytes, kind: str, digest: str, created_time: float, about: dict[str, Any], payload: bytes
) -> tuple[bytes, bytes]:
    """The file of an entry: what goes before the payload, and the payload as it is stored.

    Raises `OptionError` if msgpack cannot hold `about`, or it is too large.
    """
    stored = zlib.compress(payload, _COMPRESSION_LEVEL if len(payload) > _SMALL_BYTES else 0)
    sha256 = hashlib.sha256(stored).digest()
    header = Header(kind, digest, created_time, len(stored), sha256, about)
    try:
        packed = plain.pack(plain.fields_of(header))
        if len(packed) > MAX_HEADER_BYTES:
            raise ValueError(f"{len(packed):,} bytes; at most {MAX_HEADER_BYTES:,} are kept")
    except (TypeError, ValueError, OverflowError) as error:
        raise OptionError(
            "The header of a stored entry cannot be written",
            where="header",
            expected="nothing but None, bool, int, float, str, bytes, list and dict",
            got=f"{type(error).__name__}: {error}",
        ) from error
    signed = _PREFIX.pack(_MAGIC, FORMAT_VERSION, len(packed)) + packed
    return signed + hmac.digest(key, signed, "sha256"), stored


def read_header(file: BinaryIO, file_bytes: int, key: bytes, kind: str, digest: str) -> Header:
    """Reads and authenticates the header of an entry, and leaves `file`, of so many bytes in all,
    at the payload.

    Raises `DamagedEntryError` if it is no entry, or not whole, or not under this key and name.
    """
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size:
        raise DamagedEntryError(f"it is cut off after {file_bytes} bytes")
    magic, version, header_bytes = _PREFIX.unpack(prefix)
    if magic != _MAGIC:
        raise DamagedEntryError("it is not an entry of stepcache")
    if version != FORMAT_VERSION:
        raise DamagedEntryError(f"it has format {version}; this stepcache reads {FORMAT_VERSION}")
    if header_bytes > MAX_HEADER_BYTES:
        raise DamagedEntryError(f"it claims a header of {header_bytes:,} bytes")
    packed, given = file.read(header_bytes), file.read(_HMAC_BYTES)
    if len(given) != _HMAC_BYTES:
        raise DamagedEntryError(f"it is cut off within its header, after {file_bytes:,} bytes")
    if not hmac.compare_digest(given, hmac.digest(key, prefix + packed, "sha256")):
        raise DamagedEntryError("its header is damaged, or was written under another key")
    try:
        header = plain.record_of(Header, plain.unpack(packed))
    except ValueError as error:  # Whoever wrote it has the key, but may be another version of us.
        raise DamagedEntryError(f"its header makes no sense: {error}") from error
    expected = _PREFIX.size + header_bytes + _HMAC_BYTES + header.stored_bytes
    if expected != file_bytes:
        raise DamagedEntryError(f"it has {file_bytes:,} bytes where {expected:,} were written")
    if (header.kind, header.digest) != (kind, digest):
        raise DamagedEntryError(f"it was stored as {header.kind} {header.digest}")
    return header


def read_payload(file: BinaryIO, header: Header) -> bytes:
    """Reads the payload after a header. Raises `DamagedEntryError` if it has changed."""
    stored = file.read(header.stored_bytes)
    if hashlib.sha256(stored).digest() != header.sha256:
        raise DamagedEntryError("its payload does not have the checksum of what was stored")
    try:
        return zlib.decompress(stored)
    except zlib.error as error:
        raise DamagedEntryError(f"its payload cannot be decompressed ({error})") from error
