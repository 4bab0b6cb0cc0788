"""Callbacks into Python: whether a trace has one, and what JAX logs when one raises."""

from __future__ import annotations

from jax.extend.core import jaxprs_in_params

from stepcache.jaxcompat.private import PRIVATE_API

if PRIVATE_API:
    from jax._src import core

LOG_OF_CALLBACKS = ("jax._src.callback", "jax.pure_callback failed")
"""Logger and message of an error in a callback, which is raised as well."""

_CALLBACKS = frozenset(("pure_callback", "io_callback"))


def calls_back() -> bool:
    """Whether the trace that this thread is in has, so far, a callback whose error is raised.

    That is a `jax.pure_callback` or `io_callback`, also in a nested function. Where the private API
    is out of reach the answer is yes.
    """
    if not PRIVATE_API:
        return True
    frame = getattr(core.trace_ctx.trace, "frame", None)
    pending, visited = [frame.get_eqns() if frame is not None else []], set()
    while pending:
        for equation in pending.pop():
            if equation.primitive.name in _CALLBACKS:
                return True
            for jaxpr in jaxprs_in_params(equation.params):
                if id(jaxpr) not in visited:
                    visited.add(id(jaxpr))
                    pending.append(jaxpr.eqns)
    return False
