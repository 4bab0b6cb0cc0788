"""`stepcache serve --tasks`, `stepcache status --tasks` and `stepcache stop`."""

from __future__ import annotations

import functools
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from stepcache._process_hooks import signals_handled
from stepcache.cli.directories import Result, shown_errors
from stepcache.cli.render import tasks


def run_until_signalled(what: str, run: Callable[[], object], stop: Callable[[], None]) -> None:
    """Says `what` runs, and runs it; SIGTERM or Ctrl-C stops it. A second signal does not wait."""
    with signals_handled((signal.SIGTERM, signal.SIGINT), lambda *_: stop()):
        click.echo(what)
        run()


def serve_tasks(size: str, directory: Path) -> None:
    """Runs tasks in a directory, until SIGTERM or Ctrl-C."""
    from stepcache.remote.local_tasks import LocalTasks
    from stepcache.remote.starting import size_of

    served = LocalTasks(directory, *size_of(size))
    run_until_signalled(f"running {size} tasks in {directory}", served.run, served.stop)
    click.echo("stopped")


def serve_tasks_on_ray(size: str, name: str) -> None:
    """Runs tasks in actors of Ray, until SIGTERM or Ctrl-C."""
    from stepcache.remote import ray_tasks
    from stepcache.remote.starting import size_of

    ray_tasks.start(name, *size_of(size))
    stopping = threading.Event()
    run_until_signalled(f"running {size} tasks as ray:{name}", stopping.wait, stopping.set)
    ray_tasks.stop(name)
    click.echo("stopped")


def show_tasks(place: str, as_json: bool, timeout: float) -> None:
    """Shows programs, variables and clients of tasks."""
    from stepcache.remote.connection import Connection

    if place.startswith("ray:"):
        from stepcache.remote import ray_tasks

        find = functools.partial(ray_tasks.find, place[4:])
        connection = Connection(place, timeout=timeout, find=find)
    else:
        connection = Connection(_directory(place), timeout=timeout)
    found = connection.status()
    connection.close()
    Result(found, tasks(found)).show(as_json)


@click.command("stop")
@click.argument("place", metavar="NAME|DIRECTORY|ray:NAME")
@click.option("--timeout", type=click.FloatRange(min=0.1), default=20.0, show_default=True)
@shown_errors()
def stop(place: str, timeout: float) -> None:
    """Ends the tasks of a name, of a directory, or in Ray. Their arrays and variables are lost."""
    if place.startswith("ray:"):
        from stepcache.remote import ray_tasks

        ray_tasks.stop(place[4:], timeout)
        return click.echo(f"stopped the tasks {place}")
    from stepcache.remote.local_tasks import address
    from stepcache.storage.load_markers import Process

    found: dict[str, Any] | None = address(_directory(place))
    process = Process.parse(found["process"]) if found else None
    if process is None or process.has_ended():
        raise click.ClickException(
            f"no tasks run in {_directory(place)}; SIGTERM or Ctrl-C ends a server of variables"
        )
    process.signal(signal.SIGTERM)
    deadline = time.monotonic() + timeout
    while not process.has_ended():
        if time.monotonic() > deadline:
            raise click.ClickException(f"process {process.pid} has not ended in {timeout:g} s")
        time.sleep(0.02)
    click.echo(f"stopped the tasks in {_directory(place)}")


def _directory(place: str) -> Path:
    from stepcache.remote.starting import named_directory

    is_name = "/" not in place and not Path(place).is_dir()
    return named_directory(place) if is_name else Path(place)
