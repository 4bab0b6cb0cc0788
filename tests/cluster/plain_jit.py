"""Puts `jax.jit` in the place of stepcache: what a script prints then is what it should print."""

import contextlib
import sys
import types
from itertools import zip_longest

import jax


class Held:
    """A tree in the place of `Variables`."""

    def __init__(self, value, **_):
        self.value = value


def step(fun=None, *, carry=(), batch=None, **options):
    """`jax.jit`, of trees that may be `Held`."""
    if fun is None:
        return lambda fun: step(fun, carry=carry, batch=batch, **options)
    jitted = jax.jit(fun, **options)

    def call(*args, **kwargs):
        held = [isinstance(each, Held) for each in args]
        args = [each.value if is_held else each for each, is_held in zip(args, held, strict=True)]
        out = jitted(*args, **kwargs)
        if not (carry and any(held)):
            return out
        pairs = zip_longest(out, held[: len(out)], fillvalue=False)
        return tuple(Held(each) if is_held else each for each, is_held in pairs)

    return call


def install() -> None:
    """From now on `import stepcache` finds `jax.jit`."""
    module: types.Any = types.ModuleType("stepcache")
    module.step, module.Variables = step, Held
    module.Session = lambda *_, **__: contextlib.nullcontext()
    module.save = module.OnHost = lambda *_, **__: None
    sys.modules["stepcache"] = module
