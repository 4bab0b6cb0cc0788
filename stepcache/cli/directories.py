"""Options and results of the commands that work on a cache directory."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import click

import stepcache.cli.render as render
from stepcache.errors import CacheDirectoryError, OptionError, StepCacheError, refuse_url
from stepcache.programs import opening
from stepcache.storage.private_files import default_directory
from stepcache.storage.shared_place import Place
from stepcache.units import BYTES, SECONDS, quantity


class Quantity(click.ParamType):
    """A number with a unit, converted to `kind`."""

    def __init__(self, name: str, kind: type, units: Mapping[str, float], examples: str):
        self.name, self.kind, self.units, self.examples = name, kind, units, examples

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if not isinstance(value, str):
            return value
        with contextlib.suppress(ValueError, OverflowError):
            return self.kind(quantity(value, self.units))
        self.fail(f"{value!r} is not a {self.name}, such as {self.examples}", param, ctx)


SIZE = Quantity("size", int, BYTES, "500MB, 2GB or 1.5GiB")
DURATION = Quantity("duration", float, SECONDS, "15s, 12h or 30d")


class Result(NamedTuple):
    """The result of a command, to be printed as JSON or as text."""

    data: Any
    text: str | Iterable[Any] = ()  # As it is, or parts for `render.show`.
    error: str = ""
    failed: bool = False

    def show(self, as_json: bool) -> None:
        """Prints the result. Exits with 1 if there is an error, or the command failed."""
        if as_json:
            error = {"error": self.error} if self.error else {}
            data = self.data if isinstance(self.data, dict) else asdict(self.data)
            click.echo(json.dumps(error | data, indent=2))
        else:
            if self.error:
                click.echo(self.error, err=True)
            if isinstance(self.text, str):
                click.echo(self.text.encode(), nl=False)
            else:
                render.show(self.text)
        if self.error or self.failed:
            sys.exit(1)


def on_directory(function: Callable[..., Result]) -> Callable[..., None]:
    """Adds `--dir` and `--json` to a command, and prints the `Result` of its function."""

    @click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
    @click.option(
        "--dir",
        "directory",
        type=click.Path(path_type=Path, file_okay=False),
        help="Cache directory; by default STEPCACHE_DIR, or one in the user's cache directory.",
    )
    @functools.wraps(function)
    def run(directory: Path | None, as_json: bool, **options: Any) -> None:
        try:
            if directory is not None:
                refuse_url(directory, CacheDirectoryError, "--dir")
            elif options.get("remote") is not None:
                directory = Path()  # It is not looked into.
            elif (directory := default_directory()) is None:
                raise click.UsageError(
                    "STEPCACHE_DIR=off keeps programs in memory only, so there is no cache "
                    "directory. Name one with --dir."
                )
            result = function(directory, **options)
        except (StepCacheError, OSError) as error:
            result = Result({}, error=str(error))
        result.show(as_json)

    return run


@contextlib.contextmanager
def shown_errors() -> Iterator[None]:
    """Shows errors of stepcache without a traceback. Also a decorator of commands."""
    try:
        yield
    except OptionError as error:
        raise click.UsageError(str(error)) from error
    except StepCacheError as error:
        raise click.ClickException(str(error)) from error


_OF_ENVIRONMENT = "by default STEPCACHE_REMOTE."
# The URL may be left out.
REMOTE = click.option(
    "--remote",
    metavar="[URL]",
    is_flag=False,
    flag_value="",
    help=f"Use the shared cache and not the directory; {_OF_ENVIRONMENT}",
)
SHARED = click.option(
    "--remote", "url", metavar="URL", default="", help=f"The shared cache; {_OF_ENVIRONMENT}"
)


def place_of(url: str) -> Place:
    """Returns the shared cache at a URL, or that of STEPCACHE_REMOTE.

    Raises `OptionError` or `CacheDirectoryError` if the shared cache cannot be used.
    """
    place = Place.of(url, "--remote") if url else opening.place_of()
    if place is None:
        what = "There is no shared cache: set STEPCACHE_REMOTE, or name one with --remote URL."
        raise click.UsageError(what)
    return place
