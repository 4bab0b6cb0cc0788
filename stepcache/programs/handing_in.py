"""What a process of a pod hands in: host leaves of its call become arrays over the whole mesh."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np

from stepcache.programs.recipe import Request
from stepcache.programs.signature import Call
from stepcache.spanning import spanning, spans_processes


def handed_in(request: Request) -> Call:
    """A call as its program takes it.

    In one process that is the call as it came: the program places its leaves itself. Over several,
    leaves that the session places are this process's parts of arrays, or the whole of replicated
    ones. Python scalars stay what they are, so that their types stay weak.
    """
    call = request.call
    if not any(placed and spans_processes(placed.sharding) for placed in request.placed):
        return call
    leaves = [
        spanning(value, placed.sharding, placed.shape)
        if placed is not None and isinstance(value, jax.Array | np.ndarray | np.generic)
        else value
        for value, placed in zip(call.leaves, request.placed, strict=True)
    ]
    args, kwargs = call.signature.tree.unflatten(leaves)
    return replace(call, leaves=leaves, args=args, kwargs=kwargs)
