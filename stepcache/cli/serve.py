"""`stepcache serve` and `stepcache status`."""

from __future__ import annotations

import os
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from stepcache._process_hooks import signals_handled
from stepcache.cli.directories import DURATION, Result
from stepcache.cli.render import served
from stepcache.errors import StepCacheError

_DIRECTORY = click.Path(path_type=Path, file_okay=False)


@click.command("serve")
@click.option("--variables", "directory", type=_DIRECTORY, required=True, help="For snapshots.")
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
def serve(directory: Path, **options: Any) -> None:
    """Holds variables for the processes of this machine, until SIGTERM or Ctrl-C.

    Goes on from the last snapshot in the directory. Processes reach it by
    stepcache.connect("local:DIRECTORY"), before or after it is started.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"  # A server takes no accelerator.
    from stepcache.serving.local_server import LocalServer

    try:
        server = LocalServer(directory, **options)
    except StepCacheError as error:
        raise click.ClickException(str(error)) from error
    held = server.host.status().variables
    with signals_handled((signal.SIGTERM, signal.SIGINT), lambda *_: server.stop()):
        click.echo(f"serving {directory} ({len(held)} variables, epoch {server.host.epoch})")
        server.run()
    click.echo(f"stopped; {server.host.moment} writes are in the last snapshot")


@click.command("status")
@click.option("--variables", "directory", type=_DIRECTORY, required=True, help="Of the server.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--timeout", type=click.FloatRange(min=0.1), default=5.0, show_default=True)
def status(directory: Path, as_json: bool, timeout: float) -> None:
    """Shows what a server of variables holds, its clients, and how long requests take."""
    from stepcache.serving.connecting import connect

    try:
        with connect(f"local:{directory}", timeout=timeout) as server:
            found = server.status()
    except StepCacheError as error:
        raise click.ClickException(str(error)) from error
    Result(asdict(found), served(found)).show(as_json)
