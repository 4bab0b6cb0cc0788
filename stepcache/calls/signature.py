"""A call and its `Signature`: trees, shapes, dtypes, weak types, shardings, layouts, static values.

Reading a call traces nothing and moves nothing.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.core
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding
from jax.tree_util import GetAttrKey, keystr

from stepcache import jaxcompat
from stepcache.calls.pad import Pad
from stepcache.sharding import Role


class Unreadable(Exception):
    """The call must go to JAX: it has an invalid argument, a mutable reference or a tracer."""


class Leaf(NamedTuple):
    """The properties of one array argument that a program is specialized to."""

    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool
    # None for an uncommitted array or a host value, which the program places.
    sharding: Sharding | None = None
    layout: Any = None  # None for the default layout.
    on_host: bool = False  # Whether it is uncommitted, and in host memory.

    def stand_in(self) -> jax.ShapeDtypeStruct:
        return jaxcompat.stand_in(
            self.shape, self.dtype, self.weak_type, self.sharding, on_host=self.on_host
        )

    def settled(self) -> Leaf:
        return self._replace(weak_type=False)

    def __str__(self) -> str:
        return short_type(self.shape, self.dtype)

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape, start=int(self.dtype.itemsize))


class Static(NamedTuple):
    """A static argument. The type is part of it: `True` and `1` are two programs, as in JAX."""

    name: str
    kind: type
    value: Hashable


@dataclass(slots=True)  # Not frozen, which would take twice as long to make.
class Signature:
    """The properties of a call that a program is specialized to."""

    tree: Any  # The `PyTreeDef` of the dynamic `(args, kwargs)`.
    leaves: tuple[Leaf, ...]  # One for each dynamic array argument, in tree order.
    statics: tuple[Static, ...]  # The static arguments that were passed.
    _hash: int = field(init=False, compare=False, repr=False, default=0)

    def __post_init__(self):
        self._hash = hash((self.tree, self.leaves, self.statics))

    def __hash__(self) -> int:
        return self._hash


class Parameters(NamedTuple):
    """The parameters of a step's function, by name, and their roles."""

    positional: tuple[str, ...]  # Those that can be passed by position.
    variadic: str | None  # The name of `*args`, if there is one.
    named: frozenset[str]  # All but `**kwargs`.
    variadic_keywords: str | None  # The name of `**kwargs`, if there is one.
    roles: jaxcompat.ArgumentRoles  # The static ones.
    carry: tuple[str, ...] = ()  # Those that the step returns updated.
    batch: tuple[str, ...] = ()  # Those that a session splits along its data axis.
    # Whether a batch has the batches of several steps along its first dimension.
    stacked: bool = False
    pads: tuple[Pad, ...] = ()  # What is padded before a call; a session places their masks.
    tell: Callable[[Call], Call] | None = None  # Gives a call of a library as its user made it.

    @classmethod
    def of(
        cls,
        fun: Callable,
        roles: jaxcompat.ArgumentRoles,
        carry: tuple[str, ...] = (),
        batch: tuple[str, ...] = (),
    ) -> Parameters:
        try:
            parameters = list(inspect.signature(fun).parameters.values())
        except (TypeError, ValueError):  # Some builtins have no signature.
            parameters = []
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        positional = tuple(p.name for p in parameters if p.kind in kinds)
        variadic = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
        keywords = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None)
        named = frozenset(p.name for p in parameters if p.name != keywords)
        return cls(positional, variadic, named, keywords, roles, carry, batch)

    def parameter_of(self, argument: str) -> str:
        """Returns the name of the parameter that takes an argument."""
        name = argument.partition("[")[0]
        return name if name in self.named else self.variadic_keywords or name

    def role_of(self, argument: str) -> Role:
        """Returns the role of an argument: carry, batch, or None."""
        name = self.parameter_of(argument)
        if name in self.carry:
            return "carry"
        if name not in self.batch:
            return None
        return "batches" if self.stacked else "batch"

    def name_of(self, position: int) -> str:
        if position < len(self.positional):
            return self.positional[position]
        return f"{self.variadic or 'args'}[{position - len(self.positional)}]"


@dataclass(eq=False, repr=False)  # As for `Signature`.
class Call:
    """The arguments of one call."""

    given: tuple[tuple, dict[str, Any]]  # `(args, kwargs)`, static arguments included.
    args: tuple  # The dynamic positional arguments.
    kwargs: dict[str, Any]  # The dynamic keyword arguments.
    positions: tuple[int, ...]  # Position of each of `args` among the positional arguments.
    names: tuple[str, ...]  # The parameter names of `args`, in order.
    leaves: list[Any]  # The values of the dynamic leaves, in the order of `signature.leaves`.
    signature: Signature  # Before or after placement.
    # For each leaf a text about the `Variables` that hold it; "" if the call does.
    holders: tuple[str, ...] = ()
    tell: Callable[[Call], Call] | None = None  # As of the parameters.
    fun: Any = None  # The user's function, where that is known from the call alone.

    def with_signature_leaves(self, leaves: tuple[Leaf, ...]) -> Call:
        if leaves == self.signature.leaves:
            return self
        return replace(self, signature=replace(self.signature, leaves=leaves))

    def rebuilt(self, leaves: Sequence[Any]) -> tuple[tuple, dict[str, Any]]:
        """Returns `(args, kwargs)` with other values for the dynamic leaves."""
        args, kwargs = self.signature.tree.unflatten(leaves)
        positional = list(self.given[0])
        for position, value in zip(self.positions, args, strict=True):
            positional[position] = value
        return tuple(positional), {**self.given[1], **kwargs}

    @property
    def arguments(self) -> dict[str, Any]:
        """The dynamic arguments, by name."""
        return dict(zip(self.names, self.args, strict=True)) | self.kwargs

    @cached_property
    def paths(self) -> tuple[Path, ...]:
        if self.tell is not None:
            return self.tell(self).paths
        entries, _ = jax.tree_util.tree_flatten_with_path((self.args, self.kwargs))
        holders = self.holders or ("",) * len(entries)
        rows = zip(entries, holders, strict=True)
        return tuple(self.path(keys, holder) for (keys, _), holder in rows)

    def path(self, keys: tuple, holder: str = "") -> Path:
        """Returns the path for JAX's keys into the dynamic `(args, kwargs)`."""
        in_kwargs, top, *rest = keys
        name = top.key if in_kwargs.idx else self.names[top.idx]
        base = name.replace("[", "/").rstrip("]")
        slashed = keystr(tuple(rest), simple=True, separator="/")
        text = name + keystr(tuple(rest))
        return Path(name, text, f"{base}/{slashed}" if rest else base, holder)


class AttributePath(GetAttrKey):
    """The path of an array in a module: `layers/3/kernel` for rules, `.layers[3].kernel` else."""

    def __str__(self) -> str:
        parts = self.name.split("/") if self.name else []
        return "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in parts)


class Path(NamedTuple):
    """The path of a leaf."""

    argument: str  # The argument that contains it.
    text: str  # The path in Python's syntax.
    slashed: str  # The path that rules match.
    holder: str = ""  # As in `Call.holders`.


def read(parameters: Parameters, args: tuple, kwargs: dict[str, Any]) -> Call:
    """Reads a call. Raises `Unreadable` for an argument that no cached program can take."""
    static_numbers = {i if i >= 0 else i + len(args) for i in parameters.roles.static_argnums}
    if min(static_numbers, default=0) < 0:
        raise Unreadable
    positions = tuple(i for i in range(len(args)) if i not in static_numbers)
    statics = [
        Static(parameters.name_of(i), type(args[i]), args[i])
        for i in sorted(static_numbers)
        if i < len(args)
    ]
    named = [name for name in sorted(kwargs) if name in parameters.roles.static_argnames]
    statics += [Static(name, type(kwargs[name]), kwargs[name]) for name in named]
    dynamic = tuple(args[i] for i in positions)
    dynamic_kwargs = {name: value for name, value in kwargs.items() if name not in named}
    try:
        leaves, tree = jax.tree_util.tree_flatten((dynamic, dynamic_kwargs))
        signature = Signature(tree, tuple(map(read_leaf, leaves)), tuple(statics))
    except (TypeError, ValueError, OverflowError) as error:
        raise Unreadable from error
    names = tuple(map(parameters.name_of, positions))
    given, tell = (args, kwargs), parameters.tell
    return Call(given, dynamic, dynamic_kwargs, positions, names, leaves, signature, tell=tell)


def read_leaf(x: Any) -> Leaf:
    if isinstance(x, jax.Array):
        if isinstance(x, jaxcompat.Tracer):
            raise Unreadable
        aval, sharding = x.aval, x.sharding if x.committed else None
    elif isinstance(x, jax.ShapeDtypeStruct):
        aval = jaxcompat.abstract(x)
        sharding = x.sharding if jaxcompat.is_committed(x) else None
    else:
        aval, sharding = jaxcompat.abstract(x), None
    if type(aval) is not jax.core.ShapedArray:  # But a reference, or what JAX lowers further.
        raise Unreadable
    layout = None if sharding is None else jaxcompat.custom_layout(x, aval)
    on_host = sharding is None and jaxcompat.is_on_host(x)
    return Leaf(aval.shape, aval.dtype, aval.weak_type, sharding, layout, on_host)


def short_type(shape: Sequence[int], dtype: Any) -> str:
    """Returns a type as JAX writes it: `float32[8,128]`."""
    return f"{_dtype_name(dtype)}[{','.join(map(str, shape))}]"


@functools.lru_cache(maxsize=256)  # numpy takes 10 µs to name a dtype.
def _dtype_name(dtype: Any) -> str:
    return getattr(dtype, "name", str(dtype))


def short_sharding(sharding: Sharding | None) -> str:
    """Returns `uncommitted`, `@ cpu:0` or `@ P('data')`, and the memory kind unless "device"."""
    if sharding is None:
        return "uncommitted"
    kind = sharding.memory_kind
    suffix = "" if kind in (None, "device", "unpinned_host") else f" in {kind}"
    if isinstance(sharding, NamedSharding):
        spec = ", ".join(map(repr, sharding.spec))
        return f"@ P({spec}){suffix}"
    if isinstance(sharding, SingleDeviceSharding):
        device = next(iter(sharding.device_set))
        return f"@ {device.platform}:{device.id}{suffix}"
    return f"@ {shorten(str(sharding))}"


def shorten(text: str, limit: int = 80) -> str:
    """Returns `text` on one line, cut in the middle if it has more than `limit` characters."""
    text = " ".join(text.split())
    if len(text) <= limit:
        return text
    half = (limit - 3) // 2
    return f"{text[:half]} … {text[-half:]}"
