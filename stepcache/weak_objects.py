"""`WeakObjects`: a weak set that threads may list while others add to it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class WeakObjects(Generic[T]):
    """Objects that are in here for as long as something else holds them.

    Any thread may add at any time. A `weakref.WeakSet` raises in a thread that iterates over it
    while another one adds; this iterates over the objects that were there when it began.
    """

    def __init__(self):
        # One operation of a dict is atomic, also against the callback of the garbage collector.
        self._references: dict[weakref.ref[T], None] = {}

    def add(self, item: T) -> None:
        """Adds an object; one that is there is not added again."""
        self._references[weakref.ref(item, self._forget)] = None

    def _forget(self, reference: weakref.ref[T]) -> None:
        self._references.pop(reference, None)

    def __contains__(self, item: T) -> bool:
        return weakref.ref(item) in self._references

    def __iter__(self) -> Iterator[T]:
        for reference in list(self._references):
            item = reference()
            if item is not None:
                yield item
