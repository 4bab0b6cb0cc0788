"""JAX's C++ dispatcher over our own miss callback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stepcache.jaxcompat.arguments import ArgumentRoles
from stepcache.jaxcompat.private import PRIVATE_API

if PRIVATE_API:
    from stepcache.jaxcompat.private import (
        _jax,
        pxla,
        traceback_util,
        tree_util,
    )


def make_dispatcher(
    fun: Callable, name: str, miss: Callable, roles: ArgumentRoles, capacity: int
) -> Any:
    """JAX's own C++ dispatcher over our miss callback.

    Args:
        fun: called as it is under `jax.disable_jit`.
        name: shown by profilers.
        miss: `(*args, **kwargs) -> (outputs, fast path data or None, drop the entry)`.
        roles: the static arguments.
        capacity: signatures that the dispatcher keeps.
    """
    dispatcher = _jax.pjit(
        name,
        fun,
        traceback_util.api_boundary(miss),
        roles.static_argnums,
        roles.static_argnames,
        pxla.JitGlobalCppCacheKeys(),
        tree_util.dispatch_registry,
        pxla.cc_shard_arg,
        _jax.PjitFunctionCache(capacity=capacity),
    )
    dispatcher._fun = fun  # Where JAX's NaN check of a hit looks for the function to call eagerly.
    dispatcher.__name__, dispatcher.__wrapped__ = name, fun  # Where JAX looks for source and name.
    return dispatcher
