"""`stepcache serve`, `stepcache status` and `stepcache stop`."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import click

import stepcache.cli.render as render
from stepcache._process_hooks import signals_handled
from stepcache.cli.directories import DURATION, Result, shown_errors
from stepcache.units import counted

T = TypeVar("T")

_DIRECTORY = click.Path(path_type=Path, file_okay=False)


@click.command("serve")
@click.option(
    "--variables",
    "directory",
    type=_DIRECTORY,
    help="Serve variables; keep snapshots and tables here.",
)
@click.option("--tasks", "size", metavar="2x4", help="Run two tasks of four devices each.")
@click.option("--directory", "place", type=_DIRECTORY, help="Where clients find the tasks.")
@click.option(
    "--snapshot-every",
    "snapshot_seconds",
    type=DURATION,
    default="30s",
    show_default=True,
    help="Longest time from a write to a snapshot.",
)
@click.option(
    "--snapshot-writes",
    type=click.IntRange(min=1),
    default=10_000,
    show_default=True,
    help="Maximal number of writes between snapshots.",
)
@click.option("--ray", "name", metavar="NAME", help="Serve from a Ray actor of this name.")
@click.option(
    "--hosts",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Number of Ray actors that share the variables; the same at each start.",
)
@click.option("--until-input-ends", "has_parent", is_flag=True, hidden=True)
@shown_errors()
def serve(
    directory: Path | None,
    size: str | None,
    place: Path | None,
    name: str | None,
    hosts: int,
    has_parent: bool,
    **options: Any,
) -> None:
    """Holds variables for other processes, or runs their steps, until SIGTERM or Ctrl-C.

    The server starts from the last snapshot in the directory. Processes of this machine connect by
    stepcache.connect("local:DIRECTORY"), also before the server is started.

    With --ray, a detached Ray actor holds the variables, and all processes of the Ray cluster
    connect by stepcache.connect("ray:NAME"). If this command is killed, the actor continues, and
    the same command finds it again. All nodes must share the directory. If there is no cluster
    (`ray start --head`), the command starts Ray, and ends it. With --hosts, several actors share
    the variables, on different nodes if there are enough.

    With --tasks 2x4 --directory DIRECTORY, two processes with four devices each run the steps of
    stepcache.Session(target="local:DIRECTORY"), and hold their variables. CPU devices are created;
    other devices are divided among the processes. With --ray NAME in place of the directory, they
    are actors of a Ray cluster, for stepcache.Session(target="ray:NAME").
    """
    if size is not None or place is not None:
        others = directory or hosts > 1
        if size and place and not (name or others):
            return _serve_tasks(size, place)
        if size and name and not (place or others):
            return _serve_tasks_on_ray(size, name)
        what = "--tasks needs --directory or --ray, and excludes --variables and --hosts"
        raise click.UsageError(what)
    if directory is None:
        raise click.UsageError("give --variables DIRECTORY, or --tasks 2x4 --directory DIRECTORY")
    if hosts > 1 and not name:
        raise click.UsageError("--hosts needs --ray NAME")
    os.environ["JAX_PLATFORMS"] = "cpu"  # A server takes no accelerator.
    if name:
        _serve_by_ray(name, directory, has_parent, {"hosts": hosts, **options})
    else:
        _serve_here(directory, has_parent, options)


def _serve_here(directory: Path, has_parent: bool, options: dict[str, Any]) -> None:
    from stepcache.serving.local_server import LocalServer

    server = LocalServer(directory, **options)
    held = server.host.status().variables
    what = f"serving {directory} ({len(held)} variables, epoch {server.host.epoch})"
    if not _run_until_signalled(what, server.run, server.stop, has_parent):
        what = "stopped; the last snapshot lacks writes. Clients keep theirs: serve again"
        raise click.ClickException(what)
    click.echo(f"stopped; {server.host.moment} writes are in the last snapshot")


def _serve_by_ray(name: str, directory: Path, has_parent: bool, options: dict[str, Any]) -> None:
    from stepcache.serving import ray_engine

    ray_engine.initialise(log_to_driver=True)  # The actor's errors are shown here.
    first, *others = found = ray_engine.start(name, directory, **options)
    held = f"{max(about.variables for about in found)} variables, epoch {first.epoch}"
    held += f", {counted(len(found), 'host')}" if others else ""
    stopping = threading.Event()
    what = f"serving {directory} as ray:{name} ({held})"
    _run_until_signalled(what, stopping.wait, stopping.set, has_parent)
    click.echo(f"stopped; {ray_engine.stop(name)} writes are in the last snapshot")


def _serve_tasks(size: str, directory: Path) -> None:
    """Runs tasks in a directory, until SIGTERM or Ctrl-C."""
    from stepcache.remote.local_tasks import LocalTasks
    from stepcache.remote.starting import size_of

    served = LocalTasks(directory, *size_of(size))
    _run_until_signalled(f"running {size} tasks in {directory}", served.run, served.stop)
    click.echo("stopped")


def _serve_tasks_on_ray(size: str, name: str) -> None:
    """Runs tasks in actors of Ray, until SIGTERM or Ctrl-C."""
    from stepcache.remote import ray_tasks
    from stepcache.remote.starting import size_of

    ray_tasks.start(name, *size_of(size))
    stopping = threading.Event()
    _run_until_signalled(f"running {size} tasks as ray:{name}", stopping.wait, stopping.set)
    ray_tasks.stop(name)
    click.echo("stopped")


def _run_until_signalled(
    what: str, run: Callable[[], T], stop: Callable[[], None], has_parent: bool = False
) -> T:
    """Prints what runs, and runs it; SIGTERM or Ctrl-C stops it. A second signal does not wait.

    With a parent, the end of standard input stops it too: the parent holds the other end.
    """

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        stop()

    if has_parent:
        threading.Thread(target=watch, daemon=True).start()
    with signals_handled((signal.SIGTERM, signal.SIGINT), lambda *_: stop()):
        click.echo(what)
        return run()


@click.command("status")
@click.option("--variables", "directory", type=_DIRECTORY, help="Directory of the server.")
@click.option("--ray", "name", metavar="NAME", help="Name of the Ray actor.")
@click.option("--tasks", metavar="NAME|DIRECTORY|ray:NAME", help="Where the tasks are.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--timeout", type=click.FloatRange(min=0.1), default=5.0, show_default=True)
@shown_errors()
def status(
    directory: Path | None, name: str | None, tasks: str | None, as_json: bool, timeout: float
) -> None:
    """Shows variables, clients and request times of a server of variables, or the state of tasks.

    If several hosts share the variables, each is shown. The JSON has them by address.
    """
    if [directory, name, tasks].count(None) != 2:
        raise click.UsageError("give either --variables DIRECTORY, --ray NAME or --tasks PLACE")
    if tasks is not None:
        return _show_tasks(tasks, as_json, timeout)
    from stepcache.serving.connecting import connect
    from stepcache.serving.transport import place_of

    if name:
        _join_ray()
    address = f"ray:{name}" if name else f"local:{directory}"
    with connect(address, timeout=timeout) as server:
        found = {address: server.status()}
        for host in range(1, found[address].hosts):
            found[place_of(address, host)] = server.status(host)
    Result({each: asdict(found[each]) for each in found}, render.served(found)).show(as_json)


def _show_tasks(place: str, as_json: bool, timeout: float) -> None:
    """Shows programs, variables and clients of tasks."""
    from stepcache.remote.connection import Connection

    if place.startswith("ray:"):
        _join_ray()
        from stepcache.remote import ray_tasks

        find = functools.partial(ray_tasks.find, place[4:])
        connection = Connection(place, timeout=timeout, find=find)
    else:
        connection = Connection(_directory(place), timeout=timeout)
    found = connection.status()
    connection.close()
    Result(found, render.tasks(found)).show(as_json)


@click.command("stop")
@click.argument("place", metavar="NAME|DIRECTORY|ray:NAME")
@click.option("--timeout", type=click.FloatRange(min=0.1), default=20.0, show_default=True)
@shown_errors()
def stop(place: str, timeout: float) -> None:
    """Ends the tasks of a name, of a directory, or in Ray. Their arrays and variables are lost."""
    if place.startswith("ray:"):
        _join_ray()
        from stepcache.remote import ray_tasks

        ray_tasks.stop(place[4:], timeout)
        return click.echo(f"stopped the tasks {place}")
    from stepcache.link.processes import Process
    from stepcache.remote.local_tasks import address

    directory = _directory(place)
    found: dict[str, Any] | None = address(directory)
    process = Process.parse(found["process"]) if found else None
    if process is None or process.has_ended():
        hint = "SIGTERM or Ctrl-C ends a server of variables"
        raise click.ClickException(f"no tasks run in {directory}; {hint}")
    process.signal(signal.SIGTERM)
    deadline = time.monotonic() + timeout
    while not process.has_ended():
        if time.monotonic() > deadline:
            raise click.ClickException(f"process {process.pid} has not ended in {timeout:g} s")
        time.sleep(0.02)
    click.echo(f"stopped the tasks in {directory}")


def _join_ray() -> None:
    """Connects to the Ray cluster that runs; a new one would hold nothing to show or to stop."""
    from stepcache.serving import ray_transport

    ray_transport.initialise(starts=False)


def _directory(place: str) -> Path:
    from stepcache.remote.starting import named_directory

    is_name = "/" not in place and not Path(place).is_dir()
    return named_directory(place) if is_name else Path(place)
