"""The command line: `stepcache run`, `cache ...`, `report`, `doctor`, `launch`, `serve`, `status`,
`stop`.

Commands about a cache directory take `--dir` and `--json`. The JSON is made of the records in
`stepcache/report/`: sizes in bytes, durations in seconds, times in seconds since the epoch. Exit
codes: 0 for success, 1 if a problem was found or something was refused, 2 for wrong usage.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from stepcache.cli.cache import cache
from stepcache.cli.directories import SIZE, Result, on_directory
from stepcache.cli.render import diagnosis
from stepcache.cli.report import report
from stepcache.cli.serve import serve, status, stop
from stepcache.pods.launch import launch as launch_pod
from stepcache.report.doctor import examine, version_of
from stepcache.run_command import main as run_program


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version_of("stepcache"), prog_name="stepcache")
def main() -> None:
    """Inspects the programs that stepcache keeps on disk, runs pods and tasks, serves variables."""


for command in (cache, report, serve, status, stop):
    main.add_command(command)


@main.command()
@on_directory
@click.option("--max-bytes", type=SIZE, default="10GiB", help="The intended max_bytes.")
@click.option("--round-trip/--no-round-trip", default=True, help="Build and load a small step.")
def doctor(directory: Path, max_bytes: int, round_trip: bool) -> Result:
    """Checks the cache directory and the installation, and builds and loads a small step."""
    found = examine(directory, max_bytes, round_trip)
    return Result(found, diagnosis(found), failed=found.status == "fault")


@main.command(context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(arguments: tuple[str, ...]) -> None:
    """Runs a JAX program as it is, with all that it compiles cached."""
    run_program(list(arguments))


@main.command(context_settings={"allow_interspersed_args": False})
@click.option("-n", "--ranks", type=click.IntRange(min=1), required=True, help="Number of ranks.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as for python -m.")
@click.option(
    "--devices",
    type=click.IntRange(min=1),
    help="Devices per rank; by default JAX_NUM_CPU_DEVICES, or one.",
)
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def launch(script: str, args: tuple[str, ...], **options: Any) -> None:
    """Runs SCRIPT with ARGS as a pod on this machine, one process per rank.

    jax.distributed.initialize() in SCRIPT needs no arguments; heartbeat_timeout_seconds=10 lets a
    killed rank end the pod soon. The first rank that fails ends all others, and its exit code
    becomes that of the launch.
    """
    sys.exit(launch_pod(script, args, **options))
