"""What a process of a pod hands in: host leaves of its call become arrays over the whole mesh."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from stepcache.calls.signature import Call
from stepcache.calls.step_spec import Request
from stepcache.distributed.global_arrays import spanning, spans_processes


def is_of_pod(request: Request) -> bool:
    """Whether a call has leaves that go to devices of several processes: all, or none, do."""
    placed = next(filter(None, request.placed), None)
    return placed is not None and spans_processes(placed.sharding)


class HandingIn:
    """Hands in what calls like one before, without reading the rest of them.

    Args:
        request: that call; without static arguments.
        scope: gives what a session decides for a call made now.
    """

    def __init__(self, request: Request, scope: Callable[[], Any]):
        self._scope, self._made_in = scope, weakref.ref(scope())
        self._tree = request.call.signature.tree
        self._parts = [
            (index, type(value), value.shape, value.dtype, placed)
            for index, (value, placed) in enumerate(
                zip(request.call.leaves, request.placed, strict=True)
            )
            if placed is not None and _is_handed_in(value)
        ]

    def __call__(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        """The arguments with arrays over all processes; None where nothing becomes one of those,
        and for a call that is not alike.
        """
        if not self._parts or self._scope() is not self._made_in():
            return None
        leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
        if tree != self._tree:
            return None
        for index, kind, shape, dtype, placed in self._parts:
            value = leaves[index]
            if type(value) is not kind or (value.shape, value.dtype) != (shape, dtype):
                return None
            if not _is_handed_in(value):
                return None
            leaves[index] = spanning(value, placed.sharding, placed.shape)
        return tree.unflatten(leaves)


def _is_handed_in(value: Any) -> bool:
    """Whether a value is this process's own, and no Python scalar: so that types stay weak."""
    if isinstance(value, jax.Array):
        return value.is_fully_addressable
    return isinstance(value, np.ndarray | np.generic)


def handed_in(request: Request) -> Call:
    """A call as its program takes it.

    In one process that is the call as it came: the program places its leaves itself. Over several,
    leaves that the session places are this process's parts of arrays, or the whole of replicated
    ones.
    """
    call = request.call
    if not is_of_pod(request):
        return call
    leaves = [
        spanning(value, placed.sharding, placed.shape)
        if placed is not None and _is_handed_in(value)
        else value
        for value, placed in zip(call.leaves, request.placed, strict=True)
    ]
    if all(map(operator.is_, leaves, call.leaves)):
        return call
    args, kwargs = call.signature.tree.unflatten(leaves)
    return replace(call, leaves=leaves, args=args, kwargs=kwargs)
