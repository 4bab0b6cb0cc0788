"""Frozen records of what happened, and the one place that receives them.

Sizes are in bytes and times in seconds, and the names say so. Nothing here decides anything: the
engine emits records, the recorder keeps the latest, hands them to subscribers and mirrors them to
`jax.monitoring`, so that dashboards which listen there see stepcache without being told.
"""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TypeVar

import jax.monitoring

from stepcache.units import counted, html_table, readable_bytes, readable_time

_log = logging.getLogger("stepcache")


@dataclass(frozen=True, slots=True)
class Change:
    """One part of a key that differs between a known program and a call.

    Attributes:
        part: which part of the key: "argument", "tree", "static", "mesh", "config" or "options";
            against an earlier run also "code", "value", "file", "variable" (of the environment),
            "package", "environment" or "module" (of an installed package).
        path: the argument path (`batch['tokens']`), or the name of the setting.
        before: what the known program was built for.
        after: what the call needs.
        note: what exactly differs, such as "axis 0", in words.
        kinds: the same for programs: of "shape", "dtype", "weak_type", "committed", "sharding",
            "layout"; for a static argument "number", "callable",
            "object" (compared by identity) or "value".
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
    """Why a call found no program.

    Attributes:
        step: the name of the step.
        number: 1 for the first miss of this step.
        reason: "first call", "changed", "evicted" (it was built before and made room for others),
            "cleared" (`clear_cache`), "new session" (known, but to another session's cache), or
            "other run" (built by an earlier run, but something has changed since).
        changes: what differs from the nearest signature known to this step, or from that run.
        advice: what to try.
        omitted: leaves that differ too, beyond those that `changes` describes.
        since: when the earlier run built its program that this call is compared with: seconds since
            the epoch.
        stored: beside `changes`, what has changed since that run, so that its program was not
            loaded without a trace.
        remedy: how the program was obtained, such as "built" or "loaded from disk, without a trace,
            in 0.10 s"; empty before that.
        untrackable: why a later run of this step will have to trace it, if it will.
    """

    step: str
    number: int
    reason: str
    changes: tuple[Change, ...] = ()
    advice: tuple[str, ...] = ()
    omitted: int = 0
    since: float | None = None
    untrackable: tuple[str, ...] = ()
    remedy: str = ""
    stored: tuple[Change, ...] = ()

    @property
    def in_a_line(self) -> str:
        """The reason, short: what changed, or that the step was not called before."""
        shown = "; ".join(map(str, self.changes[:_MAX_CHANGES_IN_A_LINE]))
        more = len(self.changes[_MAX_CHANGES_IN_A_LINE:]) + self.omitted
        rest = f"; {counted(more, 'more change')}" if more else ""
        return f"{shown}{rest}" if shown else f"{self.reason} of {self.step}"

    @property
    def headline(self) -> str:
        """The reason as a sentence; `changes` follow it where it ends in a colon."""
        closest = "; the closest differs in:" if self.changes else ""
        return {
            "first call": "no program yet: this is its first call",
            "changed": f"no cached program matches{closest}",
            "evicted": "the program was built before and has been evicted",
            "cleared": "the program was built before and the cache has been cleared",
            "new session": "the program is known, but not to this session's program cache",
            "other run": f"since the run of {readable_time(self.since)} these have changed:",
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
        if self.remedy and self.remedy != "built":
            lines.append(f"  the program was {self.remedy}")
        lines += [f"  hint: {text}" for text in self.advice]
        if self.untrackable:
            lines.append("  a later run will have to trace it, because of")
            lines += [f"    {text}" for text in self.untrackable[:_MAX_CHANGES_SHOWN]]
        return "\n".join(lines)


_MAX_CHANGES_SHOWN = 12
_MAX_CHANGES_IN_A_LINE = 3


@dataclass(frozen=True, slots=True)
class Captured:
    """An array that a step captured by closure, so that it became part of the program."""

    name: str
    type: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class StageStarted:
    """A program's coming to be entered a stage: "hash", "read", "load", "trace", "lower", …"""

    step: str
    build_id: int
    stage: str


@dataclass(frozen=True, slots=True)
class Built:
    """A program was built.

    Attributes:
        own_seconds: what stepcache itself took of the call, everything but JAX's trace, lower and
            compile and the run of the program.
    """

    step: str
    build_id: int
    miss: Miss
    trace_seconds: float
    lower_seconds: float
    compile_seconds: float
    own_seconds: float
    captured: tuple[Captured, ...] = ()


@dataclass(frozen=True, slots=True)
class Loaded:
    """A program was loaded from disk, without compiling it.

    Attributes:
        traced: whether the user's function had to be traced to find it.
        seconds: by stage: "hash" (what the step depends on), "read" (the stored records), "load"
            (the executable), "remote" (waiting for the shared cache), and where it was traced
            "trace" and "lower".
        own_seconds: everything else that stepcache itself took.
        remote_bytes: size of the executable, if it came from the shared cache.
    """

    step: str
    build_id: int
    miss: Miss
    traced: bool
    seconds: Mapping[str, float]
    own_seconds: float
    remote_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Verified:
    """A background trace of a program that was loaded without one has ended.

    Attributes:
        agrees: whether it gives the same program.
        seconds: how long it took.
    """

    step: str
    agrees: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class BuildFailed:
    """A build raised; nothing was cached."""

    step: str
    build_id: int
    stage: str
    error: str


@dataclass(frozen=True, slots=True)
class Evicted:
    """A program left the memory tier to make room."""

    step: str
    why: str


@dataclass(frozen=True, slots=True)
class Moved:
    """A call moved values of variables, as their policies say; or a use of them outside of one did.

    Attributes:
        step: the name of the step; of `push`, `assign` and the like that of the variables.
        link_bytes: bytes that crossed each link.
    """

    step: str
    link_bytes: tuple[tuple[str, int], ...]


Event = StageStarted | Built | Loaded | Verified | BuildFailed | Evicted | Moved
Subscriber = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one step has cost so far, over all sessions.

    Attributes:
        misses: calls for which no program was found.
        traces: programs for which the user's function was traced: once, or twice where a weakly
            typed carry comes back with a type of its own.
        lowers: times a trace was lowered.
        compiles: times a lowered module was handed to the compiler.
        loads: programs that came from disk: `misses` counts them too.
        remote_loads: those of them that the shared cache had.
        remote_bytes: their size.
        verifications: traces made in the background of programs loaded without one.
        evictions: programs of this step that made room for others.
        hits: calls that found their program *and entered Python*. JAX's C++ dispatcher serves hits
            without Python, which are not counted; `Session(count_hits=True)` counts them all.
        delegated: calls handed to `jax.jit` as they were: under another trace, or with arguments
            (mutable references and the like) that a cached program cannot hold.
        trace_seconds: time in JAX's tracing.
        lower_seconds: time in JAX's lowering.
        compile_seconds: time in XLA.
        hash_seconds: time to find out what the step depends on.
        read_seconds: time to look for records on disk.
        load_seconds: time to load executables.
        remote_seconds: time to wait for the shared cache.
        agree_seconds: time to agree with the other processes of a pod, and to wait for late ones.
        wait_seconds: time to wait for the process that builds for all.
        give_seconds: time to hand a program to the other processes.
        own_seconds: stepcache's own share of all misses beside these.
        moved_bytes: bytes of variables that calls moved between memories, over all links.
        programs: programs of this step that are held now.
        padding: share of the rows computed that `Pad` had added, along the axis of the first one.
    """

    misses: int = 0
    traces: int = 0
    lowers: int = 0
    compiles: int = 0
    loads: int = 0
    remote_loads: int = 0
    remote_bytes: int = 0
    verifications: int = 0
    evictions: int = 0
    hits: int = 0
    delegated: int = 0
    trace_seconds: float = 0.0
    lower_seconds: float = 0.0
    compile_seconds: float = 0.0
    hash_seconds: float = 0.0
    read_seconds: float = 0.0
    load_seconds: float = 0.0
    remote_seconds: float = 0.0
    agree_seconds: float = 0.0
    wait_seconds: float = 0.0
    give_seconds: float = 0.0
    own_seconds: float = 0.0
    moved_bytes: int = 0
    programs: int = 0
    padding: float = 0.0

    def _told(self) -> dict[str, str]:
        """What there is to tell: counts and times that are not zero, and always the first ones."""
        told = {}
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
                told[units.get(unit, name.replace("_", " "))] = text
        return told

    def __str__(self) -> str:
        told = self._told()
        names, values = max(map(len, told)), max(map(len, told.values()))
        return "\n".join(f"{name:{names}}  {text:>{values}}" for name, text in told.items())

    def _repr_html_(self) -> str:
        return html_table("", self._told())


RecordedEvent = TypeVar("RecordedEvent", bound=Event)
_EVENTS_KEPT = 1024


class Recorder:
    """Keeps the latest events and passes each on to the subscribers and to `jax.monitoring`.

    A subscriber that raises is logged and does not disturb the step.
    """

    def __init__(self):
        self._events = collections.deque[Event](maxlen=_EVENTS_KEPT)
        self._subscribers: tuple[Subscriber, ...] = ()
        self._lock = threading.Lock()

    def emit(self, event: Event) -> None:
        self._events.append(event)
        _mirror(event)
        for subscriber in self._subscribers:
            try:
                subscriber(event)
            except Exception:
                _log.exception("a subscriber of stepcache's events raised on %r", event)

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Calls `subscriber` with every event from now on; returns the function that ends it."""
        with self._lock:
            self._subscribers = (*self._subscribers, subscriber)

        def unsubscribe() -> None:
            with self._lock:
                self._subscribers = tuple(s for s in self._subscribers if s is not subscriber)

        return unsubscribe

    def recent(self, kind: type[RecordedEvent]) -> list[RecordedEvent]:
        """The kept events of one kind, oldest first."""
        return [event for event in list(self._events) if isinstance(event, kind)]


def _mirror(event: Event) -> None:
    match event:
        case Built():
            jax.monitoring.record_event("/stepcache/miss", step=event.step)
            for stage in ("trace", "lower", "compile", "own"):
                seconds = getattr(event, f"{stage}_seconds")
                name = f"/stepcache/{stage}_duration"
                jax.monitoring.record_event_duration_secs(name, seconds, step=event.step)
        case Loaded():
            jax.monitoring.record_event("/stepcache/load", step=event.step)
            for stage, seconds in event.seconds.items():
                name = f"/stepcache/{stage}_duration"
                jax.monitoring.record_event_duration_secs(name, seconds, step=event.step)
        case Verified():
            outcome = "verified" if event.agrees else "stale"
            jax.monitoring.record_event(f"/stepcache/{outcome}", step=event.step)
        case BuildFailed():
            jax.monitoring.record_event("/stepcache/build_failed", step=event.step)
        case Moved():
            for link, size in event.link_bytes:
                details = {"step": event.step, "link": link, "size_bytes": size}
                jax.monitoring.record_event("/stepcache/moved", **details)
        case Evicted():
            jax.monitoring.record_event("/stepcache/eviction", step=event.step)


recorder = Recorder()
