"""Checks a cache directory and this installation, and builds and loads a small step.

`stepcache doctor --json` prints these records, with these names.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stepcache.errors import CacheDirectoryError
from stepcache.jaxcompat import CAN_STORE, PRIVATE_API
from stepcache.report.inventory import entries_of, label_of, open_existing
from stepcache.storage import private_files
from stepcache.storage.disk_store import ROOT
from stepcache.units import counted, readable_bytes, readable_time

Status = Literal["ok", "warning", "fault"]
_ORDER: tuple[Status, ...] = ("ok", "warning", "fault")
_ROUND_TRIP_SECONDS = 300
_LITTLE_BYTES = 64 << 20
_TESTED = "install a JAX version that this stepcache was tested with"
_ELSEWHERE = "name another directory in STEPCACHE_DIR"
_FREE = f"free some space, or {_ELSEWHERE}"

# Runs in two processes: the first builds a small step, the second loads it.
_PROBE = """\
import json, sys, time
import jax
import jax.numpy as jnp
import stepcache as sc

@sc.step
def probe(x):
    return jnp.sin(x) @ x

cache = sc.ProgramCache(sys.argv[1])
mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
x = jnp.ones((8, 8))
started = time.perf_counter()
with sc.Session(mesh, cache=cache):
    probe(x).block_until_ready()
seconds = time.perf_counter() - started
cache.flush()
stats, miss = probe.stats(), probe.last_miss
found = {"seconds": seconds, "compiles": stats.compiles, "loads": stats.loads, "why": str(miss)}
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    name: str  # What was checked.
    status: Status  # "ok", "warning" or "fault".
    detail: str  # What was found.
    hint: str = ""  # What to try; empty if all is well.


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The results of all checks."""

    directory: str  # Path of the cache directory.
    status: Status  # The worst status of a check.
    checks: tuple[Check, ...]  # The checks, in the order in which they were made.


def examine(directory: Path, max_bytes: int, round_trip: bool = True) -> Diagnosis:
    """Makes all checks. Does not change the directory, which need not exist."""
    checks = [*_versions(), *_directory(directory)]
    if all(check.status != "fault" for check in checks):
        checks += _contents(directory, max_bytes)
        if round_trip:
            checks.append(_round_trip(directory))
    worst = _ORDER[max(_ORDER.index(check.status) for check in checks)]
    return Diagnosis(str(directory), worst, tuple(checks))


def version_of(distribution: str) -> str:
    """The version of an installed distribution; "?" if none is installed under this name."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "?"


def _versions() -> Iterator[Check]:
    versions = ", ".join(f"{name} {version_of(name)}" for name in ("stepcache", "jax", "jaxlib"))
    yield Check("versions", "ok", f"Python {platform.python_version()}, {versions}")
    if PRIVATE_API:
        yield Check("JAX", "ok", "its private API is available: hits do not enter Python")
    else:
        detail = "only its public API is used: every call goes through Python"
        yield Check("JAX", "warning", detail, f"unset STEPCACHE_DISPATCH, or {_TESTED}")
    if CAN_STORE:
        yield Check("storing", "ok", "programs of this JAX can be stored on disk")
    else:
        detail = "programs of this JAX cannot be stored on disk, only kept in memory"
        yield Check("storing", "warning", detail, _TESTED)


def _existing(directory: Path) -> Path:
    """Returns the directory, or its nearest parent that exists."""
    path = Path(os.path.abspath(directory))
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path


def _directory(directory: Path) -> Iterator[Check]:
    there = _existing(directory)
    if there != Path(os.path.abspath(directory)):
        if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
            yield Check("directory", "ok", f"{directory} will be created at the first use")
        else:
            detail = f"{directory} cannot be created in {there}"
            yield Check("directory", "fault", detail, _ELSEWHERE)
        return
    try:
        for path in (directory, directory / ROOT):
            if path.exists():
                private_files.check_directory(path)
        found = directory.stat()
    except CacheDirectoryError as error:
        detail = f"{error.what} ({': '.join(filter(None, (error.where, error.got)))})"
        yield Check("directory", "fault", detail, error.hint or "")
        return
    except OSError as error:
        yield Check("directory", "fault", f"{directory} cannot be read: {error.strerror}")
        return
    mode = stat.S_IMODE(found.st_mode)
    yield Check("directory", "ok", f"{directory}, mode {mode:04o}, owner {found.st_uid}")
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"0")
        yield Check("writing", "ok", "files can be created")
    except OSError as error:
        detail = f"it is read-only ({error.strerror}): programs are loaded, but none are stored"
        yield Check("writing", "warning", detail, _ELSEWHERE)
    if not (directory / ROOT / "entries").is_dir():
        return
    # Checked before anything opens the directory, because that would create a missing key.
    if private_files.load_key(directory / ROOT / "key") is not None:
        yield Check("key", "ok", "present, and writable by this user only")
    else:
        detail = "it is missing, or others can write it: no stored program can be used"
        yield Check("key", "fault", detail, "stepcache cache clear, to start anew")


def _contents(directory: Path, max_bytes: int) -> Iterator[Check]:
    entries = entries_of(open_existing(directory))
    free_bytes = shutil.disk_usage(_existing(directory)).free
    used_bytes = sum(each.size_bytes for each in entries)
    used, most, free = map(readable_bytes, (used_bytes, max_bytes, free_bytes))
    detail = f"{used} used of at most {most}; {free} free"
    if free_bytes < _LITTLE_BYTES:
        yield Check("space", "fault", detail, _FREE)
    elif free_bytes < max_bytes - used_bytes:
        hint = f"set sc.ProgramCache(max_bytes={used_bytes + free_bytes // 2})"
        yield Check("space", "warning", detail, hint)
    else:
        yield Check("space", "ok", detail)
    damaged = sum(each.problem is not None for each in entries)
    if damaged:
        detail = f"{damaged} of {len(entries)} have a damaged header"
        yield Check("entries", "fault", detail, "stepcache cache verify")
    else:
        yield Check("entries", "ok", f"{len(entries)}, no damaged header")
    headers = {each.digest: each.header or {} for each in entries if each.kind == "export"}
    distrusted = {header.get("export") for header in headers.values()}
    for each in (each for each in entries if each.digest in headers.keys() - distrusted):
        since, why = readable_time(each.created_time), headers[each.digest].get("distrusted")
        trusted = f"{label_of(each)}: {'dis' if why else ''}trusted since {since} {why or ''}"
        yield Check("trust", "warning" if why else "ok", trusted, "give another KEY" if why else "")
    quarantine = directory / ROOT / "quarantine"
    left = private_files.listed(quarantine)
    if left:
        hint = f"look into {quarantine}; remove its files, or run stepcache cache clear"
        yield Check("quarantine", "warning", counted(len(left), "damaged entry"), hint)
    else:
        yield Check("quarantine", "ok", "empty")


def _round_trip(directory: Path) -> Check:
    if not CAN_STORE:
        return Check("round trip", "warning", "not tried: programs cannot be stored")
    beside = _existing(directory.parent)
    place = beside if os.access(beside, os.W_OK) else None
    try:
        with tempfile.TemporaryDirectory(prefix="stepcache-doctor-", dir=place) as temporary:
            built, loaded = _probe(Path(temporary)), _probe(Path(temporary))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        detail = f"a small step failed: {error}"
        return Check("round trip", "fault", detail, "run a script of your own to see its error")
    detail = f"built in {built['seconds']:.2f} s"
    if loaded["compiles"] or loaded["loads"] != 1:
        detail += f", but rebuilt by another process: {loaded['why']}"
        is_full = shutil.disk_usage(place or tempfile.gettempdir()).free < _LITTLE_BYTES
        return Check("round trip", "fault", detail, _FREE if is_full else "please report this")
    detail += f", loaded by another process in {loaded['seconds']:.2f} s"
    return Check("round trip", "ok", detail)


def _probe(directory: Path) -> dict[str, Any]:
    """Returns the result of the small step in another process. Raises `ValueError` if it failed."""
    script = directory / "probe.py"
    script.write_text(_PROBE, encoding="utf-8")
    variables = {"STEPCACHE_DIR": "off", "STEPCACHE_REMOTE": "off"}
    variables |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(
        [sys.executable, str(script), str(directory / "programs")],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=_ROUND_TRIP_SECONDS,
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise ValueError(last[0])
    return json.loads(lines[-1])
