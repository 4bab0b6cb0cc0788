"""`stepcache run train.py …`: a program as it is, with stepcache installed once it imports JAX.

The program has a Python of its own, which takes the place of this one: its arguments, exit code,
signals and tracebacks are those of `python train.py …`, and its children have stepcache, too.
Nothing is imported here that takes long: the program waits for it.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # That of `typing` takes as long as all else.
if TYPE_CHECKING:
    import argparse
    from typing import Any, NoReturn

OPTIONS = "STEPCACHE_RUN"
"""The environment variable that tells a program how it is run: a dict of what was given."""
_SITE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_site")  # noqa: PTH118


def is_asked() -> bool:
    """Whether this process is to run a program, and then is replaced by it.

    Asked before anything is imported: JAX takes long, and reads its settings when it is.
    """
    name = "".join(_given()[-1:]).rpartition(os.sep)[2]
    return name == "stepcache" and sys.argv[1:2] == ["run"] and OPTIONS not in os.environ


def _given() -> list[str]:
    """Returns what Python was given before our arguments: its flags, `-m` or none, and our name."""
    return sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]


def _size(text: str) -> int:
    from stepcache.units import BYTES, quantity

    return int(quantity(text, BYTES))


def _parser() -> argparse.ArgumentParser:
    import argparse

    parser = argparse.ArgumentParser(
        "stepcache run",
        "stepcache run [OPTIONS] SCRIPT [ARGS]…\n       stepcache run [OPTIONS] -m MODULE [ARGS]…",
        """Runs SCRIPT with ARGS as `python SCRIPT ARGS` does, with all that JAX compiles cached.
        jax.jit is stepcache.step in it. One line on standard error says at the end what was loaded,
        and what was compiled and why.""",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    add = parser.add_argument
    add("-m", dest="module", action="store_true", help="SCRIPT is a module, as for python -m")
    add("--dir", dest="STEPCACHE_DIR", help="cache directory; by default STEPCACHE_DIR")
    add("--remote", dest="STEPCACHE_REMOTE", help="shared cache; by default STEPCACHE_REMOTE")
    help = "a KEY that vouches for the steps, which are then not traced"
    add("--trust", dest="STEPCACHE_TRUST", metavar="KEY", help=help)
    help = "with --trust: trace them all the same, and compare"
    add("--prove", dest="STEPCACHE_PROVE_EVERY", action="store_const", const="1", help=help)
    add("--max-memory", type=_size, help="size of the programs in memory at most, such as 4GB")
    choices = "compile", "warn", "error"
    help = "what a call does that has to compile another program; by default it compiles it"
    add("--on-miss", choices=choices, help=help)
    help = "so many programs of each function are compiled whatever --on-miss says; by default 1"
    add("--warm-steps", dest="warm_programs", type=int, metavar="N", help=help)
    add("--report", type=os.path.abspath, metavar="FILE", help="write a page about the run")
    add("--explain", action="store_true", help="print each miss as it comes")
    add("--quiet", action="store_true", help="print no line at the end")
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def main(arguments: list[str]) -> NoReturn:
    """Replaces this process by that of the program."""
    options: dict[str, Any] = {}
    command = arguments
    if not command or command[0].startswith("-"):
        parser = _parser()
        options = vars(parser.parse_args(arguments))
        command = options.pop("command", [])
        command = command[1:] if command[:1] == ["--"] else command
        if not command:
            parser.error("the SCRIPT is missing")
        if options.pop("module", False):
            command = ["-m", *command]
    environment = dict(os.environ)
    for name in [name for name in options if name.startswith("STEPCACHE_")]:
        if value := options.pop(name):
            environment[name] = value
    paths = _SITE, environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    environment[OPTIONS] = repr(options | {"pid": os.getpid()})
    flags = _given()[: -2 if _given()[-2:-1] == ["-m"] else -1]  # As in `python -u -m stepcache …`.
    if sys.flags.no_site or sys.flags.ignore_environment:
        flags = []  # With such, the program would not find us.
    os.execve(sys.executable, [sys.executable, *flags, *command], environment)
