"""`DependencyRecord`: one build on disk, all that it depends on, and how that compares with now.
`Traced` and `Publication`: one build on its way there.

Facts are names and texts: what the fingerprint found, the call, and the environment.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stepcache.events import Captured
from stepcache.fingerprint.dependencies import digest_dependencies
from stepcache.jaxcompat import Runnable, storing
from stepcache.storage import plain

FORMAT = 4  # Of the payload of a step's entry.


class Address(NamedTuple):
    """Where the records for one lookup are kept."""

    label: str  # The step, by its file and name.
    digest: str  # Of what all records of the lookup have in common.
    # All devices, those of the call first: executables name theirs by position here.
    devices: tuple[Any, ...]

    def positions(self, devices: Sequence[Any]) -> list[int]:
        """Returns the positions of an executable's devices."""
        if [*devices] == [*self.devices[:1]]:  # It may be there once more, as one of all.
            return [0]
        positions = {device: index for index, device in enumerate(self.devices)}
        return [positions[device] for device in devices]


@dataclass(slots=True)
class Used:
    """What a trace used beyond what the code shows."""

    # Attributes of the user's objects that libraries read.
    attributes: list[str] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)  # Installed modules entered.
    # What their code reads of modules, by module, with spaces between.
    names: dict[str, str] = field(default_factory=dict)
    # Files read, each as (base, path, path as it was): relative to the "source", to the "directory"
    # that the process runs in, or "absolute".
    files: list[tuple[str, str, str]] = field(default_factory=list)
    variables: list[str] = field(default_factory=list)  # Environment variables read.


class Traced(NamedTuple):
    """What a trace revealed about its program, before it is compiled."""

    dependencies: dict[str, str]  # All that it depends on, by name.
    used: Used  # What the trace used.
    left: dict[str, str]  # Numbers that the trace made another type's, by name, as it left them.
    tree: Any  # Of the outputs, encoded; None where a later process has to trace the step.
    untrackable: tuple[str, ...] = ()  # Why it has to.

    def packed(self) -> dict[str, Any]:
        return self._asdict() | {"used": plain.fields_of(self.used)}

    @classmethod
    def unpacked(cls, data: dict[str, Any]) -> Traced:
        """From `packed`. Raises `TypeError` or `KeyError` if the data is malformed."""
        used, untrackable = Used(**data["used"]), tuple(data["untrackable"])
        return cls(**{**data, "used": used, "untrackable": untrackable})


@dataclass(slots=True)
class DependencyRecord:
    """One build that a lookup may find."""

    program: str  # The digest of its executable.
    digest: str  # Of all dependencies.
    dependencies: dict[str, str]  # What it depends on, by name.
    used: Used  # What its trace used.
    left: dict[str, str]  # As `Traced.left`.
    devices: list[int]  # Of its executable, in order, as positions among the lookup's devices.
    call: dict[str, Any]  # What JAX knows of arguments and results.
    tree: Any  # Of the outputs, encoded.
    captured: list[tuple[str, str, int]]  # Name, type and bytes of the large arrays in it.
    seconds: dict[str, float]  # What each stage took when it was built.
    created_time: float  # Seconds since the epoch.
    outline: bytes = b""  # The lowered module as text, compressed.

    def packed(self) -> dict[str, Any]:
        return plain.fields_of(self) | {"used": plain.fields_of(self.used)}

    @property
    def traced(self) -> Traced:
        """What its trace revealed."""
        return Traced(self.dependencies, self.used, self.left, self.tree)

    def assembled(
        self, data: bytes, address: Address, in_tree: Any, holder: storing.Holder
    ) -> Runnable:
        """The program, of an executable that is at hand and what its tree was told by."""
        devices = tuple(address.devices[position] for position in self.devices)
        tree = storing.decode_tree(self.tree, in_tree, holder)
        return storing.assemble(storing.load_executable(data, devices), self.call, tree, devices)

    @classmethod
    def unpacked(cls, data: dict[str, Any]) -> DependencyRecord:
        """From `packed`. Raises `TypeError` or `KeyError` if the data is malformed."""
        record = cls(**{**data, "used": Used(**data["used"])})
        if (
            not isinstance(record.left, dict)
            or not record.left.keys() <= record.dependencies.keys()
        ):
            raise TypeError("what its trace left is no part of what it depends on")
        return record


class Publication(NamedTuple):
    """A program that is to be stored. It holds on to nothing of the step that it came from."""

    address: Address  # Of the lookup that it answers.
    digest: str  # Of its executable.
    run: Runnable
    traced: Traced  # What its trace revealed.
    captured: tuple[Captured, ...]  # The large arrays in it.
    seconds: dict[str, float]  # Of each stage; with "compile", XLA made the executable just now.
    outline: Callable[[], str]  # Gives the lowered module, as text.
    # The executable, where it has been serialized already, here or by another process.
    data: bytes = b""

    def serialized(self) -> bytes:
        """The executable. One that was itself loaded must not be serialized."""
        return storing.serialize_executable(self.run.xla_executable)

    def record(self, created_time: float) -> DependencyRecord:
        """What a later process needs to start without a trace. Raises `NotStorable` for none."""
        return DependencyRecord(
            self.digest,
            digest_dependencies(self.traced.dependencies),
            self.traced.dependencies,
            self.traced.used,
            self.traced.left,
            self.address.positions(storing.program_devices(self.run)),
            storing.describe_call(self.run),
            self.traced.tree,
            [(each.name, each.type, each.size_bytes) for each in self.captured],
            dict(self.seconds),
            created_time,
            zlib.compress(self.outline().encode(), 1),
        )


def pack_records(label: str, records: Sequence[DependencyRecord]) -> tuple[dict[str, Any], bytes]:
    """Header and payload of a step's entry; the latest record comes first."""
    about = {
        "label": label,
        "programs": [each.program for each in records],
        "seconds": [round(sum(each.seconds.values()), 4) for each in records],
        "built": [each.created_time for each in records],
    }
    packed = [each.packed() for each in records]
    return about, plain.pack({"format": FORMAT, "records": packed})


def unpack_records(payload: bytes) -> list[DependencyRecord]:
    """The records of a step's entry; none in another format. Raises `ValueError` if malformed."""
    try:
        data = plain.unpack(payload)
        if isinstance(data, list) or data["format"] != FORMAT:  # The first format was a list.
            return []
        return [DependencyRecord.unpacked(each) for each in data["records"]]
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
