"""`stepcache serve` and `stepcache status`."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from stepcache._process_hooks import signals_handled
from stepcache.cli.directories import DURATION, Result
from stepcache.cli.render import served
from stepcache.cli.tasks import serve_tasks, show_tasks
from stepcache.errors import StepCacheError
from stepcache.units import counted

_DIRECTORY = click.Path(path_type=Path, file_okay=False)


@click.command("serve")
@click.option("--variables", "directory", type=_DIRECTORY, help="For snapshots and tables.")
@click.option("--tasks", "size", metavar="2x4", help="Run two tasks of four devices each.")
@click.option("--directory", "place", type=_DIRECTORY, help="By which clients find the tasks.")
@click.option(
    "--snapshot-every",
    "snapshot_seconds",
    type=DURATION,
    default="30s",
    show_default=True,
    help="Write a snapshot so long after a write.",
)
@click.option(
    "--snapshot-writes",
    type=click.IntRange(min=1),
    default=10_000,
    show_default=True,
    help="Write a snapshot after so many writes.",
)
@click.option("--ray", "name", metavar="NAME", help="Serve from a Ray actor of this name.")
@click.option(
    "--hosts",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="So many Ray actors share the variables; of a directory always as many.",
)
def serve(
    directory: Path | None,
    size: str | None,
    place: Path | None,
    name: str | None,
    hosts: int,
    **options: Any,
) -> None:
    """Holds variables for other processes, or runs their steps, until SIGTERM or Ctrl-C.

    Goes on from the last snapshot in the directory. Processes of this machine reach it by
    stepcache.connect("local:DIRECTORY"), before or after it is started.

    With --ray, a detached Ray actor holds them, for all processes of a Ray cluster, which reach it
    by stepcache.connect("ray:NAME"). If this command is killed, the actor goes on, and the same
    command finds it again. All nodes have to see the directory. Without a cluster (`ray start
    --head`), the command starts a Ray of its own, which ends with it. With --hosts, several actors,
    on as many nodes if there are, share the variables.

    With --tasks 2x4 --directory DIRECTORY, two processes of four devices each run the steps of
    stepcache.Session(target="local:DIRECTORY"), and hold their variables. On CPUs as many devices
    are made; of other devices each takes its share.
    """
    if size is not None or place is not None:
        if size is None or place is None or directory is not None or name:
            raise click.UsageError("tasks take --tasks and --directory, and nothing else")
        return serve_tasks(size, place)
    if directory is None:
        raise click.UsageError("give --variables DIRECTORY, or --tasks 2x4 --directory DIRECTORY")
    if hosts > 1 and not name:
        raise click.UsageError("--hosts is for Ray: give --ray NAME too")
    os.environ["JAX_PLATFORMS"] = "cpu"  # A server takes no accelerator.
    if name:
        _serve_by_ray(name, directory, {"hosts": hosts, **options})
    else:
        _serve_here(directory, options)


def _serve_here(directory: Path, options: dict[str, Any]) -> None:
    from stepcache.serving.local_server import LocalServer

    try:
        server = LocalServer(directory, **options)
    except StepCacheError as error:
        raise click.ClickException(str(error)) from error
    held = server.host.status().variables
    with signals_handled((signal.SIGTERM, signal.SIGINT), lambda *_: server.stop()):
        click.echo(f"serving {directory} ({len(held)} variables, epoch {server.host.epoch})")
        try:
            server.run()
        except StepCacheError as error:
            raise click.ClickException(str(error)) from error
    click.echo(f"stopped; {server.host.moment} writes are in the last snapshot")


def _serve_by_ray(name: str, directory: Path, options: dict[str, Any]) -> None:
    try:
        from stepcache.serving import ray_engine

        ray_engine.initialise(log_to_driver=True)  # The actor's errors are shown here.
        stopping = threading.Event()
        first, *others = found = ray_engine.start(name, directory, **options)
        held = f"{max(about.variables for about in found)} variables, epoch {first.epoch}"
        held += f", {counted(len(found), 'host')}" if others else ""
        # Ray handles SIGTERM too, and gets it back: a second one does not wait.
        with signals_handled((signal.SIGTERM, signal.SIGINT), lambda *_: stopping.set()):
            click.echo(f"serving {directory} as ray:{name} ({held})")
            stopping.wait()
        moment = ray_engine.stop(name)
    except StepCacheError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"stopped; {moment} writes are in the last snapshot")


@click.command("status")
@click.option("--variables", "directory", type=_DIRECTORY, help="Of the server.")
@click.option("--ray", "name", metavar="NAME", help="Of the Ray actor.")
@click.option("--tasks", metavar="NAME|DIRECTORY", help="Of tasks that run steps.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--timeout", type=click.FloatRange(min=0.1), default=5.0, show_default=True)
def status(
    directory: Path | None, name: str | None, tasks: str | None, as_json: bool, timeout: float
) -> None:
    """Shows what a server of variables holds, its clients, and how long requests take.

    Where several hosts share the variables, it shows each. In JSON they have their addresses.
    """
    if [directory, name, tasks].count(None) != 2:
        raise click.UsageError("give either --variables DIRECTORY, --ray NAME or --tasks PLACE")
    if tasks is not None:
        return show_tasks(tasks, as_json, timeout)
    from stepcache.serving.connecting import connect
    from stepcache.serving.transport import place_of

    address = f"ray:{name}" if name else f"local:{directory}"
    try:
        with connect(address, timeout=timeout) as server:
            found = {address: server.status()}
            for host in range(1, found[address].hosts):
                found[place_of(address, host)] = server.status(host)
    except StepCacheError as error:
        raise click.ClickException(str(error)) from error
    Result({each: asdict(found[each]) for each in found}, served(found)).show(as_json)
