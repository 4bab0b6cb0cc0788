"""What is in a trace: its equations, the arrays it captured, and who lowers its primitives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend.core import jaxprs_in_params

from stepcache.jaxcompat.private import PRIVATE_API

if PRIVATE_API:
    from stepcache.jaxcompat.private import mlir, pxla


def captured_arrays(jaxpr: Any) -> list[Any]:
    """The arrays that a trace captured by closure, those of nested functions included."""
    seen: dict[int, Any] = {}
    stack, visited = [jaxpr], set()
    while stack:
        current = stack.pop()
        if id(current) in visited:
            continue
        visited.add(id(current))
        seen.update((id(const), const) for const in getattr(current, "consts", ()) or ())
        inner = getattr(current, "jaxpr", current)
        for equation in inner.eqns:
            if equation.params:
                for value in equation.params.values():
                    if hasattr(value, "consts"):
                        stack.append(value)
                stack.extend(jaxprs_in_params(equation.params))
    return [const for const in seen.values() if hasattr(const, "nbytes")]


def equations_of(jaxpr: Any) -> Iterator[Any]:
    """The equations of a trace, those of nested functions included, each once."""
    stack, visited = [jaxpr], set()
    while stack:
        current = stack.pop()
        current = getattr(current, "jaxpr", current)
        if id(current) not in visited:
            visited.add(id(current))
            for equation in current.eqns:
                yield equation
                stack.extend(jaxprs_in_params(equation.params))


def lowering_rules(primitive: Any) -> list[Any]:
    """The functions that lower a primitive, for all platforms."""
    tables = (mlir._lowerings, *mlir._platform_specific_lowerings.values())
    return [table[primitive].rule for table in tables if primitive in table]


def lowering_modules() -> tuple[Any, ...]:
    """The modules of JAX that call these; none where they are out of reach."""
    return (mlir, pxla) if CAN_TELL_RULES else ()


CAN_TELL_RULES = (
    PRIVATE_API and hasattr(mlir, "_lowerings") and hasattr(mlir, "_platform_specific_lowerings")
)
