"""What a program's trace leaves changed, in a process that has loaded the program without a trace.

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


def drawn_from(dependencies: dict[str, str], now: dict[str, str]) -> list[str]:
    """The generators of random numbers, and iterators, that a trace has drawn from.

    Whoever draws next gets what comes after that. Where the program is loaded, nothing is drawn.

    Args:
        dependencies: of the trace.
        now: after it.
    """
    changed = (name for name, to in now.items() if dependencies.get(name, to) != to)
    drawn = (re.match(_DRAWN_FROM, name) for name in changed)
    return list(dict.fromkeys(each[1] for each in drawn if each))


_DRAWN_FROM = re.compile(rf"(.*?)(?:{re.escape(STATE)}$|{re.escape(OF_ITERATOR)})")


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
