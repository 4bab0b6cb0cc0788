"""`StepSpec`: a step's function and options. `Request`: one call that needs a program."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, Sharding

from stepcache import jaxcompat
from stepcache.calls.key import Identity, Key, identity
from stepcache.calls.layers import function_name
from stepcache.calls.pad import Pad
from stepcache.calls.signature import Call, Leaf, Parameters
from stepcache.sharding import Placed, devices_of, processes_of


class StepSpec(NamedTuple):
    """The function of a step and its options, resolved."""

    fun: Callable  # What is compiled.
    name: str  # What to call it.
    options: dict[str, Any]  # Keywords for `jax.jit`, with the donation of the carry in them.
    jitted: Any  # `jax.jit(fun, **options)`, which serves calls under other transformations.
    parameters: Parameters  # The function's parameters and their roles.
    identity: Identity  # Which function it is.
    key_options: tuple[tuple[str, Hashable], ...]  # `options` as hashable parts of a key.
    # What is padded before a call, by `padding.Padder`: no program depends on it.
    pads: tuple[Pad, ...] = ()
    # Gives a call with the leaves that its caller knows, where the program has others.
    tell: Callable[[Call], Call] = lambda call: call
    # Gives the numbers of the leaves that are buffers of `Variables`, and whether of host memory.
    buffers: Callable[[Call], dict[int, bool]] = lambda call: {}
    source: Any = None  # The user's function, of which a library may have made `fun`.

    @classmethod
    def of(
        cls,
        fun: Callable,
        options: dict[str, Any],
        carry: tuple[str, ...] = (),
        batch: tuple[str, ...] = (),
        pads: tuple[Pad, ...] = (),
    ) -> StepSpec:
        """Resolves a step's options. `jax.jit` judges them and raises as it does."""
        jitted = jaxcompat.jit(fun, **options)
        roles = jaxcompat.argument_roles(jitted, fun, options)
        return cls(
            fun,
            function_name(fun),
            options,
            jitted,
            Parameters.of(fun, roles, carry, batch)._replace(pads=pads),
            identity(fun),
            (
                ("carry", carry),
                ("batch", batch),
                *((name, _hashable(options[name])) for name in sorted(options)),
            ),
            pads,
            source=fun,
        )

    def over(self, fun: Callable) -> StepSpec:
        """The same step with another function, which takes and returns what the step's does."""
        return self._replace(fun=fun, jitted=jaxcompat.jit(fun, **self.options))

    @property
    def places_outputs(self) -> bool:
        """Whether the user specified where outputs go."""
        return "out_shardings" in self.options


def _hashable(value: Any) -> Hashable:
    if isinstance(value, list):
        value = tuple(value)
    if isinstance(value, dict):
        return tuple(sorted((name, _hashable(entry)) for name, entry in value.items()))
    try:
        hash(value)
    except TypeError:
        leaves, tree = jax.tree_util.tree_flatten(value, is_leaf=lambda x: x is None)
        return (tuple(leaves), tree)
    return value


@dataclass(eq=False, repr=False)  # Not frozen, which would take twice as long to make.
class Request:
    """A call with what it needs: read, placed and keyed."""

    call: Call  # As it came.
    leaves: tuple[Leaf, ...]  # Its leaves where the session places them.
    # For each leaf, where the session sends it and why; None where it leaves it.
    placed: tuple[Placed | None, ...]
    # For each leaf, where the step's `in_shardings` send it; None where they do not say.
    asked: tuple[Sharding | None, ...]
    key: Key  # The key of its program.
    mesh: Mesh | None  # The session's mesh.
    tell: Callable[[Call], Call]  # As of the spec.
    # Whether its program is that of calls which nothing commits, and its outputs are committed.
    commits: bool = False

    @functools.cached_property
    def shown(self) -> Call:
        """The call for messages: paths and signature, placed. It cannot be run."""
        call = self.call.with_signature_leaves(self.leaves)
        return self.tell(call if call.tell is None else call.tell(call))

    def described(self) -> Request:
        """The same request without its arrays, which it would otherwise keep alive.

        Itself where a class refuses to be built around what is no array.
        """
        call = self.call
        stand_ins = [leaf.stand_in() for leaf in call.signature.leaves]
        try:
            given = call.rebuilt(stand_ins)
            args, kwargs = call.signature.tree.unflatten(stand_ins)
            jax.tree.flatten((args, kwargs))  # It may compute with its leaves.
        except Exception:
            return self
        paths = call.paths
        call = replace(call, given=given, args=tuple(args), kwargs=kwargs, leaves=stand_ins)
        vars(call)["paths"] = paths
        return replace(self, call=call)

    def settled(self, numbers: Sequence[int]) -> Request:
        """The same request, where some leaves are not weakly typed."""
        leaves, keyed = list(self.leaves), list(self.key.signature.leaves)
        for number in numbers:
            leaves[number], keyed[number] = leaves[number].settled(), keyed[number].settled()
        signature = replace(self.key.signature, leaves=tuple(keyed))
        return replace(self, leaves=tuple(leaves), key=replace(self.key, signature=signature))

    @property
    def device(self) -> Any:
        """The device of a call without a mesh that names at most one device."""
        committed = (leaf.sharding.device_set for leaf in self.leaves if leaf.sharding is not None)
        return next(iter(next(committed, ())), None) or jaxcompat.default_device()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The processes whose devices the call uses, in order."""
        if self.mesh is not None:
            return processes_of(devices_of(self.mesh))
        shardings = {leaf.sharding for leaf in self.leaves if leaf.sharding is not None}
        return processes_of(device for each in shardings for device in each.device_set)
