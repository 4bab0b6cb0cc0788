"""What the function of a step holds, by names that mean the same in each process.

A step that returns a `TrainState` which it made returns the model's `apply` and the optimizer, in
the tree of its outputs. They are no plain data, but a later process has its own: the step was given
them as static arguments, or in the tree of its arguments, or its function holds them. So are
classes that a function has made, such as those of the fields of a collection of metrics.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from stepcache.calls.signature import Static
from stepcache.fingerprint.bytecode import names_of
from stepcache.fingerprint.instances import attributes_of
from stepcache.fingerprint.provenance import USER, origin_of, origin_of_file
from stepcache.jaxcompat import storing
from stepcache.jaxcompat.checked_data import NotStorable, NotThere, space_of
from stepcache.programs.functions_as_data import Functions, method_of

_DEEPEST, _MOST = 6, 4096
_METHOD, _GLOBAL, _MODULE, _KEPT = "method ", "global ", "module ", "kept "


class HeldObjects(Functions):
    """The objects that a step's function and its arguments lead to.

    Nothing of theirs is called. What the code does not read is no dependency of the step, and may
    be another object in the next process: so only attributes and keys that `codes` name lead on,
    and an object to which two ways lead has no name.

    Args:
        fun: the step's function.
        statics: the static arguments of the call.
        codes: finds the code of the user's that the step reaches.
        tree: of the call's arguments; its nodes may keep objects, as a `TrainState` does.
    """

    def __init__(
        self,
        fun: Any,
        statics: Iterable[Static],
        codes: Callable[[], Iterable[types.CodeType]],
        tree: Any = None,
    ):
        super().__init__()
        self._roots = {"function": fun} | {f"static {each.name}": each.value for each in statics}
        self._codes, self._tree = codes, tree

    def name_of(self, value: Any) -> list[str] | None:
        """The name of an object, or of a method of one; None where it has none.

        Raises `NotStorable` if more than one way leads to it.
        """
        if id(value) in self._kept:
            return [f"{_KEPT}{[*self._kept].index(id(value))}"]
        names, ambiguous = self._names
        owner = value.__self__ if type(value) is types.MethodType else None
        name = names.get(id(value))
        if owner is not None and id(owner) in names:
            method = value.__func__.__name__
            if method_of(owner, method) is value.__func__:
                name = (*names[id(owner)], f"{_METHOD}{method}")
        if name is None:
            return None
        if any(name[:end] in ambiguous for end in range(1, len(name) + 1)):
            raise NotStorable(f"more than one way leads to {value!r:.80}")
        return list(name)

    def named(self, name: list[str]) -> Any:
        """The object of a name in this process. Raises `NotThere` where there is none."""
        if any(type(part) is not str for part in name):
            raise TypeError("the name of a held object is not made of texts")
        first, *others = name
        try:
            found = self._root(first)
            for part in others:
                if part.startswith(_METHOD):
                    found = types.MethodType(method_of(found, part.removeprefix(_METHOD)), found)
                else:
                    found = _parts(found)[part]
        except KeyError:
            raise NotThere(f"there is no {' '.join(name)}") from None
        return found

    def _root(self, name: str) -> Any:
        if name.startswith(_MODULE):
            return space_of(sys.modules[name.removeprefix(_MODULE)])
        if name.startswith(_KEPT):
            return [*self._kept.values()][int(name.removeprefix(_KEPT))]
        return self._roots[name]

    @functools.cached_property
    def _kept(self) -> dict[int, Any]:
        """The objects that the arguments' tree keeps, by identity; the order numbers them."""
        return {id(value): value for value in storing.objects_in(self._tree)}

    @functools.cached_property
    def _names(self) -> tuple[dict[int, tuple[str, ...]], set[tuple[str, ...]]]:
        """Names of objects by identity, and those of objects to which another way leads, too."""
        codes = [*self._codes()]
        read = set().union(*(names_of(code).accessed for code in codes))
        wholly = set().union(*(_read_wholly(code) for code in codes))
        # Names of dictionaries: how code reads each, and those that are dependencies wholly.
        chains: dict[tuple[str, ...], tuple[str, ...]] = {}
        whole: set[tuple[str, ...]] = set()
        names: dict[int, tuple[str, ...]] = {}
        ambiguous: set[tuple[str, ...]] = set()
        variables: set[Any] = set()
        todo: deque[tuple[tuple[str, ...], Any]] = deque()
        todo.extend(((name,), value) for name, value in self._roots.items())
        for module, variable in sorted(_globals_read_by(codes)):
            space = space_of(sys.modules[module])
            if not issubclass(type(space[variable]), _WITHOUT_PARTS):
                todo.append(((f"{_MODULE}{module}", variable), space[variable]))
                if type(space[variable]) is dict:
                    chains[todo[-1][0]] = chain = (f"{_GLOBAL}{variable}",)
                    if chain in wholly:
                        whole.add(todo[-1][0])
                variables.add((id(space), f"{_GLOBAL}{variable}"))
        while todo and len(names) < _MOST:
            name, value = todo.popleft()
            known = names.setdefault(id(value), name)
            if known != name:
                if name[: len(known)] != known:  # Else it leads to itself.
                    ambiguous.add(known)
                continue
            all_lead_on = name in whole or not _is_named_by_code(value)
            for part, each in _parts(value).items() if len(name) < _DEEPEST else ():
                variable = _variable(value, part)
                leads_on = part in read or all_lead_on
                if type(each) is dict:
                    chain = (part,) if variable else (f".{part}",)
                    chain = (*chains[name], part) if name in chains else chain
                    chains[(*name, part)] = chain
                    if name in whole or chain in wholly:
                        whole.add((*name, part))
                leads_on = leads_on and variable not in variables
                if leads_on and not issubclass(type(each), _WITHOUT_PARTS):
                    todo.append(((*name, part), each))
                    variables.update(() if variable is None else (variable,))
        return names, ambiguous


def _read_wholly(code: types.CodeType) -> set[tuple[str, ...]]:
    """The variables and attributes, with keys after them, of which code may read all.

    All that such a dictionary holds is a dependency. Attributes are told by a dot.
    """
    names = names_of(code)
    found = {
        (f"{_GLOBAL if each.kind == 'global' else ''}{each.name}", *each.keys)
        for each in names.reads
    }
    found |= {(f".{each}",) for each in names.loads - names.keys.keys()}
    return found | {(f".{each}", *keys) for each, found in names.keys.items() for keys in found}


def _globals_read_by(codes: Iterable[types.CodeType]) -> set[tuple[str, str]]:
    """The global variables that code of the user's reads, with the names of their modules.

    Code whose file is not that of one module, as of a notebook, is left out.
    """
    modules: dict[Any, list[str]] = {}
    for name, module in [*sys.modules.items()]:
        if issubclass(type(module), types.ModuleType):
            modules.setdefault(space_of(module).get("__file__"), []).append(name)
    found = set()
    for code in codes:
        names = modules.get(code.co_filename, ())
        if len(names) == 1:
            read = {each.name for each in names_of(code).reads if each.kind == "global"}
            found |= {(names[0], each) for each in read & space_of(sys.modules[names[0]]).keys()}
    return found


def _variable(value: Any, part: str) -> Any:
    """What tells a variable, which several functions share, from others; None for other parts."""
    if type(value) is not types.FunctionType:
        return None
    if part.startswith(_GLOBAL):
        return id(value.__globals__), part
    cells = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
    return id(cells[part]) if part in cells else None


def _is_named_by_code(value: Any) -> bool:
    """Whether only some parts of an object are dependencies: those that code names."""
    kinds: Any = (types.FunctionType, types.MethodType, functools.partial, type, tuple, list)
    return not issubclass(type(value), kinds)


_WITHOUT_PARTS = (types.ModuleType, np.ndarray, jax.Array, str, bytes, int, float, type(None))


def _parts(value: Any) -> dict[str, Any]:
    """What an object holds, by names."""
    kind = type(value)
    if issubclass(kind, type):  # Of a class, the classes of its fields.
        fields = vars(value).get("__dataclass_fields__") if origin_of(value) == USER else None
        return {name: each.type for name, each in (fields or {}).items()}
    if kind is types.FunctionType:
        return _parts_of_function(value)
    if kind is types.MethodType:
        return {"self": value.__self__, "function": value.__func__}
    if issubclass(kind, functools.partial):
        arguments = {str(number): each for number, each in enumerate(value.args)}
        return {"function": value.func} | arguments | value.keywords
    if issubclass(kind, tuple | list):
        items = tuple.__iter__(value) if issubclass(kind, tuple) else list.__iter__(value)
        return {str(number): each for number, each in enumerate(items)}
    if issubclass(kind, dict):
        return {name: each for name, each in dict.items(value) if type(name) is str}
    return {} if issubclass(kind, _WITHOUT_PARTS) else attributes_of(value)


def _parts_of_function(function: types.FunctionType) -> dict[str, Any]:
    code, space = function.__code__, function.__globals__
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    parts = {name: cell.cell_contents for name, cell in cells.items() if not _is_empty(cell)}
    defaults = enumerate(function.__defaults__ or ())
    parts |= {f"default {number}": value for number, value in defaults}
    parts |= {f"default {name}": value for name, value in (function.__kwdefaults__ or {}).items()}
    if origin_of_file(code.co_filename) == USER:
        read = {each.name for each in names_of(code).reads if each.kind == "global"}
        parts |= {f"{_GLOBAL}{name}": space[name] for name in sorted(read) if name in space}
    return parts | vars(function)


def _is_empty(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is cell
    except ValueError:
        return True
