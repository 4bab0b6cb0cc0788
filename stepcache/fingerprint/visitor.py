"""What a step's code depends on, as named dependencies that another process can check.

`Walk` starts at a function and follows what its code names: globals, captured variables, defaults,
attributes of objects, methods of classes, and the functions among them in turn. Code of the user is
known by its content; code of an installed distribution by the distribution's version. Each thing
found is one dependency, a path and a token: `train.py:RATE` is `0.1`. Equal dependencies mean equal
programs.

What cannot be fingerprinted is named in `untrackable`; nothing is guessed. The idea is that of a
compiler's depfile, and of ccache's direct mode. Here is the walk itself; how it looks at each kind
of thing is in `values`, `classes` and `functions`.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from stepcache.fingerprint import (
    classes,
    functions,
    modules_as_values,
    objects,
    records,
    special_kinds,
    values,
)
from stepcache.fingerprint.escapes import Way
from stepcache.fingerprint.provenance import INSTALLED, USER, origin_of
from stepcache.fingerprint.tokens import ATOMS, atom, digest, key_text, plain_text, short
from stepcache.fingerprint.trail import Trail
from stepcache.units import counted

WITH_THEIR_CLASS: set[type] = set()
"""Kinds of nodes that keep `(type(value), value)`, to compare both: nobody calls that class."""
_NODES_TOLD = 64


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a step depends on."""

    dependencies: dict[str, str]  # Path and token of everything found.
    untrackable: tuple[str, ...]  # If there is any, the step has no fingerprint.


class Walk(Trail):
    """Follows what code depends on, beginning with whatever `value` is given."""

    def fingerprint(self) -> Fingerprint:
        """Follows everything that is still to be followed."""
        while self.todo or self.settle_confined():
            task, self.reader = self.todo.popleft(), ""
            try:
                task()
            except Exception as error:  # An object may fail at anything that it is asked.
                self.blame("step", f"looking at it raised {type(error).__name__}: {error}")
        return Fingerprint(dict(self.dependencies), tuple(self.untrackable))

    def value(self, path: str, value: Any, way: Way | None = None) -> None:
        if type(value) in ATOMS:
            self.note(path, atom(value))
            return
        self.confined.meet(value, way)
        if not self.first_time((path, id(value))):
            return
        functions.note_other_name(self, path, value)
        known = self.seen.get(id(value))
        if known is not None:
            if known != path:
                self.note(path, f"see {known}")
            if known.startswith("class ") and issubclass(type(value), type):
                classes.may_be_called(self, value)
            return
        if path in self.dependencies:
            path = self.unique(path)
        if plain_text(value) is None:  # Equal tuples of constants may or may not be one object.
            self.known_as(value, path)
        self.alive.append(value)
        try:
            self._compound(path, value)
        except RecursionError:
            self.blame(path, "it is nested too deeply")
        except Exception as error:
            self.blame(path, f"looking at it raised {type(error).__name__}: {error}")

    def _compound(self, path: str, value: Any) -> None:
        if records.note_record(self, path, value):
            return
        handler = values.HANDLERS.get(type(value))
        if handler is not None:
            handler(self, path, value)
        elif type(value) is types.FunctionType:
            functions.note_function(self, path, value)
        elif issubclass(type(value), type):
            classes.note_class(self, path, value)
        elif issubclass(type(value), types.ModuleType):
            modules_as_values.note_module(self, path, value)
        elif type(value).__module__.startswith("weakref") and "Proxy" in type(value).__name__:
            self.blame(path, "it is a weak reference that poses as its object")
        elif not special_kinds.note_special(self, path, value):
            objects.note_instance(self, path, value)

    def follow_class(self, cls: type) -> str:
        known = self.seen.get(id(cls))
        if known is not None and known.startswith("class "):
            return known.removeprefix("class ")
        name = f"{cls.__module__}.{cls.__qualname__}"
        origin = origin_of(cls)
        if origin == USER:
            space = vars(sys.modules[cls.__module__]) if cls.__module__ in sys.modules else {}
            label = self.namespace(space, cls, cls.__module__)
            name = self.unique(f"{label}:{cls.__qualname__}")
        elif classes.is_made_by_function(cls):
            name = self.unique(name)
        self.known_as(cls, f"class {name}")
        if origin == USER:
            self.later(functools.partial(classes.follow_user_class, self, name, cls))
        else:
            if origin == INSTALLED:
                self.distribution(cls.__module__)
            self.later(functools.partial(classes.follow_library_class, self, name, cls))
        return name

    def tree(self, path: str, tree: Any) -> None:
        shape: list[str] = []
        kept: list[tuple[str, str]] = []
        self._subtree(path, tree, shape, kept)
        self.note(path, f"tree of {counted(tree.num_leaves, 'leaf')}, {digest(shape)}")
        if len(kept) > _NODES_TOLD:
            kept = [(f"{path} (what nodes keep)", digest(text for _, text in kept))]
        for where, text in kept:
            self.note(where, short(text))

    def _subtree(self, path: str, tree: Any, shape: list[str], kept: list) -> None:
        data = tree.node_data()
        if data is None:
            shape.append("*")
            return
        kind, extra = data
        children = tree.children()
        shape.append(f"{kind.__module__}.{kind.__qualname__}({len(children)})")
        names: list[str] = [f"[{index}]" for index in range(len(children))]
        if kind in (dict, OrderedDict):
            names = [f"[{key!r}]" for key in extra]
            shape.append(digest(map(key_text, extra)))
        elif kind not in (tuple, list, type(None)):
            self.follow_class(kind)
            extra = extra[1] if kind in WITH_THEIR_CLASS else extra
            if extra is not None and not isinstance(extra, type):
                text = plain_text(extra)
                if text is None:
                    self.value(f"{path} ({kind.__name__})", extra)
                else:
                    kept.append((f"{path} ({kind.__name__})", text))
        for name, child in zip(names, children, strict=True):
            if child.num_nodes > 1 or child.num_leaves != 1:
                self._subtree(path + name, child, shape, kept)
            else:
                shape.append("*")
