"""`open_target`: starts tasks, or finds running ones, and connects to them."""

from __future__ import annotations

import functools
import math
import re
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path
from typing import Any

import platformdirs
from jax.sharding import AbstractMesh, AxisType

from stepcache.errors import OptionError, TaskError
from stepcache.link.processes import Process
from stepcache.remote.connection import Connection
from stepcache.remote.local_tasks import address
from stepcache.remote.target import Target
from stepcache.sharding import DataAxis, axes_of
from stepcache.storage.private_files import make_directory

# Runs the coordinator without `stepcache/__init__.py`, which imports JAX: it takes a second less to
# start, and a quarter of the memory.
_COORDINATE = """
import sys, types
package = types.ModuleType("stepcache")
package.__path__ = [sys.argv.pop(1)]
sys.modules["stepcache"] = package
from stepcache.remote.local_tasks import main
main(sys.argv[1:])
"""
START_SECONDS = 120.0
_SIZE = re.compile(r"(\d+)x(\d+)")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def open_target(
    where: str,
    mesh: Any,
    data_axis: DataAxis,
    name: str | None,
    watch: str | None,
    timeout: float = START_SECONDS,
    **waiting: Any,
) -> Target:
    """Connects to tasks, which it starts if need be.

    Args:
        where: `local:2x4` for two tasks of four devices on this machine, `local:DIRECTORY` for
            those that `stepcache serve --tasks` runs there, or `ray:NAME` for those that it runs in
            a Ray cluster.
        mesh: a `jax.sharding.AbstractMesh` of their devices; by default one axis, the data axis.
        data_axis: of the session.
        name: of the client. Under a name, `local:2x4` finds the tasks that are there.
        watch: name of a client whose variables are read.
        timeout: seconds for the tasks to start.
        **waiting: how long to wait for what; see `Link`.

    Raises:
        OptionError: the address names no engine, or the mesh does not fit the tasks.
        TaskError: the tasks do not start, or are not there.
    """
    engine, _, place = where.partition(":")
    if engine not in ("local", "ray") or not place:
        expected = "local:2x4, local:DIRECTORY or ray:NAME"
        raise OptionError("unknown target", where="Session", expected=expected, got=where)
    if name is not None and not _NAME.fullmatch(name):
        raise OptionError(
            "a name has letters, digits, and any of . _ -", where="Session", got=repr(name)
        )
    if mesh is not None and not isinstance(mesh, AbstractMesh):
        raise OptionError(
            "the mesh of tasks is a jax.sharding.AbstractMesh",
            where="Session",
            got=type(mesh).__name__,
            hint='jax.sharding.AbstractMesh((4, 2), ("data", "model"))',
        )
    found: Path | str = where
    if engine == "ray":
        from stepcache.remote import ray_tasks

        waiting["find"] = functools.partial(ray_tasks.find, place)
    elif _SIZE.fullmatch(place) is None:
        found = Path(place).expanduser().resolve()
    else:
        found = _started(*size_of(place), name)
    connection = Connection(found, name or "", watch or "", timeout, **waiting)
    try:
        target = Target(connection, _mesh(mesh, connection.about["devices"], data_axis))
    except BaseException:
        connection.close()  # Else tasks that were started for it run as long as the error is kept.
        raise
    weakref.finalize(target, connection.close)
    return target


def size_of(text: str) -> tuple[int, int]:
    """Returns how many tasks, and devices of each, a text such as `2x4` says."""
    found = _SIZE.fullmatch(text)
    tasks, devices = map(int, found.groups()) if found else (0, 0)
    if not (tasks and devices):
        raise OptionError(
            "there are no tasks, or no devices", expected="a size such as 2x4", got=repr(text)
        )
    return tasks, devices


def named_directory(name: str) -> Path:
    """Returns the directory of the tasks of a name."""
    return platformdirs.user_cache_path("stepcache") / "tasks" / name


def _mesh(mesh: AbstractMesh | None, devices: int, data_axis: DataAxis) -> AbstractMesh:
    if mesh is None:
        axis = next(iter(axes_of(data_axis)), "data")
        return AbstractMesh((devices,), (axis,), axis_types=(AxisType.Auto,))
    if math.prod(mesh.axis_sizes) != devices:
        raise OptionError(
            "the mesh does not fit the devices of the tasks",
            where="Session",
            expected=f"{devices} devices",
            got=f"{math.prod(mesh.axis_sizes)}, in {dict(mesh.shape)}",
        )
    return mesh


def _started(tasks: int, devices: int, name: str | None) -> Path:
    """Starts tasks in a directory of their own, or finds those of a name."""
    if name is None:
        directory = Path(tempfile.mkdtemp(prefix="stepcache-tasks-"))
    else:
        directory = named_directory(name)
        make_directory(directory, "tasks", "choose another name")
        found = address(directory)
        process = Process.parse(found["process"]) if found else None
        if found and process is not None and not process.has_ended():
            if (found["tasks"], found.get("devices", devices)) != (tasks, devices):
                raise TaskError(
                    "tasks of this name run already",
                    where=name,
                    expected=f"{tasks}x{devices}",
                    got=f"{found['tasks']}x{found.get('devices', '?')}",
                    hint=f"end them: stepcache stop {name}",
                )
            return directory
    _spawn(directory, tasks, devices, owner=str(Process.current()) if name is None else None)
    return directory


def _spawn(directory: Path, tasks: int, devices: int, owner: str | None) -> None:
    package = str(Path(__file__).parent.parent)
    command = [sys.executable, "-c", _COORDINATE, package, str(directory)]
    command += [str(tasks), str(devices), *([owner] if owner else [])]
    with (directory / "coordinator.log").open("ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        _wait_for_address(directory, process)
    except BaseException:
        if owner is not None:  # Nobody else knows of it.
            process.terminate()
        raise


def _wait_for_address(directory: Path, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not _is_of(address(directory), process.pid):
        if process.poll() is not None:
            lines = (directory / "coordinator.log").read_text(errors="replace").splitlines()
            errors = [line for line in lines if line[:1].strip()]  # What follows is indented.
            raise TaskError(
                "the tasks cannot be started",
                where=str(directory),
                got=errors[-1] if errors else f"exit code {process.returncode}",
            )
        if time.monotonic() > deadline:
            process.kill()
            raise TaskError("the tasks have not started in time", where=str(directory))
        time.sleep(0.02)


def _is_of(found: dict[str, Any] | None, pid: int) -> bool:
    """Whether an address is that of a process, and not of one that started at the same time."""
    process = Process.parse(found["process"]) if found else None
    return process is not None and process.pid == pid and not process.has_ended()
