"""What code objects of installed modules read: names of modules, attributes of any object."""

from __future__ import annotations

import collections
import sys
import threading
import types
from collections.abc import Iterable
from typing import NamedTuple

from stepcache.fingerprint.provenance import INSTALLED, origin_of_file


class _Read(NamedTuple):
    """What one code object of an installed module reads.

    Attributes:
        code: itself, so that it keeps its identity.
        module: the module that it comes from; None for a compiler's, and for others.
        names: the names that it reads, by module.
        attributes: all names and strings in it: what it may read of any object.
        asked_for: those that it may ask of objects which do not have them.
    """

    code: types.CodeType
    module: str | None
    names: tuple[tuple[str, frozenset[str]], ...]
    attributes: frozenset[str]
    asked_for: frozenset[str]


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


_NOTHING = Reads([], {}, frozenset(), frozenset())
_reads: dict[int, _Read] = {}
_together: collections.OrderedDict[frozenset[int], Reads] = collections.OrderedDict()
_REMEMBERED = 32
_lock = threading.RLock()


def reads_of(codes: Iterable[types.CodeType]) -> Reads:
    """What the code objects among some that come from installed modules read."""
    installed = [code for code in codes if origin_of_file(code.co_filename) == INSTALLED]
    key = frozenset(map(id, installed))
    with _lock:
        known = _together.get(key)
        if known is None:
            unknown = [code for code in installed if id(code) not in _reads]
            by_file = _modules_by_file() if unknown else {}
            for code in unknown:
                _reads[id(code)] = _read_by(code, by_file)
            # Most sets are an earlier one and a little more.
            smaller = max((each for each in _together if each < key), key=len, default=None)
            before = _NOTHING if smaller is None else _together[smaller]
            more = [_reads[each] for each in key - (smaller or frozenset())]
            known = _together[key] = _put_together(before, more)
            if len(_together) > _REMEMBERED:
                _together.popitem(last=False)
        return known


def _put_together(before: Reads, more: list[_Read]) -> Reads:
    names: dict[str, set[str]] = {}
    for read in more:
        for owner, each in read.names:
            names.setdefault(owner, set(before.names.get(owner, "").split())).update(each)
    joined = {owner: " ".join(sorted(each)) for owner, each in names.items()}
    return Reads(
        sorted({*before.modules, *(read.module for read in more if read.module is not None)}),
        dict(sorted((before.names | joined).items())),
        before.attributes.union(*(read.attributes for read in more)),
        before.asked_for.union(*(read.asked_for for read in more)),
    )


def _read_by(code: types.CodeType, by_file: dict[str, str]) -> _Read:
    module = by_file.get(code.co_filename)
    found: dict[str, set[str]] = {}
    if module is not None and not _is_known_by_file(module):
        found[module] = {code.co_qualname.partition(".")[0]}
        _add_names(found, module, vars(sys.modules[module]), code.co_names, 3)
        found[module] &= vars(sys.modules[module]).keys()
    strings = {each for each in code.co_consts if isinstance(each, str) and each.isidentifier()}
    asking = not _ASKING.isdisjoint(code.co_names)
    names = tuple((owner, frozenset(each)) for owner, each in found.items())
    if module is not None and module.partition(".")[0] == _OURS:  # It asks no object of the user's.
        return _Read(code, module, names, frozenset(), frozenset())
    attributes = frozenset((*code.co_names, *strings))
    return _Read(code, module, names, attributes, frozenset(strings if asking else ()))


_ASKING = frozenset(("getattr", "hasattr"))


_OURS = __name__.partition(".")[0]


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
