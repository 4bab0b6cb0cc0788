"""Types of elements and partition specs as plain data, for messages between processes.

What is read back and is malformed raises `ValueError`, `TypeError` or `KeyError`.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from stepcache.jaxcompat.private import PRIVATE_API

if PRIVATE_API:
    from jax._src import partition_spec

_SCALAR_TYPE = type(jnp.float32)
_UNCONSTRAINED = True  # No axis of a mesh is named so.


class NotPlain(Exception):
    """A type or a spec has no form as plain data; the text says why, in one line."""


@functools.cache
def _dtypes() -> dict[str, np.dtype]:
    """The types of elements, by name."""
    scalars = {each.dtype for each in vars(jnp).values() if isinstance(each, _SCALAR_TYPE)}
    return {"float0": jax.dtypes.float0} | {dtype.name: dtype for dtype in scalars}


@functools.cache
def _key_dtype(generator: str) -> Any:
    return jax.eval_shape(lambda: jax.random.key(0, impl=generator)).dtype


def encode_dtype(dtype: Any) -> Any:
    """A type of elements: its name, or that of the generator of a random key.

    Raises `NotPlain` for a type that JAX does not name.
    """
    if isinstance(dtype, np.dtype):
        name = "float0" if dtype == jax.dtypes.float0 else dtype.name
        if _dtypes().get(name) == dtype:
            return name
    elif jnp.issubdtype(dtype, jax.dtypes.prng_key):
        with contextlib.suppress(ValueError):  # A generator that is not known by its name.
            if _key_dtype(dtype._impl.name) == dtype:
                return ["key", dtype._impl.name]
    raise NotPlain(f"elements of the unknown type {dtype}")


def decode_dtype(data: Any) -> Any:
    """Reads what `encode_dtype` wrote."""
    if type(data) is str:
        return _dtypes()[data]
    kind, name = data
    if kind != "key":
        raise ValueError(f"unknown type {kind!r:.80}")
    return _key_dtype(_text(name))


def encode_spec(spec: P) -> list[Any]:
    """[entries, unreduced axes, reduced axes, kind of reduction]

    Raises `NotPlain` for an axis whose name is no text.
    """
    entries: list[Any] = []
    for entry in spec._partitions:
        names = entry if isinstance(entry, tuple) else (entry,)
        if entry is P.UNCONSTRAINED:
            entries.append(_UNCONSTRAINED)
        elif entry is None or all(isinstance(name, str) for name in names):
            entries.append([*names] if isinstance(entry, tuple) else entry)
        else:
            raise NotPlain(f"an axis whose name is no text: {entry!r:.80}")
    kind = getattr(spec, "unreduced_kind", None)  # Where this JAX tells several kinds apart.
    return [entries, sorted(spec.unreduced), sorted(spec.reduced), kind and kind.name]


def decode_spec(data: Any) -> P:
    """Reads what `encode_spec` wrote."""
    entries, unreduced, reduced, kind = data
    parts: list[Any] = []
    for entry in entries:
        if entry is _UNCONSTRAINED:
            parts.append(P.UNCONSTRAINED)
        elif entry is None or type(entry) is str:
            parts.append(entry)
        else:
            parts.append(tuple(map(_text, entry)))
    sets: dict[str, Any] = {}
    if unreduced or reduced or kind:
        sets["unreduced"] = frozenset(map(_text, unreduced))
        sets["reduced"] = frozenset(map(_text, reduced))
    if kind is not None:
        sets["unreduced_kind"] = partition_spec.UnreducedKind[kind]  # type: ignore[attr-defined]
    return P(*parts, **sets)


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"expected a text, got {value!r:.80}")
    return value
