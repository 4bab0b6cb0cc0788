"""What a step's code depends on, as named facts that another process can check.

`Walk` starts at a function and follows what its code names: globals, captured variables, defaults,
attributes of objects, methods of classes, and the functions among them in turn. Code of the user is
known by its content; code of an installed distribution by the distribution's version. Each thing
found is one fact, a path and a token: `train.py:RATE` is `0.1`. Equal facts mean equal programs.

What cannot be vouched for is named in `blames`, and nothing is guessed. The idea is that of a
compiler's depfile, and of ccache's direct mode.
"""

from __future__ import annotations

import builtins
import dataclasses
import enum
import functools
import hashlib
import importlib
import importlib.util
import logging
import os
import re
import sys
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from stepcache.jaxcompat import Tracer, inspection
from stepcache.programs.impure import why_impure
from stepcache.programs.names import Names, Read, code_digest, names_of
from stepcache.programs.origin import (
    INSTALLED,
    USER,
    distribution_of,
    file_label,
    origin_of,
    origin_of_file,
    origin_of_module,
)

_TEXT_SHOWN = 60
_SCALARS_LISTED = 64
_MISSING = object()

_ATOMS = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented))
_BY_REPR_MODULES = ("datetime", "decimal", "fractions", "uuid", "ipaddress", "zoneinfo", "typing")
_BY_REPR = (range, slice, types.GenericAlias, types.UnionType, os.PathLike)
# What Python itself keeps in a class; none of it is the user's.
_CLASS_INTERNALS = frozenset(
    "__dict__ __weakref__ __doc__ __module__ __qualname__ __annotations__ __abstractmethods__ "
    "_abc_impl __parameters__ __orig_bases__ __firstlineno__ __static_attributes__ __slots__ "
    "__annotate__ __annotate_func__ __annotations_cache__ __type_params__ __match_args__ "
    "__dataclass_params__ __signature__ __hash__ __jax_pytree__".split()
)
# A library may read these of any object, without the user's code naming them.
_ALWAYS_READ = frozenset(
    "shape dtype ndim size T at sharding weak_type aval nbytes itemsize".split()
)
_LIBRARY_NAMES = frozenset(
    ("jax", "jaxlib", "flax", "optax", "numpy", "ml_dtypes", "orbax", "stepcache")
)
_ENUM_INTERNALS = re.compile(r"_(member_map|value2member_map|member_names|unhashable\w*|use_args)_")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a step depends on.

    Attributes:
        facts: path and token of everything found.
        blames: what could not be vouched for; with any, nothing is claimed about the step.
    """

    facts: dict[str, str]
    blames: tuple[str, ...]


class Walk:
    """Follows what code depends on.

    Attributes:
        facts: what was found so far.
        codes: the user's code among it.
    """

    def __init__(self) -> None:
        self.facts: dict[str, str] = {}
        self.blames: dict[str, None] = {}
        self.codes: set[types.CodeType] = set()
        self._names: set[str] = set(_ALWAYS_READ)
        self._reads_all = False
        self._waiting: dict[str, list[tuple[str, Any]]] = {}
        self._seen: dict[int, str] = {}
        self._alive: list[Any] = []  # What `_seen` knows by id must not be freed meanwhile.
        self._labels: dict[str, int] = {}
        self._todo: deque[Callable[[], None]] = deque()

    def fingerprint(self) -> Fingerprint:
        """Follows everything that is still to be followed."""
        while self._todo:
            self._todo.popleft()()
        return Fingerprint(self.facts, tuple(self.blames))

    def read_attributes(self, names: Iterable[str]) -> None:
        """Notes attributes of the user's objects that a library is known to read."""
        self._add_names(Names(attributes=set(names)))

    def waiting(self) -> set[str]:
        """Attributes of the user's objects that no code of theirs names."""
        return set(self._waiting)

    def saw(self, value: Any) -> bool:
        """Whether the walk has passed through an object."""
        return id(value) in self._seen

    def blame(self, path: str, why: str) -> None:
        """Names something that cannot be vouched for."""
        self.blames[f"{path}: {why}"] = None

    # ---- values ------------------------------------------------------------------------------

    def value(self, path: str, value: Any) -> None:
        """Notes a value, and what it is made of.

        Args:
            path: what to call it.
            value: any object.
        """
        if type(value) in _ATOMS:
            self.facts[path] = atom(value)
            return
        seen = self._seen.get(id(value))
        if seen is not None:
            self.facts[path] = f"see {seen}"
            return
        self._seen[id(value)] = path
        self._alive.append(value)
        try:
            self._compound(path, value)
        except RecursionError:
            self.blame(path, "it is nested too deeply")
        except Exception as error:  # An object may fail at anything that it is asked.
            self.blame(path, f"looking at it raised {type(error).__name__}: {error}")

    def _compound(self, path: str, value: Any) -> None:
        handler = _HANDLERS.get(type(value))
        if handler is not None:
            handler(self, path, value)
        elif isinstance(value, type):
            self._note_class(path, value)
        elif isinstance(value, jax.Array | np.ndarray | np.generic | np.dtype):
            self._array(path, value)
        elif isinstance(value, enum.Enum):
            self._enum_member(path, value)
        elif isinstance(value, re.Pattern | os.PathLike | jax.Device) or _is_by_repr(value):
            self.facts[path] = f"{type(value).__name__} {_short(repr(value))}"
        elif isinstance(value, jax.sharding.Sharding | jax.sharding.Mesh):
            self.facts[path] = f"{type(value).__name__} {inspection.sharding_text(value)}"
        elif isinstance(value, jax.tree_util.PyTreeDef):
            self.tree(path, value)
        elif (jitted := inspection.jitted_parts(value)) is not None:
            self._jitted(path, value, jitted)
        elif (generator := _random_state(value)) is not None:
            self.facts[path] = f"{type(value).__name__}"
            self.value(f"{path} (state)", generator)
        elif isinstance(value, weakref.ref):
            self.facts[path] = "weak reference"
            self.value(f"{path}()", value())
        elif isinstance(value, ContextVar):
            self.facts[path] = f"context variable {value.name}"
            self.value(f"{path}.get()", value.get(None))
        elif isinstance(value, logging.Logger):
            self.facts[path] = f"logger {value.name}, level {value.getEffectiveLevel()}"
        elif callable(value) and hasattr(value, "cache_info"):
            self._remembering(path, value)
        else:
            self._instance(path, value)

    def _items(self, path: str, value: Iterable, kind: str) -> None:
        values = list(value)
        if len(values) > _SCALARS_LISTED and all(type(each) in _ATOMS for each in values):
            self.facts[path] = f"{kind} of {len(values)}, {_digest(map(atom, values))}"
            return
        self.facts[path] = f"{kind} of {len(values)}"
        for index, each in enumerate(values):
            self.value(f"{path}[{index}]", each)

    def _sequence(self, path: str, value: Any) -> None:
        self._items(path, value, type(value).__name__)

    def _mapping(self, path: str, value: Any) -> None:
        keys = list(value)
        self.facts[path] = f"{type(value).__name__} of {len(keys)}"
        if isinstance(value, dict) and getattr(value, "default_factory", None) is not None:
            self.value(f"{path}.default_factory", value.default_factory)  # type: ignore[attr-defined]
        if type(value) in (dict, OrderedDict) and len(keys) > 1:
            self.facts[f"{path} (order)"] = _digest(_key_text(key) for key in keys)
        for number, key in enumerate(keys):
            if type(key) in _ATOMS:
                self.value(f"{path}[{key!r}]", value[key])
            else:
                self.value(f"{path} key {number}", key)
                self.value(f"{path}[key {number}]", value[key])

    def _set(self, path: str, value: Any) -> None:
        plain = [each for each in value if type(each) in _ATOMS]
        named = [each for each in value if isinstance(each, type | types.FunctionType | enum.Enum)]
        if len(plain) + len(named) < len(value):
            self.blame(path, "a set has no order by which its objects can be compared")
            return
        texts = sorted(map(atom, plain))
        for each in sorted(named, key=_qualified_name):
            texts.append(_qualified_name(each))
            self.value(f"{path} member {_qualified_name(each)}", each)
        shown = ", ".join(texts)
        self.facts[path] = f"{type(value).__name__} of {len(value)}: {_short(shown)}"

    def _array(self, path: str, value: Any) -> None:
        if isinstance(value, np.dtype):
            self.facts[path] = f"dtype {value}"
        elif isinstance(value, Tracer):
            self.blame(path, "it is a tracer of another transformation")
        elif isinstance(value, jax.Array):
            self._jax_array(path, value)
        elif value.dtype == object:
            self._items(path, np.ravel(value).tolist(), f"array {value.shape} of objects")
        elif value.size == 1 and value.ndim == 0:
            self.facts[path] = f"{value.dtype} {value.item()!r}"
        else:
            self.facts[path] = f"{value.dtype}{list(value.shape)} content {content_digest(value)}"

    def _jax_array(self, path: str, value: jax.Array) -> None:
        if value.is_deleted():
            self.blame(path, "the array has been deleted or donated")
            return
        if not value.is_fully_addressable:
            self.blame(path, "parts of the array are in other processes")
            return
        placed = inspection.sharding_text(value.sharding) if value.committed else "uncommitted"
        content = inspection.array_digest(value)
        weak = " weak" if value.aval.weak_type else ""
        self.facts[path] = f"{value.dtype}{list(value.shape)}{weak} content {content}, {placed}"

    def _enum_member(self, path: str, value: enum.Enum) -> None:
        self.facts[path] = f"{type(value).__name__}.{value.name}"
        self.value(f"{path}.value", value.value)
        self._follow_class(type(value))

    def _method(self, path: str, value: types.MethodType) -> None:
        self.facts[path] = f"method {value.__func__.__qualname__}"
        self.value(f"{path} (function)", value.__func__)
        self.value(f"{path}.__self__", value.__self__)

    def _builtin(self, path: str, value: Any) -> None:
        owner = getattr(value, "__self__", None)
        name = getattr(value, "__qualname__", value.__name__)
        if owner is None or isinstance(owner, types.ModuleType):
            full = f"{getattr(value, '__module__', None) or 'builtins'}.{name}"
            self._check_pure(path, full)
            self.facts[path] = f"builtin {full}"
            return
        self.facts[path] = f"builtin method {name}"
        if isinstance(owner, type):
            self._check_pure(path, f"{owner.__module__}.{name}")
        self.value(f"{path}.__self__", owner)

    def _partial(self, path: str, value: functools.partial) -> None:
        wrapped = inspection.jitted_parts(value)
        if wrapped is not None:
            self._jitted(path, value, wrapped)
            return
        self.facts[path] = type(value).__name__
        self.value(f"{path}.func", value.func)
        self.value(f"{path}.args", value.args)
        self.value(f"{path}.keywords", value.keywords)
        if getattr(value, "__dict__", None):
            self.value(f"{path}.__dict__", dict(value.__dict__))

    def _jitted(self, path: str, value: Any, parts: tuple[Any, dict[str, Any]]) -> None:
        function, options = parts
        self.facts[path] = "jitted function"
        self.value(f"{path} (function)", function)
        for name, option in options.items():
            self.value(f"{path} ({name})", option)

    def _property(self, path: str, value: property) -> None:
        self.facts[path] = "property"
        for name in ("fget", "fset"):
            self.value(f"{path}.{name}", getattr(value, name))

    def _wrapped_function(self, path: str, value: Any) -> None:
        self.facts[path] = type(value).__name__
        self.value(f"{path} (function)", value.__func__)

    def _remembering(self, path: str, value: Any) -> None:
        """A function that remembers its results, such as that of `functools.lru_cache`."""
        self.facts[path] = f"{type(value).__name__}"
        function = getattr(value, "__wrapped__", None)
        if function is None:
            self.blame(path, "it remembers results that cannot be looked at")
            return
        if value.cache_info().currsize and origin_of(function) == USER:
            self.blame(path, "it remembers results whose origin is not known any more")
        self.value(f"{path} (function)", function)

    def _module(self, path: str, value: types.ModuleType) -> None:
        self.facts[path] = f"module {value.__name__}"
        if origin_of_module(value.__name__) == USER:
            for name, each in list(vars(value).items()):
                if not name.startswith("__"):
                    self._when_named(name, f"{self._module_label(value.__name__)}:{name}", each)
        else:
            self.distribution(value.__name__)

    def _local_data(self, path: str, value: Any) -> None:
        self.facts[path] = "thread-local data"
        self.value(f"{path}.__dict__", dict(vars(value)))

    def _opaque(self, path: str, value: Any) -> None:
        self.facts[path] = type(value).__name__

    # ---- instances ---------------------------------------------------------------------------

    def _instance(self, path: str, value: Any) -> None:
        cls = type(value)
        state, known = _state(value)
        if not known:
            self.blame(path, f"a {cls.__module__}.{cls.__qualname__} cannot be looked into")
            return
        self.facts[path] = f"a {self._follow_class(cls)}"
        for base, handler in (
            (dict, Walk._mapping),
            (tuple, Walk._sequence),
            (list, Walk._sequence),
        ):
            if isinstance(value, base):
                handler(self, f"{path} (content)", value)
        if isinstance(value, set | frozenset):
            self._set(f"{path} (content)", value)
        if isinstance(value, int | float | str | bytes | complex):
            self.facts[f"{path} (content)"] = repr(value)
        selective = _is_plain(cls) and not dataclasses.is_dataclass(cls)
        for name, each in state.items():
            if (name, _root_package(cls)) in _IDENTITIES:
                continue
            if selective and not _is_special(name):
                self._when_named(name, f"{path}.{name}", each)
            else:
                self.value(f"{path}.{name}", each)

    def _when_named(self, name: str, path: str, value: Any) -> None:
        """Notes an attribute as soon as code is found that names it."""
        if self._reads_all or name in self._names:
            self.value(path, value)
        else:
            self._waiting.setdefault(name, []).append((path, value))

    def _add_names(self, names: Names) -> None:
        new = names.attributes - self._names
        self._names |= new
        if names.is_dynamic and not self._reads_all:
            self._reads_all = True
            new = set(self._waiting)
        for name in sorted(new & self._waiting.keys()):
            for path, value in self._waiting.pop(name):
                self._todo.append(functools.partial(self.value, path, value))

    # ---- classes -----------------------------------------------------------------------------

    def _note_class(self, path: str, cls: type) -> None:
        self.facts[path] = f"class {self._follow_class(cls)}"

    def _follow_class(self, cls: type) -> str:
        """Notes what instances of a class can do; returns the name of the class."""
        known = self._seen.get(id(cls))
        if known is not None and known.startswith("class "):
            return known.removeprefix("class ")
        name = f"{cls.__module__}.{cls.__qualname__}"
        origin = origin_of(cls)
        if origin == USER:
            name = self._unique(f"{self._module_label(cls.__module__, cls)}:{cls.__qualname__}")
        self._seen[id(cls)] = f"class {name}"
        self._alive.append(cls)
        if origin == USER:
            self._todo.append(functools.partial(self._user_class, name, cls))
        else:
            if origin == INSTALLED:
                self.distribution(cls.__module__)
            self._todo.append(functools.partial(self._library_class, name, cls))
        return name

    def _user_class(self, name: str, cls: type) -> None:
        bases = [self._follow_class(base) for base in cls.__bases__ if base is not object]
        self.facts[name] = f"class({', '.join(bases)})"
        if type(cls) is not type:
            self._follow_class(type(cls))
        for function in inspection.pytree_functions(cls):
            self.value(f"{name} (pytree)", function)
        if issubclass(cls, enum.Enum):
            for member in cls:
                self.value(f"{name}.{member.name}", member.value)
        selective = _is_plain(cls) and not dataclasses.is_dataclass(cls)
        for attribute, value in sorted(vars(cls).items()):
            if attribute in _CLASS_INTERNALS or isinstance(value, _SLOT_TYPES):
                continue
            if issubclass(cls, enum.Enum) and (
                isinstance(value, enum.Enum) or _ENUM_INTERNALS.fullmatch(attribute)
            ):
                continue
            path = f"{name}.{attribute}"
            if selective and not _is_special(attribute):
                self._when_named(attribute, path, value)
            else:
                self.value(path, value)

    def _library_class(self, name: str, cls: type) -> None:
        """A class of an installed distribution: what was put into it from outside, and its data."""
        if cls.__module__ == "builtins":
            return
        for base in cls.__mro__:
            if base is object or origin_of(base) == USER:
                continue
            for attribute, value in list(vars(base).items()):
                if type(value) in (bool, int, float, str) and not attribute.startswith("__"):
                    self.facts[f"{base.__module__}.{base.__qualname__}.{attribute}"] = atom(value)
                elif is_foreign(value):
                    self.value(f"{base.__module__}.{base.__qualname__}.{attribute}", value)

    # ---- functions ---------------------------------------------------------------------------

    def _function(self, path: str, function: types.FunctionType) -> None:
        origin = origin_of(function)
        if origin == USER:
            label = self._unique(
                f"{self._module_label(function.__module__, function)}:{function.__qualname__}"
            )
            self._seen[id(function)] = label
            if path != label:
                self.facts[path] = f"function {label}"
            self._todo.append(functools.partial(self._user_function, label, function))
            return
        # A wrapper may call itself after what it wraps: its globals are those of its own module.
        module = function.__globals__.get("__name__", function.__module__)
        name = f"{function.__module__}.{function.__qualname__}"
        self.facts[path] = f"function {name}"
        self._check_pure(path, name)
        if origin == INSTALLED:
            self.distribution(module)
        if _found_by_name(function):
            return
        # Made by a library for the user, as optax.adamw(rate) does: it captured what is the user's.
        self._todo.append(functools.partial(self._captured, path, function))

    def _user_function(self, label: str, function: types.FunctionType) -> None:
        names = names_of(function.__code__)
        self.facts[label] = f"code {code_digest(function.__code__)}"
        self.codes.update(names.codes)
        self._captured(label, function, names)
        if function.__dict__:
            self.value(f"{label}.__dict__", dict(function.__dict__))
        for read in names.reads:
            if read.kind == "global":
                self._global(label, function, read)
        for imported in names.imports:
            self._imported(label, function, imported)
        self._add_names(names)

    def _captured(
        self, label: str, function: types.FunctionType, names: Names | None = None
    ) -> None:
        parameters = function.__code__.co_varnames[: function.__code__.co_argcount]
        defaults = function.__defaults__ or ()
        for name, value in zip(
            parameters[len(parameters) - len(defaults) :], defaults, strict=True
        ):
            self.value(f"{label} (default {name})", value)
        for name, value in (function.__kwdefaults__ or {}).items():
            self.value(f"{label} (default {name})", value)
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            try:
                value = cell.cell_contents
            except ValueError:
                self.facts[f"{label} (captured {name})"] = "empty"
                continue
            if isinstance(value, types.ModuleType) and names is not None:
                for read in [r for r in names.reads if r.kind == "captured" and r.name == name]:
                    self._chain(f"{label} (captured {name})", value, read.attributes)
            else:
                self.value(f"{label} (captured {name})", value)

    def _global(self, label: str, function: types.FunctionType, read: Read) -> None:
        value = function.__globals__.get(read.name, _MISSING)
        path = f"{label.partition(':')[0]}:{read.name}"
        if value is _MISSING:
            value = vars(builtins).get(read.name, _MISSING)
            path = read.name
            if read.name in ("globals", "eval", "exec"):
                self._whole_namespace(label, function, read.name)
            elif read.name in ("id", "hash", "input") and function.__name__ != "__hash__":
                self.blame(label, f"it calls {read.name}(), whose result is another each run")
        if value is _MISSING:
            self.facts[path] = "undefined"
            return
        self._chain(path, value, read.attributes)

    def _whole_namespace(self, label: str, function: types.FunctionType, name: str) -> None:
        if name != "globals":
            self.blame(label, f"it calls {name}(), whose code is not known beforehand")
        for key, value in list(function.__globals__.items()):
            if not key.startswith("__"):
                self.value(f"{label.partition(':')[0]}:{key}", value)

    def _chain(self, path: str, value: Any, attributes: tuple[str, ...]) -> None:
        """Follows `module.module.name`, so that only the name counts and not the modules."""
        remaining = list(attributes)
        while isinstance(value, types.ModuleType) and remaining:
            module, name = value, remaining.pop(0)
            value = getattr(module, name, _MISSING)
            path = f"{self._module_label(module.__name__)}:{name}"
            if value is _MISSING:
                self.facts[path] = "undefined"
                return
            if origin_of_module(module.__name__) == USER:
                continue
            full = f"{module.__name__}.{name}"
            path = full
            self._check_pure(path, ".".join((full, *remaining)))
            if not isinstance(value, types.ModuleType):
                self._library_value(path, module, value, remaining)
                return
        if origin_of_class_like(value) != USER:
            self._check_pure(path, _dotted(value, remaining))
        self.value(path, value)

    def _library_value(
        self, path: str, module: types.ModuleType, value: Any, attributes: list[str]
    ) -> None:
        """Something found in a module of a library, by its name there."""
        if origin_of_module(module.__name__) == INSTALLED:
            self.distribution(module.__name__)
        if type(value) in _ATOMS or isinstance(
            value, types.FunctionType | type | np.ndarray | list | tuple | dict
        ):
            if path not in ("os.environ", "sys.modules"):
                self.value(path, value)
        elif isinstance(value, types.BuiltinFunctionType):
            self._builtin(path, value)
        elif is_foreign(value):
            self.value(path, value)
        else:
            self.facts[path] = f"a {type(value).__module__}.{type(value).__qualname__}"
            for name in attributes:
                value = getattr(value, name, _MISSING)
                path = f"{path}.{name}"
                if type(value) in _ATOMS or is_foreign(value):
                    self.value(path, value)

    def _imported(self, label: str, function: types.FunctionType, imported: Any) -> None:
        package = function.__globals__.get("__package__") or ""
        try:
            name = importlib.util.resolve_name("." * imported.level + imported.module, package)
        except ImportError:
            self.blame(label, f"it imports {imported.module}, which cannot be resolved")
            return
        origin = origin_of_module(name)
        if origin != USER and name not in sys.modules:
            if origin == INSTALLED:
                self.distribution(name)
            return
        try:
            module = importlib.import_module(name)
        except Exception as error:
            self.facts[f"import {name}"] = f"raises {type(error).__name__}"
            return
        if imported.whole:
            self.value(f"import {name}", module)
        for chain in (*((each,) for each in imported.names), *imported.attributes):
            self._chain(f"import {name}", module, chain)

    # ---- trees -------------------------------------------------------------------------------

    def tree(self, path: str, tree: Any) -> None:
        """Notes the structure of a tree, with what its nodes keep beside their children."""
        shape: list[str] = []
        self._subtree(path, tree, shape)
        self.facts[path] = f"tree of {tree.num_leaves} leaves, {_digest(shape)}"

    def _subtree(self, path: str, tree: Any, shape: list[str]) -> None:
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
            shape.append(_digest(map(_key_text, extra)))
        elif kind not in (tuple, list, type(None)):
            self._follow_class(kind)
            if extra is not None and not isinstance(extra, type):
                text = _plain_text(extra)
                if text is None:
                    self.value(f"{path} ({kind.__name__})", extra)
                else:
                    shape.append(text)
        for name, child in zip(names, children, strict=True):
            if child.num_nodes > 1 or child.num_leaves != 1:
                self._subtree(path + name, child, shape)
            else:
                shape.append("*")

    # ---- names -------------------------------------------------------------------------------

    def distribution(self, module: str) -> None:
        """Notes the distribution that a module comes from, with its version."""
        name, version = distribution_of(module)
        if version:
            self.facts[f"package {name}"] = version
        elif name not in sys.stdlib_module_names:
            self.blame(f"package {name}", "no installed distribution says that it holds it")

    def _check_pure(self, path: str, full_name: str) -> None:
        why = why_impure(full_name)
        if why:
            self.blame(path, why)

    def _module_label(self, module: str | None, value: Any = None) -> str:
        code = getattr(value, "__code__", None)
        filename = code.co_filename if code is not None else None
        if filename is None or filename == "<string>":
            filename = getattr(sys.modules.get(module or ""), "__file__", None)
        return file_label(filename, module) if filename else (module or "<cell>")

    def _unique(self, label: str) -> str:
        """Functions made by one line of code, each with other captured values, are told apart."""
        number = self._labels[label] = self._labels.get(label, 0) + 1
        return label if number == 1 else f"{label}#{number}"


# ---- what things are ---------------------------------------------------------------------------


def atom(value: Any) -> str:
    """The token of a plain value; a long one by its digest."""
    text = repr(value)
    if len(text) > _TEXT_SHOWN:
        text = f"{text[:24]}… {_digest([text])}"
    return (
        text
        if type(value) in (str, int, float, bool, type(None))
        else f"{type(value).__name__} {text}"
    )


def _plain_text(value: Any) -> str | None:
    """All of a value that is made of plain values and tuples; None for any other."""
    if type(value) in _ATOMS:
        return repr(value)
    if type(value) is not tuple:
        return None
    texts = [_plain_text(each) for each in value]
    return None if None in texts else f"({', '.join(texts)})"  # type: ignore[arg-type]


def _short(text: str) -> str:
    return text if len(text) <= _TEXT_SHOWN else f"{text[:40]}… {_digest([text])}"


def _digest(texts: Iterable[str]) -> str:
    hasher = hashlib.sha256()
    for text in texts:
        data = text.encode(errors="surrogatepass")
        hasher.update(len(data).to_bytes(8, "little"))
        hasher.update(data)
    return hasher.hexdigest()[:16]


def content_digest(array: np.ndarray) -> str:
    """A digest of an array's bytes."""
    data = np.ascontiguousarray(array)
    return hashlib.sha256(data.view(np.uint8).reshape(-1).data if data.size else b"").hexdigest()[
        :16
    ]


def _key_text(key: Any) -> str:
    return repr(key) if type(key) in _ATOMS else _qualified_name(type(key))


def _qualified_name(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return f"{_qualified_name(type(value))}.{value.name}"
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"


def _dotted(value: Any, attributes: list[str]) -> str:
    return ".".join((_qualified_name(value), *attributes))


def origin_of_class_like(value: Any) -> str:
    """The origin of a function or class; `USER` for anything else."""
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return origin_of(value)
    return USER


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _is_plain(cls: type) -> bool:
    """A class whose attributes only the user's own code reads by name, and no library's."""
    if inspection.pytree_functions(cls):
        return False
    return all(base is object or origin_of(base) == USER for base in cls.__mro__)


def _is_by_repr(value: Any) -> bool:
    return isinstance(value, _BY_REPR) or type(value).__module__ in _BY_REPR_MODULES


# Numbers that tell objects apart, and that no program depends on.
_IDENTITIES = frozenset((("_id", "flax"),))


def _root_package(cls: type) -> str:
    """The distribution that a class builds on."""
    return next(
        (base.__module__.partition(".")[0] for base in cls.__mro__ if origin_of(base) == INSTALLED),
        "",
    )


def _state(value: Any) -> tuple[dict[str, Any], bool]:
    """The attributes of an instance, and whether there is nothing more to it."""
    cls = type(value)
    state: dict[str, Any] = {}
    for base in cls.__mro__:
        slots = vars(base).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            name = (
                f"_{base.__name__.lstrip('_')}{slot}"
                if slot.startswith("__") and not slot.endswith("__")
                else slot
            )
            if name not in ("__dict__", "__weakref__"):
                found = getattr(value, name, _MISSING)
                if found is not _MISSING:
                    state[name] = found
    found = getattr(value, "__dict__", None)
    if isinstance(found, dict):
        state.update(found)
    layout = _c_base(cls)
    known = layout is object or layout in _LOOKED_INTO
    return state, known


def _c_base(cls: type) -> type:
    """The nearest base that is written in C: its instances hold what Python does not show."""
    for base in cls.__mro__:
        if not base.__flags__ & (1 << 9):  # Py_TPFLAGS_HEAPTYPE
            return base
        if base.__module__.partition(".")[0] in ("jaxlib", "_thread", "_io", "_ctypes"):
            return base
    return object


_LOOKED_INTO = frozenset(
    (dict, list, tuple, set, frozenset, int, float, str, bytes, complex, OrderedDict, deque)
)
_SLOT_TYPES = (types.MemberDescriptorType, types.GetSetDescriptorType)


def _found_by_name(function: Any) -> bool:
    """Whether a function is what its module has under its name, so that the name says it all."""
    if origin_of_module(function.__module__) == USER:  # A wrapper, named after what it wraps.
        return False
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return getattr(found, "__wrapped__", found) is function or found is function


def is_foreign(value: Any) -> bool:
    """A function or class of the user's, wherever it is found."""
    inner = getattr(value, "__func__", value)
    inner = getattr(inner, "fget", inner) if isinstance(inner, property) else inner
    code = getattr(inner, "__code__", None)
    if isinstance(code, types.CodeType):
        return not code.co_filename.startswith("<") and origin_of_file(code.co_filename) == USER
    return isinstance(inner, type) and origin_of(inner) == USER


def _random_state(value: Any) -> Any:
    """The state of a generator of random numbers, which says what it will give next."""
    if isinstance(value, np.random.RandomState):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    getstate = getattr(value, "getstate", None)
    return getstate() if type(value).__module__ == "random" and getstate is not None else None


_HANDLERS: dict[type, Callable[[Walk, str, Any], None]] = {
    list: Walk._sequence,
    tuple: Walk._sequence,
    deque: Walk._sequence,
    bytearray: Walk._sequence,
    dict: Walk._mapping,
    OrderedDict: Walk._mapping,
    types.MappingProxyType: Walk._mapping,
    set: Walk._set,
    frozenset: Walk._set,
    types.FunctionType: Walk._function,
    types.MethodType: Walk._method,
    types.BuiltinFunctionType: Walk._builtin,
    types.MethodDescriptorType: Walk._builtin,
    types.WrapperDescriptorType: Walk._builtin,
    types.MethodWrapperType: Walk._builtin,
    types.ClassMethodDescriptorType: Walk._builtin,
    types.ModuleType: Walk._module,
    functools.partial: Walk._partial,
    functools.partialmethod: Walk._partial,
    property: Walk._property,
    staticmethod: Walk._wrapped_function,
    classmethod: Walk._wrapped_function,
    threading.local: Walk._local_data,
    type(threading.Lock()): Walk._opaque,
    type(threading.RLock()): Walk._opaque,
    object: Walk._opaque,
}
