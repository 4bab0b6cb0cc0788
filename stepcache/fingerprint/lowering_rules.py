"""Whether JAX's own code, and nothing else, lowers a trace.

Then the trace alone says what a program depends on, and its lowering need not be recorded. A
primitive's rule may be anybody's, and some primitives carry functions of the user's that their
rules call.
"""

from __future__ import annotations

import contextlib
import functools
from types import CodeType, FunctionType
from typing import Any

from jax.sharding import Mesh

from stepcache import jaxcompat
from stepcache.fingerprint.provenance import package_of

_OF_JAX = frozenset(("jax", "jaxlib"))
# They carry functions for transformations that come before the lowering.
_CALL_NOTHING = frozenset(("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "reduce"))


def code_of_lowering(jaxpr: Any) -> dict[int, CodeType] | None:
    """JAX's code that lowers a trace, by its identity: the rules, and what calls them.

    None where other code than JAX's may run.
    """
    if not jaxcompat.CAN_STORE:
        return None
    primitives: set[Any] = set()
    harmless: set[type] = {str, bool, int, type(None)}  # No value of these can be called.
    for equation in jaxcompat.equations_of(jaxpr):
        primitives.add(equation.primitive)
        if equation.primitive.name in _CALL_NOTHING:
            continue
        values = list(equation.params.values())
        values += [getattr(variable.aval, "dtype", None) for variable in equation.invars]
        for value in values:  # Written out: a trace has thousands of them.
            if type(value) is tuple:
                values += value
            elif type(value) not in harmless:
                if not _is_harmless(value):
                    return None
                if not (callable(value) or hasattr(value, "_impl")):
                    harmless.add(type(value))
    found = dict(_code_around_rules())
    for primitive in primitives:
        for rule in jaxcompat.lowering_rules(primitive):
            code = code_of_rule(rule)
            if code is None:
                return None
            found |= code
    return found or None


def _is_harmless(value: Any) -> bool:
    """Whether a rule finds no function in a parameter, or in a dtype, that is not JAX's."""
    generator = getattr(value, "_impl", None)  # Of random keys.
    if generator is not None and code_of_rule(generator) is None:
        return False
    return not callable(value) or isinstance(value, type | Mesh)


@functools.lru_cache(maxsize=4096)
def code_of_rule(rule: Any) -> dict[int, CodeType] | None:
    """The code that a rule consists of; None if some of it is not JAX's."""
    found: dict[int, CodeType] = {}
    waiting, seen = [rule], set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, FunctionType):
            if package_of(value.__code__.co_filename) not in _OF_JAX:
                return None
            found[id(value.__code__)] = value.__code__
            for cell in value.__closure__ or ():
                with contextlib.suppress(ValueError):  # It is empty.
                    waiting.append(cell.cell_contents)
            waiting += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        elif isinstance(value, functools.partial):
            waiting += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, tuple | list):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
        elif callable(value):
            inner = getattr(value, "__wrapped__", None)
            if inner is not None:
                waiting.append(inner)
            elif (getattr(value, "__module__", None) or "").partition(".")[0] not in _BUILT_IN:
                return None
    return found


_BUILT_IN = _OF_JAX | {"builtins", "operator", "_operator", "numpy"}


@functools.lru_cache(maxsize=1)
def _code_around_rules() -> dict[int, CodeType]:
    return {
        id(value.__code__): value.__code__
        for module in jaxcompat.lowering_modules()
        for value in vars(module).values()
        if isinstance(value, FunctionType) and value.__module__ == module.__name__
    }
