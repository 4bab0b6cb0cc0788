"""What a step's dispatcher calls: on a miss, and in the place of a program under `disable_jit`.

Its references to these functions may outlive the engine, which it knows weakly.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from stepcache.calls.over_buffers import bare, without_layouts
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
        if alive.is_over_buffers:
            args, kwargs = args[0].opened(args[1:], kwargs)
            return without_layouts(fun(*args, **kwargs))[0]
        if passes_variables(args, kwargs):
            return alive.run_resident(args, kwargs)
        return fun(*args, **kwargs)

    return call


def serve(engine: weakref.ref[Any], jitted: Any, /, *args, **kwargs) -> tuple[Any, Any, bool]:
    """What a dispatcher calls on a miss; a reference to it may outlive its engine."""
    alive = engine()
    if alive is None:
        return jitted(*args, **kwargs), None, False
    if alive.is_over_buffers:
        try:
            args, kwargs = args[0].opened(args[1:], kwargs)
        except ValueError:  # A planned call, with another structure beside its `Variables`.
            return NOT_A_HIT, None, True
    elif not alive.has_global_arguments:
        alive.call_count.add_one()
    if alive.global_arguments is not None:
        whole = alive.global_arguments(args, kwargs)
        if whole is not None:
            alive.has_global_arguments = True
            try:
                args, kwargs = whole
                dispatcher = alive.dispatcher
                if alive.is_over_buffers:
                    form, args, kwargs = bare(args, kwargs, alive.spec.parameters.roles)
                    dispatcher = dispatcher.bound(form)
                return dispatcher.call(*args, **kwargs), None, False
            finally:
                alive.has_global_arguments = False
    if alive.is_planned():
        return NOT_A_HIT, None, True
    outputs, fast_path = alive.run(args, kwargs)
    if alive.is_over_buffers:
        outputs, fast_path = without_layouts(outputs, fast_path)
    alive.call_count.is_whole &= fast_path is None or alive.has_global_arguments
    return outputs, fast_path, False
