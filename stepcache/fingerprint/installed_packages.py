"""Whether what a trace used of installed packages is still what it was.

A distribution's version says what its code is, unless somebody edited a file or put something of
their own into a module: `jax.nn.gelu = mine`. So the content of each module that a trace entered is
looked at, and what each name means that the code entered there reads of modules and classes.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import itertools
import operator
import re
import sys
import threading
import types
from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stepcache.fingerprint import instances
from stepcache.fingerprint.classes import is_foreign
from stepcache.fingerprint.held import CONTAINERS, Held, function_in, is_immutable
from stepcache.fingerprint.provenance import (
    INSTALLED,
    USER,
    file_of_module,
    origin_of,
    origin_of_file,
)
from stepcache.fingerprint.tokens import container_text, plain_text, qualified_name
from stepcache.fingerprint.values import TRUSTED
from stepcache.fingerprint.visitor import Walk
from stepcache.jaxcompat.hooks import REPLACED

# They keep counters and caches in their modules, which differ from process to process.
LATE = "put into "
"""Begins the names of dependencies that are there once another module has been imported."""
_WITH_STATE = frozenset(("jax", "jaxlib", "numpy", "stepcache"))


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


_reads: dict[int, _Read] = {}


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


_together: collections.OrderedDict[frozenset[int], Reads] = collections.OrderedDict()
_REMEMBERED = 32


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
            known = _together[key] = _put_together([_reads[id(code)] for code in installed])
            if len(_together) > _REMEMBERED:
                _together.popitem(last=False)
        return known


def _put_together(reads: list[_Read]) -> Reads:
    names: dict[str, set[str]] = {}
    for read in reads:
        for owner, each in read.names:
            names.setdefault(owner, set()).update(each)
    return Reads(
        sorted({read.module for read in reads if read.module is not None}),
        {owner: " ".join(sorted(each)) for owner, each in names.items()},
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
    program is lowered, and stepcache's own are nobody's to replace.
    """
    return module.partition(".")[0] in ("jaxlib", "stepcache")


def note_modules(walk: Walk, modules: Sequence[str], names: dict[str, str]) -> None:
    """Notes the content of installed modules, and what was put into them since.

    What one process has looked at once is not looked at again as long as it holds the same objects.
    A module that is not loaded is not imported: nothing can have been put into it.

    Args:
        walk: where to note it.
        modules: those that a trace entered.
        names: what it read of these and of others.
    """
    with _lock:
        if names:
            look_again()
        not_loaded = tuple(name for name in names if name not in sys.modules)
        key = (tuple(modules), tuple(names.items()), not_loaded)
        dependencies = _noted.get(key)
        if dependencies is None:
            notes = Walk()
            if not _note(notes, modules, names) or notes.untrackable:
                _note(walk, modules, names)
                return
            if len(_noted) >= _REMEMBERED:
                _noted.clear()
            dependencies = _noted[key] = notes.dependencies
        walk.dependencies.update(dependencies)


def _note(walk: Walk, modules: Iterable[str], names: dict[str, str]) -> bool:
    """See `note_modules`. Returns whether it stays so until something is found replaced."""
    for name in modules:
        walk.once(f"module {name}", _content(name).digest)
        walk.distribution(name)
        package = name.partition(".")[0]
        if package not in TRUSTED and _has_compiled_code(package):
            walk.blame(f"package {package}", "it has compiled code, which may read anything")
    lasting = True
    for name, read in names.items():
        module = sys.modules.get(name)
        if module is None:
            continue
        found = _states.get(name)
        if found is None:
            found = _states[name] = _ModuleState(name, module)
        lasting = found.note(walk, read) and lasting
    return lasting


def look_at_modules(modules: Iterable[str], names: dict[str, str]) -> None:
    """Looks at modules beforehand, so that `note_modules` finds them looked at."""
    note_modules(Walk(), [name for name in modules if name in sys.modules], names)


def _content(name: str) -> _Content:
    """What there is in the file that a module was, or would be, imported from."""
    with _lock:
        known = _contents.get(name)
        if known is None:
            path = getattr(sys.modules.get(name), "__file__", None) or file_of_module(name) or ""
            known = _contents[name] = _read(path)
        return known


class _Content(NamedTuple):
    """A digest of a module's file, and the globals that its own functions assign."""

    digest: str
    varying: frozenset[str]


def _read(path: str) -> _Content:
    try:
        content = Path(path).read_bytes() if path else b""
    except OSError:
        content = b""
    if not content:
        return _Content("absent", frozenset())
    varying = frozenset(_assigned_globals(content)) if path.endswith(".py") else frozenset()
    return _Content(hashlib.sha256(content).hexdigest()[:16], varying)


def _assigned_globals(source: bytes) -> Iterator[str]:
    """The names in the `global` statements of a module. They stand at the begin of a line."""
    at = source.find(_GLOBAL)
    while at >= 0:
        if not source[source.rfind(b"\n", 0, at) + 1 : at].strip():
            names = re.match(rb"[\w, ]*", source[at + len(_GLOBAL) :][:_LONGEST_STATEMENT])
            for name in names[0].split(b",") if names else ():
                yield name.strip().decode(errors="replace")
        at = source.find(_GLOBAL, at + 1)


_GLOBAL, _LONGEST_STATEMENT = b"global ", 1 << 12
_lock = threading.RLock()
_contents: dict[str, _Content] = {}


@functools.lru_cache(maxsize=256)
def _has_compiled_code(package: str) -> bool:
    return any(
        name.partition(".")[0] == package
        and (getattr(module, "__file__", None) or "").endswith((".so", ".pyd"))
        for name, module in list(sys.modules.items())
    )


class _Notes:
    """Stands in for a walk while a name is looked at, and keeps what it is told."""

    def __init__(self) -> None:
        self.dependencies: dict[str, str] = {}
        self.values: list[tuple[str, Any]] = []

    def once(self, path: str, text: str) -> None:
        self.dependencies[path] = text

    def value(self, path: str, value: Any) -> None:
        self.values.append((path, value))


class _Meaning(NamedTuple):
    """What a name of a module means.

    Attributes:
        texts: the parts of it.
        dependencies: what is worth a dependency of its own.
        values: path and value of what is the user's and has to be followed.
    """

    texts: tuple[str, ...]
    dependencies: dict[str, str]
    values: list[tuple[str, Any]]


class _ModuleState:
    """What this process knows of the names in one installed module.

    Args:
        name: of the module.
        module: the module.
    """

    def __init__(self, name: str, module: types.ModuleType):
        self.module = module
        self._name, self._space = name, vars(module)
        self._has_state = name.partition(".")[0] in _WITH_STATE
        self._forget()

    def _forget(self) -> None:
        self.held = Held()
        self._meanings: dict[str, _Meaning] = {}
        self._unsteady: set[str] = set()
        self._names: list[str] = []
        self._values: list[Any] = []
        self._digests: dict[str, str] = {}
        self._notable: dict[str, tuple[_Meaning, ...]] = {}

    def note(self, walk: Walk, read: str) -> bool:
        """Notes what some names of the module mean, given with spaces between.

        To be called after `look_again`.

        Returns:
            Whether that lasts until something is found replaced.
        """
        for name in self._unsteady:
            self._meanings.pop(name, None)
        self._unsteady.clear()
        known = self._digests.get(read)
        if known is None:
            names = read.split()
            self._look_at([name for name in names if name not in self._meanings])
            meanings = [self._meanings[name] for name in names]
            known = _digest(text for meaning in meanings for text in meaning.texts)
            notable = tuple(each for each in meanings if each.dependencies or each.values)
            if self._unsteady.isdisjoint(names):
                self._digests[read], self._notable[read] = known, notable
        else:
            notable = self._notable[read]
        for meaning in notable:
            walk.dependencies.update(meaning.dependencies)
            for path, value in meaning.values:
                walk.value(path, value)
        walk.once(f"names of {self._name}", known)
        return read in self._digests and not any(meaning.values for meaning in notable)

    def look(self) -> None:
        """Looks at all names anew where some object was replaced: a cache may just have grown."""
        global _replacements
        if self.has_its_names() and self.held.is_same():
            return
        before = self._meanings
        self._forget()
        self._look_at(before)
        _replacements += any(self._meanings[name] != before[name] for name in before)

    def has_its_names(self) -> bool:
        """Whether its names are those of the same objects as before."""
        found = map(self._space.get, self._names, itertools.repeat(_GONE))
        return all(map(operator.is_, found, self._values))

    def _look_at(self, names: Iterable[str]) -> None:
        """Finds out what names mean, and holds on to what that was told by."""
        held = Held()
        held.hold([self._space[name] for name in names if self._find_meaning(name)])
        self.held.add(held)
        _all_held.add(held)

    def _find_meaning(self, name: str) -> bool:
        """Finds out what a name means. Returns whether to hold on to its value."""
        notes: Any = _Notes()
        value = self._space.get(name, _GONE)
        kinds: Any = (types.FunctionType, type, types.ModuleType)
        fixed = isinstance(value, kinds) and value.__name__.endswith(name)  # Its definition.
        varies = not fixed and name in _content(self._name).varying
        if self._has_state and (varies or (self._name, name) in REPLACED):
            self._meanings[name] = _Meaning((f"{name} varies",), {}, [])
            return False
        self._names.append(name)
        self._values.append(value)
        if value is _GONE:
            self._meanings[name] = _Meaning((f"{name} gone",), {}, [])
            return False
        path = f"{self._name}.{name}"
        text = _meaning(notes, path, value, self._has_state)
        texts = [f"{name} {text}"]
        if isinstance(value, type):
            texts.append(_told_class(notes, value, self._has_state))
        elif _is_told(name, value, text, self._name.partition(".")[0]):
            notes.once(path, text)
        self._meanings[name] = _Meaning(tuple(texts), notes.dependencies, notes.values)
        if not self._is_steady(value):
            self._unsteady.add(name)
            return False
        return True

    def _is_steady(self, value: Any) -> bool:
        """Whether `hold` sees everything that could change what a value means."""
        if self._has_state:
            return True
        values = [each for _, each in _members(value)] if isinstance(value, type) else [value]
        return all(map(_is_held_whole, values))


_states: dict[str, _ModuleState] = {}
_all_held = Held()
_noted: dict[Hashable, dict[str, str]] = {}
_replacements = 0


def look_again() -> None:
    """Looks at all that was looked at before."""
    global _all_held, _replacements
    with _lock:
        others = [name for name in _states if sys.modules.get(name) is not _states[name].module]
        for name in others:
            del _states[name]
        _replacements += len(others)
        names_hold = all(map(_ModuleState.has_its_names, _states.values()))
        if not others and names_hold and _all_held.is_same():
            return
        _noted.clear()
        for state in _states.values():
            state.look()
        _all_held = Held()
        for state in _states.values():
            _all_held.add(state.held)


def replacements() -> int:
    """Rises whenever something in an installed module has been found replaced."""
    return _replacements


_GONE = object()


def _is_held_whole(value: Any) -> bool:
    """Whether a value is what it is called; and not an object whose attributes may be set."""
    kinds: Any = (
        types.ModuleType,
        staticmethod,
        classmethod,
        property,
        *CONTAINERS,
        *_DESCRIPTORS,
    )
    if plain_text(value) is not None or callable(value) or isinstance(value, kinds):
        return True
    kind = type(value)  # A mere mark has neither attributes nor slots.
    return not kind.__dictoffset__ and kind.__basicsize__ == object.__basicsize__


_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)
_WRITTEN_IN_C = frozenset(
    (
        *_DESCRIPTORS,
        types.MethodDescriptorType,
        types.WrapperDescriptorType,
        types.ClassMethodDescriptorType,
    )
)


def _is_told(attribute: str, value: Any, text: str, package: str) -> bool:
    """Whether a name is a dependency of its own: the user can change it, or it was changed."""
    if callable(value):
        return not text.endswith(attribute) and hasattr(value, "__qualname__")
    return package not in TRUSTED and not isinstance(value, types.ModuleType)


def _members(cls: type) -> list[tuple[str, Any]]:
    """What a class has of its own. To look at its annotations may give it empty ones."""
    return [
        (name, value)
        for name, value in vars(cls).items()
        if name not in _UNTOLD and (value or name != "__annotations__")
    ]


def _told_class(walk: Any, cls: type, has_state: bool) -> str:
    if is_immutable(cls):
        return "immutable"
    texts = []
    name = f"{cls.__module__}.{cls.__qualname__}"
    for attribute, value in sorted(_members(cls)):
        if type(value) in _WRITTEN_IN_C:
            texts.append(f"{attribute} {value.__objclass__.__qualname__}.{value.__name__}")
            continue
        text, function = _name_of_function(value), function_in(value)
        is_own = function is not None and function.__module__ == cls.__module__
        if is_own and text is not None and text.endswith(attribute):
            texts.append(f"{attribute} {text}")  # Most are such.
            continue
        if text is None:
            if isinstance(value, type):
                continue
            text = _meaning(walk, f"{name}.{attribute}", value, has_state)
        if has_state and _is_of_another_module(value, cls) and text != "the user's":
            # Put there by another module of the package, as jax.shard_map's does when imported.
            walk.once(f"{LATE}{name}.{attribute}", text)
            continue
        texts.append(f"{attribute} {text}")
        if attribute.startswith("_"):
            worth = not (has_state or attribute.startswith("__")) and plain_text(value) is not None
        elif type(value) is types.FunctionType:
            worth = not text.endswith(f".{attribute}")
        else:
            worth = not has_state and plain_text(value) is not None
        if worth:
            walk.once(f"{name}.{attribute}", text)
    return _digest(texts)


def _is_of_another_module(value: Any, cls: type) -> bool:
    if type(value) is not types.FunctionType or value.__module__ == cls.__module__:
        return False
    package, own = (str(each.__module__).partition(".")[0] for each in (value, cls))
    return package == own


def _digest(texts: Iterable[str]) -> str:
    """A digest of texts without line breaks."""
    return hashlib.sha256("\n".join(texts).encode(errors="surrogatepass")).hexdigest()[:16]


def _name_of_function(value: Any) -> str | None:
    """The name of a function, method or property that is an installed package's own, or None.

    The usual case, fast.
    """
    function = function_in(value)
    if function is None or (function is not value and function.__dict__):
        return None
    filename = function.__code__.co_filename
    if filename.startswith("<") or origin_of_file(filename) == USER:
        return None
    name = _name_with_defaults(function)
    return name if function is value else f"{type(value).__name__} {name}"


def _name_with_defaults(function: types.FunctionType) -> str:
    defaults = plain_text(function.__defaults__) if function.__defaults__ else None
    return f"{defaults or ''}{function.__module__}.{function.__qualname__}"


def _meaning(walk: Any, path: str, value: Any, has_state: bool) -> str:
    """What a name stands for, as far as that is the same in each process."""
    if (name := _name_of_function(value)) is not None:
        return name
    kind = type(value)
    if kind is types.FunctionType:
        if is_foreign(value):
            walk.value(path, value)
            return "the user's"
        return _name_with_defaults(value)
    if kind is types.ModuleType:
        return value.__name__
    if (text := plain_text(value)) is not None:
        return text
    if kind in CONTAINERS:
        return _meaning_of_container(walk, path, value, has_state)
    if is_foreign(value):
        walk.value(path, value)
        return "the user's"
    if callable(value) or isinstance(value, staticmethod | classmethod | property):
        return _meaning_of_callable(walk, path, value)
    if has_state or origin_of(kind) == USER:
        return kind.__qualname__
    state = instances.attributes_of(value)
    texts = [f"{name} {container_text(each)}" for name, each in state.items()]
    return f"{kind.__qualname__} {_digest(texts)}"


def _meaning_of_container(walk: Walk, path: str, value: Any, has_state: bool) -> str:
    if not has_state and (text := container_text(value)) is not None:
        return text
    each_value = list(value.values()) if isinstance(value, dict) else list(value)
    for number, each in enumerate(each_value):
        if type(each) is types.FunctionType and is_foreign(each):
            walk.value(f"{path}[{number}]", each)
    return type(value).__name__


def _meaning_of_callable(walk: Walk, path: str, value: Any) -> str:
    """A function in some wrapping: by its name where it has one, and what the user put into it."""
    inner: Any = value
    for _ in range(8):
        state = getattr(inner, "__dict__", None) or {}
        following = (
            getattr(inner, "func", None)
            or getattr(inner, "__func__", None)
            or (inner.fget if isinstance(inner, property) else None)
            or state.get("__wrapped__")
            or getattr(inner, "__wrapped__", None)
        )
        if following is None or following is inner:
            break
        inner = following
        if is_foreign(inner):
            walk.value(path, value)
            return "the user's"
    if isinstance(value, functools.partial):
        given: tuple[Any, ...] = (*value.args, *value.keywords.values())
        if any(is_foreign(each) for each in given):
            walk.value(path, value)
        texts = (container_text(each) or qualified_name(each) for each in given)
        return f"partial of {qualified_name(inner)} {tuple(value.keywords)} {_digest(texts)}"
    kind = type(value).__qualname__
    return f"{kind} {getattr(inner, '__module__', '')}.{getattr(inner, '__qualname__', kind)}"


_UNTOLD = frozenset(
    "__doc__ __module__ __qualname__ __firstlineno__ __slotnames__ _abc_impl".split()
)
