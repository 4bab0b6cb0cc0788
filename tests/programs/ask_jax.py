"""Gives JAX's functions objects that are none of JAX's, and prints what it asks of them.

    python ask_jax.py EVERY

An object writes down the names that it is asked for, with the module that asks. It has nothing, or
what an array has, or all that it is asked for. Of the functions of JAX's public modules, every
EVERY-th is called with such objects at each of its places.
"""

import contextlib
import inspect
import json
import signal
import sys
import warnings
from collections import defaultdict

import jax
import jax.numpy as jnp
import jax.scipy
import numpy as np
from jax import lax, nn, random, tree_util

ASKED: defaultdict[str, set[str]] = defaultdict(set)
X, V, KEY = jnp.ones((3, 3)), jnp.ones(3), random.key(0)


class Nothing:
    def __getattribute__(self, name):
        ASKED[name].add(sys._getframe(1).f_globals.get("__name__", ""))
        return object.__getattribute__(self, name)


class Callable(Nothing):
    def __call__(self, *arguments, **others):
        return arguments[0] if arguments else 1.0


class Array(Nothing):
    shape, dtype, ndim, size, weak_type = (3,), np.dtype("float32"), 1, 3, False


class Everything(Nothing):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Everything()

    def __call__(self, *arguments, **others):
        return Everything()

    def __hash__(self):
        return 1

    def __eq__(self, other):
        return True

    def __index__(self):
        return 1


class ArrayWithEverything(Everything):
    shape, dtype, ndim, size, weak_type = (3,), np.dtype("float32"), 1, 3, False


KINDS = (Nothing, Callable, Array, Everything, ArrayWithEverything)
MODULES = (
    *(jnp, lax, nn, random, tree_util, jax, jax.image, jax.scipy.special, jax.scipy.linalg),
    *(jnp.linalg, jnp.fft, nn.initializers, jax.tree, jax.ops, jax.debug, jax.dtypes),
    *(jax.sharding, jax.stages, jax.custom_batching, jax.custom_derivatives),
)
# They end, change or wait for what is not the call's own.
LEFT_OUT = frozenset(
    "disable_jit distributed clear_caches clear_backends start_server stop_server set_mesh "
    "use_mesh while_loop wait_for_tokens live_arrays breakpoint print_environment_info".split()
)
AS_PEOPLE_USE_THEM = (
    lambda o: jax.jit(lambda x: x + o)(V),
    lambda o: jax.jit(lambda x: o)(V),
    lambda o: jax.jit(lambda x, given: x, static_argnums=1)(V, o),
    lambda o: jax.jit(lambda x: x)(o),
    lambda o: jax.jit(o)(V),
    lambda o: jax.jit(lambda x: x, in_shardings=o, out_shardings=o)(V),
    lambda o: jax.grad(o)(1.0),
    lambda o: jax.vmap(o, in_axes=o, axis_name=o)(V),
    lambda o: jax.vmap(lambda x: lax.psum(x, o), axis_name="a")(V),
    lambda o: jax.jvp(o, (1.0,), (1.0,)),
    lambda o: jax.vjp(lambda x: x * o, V),
    lambda o: jax.linear_transpose(o, V)(V),
    lambda o: jax.checkpoint(lambda x: jnp.sin(x).sum(), policy=o)(V),
    lambda o: jax.grad(jax.checkpoint(lambda x: jnp.sin(x).sum(), policy=o))(V),
    lambda o: jax.custom_jvp(o)(V),
    lambda o: jax.custom_vjp(o)(V),
    lambda o: lax.scan(o, 0.0, V),
    lambda o: lax.scan(lambda carry, x: (carry, o), 0.0, V),
    lambda o: lax.cond(True, o, o, V),
    lambda o: lax.switch(o, [o, o], V),
    lambda o: lax.fori_loop(0, 3, lambda i, x: o, 1.0),
    lambda o: lax.with_sharding_constraint(V, o),
    lambda o: lax.reduce(V, 0.0, o, (0,)),
    lambda o: jax.pure_callback(o, o, V),
    lambda o: jax.debug.callback(o, V),
    lambda o: jax.debug.print("{}", o),
    lambda o: jax.device_put(V, o),
    lambda o: jax.device_put(o),
    lambda o: jax.tree.map(o, [o]),
    lambda o: jax.ShapeDtypeStruct((1,), np.float32, sharding=o),
    lambda o: jax.NamedSharding(o, o),
    lambda o: jax.shard_map(lambda x: x, mesh=o, in_specs=o, out_specs=o)(V),
    lambda o: jax.random.key(0, impl=o),
    lambda o: V.at[o].set(o),
    lambda o: V[o] + o,
    lambda o: o @ V.astype(o),
    lambda o: jnp.einsum("i,i", V, V, precision=o),
    lambda o: jnp.array(o, dtype=o, device=o),
)


def attempt(function, *arguments, **others):
    signal.setitimer(signal.ITIMER_REAL, 5)
    with contextlib.suppress(BaseException):
        made = function(*arguments, **others)
        if callable(made) and not isinstance(made, (type, Nothing)):
            made(V)
    signal.setitimer(signal.ITIMER_REAL, 0)


def ask(module, function):
    with contextlib.suppress(ValueError, TypeError):
        parameters = [*inspect.signature(function).parameters.values()]
        by_place = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        needed = sum(each.default is each.empty for each in by_place) or 1
        named = [p.name for p in parameters[needed:] if p.kind is not p.VAR_KEYWORD]
        usual = ([KEY] if module is random else [X]) + [X] * (needed - 1)
        for kind in KINDS:
            for place in range(needed):
                for given in (kind(), [kind()], {"a": kind()}):
                    attempt(function, *usual[:place], given, *usual[place + 1 :])
            for name in named:
                attempt(function, *usual, **{name: kind()})
                attempt(function, lambda *x: x[0], *usual[1:], **{name: kind()})


def late(*_):
    raise TimeoutError


if __name__ == "__main__":
    signal.signal(signal.SIGALRM, late)
    warnings.simplefilter("ignore")
    for use in AS_PEOPLE_USE_THEM:
        for kind in KINDS:
            attempt(use, kind())
    functions = [(m, getattr(m, n, None), n) for m in MODULES for n in dir(m) if n[0] != "_"]
    functions = [(m, f) for m, f, name in functions if callable(f) and name not in LEFT_OUT]
    with contextlib.redirect_stdout(sys.stderr):
        for module, function in functions[:: int(sys.argv[1])]:
            ask(module, function)
    print(json.dumps({name: sorted(modules) for name, modules in ASKED.items()}))
