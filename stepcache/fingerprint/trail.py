"""What a walk has found: dependencies, untrackable ones, and what waits for a name to be read.

The ground that `values`, `classes` and `functions` stand on; how to look at a thing is not here.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import reprlib
import sys
import types
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Container, Hashable, Iterable, Set
from typing import Any

from stepcache.fingerprint.bytecode import MAKES_ANY, Names
from stepcache.fingerprint.dynamic_reads import READS_ANY
from stepcache.fingerprint.escapes import KEEPS_OBJECTS, Confined, Way
from stepcache.fingerprint.held import function_in
from stepcache.fingerprint.nondeterminism import NUMPYS_NOW, asks_numpy_for_now, why_impure
from stepcache.fingerprint.provenance import distribution_of, file_label
from stepcache.fingerprint.tokens import digest

# A library may read these of any object, without the user's code naming them; `dict` asks each
# object that it is given for its `keys`.
_ALWAYS_READ = frozenset(
    "shape dtype ndim size T at sharding weak_type aval nbytes itemsize keys".split()
)
_OF_DIALECTS = (
    "delimiter doublequote escapechar lineterminator quotechar quoting skipinitialspace strict"
).split()
# The user's code that names one of these may make another object of the class of one that it has.
# Of what packages make, a recording sees the constructors.
_OF_CLASSES = "__class__ __thisclass__ __self_class__ __mro__ mro __init__ classmethod"
MAKE_ANY = frozenset((MAKES_ANY, *_OF_CLASSES.split()))


def making(name: str) -> str:
    """What stands among the names that code reads for a call of the class with this name."""
    return f"{_MAKE}{name}"


def entering(method: str) -> str:
    """What stands among the names that code reads for a method that a trace has entered.

    Those that `dataclasses` and attrs generate show, compare or hash an object: nothing names them.
    """
    return f"{_ENTER}{method}"


_MAKE, _ENTER = _CALLED = ("make ", "enter ")
_MISSING = object()


def entered_among(names: Iterable[str]) -> set[str]:
    """The names that stand for a method that was entered."""
    return {name for name in names if name.startswith(_ENTER)}


_REPRS = (dataclasses.__file__, reprlib.__file__)


def _entered_with(function: types.FunctionType) -> types.CodeType:
    """The code that is entered if a function is called.

    The code that dataclasses put around a `__repr__`, against recursion, is the same for all.
    """
    if function.__code__.co_filename in _REPRS:
        function = getattr(function, "__wrapped__", function)
    return function.__code__


def _can_be_called(value: Any) -> bool:
    """Whether an attribute with this value can be called, as it is or as its `__get__` gives it."""
    return callable(value) or hasattr(type(value), "__get__")


class Trail(ABC):
    """What a walk has found so far.

    Args:
        root: the directory that the step's modules are imported from; files and paths in it are
            named relative to it.
    """

    def __init__(self, root: str = "") -> None:
        self.dependencies: dict[str, str] = {}  # Path and token of everything found.
        self.untrackable: dict[str, None] = {}  # What cannot be fingerprinted, in order.
        self.codes: set[types.CodeType] = set()  # The user's, among what was found.
        self.cells: dict[str, types.CellType] = {}  # Those of captured numbers, by path.
        # Modules of libraries that the user's code has as values, by name, and whether it asks them
        # for names that it computes.
        self.library_modules: dict[str, bool] = {}
        self.reader = ""  # The user's function that is being followed, if one is.
        self.imported: set[str] = set()  # Modules of packages that functions import.
        self._root = root
        self.confined = Confined()
        self._names: set[str] = set(_ALWAYS_READ)
        # Keys by which code subscripts what it finds under a name; see `Names.keys`.
        self._keys: dict[str, set[tuple[str, ...]]] = {}
        self._reads_all = self._makes_any = False
        # By name: path, value, and the identity of the owner if that is confined.
        self._waiting: dict[str, list[tuple[str, Any, int]]] = {}
        self._when_dynamic: dict[str, tuple[tuple[str, ...], int]] = {}
        self.seen: dict[int, str] = {}
        self.alive: list[Any] = []  # What is known by id must not be freed meanwhile.
        self._done: set[Hashable] = set()
        self._spaces: dict[int, str] = {}
        self._labels: dict[str, int] = {}
        self.todo: deque[Callable[[], None]] = deque()

    @abstractmethod
    def value(self, path: str, value: Any, way: Way | None = None) -> None:
        """Notes a value under a path, and what it is made of.

        Args:
            path: where it was found.
            value: what was found there.
            way: how code comes to it, if it does no more than to read attributes of it.
        """

    @abstractmethod
    def follow_class(self, cls: type) -> str:
        """Notes what instances of a class can do; returns the name of the class."""

    @abstractmethod
    def tree(self, path: str, tree: Any) -> None:
        """Notes the structure of a tree, with what its nodes keep beside their children."""

    def read_attributes(self, names: Iterable[str]) -> None:
        """Notes attributes of the user's objects that a library is known to read."""
        read = set(names)
        if READS_ANY in read:
            self._read_all()
        if KEEPS_OBJECTS in read:
            self.confined.let_all_go()
        self._add(read)

    def waiting(self, entered: Set[types.CodeType], of_jax: Container[int]) -> dict[str, bool]:
        """Attributes of the user's objects that no code of theirs names; whether one can be called.

        A library that used a method would have entered its code in the trace, so what was not
        entered is left out.

        Args:
            entered: the code that was.
            of_jax: JAX's code that may have been, by identity.
        """

        def may_be_used(value: Any) -> bool:
            function = function_in(value)
            code = None if function is None else _entered_with(function)
            return code is None or id(code) in of_jax or code in entered

        used = {
            name: [value for _, value, _ in found if may_be_used(value)]
            for name, found in self._waiting.items()
        }
        return {name: any(map(_can_be_called, values)) for name, values in used.items() if values}

    def read_of_modules(self, name: str) -> tuple[set[str], bool]:
        """The names that code may read of a library's module, and whether it may read any."""
        return self._names, self._reads_all or self.library_modules[name]

    def note(self, path: str, token: str) -> None:
        """Notes a dependency. A path that stands for something else already gets a number."""
        if self.dependencies.setdefault(path, token) != token:
            self.dependencies[self.unique(path)] = token

    def once(self, path: str, token: str) -> None:
        """Notes a dependency whose path can stand for nothing else."""
        self.dependencies[path] = token

    def blame(self, path: str, why: str) -> None:
        """Names something that cannot be fingerprinted."""
        self.untrackable[f"{path}: {why}"] = None

    def unique(self, label: str) -> str:
        """Numbers the functions that one line of code made with different captured values."""
        number = self._labels[label] = self._labels.get(label, int(label in self.dependencies)) + 1
        return label if number == 1 else f"{label}#{number}"

    def first_time(self, what: Hashable) -> bool:
        """Whether something has not been asked about before."""
        known = what in self._done
        self._done.add(what)
        return not known

    def later(self, task: Callable[[], None]) -> None:
        self.todo.append(task)

    def known_as(self, value: Any, path: str) -> None:
        """Says what to call an object when it is met again."""
        self.seen[id(value)] = path
        self.alive.append(value)

    def when_named(self, name: str, path: str, value: Any, owner: int = 0) -> None:
        """Notes an attribute as soon as code is found that names it.

        Args:
            name: by which code reads it.
            path: where it was found.
            value: what was found there.
            owner: the identity of the object whose attribute it is, if that is confined.
        """
        is_confined = owner in self.confined
        reads_all = self._makes_any if name.startswith(_CALLED) else self._reads_all
        is_read = reads_all or name in self._names
        if is_confined:
            is_read = name in self.confined.read
        keys = self._keys.get(name, ())
        if is_read or (keys and type(value) is not dict):
            self.value(path, value, (owner, name) if is_confined else None)
        else:
            self.alive.append(value)
            self._waiting.setdefault(name, []).append((path, value, owner))
            for each in sorted(keys):
                self.later(functools.partial(self.part, path, value, each))

    def part(self, path: str, value: Any, keys: tuple[str, ...], way: Way | None = None) -> None:
        """Notes what code finds in a value by keys; of others than dictionaries, all."""
        for key in keys:
            if type(value) is not dict:
                break
            path, value, way = f"{path}[{key!r}]", value.get(key, _MISSING), None
        if value is _MISSING:
            self.note(path, "absent")
        else:
            self.value(path, value, way)

    def settle_confined(self) -> bool:
        """Notes what is read of confined objects, and of those that are not; whether it is more."""
        gone = self.confined.settle()
        if gone or self._waiting.keys() & self.confined.read:
            owned = ((name, each[2]) for name, found in self._waiting.items() for each in found)
            self._release(
                name
                for name, owner in owned
                if owner in gone or (owner in self.confined and name in self.confined.read)
            )
            self._release_orders()
        return bool(self.todo)

    def when_dynamic(self, path: str, names: tuple[str, ...], owner: int = 0) -> None:
        """Notes an order of names as soon as code is found that may go through all of them."""
        self._when_dynamic[path] = names, owner
        self._release_orders()

    def reads_any_attribute(self, makes_any: bool = True) -> None:
        """Code was found that may read attributes which it does not name, of any object.

        Of code of a package's, a recording sees what it makes.
        """
        self.confined.let_all_go()
        if makes_any:
            self._make_any()
        self._read_all()

    def _make_any(self) -> None:
        if not self._makes_any:
            self._makes_any = True
            self._release(name for name in self._waiting if name.startswith(_CALLED))

    def _read_all(self) -> None:
        if not self._reads_all:
            self._reads_all = True
            self._release(self._waiting)
            self._release_orders()

    def _release_orders(self) -> None:
        for path, (names, owner) in list(self._when_dynamic.items()) if self._reads_all else ():
            if owner not in self.confined:
                self.note(path, digest(names))
                del self._when_dynamic[path]

    def add_names(self, names: Names) -> None:
        """Adds what code names."""
        if any(map(asks_numpy_for_now, names.codes)):
            self.check_pure(self.reader, NUMPYS_NOW)
        if names.is_dynamic:
            self.reads_any_attribute()
        self.confined.may_read(names)
        self._add(names.attributes - names.keys.keys() if names.keys else names.attributes)
        for name, keys in names.keys.items():
            self._add_keys(name, keys - self._keys.get(name, set()))

    def _add_keys(self, name: str, keys: set[tuple[str, ...]]) -> None:
        """Adds keys by which code subscripts what it finds under a name."""
        if not keys:
            return
        self._keys.setdefault(name, set()).update(keys)
        for found in self._waiting.pop(name, ()):
            self.when_named(name, *found)

    def _add(self, names: set[str]) -> None:
        new = names - self._names
        self._names |= new
        if not new.isdisjoint(MAKE_ANY):
            self._make_any()
        self._release(new & self._waiting.keys())

    def _release(self, names: Iterable[str]) -> None:
        """Looks later at what waits for names: they are read, of some object or of all."""
        for name in sorted(set(names)):
            for found in self._waiting.pop(name):
                self.later(functools.partial(self.when_named, name, *found))

    def distribution(self, module: str) -> None:
        """Notes the distribution that a module comes from, with its version."""
        if not self.first_time(("distribution", module.partition(".")[0])):
            return
        name, version = distribution_of(module)
        if version:
            self.once(f"package {name}", version)
        elif name not in sys.stdlib_module_names:
            self.blame(f"package {name}", "no installed distribution contains it")

    def check_pure(self, path: str, full_name: str) -> None:
        """Blames what gives another result in each run; notes what csv keeps for the process."""
        if full_name.startswith(("csv.", "_csv.")) and self.first_time("csv"):
            self._note_csv()
        why = why_impure(full_name)
        if why:
            self.blame(self.reader or path, why)

    def _note_csv(self) -> None:
        """Python's compiled code reads objects that are given to it as dialects."""
        import csv  # Few steps use it.

        self.read_attributes(_OF_DIALECTS)
        self.once("csv (limit)", str(csv.field_size_limit()))
        for name in csv.list_dialects():
            dialect = csv.get_dialect(name)
            found = (f"{each} {getattr(dialect, each)!r}" for each in _OF_DIALECTS)
            self.once(f"csv (dialects)[{name!r}]", ", ".join(found))

    def namespace(self, space: dict[str, Any], value: Any, module: str | None = None) -> str:
        """What to call the globals of a function, or those of a module: by file, each its own."""
        label = self._spaces.get(id(space)) if space else None
        if label is None:
            module = module or getattr(value, "__module__", None)
            code = getattr(value, "__code__", None)
            filename = code.co_filename if code is not None else None
            if filename is None or filename.startswith(("<string>", "<attrs generated ")):
                filename = getattr(sys.modules.get(module or ""), "__file__", None)
            label = file_label(filename, module) if filename else (module or "<cell>")
            if space:
                label = self._spaces[id(space)] = self.unique(label)
                self.alive.append(space)
        return label

    def place(self, path: str) -> str:
        """A path as text: relative to the step's own modules where it is among them."""
        if self._root and f"{path}{os.sep}".startswith(self._root + os.sep):
            return f"<source>{path.removeprefix(self._root)}"
        return repr(path)
