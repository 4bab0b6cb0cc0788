"""`stepcache cache ...`."""

from __future__ import annotations

import itertools
import time
from dataclasses import asdict, replace
from pathlib import Path

import click

import stepcache.cli.render as render
from stepcache.cli.directories import DURATION, REMOTE, SHARED, SIZE, Result, on_directory, place_of
from stepcache.programs.opening import open_store
from stepcache.programs.store import ProgramStore
from stepcache.report import inventory as inventories
from stepcache.report import runs, shared
from stepcache.storage.disk_store import EARLIER_ROOT
from stepcache.storage.entry import EntryInfo
from stepcache.units import counted, readable_bytes


@click.group()
def cache() -> None:
    """Inspects and maintains a cache directory."""


_SORTS = {
    "used": lambda item: -item.used_time,
    "built": lambda item: -(item.built_time or 0.0),
    "size": lambda item: -item.size_bytes,
    "seconds": lambda item: -(item.build_seconds or 0.0),
    "label": lambda item: (item.label, -item.used_time),
}


@cache.command("ls")
@on_directory
@REMOTE
@click.option("--sort", type=click.Choice(list(_SORTS)), default="used", show_default=True)
def list_command(directory: Path, remote: str | None, sort: str) -> Result:
    """Lists the programs."""
    if remote is not None:
        found = shared.take_inventory(place_of(remote))
    else:
        found = inventories.take_inventory(directory)
    found = replace(found, items=tuple(sorted(found.items, key=_SORTS[sort])))
    return Result(found, render.inventory(found))


@cache.command("show")
@on_directory
@click.argument("digest")
@click.option("--module", "with_module", is_flag=True, help="Show the lowered module, too.")
def show_command(directory: Path, digest: str, with_module: bool) -> Result:
    """Shows a program. DIGEST is the name of a step, or the beginning of a digest."""
    store = inventories.open_existing(directory)
    found = inventories.find(inventories.entries_of(store), digest)
    if store is None or not found:
        return Result({}, error=f"Nothing in {directory} matches {digest!r}.")
    if len(found) > 1:
        names = [f"{each.kind} {each.digest} {inventories.label_of(each)}" for each in found]
        message = f"{digest!r} may be any of\n  " + "\n  ".join(names[:20])
        return Result({"matches": [each.digest for each in found]}, error=message)
    details = inventories.details(store, found[0], with_module=with_module)
    return Result(details, render.details(details))


@cache.command("why")
@on_directory
@click.argument("step", required=False)
@click.option("--runs", "count", type=click.IntRange(min=1), help="Compare this number of runs.")
@click.option("--ranks", "by_rank", is_flag=True, help="Compare the processes of each run.")
def why_command(directory: Path, step: str | None, count: int | None, by_rank: bool) -> Result:
    """Shows what the latest run compiled and loaded, and why: all steps, or one STEP."""
    store = inventories.open_existing(directory)
    found = list(itertools.islice(runs.latest_runs(store, step), count or 1))
    if not found and step is None:
        return Result({"runs": []}, [f"No run has used {directory} yet."])
    if not found:
        known = runs.steps_known(store)
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
    store = inventories.open_existing(directory)
    count, found = inventories.verify(store)
    findings = [asdict(each) for each in found]
    data = {"directory": str(directory), "entries": count, "findings": findings}
    return Result(data, render.verified(count, found, str(directory)), failed=bool(found))


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
    store = inventories.open_existing(directory)
    removed = store.disk.prune(max_bytes, since) if store else []
    return _freed(store, directory, removed, max_bytes)


def _freed(
    store: ProgramStore | None, directory: Path, removed: list[EntryInfo], max_bytes: int | None
) -> Result:
    freed_bytes = sum(each.size_bytes for each in removed)
    left_bytes = sum(each.size_bytes for each in inventories.entries_of(store))
    data = {
        "directory": str(directory),
        "removed": [{"kind": each.kind, "digest": each.digest} for each in removed],
        "freed_bytes": freed_bytes,
        "left_bytes": left_bytes,
    }
    text = [*render.removed(len(removed), freed_bytes, left_bytes, str(directory))]
    too_many = max_bytes is not None and left_bytes > max_bytes
    if too_many:
        text.append("Those left cannot be removed: see stepcache doctor.")
    return Result(data, text, failed=too_many)


@cache.command("clear")
@on_directory
@click.option("--yes", is_flag=True, help="Do not ask.")
def clear_command(directory: Path, yes: bool) -> Result:
    """Removes all programs, the quarantine, and what earlier versions have stored."""
    store = inventories.open_existing(directory)
    if store is None and (directory / EARLIER_ROOT).is_dir():
        store = open_store(directory, None, 0.0)
    entries = inventories.entries_of(store)
    if not yes:
        size = readable_bytes(sum(each.size_bytes for each in entries))
        question = f"Remove everything, {counted(len(entries), 'entry')}, {size}, in {directory}?"
        click.confirm(question, abort=True, err=True)
    if store is not None:
        store.disk.clear()
    left = {(each.kind, each.digest) for each in inventories.entries_of(store)}
    gone = [each for each in entries if (each.kind, each.digest) not in left]
    return _freed(store, directory, gone, 0)


@cache.command("export", hidden=True, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def export_command(arguments: tuple[str, ...]) -> None:
    """Has been replaced by `push`."""
    raise click.UsageError("Bundles are gone: stepcache cache push --remote file:///DIRECTORY")


@cache.command("import", hidden=True, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def import_command(arguments: tuple[str, ...]) -> None:
    """Has been replaced by `pull`."""
    raise click.UsageError("Bundles are gone: stepcache cache pull --remote file:///DIRECTORY")


@cache.command("push")
@on_directory
@SHARED
@click.argument("steps", nargs=-1)
def push_command(directory: Path, url: str, steps: tuple[str, ...]) -> Result:
    """Writes programs that a shared cache lacks to it: all, or those of STEPS."""
    place, store = place_of(url), inventories.open_existing(directory)
    if store is None:
        return Result({}, error=f"{directory} holds no programs: there is nothing to push.")
    result = shared.push(store, place, steps)
    return Result(result, render.shared(result, "pushed to"))


@cache.command("pull")
@on_directory
@SHARED
@click.argument("steps", nargs=-1)
def pull_command(directory: Path, url: str, steps: tuple[str, ...]) -> Result:
    """Stores programs of a shared cache in the directory: all, or those of STEPS."""
    result = shared.pull(directory, place_of(url), steps)
    return Result(result, render.shared(result, "pulled from"))
