"""A bundle: one file that carries steps' entries and their programs to another directory.

    magic, format version │ payloads │ manifest (msgpack) │ its length │ SHA-256 of all that
    │ HMAC of the SHA-256 under the key of the directory it comes from

The manifest says of each payload, in order, what its header on disk says: kind, digest, checksum,
sizes. Programs are code, so it matters who made a bundle: `moving.py` asks. Nothing is decoded
before the checksum agrees, and nothing is stored before every step in it has been read and found to
make sense.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from stepcache.programs.archive import CANDIDATES_KEPT
from stepcache.storage import plain
from stepcache.storage.dependency_record import Candidate, digest_facts, unpack_candidates
from stepcache.storage.disk_store import DiskTier
from stepcache.storage.entry import DamagedEntryError, Header, read_payload, store

FORMAT_VERSION = 2

_MAGIC = b"stepbndl"
_PREFIX = struct.Struct("<8sI")
_SHA_BYTES = 32
_TRAILER = struct.Struct(f"<Q{_SHA_BYTES}s{_SHA_BYTES}s")
PURPOSE = b"bundle of stepcache\0"
_MAX_MANIFEST_BYTES = 64 << 20
_MAX_ENTRY_BYTES = 16 << 30
_MAX_STEP_BYTES = 1 << 30
_MAX_INFLATION = 1032  # What zlib can reach.
_CHUNK_BYTES = 1 << 20
_DIGEST = re.compile(r"[0-9a-f]{1,128}")


@dataclass(frozen=True, slots=True)
class BundledStep:
    """A step's entry, on its way."""

    digest: str
    label: str
    candidates: list[Candidate]


class Writer:
    """Writes a bundle from front to back."""

    def __init__(self, out: BinaryIO):
        self._out, self._sha = out, hashlib.sha256()
        self.headers: list[Header] = []
        self._put(_PREFIX.pack(_MAGIC, FORMAT_VERSION))

    def _put(self, data: bytes) -> None:
        self._out.write(data)
        self._sha.update(data)

    def add(
        self, kind: str, digest: str, created_time: float, about: dict[str, Any], payload: bytes
    ) -> None:
        stored = store(payload)
        sizes = (len(stored.payload), stored.payload_bytes)
        self.headers.append(
            Header(kind, digest, created_time, stored.encoding, *sizes, stored.sha256, about)
        )
        self._put(stored.payload)

    def finish(self, tier: DiskTier) -> None:
        manifest = plain.pack({"entries": [asdict(each) for each in self.headers]})
        self._put(manifest)
        self._sha.update(len(manifest).to_bytes(8, "little"))
        sha256 = self._sha.digest()
        self._out.write(_TRAILER.pack(len(manifest), sha256, tier.vouch(PURPOSE + sha256)))


@contextlib.contextmanager
def replacing(file: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of another when it is whole."""
    descriptor, temporary = tempfile.mkstemp(prefix=".stepcache-", dir=file.parent)
    try:
        with os.fdopen(descriptor, "wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        Path(temporary).replace(file)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise


# ---- reading ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Opened:
    """A bundle whose checksum agrees; nothing in it is decoded yet.

    Attributes:
        file: open.
        manifest: as it lies in the file.
        payloads_end: where the payloads end.
        sha256: over all of it.
        vouched: the HMAC of that.
    """

    file: BinaryIO
    manifest: bytes
    payloads_end: int
    sha256: bytes
    vouched: bytes


@dataclass(frozen=True, slots=True)
class Content:
    """What is in a bundle, read and found to make sense.

    Attributes:
        programs: header and place of each program.
        steps: the steps.
    """

    programs: dict[str, tuple[Header, int]]
    steps: list[BundledStep]


def opened(file: BinaryIO) -> Opened:
    """Reads a bundle once, to see that it is whole."""
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode):
        raise DamagedEntryError("it is not a file")
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size or not prefix.startswith(_MAGIC):
        raise DamagedEntryError("it is not a bundle of stepcache")
    version = _PREFIX.unpack(prefix)[1]
    if version != FORMAT_VERSION:
        raise DamagedEntryError(f"it has format {version}; this stepcache reads {FORMAT_VERSION}")
    manifest_end = found.st_size - _TRAILER.size
    if manifest_end < _PREFIX.size:
        raise DamagedEntryError(f"it is cut off after {found.st_size:,} bytes")
    file.seek(manifest_end)
    manifest_bytes, told, vouched = _TRAILER.unpack(file.read(_TRAILER.size))
    payloads_end = manifest_end - manifest_bytes
    file.seek(_PREFIX.size)
    hasher = hashlib.sha256(prefix)
    sound = _PREFIX.size <= payloads_end and manifest_bytes <= _MAX_MANIFEST_BYTES
    _hash(file, max(0, (payloads_end if sound else manifest_end) - _PREFIX.size), hasher)
    manifest = file.read(manifest_bytes) if sound else b""
    hasher.update(manifest + manifest_bytes.to_bytes(8, "little"))
    if not sound or hasher.digest() != told:
        raise DamagedEntryError("it is damaged or cut off: its checksum does not agree")
    return Opened(file, manifest, payloads_end, told, vouched)


def _hash(file: BinaryIO, size_bytes: int, hasher: Any) -> None:
    while size_bytes > 0:
        chunk = file.read(min(size_bytes, _CHUNK_BYTES))
        if not chunk:
            raise DamagedEntryError("it became shorter while it was read")
        hasher.update(chunk)
        size_bytes -= len(chunk)


def content(bundle: Opened) -> Content:
    """Decodes a bundle, reading the steps and measuring the programs."""
    programs: dict[str, tuple[Header, int]] = {}
    steps: list[BundledStep] = []
    place = _PREFIX.size
    for header in _headers(bundle.manifest):
        if header.kind == "program":
            programs[header.digest] = (header, place)
        else:
            bundle.file.seek(place)
            steps.append(_step(header, read_payload(bundle.file, header)))
        place += header.stored_bytes
    if place != bundle.payloads_end:
        raise DamagedEntryError("its payloads do not have the sizes that its manifest tells")
    for step in steps:
        if not {each.program for each in step.candidates} <= programs.keys():
            raise DamagedEntryError(f"a program of {step.label} is not in it")
    return Content(programs, steps)


def _headers(manifest: bytes) -> list[Header]:
    try:
        headers = [Header(**each) for each in plain.unpack(manifest)["entries"]]
    except Exception as error:
        why = f"its manifest cannot be decoded ({type(error).__name__})"
        raise DamagedEntryError(why) from None
    for header in headers:
        _check(header)
    if len({(each.kind, each.digest) for each in headers}) != len(headers):
        raise DamagedEntryError("it has an entry twice")
    return headers


def _check(header: Header) -> None:
    """Refuses names that are no names, and sizes that cannot be."""
    if header.kind not in ("step", "program"):
        raise DamagedEntryError(f"it has an entry of the unknown kind {header.kind!r:.40}")
    if not isinstance(header.digest, str) or not _DIGEST.fullmatch(header.digest):
        raise DamagedEntryError(f"it has an entry of the impossible name {header.digest!r:.80}")
    sizes = (header.stored_bytes, header.payload_bytes)
    bound = _MAX_STEP_BYTES if header.kind == "step" else _MAX_ENTRY_BYTES
    possible = (
        all(type(size) is int and 0 <= size <= bound for size in sizes)
        and header.encoding in ("raw", "zlib")
        and (header.encoding == "zlib" or sizes[0] == sizes[1])
        and sizes[1] <= _MAX_INFLATION * (sizes[0] + 1)
        and isinstance(header.sha256, bytes)
        and isinstance(header.about, dict)
        and isinstance(header.about.get("label"), str)
    )
    if not possible:
        raise DamagedEntryError(f"what it tells of {header.kind} {header.digest[:12]} cannot be")


def _step(header: Header, payload: bytes) -> BundledStep:
    label = header.about["label"]
    try:
        candidates = unpack_candidates(payload)
    except ValueError as error:
        raise DamagedEntryError(f"its entry of {label} is malformed ({error})") from None
    if not candidates or not all(map(_makes_sense, candidates)):
        raise DamagedEntryError(f"its entry of {label} makes no sense")
    return BundledStep(header.digest, label, candidates[:CANDIDATES_KEPT])


def _makes_sense(candidate: Candidate) -> bool:
    """Whether everything in a candidate is of the kind it should be."""
    return (
        plain.fits(candidate, Candidate)
        and digest_facts(candidate.told) == candidate.facts
        and min(candidate.devices, default=0) >= 0
    )
