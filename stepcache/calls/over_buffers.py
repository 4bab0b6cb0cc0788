"""Turns a step's function into one over the buffers of `Variables`, which hold their leaves.

The program that is made of it takes them apart inside XLA, and puts what is carried together again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr

from stepcache import jaxcompat
from stepcache.calls.carry import OverStep, argument_of, refuse, refuse_tree, type_of
from stepcache.calls.key import identity
from stepcache.calls.signature import Call, Leaf, Signature
from stepcache.calls.step_spec import StepSpec
from stepcache.variables.packing import Layout, Packed, Slot, interned
from stepcache.variables.shares import HostLayout


class Again(int):
    """Stands for `Variables` that are in the call already, by their number among them."""

    __slots__ = ()


jax.tree_util.register_static(Again)


HELD = "Variables"
"""Holder of a leaf of `Variables`, at their first place in a call."""


def is_stand_in(node: Any) -> bool:
    return isinstance(node, Packed | Again)


def over_buffers(spec: StepSpec) -> StepSpec:
    """The spec of a step whose arguments are buffers where they were `Variables`."""
    fun = _OverBuffers(spec.fun, spec.name, spec.parameters)
    return spec._replace(
        fun=fun,
        jitted=jaxcompat.jit(fun, **spec.options),
        identity=identity(fun),
        pads=(),
        tell=functools.partial(in_leaves, spec.parameters.carry),
        hosted=_hosted,
    )


def _hosted(call: Call) -> set[int]:
    """The numbers of the leaves that are buffers of variables in host memory."""
    numbers, found = itertools.count(), set()
    for node in leaves_of((call.args, call.kwargs)):
        own = [next(numbers) for _ in jax.tree_util.tree_leaves(node)]
        if isinstance(node, Packed) and isinstance(node.layout, HostLayout):
            found.update(own)
    return found


class _OverBuffers(OverStep):
    """Calls a step's function on the trees that its buffers hold."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        carried = [argument_of(self._positional, args, kwargs, name) for name in self._carry]
        values = _packed_in((*carried, args, kwargs))
        seen = [(node, node.layout.unpack(node.buffers)) for node in values]

        def opened(node: Any) -> Any:
            """A tree of its own for each place, as a plain tree has: the function may change it."""
            if not is_stand_in(node):
                return node
            same = (pair for pair in seen if pair[0] is node)
            packed, leaves = seen[node] if isinstance(node, Again) else next(same)
            return packed.layout.tree.unflatten(leaves)

        outputs = self.__wrapped__(
            *(mapped(opened, argument) for argument in args),
            **{name: mapped(opened, argument) for name, argument in kwargs.items()},
        )
        if not any(map(is_stand_in, leaves_of(carried))):
            return outputs
        olds = [mapped(opened, tree) for tree in carried]
        # What it raises comes before anything is donated; for a call that JAX serves itself,
        # nothing else would be raised.
        news, rest, together = self._parts(outputs, olds)
        return together(tuple(map(self._packed, self._carry, carried, olds, news)), rest)

    def _packed(self, name: str, template: Any, old: Any, new: Any) -> Any:
        def pack(keys: tuple, node: Any, value: Any) -> Any:
            if not is_stand_in(node):
                return value
            return _packed_value(self.__name__, name + keystr(keys), node.layout, value)

        if not any(map(is_stand_in, leaves_of(template))):
            return new
        try:
            return jax.tree_util.tree_map_with_path(pack, template, new, is_leaf=is_stand_in)
        except ValueError:  # It is no tree of this form.
            named = jax.tree_util.tree_flatten_with_path(old)[0]
            leaves = {name + keystr(keys): leaf for keys, leaf in named}
            flat, after = jax.tree_util.tree_flatten(new)
            before = jax.tree_util.tree_structure(old)
            refuse_tree(self.__name__, name, leaves, before, after, list(map(jnp.asarray, flat)))


def _packed_in(trees: Iterable[Any]) -> list[Packed]:
    """The values in trees, each once, in the order in which `Again` numbers them."""
    nodes = (node for tree in trees for node in leaves_of(tree))
    return list({id(node): node for node in nodes if isinstance(node, Packed)}.values())


def mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """A tree with some leaves changed, stand-ins being leaves; the same object where none is."""
    if isinstance(tree, jax.Array):
        return tree
    if is_stand_in(tree):
        return change(tree)
    leaves, structure = jax.tree_util.tree_flatten(tree, is_leaf=is_stand_in)
    changed = list(map(change, leaves))
    if all(map(operator.is_, leaves, changed)):
        return tree
    return structure.unflatten(changed)


def leaves_of(tree: Any) -> list[Any]:
    return jax.tree_util.tree_leaves(tree, is_leaf=is_stand_in)


@dataclasses.dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Form:
    """Where a call over buffers has which stand-ins, for a call that passes bare tuples.

    Each has a dispatcher of its own: `bare` makes one object of equal ones.
    """

    # Position or name of each argument with stand-ins, its structure, and for each leaf the layout
    # of a value, an `Again`, or None.
    places: tuple[tuple[int | str, Any, tuple], ...]
    # Names of arguments that are passed by position, after all others: JAX reads those sooner.
    by_position: tuple[str, ...]

    def opened(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """The arguments with stand-ins. Raises `ValueError` if they have another structure."""
        count = len(args) - len(self.by_position)
        kwargs = kwargs | dict(zip(self.by_position, args[count:], strict=True))
        args = list(args[:count])
        for key, structure, kinds in self.places:
            holder: Any = args if isinstance(key, int) else kwargs
            pairs = zip(kinds, structure.flatten_up_to(holder[key]), strict=True)
            holder[key] = structure.unflatten(_opened(kind, given) for kind, given in pairs)
        return tuple(args), kwargs

    @staticmethod
    def closed(outputs: Any, fast_path: Any = None) -> tuple[Any, Any]:
        """Outputs with a tuple of buffers, which JAX makes sooner, in the place of each `Packed`.

        So has `fast_path`: what JAX's dispatcher needs to serve the same call by itself, or None.
        """
        bare = mapped(lambda x: tuple(x.buffers) if isinstance(x, Packed) else x, outputs)
        if fast_path is not None and bare is not outputs:
            fast_path = jaxcompat.with_output_tree(fast_path, bare)
        return bare, fast_path


_form_of = interned(Form)


def _closed(node: Any) -> tuple[Layout | Again | None, Any]:
    if isinstance(node, Packed):
        return node.layout, tuple(node.buffers)
    return (node, ()) if isinstance(node, Again) else (None, node)


def _opened(kind: Layout | Again | None, given: Any) -> Any:
    if isinstance(kind, Layout):
        return Packed(kind, given)
    return given if kind is None else kind


def bare(
    args: Sequence[Any], kwargs: dict[str, Any], roles: jaxcompat.ArgumentRoles
) -> tuple[Form, tuple, dict[str, Any]]:
    """The arguments with tuples of buffers for stand-ins, which JAX reads sooner than `Packed`.

    Returns the `Form` that opens them again, and these arguments.
    """
    places = []

    def closed(key: int | str, tree: Any) -> Any:
        leaves, structure = jax.tree_util.tree_flatten(tree, is_leaf=is_stand_in)
        if not any(map(is_stand_in, leaves)):
            return tree
        kinds, given = zip(*map(_closed, leaves), strict=True)
        places.append((key, structure, kinds))
        return structure.unflatten(given)

    closed_args = [closed(position, tree) for position, tree in enumerate(args)]
    closed_kwargs = {name: closed(name, tree) for name, tree in kwargs.items()}
    by_position: tuple[str, ...] = ()
    if all(0 <= number < len(args) for number in roles.static_argnums):
        # In the order in which JAX numbers the leaves of keyword arguments.
        by_position = tuple(sorted(kwargs.keys() - set(roles.static_argnames)))
    form = _form_of(tuple(places), by_position)
    given = [closed_kwargs.pop(name) for name in by_position]
    return form, (*closed_args, *given), closed_kwargs


def shapes_in(outputs: Any) -> Any:
    """The shapes of outputs, with trees where there are buffers."""

    def opened(node: Any) -> Any:
        if not isinstance(node, Packed):
            return node
        hosted = isinstance(node.layout, HostLayout)
        return node.layout.tree.unflatten(
            node.buffers[slot.buffer]
            if slot.offset is None and not hosted
            else jax.ShapeDtypeStruct(slot.shape, slot.dtype)
            for slot in node.layout.slots
        )

    return mapped(opened, outputs)


def in_leaves(carry: Sequence[str], call: Call) -> Call:
    """A call over buffers as its caller wrote it, with the leaves of `Variables`, for messages."""
    with contextlib.suppress(Exception):  # A class may refuse to be built around shapes.
        return _in_leaves(carry, call)
    return call


def _in_leaves(carry: Sequence[str], call: Call) -> Call:
    carried = map(call.arguments.get, carry)
    values = _packed_in((*carried, call.args, call.kwargs))
    named, structure = jax.tree_util.tree_flatten_with_path(
        (call.args, call.kwargs), is_leaf=is_stand_in
    )
    of_program = iter(call.signature.leaves)
    own = [[next(of_program) for _ in jax.tree_util.tree_leaves(node)] for _, node in named]
    places = {
        id(node): (call.path(keys).text, buffers)
        for (keys, node), buffers in zip(named, own, strict=True)
    }
    trees: list[Any] = []
    leaves: list[Leaf] = []
    holders: list[str] = []
    for (_, node), given in zip(named, own, strict=True):
        if not is_stand_in(node):
            trees.append(node)
            leaves += given
            holders.append("")
            continue
        packed = values[node] if isinstance(node, Again) else node
        place, buffers = places[id(packed)]
        trees.append(shapes_in(packed))
        leaves += [_leaf_at(slot, packed.layout, buffers) for slot in packed.layout.slots]
        held = f"{HELD} in host memory" if isinstance(packed.layout, HostLayout) else HELD
        holder = held if packed is node else f"the Variables of {place}"
        holders += [holder] * len(packed.layout.slots)
    args, kwargs = structure.unflatten(trees)
    tree = jax.tree_util.tree_structure((args, kwargs))
    signature = Signature(tree, tuple(leaves), call.signature.statics)
    return dataclasses.replace(
        call, args=args, kwargs=kwargs, signature=signature, holders=tuple(holders)
    )


def _leaf_at(slot: Slot, layout: Layout, buffers: Sequence[Leaf]) -> Leaf:
    given = buffers[slot.buffer]
    if isinstance(layout, HostLayout):  # As the function sees it.
        return Leaf(slot.shape, slot.dtype, slot.weak_type, slot.sharding)
    if slot.offset is None:
        return given
    as_made = given.sharding == layout.buffers[slot.buffer].sharding
    return Leaf(slot.shape, slot.dtype, False, slot.sharding if as_made else given.sharding)


def _packed_value(step: str, name: str, layout: Layout, new: Any) -> Any:
    named, structure = jax.tree_util.tree_flatten_with_path(new)
    try:
        leaves = [x if hasattr(x, "aval") else jnp.asarray(x) for _, x in named]
    except TypeError:
        return new  # A leaf is no array, which JAX will say.
    if structure != layout.tree:
        old = _slots_by_name(name, layout)
        refuse_tree(step, name, old, layout.tree, structure, leaves if old else ())
    for (keys, _), slot, leaf in zip(named, layout.slots, leaves, strict=True):
        if (slot.shape, slot.dtype) != (leaf.shape, leaf.dtype):
            refuse(step, name + keystr(keys), type_of(slot), type_of(leaf))
    return Packed(layout, tuple(layout.pack(leaves)))


def _slots_by_name(name: str, layout: Layout) -> dict[str, Slot]:
    with contextlib.suppress(Exception):  # A class may refuse to be built around numbers.
        numbers = layout.tree.unflatten(range(len(layout.slots)))
        entries = jax.tree_util.tree_flatten_with_path(numbers)[0]
        return {name + keystr(keys): layout.slots[number] for keys, number in entries}
    return {}
