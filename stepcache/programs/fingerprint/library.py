"""Whether what a trace used of installed packages is still what it was.

A distribution's version says what its code is, unless somebody edited a file or put something of
their own into a module: `jax.nn.gelu = mine`. So the content of each module that a trace entered is
looked at, and what each name means that the code entered there reads of modules and classes.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import operator
import sys
import types
import weakref
from collections.abc import Iterable
from typing import Any

from stepcache.programs.fingerprint import instances
from stepcache.programs.fingerprint.classes import is_foreign
from stepcache.programs.fingerprint.origin import (
    INSTALLED,
    USER,
    file_digest,
    origin_of,
    origin_of_file,
)
from stepcache.programs.fingerprint.tokens import container_text, digest, plain_text, qualified_name
from stepcache.programs.fingerprint.values import TRUSTED
from stepcache.programs.fingerprint.walk import Walk

# They keep counters and caches in their modules, which differ from process to process.
_WITH_STATE = frozenset(("jax", "jaxlib", "numpy", "stepcache"))


def names_read(codes: Iterable[types.CodeType]) -> dict[str, list[str]]:
    """The installed modules that some code objects come from, and what these read of modules.

    Returns:
        names by module; a module that no code was entered of is there only for its names.
    """
    by_file = _modules_by_file()
    found: dict[str, set[str]] = {}
    for code in codes:
        name = by_file.get(code.co_filename)
        if name is None or origin_of_file(code.co_filename) != INSTALLED or _is_compiler(name):
            continue
        read = found.setdefault(name, set())
        read.add(code.co_qualname.partition(".")[0])
        _add_names(found, name, vars(sys.modules[name]), code.co_names, 3)
    return {name: sorted(read & vars(sys.modules[name]).keys()) for name, read in found.items()}


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
        if type(value) is types.ModuleType and _is_compiler(value.__name__):
            continue
        if name in space and not name.startswith("__"):
            found.setdefault(owner, set()).add(name)
        if type(value) is types.ModuleType and depth and value.__name__ in sys.modules:
            file = getattr(value, "__file__", None)
            if file and origin_of_file(file) == INSTALLED:
                _add_names(found, value.__name__, vars(value), names, depth - 1)


def _is_compiler(module: str) -> bool:
    """jaxlib's bindings are loaded bit by bit while a program is lowered."""
    return module.partition(".")[0] == "jaxlib"


def entered_modules(codes: Iterable[types.CodeType]) -> list[str]:
    """The installed modules that some code objects come from."""
    by_file = _modules_by_file()
    files = {code.co_filename for code in codes}
    return sorted(
        by_file[file] for file in files if file in by_file and origin_of_file(file) == INSTALLED
    )


def note_modules(walk: Walk, modules: Iterable[str], names: dict[str, list[str]]) -> None:
    """Notes the content of installed modules, and what was put into them since.

    Args:
        walk: where to note it.
        modules: those that a trace entered.
        names: what it read of these and of others.
    """
    for name in modules:
        module = sys.modules.get(name)
        walk.once(f"module {name}", file_digest(_file_of(name, module)))
        walk.distribution(name)
        package = name.partition(".")[0]
        if package not in TRUSTED and _has_compiled_code(package):
            walk.blame(f"package {package}", "it has compiled code, which may read anything")
    told: dict[type, str] = {}
    for name, read in names.items():
        try:
            module = sys.modules.get(name) or importlib.import_module(name)
        except ImportError:
            walk.once(f"names of {name}", "cannot be imported")
            continue
        _note_names(walk, name, module, read, told)


def _file_of(name: str, module: types.ModuleType | None) -> str:
    if module is not None:
        return getattr(module, "__file__", None) or ""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return ""
    return (spec.origin if spec else None) or ""


@functools.lru_cache(maxsize=256)
def _has_compiled_code(package: str) -> bool:
    return any(
        name.partition(".")[0] == package
        and (getattr(module, "__file__", None) or "").endswith((".so", ".pyd"))
        for name, module in list(sys.modules.items())
    )


def _note_names(
    walk: Walk, name: str, module: types.ModuleType, read: list[str], told: dict[type, str]
) -> None:
    space = vars(module)
    package = name.partition(".")[0]
    has_state = package in _WITH_STATE
    varying = _varying_names(name) if has_state else ()
    members: list[str] = []
    for attribute in read:
        if attribute in varying or attribute not in space:
            members.append(f"{attribute} varies" if attribute in varying else f"{attribute} gone")
            continue
        value = space[attribute]
        path = f"{name}.{attribute}"
        text = _meaning(walk, path, value, has_state)
        members.append(f"{attribute} {text}")
        if isinstance(value, type):
            if value not in told:
                told[value] = _meaning_of_class(walk, value, has_state)
            members.append(told[value])
        elif _is_told(attribute, value, text, package):
            walk.once(path, text)
    walk.once(f"names of {name}", digest(members))


def _is_told(attribute: str, value: Any, text: str, package: str) -> bool:
    """Whether a name is worth a fact of its own: what is the user's to change, or was changed."""
    if callable(value):
        return not text.endswith(attribute) and hasattr(value, "__qualname__")
    return package not in TRUSTED and not isinstance(value, types.ModuleType)


_FIXED = frozenset(
    (
        *(bool, int, float, str, bytes, type(None), types.FunctionType, type),
        *(property, staticmethod, classmethod, types.MemberDescriptorType),
        *(types.GetSetDescriptorType, types.WrapperDescriptorType, types.MethodDescriptorType),
    )
)
# What a class meant, with the members that it had then, which are kept so that none is mistaken.
_known: weakref.WeakKeyDictionary[type, tuple[list[Any], str]] = weakref.WeakKeyDictionary()


def _meaning_of_class(walk: Walk, cls: type, has_state: bool) -> str:
    members = [value for _, value in _members(cls)]
    known = _known.get(cls)
    same = known is not None and len(known[0]) == len(members)
    if known is not None and same and all(map(operator.is_, known[0], members)):
        return known[1]
    facts = len(walk.facts)
    text = _told_class(walk, cls, has_state)
    if len(walk.facts) == facts and all(type(each) in _FIXED for each in members):
        _known[cls] = (members, text)
    return text


def _members(cls: type) -> list[tuple[str, Any]]:
    """What a class has of its own. To look at its annotations may give it empty ones."""
    return [
        (name, value)
        for name, value in vars(cls).items()
        if name not in _UNTOLD and (value or name != "__annotations__")
    ]


def _told_class(walk: Walk, cls: type, has_state: bool) -> str:
    texts = []
    for attribute, value in sorted(_members(cls)):
        if isinstance(value, type):
            continue
        path = f"{cls.__module__}.{cls.__qualname__}.{attribute}"
        text = _meaning(walk, path, value, has_state)
        texts.append(f"{attribute} {text}")
        told = isinstance(value, types.FunctionType) and not attribute.startswith("_")
        if (told and not text.endswith(f".{attribute}")) or (
            not has_state and plain_text(value) is not None and not attribute.startswith("__")
        ):
            walk.once(path, text)
    return digest(texts)


def _meaning(walk: Walk, path: str, value: Any, has_state: bool) -> str:
    """What a name stands for, as far as that is the same in each process."""
    kind = type(value)
    if kind is types.FunctionType:
        if is_foreign(value):
            walk.value(path, value)
            return "the user's"
        defaults = plain_text(value.__defaults__ or ()) or ""
        return f"{defaults.removesuffix('()')}{value.__module__}.{value.__qualname__}"
    if (text := plain_text(value)) is not None:
        return text
    if kind is types.ModuleType:
        return value.__name__
    if kind in (dict, list, set, frozenset, tuple):
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
    return f"{kind.__qualname__} {digest(texts)}"


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
        return f"partial of {qualified_name(inner)} {tuple(value.keywords)} {digest(texts)}"
    kind = type(value).__qualname__
    return f"{kind} {getattr(inner, '__module__', '')}.{getattr(inner, '__qualname__', kind)}"


_UNTOLD = frozenset(
    "__doc__ __module__ __qualname__ __firstlineno__ __slotnames__ _abc_impl".split()
)


@functools.lru_cache(maxsize=8192)
def _names_stored_globally(code: types.CodeType) -> frozenset[str]:
    import dis

    store = dis.opmap["STORE_GLOBAL"]
    if store not in code.co_code[::2]:
        return frozenset()
    return frozenset(i.argval for i in dis.get_instructions(code) if i.opcode == store)


@functools.lru_cache(maxsize=1024)
def _varying_names(module: str) -> set[str]:
    """Globals that a module's own functions assign: counters, lazily made objects."""
    names: set[str] = set()
    for value in list(vars(sys.modules[module]).values()):
        code = getattr(getattr(value, "__wrapped__", value), "__code__", None)
        if isinstance(code, types.CodeType):
            names |= _names_stored_globally(code)
    return names
