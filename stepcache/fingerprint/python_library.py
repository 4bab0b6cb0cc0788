"""What modules of Python's own library keep for the whole process, and read of any object.

Only where the user's code names them, for most programs do without.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Protocol


class Notes(Protocol):
    """What is used of a `Trail`."""

    def first_time(self, what: Hashable) -> bool: ...
    def once(self, path: str, token: str) -> None: ...
    def read_attributes(self, names: Iterable[str]) -> None: ...


def note_state(walk: Notes, full_name: str) -> None:
    """Notes what a function or class of Python's library, given by its name, depends on."""
    note = _NOTES.get(full_name.partition(".")[0])
    if note is not None:
        note(walk, full_name)


def _note_csv(walk: Notes, full_name: str) -> None:
    if not walk.first_time("csv"):
        return
    import csv

    walk.read_attributes(_OF_DIALECTS)
    walk.once("csv (limit)", str(csv.field_size_limit()))
    for name in csv.list_dialects():
        dialect = csv.get_dialect(name)
        found = (f"{each} {getattr(dialect, each)!r}" for each in sorted(_OF_DIALECTS))
        walk.once(f"csv (dialects)[{name!r}]", ", ".join(found))


# Python's compiled code reads these of any object that is given to it as a dialect.
_OF_DIALECTS = frozenset(
    "delimiter doublequote escapechar lineterminator quotechar quoting skipinitialspace "
    "strict".split()
)


def _note_logging(walk: Notes, full_name: str) -> None:
    if full_name.startswith("logging.getLevelName") and walk.first_time("names of levels"):
        names = dict(sys.modules["logging"]._levelToName)
        for level in sorted(names):
            walk.once(f"logging (names of levels)[{level}]", repr(names[level]))


def _note_xml(walk: Notes, full_name: str) -> None:
    module: Any = sys.modules.get("xml.etree.ElementTree")
    if module is not None and walk.first_time("prefixes of xml"):
        for space, prefix in sorted(module._namespace_map.items()):
            walk.once(f"xml.etree.ElementTree (prefixes)[{space!r}]", repr(prefix))


_NOTES: dict[str, Callable[[Notes, str], None]] = {
    "csv": _note_csv,
    "_csv": _note_csv,
    "logging": _note_logging,
    "xml": _note_xml,
}
