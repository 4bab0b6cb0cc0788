"""Whether a directory of programs, and this installation, can do what they are for.

The names of the fields here are the names in the JSON of `stepcache doctor`.
"""

from __future__ import annotations

import contextlib
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
from stepcache.fingerprint.provenance import distribution_of
from stepcache.jaxcompat import PRIVATE_API, storing
from stepcache.report.inventory import open_existing
from stepcache.storage import private_files
from stepcache.storage.entry import KEY_BYTES
from stepcache.units import counted, readable_bytes

Status = Literal["ok", "warning", "fault"]
_ORDER: tuple[Status, ...] = ("ok", "warning", "fault")
_ROUND_TRIP_SECONDS = 300
_LITTLE_BYTES = 64 << 20

# Run twice, in processes of their own: it builds a small step, and finds it again.
_PROBE = """\
import json, sys, time
import jax
import jax.numpy as jnp
import stepcache as sc

@sc.step
def probe(x):
    return jnp.sin(x) @ x

cache = sc.ProgramCache(sys.argv[1], verify="off")
mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
x = jnp.ones((8, 8))
started = time.perf_counter()
with sc.Session(mesh, cache=cache):
    probe(x).block_until_ready()
seconds = time.perf_counter() - started
cache.flush()
stats, miss = probe.stats(), probe.last_miss
told = {"seconds": seconds, "traces": stats.traces, "compiles": stats.compiles}
print(json.dumps(told | {"loads": stats.loads, "why": str(miss)}))
"""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: what.
        status: "ok", "warning" or "fault".
        detail: what was found.
        hint: what to try; empty where all is well.
    """

    name: str
    status: Status
    detail: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All checks.

    Attributes:
        directory: the directory of programs.
        status: the worst of the checks' status.
        checks: in the order in which they were made.
    """

    directory: str
    status: Status
    checks: tuple[Check, ...]


def examine(directory: Path, max_bytes: int, round_trip: bool = True) -> Diagnosis:
    """Makes all checks. Nothing is left behind, nor changed in the directory.

    Args:
        directory: the directory of programs; it need not exist.
        max_bytes: the bound on its size that is meant to be used.
        round_trip: build a small step, and load it in a fresh process.
    """
    checks = [*_versions(), *_directory(directory)]
    if all(check.status != "fault" for check in checks):
        checks += [*_space(directory, max_bytes), *_content(directory)]
        if round_trip:
            checks.append(_round_trip(directory))
    worst = _ORDER[max(_ORDER.index(check.status) for check in checks)]
    return Diagnosis(str(directory), worst, tuple(checks))


def _versions() -> Iterator[Check]:
    names = ("stepcache", "jax", "jaxlib")
    versions = ", ".join(f"{name} {distribution_of(name)[1] or '?'}" for name in names)
    yield Check("versions", "ok", f"Python {platform.python_version()}, {versions}")
    if PRIVATE_API:
        yield Check("JAX", "ok", "its private API is used: hits do not enter Python")
    else:
        yield Check(
            "JAX",
            "warning",
            "only its public API is used: every call goes through Python",
            "unset STEPCACHE_DISPATCH, or install a JAX that this stepcache was tested with",
        )
    if storing.CAN_STORE:
        yield Check("storing", "ok", "programs of this JAX can be kept on disk")
    else:
        yield Check(
            "storing",
            "warning",
            "programs of this JAX cannot be kept on disk, only in memory",
            "install a JAX that this stepcache was tested with",
        )


# ---- the directory ------------------------------------------------------------------------------


def _existing(directory: Path) -> Path:
    """The directory, or the nearest one above it that is there."""
    path = Path(os.path.abspath(directory))
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path


def _directory(directory: Path) -> Iterator[Check]:
    there = _existing(directory)
    if there != Path(os.path.abspath(directory)):
        if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
            yield Check("directory", "ok", f"{directory} will be made at the first use")
        else:
            yield Check(
                "directory",
                "fault",
                f"{directory} cannot be made in {there}",
                "name another directory in STEPCACHE_DIR",
            )
        return
    try:
        for path in (directory, directory / "v1"):
            if path.exists():
                private_files.check_directory(path)
    except CacheDirectoryError as error:
        detail = f"{error.what} ({error.where}: {error.got})"
        yield Check("directory", "fault", detail, error.hint or "")
        return
    except OSError as error:
        yield Check("directory", "fault", f"{directory} cannot be looked at: {error.strerror}")
        return
    found = directory.stat()
    mode = stat.S_IMODE(found.st_mode)
    yield Check("directory", "ok", f"{directory}, mode {mode:04o}, owner {found.st_uid}")
    yield _writable(directory)
    if (directory / "v1" / "entries").is_dir():
        yield _key(directory / "v1" / "key")


def _key(path: Path) -> Check:
    """Looked at before anything opens the directory, for that makes a new key where none is."""
    if private_files.load_key(path, KEY_BYTES) is not None:
        return Check("key", "ok", "this directory's own, closed to others")
    return Check(
        "key",
        "fault",
        "there is none, or others can write it: the programs that are here cannot be used",
        "stepcache cache clear, to begin anew",
    )


def _writable(directory: Path) -> Check:
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"0")
    except OSError as error:
        detail = f"it cannot be written ({error.strerror}): programs are read, and none are added"
        return Check("writing", "warning", detail, "name another directory in STEPCACHE_DIR")
    return Check("writing", "ok", "files can be made in it")


def _space(directory: Path, max_bytes: int) -> Iterator[Check]:
    free_bytes = shutil.disk_usage(_existing(directory)).free
    archive = open_existing(directory)
    used_bytes = archive.tier.size_bytes() if archive is not None else 0
    detail = (
        f"{readable_bytes(used_bytes)} used of at most {readable_bytes(max_bytes)}; "
        f"{readable_bytes(free_bytes)} free"
    )
    if free_bytes < _LITTLE_BYTES:
        yield Check("space", "fault", detail, "make room, or name another directory")
    elif free_bytes < max_bytes - used_bytes:
        hint = f"sc.ProgramCache(max_bytes={used_bytes + free_bytes // 2}) bounds it to what fits"
        yield Check("space", "warning", detail, hint)
    else:
        yield Check("space", "ok", detail)


def _content(directory: Path) -> Iterator[Check]:
    archive = open_existing(directory)
    if archive is None:
        yield Check("entries", "ok", "there are none yet")
        return
    entries = list(archive.tier.entries())
    damaged = [each for each in entries if each.problem is not None]
    if damaged:
        detail = f"{len(damaged)} of {len(entries)} damaged, as their headers tell"
        yield Check("entries", "fault", detail, "stepcache cache verify")
    else:
        yield Check("entries", "ok", f"{len(entries)}, none damaged as their headers tell")
    yield _quarantine(directory / "v1" / "quarantine")


def _quarantine(directory: Path) -> Check:
    left = private_files.listed(directory)
    if not left:
        return Check("quarantine", "ok", "empty")
    size_bytes = 0
    for path in left:
        with contextlib.suppress(OSError):
            size_bytes += path.lstat().st_size
    detail = f"{counted(len(left), 'damaged entry')}, {readable_bytes(size_bytes)}"
    return Check(
        "quarantine",
        "warning",
        detail,
        f"look into {directory}; its files can be removed, and stepcache cache clear does so",
    )


# ---- the round trip -----------------------------------------------------------------------------


def _round_trip(directory: Path) -> Check:
    if not storing.CAN_STORE:
        return Check("round trip", "warning", "not tried: programs cannot be stored")
    beside = _existing(directory.parent)
    place = beside if os.access(beside, os.W_OK) else None
    try:
        with tempfile.TemporaryDirectory(prefix="stepcache-doctor-", dir=place) as temporary:
            built, loaded = _probe(Path(temporary)), _probe(Path(temporary))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        text = f"a small step could not be run: {error}"
        return Check("round trip", "fault", text, "run a script of your own and read its error")
    detail = f"built in {built['seconds']:.2f} s"
    if loaded["traces"] == 0 and loaded["loads"] == 1:
        seconds = f"{loaded['seconds']:.2f} s"
        return Check("round trip", "ok", f"{detail}, loaded by a fresh process in {seconds}")
    if loaded["loads"] == 1:
        detail += f", loaded by a fresh process, but after a trace: {loaded['why']}"
        return Check("round trip", "warning", detail, "please report this")
    detail += f", but a fresh process had to build it again: {loaded['why']}"
    return Check("round trip", "fault", detail, "please report this")


def _probe(directory: Path) -> dict[str, Any]:
    """Runs the small step in a fresh process. Returns what it tells.

    Raises:
        ValueError: it failed.
    """
    script = directory / "probe.py"
    if not script.exists():
        script.write_text(_PROBE, encoding="utf-8")
    variables = {"STEPCACHE_DIR": "off", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, str(script), str(directory / "programs")]
    done = subprocess.run(
        command,
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
