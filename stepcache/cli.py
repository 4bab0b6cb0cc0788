"""The command line: `stepcache cache ...`, `stepcache doctor` and `stepcache launch`.

Commands about a cache directory take `--dir` and `--json`. The JSON is made of the records in
`stepcache/report/`: sizes in bytes, durations in seconds, times in seconds since the epoch. Exit
codes: 0 for success, 1 if a problem was found or something was refused, 2 for wrong usage.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import click

from stepcache.distributed.launch import GRACE_SECONDS, launch
from stepcache.errors import CacheDirectoryError, StepCacheError, refuse_url
from stepcache.fingerprint.provenance import distribution_of
from stepcache.programs.archive import Archive, open_archive
from stepcache.programs.cache import default_directory
from stepcache.report import doctor as doctors
from stepcache.report import inventory as inventories
from stepcache.report import moving, render, runs
from stepcache.storage.entry_info import EntryInfo
from stepcache.units import counted, readable_bytes

_BYTES = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_BYTES |= {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_BYTES |= {f"{unit}b": size for unit, size in _BYTES.items()}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


class Quantity(click.ParamType):
    """A number with a unit, converted to `kind`."""

    def __init__(self, name: str, kind: type, units: Mapping[str, float], examples: str):
        self.name, self.kind, self.units, self.examples = name, kind, units, examples

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if not isinstance(value, str):
            return value
        found = re.fullmatch(r"([\d.]+)\s*([a-z]*)", value.strip().lower())
        with contextlib.suppress(ValueError, KeyError):
            if found is not None:
                return self.kind(float(found[1]) * self.units[found[2]])
        self.fail(f"{value!r} is not a {self.name}, such as {self.examples}", param, ctx)


SIZE = Quantity("size", int, _BYTES, "500MB, 2GB or 1.5GiB")
DURATION = Quantity("duration", float, _SECONDS, "12h, 30d or 2w")


class Result(NamedTuple):
    """What a command prints, as JSON or as text; it fails if there is an error or `failed`."""

    data: dict[str, Any]
    text: Iterable[Any] = ()
    error: str = ""
    failed: bool = False

    def show(self, as_json: bool) -> None:
        """Prints the result, and ends the process if the command failed."""
        if as_json:
            error = {"error": self.error} if self.error else {}
            click.echo(json.dumps(error | self.data, indent=2))
        else:
            if self.error:
                click.echo(self.error, err=True)
            render.show(self.text)
        if self.error or self.failed:
            sys.exit(1)


def _command(group: click.Group, name: str, **settings: Any) -> Callable:
    """Makes a command with `--dir` and `--json` of a function that returns a `Result`."""

    def decorate(function: Callable[..., Result]) -> click.Command:
        @click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
        @click.option(
            "--dir",
            "directory",
            type=click.Path(path_type=Path, file_okay=False),
            help="Cache directory; by default STEPCACHE_DIR, or the user's own.",
        )
        @functools.wraps(function)
        def run(directory: Path | None, as_json: bool, **options: Any) -> None:
            try:
                if directory is not None:
                    refuse_url(directory, CacheDirectoryError, "--dir")
                result = function(directory or _default_directory(), **options)
            except moving.ForeignBundleError as error:
                parts = {"foreign": [asdict(part) for part in error.parts]}
                result = Result(parts, [render.parts_table(error.parts)], str(error))
            except StepCacheError as error:
                result = Result({}, error=str(error))
            result.show(as_json)

        return group.command(name, **settings)(run)

    return decorate


def _default_directory() -> Path:
    directory = default_directory()
    if directory is None:
        raise click.UsageError(
            "STEPCACHE_DIR=off keeps programs in memory only, so there is no cache directory. "
            "Name one with --dir."
        )
    return directory


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(distribution_of("stepcache")[1], prog_name="stepcache")
def main() -> None:
    """Inspects and maintains the programs that stepcache keeps on disk."""


@main.group()
def cache() -> None:
    """Inspects and maintains a cache directory."""


# ---- inspecting ---------------------------------------------------------------------------------

_SORTS = {
    "used": lambda item: -item.used_time,
    "built": lambda item: -(item.built_time or 0.0),
    "size": lambda item: -item.size_bytes,
    "seconds": lambda item: -(item.built_seconds or 0.0),
    "label": lambda item: (item.label, -item.used_time),
}


@_command(cache, "ls")
@click.option("--sort", type=click.Choice(list(_SORTS)), default="used", show_default=True)
def list_command(directory: Path, sort: str) -> Result:
    """Lists steps and their programs."""
    found = inventories.take_inventory(inventories.open_existing(directory), directory)
    items = sorted(found.items, key=_SORTS[sort])
    data = {**asdict(found), "items": [asdict(item) for item in items]}
    return Result(data, render.inventory(found, items))


@_command(cache, "show")
@click.argument("digest")
@click.option("--all", "everything", is_flag=True, help="Show every row of each list.")
def show_command(directory: Path, digest: str, everything: bool) -> Result:
    """Shows a step or program. DIGEST is the beginning of its digest, or the name of a step."""
    archive = inventories.open_existing(directory)
    found = inventories.find(archive.disk.entries(), digest) if archive is not None else []
    if archive is None or not found:
        return Result({}, error=f"Nothing in {directory} matches {digest!r}.")
    if len(found) > 1:
        names = [f"{each.kind} {each.digest} {inventories.label_of(each)}" for each in found]
        message = f"{digest!r} may be any of\n  " + "\n  ".join(names[:20])
        return Result({"matches": [each.digest for each in found]}, error=message)
    details = inventories.details(archive, found[0])
    return Result(asdict(details), render.details(details, everything=everything))


@_command(cache, "why")
@click.argument("step", required=False)
@click.option("--runs", "count", type=click.IntRange(min=1), help="Compare that many runs.")
@click.option("--ranks", "by_rank", is_flag=True, help="Compare the processes of the latest run.")
def why_command(directory: Path, step: str | None, count: int | None, by_rank: bool) -> Result:
    """Shows what the latest run built and loaded, and why: all steps, or one STEP."""
    archive = inventories.open_existing(directory)
    found = list(itertools.islice(runs.latest_runs(archive, step), count or 1))
    if not found and step is None:
        return Result({"runs": []}, [f"No run has used {directory} yet."])
    if not found:
        known = runs.steps_known(archive)
        listed = f"\n  known: {', '.join(known)}" if known else ""
        message = f"No recorded run in {directory} used {step!r}.{listed}"
        return Result({"known": known}, error=message)
    if by_rank:
        text = render.ranks(found[0])
    else:
        text = render.why(found[0]) if count is None else render.startup_ledger(found)
    return Result({"runs": [asdict(run) for run in found]}, text)


# ---- maintaining --------------------------------------------------------------------------------


@_command(cache, "verify")
def verify_command(directory: Path) -> Result:
    """Reads and checks every entry, and quarantines damaged ones."""
    archive = inventories.open_existing(directory)
    count, found = inventories.verify(archive) if archive is not None else (0, [])
    damaged = sum(each.state == "damaged" for each in found)
    data = {
        "directory": str(directory),
        "entries": count,
        "damaged": damaged,
        "findings": [asdict(each) for each in found],
    }
    text = render.verified(count, found, str(directory))
    return Result(data, text, failed=damaged > 0)


@_command(cache, "prune")
@click.option("--max-bytes", type=SIZE, help="Keep at most this size, such as 2GB.")
@click.option("--older-than", type=DURATION, help="Remove entries unused for this time: 30d.")
def prune_command(directory: Path, max_bytes: int | None, older_than: float | None) -> Result:
    """Removes the least recently used entries."""
    if max_bytes is None and older_than is None:
        raise click.UsageError("Say how much to keep: --max-bytes 2GB or --older-than 30d.")
    since = None if older_than is None else time.time() - older_than
    archive = inventories.open_existing(directory)
    return _freed(archive, directory, archive.disk.prune(max_bytes, since) if archive else [])


def _freed(
    archive: Archive | None, directory: Path, removed: list[EntryInfo], failed: bool = False
) -> Result:
    freed_bytes = sum(each.size_bytes for each in removed)
    left_bytes = archive.disk.size_bytes() if archive is not None else 0
    data = {
        "directory": str(directory),
        "removed": [{"kind": each.kind, "digest": each.digest} for each in removed],
        "freed_bytes": freed_bytes,
        "left_bytes": left_bytes,
    }
    text = (
        f"{counted(len(removed), 'entry')} removed, {readable_bytes(freed_bytes)} freed; "
        f"{readable_bytes(left_bytes)} left in {directory}."
    )
    return Result(data, [text], failed=failed)


@_command(cache, "clear")
@click.option("--yes", is_flag=True, help="Do not ask.")
def clear_command(directory: Path, yes: bool) -> Result:
    """Removes all steps and programs, and the quarantine."""
    archive = inventories.open_existing(directory)
    entries = list(archive.disk.entries()) if archive is not None else []
    if not yes:
        size = readable_bytes(sum(each.size_bytes for each in entries))
        lookup = f"Remove everything, {counted(len(entries), 'entry')}, {size}, in {directory}?"
        click.confirm(lookup, abort=True, err=True)
    if archive is not None:
        archive.disk.clear()
    left = {(each.kind, each.digest) for each in archive.disk.entries()} if archive else set()
    gone = [each for each in entries if (each.kind, each.digest) not in left]
    return _freed(archive, directory, gone, failed=bool(left))


# ---- moving -------------------------------------------------------------------------------------


@_command(cache, "export")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("steps", nargs=-1)
def export_command(directory: Path, file: Path, steps: tuple[str, ...]) -> Result:
    """Writes all programs, or those of STEPS, to a bundle FILE for another machine."""
    archive = inventories.open_existing(directory)
    if archive is None:
        return Result({}, error=f"{directory} holds no programs: there is nothing to export.")
    result = moving.export(archive, file, steps)
    return Result(asdict(result), render.exported(result))


@_command(cache, "import")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("--trust", is_flag=True, help="Let the maker of the bundle run code as you.")
@click.option("--anyway", is_flag=True, help="Also import programs for another environment.")
def import_command(directory: Path, file: Path, trust: bool, anyway: bool) -> Result:
    """Imports the programs of a bundle FILE that `export` wrote."""

    def opened() -> Archive:
        return open_archive(directory, None, "off", 0.0)

    result = moving.take(opened, file, trust=trust, anyway=anyway)
    return Result(asdict(result), render.imported(result))


# ---- doctor, launch -----------------------------------------------------------------------------


@_command(main, "doctor")
@click.option("--max-bytes", type=SIZE, default="10GiB", help="The max_bytes you intend to use.")
@click.option("--round-trip/--no-round-trip", default=True, help="Build and load a small step.")
def doctor_command(directory: Path, max_bytes: int, round_trip: bool) -> Result:
    """Checks the cache directory and the installation, and builds and loads a small step."""
    found = doctors.examine(directory, max_bytes, round_trip)
    return Result(asdict(found), render.diagnosis(found), failed=found.status == "fault")


@main.command("launch", context_settings={"allow_interspersed_args": False})
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
def launch_command(script: str, args: tuple[str, ...], **options: Any) -> None:
    """Runs SCRIPT with ARGS as a pod on this machine, one process per rank.

    jax.distributed.initialize() in SCRIPT needs no arguments. The first rank that fails ends all
    others, and its exit code becomes that of the launch.
    """
    try:
        code = launch(script, args, **options)
    except StepCacheError as error:
        raise click.UsageError(str(error)) from error
    sys.exit(code)


if __name__ == "__main__":
    main()
