"""The recordings that are active in this thread."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from stepcache import _process_hooks

state = threading.local()
"""Of this thread: `stack`, the active recordings; `collecting`, whether Python collects garbage."""


def current() -> Sequence[Any]:
    """The recordings of this thread; none while Python collects garbage.

    Callbacks and finalizers that a collection calls in the middle of a trace are not the trace's.
    """
    return () if getattr(state, "collecting", False) else getattr(state, "stack", ())


def any_active() -> bool:
    """Whether anything is recorded in this thread."""
    return bool(getattr(state, "stack", None))


def _begin_collection() -> None:
    state.collecting = True


def _end_collection() -> None:
    state.collecting = False


collections = _process_hooks.CollectionHook(_begin_collection, _end_collection)
"""Tells of the garbage collections of a thread that records."""
