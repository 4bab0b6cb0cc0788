"""`ProgramCounts`: what became of the programs of a process, in the line that ends a run.

The line is as that of `ccache -s`: how many there were, and which functions compiled too often.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Sequence

from stepcache.events import Built, Event, Loaded, Miss
from stepcache.units import counted, readable_seconds

_SAID = {
    "memory": "shared in memory",
    "disk": "loaded from disk",
    "remote": "loaded from the shared cache",
    "rank": "received from another rank",
}
# A function that has more compilations is named; so many of them, with so many values.
_MANY_COMPILATIONS, _FUNCTIONS_NAMED, _VALUES_SHOWN = 3, 3, 6
_WORTH_SAYING_SECONDS = 0.1


class ProgramCounts:
    """Counts programs: those of steps as a subscriber of the recorder, others as it is told."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.programs: collections.Counter[str] = collections.Counter()  # By `Program.source`.
        self._compile_seconds = 0.0
        # The misses of functions that compiled, by place and name.
        self._compiled: dict[tuple[str, str], list[Miss]] = {}

    def __call__(self, event: Event) -> None:
        if isinstance(event, Built):
            self.count("compiled", event.compile_seconds)
            name = event.miss.place, event.miss.step
            self._compiled.setdefault(name, []).append(event.miss)
        elif isinstance(event, Loaded):
            self.count(event.source.partition(" ")[0])

    def count(self, source: str, compile_seconds: float = 0.0) -> None:
        """Counts a program, by where its executable was, as in `Program.source`."""
        with self._lock:
            self.programs[source] += 1
            self._compile_seconds += compile_seconds

    def summary(self, saved_seconds: float) -> str:
        """The line. `saved_seconds` is what it took to compile what has been loaded."""
        compiled = self.programs["compiled"]
        told = [
            f"{count} {_SAID.get(source, source)}"
            for source, count in sorted(self.programs.items())
            if count and source != "compiled"
        ]
        if compiled:
            told.append(f"{compiled} compiled in {readable_seconds(self._compile_seconds)}")
        parts = [f"stepcache: {counted(sum(self.programs.values()), 'program')}: {', '.join(told)}"]
        if saved_seconds >= _WORTH_SAYING_SECONDS:
            parts.append(f"{readable_seconds(saved_seconds)} of compilation saved")
        many = [each for each in self._compiled.values() if len(each) > _MANY_COMPILATIONS]
        many.sort(key=len, reverse=True)
        for misses in many[:_FUNCTIONS_NAMED]:
            name = f"{misses[-1].place} {misses[-1].step}".strip()
            parts.append(f"{name} compiled {len(misses)} times ({_what_changed(misses)})")
        if len(many) > _FUNCTIONS_NAMED:
            parts.append(f"{len(many) - _FUNCTIONS_NAMED} more in `stepcache cache why`")
        return "; ".join(parts)


def _what_changed(misses: Sequence[Miss]) -> str:
    """Why a step compiled more than once: what to do, or the values that it came with."""
    last = misses[-1]
    if last.advice or not last.changes:
        return last.advice[0] if last.advice else last.headline
    path = last.changes[0].path
    changes = [change for miss in misses for change in miss.changes if change.path == path]
    values = list(dict.fromkeys(value for each in changes for value in (each.before, each.after)))
    more = ["…"] if len(values) > _VALUES_SHOWN else []
    return f"{path}: {' → '.join(values[:_VALUES_SHOWN] + more)}"
