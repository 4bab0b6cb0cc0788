"""What traces leave changed, also for a process that has loaded the program without a trace.

A first trace may only make a number another type's: optax's cosine schedule makes a float of its
`decay_steps`. Programs that were traced after it depend on the float, and a process that has loaded
the first program still has the integer.
"""

from __future__ import annotations

import re
from types import CellType

from stepcache.fingerprint.tokens import OF_ITERATOR, STATE
from stepcache.programs.remaking import number_of

Left = dict[str, tuple[str, str]]
"""Dependencies by name, as they were when a program was traced in another process, and after it."""


def as_left(dependencies: dict[str, str], left: Left) -> dict[str, str]:
    """Dependencies with those that are as before such a trace as they are after it."""
    changed = {name: to for name, (at, to) in left.items() if dependencies.get(name) == at}
    return dependencies | changed if changed else dependencies


def changed_by(dependencies: dict[str, str], now: dict[str, str]) -> dict[str, str]:
    """Of the dependencies of a trace, the numbers that it has made another type's."""
    return {name: to for name, to in now.items() if _same_number(dependencies.get(name), to)}


def _same_number(before: str | None, after: str) -> bool:
    """Whether a number has become another type's, as 100 and 100.0."""
    if before is None or before == after:
        return False
    number = number_of(before)
    return number is not None and number == number_of(after)


def moved_on(dependencies: dict[str, str], now: dict[str, str]) -> tuple[str, ...]:
    """Why others would get other values if the program were loaded, and not traced.

    A trace draws from generators of random numbers and iterators, or counts on from a number that
    is more than a count of traces. Whoever draws or counts next goes on from there.

    Args:
        dependencies: of the trace.
        now: after it.
    """
    reasons: dict[str, None] = {}
    for name, to in now.items():
        before = dependencies.get(name) or _default_of(name, dependencies)
        if before is None or before == to:
            continue
        if source := _DRAWN_FROM.match(name):
            what = f"{source[1]}: the trace draws from it, and what is drawn next depends on that"
        elif None in (number_of(before), number_of(to)) or _same_number(before, to):
            continue
        else:
            what = f"{name}: the trace changes it from {before} to {to}, and others may read it"
        reasons[what] = None
    return tuple(reasons)


def _default_of(name: str, dependencies: dict[str, str]) -> str | None:
    """What the class of an object has for an attribute that the object does not have itself."""
    owner, _, attribute = name.rpartition(".")
    text = dependencies.get(owner, "")
    return dependencies.get(f"{text[2:]}.{attribute}") if text.startswith("a ") else None


_DRAWN_FROM = re.compile(rf"(.*?)(?:{re.escape(STATE)}$|{re.escape(OF_ITERATOR)})")
_after_traces: dict[str, str] = {}  # What traces of this process have left, by name.


def note_changed(dependencies: dict[str, str], now: dict[str, str]) -> None:
    """Notes what a trace has changed: its dependencies, and what they are after it."""
    _after_traces.update((name, to) for name, to in now.items() if dependencies.get(name) != to)


def but_for_traces(dependencies: dict[str, str], before: dict[str, str]) -> dict[str, str]:
    """Dependencies, where those that are as a trace has left them are as they were before.

    What is found otherwise was changed by other code, and that is remembered.
    """
    as_before = {}
    for name, left in tuple(_after_traces.items()):
        if dependencies.get(name, left) != left:
            _after_traces.pop(name, None)
        elif name in dependencies and name in before:
            as_before[name] = before[name]
    return dependencies | as_before


class LeftInCells:
    """The same of captured numbers, which steps share: one trains a state, another evaluates it.

    Steps may call a number by different names. It is known by the cell that holds it.
    """

    def __init__(self) -> None:
        self._cells: dict[int, tuple[CellType, str, str]] = {}  # By identity, of which it is held.

    def __bool__(self) -> bool:
        return bool(self._cells)

    def add(self, left: Left, cells: dict[str, CellType]) -> None:
        """Adds what a program's trace leaves, if it is in one of the cells."""
        for name in left.keys() & cells.keys():
            self._cells[id(cells[name])] = (cells[name], *left[name])

    def of(self, cells: dict[str, CellType]) -> Left:
        """What is left in some cells."""
        found = {name: self._cells.get(id(cell)) for name, cell in cells.items()}
        return {name: each[1:] for name, each in found.items() if each is not None}
