"""The command line: `stepcache cache …`, `stepcache doctor` and `stepcache launch`.

What is shown is made in `report/`. Every command but `launch`, whose output and exit code are the
script's, takes `--json`: one document on standard output, whose fields are those of the records in
`report/`; sizes in bytes, times in seconds, moments in seconds since the epoch. Exit codes: 0 all
is well, 1 a problem was found or something was refused, 2 the command was used wrongly.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import RenderableType

from stepcache.distributed.launch import GRACE_SECONDS, launch
from stepcache.errors import CacheDirectoryError, StepCacheError, refuse_url
from stepcache.fingerprint.provenance import distribution_of
from stepcache.programs.archive import Archive, open_archive
from stepcache.programs.cache import default_directory
from stepcache.report import doctor as doctors
from stepcache.report import inventory as inventories
from stepcache.report import moving, runs, tables
from stepcache.storage.disk_store import EntryInfo
from stepcache.units import counted, readable_bytes

_UNITS = {"": 1, "b": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_BINARY_UNITS = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


class Size(click.ParamType):
    """A size in bytes, such as 500MB, 2GB or 1.5GiB."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"([\d.]+)\s*([kmgt]?i?)b?", value.strip().lower())
        units = _UNITS | _BINARY_UNITS
        with contextlib.suppress(ValueError):
            if found is not None and found[2] in units:
                return int(float(found[1]) * units[found[2]])
        self.fail(f"{value!r} is not a size, such as 500MB, 2GB or 1.5GiB", param, ctx)


class Duration(click.ParamType):
    """A duration in seconds, such as 12h, 30d or 2w."""

    name = "duration"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"([\d.]+)\s*([smhdw])", value.strip().lower())
        with contextlib.suppress(ValueError):
            if found is not None:
                return float(found[1]) * _SECONDS[found[2]]
        self.fail(f"{value!r} is not a duration, such as 12h, 30d or 2w", param, ctx)


class Output:
    """Where a command's result goes: a document for programs, or tables for people."""

    def __init__(self, as_json: bool):
        self.as_json = as_json

    def show(self, data: Any, shown: RenderableType | Callable[[], RenderableType]) -> None:
        """Prints a result, as data or as it is shown."""
        if self.as_json:
            click.echo(json.dumps(data, indent=2))
        else:
            tables.show(shown() if callable(shown) else shown)

    def fail(self, message: str, data: dict[str, Any] | None = None, shown: Any = None) -> None:
        """Says what is wrong, and ends the command."""
        if self.as_json:
            click.echo(json.dumps({"error": message, **(data or {})}, indent=2))
        else:
            click.echo(message, err=True)
            if shown is not None:
                tables.show(shown)
        sys.exit(1)


def _command(group: click.Group, name: str, **settings: Any) -> Callable:
    """Makes a command of a function of (output, directory, its own options)."""

    def decorate(function: Callable) -> click.Command:
        @click.option("--json", "as_json", is_flag=True, help="One JSON document.")
        @click.option(
            "--dir",
            "directory",
            type=click.Path(path_type=Path, file_okay=False),
            help="The directory of programs; by default STEPCACHE_DIR, or the user's own.",
        )
        @functools.wraps(function)
        def run(directory: Path | None, as_json: bool, **options: Any) -> None:
            output = Output(as_json)
            try:
                if directory is not None:
                    refuse_url(directory, CacheDirectoryError, "--dir")
                function(output, directory or _default_directory(), **options)
            except moving.ForeignBundleError as error:
                parts = [asdict(part) for part in error.parts]
                output.fail(str(error), {"foreign": parts}, tables.parts_table(error.parts))
            except StepCacheError as error:
                output.fail(str(error))

        return group.command(name, **settings)(run)

    return decorate


def _default_directory() -> Path:
    directory = default_directory()
    if directory is None:
        raise click.UsageError(
            "STEPCACHE_DIR=off: programs are kept in memory alone, and there is no directory to "
            "look into. Name one with --dir."
        )
    return directory


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(distribution_of("stepcache")[1], prog_name="stepcache")
def main() -> None:
    """Programs that outlive the process: what is kept, and why."""


@main.group()
def cache() -> None:
    """Looks into a directory of programs, and keeps it in order."""


# ---- looking ------------------------------------------------------------------------------------

_SORTS = {
    "used": lambda item: -item.used_time,
    "built": lambda item: -(item.built_time or 0.0),
    "size": lambda item: -item.size_bytes,
    "seconds": lambda item: -(item.built_seconds or 0.0),
    "label": lambda item: (item.label, -item.used_time),
}


@_command(cache, "ls")
@click.option("--sort", type=click.Choice(list(_SORTS)), default="used", show_default=True)
def list_command(output: Output, directory: Path, sort: str) -> None:
    """Lists steps, with their programs."""
    found = inventories.take_inventory(inventories.open_existing(directory), directory)
    items = sorted(found.items, key=_SORTS[sort])
    data = {**asdict(found), "items": [asdict(item) for item in items]}
    output.show(data, lambda: tables.inventory(found, items))


@_command(cache, "show")
@click.argument("digest")
@click.option("--all", "everything", is_flag=True, help="Every fact, not the first of each group.")
def show_command(output: Output, directory: Path, digest: str, everything: bool) -> None:
    """Shows a step or program: DIGEST is the begin of its digest, or the name of a step."""
    archive = inventories.open_existing(directory)
    found = inventories.find(archive.tier.entries(), digest) if archive is not None else []
    if archive is None or not found:
        return output.fail(f"Nothing in {directory} is called {digest!r}.")
    if len(found) > 1:
        names = [f"{each.kind} {each.digest} {inventories.label_of(each)}" for each in found]
        message = f"{digest!r} may be any of\n  " + "\n  ".join(names[:20])
        return output.fail(message, {"matches": [each.digest for each in found]})
    details = inventories.details(archive, found[0])
    output.show(asdict(details), lambda: tables.details(details, everything=everything))


@_command(cache, "why")
@click.argument("step", required=False)
@click.option("--runs", "count", type=click.IntRange(min=1), help="That many runs side by side.")
@click.option("--ranks", "by_rank", is_flag=True, help="The processes of the latest run.")
def why_command(
    output: Output, directory: Path, step: str | None, count: int | None, by_rank: bool
) -> None:
    """Tells what the latest run built and loaded, and why: all of it, or one STEP."""
    archive = inventories.open_existing(directory)
    found = list(itertools.islice(runs.latest_runs(archive, step), count or 1))
    if not found:
        known = runs.steps_known(archive)
        if step is None:
            return output.show({"runs": []}, f"No run has used {directory} yet.")
        message = f"No run that is remembered in {directory} used {step!r}."
        known_text = f"\n  known: {', '.join(known)}" if known else ""
        return output.fail(message + known_text, {"known": known})
    data = {"runs": [asdict(run) for run in found]}
    if by_rank:
        output.show(data, lambda: tables.ranks(found[0]))
    elif count is not None:
        output.show(data, lambda: tables.startup_ledger(found))
    else:
        output.show(data, lambda: tables.why(found[0]))


# ---- keeping in order ---------------------------------------------------------------------------


@_command(cache, "verify")
def verify_command(output: Output, directory: Path) -> None:
    """Reads and checks every entry; damaged ones go into quarantine."""
    archive = inventories.open_existing(directory)
    count, found = inventories.verify(archive) if archive is not None else (0, [])
    damaged = sum(each.state == "damaged" for each in found)
    data = {
        "directory": str(directory),
        "entries": count,
        "damaged": damaged,
        "findings": [asdict(each) for each in found],
    }
    output.show(data, lambda: tables.verified(count, found, str(directory)))
    if damaged:
        sys.exit(1)


@_command(cache, "prune")
@click.option("--max-bytes", type=Size(), help="Keep at most that, such as 2GB.")
@click.option("--older-than", type=Duration(), help="Remove what was not used for, such as, 30d.")
def prune_command(
    output: Output, directory: Path, max_bytes: int | None, older_than: float | None
) -> None:
    """Removes what was used least recently."""
    if max_bytes is None and older_than is None:
        raise click.UsageError("Say how much is to be kept: --max-bytes 2GB or --older-than 30d.")
    since = None if older_than is None else time.time() - older_than
    archive = inventories.open_existing(directory)
    removed = archive.tier.prune(max_bytes, since) if archive is not None else []
    _show_freed(output, archive, directory, removed)


def _show_freed(
    output: Output, archive: Archive | None, directory: Path, removed: list[EntryInfo]
) -> None:
    freed_bytes = sum(each.size_bytes for each in removed)
    left_bytes = archive.tier.size_bytes() if archive is not None else 0
    data = {
        "directory": str(directory),
        "removed": [{"kind": each.kind, "digest": each.digest} for each in removed],
        "freed_bytes": freed_bytes,
        "left_bytes": left_bytes,
    }
    output.show(
        data,
        f"{counted(len(removed), 'entry')} removed, {readable_bytes(freed_bytes)} freed; "
        f"{readable_bytes(left_bytes)} left in {directory}.",
    )


@_command(cache, "clear")
@click.option("--yes", is_flag=True, help="Do not ask.")
def clear_command(output: Output, directory: Path, yes: bool) -> None:
    """Removes everything: all steps and programs, and what is in quarantine."""
    archive = inventories.open_existing(directory)
    entries = list(archive.tier.entries()) if archive is not None else []
    if not yes:
        size = readable_bytes(sum(each.size_bytes for each in entries))
        question = f"Remove everything, {counted(len(entries), 'entry')}, {size}, in {directory}?"
        click.confirm(question, abort=True, err=output.as_json)
    if archive is not None:
        archive.tier.clear()
    left = {(each.kind, each.digest) for each in archive.tier.entries()} if archive else set()
    gone = [each for each in entries if (each.kind, each.digest) not in left]
    _show_freed(output, archive, directory, gone)
    if left:
        sys.exit(1)


# ---- moving -------------------------------------------------------------------------------------


@_command(cache, "export")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("steps", nargs=-1)
def export_command(output: Output, directory: Path, file: Path, steps: tuple[str, ...]) -> None:
    """Writes a bundle FILE of everything, or of the STEPS named, for another machine."""
    archive = inventories.open_existing(directory)
    if archive is None:
        return output.fail(f"{directory} holds no programs: there is nothing to export.")
    result = moving.export(archive, file, steps)
    output.show(asdict(result), lambda: tables.exported(result))


@_command(cache, "import")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("--trust", is_flag=True, help="Whoever made the bundle may run code as you.")
@click.option("--anyway", is_flag=True, help="Even what was built for another environment.")
def import_command(output: Output, directory: Path, file: Path, trust: bool, anyway: bool) -> None:
    """Takes the programs out of a bundle FILE that `export` wrote."""

    def opened() -> Archive:
        return open_archive(directory, None, "off", 0.0)

    result = moving.take(opened, file, trust=trust, anyway=anyway)
    output.show(asdict(result), lambda: tables.imported(result))


# ---- the doctor ---------------------------------------------------------------------------------


@_command(main, "doctor")
@click.option("--max-bytes", type=Size(), default="10GiB", help="The bound meant to be used.")
@click.option("--round-trip/--no-round-trip", default=True, help="Build and load a small step.")
def doctor_command(output: Output, directory: Path, max_bytes: int, round_trip: bool) -> None:
    """Checks the directory, the installation, and a round trip."""
    found = doctors.examine(directory, max_bytes, round_trip)
    output.show(asdict(found), lambda: tables.diagnosis(found))
    if found.status == "fault":
        sys.exit(1)


# ---- launching ----------------------------------------------------------------------------------


@main.command("launch", context_settings={"allow_interspersed_args": False})
@click.option("-n", "--ranks", type=click.IntRange(min=1), required=True, help="How many ranks.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT names a module, as for python -m.")
@click.option(
    "--devices",
    type=click.IntRange(min=1),
    help="Devices of each rank; by default one, or as JAX_NUM_CPU_DEVICES says.",
)
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    help="Of the coordinator, on localhost; by default any free one.",
)
@click.option(
    "--grace",
    "grace_seconds",
    type=click.FloatRange(min=0),
    default=GRACE_SECONDS,
    show_default=True,
    help="Seconds that ranks have to end by themselves when one has failed, and after SIGTERM.",
)
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def launch_command(script: str, args: tuple[str, ...], **options: Any) -> None:
    """Runs SCRIPT as a pod on this machine: in each rank, a process of its own,
    jax.distributed.initialize() finds the others. ARGS go to it as they are.

    The first rank that fails ends all others, and its exit code is that of the launch.
    """
    try:
        code = launch(script, args, **options)
    except StepCacheError as error:
        raise click.UsageError(str(error)) from error
    sys.exit(code)


if __name__ == "__main__":
    main()
