"""Host arguments of a call in a pod: makes global arrays of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from stepcache.calls.signature import Call
from stepcache.calls.step_spec import Request
from stepcache.pods.global_arrays import global_array, spans_processes


def is_of_pod(request: Request) -> bool:
    """Whether the session places leaves of a call on devices of several processes."""
    placed = next(filter(None, request.placed), None)
    return placed is not None and spans_processes(placed.sharding)


class GlobalArguments:
    """Puts a global array in the place of each host leaf that the session places.

    It does that for one call, and for later ones that are alike, of which it reads only the leaves
    that it replaces. The first has no static arguments if there are to be later ones.
    """

    def __init__(self, request: Request, scope: Callable[[], Any]):
        self._scope, self._made_in = scope, weakref.ref(scope())
        self._tree = request.call.signature.tree
        rows = enumerate(zip(request.call.leaves, request.placed, strict=True))
        self._replaced = [
            (index, type(value), value.shape, value.dtype, placed)
            for index, (value, placed) in rows
            if placed is not None and _is_local_array(value)
        ]

    def in_place(self, call: Call) -> Call:
        """The first call with global arrays; itself if it has none to make."""
        if (made := self(call.args, call.kwargs)) is None:
            return call
        args, kwargs = made
        return replace(call, leaves=jax.tree_util.tree_leaves(made), args=args, kwargs=kwargs)

    def __call__(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        """The arguments of a call with global arrays; None where it differs from the first, or has
        none to make.
        """
        if not self._replaced or self._scope() is not self._made_in():
            return None
        leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
        if tree != self._tree:
            return None
        for index, kind, shape, dtype, placed in self._replaced:
            value = leaves[index]
            is_alike = type(value) is kind and (value.shape, value.dtype) == (shape, dtype)
            if not is_alike or not _is_local_array(value):
                return None
            leaves[index] = global_array(value, placed.sharding, placed.shape)
        return tree.unflatten(leaves)


def _is_local_array(value: Any) -> bool:
    """Whether a value is a local array; Python scalars stay weakly typed."""
    if isinstance(value, jax.Array):
        return value.is_fully_addressable
    return isinstance(value, np.ndarray | np.generic)
