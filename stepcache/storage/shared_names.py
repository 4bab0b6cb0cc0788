"""How the entries of a shared cache are named and signed, and what a listing of them says.

    stepcache-1/program/<digest>                           an executable
    stepcache-1/step/<lookup>/<record>.<program>.<run>     what one build depends on
    stepcache-1/verified/<lookup>/<record>.<program>       a start has traced the same program

So a listing says which lookups have an answer, and what one run has built.
"""

from __future__ import annotations

import io
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stepcache.storage.dependency_record import DependencyRecord
from stepcache.storage.entry import Header, encode_head, read_header, store
from stepcache.storage.object_store import Object

ROOT = "stepcache-1/"
_NAME = re.compile(
    rf"{ROOT}(step|verified)/([0-9a-f]{{64}})/([0-9a-f]{{32}})\.([0-9a-f]{{1,128}})(\.\w{{1,16}})?"
)
_PROGRAM = re.compile(rf"{ROOT}program/([0-9a-f]{{1,128}})")


def program_path(digest: str) -> str:
    return f"{ROOT}program/{digest}"


def signed(key: bytes, kind: str, digest: str, about: dict[str, Any], payload: bytes) -> bytes:
    """An entry as it is written."""
    stored = store(payload)
    return encode_head(key, kind, digest, time.time(), about, stored) + stored.payload


def opened(key: bytes, kind: str, digest: str, data: bytes) -> tuple[Header, io.BytesIO]:
    """The header of an entry that was read, and the file at its payload.

    Raises `DamagedEntryError` if it is not whole, or was not written under this key and name.
    """
    file = io.BytesIO(data)
    return read_header(file, len(data), key, kind, digest), file


class Name(NamedTuple):
    """The name of a record. `run` stands for the process that has written it."""

    lookup: str
    record: str
    program: str
    run: str
    size_bytes: int = 0
    time: float = 0.0

    @property
    def path(self) -> str:
        return f"{ROOT}step/{self.lookup}/{self.record}.{self.program}.{self.run}"

    @property
    def verified_path(self) -> str:
        return f"{ROOT}verified/{self.lookup}/{self.record}.{self.program}"

    @classmethod
    def of(cls, lookup: str, record: DependencyRecord, run: str = "") -> Name:
        return cls(lookup, record.digest[:32], record.program, run)


@dataclass(slots=True)
class Catalogue:
    """What a listing has shown."""

    # The names of records by their lookup, the newest first; by run, the oldest first.
    steps: dict[str, list[Name]] = field(default_factory=dict)
    runs: dict[str, list[Name]] = field(default_factory=dict)
    programs: dict[str, Object] = field(default_factory=dict)  # The executables, by digest.
    # The names of what a start has verified, without run.
    verified: set[tuple[str, str, str]] = field(default_factory=set)

    @classmethod
    def of(cls, objects: Iterable[Object]) -> Catalogue:
        """From a listing; objects with other names are not ours."""
        made = cls()
        for each in sorted(objects, key=lambda each: each.time):
            if found := _PROGRAM.fullmatch(each.name):
                made.programs[found[1]] = each
            elif (found := _NAME.fullmatch(each.name)) and found[1] == "verified":
                made.verified.add((found[2], found[3], found[4]))
            elif found and found[5]:
                lookup, record, program, run = found[2], found[3], found[4], found[5][1:]
                name = Name(lookup, record, program, run, each.size_bytes, each.time)
                made.steps.setdefault(name.lookup, []).insert(0, name)
                made.runs.setdefault(name.run, []).append(name)
        return made
