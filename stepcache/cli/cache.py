"""`stepcache cache ...`."""

from __future__ import annotations

import itertools
import time
from dataclasses import asdict, replace
from pathlib import Path

import click

import stepcache.cli.render as render
from stepcache.cli.directories import DURATION, REMOTE, SHARED, SIZE, Result, on_directory, place_of
from stepcache.programs.archive import Archive
from stepcache.report import inventory as inventories
from stepcache.report import moving, runs, shared
from stepcache.storage.entry import EntryInfo
from stepcache.units import counted, readable_bytes


@click.group()
def cache() -> None:
    """Inspects and maintains a cache directory."""


_SORTS = {
    "used": lambda item: -item.used_time,
    "built": lambda item: -(item.built_time or 0.0),
    "size": lambda item: -item.size_bytes,
    "seconds": lambda item: -(item.built_seconds or 0.0),
    "label": lambda item: (item.label, -item.used_time),
}


@cache.command("ls")
@on_directory
@REMOTE
@click.option("--sort", type=click.Choice(list(_SORTS)), default="used", show_default=True)
def list_command(directory: Path, remote: str | None, sort: str) -> Result:
    """Lists steps and their programs."""
    if remote is not None:
        found = shared.take_inventory(place_of(remote))
    else:
        found = inventories.take_inventory(directory)
    found = replace(found, items=tuple(sorted(found.items, key=_SORTS[sort])))
    return Result(found, render.inventory(found))


@cache.command("show")
@on_directory
@click.argument("digest")
@click.option("--all", "everything", is_flag=True, help="Show every row of each list.")
def show_command(directory: Path, digest: str, everything: bool) -> Result:
    """Shows a step or program. DIGEST is the name of a step, or the beginning of a digest."""
    archive = inventories.open_existing(directory)
    found = inventories.find(inventories.entries_of(archive), digest)
    if archive is None or not found:
        return Result({}, error=f"Nothing in {directory} matches {digest!r}.")
    if len(found) > 1:
        names = [f"{each.kind} {each.digest} {inventories.label_of(each)}" for each in found]
        message = f"{digest!r} may be any of\n  " + "\n  ".join(names[:20])
        return Result({"matches": [each.digest for each in found]}, error=message)
    details = inventories.details(archive, found[0])
    return Result(details, render.details(details, everything=everything))


@cache.command("why")
@on_directory
@click.argument("step", required=False)
@click.option("--runs", "count", type=click.IntRange(min=1), help="Compare this number of runs.")
@click.option("--ranks", "by_rank", is_flag=True, help="Compare the processes of each run.")
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
        text = itertools.chain.from_iterable(map(render.ranks, found))
    else:
        text = render.why(found[0]) if count is None else render.startup_ledger(found)
    return Result({"runs": [asdict(run) for run in found]}, text)


@cache.command("verify")
@on_directory
def verify_command(directory: Path) -> Result:
    """Reads and checks every entry, and quarantines damaged ones."""
    archive = inventories.open_existing(directory)
    count, found = inventories.verify(archive)
    damaged = sum(each.state == "damaged" for each in found)
    data = {
        "directory": str(directory),
        "entries": count,
        "damaged": damaged,
        "findings": [asdict(each) for each in found],
    }
    text = render.verified(count, found, str(directory))
    return Result(data, text, failed=damaged > 0)


@cache.command("prune")
@on_directory
@REMOTE
@click.option("--max-bytes", type=SIZE, help="Keep at most this size, such as 2GB.")
@click.option("--older-than", type=DURATION, help="Remove entries unused for this time: 30d.")
def prune_command(
    directory: Path, remote: str | None, max_bytes: int | None, older_than: float | None
) -> Result:
    """Removes the least recently used entries; of a shared cache, those written first."""
    if max_bytes is None and older_than is None:
        raise click.UsageError("Say how much to keep: --max-bytes 2GB or --older-than 30d.")
    since = None if older_than is None else time.time() - older_than
    if remote is not None:
        found = shared.prune(place_of(remote), max_bytes, since)
        sizes = found.freed_bytes, found.left_bytes
        return Result(found, render.removed(len(found.removed), *sizes, found.remote))
    archive = inventories.open_existing(directory)
    removed = archive.disk.prune(max_bytes, since) if archive else []
    return _freed(archive, directory, removed, max_bytes)


def _freed(
    archive: Archive | None, directory: Path, removed: list[EntryInfo], max_bytes: int | None
) -> Result:
    freed_bytes = sum(each.size_bytes for each in removed)
    left_bytes = sum(each.size_bytes for each in inventories.entries_of(archive))
    data = {
        "directory": str(directory),
        "removed": [{"kind": each.kind, "digest": each.digest} for each in removed],
        "freed_bytes": freed_bytes,
        "left_bytes": left_bytes,
    }
    text = [*render.removed(len(removed), freed_bytes, left_bytes, str(directory))]
    too_many = max_bytes is not None and left_bytes > max_bytes
    if too_many:
        text.append("Those left cannot be removed, or are being loaded: see stepcache doctor.")
    return Result(data, text, failed=too_many)


@cache.command("clear")
@on_directory
@click.option("--yes", is_flag=True, help="Do not ask.")
def clear_command(directory: Path, yes: bool) -> Result:
    """Removes all steps and programs, and the quarantine."""
    archive = inventories.open_existing(directory)
    entries = inventories.entries_of(archive)
    if not yes:
        size = readable_bytes(sum(each.size_bytes for each in entries))
        question = f"Remove everything, {counted(len(entries), 'entry')}, {size}, in {directory}?"
        click.confirm(question, abort=True, err=True)
    if archive is not None:
        archive.disk.clear()
    left = {(each.kind, each.digest) for each in inventories.entries_of(archive)}
    gone = [each for each in entries if (each.kind, each.digest) not in left]
    return _freed(archive, directory, gone, 0)


@cache.command("export")
@on_directory
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("steps", nargs=-1)
def export_command(directory: Path, file: Path, steps: tuple[str, ...]) -> Result:
    """Writes all programs, or those of STEPS, to a bundle FILE for another machine."""
    archive = inventories.open_existing(directory)
    if archive is None:
        return Result({}, error=f"{directory} holds no programs: there is nothing to export.")
    result = moving.export(archive, file, steps)
    return Result(result, render.exported(result))


@cache.command("import")
@on_directory
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("--trust", is_flag=True, help="Trust the bundle's maker, who can run code as you.")
@click.option("--anyway", is_flag=True, help="Also import programs for another environment.")
def import_command(directory: Path, file: Path, trust: bool, anyway: bool) -> Result:
    """Imports the programs of a bundle FILE that `export` wrote."""
    result = moving.take(directory, file, trust=trust, anyway=anyway)
    return Result(result, render.imported(result))


@cache.command("push")
@on_directory
@SHARED
@click.argument("steps", nargs=-1)
def push_command(directory: Path, url: str, steps: tuple[str, ...]) -> Result:
    """Writes programs that a shared cache lacks to it: all, or those of STEPS."""
    place, archive = place_of(url), inventories.open_existing(directory)
    if archive is None:
        return Result({}, error=f"{directory} holds no programs: there is nothing to push.")
    result = shared.push(archive, place, steps)
    return Result(result, render.shared(result, "pushed to"))


@cache.command("pull")
@on_directory
@SHARED
@click.argument("steps", nargs=-1)
def pull_command(directory: Path, url: str, steps: tuple[str, ...]) -> Result:
    """Stores programs of a shared cache in the directory: all, or those of STEPS."""
    result = shared.pull(directory, place_of(url), steps)
    return Result(result, render.shared(result, "pulled from"))
