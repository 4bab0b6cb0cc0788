"""How a walk looks at small immutable objects of packages: as a whole, by one text.

Flax describes a module by thousands of them (`nnx.GraphDef`). To note each of their parts would
give four times as many dependencies, and make the look-up of such a step half as long again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, MutableMapping
from typing import Any

from stepcache.fingerprint import classes, instances, special_kinds
from stepcache.fingerprint.bytecode import DYNAMIC_ACCESS
from stepcache.fingerprint.provenance import INSTALLED, origin_of
from stepcache.fingerprint.tokens import ATOMS, atom
from stepcache.fingerprint.trail import Trail

_MOST_PARTS = 64


def note_record(walk: Trail, path: str, value: Any) -> bool:
    """Notes a record of plain values, or a tuple with records; says no if it is anything else."""
    kind = type(value)
    if not (is_record(kind) or (kind is tuple and any(map(is_record, map(type, value))))):
        return False
    text = _Text(walk).of(value)
    if text is None:
        return False
    walk.note(path, text)  # All of it: a reader wants to see what differs.
    return True


class _Text:
    """Makes the text of one value; its classes are noted by themselves."""

    def __init__(self, walk: Trail) -> None:
        self._walk, self._left = walk, _MOST_PARTS

    def of(self, value: Any) -> str | None:
        """All of a value; None if it has a part that is not plain, or too many."""
        kind = type(value)
        if kind in ATOMS:
            return atom(value)
        self._left -= 1
        if self._left < 0:
            return None
        if kind is tuple:
            return self._joined("", value)
        if issubclass(kind, type):
            if value.__name__ in DYNAMIC_ACCESS:
                return None
            classes.may_be_called(self._walk, value)
            return f"class {self._walk.follow_class(value)}"
        if not is_record(kind):
            return None
        state = instances.attributes_of(value)
        name = self._walk.follow_class(kind)
        if len(state) == 1 and type(inside := next(iter(state.values()))) is dict:
            return self._joined(name, (each for item in inside.items() for each in item))
        return self._joined(name, state.values())

    def _joined(self, name: str, parts: Any) -> str | None:
        texts = []
        for each in parts:
            if (text := self.of(each)) is None:
                return None
            texts.append(text)
        return f"{name}({', '.join(texts)})"


@functools.lru_cache(maxsize=4096)
def is_record(kind: type) -> bool:
    """Whether a class is a package's, and its objects immutable, with a hash by their content."""
    frozen = dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore
    return (
        origin_of(kind) == INSTALLED
        and (frozen or (issubclass(kind, Mapping) and not issubclass(kind, MutableMapping)))
        and instances.has_hash_of_package(kind)
        and instances.is_shown(kind)
        and not issubclass(kind, instances.CONTENT)
        and not special_kinds.may_be_special(kind)
    )
