"""`LinkTimes`: how long a value takes from host memory to devices and back, as measured here."""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import json
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from stepcache.errors import CacheDirectoryError
from stepcache.link.plain import record_of
from stepcache.storage.private_files import default_directory, make_directory, replace_file
from stepcache.units import readable_seconds

ROUTES = ("each", "fanout", "gather")
OPERATIONS = (*ROUTES, "program", "carry", "split", "ahead", "write")


@dataclass(frozen=True)
class LinkTimes:
    """How long transfers take between the memory of a host and some of its devices.

    Operations are the routes of a read; `program`, a read inside the program that takes the value,
    and `carry`, the same with a write back; `split`, a read of shards without a gather; `ahead`, a
    read beside a running step; `write`, from the devices.
    """

    machine: str  # Name of the host, its cores, and platform, kind and number of the devices.
    measured: str  # The date, as ISO 8601 has it.
    seconds: dict[str, float]  # By operation and bytes of the value, such as `gather 65536`.
    leaf_seconds: dict[str, float]  # By operation, what each leaf beyond the first adds.
    overlap: float  # The share of a read ahead that a step which computes hides, from 0 to 1.

    def of(self, operation: str, size_bytes: float, leaves: int = 1) -> float:
        """Returns the seconds of an operation on a value of so many bytes and leaves."""
        times = self._times(operation)
        sizes = sorted(times)
        if size_bytes > sizes[-1]:
            (before, last), at = sizes[-2:], times[sizes[-1]]
            slope = (at - times[before]) / (last - before)
            seconds = at + max(slope, 0.0) * (size_bytes - last)
        else:
            seconds = float(np.interp(size_bytes, sizes, [times[each] for each in sizes]))
        return seconds + (leaves - 1) * self.leaf_seconds.get(operation, 0.0)

    def _times(self, operation: str) -> dict[int, float]:
        rows = (key.rpartition(" ") for key in self.seconds)
        return {
            int(size): self.seconds[f"{name} {size}"] for name, _, size in rows if name == operation
        }

    @property
    def operations(self) -> frozenset[str]:
        """The operations that were measured."""
        return frozenset(key.rpartition(" ")[0] for key in self.seconds)

    def has(self, operations: Iterable[str]) -> bool:
        """Returns whether operations were measured, each for several sizes."""
        try:
            return all(len(self._times(each)) > 1 for each in operations)
        except ValueError:
            return False


def today() -> str:
    """Returns the date and time, as ISO 8601 has it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@functools.lru_cache(maxsize=64)
def kept_times(machine: str, operations: tuple[str, ...] = OPERATIONS) -> list[LinkTimes]:
    """Returns the times of a machine, of all operations: a list, empty where they are not known."""
    file = _file(machine)
    try:
        found = record_of(LinkTimes, json.loads(file.read_bytes())) if file else None
    except (OSError, ValueError):
        return []
    is_it = found is not None and found.machine == machine and found.has(operations)
    return [found] if found is not None and is_it else []


def fastest_route(
    devices: Iterable[Any], size_bytes: int, leaves: int, in_program: bool
) -> tuple[str, str] | None:
    """Returns the route whose reads take the least time as measured here, and why in words.

    None if the times are not known. With `in_program`, the program that takes the value reads it
    where it is gathered.
    """
    if not (kept := kept_times(machine_of(devices))):
        return None
    times = kept[0]
    operations = {route: route for route in ROUTES} | ({"gather": "program"} if in_program else {})
    seconds = {route: times.of(operations[route], size_bytes, leaves) for route in ROUTES}
    best = min(seconds, key=seconds.__getitem__)
    others = ", ".join(
        f"{name} {readable_seconds(seconds[name])}" for name in ROUTES if name != best
    )
    return best, f"it takes {readable_seconds(seconds[best])} as measured here, {others}"


def machine_of(devices: Iterable[Any]) -> str:
    """Returns a name for this host and so many devices of such kinds."""
    found = list(devices)
    kinds = sorted({f"{each.platform} {each.device_kind}" for each in found})
    return f"{platform.node()}, {os.cpu_count()} cores, {', '.join(kinds)} × {len(found)}"


def _file(machine: str) -> Path | None:
    try:
        directory = default_directory()
    except CacheDirectoryError:
        return None
    digest = hashlib.sha256(f"{machine} {jax.__version__}".encode()).hexdigest()[:16]
    return directory / "links" / f"{digest}.json" if directory else None


def keep(times: LinkTimes) -> None:
    """Writes times for later processes, in the user's cache directory if there is one."""
    file = _file(times.machine)
    if file is not None:
        with contextlib.suppress(OSError, CacheDirectoryError):  # They are measured again.
            make_directory(file.parent)
            replace_file(file, json.dumps(asdict(times), indent=1))
