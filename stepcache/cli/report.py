"""`stepcache report`."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import click

import stepcache.cli.render as render
from stepcache.cli.directories import DURATION, Result, on_directory
from stepcache.report import inventory, runs
from stepcache.report.run_metrics import metrics_text
from stepcache.report.run_page import page
from stepcache.report.run_trace import trace_events

_FORMATS: dict[str, Callable[[runs.Run, Mapping[str, int]], str]] = {
    "html": page,
    "openmetrics": metrics_text,
    "perfetto": lambda run, _: json.dumps(trace_events(run)),
}
_FORMAT_OF_SUFFIX = {
    ".html": "html",
    ".htm": "html",
    ".prom": "openmetrics",
    ".txt": "openmetrics",
    ".json": "perfetto",
}


def _format_of(out: Path | None) -> str:
    """The format of a file by its suffix; html without a file, or without a suffix."""
    if out is None or not out.suffix:
        return "html"
    form = _FORMAT_OF_SUFFIX.get(out.suffix.lower())
    if form is None:
        known = ", ".join(_FORMAT_OF_SUFFIX)
        text = f"the suffix of {out.name!r} names no format: take one of {known}, or give --format"
        raise click.UsageError(text)
    return form


@click.command("report")
@on_directory
@click.argument("run", default=runs.LATEST, required=False)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="File to write.")
@click.option(
    "--format",
    "form",
    type=click.Choice(list(_FORMATS)),
    help="By default html; openmetrics for --out FILE.prom, perfetto for --out FILE.json.",
)
@click.option("--list", "listing", is_flag=True, help="List the runs.")
@click.option("--every", type=DURATION, help="Rewrite the file at this interval, such as 15s.")
def report(
    directory: Path,
    run: str,
    out: Path | None,
    form: str | None,
    listing: bool,
    every: float | None,
) -> Result:
    """Reports what a run compiled, loaded and moved.

    RUN is "last", a number of --list, the beginning of a run's name, or the name of a script. The
    formats are a page of HTML, metrics for Prometheus, and a trace for https://ui.perfetto.dev.
    """
    if every is not None and not out:
        raise click.UsageError("--every needs --out FILE")
    if every is not None and every <= 0:
        raise click.UsageError("--every is a time above zero, such as 15s")
    if listing and (out or form):
        raise click.UsageError("--list writes no report: omit --out and --format")
    if listing:
        found = runs.summaries(inventory.open_existing(directory))
        shown = [render.records(found)] if found else [f"No run has used {directory} yet."]
        return Result({"runs": [asdict(each) for each in found]}, shown)
    while True:
        one, text = write_report(directory, run, out, form)
        if not every:
            break
        time.sleep(every)
    if one is None and run == runs.LATEST:
        return Result({}, error=f"No run has used {directory} yet.")
    if one is None:
        hint = "stepcache report --list shows all"
        return Result({}, error=f"{directory} has no run {run!r}: {hint}.")
    return Result(one, [f"{out}: {one.script}, run {one.name}"] if out else text)


def write_report(
    directory: Path, wanted: str, out: Path | None, form: str | None = None
) -> tuple[runs.Run | None, str]:
    """Writes the report of a run, if there is a file for it.

    Returns the run and the report; None and no text if there is no such run. Raises
    `click.UsageError` where the file names no format, or cannot be written.
    """
    form = form or _format_of(out)
    store = inventory.open_existing(directory)
    run = runs.find_run(store, wanted)
    if run is None:
        return None, ""
    named = runs.program_steps(run)
    entries = inventory.entries_of(store)
    sizes = {each.digest: each.size_bytes for each in entries if each.digest in named}
    text = _FORMATS[form](run, sizes)
    if out is not None:
        _write(out, text)
    return run, text


def _write(file: Path, text: str) -> None:
    """Writes a file, so that nobody reads a part of it."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(file)
    except OSError as error:
        raise click.UsageError(f"{file} cannot be written: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
