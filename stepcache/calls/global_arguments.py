"""Host arguments of a call in a pod: makes global arrays of them."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from stepcache.calls.signature import Call
from stepcache.calls.step_spec import Request
from stepcache.pods.global_arrays import global_array, spans_processes
from stepcache.sharding import Placed


def is_of_pod(request: Request) -> bool:
    """Returns whether the session places leaves of a call on devices of several processes."""
    placed = next(filter(None, request.placed), None)
    return placed is not None and spans_processes(placed.sharding)


def with_global_arrays(request: Request) -> Call:
    """Returns a call with a global array in the place of each host leaf that the session places.

    A call in one process is returned as it is: the program places its leaves.
    """
    call, leaves = request.call, [*request.call.leaves]
    if not is_of_pod(request):
        return call
    for index, value, placed in _host_arrays(request):
        leaves[index] = global_array(value, placed.sharding, placed.shape)
    if all(map(operator.is_, leaves, call.leaves)):
        return call
    args, kwargs = call.signature.tree.unflatten(leaves)
    return replace(call, leaves=leaves, args=args, kwargs=kwargs)


def _host_arrays(request: Request) -> Iterator[tuple[int, Any, Placed]]:
    """Number, value and place of each local array that the session places."""
    for index, placed in enumerate(request.placed):
        if placed is not None and _is_local_array(value := request.call.leaves[index]):
            yield index, value, placed


class GlobalArguments:
    """Does what `with_global_arrays` did for one call for others like it, and reads only the leaves
    that it replaces.

    That call has no static arguments; `scope` returns the scope of a call made now.
    """

    def __init__(self, request: Request, scope: Callable[[], Any]):
        self._scope, self._made_in = scope, weakref.ref(scope())
        self._tree = request.call.signature.tree
        self._replaced = [
            (index, type(value), value.shape, value.dtype, placed)
            for index, value, placed in _host_arrays(request)
        ]

    def __call__(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        """Returns the arguments with global arrays; None for a call that differs from the first, or
        that has none to make.
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
    """Returns whether a value is a local array; Python scalars stay weakly typed."""
    if isinstance(value, jax.Array):
        return value.is_fully_addressable
    return isinstance(value, np.ndarray | np.generic)
