"""`MissLog`: the keys of a step's programs, from which a miss is explained.

One log a step. It remembers keys, not programs, so it can tell a program that was evicted from
one that never was.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from stepcache.calls.key import Key, diff_settings
from stepcache.calls.layers import Making
from stepcache.calls.pad import Pad
from stepcache.calls.signature import Call, Path, Signature
from stepcache.calls.signature_diff import diff, diff_holders, distance
from stepcache.calls.step_spec import Request
from stepcache.events import Change, Miss, StepStats

_KEYS_REMEMBERED = 64
# The nearest signature is sought among the latest ones, over at most so many leaves in all.
_LEAVES_COMPARED = 20_000
_SIZES_WORTH_ADVICE = 3
_AXES_REMEMBERED, _SIZES_REMEMBERED = 32, 1024
_MAX_ADVICE = 3


class MissLog:
    """The builds of one step, and their cost."""

    def __init__(self, step: str, making: Making, pads: Sequence[Pad]):
        self._step, self.making, self._pads = step, making, pads
        self._lock = threading.Lock()
        self._known: OrderedDict[Key, tuple[Signature, tuple[Path, ...]]] = OrderedDict()
        self._gone: dict[Key, str] = {}
        self._values: dict[tuple[str, str, object], set] = {}
        self._counts: dict[str, Any] = defaultdict(int)  # Named as in `StepStats`.
        self._measuring: set[int] = set()  # Threads.
        self._last_miss: Callable[[], Miss | None] = lambda: None  # Of the latest build.
        self.warned_of_batch = False  # Whether the user has been advised to name the batch.

    def why(self, request: Request) -> Miss:
        """Why a call would find no program.

        Describing a difference runs code of static arguments and of tree nodes (`__eq__`,
        `__repr__`). What that raises is put into the result, and never disturbs the step.
        """
        try:
            return self._why(request)
        except Exception as error:
            number = self._counts["misses"] + 1
            text = f"the difference cannot be described: {type(error).__name__} while comparing"
            return Miss(self._step, number, "changed", (), (text,))

    def _why(self, request: Request) -> Miss:
        key = request.key
        with self._lock:
            known = list(self._known.items())
            reason = self._gone.get(key, "new session")
            number = self._counts["misses"] + 1
        if not known:
            advice = _advise_on_making(self.making)
            return Miss(self._step, number, "first call", advice=advice)
        if any(other == key for other, _ in known):
            return Miss(self._step, number, reason)
        shown = request.shown
        budget = max(4, _LEAVES_COMPARED // max(1, len(shown.signature.leaves)))
        latest_first = known[-budget:][::-1]
        before, (signature, paths) = min(
            latest_first, key=lambda item: _distance(item[0], *item[1], key, shown)
        )
        in_call, omitted = diff(signature, paths, shown.signature, shown)
        changes = (*diff_settings(before, key), *in_call)
        return Miss(self._step, number, "changed", changes, self._advice(changes), omitted)

    @property
    def last_miss(self) -> Miss | None:
        """The miss that led to the latest build, compared with earlier runs."""
        return self._last_miss()

    def add(self, request: Request, miss: Miss, final: Callable[[], Miss]) -> None:
        """Remembers a build, and the miss that led to it; `final` gives it when it is asked for."""
        key, shown = request.key, request.shown
        with self._lock:
            if threading.get_ident() not in self._measuring:
                self._last_miss = final
            try:
                self._known[key] = (shown.signature, shown.paths)
                self._known.move_to_end(key)
                self._gone.pop(key, None)
            except Exception:
                return  # A static argument refuses to be compared: it cannot be distinguished.
            while len(self._known) > _KEYS_REMEMBERED:
                dropped, _ = self._known.popitem(last=False)
                self._gone.pop(dropped, None)
            for change in miss.changes:
                self._remember_values(change)

    def gone(self, key: Key, reason: str) -> None:
        """Notes that the program of `key` is held no longer: "evicted" or "cleared"."""
        with self._lock:
            if key in self._known:
                self._gone[key] = reason

    def all_gone(self, reason: str) -> None:
        """Notes that no program of the step is held any longer."""
        with self._lock:
            self._gone = dict.fromkeys(self._known, reason)

    def count(self, **amounts: float) -> None:
        """Adds to the counters of the step, named as in `StepStats`."""
        with self._lock:
            if threading.get_ident() in self._measuring:
                return
            for name, amount in amounts.items():
                self._counts[name] += amount

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Context manager: this thread's calls are not the user's, and are not counted."""
        thread = threading.get_ident()
        self._measuring.add(thread)
        try:
            yield
        finally:
            self._measuring.discard(thread)

    def stats(self, programs: int) -> StepStats:
        """The counters, with the number of programs held now."""
        with self._lock:
            return StepStats(**self._counts, programs=programs)

    def _remember_values(self, change: Change) -> None:
        for kind, where, before, after in _varying(change):
            if len(self._values) < _AXES_REMEMBERED or (kind, change.path, where) in self._values:
                values = self._values.setdefault((kind, change.path, where), set())
                if len(values) < _SIZES_REMEMBERED:
                    values |= {before, after}

    def _advice(self, changes: Sequence[Change]) -> tuple[str, ...]:
        advice: dict[str, None] = {}
        for change in changes:
            for kind, where, before, after in _varying(change):
                seen = self._values.get((kind, change.path, where), set()) | {before, after}
                is_padded = any(each.pads(_argument(change.path), where) for each in self._pads)
                if len(seen) >= _SIZES_WORTH_ADVICE and not is_padded:
                    advice.setdefault(_advise_on_values(kind, change.path, where, seen))
            if "weak_type" in change.kinds:
                advice.setdefault(
                    f"make {change.path} an array of one dtype before the loop "
                    "(jnp.asarray(value, dtype)), so that its type does not change"
                )
            if "committed" in change.kinds:
                advice.setdefault(
                    f"place {change.path} before the first call (jax.device_put), or let a "
                    "Session place it, so that it always arrives the same way"
                )
        return tuple(advice)[:_MAX_ADVICE]


_OTHER_HOLDER = 10
"""The distance of `Variables` from arrays in one argument: that of another dtype of one leaf."""


def _distance(
    known: Key, signature: Signature, paths: Sequence[Path], key: Key, shown: Call
) -> int:
    settings = 0
    if (known.mesh, known.options, known.environment) != (key.mesh, key.options, key.environment):
        settings = len(diff_settings(known, key))
    held = len(diff_holders(paths, shown.paths)) if signature.tree == shown.signature.tree else 0
    return settings + _OTHER_HOLDER * held + distance(signature, shown.signature)


def _varying(change: Change):
    """The axes (or the static) in which a change says that a value varies over calls."""
    if change.part == "static":
        yield "static", "".join(change.kinds), change.before, change.after
    for axis, before, after in change.sizes:
        yield "axis", axis, before, after


def _advise_on_making(making: Making) -> tuple[str, ...]:
    if making.count == 1:
        return ()
    return (
        f"this is step {making.count} made from the function at {making.place} in this process, "
        "and each is traced, and compiled unless its module is the same. If a loop makes them, "
        "make one step before the loop, and pass what varies as an argument",
    )


_STATIC_REMEDIES = {
    "number": "pass it as an array if the code does not branch on it in Python",
    "callable": "make each callable once, before the loop; a lambda, a partial or a nested "
    "function that is made again counts as another value",
    "object": "pass the same object each time, or give its class an __eq__ and a __hash__ by value",
    "value": "pass fewer distinct values, or pass the part that varies as an array",
}


def _advise_on_values(kind: str, path: str, where: object, seen: set) -> str:
    values = ", ".join(map(str, sorted(seen)[:8])) + (", …" if len(seen) > 8 else "")
    if kind == "static":
        remedy = _STATIC_REMEDIES[str(where)]
        had = f"static {path} has had {len(seen)} values ({values})"
        return f"{had}, each with its own program: {remedy}"
    axis = f", axis={where}" if where else ""
    return (
        f"axis {where} of {path} has had {len(seen)} sizes ({values}), each with its own "
        f'program: pad it to a few sizes, with @step(pad=sc.Pad("{_argument(path)}"{axis}))'
    )


def _argument(path: str) -> str:
    """The argument that a path begins with."""
    found = re.match(r"\w+", path)
    return found[0] if found else path
