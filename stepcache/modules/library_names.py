"""What `nnx.jit` and `equinox.filter_jit` give to `jax.jit`, by the names that their user knows.

Both have it compile a function of their own, whose arguments are those of the user's in pieces.
Here they are put together again: for messages, and for the rules that place arrays by their paths.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
from jax.tree_util import GetAttrKey, keystr, tree_flatten_with_path

from stepcache.calls.signature import Call, Parameters, Static
from stepcache.jaxcompat import ArgumentRoles

_ARRAY = object()  # Stands for an array in a tree that is only looked at.


def tell_of(fun: Callable) -> Callable[[Call], Call] | None:
    """What gives a call of `fun` as its user made it; None where that is how `fun` is called."""
    if getattr(fun, "__module__", None) == "equinox._jit":
        return _guarded(_of_filter_jit)
    if type(fun).__module__ == "flax.nnx.transforms.compilation":
        return _guarded(_of_nnx_jit)
    return None


def _guarded(tell: Callable[[Call], Call]) -> Callable[[Call], Call]:
    def told(call: Call) -> Call:
        call = replace(call, tell=None)
        try:
            made = tell(call)
            return made if len(made.paths) == len(call.leaves) else call
        except Exception:  # Another version may pass them in another way.
            return call

    return told


def _of_nnx_jit(call: Call) -> Call:
    """Modules, which are passed as a `GraphDef` and flat states, in the place of these."""
    from flax.nnx.extract import NodeStates

    from stepcache.modules.nnx_graph import GraphStructure, ModuleState

    def module(x: object) -> object:
        if not isinstance(x, NodeStates):
            return x
        return ModuleState(GraphStructure(x.graphdef), jax.tree.leaves(x.states))

    args, kwargs = jax.tree.map(
        module, (call.args, call.kwargs), is_leaf=lambda x: isinstance(x, NodeStates)
    )
    signature = replace(call.signature, tree=jax.tree.structure((args, kwargs)))
    return replace(call, args=args, kwargs=kwargs, signature=signature)


def _of_filter_jit(call: Call) -> Call:
    """Arguments, whose arrays are passed in flat tuples, and all else as one static value."""
    static: Any
    (static,) = call.signature.statics
    function, first, (rest, kwargs) = (
        tree.unflatten([_ARRAY if leaf is None else leaf for leaf in leaves])
        for leaves, tree in static.value
    )
    name_of = Parameters.of(function, ArgumentRoles((), ())).name_of
    named = {
        "fun": [] if inspect.isfunction(function) else [("self", function)],
        "first": [(name_of(0), first)],
        "rest": [(name_of(n), tree) for n, tree in enumerate(rest, 1)] + sorted(kwargs.items()),
    }
    groups = [group for argument in call.args for group in sorted(argument)]
    names, trees = zip(*(each for group in groups for each in named[group]), strict=True)
    statics = tuple(
        Static(name + keystr(keys), type(value), value)
        for name, tree in zip(names, trees, strict=True)
        for keys, value in _settings_of(tree, ())
    )
    signature = replace(call.signature, statics=statics)
    made = replace(call, args=trees, kwargs={}, names=names, signature=signature, fun=function)
    entries, _ = tree_flatten_with_path((trees, {}))
    vars(made)["paths"] = tuple(made.path(keys) for keys, leaf in entries if leaf is _ARRAY)
    return made


def _settings_of(tree: Any, keys: tuple) -> Iterator[tuple[tuple, Any]]:
    """What there is beside arrays: other leaves, static fields, classes of modules; by path."""
    import equinox as eqx

    if isinstance(tree, eqx.Module):
        yield keys, type(tree)
        for each in dataclasses.fields(tree):
            if each.metadata.get("static", False) and hasattr(tree, each.name):
                yield (*keys, GetAttrKey(each.name)), getattr(tree, each.name)

    def is_inner_module(x: Any) -> bool:
        return isinstance(x, eqx.Module) and x is not tree

    for inner, leaf in tree_flatten_with_path(tree, is_leaf=is_inner_module)[0]:
        if is_inner_module(leaf):
            yield from _settings_of(leaf, (*keys, *inner))
        elif leaf is not _ARRAY:
            yield (*keys, *inner), leaf
