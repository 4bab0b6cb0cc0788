"""What a process of a pod hands in: host leaves of its call become arrays over the whole mesh."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np

from stepcache import jaxcompat
from stepcache.programs.recipe import Request
from stepcache.programs.signature import Call
from stepcache.spanning import spanning, spans_processes


def is_of_pod(request: Request) -> bool:
    """Whether a call has leaves that go to devices of several processes: all, or none, do."""
    placed = next(filter(None, request.placed), None)
    return placed is not None and spans_processes(placed.sharding)


class HandingIn:
    """Hands in what calls like one before bring, without reading the rest of them.

    Args:
        request: that call; without static arguments.
        token: of its session.
    """

    def __init__(self, request: Request, token: Any):
        self._token = token
        self._tree = request.call.signature.tree
        self._parts = [
            (index, value.shape, value.dtype, placed)
            for index, (value, placed) in enumerate(
                zip(request.call.leaves, request.placed, strict=True)
            )
            if placed is not None and isinstance(value, np.ndarray)
        ]

    def __call__(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        """The arguments with arrays over all processes; None for a call that is not alike."""
        if jaxcompat.session_context.value is not self._token:
            return None
        leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
        if tree != self._tree:
            return None
        for index, shape, dtype, placed in self._parts:
            value = leaves[index]
            if type(value) is not np.ndarray or (value.shape, value.dtype) != (shape, dtype):
                return None
            leaves[index] = spanning(value, placed.sharding, placed.shape)
        return tree.unflatten(leaves)


def handed_in(request: Request) -> Call:
    """A call as its program takes it.

    In one process that is the call as it came: the program places its leaves itself. Over several,
    leaves that the session places are this process's parts of arrays, or the whole of replicated
    ones. Python scalars stay what they are, so that their types stay weak.
    """
    call = request.call
    if not is_of_pod(request):
        return call
    leaves = [
        spanning(value, placed.sharding, placed.shape)
        if placed is not None and isinstance(value, jax.Array | np.ndarray | np.generic)
        else value
        for value, placed in zip(call.leaves, request.placed, strict=True)
    ]
    args, kwargs = call.signature.tree.unflatten(leaves)
    return replace(call, leaves=leaves, args=args, kwargs=kwargs)
