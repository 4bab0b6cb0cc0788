"""The command line: `stepcache cache ...`, `stepcache doctor` and `stepcache launch`.

Commands about a cache directory take `--dir` and `--json`. The JSON is made of the records in
`stepcache/report/`: sizes in bytes, durations in seconds, times in seconds since the epoch. Exit
codes: 0 for success, 1 if a problem was found or something was refused, 2 for wrong usage.
"""

from __future__ import annotations

from pathlib import Path

import click

from stepcache.cli.cache import cache
from stepcache.cli.directories import SIZE, Result, on_directory
from stepcache.cli.launch import launch
from stepcache.cli.render import diagnosis
from stepcache.fingerprint.provenance import distribution_of
from stepcache.report.doctor import examine


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(distribution_of("stepcache")[1], prog_name="stepcache")
def main() -> None:
    """Inspects and maintains the programs that stepcache keeps on disk."""


main.add_command(cache)
main.add_command(launch)


@main.command()
@on_directory
@click.option("--max-bytes", type=SIZE, default="10GiB", help="The max_bytes you intend to use.")
@click.option("--round-trip/--no-round-trip", default=True, help="Build and load a small step.")
def doctor(directory: Path, max_bytes: int, round_trip: bool) -> Result:
    """Checks the cache directory and the installation, and builds and loads a small step."""
    found = examine(directory, max_bytes, round_trip)
    return Result(found, diagnosis(found), failed=found.status == "fault")
