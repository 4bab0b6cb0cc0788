"""`stepcache run train.py …`: a program as it is, with stepcache installed once it imports JAX.

The program has a Python of its own, which takes the place of this one: its arguments, exit code,
signals and tracebacks are those of `python train.py …`, and its children have stepcache, too.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from stepcache.run import OPTIONS

_SITE = str(Path(__file__).resolve().parent / "_site")


@click.command(
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]}
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as for python -m.")
@click.option("--dir", "directory", help="Cache directory; by default STEPCACHE_DIR.")
@click.option("--remote", metavar="URL", help="The shared cache; by default STEPCACHE_REMOTE.")
@click.option(
    "--on-miss",
    type=click.Choice(["compile", "warn", "error"]),
    default="compile",
    show_default=True,
    help="What a call does that has to compile another program.",
)
@click.option(
    "--warm-steps",
    "warm_programs",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="So many programs of each function are compiled whatever --on-miss says.",
)
@click.option("--explain", is_flag=True, help="Print each miss as it comes.")
@click.option("--quiet", is_flag=True, help="Print no line at the end.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(
    module: bool,
    directory: str | None,
    remote: str | None,
    script: str,
    args: tuple[str, ...],
    **options: Any,
) -> None:
    """Runs SCRIPT with ARGS as `python SCRIPT ARGS` does, with all that JAX compiles cached.

    jax.jit is stepcache.step in it. One line on standard error says at the end what was loaded, and
    what was compiled and why.
    """
    environment = dict(os.environ)
    path = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join([_SITE, *([path] if path else [])])
    environment[OPTIONS] = json.dumps(options | {"pid": os.getpid()})
    given = {"STEPCACHE_DIR": directory, "STEPCACHE_REMOTE": remote}
    environment |= {name: value for name, value in given.items() if value}
    command = [sys.executable, *(["-m"] if module else []), script, *args]
    os.execve(sys.executable, command, environment)
