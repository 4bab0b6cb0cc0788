"""What code objects of installed modules read: names of modules, attributes of any object."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterable
from typing import NamedTuple

from stepcache.fingerprint.provenance import INSTALLED, origin_of_file


class Reads(NamedTuple):
    """What some code objects of installed modules read, together.

    Attributes:
        modules: those that the code comes from.
        names: what it reads of these and of others, by module, with spaces between.
        attributes: all names and strings in it: what it may read of any object.
        asked_for: those that it may ask of objects which do not have them.
    """

    modules: list[str]
    names: dict[str, str]
    attributes: frozenset[str]
    asked_for: frozenset[str]


class _Read(NamedTuple):
    """As `Reads`, of one code object, which is held so that it keeps its identity."""

    code: types.CodeType
    module: str | None  # None for a compiler's, and for others.
    names: dict[str, set[str]]
    attributes: set[str]
    asked_for: set[str]


_reads: dict[int, _Read] = {}
_together: dict[tuple[int, frozenset[int]], tuple[dict, Reads]] = {}
_REMEMBERED = 32
_lock = threading.RLock()


def reads_of(codes: Iterable[types.CodeType], of_jax: dict[int, types.CodeType]) -> Reads:
    """What the code objects among some that come from installed modules read.

    Args:
        codes: from anywhere.
        of_jax: more, by identity, known to come from JAX. They are many, and mostly those of the
            trace before, in the same dictionary: it is not to be changed.
    """
    others = (code for code in codes if origin_of_file(code.co_filename) == INSTALLED)
    installed = {id(code): code for code in others if id(code) not in of_jax}
    if not (installed or of_jax):
        return _NOTHING
    key = id(of_jax), frozenset(installed)
    with _lock:
        if key not in _together:
            installed |= of_jax
            unknown = [code for each, code in installed.items() if each not in _reads]
            by_file = _modules_by_file() if unknown else {}
            for code in unknown:
                _reads[id(code)] = _read_by(code, by_file)
            if len(_together) >= _REMEMBERED:
                _together.clear()
            # The dictionary is held, so that it keeps its identity.
            _together[key] = of_jax, _put_together([_reads[each] for each in installed])
        return _together[key][1]


_NOTHING = Reads([], {}, frozenset(), frozenset())


def _put_together(reads: list[_Read]) -> Reads:
    names: dict[str, set[str]] = {}
    for read in reads:
        for owner, each in read.names.items():
            names.setdefault(owner, set()).update(each)
    return Reads(
        sorted({read.module for read in reads if read.module is not None}),
        {owner: " ".join(sorted(each)) for owner, each in sorted(names.items())},
        frozenset().union(*(read.attributes for read in reads)),
        frozenset().union(*(read.asked_for for read in reads)),
    )


def _read_by(code: types.CodeType, by_file: dict[str, str]) -> _Read:
    module = by_file.get(code.co_filename)
    found: dict[str, set[str]] = {}
    if module is not None and not _is_known_by_file(module):
        found[module] = {code.co_qualname.partition(".")[0]}
        _add_names(found, module, vars(sys.modules[module]), code.co_names, 3)
        found[module] &= vars(sys.modules[module]).keys()
    strings = {each for each in code.co_consts if isinstance(each, str) and each.isidentifier()}
    if (
        module is not None and module.partition(".")[0] == "stepcache"
    ):  # It asks no object of the user's.
        return _Read(code, module, found, set(), set())
    asked_for = set() if _ASKING.isdisjoint(code.co_names) else strings
    return _Read(code, module, found, {*code.co_names, *strings}, asked_for)


_ASKING = frozenset(("getattr", "hasattr"))


def _modules_by_file() -> dict[str, str]:
    return {
        file: name
        for name, module in list(sys.modules.items())
        if name != "__main__" and (file := getattr(module, "__file__", None))
    }


def _add_names(
    found: dict[str, set[str]], owner: str, space: dict, names: tuple[str, ...], depth: int
) -> None:
    for name in names:
        value = space.get(name, sys.modules.get(name) if "." in name else None)
        if type(value) is types.ModuleType and _is_known_by_file(value.__name__):
            continue
        if name in space and not name.startswith("__"):
            found.setdefault(owner, set()).add(name)
        if type(value) is types.ModuleType and depth and value.__name__ in sys.modules:
            file = getattr(value, "__file__", None)
            if file and origin_of_file(file) == INSTALLED:
                _add_names(found, value.__name__, vars(value), names, depth - 1)


def _is_known_by_file(module: str) -> bool:
    """Modules whose names are not looked at: jaxlib's bindings are loaded bit by bit while a
    program is lowered, and stepcache's own are not to be replaced.
    """
    return module.partition(".")[0] in ("jaxlib", "stepcache")
