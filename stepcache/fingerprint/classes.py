"""How a walk looks at classes.

Attributes that only the user's own code can read are noted when code is found that names them.
"""

from __future__ import annotations

import abc
import argparse
import dataclasses
import decimal
import enum
import functools
import inspect
import re
import sys
import types
import typing
from typing import Any

from stepcache.fingerprint import instances, opened_files
from stepcache.fingerprint.bytecode import (
    DYNAMIC_ACCESS,
    MAKES_ANY,
    names_of,
)
from stepcache.fingerprint.callers import OF_EQUINOX
from stepcache.fingerprint.escapes import passes_on_self
from stepcache.fingerprint.held import CONTAINERS, function_in
from stepcache.fingerprint.known_packages import ASK_THEIR_OWN, TRUSTED
from stepcache.fingerprint.provenance import (
    INSTALLED,
    USER,
    is_generated,
    origin_of,
    origin_of_file,
    package_of,
)
from stepcache.fingerprint.tokens import (
    ATOMS,
    attribute_of,
    container_text,
    is_special,
    plain_text,
    qualified_name,
)
from stepcache.fingerprint.trail import MAKE_ANY, Trail, entering, making
from stepcache.jaxcompat import inspection

# What Python itself keeps in a class; none of it is the user's.
_INTERNALS = frozenset(
    "__dict__ __weakref__ __doc__ __module__ __qualname__ __annotations__ __abstractmethods__ "
    "_abc_impl __parameters__ __firstlineno__ __static_attributes__ "
    "__annotate__ __annotate_func__ __annotations_cache__ __type_params__ "
    "__dataclass_params__ __signature__ __jax_pytree__ __classdictcell__ __slotnames__".split()
)
_ENUM_INTERNALS = re.compile(r"_(member_map|value2member_map|member_names|unhashable\w*|use_args)_")


def note_class(walk: Trail, path: str, cls: type) -> None:
    """Notes a class that is used as a value."""
    if cls.__name__ in DYNAMIC_ACCESS and origin_of(cls) != USER:
        walk.reads_any_attribute()
    if cls is type:
        walk.read_attributes((MAKES_ANY,))
    walk.note(path, f"class {walk.follow_class(cls)}")
    may_be_called(walk, cls)


def may_be_called(walk: Trail, cls: type) -> None:
    """Notes that code has a class as a value, and so may make instances of it."""
    opened_files.watch_before_call(cls)
    walk.read_attributes(making(walk.follow_class(base)) for base in _users_bases(cls))


def _users_bases(cls: type) -> list[type]:
    return [base for base in cls.__mro__ if origin_of(base) == USER]


def note_tested_class(walk: Trail, path: str, cls: Any) -> bool:
    """Notes a class of the user's that objects are only tested for: nobody makes an object of it.

    Returns whether it did so. Not where this is no such class, or tests run code of the user's.
    """
    if not issubclass(type(cls), type) or _users_bases(type(cls)) or origin_of(cls) != USER:
        return False
    if any("__subclasshook__" in vars(base) for base in _users_bases(cls)):
        return False
    walk.note(path, f"class {walk.follow_class(cls)}")
    return True


def is_asked_for_part(cls: Any, attributes: list[str]) -> bool:
    """Whether code names a class only for a plain method or a constant: `Base.loss(self, x)`."""
    if not issubclass(type(cls), type) or any(map(is_special, attributes)):
        return False
    found = type(inspect.getattr_static(cls, attributes[0], cls))
    return found in ATOMS or found in (types.FunctionType, staticmethod)


def follow_user_class(walk: Trail, name: str, cls: type) -> None:
    """Notes what instances of a class of the user's can do."""
    bases = [walk.follow_class(base) for base in cls.__bases__ if base is not object]
    walk.note(name, f"class({', '.join(bases)})")
    if type(cls) is not type:
        walk.follow_class(type(cls))
        if _keeps_out_of_sight(type(cls)):
            walk.blame(name, f"a {qualified_name(type(cls))} keeps what no attribute shows")
    if isinstance(cls, abc.ABCMeta):
        walk.note(f"{name} (registered)", ", ".join(sorted(_registered(cls, True))))
    if matched_as := [text for flag, text in _MATCHED_AS.items() if cls.__flags__ & flag]:
        walk.note(f"{name} (matched as)", ", ".join(matched_as))
    _note_protocol(walk, cls)
    for function in inspection.pytree_functions(cls):
        walk.value(f"{name} (pytree)", function)
    is_enum = issubclass(cls, enum.Enum)
    if is_enum:
        walk.note(f"{name} (members)", ", ".join(cls.__members__))
        for each, member in cls.__members__.items():
            walk.value(f"{name}.{each}", member)
    selective = is_plain(cls)
    generated = _generated_methods(cls)
    if generated:
        walk.note(f"{name} (generated)", ", ".join(sorted(generated)))
        walk.read_attributes(_properties_among_fields(cls))
    order = tuple(each for each in vars(cls) if each not in _INTERNALS)
    walk.when_dynamic(f"{name} (order of attributes)", order)
    for each, annotation in (vars(cls).get("__annotations__") or {}).items():
        field = dataclasses.field()
        field.type = annotation
        walk.when_named("__annotations__", f"{name}.{each} (annotation)", field)
    if selective:
        for attribute in _methods_that_may_make(cls):
            walk.when_named(attribute, f"{name}.{attribute} (given)", cls)
    of_packages = _prefixes_of_packages(cls)
    at_definition = _AT_DEFINITION[issubclass(cls, type)]
    for attribute, value in sorted(vars(cls).copy().items()):
        if attribute in _INTERNALS or isinstance(value, instances.SLOT_TYPES):
            continue
        if is_enum and (isinstance(value, enum.Enum) or _ENUM_INTERNALS.fullmatch(attribute)):
            continue
        path = f"{name}.{attribute}"
        if selective:  # Of an object of another class, all attributes count anyway.
            _note_method_of_others(walk, attribute, value)
        if selective and type(value) is classmethod and not is_special(attribute):
            walk.when_named(attribute, path, ("classmethod", value.__func__))
        elif selective and attribute in _CONSTRUCTORS:
            walk.when_named(making(name), path, value)
            walk.when_named(entering(path), path, value)  # As `dataclasses.replace` enters it.
            if attribute == "__new__":  # Whichever class it makes an object of, code has that.
                walk.when_named(attribute, path, value)
        elif attribute in generated or attribute in at_definition:
            walk.when_named(entering(path), path, value)
        elif attribute.startswith(of_packages) or (
            selective and (attribute in _OF_FIELDS or not is_special(attribute))
        ):
            walk.when_named(attribute, path, value)
        elif type(value) is classmethod and not selective:  # Plain classes alone wait to be called.
            walk.note(path, "classmethod")
            walk.value(f"{path}.__func__", value.__func__)
        else:
            walk.value(path, value)


def _methods_that_may_make(cls: type) -> list[str]:
    """The class methods that do more with `cls` than to ask it for names, here or in a base."""
    found: set[str] = set()
    for base in cls.__mro__:
        for name, each in vars(base).copy().items():
            if type(each) is classmethod and not is_special(name):
                function = each.__func__
                if type(function) is not types.FunctionType or passes_on_self(function.__code__):
                    found.add(name)
    return sorted(found)


def _keeps_out_of_sight(metaclass: type) -> bool:
    """Whether the classes of a compiled metaclass have fields of their own, as msgspec's do.

    These are the defaults of attributes there, which no `vars` shows.
    """
    plain: type = type
    is_known = metaclass.__module__.partition(".")[0] in TRUSTED
    return metaclass.__basicsize__ > plain.__basicsize__ and not is_known


# What says which fields a class has: Python reads it for code that speaks of fields.
OF_FIELDS = "__dataclass_fields__"
_OF_FIELDS = frozenset((OF_FIELDS, "__attrs_attrs__", "__match_args__"))


def _generated_methods(cls: type) -> frozenset[str]:
    """The special methods that `dataclasses` or attrs have generated for a class."""
    return frozenset(
        name
        for name, value in vars(cls).copy().items()
        if is_special(name)
        and name not in _CONSTRUCTORS
        and type(value) is types.FunctionType
        and is_generated(getattr(value, "__wrapped__", value))
    )


def is_of_fields(function: types.FunctionType) -> bool:
    """Whether a generated function does no more than to store or to return all fields."""
    if function.__code__.co_filename.startswith(OF_EQUINOX):
        return True  # Of its modules, all fields are noted anyway.
    return function.__name__ == "__init__" and is_generated(function)


def _properties_among_fields(cls: type) -> list[str]:
    """The fields that a generated `__init__` does not merely store."""
    fields = vars(cls).get(OF_FIELDS) or ()
    found = {each: inspect.getattr_static(cls, each, None) for each in fields}
    return [
        each
        for each, value in found.items()
        if hasattr(type(value), "__set__") and not isinstance(value, instances.SLOT_TYPES)
    ]


# `Py_TPFLAGS_SEQUENCE` and `_MAPPING`, which `match` looks at; to register a class sets them.
_MATCHED_AS = {1 << 5: "a sequence", 1 << 6: "a mapping"}


def _note_protocol(walk: Trail, cls: type) -> None:
    """Notes what `isinstance` looks for in an object if it is asked for a protocol."""
    protocols = [base for base in cls.__mro__ if vars(base).get("_is_protocol")]
    if any(vars(base).get("_is_runtime_protocol") for base in protocols):
        for base in protocols:
            names = {*vars(base), *vars(base).get("__annotations__", ())}
            walk.read_attributes(name for name in names if not is_special(name))


def _prefixes_of_packages(cls: type) -> tuple[str, ...]:
    """How names begin that a base's package gives to what it keeps in a class.

    As `__pydantic_validator__`: Python asks for no such name, so it is read where code names it.
    JAX's and numpy's compiled code does ask for some of theirs.
    """
    metaclass: type = type(cls)
    bases = {*cls.__mro__, *metaclass.__mro__}
    packages = {base.__module__.partition(".")[0] for base in bases if origin_of(base) == INSTALLED}
    return tuple(f"__{package}_" for package in packages - TRUSTED)


# They run when a class is defined; by whether they are a metaclass's.
_AT_DEFINITION = {
    False: ("__init_subclass__", "__set_name__"),
    True: ("__init_subclass__", "__set_name__", "__prepare__", "__new__", "__init__"),
}
# They run when an instance is made. One that is there already does not need them.
_CONSTRUCTORS = ("__init__", "__new__", "__post_init__", "__attrs_post_init__")


def _registered(cls: abc.ABCMeta, also_of_libraries: bool = False) -> set[str]:
    """The user's classes that were registered with an abstract one or its subclasses, by name."""
    found: set[str] = set()
    for each in (reference() for reference in abc._get_dump(cls)[0]):  # type: ignore[attr-defined]
        if each is not None and (also_of_libraries or origin_of(each) == USER):
            found.add(qualified_name(each))
    for subclass in type.__subclasses__(cls):
        found |= _registered(subclass, also_of_libraries)
    return found


def _note_method_of_others(walk: Trail, name: str, method: Any) -> None:
    """Notes what a package's method reads of objects of the user's whose class does not inherit it.

    It may have been put into that class under a name, as `__getitem__` of chex's mappable
    dataclasses, which takes keys for names of attributes.
    """
    function = function_in(method)
    if function is None:
        takes_any = attribute_of(method, "__name__") == "__getattribute__"
    else:
        code = getattr(inspect.unwrap(function), "__code__", None)
        if code is None or origin_of_file(code.co_filename) != INSTALLED:
            return
        # Of others, a recording sees what they read.
        if package_of(code.co_filename) in ASK_THEIR_OWN:
            walk.read_attributes(names_of(code).attributes - MAKE_ANY)
        takes_any = names_of(code).is_dynamic
    if takes_any and name in _LOOK_UPS:
        walk.reads_any_attribute(makes_any=False)


def note_unbound_method(walk: Trail, cls: Any, attributes: list[str]) -> None:
    """Notes what a method reads if it is asked of a package's class: `Average.compute(config)`."""
    if attributes and issubclass(type(cls), type):
        method = inspect.getattr_static(cls, attributes[0], None)
        if type(method) is types.FunctionType:
            _note_method_of_others(walk, "", method)


_LOOK_UPS = ("__getitem__", "__contains__", "get", "pop", "setdefault")


def is_made_by_function(cls: type) -> bool:
    """Whether no module has a class under its name, as those of `Average.from_output(name)`."""
    found: Any = sys.modules.get(cls.__module__)
    for part in cls.__qualname__.split("."):
        found = vars(found).get(part) if issubclass(type(found), _NAMESPACES) else None
    return found is not cls


_NAMESPACES = (type, types.ModuleType)


def follow_library_class(walk: Trail, name: str, cls: type) -> None:
    """A class of an installed distribution: what was put into it from outside, and its data.

    What a function has made for the user has methods that captured what is the user's.
    """
    if cls.__module__ == "builtins":
        return
    if is_made_by_function(cls):
        for attribute, value in sorted(vars(cls).copy().items()):
            function = function_in(value)
            if function is not None and function.__closure__ and not is_generated(function):
                walk.value(f"{name}.{attribute}", function)
    for function in inspection.pytree_functions(cls):
        code = getattr(getattr(function, "func", function), "__code__", None)
        if is_foreign(function) or (code is not None and code.co_filename.startswith("<")):
            walk.value(f"{qualified_name(cls)} (pytree)", function)
    _note_protocol(walk, cls)
    if cls.__module__ == "decimal":
        context = decimal.getcontext().copy()
        context.clear_flags()
        walk.once("decimal.getcontext()", repr(context))
    for base in cls.__mro__:
        if base in (object, abc.ABC) or origin_of(base) == USER:
            continue
        if isinstance(base, abc.ABCMeta) and (registered := _registered(base)):
            walk.once(f"{qualified_name(base)} (registered)", ", ".join(sorted(registered)))
        for attribute, value in vars(base).copy().items():
            path = f"{qualified_name(base)}.{attribute}"
            if is_foreign(value):
                walk.value(path, value)
            elif is_special(attribute):
                continue
            elif (text := plain_text(value)) is not None:
                walk.once(path, text)
            elif type(value) in CONTAINERS:
                if (text := container_text(value)) is not None:
                    walk.when_named(attribute, path, text)
            elif type(value) is functools.partialmethod or instances.is_users(type(value)):
                walk.when_named(attribute, path, value)


def is_plain(cls: type) -> bool:
    """A class whose attributes only the user's own code reads by name, and no library's."""
    if inspection.pytree_functions(cls):
        return False
    return all(base in _PLAIN or origin_of(base) == USER for base in cls.__mro__)


_PLAIN = frozenset(
    (
        *(object, types.SimpleNamespace, *argparse.Namespace.__mro__),
        *(abc.ABC, typing.Generic, typing.Protocol),
    )
)


def is_foreign(value: Any) -> bool:
    """A function or class of the user's, wherever it is found.

    Nothing of the value's own is called: to ask a lazy module for an attribute would import it.
    """
    kind, inner = type(value), value
    if issubclass(kind, types.MethodType | staticmethod | classmethod):
        inner = value.__func__
    elif issubclass(kind, property):
        inner = value.fget
    if type(inner) is types.FunctionType:
        if inner.__code__.co_filename.startswith("<") and inner.__module__ is None:
            return False
        named = (inner.__module__ or "").startswith("namedtuple_")
        return origin_of(inner) == USER and not named
    return issubclass(type(inner), type) and origin_of(inner) == USER
