"""`stepcache launch`."""

from __future__ import annotations

import sys
from typing import Any

import click

from stepcache.distributed.launch import GRACE_SECONDS
from stepcache.distributed.launch import launch as launch_pod
from stepcache.errors import StepCacheError


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("-n", "--ranks", type=click.IntRange(min=1), required=True, help="Number of ranks.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as for python -m.")
@click.option(
    "--devices",
    type=click.IntRange(min=1),
    help="Devices per rank; by default JAX_NUM_CPU_DEVICES, or one.",
)
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    help="Port of the coordinator on localhost; by default a free one.",
)
@click.option(
    "--grace",
    "grace_seconds",
    type=click.FloatRange(min=0),
    default=GRACE_SECONDS,
    show_default=True,
    help="Seconds that ranks have to exit by themselves after a failure or SIGTERM.",
)
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def launch(script: str, args: tuple[str, ...], **options: Any) -> None:
    """Runs SCRIPT with ARGS as a pod on this machine, one process per rank.

    jax.distributed.initialize() in SCRIPT needs no arguments. The first rank that fails ends all
    others, and its exit code becomes that of the launch.
    """
    try:
        code = launch_pod(script, args, **options)
    except StepCacheError as error:
        raise click.UsageError(str(error)) from error
    sys.exit(code)
