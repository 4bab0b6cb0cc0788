"""`Padder`: pads arguments to one of a few sizes, so that a short batch finds a program.

Rows are added before the call, and cut from the outputs after it. The function gets a mask or a
count, to leave them out of sums and means.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import keystr

from stepcache.calls.carry import carry_and_rest
from stepcache.calls.context import Scope
from stepcache.calls.pad import Pad
from stepcache.calls.padded_arrays import filled, is_array, kept, with_size
from stepcache.calls.step_spec import StepSpec
from stepcache.errors import PaddingError
from stepcache.variables.packing import is_key_type
from stepcache.variables.variables import Variables

_KEYS_REMEMBERED = 1024

Arguments = dict[int | str, Any]
"""The arguments of a call by their position or name."""


class _Group(NamedTuple):
    """One `Pad` in a call."""

    pad: Pad
    size: int  # Of the axis, as the caller passes it.
    padded: int  # What it is padded to.


class Padder:
    """Calls a step with padded arguments, and cuts its outputs.

    Attributes:
        call: calls the step with padded arguments.

    `engine` returns the step's engine, which is not kept alive, and `scope` the scope of a call.
    """

    jit: Callable[..., Callable] = staticmethod(jax.jit)  # Compiles the step's function, to check.
    # What outputs depend on of an argument's leaf that is no array.
    kind_of: Callable[[Any], Hashable] = staticmethod(type)

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
        given, groups = self._padded(args, kwargs)
        with self._lock:
            for group in groups[:1]:
                self._rows += group.size
                self._padded_rows += group.padded
        if any(group.pad.check and group.size < group.padded for group in groups):
            self._check(args, kwargs, groups)
        padded_args, padded_kwargs = _args_and_kwargs(given)
        return self._cut(call(*padded_args, **padded_kwargs), given, groups)

    @property
    def padding(self) -> float:
        """Share of added rows, along the axis of the first `Pad`."""
        return 1 - self._rows / self._padded_rows if self._padded_rows else 0.0

    def padded(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return _args_and_kwargs(self._padded(args, kwargs)[0])

    def eval_shape(self, args: tuple, kwargs: dict) -> Any:
        given, groups = self._padded(args, kwargs)
        return self._cut(self._engine().eval_shape(*_args_and_kwargs(given)), given, groups)

    def _padded(self, args: tuple, kwargs: dict, row: int = -1) -> tuple[Arguments, list[_Group]]:
        """Pads arguments with copies of a row. Returns them, and a group for each `Pad`."""
        given = passed = Arguments(enumerate(args)) | kwargs
        groups = []
        for pad in self._spec.pads:
            if pad.check and jax.process_count() > 1 and self._scope().placer is not None:
                what = "check= needs all rows in one process, and each process passes its part"
                raise pad._error(what, hint="check the padding in a run of one process")
            size = self._size(pad, given)
            if size is None:
                continue
            padded = pad.padded_size(size, self._parts(pad))

            def fill(leaf: Any, _: str, axis: int = pad.axis, padded: int = padded) -> Any:
                return filled(leaf, axis, padded, row)

            given = self._replaced(pad, given, fill)
            mask = np.zeros(padded, bool)
            mask[:size] = True
            for name, value in ((pad.mask, mask), (pad.count, np.int32(size))):
                if name is None:
                    continue
                if self._key_of(name, passed) in passed:
                    what = f"{self._spec.name} makes this argument by its pad= option"
                    raise PaddingError(what, where=name, hint="leave it out of the call")
                given[name] = value
            groups.append(_Group(pad, size, padded))
        return given, groups

    def _size(self, pad: Pad, given: Arguments) -> int | None:
        """The size of the axis; None without arrays. Raises `PaddingError` if sizes differ."""
        sizes: dict[int, str] = {}

        def see(leaf: Any, path: str) -> Any:
            sizes.setdefault(leaf.shape[pad.axis], path)
            return leaf

        self._replaced(pad, given, see)
        if len(sizes) > 1:
            (a, first), (b, second), *_ = sizes.items()
            what = f"arrays that are padded together differ in size along axis {pad.axis}"
            hint = 'name the part to pad, as in sc.Pad("batch/tokens", axis=1)'
            raise pad._error(what, got=f"{a} at {first}, {b} at {second}", hint=hint)
        return next(iter(sizes), None)

    def _replaced(self, pad: Pad, given: Arguments, change: Callable[..., Any]) -> Arguments:
        """The arguments of a call with the arrays of a `Pad` replaced.

        `change` gets an array and its path, such as "batch/tokens".
        """
        replaced = dict(given)
        for name in {argument.partition("/")[0] for argument in pad.arguments}:

            def at(keys: Any, leaf: Any, name: str = name) -> Any:
                path = f"{name}/{keystr(keys, simple=True, separator='/')}".rstrip("/")
                has_axis = is_array(leaf) and len(leaf.shape) > pad.axis
                return change(leaf, path) if has_axis and pad.covers(path) else leaf

            if (key := self._key_of(name, given)) in given:
                replaced[key] = jax.tree_util.tree_map_with_path(at, given[key])
        return replaced

    def _parts(self, pad: Pad) -> int:
        """Returns into how many parts a session splits the axis in this process."""
        placer = self._scope().placer
        names = {argument.partition("/")[0] for argument in pad.arguments}
        if placer is None or pad.axis or names.isdisjoint(self._spec.parameters.batch):
            return 1
        return placer.own_parts

    def _cut(self, outputs: Any, given: Arguments, groups: list[_Group]) -> Any:
        """Cuts the added rows from outputs, but not from a carry."""
        groups = [group for group in groups if group.size < group.padded]
        if not groups:
            return outputs
        carried, others, together = self._apart(outputs, given)
        leaves, tree = jax.tree_util.tree_flatten(others)
        sizes = {size for leaf in leaves for size in getattr(leaf, "shape", ())}
        if not any(size % group.padded == 0 for size in sizes for group in groups):
            return outputs  # No axis can depend on a padded one.
        for at, axes in enumerate(self._varying(given, groups, leaves)):
            for axis, number in axes:
                group = groups[number]
                if leaves[at].shape[axis] != group.padded:
                    raise group.pad._error(
                        f"{self._spec.name} returns an array with a row for each padded row, "
                        "and it is unknown which rows other processes have added",
                        hint="return sums over the rows instead, or call the step with batches "
                        "that need no padding",
                    )
                leaves[at] = kept(leaves[at], axis, group.size)
        return together(carried, tree.unflatten(leaves))

    def _apart(self, outputs: Any, given: Arguments) -> tuple[tuple, Any, Callable]:
        """What `carry_and_rest` returns. Outputs that do not begin with the carry are all carried.

        So they are for `eval_shape`, which gives a tree for `Variables` that come back alone.
        """
        carried = [given.get(self._key_of(name, given)) for name in self._spec.parameters.carry]
        return carry_and_rest(outputs, carried) or ((outputs,), (), lambda new, _: new[0])

    def _key_of(self, name: str, given: Arguments) -> int | str:
        """The position or the name by which a call passes an argument, if it does."""
        return name if name in given else self._positions.get(name, name)

    def _varying(
        self, given: Arguments, groups: list[_Group], leaves: list[Any]
    ) -> list[list[tuple[int, int]]]:
        """Returns for each output the axes that depend on a padded axis, and the numbers of groups.

        Compares the shapes of outputs at another size: a trace, once for each signature.
        """
        key = self._signature(given), *((group.pad, group.padded) for group in groups)
        if (known := self._axes.get(key)) is not None:
            return known
        axes: list[list[tuple[int, int]]] = [[] for _ in leaves]
        for number, group in enumerate(groups):
            sizes = group.padded, group.pad.other_size(group.padded)
            found = self._shapes_at(given, group.pad, sizes[1])
            if jax.process_count() > 1:  # The outputs may have the rows of all processes.
                shapes = self._shapes_at(given, group.pad, sizes[0])
            else:
                shapes = [np.shape(leaf) for leaf in leaves]
            if [len(each) for each in found] != [len(each) for each in shapes]:
                what = "returns a different tree at another size: unknown which outputs to cut"
                raise group.pad._error(f"{self._spec.name} {what}")
            for at, (shape, other) in enumerate(zip(shapes, found, strict=True)):
                for axis, both in enumerate(zip(shape, other, strict=True)):
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

    def _signature(self, given: Arguments) -> Hashable:
        """Returns a key for the properties that determine the shapes of outputs."""
        roles = self._spec.parameters.roles
        kinds: list[Hashable] = [*given]
        for key, value in given.items():
            if key in roles.static_argnums or key in roles.static_argnames:
                kinds.append(value)
            else:
                leaves, tree = jax.tree_util.tree_flatten(value)
                kinds += [tree, *map(self._kind, leaves)]
        return tuple(kinds)

    def _kind(self, leaf: Any) -> Hashable:
        if isinstance(leaf, Variables):
            return leaf._layout
        return (leaf.shape, leaf.dtype) if is_array(leaf) else self.kind_of(leaf)

    def _shapes_at(self, given: Arguments, pad: Pad, size: int) -> list[tuple[int, ...]]:
        """Returns the shapes of outputs, without the carry, at another size of a padded axis.

        In a pod: the shapes that this process's parts would have alone.
        """
        given = self._replaced(pad, given, lambda leaf, _: with_size(leaf, pad.axis, size))
        if pad.mask is not None:
            given[pad.mask] = jax.ShapeDtypeStruct((size,), bool)
        others = self._apart(self._engine().eval_shape(*_args_and_kwargs(given)), given)[1]
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
            given, _ = self._padded(args, kwargs, row)
            padded_args, padded_kwargs = _args_and_kwargs(given)
            outputs = self._cut(call(*padded_args, **padded_kwargs), given, groups)
            leaves = jax.tree_util.tree_leaves_with_path(outputs)
            found.append([each for each in leaves if is_array(each[1])])
        for (path, a), (_, b) in zip(*found, strict=True):
            if is_key_type(a.dtype):
                a, b = jax.random.key_data(a), jax.random.key_data(b)
            numbers = np.result_type(a.dtype, np.float32)  # Booleans have no difference.
            a, b = np.asarray(a).astype(numbers), np.asarray(b).astype(numbers)
            if not np.allclose(a, b, 1e-5, 1e-7, equal_nan=True):
                raise PaddingError(
                    f"an output of {self._spec.name} depends on the added rows",
                    where=f"output{keystr(path)}",
                    got=f"a difference of {np.nanmax(np.abs(a - b)):.3g}",
                    hint="mask them: jnp.sum(each * mask) / jnp.sum(mask)",
                )
        self._checked.add(key)


def _args_and_kwargs(given: Arguments) -> tuple[tuple, dict[str, Any]]:
    """The positional arguments of a call, and those that it passes by name."""
    args = tuple(value for key, value in given.items() if isinstance(key, int))
    return args, {key: value for key, value in given.items() if isinstance(key, str)}
