"""`Form`: where a call passes which `Variables`, and the step that runs such calls over buffers.

In the place of `Variables` a program takes their buffers, in a tuple, which JAX reads soonest. It
takes them apart inside XLA, calls the step's function on the trees, and puts what is carried
together again. Each form has a function of its own, so that nothing but arrays is passed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import keystr

from stepcache import jaxcompat
from stepcache.calls.carry import OverStep, argument_of, refuse_tree
from stepcache.calls.key import identity
from stepcache.calls.signature import Call, Leaf, Signature
from stepcache.calls.step_spec import StepSpec
from stepcache.variables.packing import Layout, Slot
from stepcache.variables.shares import HostLayout

HELD = "Variables"
"""Holder of a leaf of `Variables`, at their first place in a call."""


class Place(NamedTuple):
    """An argument with `Variables` in it."""

    key: int | str  # Its position, or its name where it is passed by name.
    name: str  # Of the parameter.
    tree: Any  # Its structure, of which variables are leaves.
    numbers: tuple[int | None, ...]  # Of the variables at each leaf; None for another leaf.


class Form(NamedTuple):
    """Where a call passes which `Variables`, and how these lie in buffers.

    The first place of some variables gets their buffers, in a tuple; others get an empty one.
    """

    places: tuple[Place, ...]  # Those of carried arguments come first.
    layouts: tuple[Layout, ...]  # Of the variables, by number.

    def replaced(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], change: Callable[[int, Any], Any]
    ) -> tuple[tuple, dict[str, Any]]:
        """The arguments with something else in the places of variables.

        `change` gets the number of the variables, and what is there. Raises `ValueError` where an
        argument has another structure.
        """
        changed, named = [*args], dict(kwargs)
        for key, _, tree, numbers in self.places:
            holder: Any = named if isinstance(key, str) else changed
            pairs = zip(numbers, tree.flatten_up_to(holder[key]), strict=True)
            holder[key] = tree.unflatten(x if n is None else change(n, x) for n, x in pairs)
        return tuple(changed), named

    def found(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """What is in the places of variables. Raises `ValueError` or `KeyError` as `replaced`."""
        found = []
        for key, _, tree, numbers in self.places:
            holder: Any = kwargs if isinstance(key, str) else args
            pairs = zip(numbers, tree.flatten_up_to(holder[key]), strict=True)
            found += [x for n, x in pairs if n is not None]
        return found

    def over(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], buffers: Sequence[Sequence[Any]]
    ) -> tuple[tuple, dict[str, Any]]:
        """The arguments of a call over buffers, given those of each of the variables."""
        rest = [*buffers]

        def take(number: int, _: Any) -> tuple:
            taken, rest[number] = tuple(rest[number]), ()
            return taken

        return self.replaced(args, kwargs, take)

    def put_back(
        self,
        carry: Sequence[str],
        outputs: Any,
        put: Callable[[int, Sequence[Any]], Any],
        *,
        is_alone: bool | None = None,
    ) -> Any:
        """The outputs of a call over buffers with something else for the buffers that are carried.

        Args:
            carry: the names of the arguments that the step carries.
            outputs: of the call. They begin with the carry, or are the carry.
            put: gets the number of the variables and their new buffers, and returns what is to be
                in their place.
            is_alone: what `comes_alone` says, where it is known.
        """
        if is_alone is None:
            is_alone = self.comes_alone(carry, outputs)
        news = [outputs] if is_alone else [*outputs]
        for place in self.places:
            if place.name in carry:
                at = carry.index(place.name)
                nodes = place.tree.flatten_up_to(news[at])
                pairs = zip(place.numbers, nodes, strict=True)
                news[at] = place.tree.unflatten(x if n is None else put(n, x) for n, x in pairs)
        return news[0] if is_alone else type(outputs)(news)

    def comes_alone(self, carry: Sequence[str], outputs: Any) -> bool:
        """Whether outputs are the carry, and not several of which it is the first.

        A carry that is a list or a tuple, and comes back alone, looks like several outputs.
        """
        if len(carry) != 1:
            return False
        (place,) = (place for place in self.places if place.name == carry[0])
        bare = (n if n is None else self.layouts[n].buffers for n in place.numbers)
        leaves = [0 if buffers is None else (0,) * len(buffers) for buffers in bare]
        structure = jax.tree_util.tree_structure
        return structure(place.tree.unflatten(leaves)) == structure(outputs)

    def shapes(self, number: int, buffers: Sequence[Any]) -> Any:
        """The tree of some variables, of the shapes of its leaves."""
        layout = self.layouts[number]
        has_buffers = bool(buffers) and not isinstance(layout, HostLayout)
        return layout.tree.unflatten(
            buffers[slot.buffer]
            if has_buffers and slot.offset is None
            else jax.ShapeDtypeStruct(slot.shape, slot.dtype)
            for slot in layout.slots
        )

    # ---- calls over buffers, as the engine reads them ------------------------------------------

    def buffers(self, call: Call) -> dict[int, bool]:
        """The numbers of the leaves that are buffers, and whether each of them is on the host."""
        marked = self._marked(call, lambda number, buffers: (_Mark(number, 1),) * len(buffers))
        return {
            at: isinstance(self.layouts[leaf.number], HostLayout)
            for at, leaf in enumerate(jax.tree_util.tree_leaves(marked))
            if isinstance(leaf, _Mark)
        }

    def _marked(self, call: Call, mark: Callable[[int, Any], Any]) -> tuple[tuple, dict[str, Any]]:
        """The dynamic arguments of a call, with something else for each tuple of buffers."""
        args, kwargs = self.replaced(*call.given, mark)
        return tuple(args[at] for at in call.positions), {
            name: kwargs[name] for name in call.kwargs
        }

    def in_leaves(self, call: Call) -> Call:
        """A call over buffers as its caller wrote it, with the leaves of `Variables`, for messages.

        It is the same where a class refuses to be built around what is no array.
        """
        with contextlib.suppress(Exception):
            return self._in_leaves(call)
        return call

    def _in_leaves(self, call: Call) -> Call:
        marked = self._marked(call, lambda number, buffers: _Mark(number, len(buffers)))
        named, structure = jax.tree_util.tree_flatten_with_path(marked)
        of_program = iter(call.signature.leaves)
        sizes = [node.count if isinstance(node, _Mark) else 1 for _, node in named]
        own = [list(itertools.islice(of_program, size)) for size in sizes]
        first: dict[int, tuple[tuple, list[Leaf]]] = {}  # Where the buffers are, and which.
        for (keys, node), buffers in zip(named, own, strict=True):
            if isinstance(node, _Mark) and (buffers or node.number not in first):
                first[node.number] = keys, buffers
        trees: list[Any] = []
        leaves: list[Leaf] = []
        holders: list[str] = []
        for (keys, node), given in zip(named, own, strict=True):
            if not isinstance(node, _Mark):
                trees.append(node)
                leaves += given
                holders.append("")
                continue
            layout = self.layouts[node.number]
            place, buffers = first[node.number]
            trees.append(self.shapes(node.number, ()))
            leaves += [_leaf_at(slot, layout, buffers) for slot in layout.slots]
            holder = f"{HELD} in host memory" if isinstance(layout, HostLayout) else HELD
            if place is not keys:
                holder = f"the Variables of {call.path(place).text}"
            holders += [holder] * len(layout.slots)
        args, kwargs = structure.unflatten(trees)
        tree = jax.tree_util.tree_structure((args, kwargs))
        signature = Signature(tree, tuple(leaves), call.signature.statics)
        return dataclasses.replace(
            call, args=args, kwargs=kwargs, signature=signature, holders=tuple(holders)
        )


@dataclasses.dataclass(eq=False, slots=True)
class _Mark:
    """Stands for the buffers of variables at one place of a call."""

    number: int
    count: int


def _leaf_at(slot: Slot, layout: Layout, buffers: Sequence[Leaf]) -> Leaf:
    given = buffers[slot.buffer]
    if isinstance(layout, HostLayout):  # As the function sees it.
        return Leaf(slot.shape, slot.dtype, slot.weak_type, slot.sharding)
    if slot.offset is None:
        return given
    as_made = given.sharding == layout.buffers[slot.buffer].sharding
    return Leaf(slot.shape, slot.dtype, False, slot.sharding if as_made else given.sharding)


# ---- the step over buffers -----------------------------------------------------------------------


def over_buffers(spec: StepSpec, form: Form) -> StepSpec:
    """The spec of a step whose arguments are buffers where they were `Variables`."""
    fun = _OverBuffers(spec, form)
    return spec._replace(
        fun=fun,
        jitted=jaxcompat.jit(fun, **spec.options),
        identity=identity(fun),
        pads=(),
        tell=form.in_leaves,
        buffers=form.buffers,
    )


class _OverBuffers(OverStep):
    """Calls a step's function on the trees that its buffers hold."""

    def __init__(self, spec: StepSpec, form: Form):
        super().__init__(spec.fun, spec.name, spec.parameters)
        self._form = form

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        form = self._form
        leaves: dict[int, list[Any]] = {}

        def opened(number: int, buffers: Sequence[Any]) -> Any:
            """A tree of its own for each place, as a plain tree has: the function may change it."""
            layout = form.layouts[number]
            if number not in leaves:
                leaves[number] = layout.unpack(buffers)
            return layout.tree.unflatten(leaves[number])

        trees, named = form.replaced(args, kwargs, opened)
        outputs = self.__wrapped__(*trees, **named)
        places = {place.name: place for place in form.places}
        if not any(name in places for name in self._carry):
            return outputs
        again = form.replaced(args, kwargs, opened)
        olds = [argument_of(self._positional, *again, name) for name in self._carry]
        # What it raises comes before anything is donated; for a call that JAX serves itself,
        # nothing else would be raised.
        news, rest, together = self._parts(outputs, olds)
        closed = (
            self._closed(places[name], old, new) if name in places else new
            for name, old, new in zip(self._carry, olds, news, strict=True)
        )
        return together(tuple(closed), rest)

    def _closed(self, place: Place, old: Any, new: Any) -> Any:
        """What a carry has become, with tuples of buffers in the place of the variables' trees."""
        named, before = jax.tree_util.tree_flatten_with_path(old)
        flat, after = jax.tree_util.tree_flatten(new)
        try:
            leaves = [x if hasattr(x, "aval") else jnp.asarray(x) for x in flat]
        except TypeError:
            return new  # A leaf is no array, which JAX will say.
        olds = [leaf for _, leaf in named]
        if before != after or list(map(_type_of, olds)) != list(map(_type_of, leaves)):
            paths = {place.name + keystr(keys): leaf for keys, leaf in named}
            refuse_tree(self.__name__, place.name, paths, before, after, leaves)
        nodes = place.tree.flatten_up_to(after.unflatten(leaves))
        return place.tree.unflatten(
            node
            if number is None
            else tuple(self._form.layouts[number].pack(jax.tree_util.tree_leaves(node)))
            for number, node in zip(place.numbers, nodes, strict=True)
        )


def _type_of(leaf: Any) -> tuple[Any, Any]:
    return leaf.shape, leaf.dtype
