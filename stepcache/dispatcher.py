"""The hit path: JAX's C++ dispatcher over our miss callback, and the public-API stand-in.

A hit in the C++ dispatcher never enters Python. It therefore cannot be counted, and the entry it
uses must be dropped whenever something that it relies on goes: an evicted program, a closed
session, a fork. What it calls on a miss knows its engine weakly, and may outlive it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from stepcache import _process_hooks, jaxcompat
from stepcache.resident.passing import NOT_A_HIT, passes_variables
from stepcache.weak_objects import WeakObjects

_SIGNATURES_PER_STEP = 4096


class Dispatcher:
    """Calls a step: a hit is served at once, everything else goes to `miss`.

    Args:
        fun: the user's function, called as it is under `jax.disable_jit`.
        name: the step's name.
        miss: `(*args, **kwargs) -> (outputs, fast path data or None, drop the entry)`.
        roles: the static arguments.
    """

    __slots__ = ("__weakref__", "call")

    def __init__(
        self,
        fun: Callable,
        name: str,
        miss: Callable[..., tuple[Any, Any, bool]],
        roles: jaxcompat.ArgumentRoles,
    ):
        if jaxcompat.PRIVATE_API:
            self.call = jaxcompat.make_dispatcher(fun, name, miss, roles, _SIGNATURES_PER_STEP)
        else:

            def call(*args, **kwargs):
                if jaxcompat.jit_is_disabled():
                    return fun(*args, **kwargs)
                return miss(*args, **kwargs)[0]

            self.call = call
        _live.add(self)

    def clear(self) -> None:
        """Drops all entries; each comes back by one cheap trip through Python."""
        if jaxcompat.PRIVATE_API:
            self.call._clear_cache()

    def size(self) -> int:
        """How many signatures the dispatcher serves by itself."""
        return self.call._cache_size() if jaxcompat.PRIVATE_API else 0


_live: WeakObjects[Dispatcher] = WeakObjects()


def clear_all() -> None:
    """Sends the next call of every step through Python."""
    for dispatcher in _live:
        dispatcher.clear()


def _clear_in_child() -> None:
    if jaxcompat.backends_are_initialized():
        clear_all()


_process_hooks.at_fork(after_in_child=_clear_in_child)


def eagerly(engine: weakref.ref[Any], fun: Callable) -> Callable:
    """What a dispatcher calls under `jax.disable_jit`."""

    @functools.wraps(fun)
    def call(*args, **kwargs):
        alive = engine()
        if alive is None:
            return fun(*args, **kwargs)
        if alive.is_planned():
            return NOT_A_HIT
        if passes_variables(args, kwargs):
            return alive.run_resident(args, kwargs)
        return fun(*args, **kwargs)

    return call


def serve(engine: weakref.ref[Any], jitted: Any, /, *args, **kwargs) -> tuple[Any, Any, bool]:
    """What a dispatcher calls on a miss; a reference to it may outlive its engine."""
    alive = engine()
    if alive is None:
        return jitted(*args, **kwargs), None, False
    if not (alive.is_over_buffers or alive.has_global_arguments):
        alive.call_count.add_one()
    if alive.global_arguments is not None:
        whole = alive.global_arguments(args, kwargs)
        if whole is not None:
            alive.has_global_arguments = True
            try:
                args, kwargs = whole
                return alive.dispatcher.call(*args, **kwargs), None, False
            finally:
                alive.has_global_arguments = False
    if alive.is_planned():
        return NOT_A_HIT, None, True
    outputs, fast_path = alive.run(args, kwargs)
    alive.call_count.is_whole &= fast_path is None or alive.has_global_arguments
    return outputs, fast_path, False
