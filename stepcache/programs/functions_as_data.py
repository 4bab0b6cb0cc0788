"""Functions and classes as plain data: by the name that a module has for them, or by their code.

A model or an optimizer that a step makes keeps functions beside its arrays. A function that another
one has made, as optax does for each optimizer, is written by the place of its code in a module, and
by the values that it captured. Named tuples, frozen dataclasses and modules of flax's linen, which
are their values, are written by these.

What is read back is looked up in modules that are loaded, and functions are made of code that is
found there. Nothing is imported, and nothing of the user's is called.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from stepcache.fingerprint.bytecode import instructions_of
from stepcache.fingerprint.code_digests import code_digest
from stepcache.fingerprint.provenance import USER, origin_of, package_of
from stepcache.jaxcompat.checked_data import NotStorable, NotThere, space_of

Code = Callable[[Any], Any]  # Writes a value as plain data, or reads it.

_MOST_WRAPPED = 8
_BINDS = frozenset(("STORE_DEREF", "DELETE_DEREF"))


class Functions:
    """The functions and classes of one tree, each of which is written once, and numbered."""

    def __init__(self) -> None:
        self._written: list[Any] = []
        self._read: dict[int, Any] = {}

    def name_of(self, value: Any) -> list[str] | None:
        """The name of an object that the process which reads it has, too. None where it has none.

        Raises `NotStorable` if another object may have that name there.
        """
        raise NotImplementedError

    def named(self, name: list[str]) -> Any:
        """The object of a name in this process. Raises `NotThere` where there is none."""
        raise NotImplementedError

    def encode(self, value: Any, encode: Code) -> Any:
        """A named object, a function, a method, a class, or a named tuple; None for anything else.

        Raises `NotStorable` if it captured what cannot be written.
        """
        for number, each in enumerate(self._written):
            if each is value:
                return {"again": number}
        data = self._written_as(value, encode)
        if isinstance(data, dict):
            data["number"] = len(self._written)  # What it captured has been numbered before it.
            self._written.append(value)
        return data

    def decode(self, data: Any, decode: Code) -> Any:
        """What `encode` wrote. In the object that wrote it, the value itself, if it is the same.

        Raises `NotThere` if a module is not loaded, or has something else under a name.
        """
        if type(data) is list:
            return self.named(data)
        if "again" in data:
            return self._read[data["again"]]
        value, number = _decode(data, decode), data["number"]
        if self._written:
            original = self._written[number]
            if not _are_alike(value, original):
                raise NotStorable(f"{original!r:.80} would be read back as something else")
            value = original
        self._read[number] = value
        return value

    def _written_as(self, value: Any, encode: Code) -> Any:
        try:
            if (name := self.name_of(value)) is not None:
                return name
        except NotStorable:
            if (place := _place_of(value)) is None:
                raise
            return place
        if (place := _place_of(value)) is not None:
            return place
        if type(value) is types.FunctionType:
            if (place := _place_of_code(value)) is None:
                return None
            # A list or a dict that two functions captured is to be one again.
            captured = [
                ["held", self.encode(each, encode)] if type(each) in _CONTAINERS else encode(each)
                for each in (cell.cell_contents for cell in value.__closure__ or ())
            ]
            rest = [value.__defaults__, value.__kwdefaults__, vars(value)]
            return {**place, "captured": captured, "rest": encode(rest)}
        return _taken_apart(value, encode)


_CONTAINERS = (list, dict, set)


def _taken_apart(value: Any, encode: Code) -> dict[str, Any] | None:
    kind = type(value)
    if kind in _CONTAINERS:
        return {"value": encode(value)}
    if kind is types.MethodType:
        name = value.__func__.__name__
        if method_of(value.__self__, name) is value.__func__:
            return {"method": name, "of": encode(value.__self__)}
    if kind is functools.partial:
        return {"partial": [encode(each) for each in (value.func, value.args, value.keywords)]}
    fields = _fields_of(kind)
    if fields and (place := _place_of(kind)) is not None:
        if issubclass(kind, tuple):
            items = tuple.__iter__(value)
        elif _is_told_by(value, fields):
            items = (getattr(value, name) for name in fields)
        else:
            return None
        return {"items": [*map(encode, items)], "of": place}
    return None


def _fields_of(kind: type) -> Sequence[str]:
    """The fields of named tuples, and of dataclasses that are equal by them and do not change."""
    if issubclass(kind, tuple):
        return getattr(kind, "_fields", ())
    parameters = space_of(kind).get("__dataclass_params__")
    is_value = parameters is not None and parameters.frozen and parameters.eq
    is_module = not is_value and _is_of_linen(kind)
    fields = dataclasses.fields(kind) if is_value or is_module else ()
    return [each.name for each in fields if not (is_module and each.name == "parent")]


_OF_EACH_MODULE = {"_parent_ref", "_id", "_state"}


def _is_of_linen(kind: type) -> bool:
    """Whether a class is of linen's modules, which none but linen's own code makes."""
    linen = _linen_module()
    if linen is None or not issubclass(kind, linen):
        return False
    own = kind.__mro__[: kind.__mro__.index(linen)]
    made_by_others = any({"__post_init__", "__new__"} & vars(each).keys() for each in own)
    code = getattr(kind.__init__, "__code__", None)
    return not made_by_others and code is not None and package_of(code.co_filename) == "flax"


def _linen_module() -> Any:
    return getattr(sys.modules.get("flax.linen.module"), "Module", None)


def _is_told_by(value: Any, fields: Sequence[str]) -> bool:
    """Whether the fields of a dataclass, or of a module of linen that is not bound, say all."""
    known = {*fields}
    if _is_of_linen(type(value)):
        if value.parent is not None or value.scope is not None:
            return False
        known |= _OF_EACH_MODULE
    return getattr(value, "__dict__", {}).keys() <= known


def _decode(data: dict[str, Any], decode: Code) -> Any:
    if "code" in data:
        return _function_made_of(data, decode)
    if "value" in data:
        return decode(data["value"])
    if "method" in data:
        owner = decode(data["of"])
        return types.MethodType(method_of(owner, data["method"]), owner)
    if "partial" in data:
        function, args, keywords = (decode(each) for each in data["partial"])
        return functools.partial(function, *args, **keywords)
    if "items" in data:
        kind, items = _at(data["of"]), [decode(each) for each in data["items"]]
        fields = _fields_of(kind) if isinstance(kind, type) else ()
        if not fields or len(fields) != len(items):
            raise NotThere(f"{kind!r:.80} has not {len(items)} fields")
        if issubclass(kind, tuple):
            return tuple.__new__(kind, items)
        made = object.__new__(kind)
        values = dict(zip(fields, items, strict=True))
        for each in dataclasses.fields(kind):  # In this order, as its constructor does.
            object.__setattr__(made, each.name, values.get(each.name))
        if _is_of_linen(kind):
            _linen_module().__post_init__(made)
        return made
    return _at(data)


def method_of(owner: Any, name: str) -> types.FunctionType:
    """The function that an object's class has under a name. Raises `NotThere` if it has none."""
    for base in type(owner).__mro__:
        if type(found := space_of(base).get(name)) is types.FunctionType:
            return found
    raise NotThere(f"{type(owner).__qualname__} has no method {name!r:.80}")


def _place_of(value: Any) -> dict[str, Any] | None:
    """Where a module has a function or a class, or a package's module an object, under a name."""
    for module, name in _names_of(value):
        if isinstance(module, str) and isinstance(name, str):
            for wrapped, found in enumerate(_found_under(module, name)):
                if found is value:
                    return {"at": [module, name, wrapped, _digest_of(value)]}
    if type(value) is types.FunctionType and not (value.__closure__ or value.__defaults__):
        return _place_of_lambda(value)
    return None


def _place_of_lambda(function: types.FunctionType) -> dict[str, Any] | None:
    """Where a module has a function that is all in its code: under another name, or a default."""
    module, digest = function.__globals__.get("__name__"), code_digest(function.__code__)
    if not isinstance(module, str) or not _are_globals_of(module, function.__globals__):
        return None
    for name in _names_in(module):
        for wrapped, found in enumerate(_found_under(module, name)):
            if found is function:
                return {"at": [module, name, wrapped, digest]}
            for key, default in _defaults_of(found).items():
                if default is function:
                    place = [module, name, wrapped, _digest_of(found)]
                    return {"at": place, "default": key, "digest": digest}
    return None


def _names_in(module: str) -> Iterator[str]:
    for name, value in [*space_of(sys.modules[module]).items()]:
        yield name
        if issubclass(type(value), type) and space_of(value).get("__module__") == module:
            yield from (f"{name}.{each}" for each in [*space_of(value)])


def _defaults_of(function: Any) -> dict[Any, Any]:
    if type(function) is not types.FunctionType:
        return {}
    return dict(enumerate(function.__defaults__ or ())) | (function.__kwdefaults__ or {})


def _names_of(value: Any) -> Iterator[tuple[Any, Any]]:
    """Names under which a value may be found, with their modules."""
    kind = type(value)
    if kind is types.FunctionType:
        yield value.__globals__.get("__name__"), value.__code__.co_qualname
    if issubclass(kind, type | types.FunctionType) or origin_of(kind) != USER:
        module = getattr(value, "__module__", None)
        yield module, getattr(value, "__qualname__", None)
        yield module, getattr(value, "__name__", None)
        if isinstance(module, str) and module == kind.__module__:  # A mark, as equinox's `MISSING`.
            space = space_of(sys.modules[module]) if module in sys.modules else {}
            yield from ((module, name) for name, each in [*space.items()] if each is value)


def _at(data: dict[str, Any]) -> Any:
    module, name, wrapped, digest = data["at"]
    found = next(itertools.islice(_found_under(module, name), wrapped, None), None)
    if found is None or _digest_of(found) != digest:
        raise NotThere(f"{module} has no {name} as it was")
    if "default" in data:
        found = _defaults_of(found).get(data["default"])
        if type(found) is not types.FunctionType or _digest_of(found) != data["digest"]:
            raise NotThere(f"{name} in {module} has not the default that it had")
    return found


def _digest_of(value: Any) -> str:
    """The digest of a function's code, or of what a custom derivative or the like wraps."""
    codes = (each.__code__ for each in _unwrapped(value) if type(each) is types.FunctionType)
    code = next(codes, None)
    return "" if code is None else code_digest(code)


def _found_under(module: str, name: str) -> Iterator[Any]:
    """What a module has under a name, then what that wraps. Looks into dicts alone."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        if not isinstance(found, type | types.ModuleType):
            return
        found = space_of(found).get(part)
    yield from _unwrapped(found)


def _unwrapped(value: Any) -> Iterator[Any]:
    """A value, what it wraps, and so on."""
    for _ in range(_MOST_WRAPPED):
        if value is None:
            return
        yield value
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        elif issubclass(type(value), type) or origin_of(type(value)) == USER:
            return
        else:
            value = getattr(value, "__wrapped__", None)


def _place_of_code(function: types.FunctionType) -> dict[str, Any] | None:
    """Where the code of a function is in the function that made it."""
    code, module = function.__code__, function.__globals__.get("__name__")
    maker = code.co_qualname.partition(".<locals>")[0]
    if not isinstance(module, str) or not _are_globals_of(module, function.__globals__):
        return None
    for wrapped, found in enumerate(_found_under(module, maker)):
        outer = found.__code__ if type(found) is types.FunctionType else None
        path = None if outer is None else _path_to(code, outer)
        if outer is None or path is None:
            continue
        others = set(_codes_in(outer)) - {code, *_codes_in(code)}
        if any(_share(each, code) for each in others):
            return None  # They are to see the same variable.
        names = [function.__name__, function.__qualname__, function.__module__]
        return {"code": [module, maker, wrapped, path, code_digest(code)], "names": names}
    return None


def _function_made_of(data: dict[str, Any], decode: Code) -> types.FunctionType:
    module, maker, wrapped, path, digest = data["code"]
    found = next(itertools.islice(_found_under(module, maker), wrapped, None), None)
    code = found.__code__ if type(found) is types.FunctionType else None
    for number in path:
        constants = code.co_consts if isinstance(code, types.CodeType) else ()
        code = constants[number] if number < len(constants) else None
    if not isinstance(code, types.CodeType) or code_digest(code) != digest:
        raise NotThere(f"{maker} in {module} makes no {data['names'][0]} as it was")
    cells = tuple(types.CellType(decode(each)) for each in data["captured"])
    defaults, keyword_defaults, attributes = decode(data["rest"])
    space = space_of(sys.modules[module])
    name, *names = data["names"]
    function = types.FunctionType(code, space, name, defaults, cells)
    function.__qualname__, function.__module__ = names
    function.__kwdefaults__ = keyword_defaults
    function.__dict__.update(attributes)
    return function


def _are_globals_of(module: str, space: dict[str, Any]) -> bool:
    return module in sys.modules and space_of(sys.modules[module]) is space


def _path_to(code: types.CodeType, outer: types.CodeType) -> list[int] | None:
    """Where code is nested in that of a function: the numbers of constants, outermost first."""
    for number, constant in enumerate(outer.co_consts):
        if constant is code:
            return [number]
        if isinstance(constant, types.CodeType) and (path := _path_to(code, constant)):
            return [number, *path]
    return None


def _codes_in(outer: types.CodeType) -> Iterator[types.CodeType]:
    for constant in outer.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _codes_in(constant)


def _share(code: types.CodeType, other: types.CodeType) -> bool:
    """Whether two functions may have captured one variable, and one of them binds it anew."""
    both = {*code.co_freevars} & {*other.co_freevars}
    codes = (code, *_codes_in(code), other, *_codes_in(other)) if both else ()
    instructions = itertools.chain.from_iterable(map(instructions_of, codes))
    return any(each.opname in _BINDS and each.argval in both for each in instructions)


def _are_alike(value: Any, original: Any) -> bool:
    if type(value) is types.FunctionType is type(original) and value is not original:
        return value.__code__ is original.__code__ and _are_alike(
            *(
                [*(each.__closure__ or ()), each.__defaults__, each.__kwdefaults__, vars(each)]
                for each in (value, original)
            )
        )
    if type(value) is functools.partial is type(original):
        return _are_alike(*([*each.args, each.func, each.keywords] for each in (value, original)))
    return value is original or (type(value) is type(original) and value == original)
