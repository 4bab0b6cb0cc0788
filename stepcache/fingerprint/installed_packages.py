"""Whether what a trace used of installed packages is still what it was.

A distribution's version identifies its code, unless a file was edited or a module was patched:
`jax.nn.gelu = mine`. So each module that a trace entered is identified by its content, and each
name that the entered code reads from modules and classes by what the name means.
"""

from __future__ import annotations

import functools
import itertools
import operator
import sys
import threading
import types
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

from stepcache.fingerprint.dependencies import NAMES_OF
from stepcache.fingerprint.held import Held
from stepcache.fingerprint.known_packages import IN_EACH_TRACE, OF_JAX, WITH_KNOWN_COMPILED_CODE
from stepcache.fingerprint.module_contents import content_of, was_read_after_ns
from stepcache.fingerprint.name_meanings import (
    Meaning,
    class_text,
    is_held_whole,
    is_own_dependency,
    members_of,
    text_of,
)
from stepcache.fingerprint.provenance import file_of_module
from stepcache.fingerprint.tokens import digest
from stepcache.fingerprint.visitor import Walk
from stepcache.jaxcompat.hooks import REPLACED

_GONE = object()


def note_modules(walk: Walk, modules: Iterable[str], names: dict[str, str]) -> None:
    """Notes the content of installed modules, and what was put into them since.

    What one process has looked at once is not looked at again as long as it holds the same objects.
    A module that is not loaded is not imported: nothing can have been put into it.

    Args:
        walk: where to note it.
        modules: those that a trace entered.
        names: what it read of these and of others.
    """
    modules = tuple(modules)
    with _lock:
        if names:
            look_again()
        used = modules, tuple(names.items())
        known = _noted.get(used)
        if known:
            walk.dependencies |= known
            return
        is_steady = _note(walk, modules, names)
        if len(_noted) >= _NOTED:
            _noted.clear()
        _noted[used] = _noted_alone(*used) if known is not None and is_steady else {}


def _noted_alone(modules: Iterable[str], names: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The dependencies that `note_modules` adds; none where they cannot be fingerprinted."""
    alone = Walk()
    _note(alone, modules, dict(names))
    return {} if alone.untrackable else alone.dependencies


def _note(walk: Walk, modules: Iterable[str], names: dict[str, str]) -> bool:
    """See `note_modules`; whether it would do the same again as long as nothing is replaced."""
    is_plain = True
    for name in modules:
        content = content_of(name)
        walk.once(f"module {name}", content.digest)
        if content.written_ns > was_read_after_ns(name) and name in sys.modules:
            walk.blame(f"module {name}", "its file was written to since this process began")
        walk.distribution(name)
        package = name.partition(".")[0]
        if package not in WITH_KNOWN_COMPILED_CODE and _has_compiled_code(package):
            walk.blame(f"package {package}", "it has compiled code, which may read anything")
    for name, read in names.items():
        module = sys.modules.get(name)
        if module is None:
            is_plain = False
            continue
        if name not in _states:
            _states[name] = _ModuleState(name, module)
        is_plain &= _states[name].note(walk, read)
    return is_plain


def look_at_modules(modules: Iterable[str], names: dict[str, str]) -> None:
    """Examines modules in advance; `note_modules` then uses the result.

    Leaves out those that another thread is importing: they have not all of their names yet.
    """
    names = {name: read for name, read in names.items() if _is_imported(name)}
    note_modules(Walk(), filter(_is_imported, modules), names)


def _is_imported(name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return spec is not None and not getattr(spec, "_initializing", False)


@functools.lru_cache(maxsize=256)
def _has_compiled_code(package: str) -> bool:
    return any(
        name.partition(".")[0] == package
        and (getattr(module, "__file__", None) or "").endswith((".so", ".pyd"))
        for name, module in sys.modules.copy().items()
    )


def kept_for_this_thread(names: dict[str, str]) -> dict[str, str]:
    """The dependencies among some names of modules that hold something else in each thread."""
    found = {}
    with _lock:
        for module in _keep_for_threads.intersection(names, _states):
            for meaning in _states[module].known(names[module]):
                found |= meaning.in_this_thread()
    return found


class _ModuleState:
    """What this process knows of the names in one installed module."""

    def __init__(self, name: str, module: types.ModuleType):
        self.module = module
        self._name, self._space = name, vars(module)
        self._has_state = name.partition(".")[0] in IN_EACH_TRACE
        self._forget()

    def _forget(self) -> None:
        self.held: list[Held] = []
        self._meanings: dict[str, Meaning] = {}
        self._unsteady: set[str] = set()
        self._values: dict[str, Any] = {}
        self._known: dict[str, tuple[str, list[Meaning]]] = {}

    def note(self, walk: Walk, read: str) -> bool:
        """Notes what some names of the module mean, given with spaces between.

        To be called after `look_again`. Returns whether it would do the same again as long as
        nothing is replaced.
        """
        for name in self._unsteady:
            self._meanings.pop(name, None)
        self._unsteady.clear()
        known = self._known.get(read)
        if known is None:
            names = read.split()
            self._look_at([name for name in names if name not in self._meanings])
            meanings = [self._meanings[name] for name in names]
            token = digest(meaning.text for meaning in meanings)
            known = token, [e for e in meanings if e.dependencies or e.values or e.locals]
            if self._unsteady.isdisjoint(names):
                self._known[read] = known
        token, notable = known
        for meaning in notable:
            walk.dependencies.update(meaning.dependencies)
            if meaning.locals:
                walk.dependencies.update(meaning.in_this_thread())
            for path, value in meaning.values:
                walk.value(path, value)
        walk.once(f"{NAMES_OF}{self._name}", token)
        return not (self._unsteady or any(each.values or each.locals for each in notable))

    def known(self, read: str) -> list[Meaning]:
        """What some names meant when they were last looked at; of most there is nothing to say."""
        if read in self._known:
            return self._known[read][1]
        return [self._meanings[name] for name in read.split() if name in self._meanings]

    def look(self) -> None:
        """Looks at all names anew where some object was replaced: a cache may just have grown."""
        global _replacements
        if self.has_its_names() and all(each.is_same() for each in self.held):
            return
        before = self._meanings
        self._forget()
        self._look_at(before)
        if self._name.partition(".")[0] in OF_JAX:
            _replacements += any(self._meanings[name] != before[name] for name in before)

    def has_its_names(self) -> bool:
        """Whether its names are those of the same objects as before."""
        found = map(self._space.get, self._values, itertools.repeat(_GONE))
        return all(map(operator.is_, found, self._values.values()))

    def _look_at(self, names: Iterable[str]) -> None:
        """Determines what names mean, and keeps the objects that this was derived from."""
        held = Held()
        try:
            varying = content_of(self._name).varying
            found = {name: self._look_up(name, varying) for name in names}
            held.hold([self._space[name] for name, (_, holds) in found.items() if holds])
        except BaseException:
            _classes.clear()  # Some of them may not be held.
            raise
        self.held.append(held)
        _added.append(held)
        self._meanings |= {name: meaning for name, (meaning, _) in found.items()}
        if any(meaning.locals for meaning, _ in found.values()):
            _keep_for_threads.add(self._name)

    def _look_up(self, name: str, varying: frozenset[str]) -> tuple[Meaning, bool]:
        """What a name means, and whether to hold on to its value.

        `varying` are the globals that the module's own functions assign.
        """
        value = self._space.get(name, _GONE)
        kinds: Any = (types.FunctionType, type, types.ModuleType)
        fixed = issubclass(type(value), kinds) and value.__name__.endswith(name)  # Its definition.
        varies = not fixed and name in varying
        meaning = Meaning()
        if self._has_state and (varies or (self._name, name) in REPLACED):
            meaning.text = f"{name} varies"
            return meaning, False
        self._values[name] = value
        if value is _GONE:
            # A module that is imported meanwhile, as by the trace, is what it would have been.
            is_module = file_of_module(f"{self._name}.{name}") is not None
            meaning.text = f"{name} {self._name}.{name}" if is_module else f"{name} gone"
            return meaning, False
        path = f"{self._name}.{name}"
        text = text_of(meaning, path, value, self._has_state)
        meaning.text = f"{name} {text}"
        if issubclass(type(value), type):
            of_class = _meaning_of_class(value, self._has_state)
            meaning.text += f"\n{of_class.text}"
            meaning.add(of_class)
        elif is_own_dependency(name, value, text, self._name.partition(".")[0]):
            meaning.once(path, text)
        is_steady = self._is_steady(value)
        if not is_steady:
            self._unsteady.add(name)
        return meaning, is_steady

    def _is_steady(self, value: Any) -> bool:
        """Whether `hold` sees everything that could change what a value means."""
        if self._has_state:
            return type(value) is not ContextVar
        values = (
            [each for _, each in members_of(value)] if issubclass(type(value), type) else [value]
        )
        return all(map(is_held_whole, values))


def _meaning_of_class(cls: type, has_state: bool) -> Meaning:
    """What a class means, determined once as long as nothing is replaced: many modules import it.

    Of packages without state, what a class means may vary unnoticed.
    """
    if has_state and id(cls) in _classes:  # `jnp.int64` and `np.int64` are equal.
        return _classes[id(cls)][1]
    meaning = Meaning()
    meaning.text = class_text(meaning, cls, has_state)
    if has_state:
        _classes[id(cls)] = (cls, meaning)
    return meaning


_classes: dict[int, tuple[type, Meaning]] = {}
_lock = threading.RLock()
# By what steps use: steps that use nothing but JAX's code use the same again and again. Empty where
# it was noted once, or varies.
_noted: dict[Any, dict[str, str]] = {}
_NOTED = 32
_states: dict[str, _ModuleState] = {}
_keep_for_threads: set[str] = set()  # Modules that hold something else in each thread, or did.
_all_held = Held()
_added: list[Held] = []  # They are added to `_all_held` when it is next asked for.
_replacements = 0


def look_again() -> None:
    """Looks at all that was looked at before."""
    global _all_held, _replacements
    with _lock:
        others = [name for name in _states if sys.modules.get(name) is not _states[name].module]
        for name in others:
            del _states[name]
        _replacements += sum(name.partition(".")[0] in OF_JAX for name in others)
        is_same = all(each.is_same() for each in _added)
        while _added:
            _all_held.add(_added.pop())
        is_same &= all(map(_ModuleState.has_its_names, _states.values()))
        if not others and is_same and _all_held.is_same():
            return
        _classes.clear()
        _noted.clear()
        for state in _states.values():
            state.look()
        _all_held = Held()
        _added[:] = [each for state in _states.values() for each in state.held]


def replacements() -> int:
    """Rises whenever something in a module of JAX has been found replaced."""
    return _replacements
