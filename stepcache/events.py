"""Frozen records of events, and the recorder that receives them.

The engine emits events. The recorder keeps the latest, passes each to the subscribers, and reports
it to `jax.monitoring`. Names carry units: sizes in bytes, times in seconds.
"""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeVar

import jax.monitoring

from stepcache.units import counted, html_table, readable_bytes, readable_time, shown_as_printed

_log = logging.getLogger("stepcache")


@dataclass(frozen=True, slots=True)
class Change:
    """One part of a key that differs between a known program and a call.

    Attributes:
        part: which part of the key: "argument", "tree", "static", "mesh", "config" or "options";
            against an earlier run also "package", "environment", or "code" (the first line at which
            the lowered modules differ).
        path: the argument path (`batch['tokens']`), or the name of the setting.
        before: value that the known program was built for.
        after: value that the call needs.
        note: the aspect that differs, as text, such as "axis 0".
        kinds: the aspects that differ, for code to read: of "shape", "dtype", "weak_type",
            "committed", "sharding", "layout"; for a static argument "number", "callable", "object"
            (compared by identity) or "value".
        sizes: (axis, size before, size after) of each axis that differs.
    """

    part: str
    path: str
    before: str
    after: str
    note: str = ""
    kinds: tuple[str, ...] = ()
    sizes: tuple[tuple[int, int, int], ...] = ()

    def __str__(self) -> str:
        text = f"{self.path}: {self.before} → {self.after}"
        return f"{text} ({self.note})" if self.note else text


@dataclass(frozen=True, slots=True)
class Miss:
    """The reason why a call found no program in memory.

    Attributes:
        step: name of the step.
        number: 1 for the first miss of this step.
        reason: "first call", "changed", "evicted" (built before, and evicted to make room),
            "cleared" (`clear_cache`), "new session" (another session's cache has the program),
            "other run" (an earlier run compiled this step, and `changes` say what differs since),
            or "gone from disk" (an earlier run compiled this program, and it was removed since).
        changes: differences from the closest known signature of this step, or from that run.
        advice: hints for the user.
        omitted: number of differing leaves, or places in the modules, that are not in `changes`.
        since: time when the earlier run compiled its program, in seconds since the epoch.
        stored: beside `changes`, what differs from the program that an earlier run compiled for
            this signature.
        remedy: how the program was obtained, such as "compiled" or "loaded from disk, in 0.10 s";
            empty until then.
        not_stored: why later processes have to compile the program again; empty if it is stored.
        called_time: time of the call, in seconds since the epoch; 0 until the program was obtained.
        place: file and line of the step's function; empty for a library's, and until then.
    """

    step: str
    number: int
    reason: str
    changes: tuple[Change, ...] = ()
    advice: tuple[str, ...] = ()
    omitted: int = 0
    since: float | None = None
    stored: tuple[Change, ...] = ()
    remedy: str = ""
    not_stored: str = ""
    called_time: float = field(default=0.0, compare=False)
    place: str = field(default="", compare=False)

    @property
    def in_a_line(self) -> str:
        """The reason in one line, for errors and logs."""
        shown = "; ".join(map(str, self.changes[:_MAX_CHANGES_IN_A_LINE]))
        more = len(self.changes[_MAX_CHANGES_IN_A_LINE:]) + self.omitted
        rest = f"; {counted(more, 'more change')}" if more else ""
        return f"{shown}{rest}" if shown else f"{self.reason} of {self.step}"

    @property
    def headline(self) -> str:
        """The reason as a sentence. If it ends in a colon, `changes` must follow."""
        closest = "; the closest differs in:" if self.changes else ""
        return {
            "first call": "no program yet: this is its first call",
            "changed": f"no cached program matches{closest}",
            "evicted": "the program was built before and has been evicted",
            "cleared": "the program was built before and the cache has been cleared",
            "new session": "another session's program cache has the program, this one does not",
            "other run": f"since the run of {readable_time(self.since)} these have changed:",
            "gone from disk": "an earlier run compiled this program, and it is no longer on disk",
        }[self.reason]

    def __str__(self) -> str:
        lines = [f"{self.step}, miss {self.number}: {self.headline}"]
        lines += [f"  {change}" for change in self.changes[:_MAX_CHANGES_SHOWN]]
        more = len(self.changes[_MAX_CHANGES_SHOWN:]) + self.omitted
        if more:
            lines.append(f"  … and {counted(more, 'more change')}")
        if self.stored:
            lines.append(f"  since the run of {readable_time(self.since)} these have changed:")
            lines += [f"    {change}" for change in self.stored[:_MAX_CHANGES_SHOWN]]
        if self.remedy and self.remedy != "compiled":
            lines.append(f"  the program was {self.remedy}")
        lines += [f"  hint: {text}" for text in self.advice]
        if self.not_stored:
            lines.append(f"  each process has to compile it: {self.not_stored}")
        return "\n".join(lines)

    _repr_pretty_ = shown_as_printed


_MAX_CHANGES_SHOWN = 12
_MAX_CHANGES_IN_A_LINE = 3


class Captured(NamedTuple):
    """An array that a step captured by closure: it is a constant of the program."""

    name: str
    type: str
    size_bytes: int


class StageStarted(NamedTuple):
    """The resolution of a miss entered a stage: "trace", "lower", "load", "compile", …"""

    step: str
    build_id: int
    stage: str


class Built(NamedTuple):
    """A program was traced, lowered and compiled.

    Attributes:
        own_seconds: time of the call spent in stepcache: all but JAX's trace, lower and compile,
            and the run of the program.
    """

    step: str
    build_id: int
    miss: Miss
    trace_seconds: float
    lower_seconds: float
    compile_seconds: float
    own_seconds: float
    captured: tuple[Captured, ...] = ()


class Loaded(NamedTuple):
    """A program was traced and lowered, and its executable found, so that nothing was compiled.

    Attributes:
        source: where the executable was: "memory" (of this process), "preloaded", "disk", "remote"
            (the shared cache) or "rank N" (another process of the pod).
        seconds: durations by stage: "trace", "lower", "load" (the executable), "remote" (waits for
            the shared cache); in a pod "agree" and "wait".
        own_seconds: all other time spent in stepcache.
        remote_bytes: size of the executable, if it came from the shared cache.
    """

    step: str
    build_id: int
    miss: Miss
    source: str
    seconds: Mapping[str, float]
    own_seconds: float
    remote_bytes: int | None = None


class BuildFailed(NamedTuple):
    """A build raised an error. Nothing was cached."""

    step: str
    build_id: int
    stage: str
    error: str


class Evicted(NamedTuple):
    """A program was evicted from memory."""

    step: str
    why: str


class Moved(NamedTuple):
    """A call of a step, or a method of `Variables`, moved values of variables.

    Attributes:
        step: name of the step; for `push`, `assign` and other methods, name of the variables.
        link_bytes: bytes that crossed each link.
    """

    step: str
    link_bytes: tuple[tuple[str, int], ...]


_Monitored = Built | Loaded | BuildFailed | Evicted | Moved  # What `jax.monitoring` hears of.
Event = StageStarted | _Monitored


@dataclass(frozen=True, slots=True)
class StepStats:
    """Counts and durations of one step, over all sessions.

    Attributes:
        misses: calls that found no program in memory.
        traces: programs for which the step was traced: one for each miss. A weakly typed carry that
            comes back with another type makes JAX trace twice; that counts once.
        trusted: programs for which it was not: its export ran, for which a KEY vouches
            (`ProgramCache(trust=KEY)`).
        lowers: lowered traces.
        compiles: compiled modules.
        loads: programs whose executable was found after the trace: in memory, preloaded, on disk,
            in the shared cache or on another rank.
        remote_loads: those loaded from the shared cache.
        remote_bytes: size of these.
        evictions: programs of this step that were evicted from memory.
        hits: calls that found their program *in Python*. JAX's C++ dispatcher serves most hits
            without Python, and they are not counted; `Session(count_hits=True)` counts all.
        delegated: calls passed to `jax.jit`: under another transformation, or with arguments that
            cached programs do not support, such as mutable references.
        trace_seconds: time in JAX's tracing.
        lower_seconds: time in JAX's lowering.
        compile_seconds: time in XLA.
        load_seconds: time to load executables.
        remote_seconds: time waited for the shared cache.
        agree_seconds: time waited for the agreement of a pod's processes.
        wait_seconds: time waited for the process that compiles for all.
        give_seconds: time to send programs to the other processes.
        own_seconds: all other time spent in stepcache on misses.
        moved_bytes: bytes of variables that calls moved between memories, over all links.
        programs: programs of this step in memory now.
        padding: rows that the step's first `Pad` added, as a share of all rows computed.
    """

    misses: int = 0
    traces: int = 0
    trusted: int = 0
    lowers: int = 0
    compiles: int = 0
    loads: int = 0
    remote_loads: int = 0
    remote_bytes: int = 0
    evictions: int = 0
    hits: int = 0
    delegated: int = 0
    trace_seconds: float = 0.0
    lower_seconds: float = 0.0
    compile_seconds: float = 0.0
    load_seconds: float = 0.0
    remote_seconds: float = 0.0
    agree_seconds: float = 0.0
    wait_seconds: float = 0.0
    give_seconds: float = 0.0
    own_seconds: float = 0.0
    moved_bytes: int = 0
    programs: int = 0
    padding: float = 0.0

    def _rows(self) -> dict[str, str]:
        """Returns the rows of its text: what is not zero, and the counts that are always shown."""
        rows = {}
        for name in (each.name for each in fields(self)):
            value, (what, _, unit) = getattr(self, name), name.rpartition("_")
            if unit == "seconds":
                text = f"{value:.3f} s"
            else:
                text = readable_bytes(value) if unit == "bytes" else str(value)
            if name == "padding":
                text = f"{value:.1%}"
            if value or name in ("misses", "traces", "compiles", "loads"):
                units = {"seconds": f"{what} time", "bytes": what}
                rows[units.get(unit, name.replace("_", " "))] = text
        return rows

    def __str__(self) -> str:
        rows = self._rows()
        names, values = max(map(len, rows)), max(map(len, rows.values()))
        return "\n".join(f"{name:{names}}  {text:>{values}}" for name, text in rows.items())

    _repr_pretty_ = shown_as_printed

    def _repr_html_(self) -> str:
        return html_table("", self._rows())


RecordedEvent = TypeVar("RecordedEvent", bound=Event)
_EVENTS_KEPT = 1024


class Recorder:
    """Keeps the latest events, and passes each to the subscribers and to `jax.monitoring`.

    A subscriber may name the kinds of events that it takes, as a class or a union; else it takes
    all. An error in it, or in a listener of `jax.monitoring`, is logged and not raised in the step.
    """

    def __init__(self):
        self._events = collections.deque[Event](maxlen=_EVENTS_KEPT)
        self._subscribers: tuple[tuple[Callable[[Any], None], Any], ...] = ()
        self._lock = threading.Lock()

    def emit(self, event: Event) -> None:
        self._events.append(event)
        for subscriber, kinds in self._subscribers:
            try:
                if isinstance(event, kinds):
                    subscriber(event)
            except Exception:
                _log.exception("a subscriber to stepcache's events failed on %r", event)

    def subscribe(self, subscriber: Callable, kinds: Any = object) -> Callable[[], None]:
        """Calls `subscriber` with later events of these kinds. Returns what unsubscribes it."""
        with self._lock:
            self._subscribers = (*self._subscribers, (subscriber, kinds))

        def unsubscribe() -> None:
            with self._lock:
                self._subscribers = tuple(s for s in self._subscribers if s[0] is not subscriber)

        return unsubscribe

    def recent(self, kind: type[RecordedEvent]) -> list[RecordedEvent]:
        """Returns the latest events of one kind, the oldest first."""
        return [event for event in list(self._events) if isinstance(event, kind)]


def _mirror(event: _Monitored) -> None:
    durations: Mapping[str, float] = {}
    match event:
        case Built():
            name, stages = "miss", ("trace", "lower", "compile", "own")
            durations = {stage: getattr(event, f"{stage}_seconds") for stage in stages}
        case Loaded():
            name, durations = "load", event.seconds
        case BuildFailed():
            name = "build_failed"
        case Evicted():
            name = "eviction"
        case Moved():
            for link, size in event.link_bytes:
                details = {"step": event.step, "link": link, "size_bytes": size}
                jax.monitoring.record_event("/stepcache/moved", **details)
            return
    # As of JAX's own events, only those with a duration or a size have more than a name: listeners
    # of the others may take nothing else.
    jax.monitoring.record_event(f"/stepcache/{name}")
    for stage, seconds in durations.items():
        name = f"/stepcache/{stage}_duration"
        jax.monitoring.record_event_duration_secs(name, seconds, step=event.step)


recorder = Recorder()
recorder.subscribe(_mirror, _Monitored)
