"""Optimizers of served variables, sent as programs (StableHLO, by `jax.export`) and not as code.

The client exports the `init` and `update` functions of an optax optimizer, and the host runs them
on its CPU.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from stepcache.errors import VariablesError, first_line
from stepcache.link import plain
from stepcache.serving.messages import LeafType
from stepcache.variables.describing import named_leaves

_PLATFORM = "cpu"
_LOCATIONS = re.compile(r'^#loc.*\n| loc\((?:"(?:[^"\\]|\\.)*"|[^()"]*)\)', re.MULTILINE)


def types_of(named: Sequence[tuple[str, Any]]) -> list[LeafType]:
    """Returns the types of leaves, given with their paths, for a message."""
    return [(path, list(leaf.shape), np.dtype(leaf.dtype).name) for path, leaf in named]


def export_rule(name: str, optimizer: Any, tree: Any, leaves: Sequence[Any]) -> bytes:
    """Exports an optimizer as a program.

    Args:
        name: name of the variables, for errors.
        optimizer: an `optax.GradientTransformation`.
        tree: structure of the value.
        leaves: shapes and dtypes of the value's leaves.

    Raises:
        VariablesError: `jax.export` cannot write it, for example because it calls back into Python.
    """
    import optax

    structures = []

    def init(leaves: Sequence[Any]) -> list[Any]:
        named, structure = named_leaves(optimizer.init(tree.unflatten(leaves)))
        structures.append((structure, [path for path, _ in named]))
        return [jax.numpy.asarray(leaf) for _, leaf in named]

    def update(
        leaves: Sequence[Any], state: Sequence[Any], gradients: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        value = tree.unflatten(leaves)
        old = structures[0][0].unflatten(state)
        updates, new = optimizer.update(tree.unflatten(gradients), old, value)
        news = (optax.apply_updates(value, updates), new)
        return tuple(jax.tree_util.tree_leaves(each) for each in news)  # type: ignore[return-value]

    given = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    try:
        state = jax.eval_shape(init, given)
        rows = zip(structures[0][1], state, strict=True)
        types = types_of(list(rows))
        programs = [
            jax.export.export(jax.jit(function), platforms=[_PLATFORM])(*arguments)
            for function, arguments in ((init, [given]), (update, [given, state, given]))
        ]
        texts = [_LOCATIONS.sub("", program.mlir_module()) for program in programs]
        digest = hashlib.blake2b(plain.pack([types, *texts]), digest_size=16).hexdigest()
        identity = f"jax {jax.__version__}, optax {optax.__version__}, {digest}"
        return plain.pack([types, *(bytes(each.serialize()) for each in programs), identity])
    except Exception as error:
        raise VariablesError(
            "the optimizer cannot be sent to the host of the variables",
            where=name,
            expected="an optimizer that jax.export can write as a program",
            got=first_line(error),
        ) from error


def differ(identity: str, other: str) -> bool:
    """Returns whether two optimizers surely differ, given their identities.

    Other versions of jax or optax may write the same optimizer as another program.
    """
    (versions, _, digest), (others, _, its_digest) = (
        each.rpartition(", ") for each in (identity, other)
    )
    return versions == others and digest != its_digest


class ExportedRule:
    """An optimizer loaded from the result of `export_rule`.

    Attributes:
        state_types: types of the leaves of its state.
        identity: the versions of jax and optax that wrote it, and a digest of its programs without
            the lines of source code that they come from. Empty if an earlier version exported it.

    Raises:
        ValueError: the data is not an exported optimizer.
    """

    def __init__(self, sent: bytes):
        types, *self._programs = plain.unpack(sent)
        self.identity: str = self._programs.pop() if len(self._programs) > 2 else ""
        self.state_types: list[LeafType] = [tuple(each) for each in types]
        self._loaded: dict[int, Any] = {}

    def init(self, value: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """Returns the leaves of the initial state for a value."""
        return self._run(0, value)

    def update(
        self, value: Sequence[Any], state: Sequence[Any], update: Sequence[Any]
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """Returns the leaves of the new value and of the new state."""
        return self._run(1, value, state, update)

    def _run(self, number: int, *leaves: Sequence[Any]) -> Any:
        if number not in self._loaded:
            exported = jax.export.deserialize(bytearray(self._programs[number]))
            self._loaded[number] = jax.jit(exported.call)
        with jax.default_device(jax.local_devices(backend=_PLATFORM)[0]):
            return jax.tree.map(np.asarray, self._loaded[number](*map(list, leaves)))
