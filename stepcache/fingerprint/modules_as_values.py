"""What the user's code reads of modules that it has as values.

`jax.nn.gelu` is a chain that a walk follows. Of `nn = jax.nn`, or of a module that is an argument,
code may read any name that it contains; of a module that it asks for computed names, all.
"""

from __future__ import annotations

import builtins
import sys
import types
from typing import Any

from stepcache.fingerprint.dependencies import NAMES_IN
from stepcache.fingerprint.known_packages import TRUSTED
from stepcache.fingerprint.provenance import INSTALLED, PYTHON, USER, origin_of_module
from stepcache.fingerprint.tokens import ATOMS, digest, is_special
from stepcache.fingerprint.trail import Trail

# Modules whose names are not looked at: jaxlib's bindings are loaded bit by bit while a program is
# lowered, and stepcache's own are not to be replaced.
_LEFT_OUT = ("jaxlib", "stepcache")
OF_EACH = frozenset(
    "__name__ __doc__ __package__ __loader__ __spec__ __file__ __cached__ __builtins__ __path__ "
    "__annotations__ __annotate__ __conditional_annotations__".split()
)
"""What Python keeps in each module."""


def note_module(walk: Trail, path: str, value: types.ModuleType) -> None:
    """Notes a module that is passed around: one of the user's by the names that code names."""
    walk.note(path, f"module {value.__name__}")
    if value is builtins:
        walk.reads_any_attribute()
    if origin_of_module(value.__name__) != USER:
        walk.distribution(value.__name__)
        note_library_module(walk, value)
        return
    if type(value) is not types.ModuleType:
        walk.follow_class(type(value))
    label = walk.namespace(vars(value), None, value.__name__)
    for name, each in vars(value).copy().items():
        if name == "__getattr__":  # Python asks it for what is not there.
            walk.value(f"{label}:{name}", each)
        elif name not in OF_EACH:
            walk.when_named(name, f"{label}:{name}", each)


def note_library_module(walk: Trail, module: types.ModuleType) -> None:
    """Notes that code has a module as a value."""
    walk.library_modules.setdefault(module.__name__, False)
    walk.when_dynamic(f"{NAMES_IN}{module.__name__}", _own_names(module))


def note_asked_module(walk: Trail, module: types.ModuleType | None) -> None:
    """Notes whatever a name in a module may mean: one of the user's, or of a well known package."""
    if module is not None and module.__name__.partition(".")[0] in TRUSTED:
        _note_all_names(walk, module)
    elif module is not None and origin_of_module(module.__name__) == USER:
        label = walk.namespace(vars(module), None, module.__name__)
        for name, each in vars(module).copy().items():
            if name not in OF_EACH:
                walk.value(f"{label}:{name}", each)
    else:
        walk.reads_any_attribute()


def _note_all_names(walk: Trail, module: types.ModuleType) -> None:
    """Notes that code asks a module for names that it computes."""
    walk.library_modules[module.__name__] = True
    walk.note(f"{NAMES_IN}{module.__name__}", digest(_own_names(module)))


def _own_names(module: types.ModuleType) -> tuple[str, ...]:
    """The public names in a module, but for those of modules, which may be imported later."""
    space = vars(module).copy()
    public = (name for name, each in space.items() if not name.startswith("_") and _is_told(each))
    return tuple(sorted(public))


def _is_told(value: Any) -> bool:
    """Whether a name is told by its value, or by what its value is called.

    Other objects, such as `os.environ`, may hold what differs in each process.
    """
    return type(value) in ATOMS or callable(value)


def with_library_modules(names: dict[str, str], walk: Trail) -> dict[str, str]:
    """Names that are read, by module, with what the user's code may read of modules."""
    if not walk.library_modules:
        return names
    found: dict[str, set[str]] = {}
    for name in walk.library_modules:
        module = sys.modules.get(name)
        if module is not None:
            named, reads_any = walk.read_of_modules(name)
            _add(found, module, named | {*_own_names(module)} if reads_any else named)
    for name, read in found.items():
        read.update(names.get(name, "").split())
    return names | {name: " ".join(sorted(read)) for name, read in sorted(found.items()) if read}


def _add(found: dict[str, set[str]], module: types.ModuleType, named: set[str]) -> None:
    """Adds what may be read of a module, and of modules of the same package that it leads to."""
    name, space = module.__name__, vars(module)
    package, origin = name.partition(".")[0], origin_of_module(name)
    if origin not in (INSTALLED, PYTHON) or package in _LEFT_OUT:
        return
    read = found.setdefault(name, set())
    for each in named & space.keys() - read:
        value = space[each]
        if not is_special(each) and (origin == INSTALLED or type(value) in _OF_PYTHON):
            read.add(each)
        if type(value) is types.ModuleType and value.__name__ not in found:
            is_within = value.__name__.partition(".")[0] == package
            if is_within or origin == PYTHON == origin_of_module(value.__name__):
                _add(found, value, named)


# What is looked at in modules of Python's. Other objects hold what differs in each process.
_OF_PYTHON = (*ATOMS, types.FunctionType, types.BuiltinFunctionType)
