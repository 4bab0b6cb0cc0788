"""What a step's dispatcher calls: on a miss, and in the place of a program under `disable_jit`.

Its references to these functions may outlive the engine, which it knows weakly.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from stepcache.calls.over_buffers import without_layouts
from stepcache.calls.residence import NOT_A_HIT, passes_variables


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
        outputs = fun(*args, **kwargs)
        return without_layouts(outputs)[0] if alive.is_over_buffers else outputs

    return call


def serve(engine: weakref.ref[Any], jitted: Any, *args, **kwargs) -> tuple[Any, Any, bool]:
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
                return alive.dispatcher.call(*whole[0], **whole[1]), None, False
            finally:
                alive.has_global_arguments = False
    if alive.is_planned():
        return NOT_A_HIT, None, True
    outputs, fast_path = alive.run(*args, **kwargs)
    if alive.is_over_buffers:
        outputs, fast_path = without_layouts(outputs, fast_path)
    alive.call_count.is_whole &= fast_path is None or alive.has_global_arguments
    return outputs, fast_path, False
