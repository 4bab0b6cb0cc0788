"""How a walk follows code: functions, what they captured, the globals and imports they name."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

from stepcache.fingerprint import instances, special_kinds, values
from stepcache.fingerprint.bytecode import (
    LOCAL_ACCESS,
    MAKES_ANY,
    UNSEEN,
    Import,
    Names,
    Read,
    module_aliases,
    names_of,
)
from stepcache.fingerprint.callers import CHECKS_TYPES
from stepcache.fingerprint.classes import (
    is_asked_for_part,
    is_foreign,
    is_of_fields,
    note_tested_class,
    note_unbound_method,
)
from stepcache.fingerprint.code_digests import code_digest, without_address
from stepcache.fingerprint.dependencies import IMPORT, IMPORTED
from stepcache.fingerprint.escapes import VARIABLE, way_to_captured
from stepcache.fingerprint.held import registered_with
from stepcache.fingerprint.instructions import needs_its_class_for_bases
from stepcache.fingerprint.modules_as_values import (
    OF_EACH,
    note_asked_module,
    note_library_module,
)
from stepcache.fingerprint.provenance import (
    INSTALLED,
    USER,
    file_label,
    file_of_module,
    origin_of,
    origin_of_module,
)
from stepcache.fingerprint.special_kinds import is_output
from stepcache.fingerprint.tokens import ATOMS, atom, plain_text, qualified_name
from stepcache.fingerprint.trail import Trail

_MISSING = object()
_NAMED = (types.FunctionType, types.BuiltinFunctionType, type)


def note_function(walk: Trail, path: str, function: types.FunctionType) -> None:
    """Notes a function: one of the user's by its code, one of a library by its name."""
    origin = origin_of(function)
    if origin == USER:
        space = walk.namespace(function.__globals__, function)
        label = walk.unique(f"{space}:{function.__qualname__}")
        walk.known_as(function, label)
        if path != label:
            walk.note(path, f"function {label}")
        walk.later(functools.partial(_follow, walk, label, function))
        return
    module = function.__globals__.get("__name__") or ""
    # A wrapper of a library calls itself by the name of what it wraps.
    name = f"{module}.{function.__code__.co_qualname}"
    walk.check_pure(path, name)
    if origin == INSTALLED and module:
        walk.distribution(module)
    if name == "logging.getLogger":
        walk.when_named(_ASKING_LOGGERS, "levels of loggers", special_kinds.levels_of_loggers())
    defaults = f", {plain_text(function.__defaults__)}" if function.__defaults__ else ""
    if function.__module__ == module and instances.found_by_name(function):
        walk.note(path, f"function {name}{defaults}")
        return
    if function.__code__.co_filename.startswith("<"):
        walk.codes.update(names_of(function.__code__).codes)
    # Made by a library for the user, as optax.adamw(rate) does: it captured what is the user's.
    walk.note(path, f"function {name} {code_digest(function.__code__)}")
    if registry := registered_with(function):  # Beside it is a cache, which calls fill.
        walk.value(f"{path}.registry", registry)
        return
    walk.later(functools.partial(_note_captured, walk, path, function))


def note_other_name(walk: Trail, path: str, value: Any) -> None:
    """Notes that code may call a `__getattr__` itself, and so with a computed name."""
    if type(value) is types.FunctionType and value.__code__.co_name == "__getattr__" not in path:
        walk.reads_any_attribute()


def _follow(walk: Trail, label: str, function: types.FunctionType) -> None:
    walk.reader = label
    names = names_of(function.__code__)
    walk.note(label, f"code {code_digest(function.__code__)}")
    walk.codes.update(names.codes)
    written = not function.__code__.co_filename.startswith("<")  # And not made by a library.
    unseen = (names.attributes if names.is_dynamic and written else names.loads) & UNSEEN.keys()
    for name in sorted(unseen):
        walk.blame(label, f"it reads {name}, and {UNSEEN[name]} are not fingerprinted")
    _note_captured(walk, label, function, names)
    if function.__dict__:
        walk.value(f"{label}.__dict__", dict(function.__dict__))
    written = function.__code__.co_name, function.__globals__.get("__name__")
    for name, own in zip(("__name__", "__module__"), written, strict=True):
        if (given := getattr(function, name)) != own:  # It was set since.
            walk.when_named(name, f"{label}.{name}", given)
    for read in names.reads:
        if read.kind == "global":
            _follow_global(walk, label, function, read, names)
    for imported in names.imports:
        package = function.__globals__.get("__package__") or ""
        _follow_module(walk, label, package, imported)
    for asked in names.asked:
        note_asked_module(walk, _module_asked(function, asked))
    if "isEnabledFor" in names.loads or "getEffectiveLevel" in names.loads:
        walk.read_attributes((_ASKING_LOGGERS,))
    if not is_of_fields(function):
        walk.add_names(names)


_ASKING_LOGGERS = "ask a logger"
"""Stands among the names that code reads for a question of the user's to a logger."""


def _note_captured(
    walk: Trail, label: str, function: types.FunctionType, names: Names | None = None
) -> None:
    parameters = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = function.__defaults__ or ()
    named = dict(zip(parameters[len(parameters) - len(defaults) :], defaults, strict=True))
    checks_types = function.__code__.co_filename.startswith(CHECKS_TYPES)
    for number, (name, value) in enumerate((named | (function.__kwdefaults__ or {})).items()):
        if checks_types and name == "__beartype_getrandbits":
            continue
        walk.value(f"{label} (default {without_address(number, name)})", value)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name == "fn_hash" and function.__code__.co_filename.endswith(_COUNTS_TRACES):
            continue  # A hash of the function's source: strings hash otherwise in each process.
        path = f"{label}, {name}"
        try:
            value = cell.cell_contents
        except ValueError:
            walk.note(path, "empty")
            continue
        if type(value) in (int, float):
            if names is not None and not _is_read(name, names):
                continue  # It is only counted on.
            walk.cells.setdefault(path, cell)
        for_bases = name == "__class__" and names and needs_its_class_for_bases(names.codes)
        if for_bases and _asks_python(function) and note_tested_class(walk, path, value):
            continue
        reads = _reads_of_captured(name, value, names)
        for read in reads:
            follow_chain(walk, path, value, read)
        if not reads and not (isinstance(value, types.ModuleType) and names is not None):
            walk.value(path, value, way_to_captured(name, names))


def _is_read(captured: str, names: Names) -> bool:
    reads = {read.name for read in names.reads if read.kind == "captured"}
    return captured in reads or not LOCAL_ACCESS.isdisjoint(names.attributes)


def _reads_of_captured(name: str, value: Any, names: Names | None) -> list[Read]:
    """How code reads a variable that it captured, where its whole value need not be followed."""
    by_key = type(value) is dict and names is not None and LOCAL_ACCESS.isdisjoint(names.attributes)
    if names is None or not (by_key or isinstance(value, types.ModuleType)):
        return []
    return [read for read in names.reads if read.kind == "captured" and read.name == name]


_COUNTS_TRACES = "/chex/_src/asserts.py"


def _follow_global(
    walk: Trail, label: str, function: types.FunctionType, read: Read, names: Names
) -> None:
    space = function.__globals__
    if read.tests and not _asks_python(function):
        read = dataclasses.replace(read, tests=False)
    if not walk.first_time((id(space), read)):
        return
    path = f"{walk.namespace(space, function)}:{read.name}"
    value = space.get(read.name, _MISSING)
    if value is _MISSING:
        value = function.__builtins__.get(read.name, _MISSING)  # Those of `exec` may be others.
        if value is not _MISSING:
            path = read.name
    if value is _MISSING:
        walk.note(path, "undefined")
    elif read.name == "__file__" and isinstance(value, str):
        walk.note(path, walk.place(value))
    elif value is builtins.hash and function.__name__ == "__hash__":
        walk.note(path, "builtin hash")  # Whoever calls that is the one to be blamed.
    elif value is builtins.id and function.__name__ == "__repr__":
        walk.note(path, "builtin id")  # `Lookup.untrackable_in` blames it where a trace comes by.
    elif read.name not in names.accessed and any(value is each for each in _BY_NAME):
        walk.note(path, f"builtin builtins.{value.__name__}")
    elif value is type and read.name == "type" and MAKES_ANY not in names.attributes:
        walk.note(path, "builtin builtins.type")  # Only to compare the classes of objects.
    else:
        if any(value is each for each in (builtins.globals, builtins.eval, builtins.exec)):
            _note_namespace(walk, function)
        follow_chain(walk, path, value, read)


_BY_NAME = (getattr, hasattr)


def _asks_python(function: types.FunctionType) -> bool:
    """Whether what a function calls under these names is Python's: nobody has replaced it."""
    return all(
        function.__globals__.get(each.__name__, function.__builtins__.get(each.__name__)) is each
        for each in (isinstance, issubclass, super)
    )


def _note_namespace(walk: Trail, function: types.FunctionType) -> None:
    space = function.__globals__
    label = walk.namespace(space, function)
    walk.note(f"{label} (order)", str([key for key in space if key not in OF_EACH]))
    for key, value in list(space.items()):
        if key not in OF_EACH and walk.first_time((id(space), Read("global", key, ()))):
            walk.value(f"{label}:{key}", value)


def follow_chain(walk: Trail, path: str, value: Any, read: Read) -> None:
    """Follows `module.module.name["key"]`: only that counts, not the modules or other keys."""
    remaining = list(read.attributes)
    while isinstance(value, types.ModuleType) and remaining:
        module, name = value, remaining.pop(0)
        space = vars(module)
        value = space.get(name, _MISSING)
        if value is _MISSING:
            value = getattr(module, name, _MISSING)
        is_users = origin_of_module(module.__name__) == USER
        if is_users:
            path = f"{walk.namespace(space, None, module.__name__)}:{name}"
            if name == "__dict__":
                walk.reads_any_attribute()
                value, remaining = module, []
            elif name not in space and "__getattr__" in space:
                walk.value(f"{path} (__getattr__)", space["__getattr__"])
        else:
            path = f"{module.__name__}.{name}"
            walk.check_pure(path, ".".join((path, *remaining)))
        if value is _MISSING:
            walk.note(path, "undefined")
            return
        if not is_users and not isinstance(value, types.ModuleType):
            _note_library_value(walk, path, module, value, remaining)
            return
    if isinstance(value, _NAMED) and origin_of(value) != USER:
        _check_what_is_asked_of(walk, path, value, remaining)
    if not isinstance(value, types.ModuleType):
        _check_standard_stream(walk, path, value)
    keys = read.keys if remaining in ([], ["get"]) else ()
    walk.confined.read.update(remaining)
    is_made = not is_asked_for_part(value, remaining) if remaining else not read.tests
    if is_made or not note_tested_class(walk, path, value):
        walk.part(path, value, keys, VARIABLE if remaining else None)


def _note_library_value(
    walk: Trail, path: str, module: types.ModuleType, value: Any, attributes: list[str]
) -> None:
    """Something found in a module of a library, by its name there."""
    if origin_of_module(module.__name__) == INSTALLED:
        walk.distribution(module.__name__)
    if attributes and isinstance(value, _NAMED):
        _check_what_is_asked_of(walk, path, value, attributes)
    if value is os.environ or value is os.environb or path == "sys.path":
        return  # What is read of it is recorded.
    if value is sys.modules:
        walk.blame(path, "it leads to modules that are not known beforehand")
    elif not attributes or is_known_kind(value) or is_foreign(value) or is_output(value):
        note_library_object(walk, path, value)
    else:
        walk.once(path, f"a {qualified_name(type(value))}")
        _check_standard_stream(walk, path, value)
        for name in attributes:
            value = getattr(value, name, _MISSING)
            path = f"{path}.{name}"
            if is_known_kind(value) or is_foreign(value):
                break
        if value is not _MISSING:
            note_library_object(walk, path, value)


def _check_what_is_asked_of(walk: Trail, path: str, value: Any, attributes: list[str]) -> None:
    """Checks a function or a class, or what is asked of it, under the name that it has itself."""
    walk.check_pure(path, ".".join((qualified_name(value), *attributes)))
    note_unbound_method(walk, value, attributes)


def _check_standard_stream(walk: Trail, path: str, value: Any) -> None:
    if type(value).__module__ in ("_io", "io") and not is_output(value):
        walk.blame(path, "it is a file, whose content is not known beforehand")


def is_known_kind(value: Any) -> bool:
    """A value that says itself what it is, and not only by what it does."""
    return type(value) in ATOMS or isinstance(value, _NAMED) or type(value) in values.HANDLERS


def note_library_object(walk: Trail, path: str, value: Any) -> None:
    """Notes an object of a library by its name where it has one, else as any value."""
    if callable(value) and not isinstance(value, _NAMED) and instances.found_by_name(value):
        walk.once(path, f"{type(value).__name__} {qualified_name(value)}")
    else:
        walk.value(path, value)


def _follow_module(walk: Trail, label: str, package: str, imported: Import) -> None:
    """Follows an import without making it: the step may never come to it."""
    try:
        name = importlib.util.resolve_name("." * imported.level + imported.module, package)
    except ImportError:
        walk.blame(label, f"it imports {imported.module}, which cannot be resolved")
        return
    if origin_of_module(name) == INSTALLED:
        walk.imported.add(name)
        walk.note(f"{IMPORTED}{name}", "in a function")
    module = sys.modules.get(name)
    named = ((each,) for each in imported.names if each != "*")
    chains = (*named, *imported.attributes)
    if module is None:
        if origin_of_module(name) == USER:
            _follow_source(walk, label, name)
        elif origin_of_module(name) == INSTALLED:
            walk.distribution(name)
        for chain in chains:
            walk.check_pure(label, ".".join((name, *chain)))
        return
    if origin_of_module(name) != USER:
        note_library_module(walk, module)
    if imported.whole or "*" in imported.names:
        walk.value(f"{IMPORT}{name}", module)
    for chain in chains:
        if not hasattr(module, chain[0]) and file_of_module(f"{name}.{chain[0]}"):
            _follow_source(walk, label, f"{name}.{chain[0]}")
        else:
            follow_chain(walk, f"{IMPORT}{name}", module, Read("global", name, chain))


_READS_OUTSIDE = frozenset("open environ environb getenv read_text read_bytes load stdin".split())


def _follow_source(walk: Trail, label: str, name: str) -> None:
    """Follows a module of the user's that is not loaded, by its source: a trace may import it."""
    package = name.rpartition(".")[0]
    if package and package not in sys.modules:
        _follow_source(walk, label, package)
    if not walk.first_time(("source", name)):
        return
    path = file_of_module(name)
    if path is None:
        walk.note(f"{IMPORT}{name}", "not found")
        return
    try:
        tree = ast.parse(Path(path).read_bytes(), path)
        code = compile(tree, path, "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError):
        walk.blame(label, f"it imports {name}, whose source cannot be read")
        return
    if not _READS_OUTSIDE.isdisjoint(code.co_names):
        walk.blame(label, f"it imports {name}, which may read files or the environment")
    names = names_of(code)
    space = file_label(path, name)
    walk.codes.update(names.codes)
    walk.note(f"{space}:<module>", f"code {code_digest(code)}")
    for inner in code.co_consts:  # The module's code covers it too, but has no name to report.
        if isinstance(inner, types.CodeType):
            walk.note(f"{space}:{inner.co_name}", f"code {code_digest(inner)}")
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            for target in node.targets:
                walk.note(f"{space}:{ast.unparse(target)}", atom(node.value.value))
    inside = name if Path(path).stem == "__init__" else package
    aliases = module_aliases(tree)
    for read in names.reads:
        if read.kind == "global" and read.name in aliases:
            level, module, chain = aliases[read.name]
            chain = (*chain, *read.attributes)
            imported = Import(level, module, (), (chain,) if chain else (), whole=not chain)
            _follow_module(walk, label, inside, imported)
        elif read.kind == "global" and (value := vars(builtins).get(read.name)) is not None:
            follow_chain(walk, read.name, value, read)
    for imported in names.imports:
        _follow_module(walk, label, inside, imported)
    if names.asked:
        walk.reads_any_attribute()
    walk.add_names(names)


def _module_asked(function: types.FunctionType, asked: Read) -> types.ModuleType | None:
    """The module that a function asks for names which it computes, if it is one."""
    value: Any = function.__globals__.get(asked.name)
    if asked.kind == "captured":
        try:
            place = function.__code__.co_freevars.index(asked.name)
            value = (function.__closure__ or ())[place].cell_contents
        except ValueError:  # It has no value yet.
            return None
    for name in asked.attributes:
        value = vars(value).get(name) if type(value) is types.ModuleType else None
    return value if type(value) is types.ModuleType else None
