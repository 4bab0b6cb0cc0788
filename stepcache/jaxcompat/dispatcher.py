"""JAX's C++ dispatcher over our own miss callback, and the frames that errors do not show."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from stepcache.jaxcompat.arguments import ArgumentRoles
from stepcache.jaxcompat.private import PRIVATE_API

if PRIVATE_API:
    from stepcache.jaxcompat.private import (
        _jax,
        pxla,
        source_info_util,
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


def hide_frames(directory: str) -> None:
    """Takes the files below `directory` for JAX's own: no user's code, in errors and metadata."""
    if PRIVATE_API:
        traceback_util.register_exclusion(directory)
        source_info_util.register_exclusion(directory + os.sep)
