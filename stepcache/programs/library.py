"""Whether an installed module is still what its distribution made it.

A distribution's version says what its code is, unless somebody edited a file or put something of
their own into a module: `flax.nnx.gelu = mine`. Both are looked for in those modules alone that a
trace entered.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from stepcache.programs.fingerprint import Walk, atom, is_foreign
from stepcache.programs.origin import INSTALLED, USER, file_digest, origin_of_file


def modules_of(codes: Iterable[types.CodeType]) -> list[str]:
    """The installed modules that some code objects come from."""
    files = {code.co_filename for code in codes}
    found = {
        module.__file__: name
        for name, module in list(sys.modules.items())
        if getattr(module, "__file__", None) in files and name != "__main__"
    }
    return sorted(name for file, name in found.items() if origin_of_file(file) == INSTALLED)


def note_modules(walk: Walk, modules: Iterable[str]) -> None:
    """Notes the content of installed modules: their files, and what was put into them since.

    A function of the user's is looked for in all modules of the distributions, since a module that
    only passes names on, such as `jax.nn`, is never entered.
    """
    modules = list(modules)
    for name in modules:
        module = sys.modules.get(name)
        walk.facts[f"module {name}"] = file_digest(_file_of(name, module))
        walk.distribution(name)
        if module is not None:  # One that is not loaded yet has nothing put into it.
            _note_namespace(walk, name, module)
    _note_foreign_functions(walk, {name.partition(".")[0] for name in modules})


def _note_foreign_functions(walk: Walk, packages: set[str]) -> None:
    library: dict[str, bool] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in packages:
            continue
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if type(value) is types.FunctionType:
                file = value.__code__.co_filename
                known = library.get(file)
                if known is None:
                    known = library[file] = not is_foreign(value)
                if not known:
                    walk.value(f"{name}.{attribute}", value)


def _file_of(name: str, module: types.ModuleType | None) -> str:
    if module is not None:
        return getattr(module, "__file__", None) or ""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return ""
    return (spec.origin if spec else None) or ""


def _note_namespace(walk: Walk, name: str, module: types.ModuleType) -> None:
    members: list[str] = []
    codes = list(_codes_in(module))
    read = {each for code in codes for each in code.co_names}
    # Counters, objects made late.
    varying = {each for code in codes for each in _names_stored_globally(code)}
    for attribute, value in sorted(vars(module).items()):
        if attribute in _UNTOLD or attribute.startswith("__") or attribute in varying:
            continue
        if isinstance(value, type) and value.__module__ == name and value.__name__ == attribute:
            _note_class(walk, value, members)
        if attribute not in read and getattr(value, "__name__", None) != attribute:
            # Under a name that the module's functions do not read, there may be the variable of a
            # loop over a set: a foreign function counts, another value may be any.
            if is_foreign(value):
                walk.value(f"{name}.{attribute}", value)
            continue
        text = _member(walk, f"{name}.{attribute}", value)
        if text:
            members.append(f"{attribute} {text}")
    walk.facts[f"names of {name}"] = hashlib.sha256("\n".join(members).encode()).hexdigest()[:16]


def _codes_in(module: types.ModuleType) -> Iterator[types.CodeType]:
    for value in list(vars(module).values()):
        members = list(vars(value).values()) if isinstance(value, type) else (value,)
        for member in members:
            code = getattr(getattr(member, "__wrapped__", member), "__code__", None)
            if isinstance(code, types.CodeType):
                yield code


def _note_class(walk: Walk, cls: type, members: list[str]) -> None:
    for attribute, value in sorted(vars(cls).items()):
        if not isinstance(value, type) and attribute not in _UNTOLD:
            text = _member(walk, f"{cls.__module__}.{cls.__qualname__}.{attribute}", value)
            if text:
                members.append(f"{cls.__qualname__}.{attribute} {text}")


def _member(walk: Walk, path: str, value: Any) -> str | None:
    """What a name stands for; None for what may well be another in each process."""
    kind = type(value)
    if kind in _PLAIN:
        return atom(value)
    if kind is not types.FunctionType:
        if kind in (list, dict, tuple, set, types.ModuleType):
            return None
        if is_foreign(value):
            walk.value(path, value)
            return None
        value = getattr(value, "__func__", None) or getattr(value, "__wrapped__", None) or value
        if isinstance(value, property):
            value = value.fget
        if isinstance(value, type | types.BuiltinFunctionType):
            return f"{getattr(value, '__module__', '')}.{value.__qualname__}"
        if not isinstance(value, types.FunctionType):
            return None
    elif origin_of_file(value.__code__.co_filename) == USER and is_foreign(value):
        walk.value(path, value)
        return None
    return f"{value.__module__}.{value.__qualname__}"


_UNTOLD = frozenset(("__doc__", "__module__", "__qualname__", "__firstlineno__"))
_PLAIN = frozenset((bool, int, float, str, bytes))


@functools.lru_cache(maxsize=4096)
def _names_stored_globally(code: types.CodeType) -> frozenset[str]:
    import dis

    store = dis.opmap["STORE_GLOBAL"]
    if store not in code.co_code[::2]:
        return frozenset()
    return frozenset(i.argval for i in dis.get_instructions(code) if i.opcode == store)
