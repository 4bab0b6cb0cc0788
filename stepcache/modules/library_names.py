"""What `nnx.jit` and `equinox.filter_jit` give to `jax.jit`, by the names that their user knows.

Both have it compile a function of their own, whose arguments are those of the user's in pieces.
Here they are put together again, for messages alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from jax.tree_util import GetAttrKey, keystr, tree_flatten_with_path

from stepcache.calls.signature import Call, Path, Static


def tell_of(fun: Callable) -> Callable[[Call], Call] | None:
    """What gives a call of `fun` as its user made it; None where that is how `fun` is called."""
    if getattr(fun, "__module__", None) == "equinox._jit":
        return _guarded(_of_filter_jit)
    if type(fun).__module__ == "flax.nnx.transforms.compilation":
        return _guarded(_of_nnx_jit)
    return None


def _guarded(tell: Callable[[Call], Call]) -> Callable[[Call], Call]:
    def told(call: Call) -> Call:
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
    from stepcache.modules.equinox_trees import ARRAY, settings_of

    static: Any
    (static,) = call.signature.statics
    function, first, (args, kwargs) = (
        tree.unflatten([ARRAY if leaf is None else leaf for leaf in leaves])
        for leaves, tree in static.value
    )
    names = list(inspect.signature(function).parameters)
    named = {"fun": {} if inspect.isfunction(function) else {"self": function}}
    named["first"] = dict(zip(names[:1], [first], strict=False))
    named["rest"] = dict(zip(names[1:], args, strict=False)) | dict(sorted(kwargs.items()))
    groups = [group for argument in call.args for group in sorted(argument)]
    trees = [each for group in groups for each in named[group].items()]
    statics = tuple(
        Static(name + keystr(keys), type(value), value)
        for name, tree in trees
        for keys, value in settings_of(tree, ())
    )
    made = replace(call, signature=replace(call.signature, statics=statics))
    vars(made)["paths"] = tuple(
        Path(
            name, name + keystr(keys), keystr((GetAttrKey(name), *keys), simple=True, separator="/")
        )
        for name, tree in trees
        for keys, leaf in tree_flatten_with_path(tree)[0]
        if leaf is ARRAY
    )
    return made
