"""The file format of a bundle, which carries programs from one directory to another.

A bundle is an uncompressed tar file with 64 bytes behind it:

    stepcache-bundle     the format version, as text
    program/<digest>     an entry in the disk format (`entry.py`), under a key that bundles share
    step/<digest>        likewise; the steps follow the programs
    (behind the tar)     SHA-256 of the tar file, and its HMAC under the exporting directory's key

Nothing is extracted: member names are only labels, and each tar header must be exactly what is
written here, which rules out links, sparse files and extended headers. No entry is decoded before
the SHA-256 agrees. Whether the maker is trusted is for `moving.py` to decide.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import stat
import tarfile
from collections.abc import Iterator
from typing import IO, Any, BinaryIO, NamedTuple

from stepcache.fingerprint.dependencies import digest_dependencies
from stepcache.programs.archive import RECORDS_KEPT
from stepcache.storage import entry as entries
from stepcache.storage import plain
from stepcache.storage.dependency_record import DependencyRecord, unpack_records
from stepcache.storage.disk_store import DiskStore
from stepcache.storage.entry import DamagedEntryError, Header

_FORMAT = "3"
_FIRST = "stepcache-bundle"
PURPOSE = b"bundle of stepcache\0"
_SHARED_KEY = bytes(entries.KEY_BYTES)  # The HMAC behind the tar file is the one that counts.
_SHA_BYTES = 32
_SIGNATURE_BYTES = 2 * _SHA_BYTES
_NAME = re.compile(r"(step|program)/[0-9a-f]{1,64}")
_BLOCK = tarfile.BLOCKSIZE
_MAX_BYTES = {"step": 1 << 30, "program": 16 << 30}


class Step(NamedTuple):
    """A step's entry."""

    digest: str
    label: str
    records: list[DependencyRecord]


@contextlib.contextmanager
def signed_tar(file: IO[bytes], disk: DiskStore) -> Iterator[tarfile.TarFile]:
    """Opens a tar file for entries of a bundle, and at the end signs it with the key of `disk`."""
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as tar:
        add_member(tar, _FIRST, _FORMAT.encode())
        yield tar
    sha256 = _sha256(file, file.tell())
    file.write(sha256 + disk.vouch(PURPOSE + sha256))


def add_member(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    tar.addfile(_tar_info(name, len(data)), io.BytesIO(data))


def add_entry(
    tar: tarfile.TarFile, kind: str, digest: str, about: dict[str, Any], payload: bytes
) -> None:
    stored = entries.store(payload)
    head = entries.encode_head(_SHARED_KEY, kind, digest, 0.0, about, stored)
    add_member(tar, f"{kind}/{digest}", head + stored.payload)


def _tar_info(name: str, size_bytes: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size = size_bytes
    return info


def _sha256(file: IO[bytes], size_bytes: int) -> bytes:
    """Returns the SHA-256 of the first bytes of a file, and leaves the file at their end."""
    hasher = hashlib.sha256()
    file.seek(0)
    while size_bytes > 0 and (chunk := file.read(min(size_bytes, 1 << 20))):
        hasher.update(chunk)
        size_bytes -= len(chunk)
    return hasher.digest()


class Bundle:
    """The entries of an open bundle file.

    Attributes:
        sha256: of the tar file.
        signature: the HMAC of that.
        headers: kind and digest of each entry, with its header and the offset of its payload.

    Each method raises `DamagedEntryError` if the file is not a complete and valid bundle.
    """

    def __init__(self, file: BinaryIO):
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise DamagedEntryError("it is not a regular file")
        if not file.read(_BLOCK).startswith(_FIRST.encode() + b"\0"):
            raise DamagedEntryError("it is not a bundle of stepcache")
        self._file, self._tar_bytes = file, found.st_size - _SIGNATURE_BYTES
        self.sha256 = _sha256(file, self._tar_bytes)
        recorded, self.signature = file.read(_SHA_BYTES), file.read()
        if recorded != self.sha256:
            raise DamagedEntryError("it is damaged or cut off: its checksum does not agree")
        self.headers: dict[tuple[str, str], tuple[Header, int]] = {}

    def _members(self) -> Iterator[tuple[str, int]]:
        """Yields name and size of each member, with the file at its data."""
        position = 0
        while True:
            self._file.seek(position)
            block = self._file.read(_BLOCK)
            try:
                info = tarfile.TarInfo.frombuf(block, "ascii", "surrogateescape")
                as_written = block == _tar_info(info.name, info.size).tobuf(tarfile.GNU_FORMAT)
            except (tarfile.TarError, ValueError):
                if block == bytes(_BLOCK):  # The end of a tar file.
                    return
                as_written, info = False, tarfile.TarInfo()
            position += _BLOCK + -(-info.size // _BLOCK) * _BLOCK
            if not as_written or info.size < 0 or position > self._tar_bytes:
                raise DamagedEntryError("it has a member that `export` does not write")
            yield info.name, info.size

    def read_headers(self) -> None:
        """Reads and checks the headers of all entries, but no payload."""
        for name, size_bytes in self._members():
            if name == _FIRST:
                version = self._file.read(min(size_bytes, 16)).decode("ascii", "replace")
                if version != _FORMAT:
                    why = f"it has format {version}; this stepcache reads {_FORMAT}"
                    raise DamagedEntryError(why)
                continue
            kind, _, digest = name.partition("/")
            header = entries.read_header(self._file, size_bytes, _SHARED_KEY, kind, digest)
            possible = (
                _NAME.fullmatch(name)
                and header.payload_bytes <= _MAX_BYTES[kind]
                and isinstance(header.about.get("label"), str)
                and (kind, digest) not in self.headers
            )
            if not possible:
                raise DamagedEntryError(f"its entry {name!r:.40} is malformed, or there twice")
            self.headers[kind, digest] = (header, self._file.tell())
        if not self.headers:
            raise DamagedEntryError("it has no entries")

    def read(self, kind: str, digest: str) -> tuple[dict[str, Any], bytes]:
        header, offset = self.headers[kind, digest]
        self._file.seek(offset)
        return header.about, entries.read_payload(self._file, header)

    def steps(self) -> list[Step]:
        return [self._step(digest) for kind, digest in self.headers if kind == "step"]

    def _step(self, digest: str) -> Step:
        about, payload = self.read("step", digest)
        label = about["label"]
        try:
            records = unpack_records(payload)
        except ValueError as error:
            raise DamagedEntryError(f"its entry of {label} is malformed ({error})") from None
        if not records or not all(map(_is_valid, records)):
            raise DamagedEntryError(f"its entry of {label} is malformed")
        if not all(("program", each.program) in self.headers for each in records):
            raise DamagedEntryError(f"it lacks a program of {label}")
        return Step(digest, label, records[:RECORDS_KEPT])


def _is_valid(record: DependencyRecord) -> bool:
    return (
        plain.fits(record, DependencyRecord)
        and digest_dependencies(record.dependencies) == record.digest
        and min(record.devices, default=0) >= 0
    )
