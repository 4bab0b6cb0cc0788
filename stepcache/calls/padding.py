"""`Padder`: pads arguments to one of a few sizes, so that a short batch finds a program.

Rows are added before the call, and cut from the outputs after it. The function gets a mask or a
count, to leave them out of sums and means.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import keystr

from stepcache.calls.carry import argument_of
from stepcache.calls.context import Scope
from stepcache.calls.pad import Pad
from stepcache.calls.padded_arrays import (
    changed,
    filled,
    is_array,
    is_placed,
    kept,
    mask_of,
    with_size,
)
from stepcache.calls.step_spec import StepSpec
from stepcache.errors import PaddingError
from stepcache.variables.variables import Variables

_KEYS_REMEMBERED = 1024
_NEED_THE_WHOLE = (
    ("count", "take mask= instead, whose sum is the number of all rows"),
    ("check", "check the padding in a run of one process"),
)


class _Group(NamedTuple):
    """One `Pad` in a call: the size of its axis, and the padded size.

    `split` is None if the call passes the whole axis. If the process of a pod passes its part, it
    places an axis of all parts.
    """

    pad: Pad
    size: int
    padded: int
    split: NamedSharding | None = None

    @property
    def mask(self) -> Any:
        """The mask of the axis; in a pod, of all parts of it."""
        mask = mask_of(self.size, self.padded)
        if self.split is None:
            return mask
        return jax.make_array_from_process_local_data(self.split, mask)


class Padder:
    """Calls a step with padded arguments, and cuts its outputs.

    Attributes:
        call: calls the step with padded arguments.

    `engine` returns the step's engine, which is not kept alive, and `scope` the scope of a call.
    """

    jit: Callable[..., Callable] = staticmethod(jax.jit)  # Compiles the step's function, to check.

    def __init__(
        self, spec: StepSpec, call: Callable, engine: Callable[[], Any], scope: Callable[[], Scope]
    ):
        self.call, self._rows, self._padded_rows = call, 0, 0
        self._spec, self._engine, self._scope = spec, engine, scope
        self._lock = threading.Lock()
        self._positions = {name: n for n, name in enumerate(spec.parameters.positional)}
        self._axes: dict[Any, list[list[tuple[int, int]]]] = {}
        self._checked: set[Any] = set()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.call, args, kwargs)

    def run(self, call: Callable, args: tuple, kwargs: dict) -> Any:
        """Runs `call` with padded arguments, and cuts its outputs."""
        padded_args, padded_kwargs, groups = self._padded(args, kwargs)
        with self._lock:
            for group in groups[:1]:
                self._rows += group.size
                self._padded_rows += group.padded
        if any(group.pad.check and group.size < group.padded for group in groups):
            self._check(args, kwargs, groups)
        outputs = call(*padded_args, **padded_kwargs)
        return self._cut(outputs, padded_args, padded_kwargs, groups)

    @property
    def padding(self) -> float:
        """Share of added rows, along the axis of the first `Pad`."""
        return 1 - self._rows / self._padded_rows if self._padded_rows else 0.0

    def padded(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return self._padded(args, kwargs)[:2]

    def eval_shape(self, args: tuple, kwargs: dict) -> Any:
        args, kwargs, groups = self._padded(args, kwargs)
        shapes = self._engine().eval_shape(args, kwargs | _own_masks(groups))
        return self._cut(shapes, args, kwargs, groups)

    def _padded(self, args: tuple, kwargs: dict, row: int = -1) -> tuple[tuple, dict, list[_Group]]:
        """Pads arguments with copies of a row. Returns them, and a group for each `Pad`."""
        values, keywords, groups = list(args), dict(kwargs), []
        for pad in self._spec.pads:
            found = self._size(pad, values, keywords)
            if found is None:
                continue
            size, path, leaf = found
            padded = pad.padded_size(size, self._parts(pad))
            group = _Group(pad, size, padded, self._split(pad, path, leaf, padded))
            fill = functools.partial(_filled, axis=pad.axis, padded=group.padded, row=row)
            self._change(pad, values, keywords, fill)
            made: list[tuple[str | None, Any]] = [(pad.count, np.int32(size))]
            if pad.mask is not None:
                made.append((pad.mask, group.mask))
            for name, value in made:
                if name is not None:
                    self._check_not_passed(name, args, kwargs)
                    keywords[name] = value
            groups.append(group)
        return tuple(values), keywords, groups

    def _size(self, pad: Pad, args: list, kwargs: dict) -> tuple[int, str, Any] | None:
        """The size of the axis, and the first array with its path; None without arrays.

        Raises `PaddingError` if sizes differ.
        """
        sizes: dict[int, tuple[str, Any]] = {}

        def see(path: str, leaf: Any) -> Any:
            sizes.setdefault(leaf.shape[pad.axis], (path, leaf))
            return leaf

        self._change(pad, [*args], dict(kwargs), see)
        if len(sizes) > 1:
            (a, (first, _)), (b, (second, _)), *_ = sizes.items()
            what = f"arrays that are padded together differ in size along axis {pad.axis}"
            hint = 'name the part to pad, as in sc.Pad("batch/tokens", axis=1)'
            raise pad._error(what, got=f"{a} at {first}, {b} at {second}", hint=hint)
        return next(((size, *first) for size, first in sizes.items()), None)

    def _split(self, pad: Pad, path: str, leaf: Any, padded: int) -> NamedSharding | None:
        """Returns where a session places an axis of which this process of a pod passes its part.

        None if it passes the whole axis. Raises `PaddingError` for options that need the whole.
        """
        placer = self._scope().placer
        if placer is None or jax.process_count() == 1 or is_placed(leaf):
            return None
        role = self._spec.parameters.role_of(path.partition("/")[0])
        at = placer.place(path, with_size(leaf, pad.axis, padded).shape, role)
        if at.shape[pad.axis] == padded:
            return None
        for option, hint in _NEED_THE_WHOLE:
            if getattr(pad, option):
                what = f"{option}= needs the whole axis, and each process passes its part"
                raise pad._error(what, hint=hint)
        return NamedSharding(placer.mesh, PartitionSpec(at.sharding.spec[pad.axis]))

    def _change(
        self, pad: Pad, args: list, kwargs: dict, change: Callable[[str, Any], Any]
    ) -> None:
        """Replaces the arrays of a `Pad` in the arguments of a call."""
        for name, _, part in (argument.partition("/") for argument in pad.arguments):
            holder: Any = kwargs if name in kwargs else args
            at: Any = name if name in kwargs else self._positions.get(name, len(args))
            if holder is kwargs or at < len(args):

                def see(path: str, leaf: Any, name: str = name) -> Any:
                    return change(f"{name}/{path}".rstrip("/"), leaf)

                holder[at] = changed(holder[at], part, pad.axis, see)

    def _check_not_passed(self, name: str, args: tuple, kwargs: dict) -> None:
        if name in kwargs or self._positions.get(name, len(args)) < len(args):
            what = f"{self._spec.name} makes this argument by its pad= option"
            raise PaddingError(what, where=name, hint="leave it out of the call")

    def _parts(self, pad: Pad) -> int:
        """Returns into how many parts a session splits the axis in this process."""
        placer = self._scope().placer
        names = {argument.partition("/")[0] for argument in pad.arguments}
        if placer is None or pad.axis or names.isdisjoint(self._spec.parameters.batch):
            return 1
        return placer.own_parts

    def _cut(self, outputs: Any, args: tuple, kwargs: dict, groups: list[_Group]) -> Any:
        groups = [group for group in groups if group.size < group.padded]
        if not groups:
            return outputs
        carried, others = self._apart(outputs, args, kwargs)
        leaves, tree = jax.tree_util.tree_flatten(others)
        if not any(_may_follow(leaf, group) for leaf in leaves for group in groups):
            return outputs
        for at, axes in enumerate(self._varying(args, kwargs, groups, leaves)):
            for axis, number in axes:
                leaves[at] = kept(leaves[at], axis, groups[number].size)
        others = tree.unflatten(leaves)
        return others if not carried else type(outputs)([*carried, *others])

    def _apart(self, outputs: Any, args: tuple, kwargs: dict) -> tuple[list, Any]:
        """Splits outputs into the carry and the others."""
        names = self._spec.parameters.carry
        if not names:
            return [], outputs
        carry = argument_of(self._spec.parameters.positional, args, kwargs, names[0])
        is_alone = jax.tree_util.tree_structure(carry) == jax.tree_util.tree_structure(outputs)
        if is_alone or type(outputs) not in (tuple, list):
            return [outputs], []
        return [*outputs[: len(names)]], type(outputs)(outputs[len(names) :])

    def _varying(
        self, args: tuple, kwargs: dict, groups: list[_Group], leaves: list[Any]
    ) -> list[list[tuple[int, int]]]:
        """Returns for each output the axes that depend on a padded axis, and the numbers of groups.

        Compares the shapes of outputs at another size: a trace, once for each signature.
        """
        key = self._signature(args, kwargs), *((group.pad, group.padded) for group in groups)
        if (known := self._axes.get(key)) is not None:
            return known
        axes: list[list[tuple[int, int]]] = [[] for _ in leaves]
        for number, group in enumerate(groups):
            at_size = functools.partial(self._shapes_at, args, kwargs, groups, group)
            sizes = group.padded, group.pad.other_size(group.padded)
            shapes, found = [np.shape(leaf) for leaf in leaves], at_size(sizes[1])
            if group.split is not None:  # The outputs have the rows of all processes.
                shapes = at_size(sizes[0])
            if [len(each) for each in found] != [len(each) for each in shapes]:
                what = "returns a different tree at another size: unknown which outputs to cut"
                raise group.pad._error(f"{self._spec.name} {what}")
            for at, (shape, other) in enumerate(zip(shapes, found, strict=True)):
                for axis, both in enumerate(zip(shape, other, strict=True)):
                    if both == sizes and group.split is not None:
                        raise group.pad._error(
                            f"{self._spec.name} returns an array with a row for each padded row, "
                            "and it is unknown which rows other processes have added",
                            hint="return sums over the rows instead, or call the step with batches "
                            "that need no padding",
                        )
                    if both == sizes:
                        axes[at].append((axis, number))
                    elif both[0] != both[1]:
                        raise group.pad._error(
                            f"{self._spec.name} returns an array whose axis {axis} depends on the "
                            "padded one, but not row by row: it is unknown what to cut",
                            got=f"sizes {both}, where it has {sizes}",
                            hint="return an array with one row for each padded row",
                        )
        if len(self._axes) >= _KEYS_REMEMBERED:
            self._axes.clear()
        self._axes[key] = axes
        return axes

    def _signature(self, args: tuple, kwargs: dict) -> Hashable:
        """Returns a key for the properties that determine the shapes of outputs."""
        roles = self._spec.parameters.roles
        values = {self._spec.parameters.name_of(n): value for n, value in enumerate(args)} | kwargs
        static = {*roles.static_argnames, *map(self._spec.parameters.name_of, roles.static_argnums)}
        fixed = tuple((name, values.pop(name)) for name in sorted(static & values.keys()))
        leaves, tree = jax.tree_util.tree_flatten(values)
        return fixed, tree, tuple(map(_kind_of, leaves))

    def _shapes_at(
        self, args: tuple, kwargs: dict, groups: list[_Group], group: _Group, size: int
    ) -> list[tuple[int, ...]]:
        """Returns the shapes of outputs, without the carry, at another size of a padded axis.

        In a pod: the shapes that this process's parts would have alone.
        """
        pad, values, keywords = group.pad, list(args), kwargs | _own_masks(groups)
        self._change(pad, values, keywords, lambda _, leaf: with_size(leaf, pad.axis, size))
        if pad.mask is not None:
            keywords[pad.mask] = jax.ShapeDtypeStruct((size,), bool)
        outputs = self._engine().eval_shape(tuple(values), keywords)
        others = self._apart(outputs, args, kwargs)[1]
        return [np.shape(leaf) for leaf in jax.tree_util.tree_leaves(others)]

    def _check(self, args: tuple, kwargs: dict, groups: list[_Group]) -> None:
        """Raises `PaddingError` if an output depends on the added rows."""
        key = tuple(groups)
        if key in self._checked:
            return
        options = {k: v for k, v in self._spec.options.items() if not k.startswith("donate_")}
        call = self.jit(self._spec.fun, **options)
        args, kwargs = jax.tree_util.tree_map(
            lambda leaf: leaf.value if isinstance(leaf, Variables) else leaf, (args, kwargs)
        )
        found = []
        for row in (0, -1):
            padded_args, padded_kwargs, _ = self._padded(args, kwargs, row)
            outputs = call(*padded_args, **padded_kwargs)
            outputs = self._cut(outputs, padded_args, padded_kwargs, groups)
            leaves = jax.tree_util.tree_flatten_with_path(outputs)[0]
            found.append([each for each in leaves if is_array(each[1])])
        for (path, a), (_, b) in zip(*found, strict=True):
            if jax.numpy.issubdtype(a.dtype, jax.dtypes.prng_key):
                a, b = jax.random.key_data(a), jax.random.key_data(b)
            a, b = _wide(a), _wide(b)
            if not np.allclose(a, b, 1e-5, 1e-7, equal_nan=True):
                raise PaddingError(
                    f"an output of {self._spec.name} depends on the added rows",
                    where=f"output{keystr(path)}",
                    got=f"a difference of {np.nanmax(np.abs(a - b)):.3g}",
                    hint="mask them: jnp.sum(each * mask) / jnp.sum(mask)",
                )
        self._checked.add(key)


def _kind_of(leaf: Any) -> Hashable:
    if isinstance(leaf, Variables):
        return leaf._layout
    return (leaf.shape, leaf.dtype) if is_array(leaf) else type(leaf)


def _own_masks(groups: list[_Group]) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of masks of this process's parts, by argument."""
    split = (group for group in groups if group.split is not None and group.pad.mask is not None)
    return {str(group.pad.mask): jax.ShapeDtypeStruct((group.padded,), bool) for group in split}


def _may_follow(leaf: Any, group: _Group) -> bool:
    """Returns whether an axis of an output may depend on a padded one, as far as its size says."""
    return is_array(leaf) and any(size % group.padded == 0 for size in leaf.shape)


def _filled(path: str, leaf: Any, *, axis: int, padded: int, row: int) -> Any:
    return filled(leaf, axis, padded, row)


def _wide(array: Any) -> np.ndarray:
    array = np.asarray(array)
    return array.astype(np.result_type(array.dtype, np.float32))
