"""The recordings that are active in this thread."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from stepcache import _process_hooks

state = threading.local()
"""Of this thread: `stack`, the active recordings."""
collections = _process_hooks.CollectionHook()
"""Tells of the garbage collections of a thread that records."""


def current() -> Sequence[Any]:
    """The recordings of this thread; none while Python collects garbage.

    Callbacks and finalizers that a collection calls in the middle of a trace are not the trace's.
    """
    return () if collections.thread.collecting else getattr(state, "stack", ())


def any_active() -> bool:
    """Whether anything is recorded in this thread."""
    return bool(getattr(state, "stack", None))
