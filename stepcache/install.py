"""Any JAX program, unchanged: `jax.jit` is `stepcache.step`, and all that is compiled is cached.

`install` does it from here on, and `stepcache run` before the first line of a program. At the end
one line says what became of the programs, as that of ccache does.
"""

from __future__ import annotations

import collections
import functools
import json
import logging
import os
import sys
import threading
import time
from typing import Any, TextIO

import jax

from stepcache import _process_hooks, jaxcompat
from stepcache._changes import Undoing
from stepcache.calls.context import DEFAULT_SCOPE, current_scope
from stepcache.events import Built, Event, Loaded, Miss, recorder
from stepcache.programs.build import Stopwatch
from stepcache.programs.earlier_runs import Described, prediction_of
from stepcache.programs.store import ProgramStore, Publication, take_or_compile
from stepcache.step import step
from stepcache.units import counted, readable_seconds

_log = logging.getLogger("stepcache")

# What takes less to compile other processes compile themselves, and do not wait until it is stored.
_WORTH_WAITING_SECONDS = 0.2
_SAID = {
    "memory": "shared in memory",
    "disk": "loaded from disk",
    "remote": "loaded from the shared cache",
    "rank": "received from another rank",
}
_MANY_COMPILATIONS = 3  # A step that has more is named at the end.


class Installation:
    """What `install` changes, and what has come through it."""

    def __init__(self) -> None:
        self._undoing: Undoing | None = None
        self._lock = threading.Lock()
        self.programs: collections.Counter[str] = collections.Counter()  # By `Program.source`.
        self.compile_seconds = 0.0
        self.compiled: dict[str, list[Miss]] = {}  # The misses of steps that compiled, by name.

    def begin(self) -> None:
        if self._undoing is not None:
            return
        self._undoing = undoing = Undoing()
        undoing.add(recorder.subscribe(self._count_step))
        if jaxcompat.CAN_STORE:
            jaxcompat.compile_all(undoing, self._obtain)
        else:
            _log.warning("stepcache keeps no programs on disk with this version of JAX")
        undoing.add(_put_back, jax.jit)
        jax.jit = step

    def end(self) -> None:
        undoing, self._undoing = self._undoing, None
        if undoing is not None:
            undoing.close()

    def _count_step(self, event: Event) -> None:
        if isinstance(event, Built):
            self._count("compiled", event.compile_seconds)
            self.compiled.setdefault(event.miss.step, []).append(event.miss)
        elif isinstance(event, Loaded):
            self._count(event.source.partition(" ")[0])

    def _count(self, source: str, seconds: float = 0.0) -> None:
        with self._lock:
            self.programs[source] += 1
            self.compile_seconds += seconds

    def _obtain(self, compilation: jaxcompat.Compilation) -> Any:
        """The executable of what is no step's: of an eager operation, or of JAX's own functions."""
        store, stopwatch = current_scope().cache.store(), Stopwatch(lambda stage: None)
        executable, source, building = take_or_compile(compilation, store, stopwatch.stage)
        self._count(source, stopwatch.seconds.get("compile", 0.0))
        if stopwatch.seconds.get("compile", 0.0) < _WORTH_WAITING_SECONDS:
            building.release()
        if store is not None and compilation.digest:
            publication = Publication(
                compilation.digest, executable, lambda: "", stopwatch.seconds, building=building
            )
            store.worker.submit(functools.partial(_keep, store, publication, compilation, source))
        return executable

    def summary(self) -> str:
        """What became of the programs of this process, in a line."""
        compiled = self.programs["compiled"]
        told = [f"{count} {_SAID.get(by, by)}" for by, count in sorted(self.programs.items())]
        if compiled:
            told.remove(f"{compiled} compiled")
            told.append(f"{compiled} compiled in {readable_seconds(self.compile_seconds)}")
        parts = [f"stepcache: {counted(sum(self.programs.values()), 'program')}: {', '.join(told)}"]
        for name, misses in self.compiled.items():
            if len(misses) > _MANY_COMPILATIONS:
                last = misses[-1]
                why = f" ({last.changes[0]})" if last.changes else ""
                hint = f": {last.advice[0]}" if last.advice else ""
                parts.append(f"{name} compiled {len(misses)} times{why}{hint}")
        return "; ".join(parts)


def _put_back(jit: Any) -> None:
    if jax.jit is step:  # Else other code has replaced it since.
        jax.jit = jit


def _keep(
    store: ProgramStore, publication: Publication, compilation: jaxcompat.Compilation, source: str
) -> None:
    """Stores what was compiled, and notes it for the next run; in the store's worker."""
    label, digest = f"jit:{compilation.name}", publication.digest
    if source == "compiled" and store.publish(publication, label):
        return
    described = Described(label, {"module": digest}, jaxcompat.process_environment())
    devices = () if compilation.calls_back else compilation.devices
    row = prediction_of(described, digest, devices, "", time.time())
    store.note_use(row, described.environment)


_installation = Installation()


def install() -> None:
    """Has every compilation of this process go through the cache; `jax.jit` is `step` from here on.

    Functions that were decorated before are as they were, but what they compile is taken from the
    cache, too. A second call does nothing.
    """
    _installation.begin()


def begin_program(given: str) -> None:
    """Installs stepcache in a program under `stepcache run`, or in a child of it.

    Args:
        given: the options, as JSON; see `stepcache/run_command.py`.
    """
    options = json.loads(given)
    install()
    for name in ("on_miss", "warm_programs"):
        setattr(DEFAULT_SCOPE, name, options[name])
    if options["explain"]:
        recorder.subscribe(_print_miss)
    if not options["quiet"] and options["pid"] == os.getpid():
        _process_hooks.at_exit(_print_summary, sys.stderr)


def _print_miss(event: Event) -> None:
    if isinstance(event, Built | Loaded):
        print(f"stepcache: {event.miss}", file=sys.stderr)


def _print_summary(stream: TextIO) -> None:
    if _installation.programs:
        print(_installation.summary(), file=stream)


def uninstall() -> None:
    """Undoes `install`. What was decorated meanwhile stays a step."""
    _installation.end()
