"""The hit path: JAX's C++ dispatcher over our miss callback, and the public-API stand-in.

A hit in the C++ dispatcher never enters Python. It therefore cannot be counted, and the entry it
uses must be dropped whenever something that it relies on goes: an evicted program, a closed
session, a fork.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from stepcache import _process_hooks, jaxcompat
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

    __slots__ = ("__weakref__", "_bound", "_given", "_lock", "_recent", "call")

    def __init__(
        self,
        fun: Callable,
        name: str,
        miss: Callable[..., tuple[Any, Any, bool]],
        roles: jaxcompat.ArgumentRoles,
    ):
        self._given = (fun, name, miss, roles)
        self._bound: weakref.WeakValueDictionary[Any, Dispatcher] = weakref.WeakValueDictionary()
        self._recent: deque[Dispatcher] = deque(maxlen=_SIGNATURES_PER_STEP)
        self._lock = threading.RLock()
        if jaxcompat.PRIVATE_API:
            self.call = jaxcompat.make_dispatcher(fun, name, miss, roles, _SIGNATURES_PER_STEP)
        else:

            def call(*args, **kwargs):
                if jaxcompat.jit_is_disabled():
                    return fun(*args, **kwargs)
                return miss(*args, **kwargs)[0]

            self.call = call
        _live.add(self)

    def bound(self, first: Any) -> Dispatcher:
        """Serves the same calls where `first` comes before the arguments, without being passed.

        As a static argument it would cost each hit some 0.1 µs. The same `first` has one
        dispatcher, as long as anybody holds that.
        """
        with self._lock:
            if (found := self._bound.get(first)) is None:
                fun, name, miss, roles = self._given
                eager = functools.update_wrapper(functools.partial(fun, first), fun)
                found = Dispatcher(eager, name, functools.partial(miss, first), roles)
                self._bound[first] = found
            self._recent.append(found)
            return found

    def clear(self) -> None:
        """Drops all entries; each comes back by one cheap trip through Python."""
        for known in self._bound.valuerefs():  # Without the lock: after a fork it may be taken.
            if (each := known()) is not None:
                each.clear()
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
