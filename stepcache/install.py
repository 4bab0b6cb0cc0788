"""Any JAX program, unchanged: `jax.jit` is `stepcache.step`, and all that is compiled is cached.

`install` does it from here on, and `stepcache run` before the first line of a program. At the end
one line says what became of the programs.
"""

from __future__ import annotations

import ast
import functools
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from stepcache import _process_hooks, jaxcompat
from stepcache._changes import Undoing
from stepcache.calls.context import DEFAULT_SCOPE, current_scope
from stepcache.events import Built, Loaded, recorder
from stepcache.programs.build import Stopwatch
from stepcache.programs.prediction import Described
from stepcache.programs.store import ProgramStore, Publication, take_or_compile
from stepcache.report.last_line import ProgramCounts
from stepcache.step import Step, step
from stepcache.storage.run_activity import activity_log

_log = logging.getLogger("stepcache")

# What takes less to compile other processes compile themselves, and do not wait until it is stored.
_WORTH_WAITING_SECONDS = 0.2
_NO_STEP = "no function of the program: an operation outside of any, or a library's"


_counts = ProgramCounts()
_installed: list[Undoing] = []  # What `uninstall` undoes, if there is something.


def install() -> None:
    """Has every compilation of this process go through the cache; `jax.jit` is `step` from here on.

    Functions that were decorated before are as they were, but what they compile is taken from the
    cache, too. A second call does nothing.
    """
    if _installed:
        return
    _installed.append(undoing := Undoing())
    undoing.add(recorder.subscribe(_counts))
    if jaxcompat.CAN_STORE:
        jaxcompat.compile_all(undoing, _obtain)
    else:
        _log.warning("stepcache keeps no programs on disk with this version of JAX")
    for name, ours in (("jit", step), ("eval_shape", _eval_shape_over(jax.eval_shape))):
        undoing.add(_put_back, name, ours, getattr(jax, name))
        setattr(jax, name, ours)


def uninstall() -> None:
    """Undoes `install`. What was decorated meanwhile stays a step."""
    if _installed:
        _installed.pop().close()


def _obtain(compilation: jaxcompat.Compilation) -> Any:
    """The executable of what is no step's: of an eager operation, or of JAX's own functions."""
    store, stopwatch = current_scope().cache.store(), Stopwatch()
    executable, source, building = take_or_compile(compilation, store, stopwatch.stage)
    _counts.count(source, stopwatch.seconds.get("compile", 0.0))
    if stopwatch.seconds.get("compile", 0.0) < _WORTH_WAITING_SECONDS:
        building.release()
    if store is not None:
        about = compilation.digest, executable, str, stopwatch.seconds, (), building
        publication = Publication(*about, compilation.serialized)
        store.worker.submit(functools.partial(_keep, store, publication, compilation, source))
    return executable


def _eval_shape_over(found: Callable) -> Callable:
    """`jax.eval_shape` looks into its own jitted functions, for static arguments and shardings."""

    @functools.wraps(found)
    def eval_shape(fun: Callable, *args: Any, **kwargs: Any) -> Any:
        if isinstance(fun, Step):
            return fun.eval_shape(*args, **kwargs)
        return found(fun, *args, **kwargs)

    return eval_shape


def _put_back(name: str, ours: Any, found: Any) -> None:
    if getattr(jax, name) is ours:  # Else other code has replaced it since.
        setattr(jax, name, found)


def _keep(
    store: ProgramStore, publication: Publication, compilation: jaxcompat.Compilation, source: str
) -> None:
    """Stores what was compiled, and notes it for the next run; in the store's worker."""
    label, digest = f"jit:{compilation.name}", publication.digest
    if source == "compiled":
        why_not = store.publish(publication, label) if digest else "it calls back into Python"
        publication.building.release()
        about = {"seconds": publication.seconds, "reason": _NO_STEP, "not_stored": why_not}
        store.log("compiled", compilation.name, label, program=digest, **about)
        if why_not:
            return
    described = Described(label, {"module": digest}, jaxcompat.process_environment())
    devices = () if compilation.calls_back else compilation.devices
    store.note_use(described, digest, devices)


def begin_program(given: str) -> None:
    """Installs stepcache in a program under `stepcache run`, or in a child of it.

    Args:
        given: the options that were given, as Python writes a dict; see `run_command.py`.
    """
    options = {"on_miss": "compile", "warm_programs": 1} | ast.literal_eval(given)
    install()
    for name in ("on_miss", "warm_programs"):
        setattr(DEFAULT_SCOPE, name, options[name])
    if "max_memory" in options:
        DEFAULT_SCOPE.cache.bound_memory(options["max_memory"])
    if "explain" in options:
        recorder.subscribe(lambda event: _print(f"stepcache: {event.miss}"), Built | Loaded)
    if options["pid"] == os.getpid():
        _process_hooks.at_exit(_conclude, "quiet" in options, options.get("report"))


def _conclude(is_quiet: bool, report: str | None) -> None:
    if report:
        _write_report(report)
    if _counts.programs and not is_quiet:
        store = DEFAULT_SCOPE.cache.store()
        _print(_counts.summary(store.saved_seconds if store else 0.0))


def _write_report(file: str) -> None:
    """Writes what `stepcache report --out FILE` does about this run, once all of it is on disk."""
    from stepcache.cli.report import write_report

    store, why = DEFAULT_SCOPE.cache.store(), "STEPCACHE_DIR=off keeps no record of runs"
    try:
        if store is not None:
            store.flush()
            activity_log.finish()
            name = store.run_log.name.removesuffix(".jsonl")
            run, _ = write_report(store.disk.root.parent, name, Path(file))
            why = "" if run is not None else "no program was compiled or loaded"
    except Exception as error:
        why = str(error)
    if why:
        _print(f"stepcache: no report is written: {why}")


def _print(line: str) -> None:
    """Prints to the standard error of the process; what the program has put there may be closed."""
    if sys.__stderr__ is not None:
        print(line, file=sys.__stderr__)
