"""What JAX knows of a program's arguments and results, as plain data, and back.

Types, shardings, layouts and arrays are written as numbers, texts, bytes and lists of these, each
kind by a function of its own. Reading them back calls the constructors named here, and no others,
so the data can describe arrays and nothing else. Devices are positions among those of the program.

What is of a kind that is not known here raises `NotStorable`. What is read back and is malformed
raises `ValueError`, `TypeError`, `KeyError` or `IndexError`.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from stepcache.jaxcompat.checked_data import (
    NotStorable,
    item_at,
    of_kind,
    of_kinds,
    sizes_in,
    text_or_none,
    texts_in,
)
from stepcache.jaxcompat.private import CAN_STORE

if CAN_STORE:
    from jax._src import core
    from jax._src import layout as layout_lib
    from jax._src import mesh as mesh_lib
    from jax._src import partition_spec as spec_lib
    from jax._src.sharding_impls import GSPMDSharding
    from jaxlib import xla_client

_UNCONSTRAINED = True  # No axis of a mesh is named so.
_IN = ("input_avals", "input_shardings", "xla_in_layouts", "dispatch_in_layouts")
_OUT = ("output_avals", "output_shardings", "xla_out_layouts")
FIELDS = (*_IN, *_OUT, "committed", "name", "kept_var_idx")


class _Table:
    """Equal values are written once, and referred to by number."""

    def __init__(self, write: Callable[[Any], Any]):
        self.rows: list[Any] = []
        self._write, self._numbers = write, {}

    def number(self, value: Any) -> int:
        key = (type(value), value)
        number = self._numbers.get(key)
        if number is None:
            self.rows.append(self._write(value))
            number = self._numbers[key] = len(self.rows) - 1
        return number

    def numbers(self, values: Sequence[Any]) -> list[int]:
        return [self.number(value) for value in values]


def encode_call(
    call: dict[str, Any], const_args: Sequence[np.ndarray], devices: Sequence[Any]
) -> dict[str, Any]:
    """The description of a call as plain data.

    Args:
        call: the `FIELDS` of JAX's executable.
        const_args: the arrays that the program is given beside its arguments.
        devices: of the program, in order.
    """
    positions = {device: position for position, device in enumerate(devices)}
    meshes = _Table(functools.partial(_encode_mesh, positions=positions))
    avals = _Table(functools.partial(_encode_aval, meshes=meshes))
    shardings = _Table(functools.partial(_encode_sharding, meshes=meshes))
    tables = {"avals": avals, "shardings": shardings, "layouts": _Table(_encode_layout)}
    data: dict[str, Any] = {
        name: tables[_table_of(name)].numbers(call[name]) for name in (*_IN, *_OUT)
    }
    data |= {name: table.rows for name, table in tables.items()} | {"meshes": meshes.rows}
    data["committed"], data["name"] = bool(call["committed"]), str(call["name"])
    data["kept_var_idx"] = sorted(call["kept_var_idx"])
    data["const_args"] = [encode_array(each) for each in const_args]
    read, _ = decode_call(data, devices)
    for name in FIELDS:
        if read[name] != (list(call[name]) if name in (*_IN, *_OUT) else call[name]):
            raise NotStorable(f"its {name} would be read back as something else")
    return data


def _table_of(name: str) -> str:
    return name.rpartition("_")[2]


def decode_call(
    data: dict[str, Any], devices: Sequence[Any]
) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Reads `FIELDS` and the arrays that `encode_call` wrote, for a program on these devices."""
    meshes = [_decode_mesh(row, devices) for row in data["meshes"]]
    tables = {
        "avals": [_decode_aval(row, meshes) for row in data["avals"]],
        "shardings": [_decode_sharding(row, meshes, devices) for row in data["shardings"]],
        "layouts": [_decode_layout(row) for row in data["layouts"]],
    }
    call: dict[str, Any] = {}
    for name in (*_IN, *_OUT):
        table, numbers = tables[_table_of(name)], data[name]
        if numbers and not 0 <= min(numbers) <= max(numbers) < len(table):
            raise ValueError(f"{name} refer to what is not there")
        call[name] = [table[number] for number in numbers]
    for part, names in (("inputs", _IN), ("outputs", _OUT)):
        if len({len(call[name]) for name in names}) > 1:
            raise ValueError(f"some of the {part} are not described to the end")
    call["committed"], call["name"] = of_kind(bool, data["committed"]), of_kind(str, data["name"])
    call["kept_var_idx"] = set(sizes_in(data["kept_var_idx"]))
    return call, [decode_array(each) for each in data["const_args"]]


SCALAR_TYPE = type(jnp.float32)


@functools.cache
def _dtypes() -> dict[str, np.dtype]:
    """The types of elements, by name."""
    scalars = {each.dtype for each in vars(jnp).values() if isinstance(each, SCALAR_TYPE)}
    return {"float0": jax.dtypes.float0} | {dtype.name: dtype for dtype in scalars}


@functools.cache
def _key_dtype(generator: str) -> Any:
    return jax.eval_shape(lambda: jax.random.key(0, impl=generator)).dtype


def encode_dtype(dtype: Any) -> Any:
    """A type of elements: its name, or that of the generator of a random key."""
    if isinstance(dtype, np.dtype):
        name = "float0" if dtype == jax.dtypes.float0 else dtype.name
        if _dtypes().get(name) == dtype:
            return name
    elif jnp.issubdtype(dtype, jax.dtypes.prng_key):
        with contextlib.suppress(ValueError):  # A generator that is not known by its name.
            if _key_dtype(dtype._impl.name) == dtype:
                return ["key", dtype._impl.name]
    raise NotStorable(f"it has elements of the unknown type {dtype}")


def decode_dtype(data: Any) -> Any:
    """Reads what `encode_dtype` wrote."""
    if type(data) is str:
        return _dtypes()[data]
    kind, name = data
    if kind != "key":
        raise ValueError(f"unknown type {kind!r:.80}")
    return _key_dtype(of_kind(str, name))


def _encode_aval(aval: Any, meshes: _Table) -> list[Any]:
    """[shape, dtype, weak type, sharding, manual axes, memory, layout]"""
    if type(aval) is not core.ShapedArray:
        raise NotStorable(f"it has an argument or a result of the type {type(aval).__name__}")
    shape = [of_kinds(size, int, "a dimension") for size in aval.shape]
    sharding, manual, memory = None, None, aval.memory_space
    if aval.sharding != core.ShapedArray(aval.shape, np.dtype(bool)).sharding:
        sharding = [meshes.number(aval.sharding.mesh), encode_spec(aval.sharding.spec)]
        axes = aval.manual_axis_type
        manual = [sorted(each) for each in (axes.varying, axes.unreduced, axes.reduced)]
        manual = [*manual, _kind_name(axes)] if any(manual) else None
    layout = getattr(aval, "layout", layout_lib.AutoLayout)
    laid_out = None if layout is layout_lib.AutoLayout else _encode_layout(layout)
    weak = bool(aval.weak_type)
    return [shape, encode_dtype(aval.dtype), weak, sharding, manual, memory.name, laid_out]


def _decode_aval(row: Any, meshes: Sequence[Any]) -> Any:
    shape, dtype, weak, sharding, manual, memory, layout = row
    more: dict[str, Any] = {}
    if sharding is not None:
        mesh, spec = sharding
        more["sharding"] = NamedSharding(item_at(meshes, mesh), decode_spec(spec))
    if manual is not None:
        *axes, kind = manual
        named = dict(zip(("varying", "unreduced", "reduced"), axes, strict=True))
        sets = {name: frozenset(texts_in(each)) for name, each in named.items()}
        more["manual_axis_type"] = core.ManualAxisType(**sets, **_of_kind(kind))
    if memory != "Device":
        more["memory_space"] = core.MemorySpace[memory]
    if layout is not None:
        more["layout"] = _decode_layout(layout)
    return core.ShapedArray(sizes_in(shape), decode_dtype(dtype), of_kind(bool, weak), **more)


def encode_array(array: np.ndarray) -> list[Any]:
    """[shape, dtype, bytes]"""
    return [list(array.shape), encode_dtype(array.dtype), array.tobytes()]


def decode_array(data: Any) -> np.ndarray:
    """Reads what `encode_array` wrote; the array is a view of the data, and cannot be written."""
    shape, name, content = data
    dtype, shape = _dtypes()[of_kind(str, name)], sizes_in(shape)
    if math.prod(shape) * dtype.itemsize != len(of_kind(bytes, content)):
        raise ValueError(f"an array of {shape} {name} has {len(content):,} bytes")
    return np.ndarray(shape, dtype, content)


def _encode_mesh(mesh: Any, positions: dict[Any, int]) -> list[Any]:
    """[names, sizes, kinds of axes, positions of devices, kind of abstract device]"""
    names = [of_kinds(name, str, "an axis") for name in mesh.axis_names]
    kinds = [kind.name for kind in mesh.axis_types]
    if isinstance(mesh, Mesh):
        places = [positions.get(device) for device in mesh.devices.flat]
        return [names, list(mesh.devices.shape), kinds, places, None]
    device = of_kinds(mesh, AbstractMesh, "a mesh").abstract_device
    parts = None if device is None else [device.device_kind, device.num_cores, device.platform]
    return [names, list(mesh.axis_sizes), kinds, None, parts]


def _decode_mesh(row: Any, devices: Sequence[Any]) -> Any:
    names, sizes, kinds, places, device = row
    names, sizes = texts_in(names), sizes_in(sizes)
    axes = tuple(AxisType[kind] for kind in kinds)
    if places is not None:
        if sorted(places) != list(range(len(devices))):
            raise ValueError("a mesh is not over the devices of the program")
        grid = np.empty(len(devices), object)
        grid[:] = [devices[place] for place in places]
        return Mesh(grid.reshape(sizes), names, axes)
    abstract = None
    if device is not None:
        kind, cores, platform = device
        cores = None if cores is None else of_kind(int, cores)
        abstract = mesh_lib.AbstractDevice(of_kind(str, kind), cores, of_kind(str, platform))
    if not len(names) == len(sizes) == len(axes):
        raise ValueError("a mesh has another number of names than of axes")
    return AbstractMesh(sizes, names, axes, abstract_device=abstract)


def encode_spec(spec: P) -> list[Any]:
    """[entries, unreduced axes, reduced axes, kind of reduction]"""
    entries: list[Any] = []
    for entry in spec._partitions:
        if entry is P.UNCONSTRAINED:
            entries.append(_UNCONSTRAINED)
        elif isinstance(entry, tuple):
            entries.append([of_kinds(name, str, "an axis") for name in entry])
        else:
            entries.append(of_kinds(entry, (str, type(None)), "an axis"))
    return [entries, sorted(spec.unreduced), sorted(spec.reduced), _kind_name(spec)]


def decode_spec(data: Any) -> P:
    """Reads what `encode_spec` wrote."""
    entries, unreduced, reduced, kind = data
    parts = [
        texts_in(entry)
        if type(entry) is list
        else P.UNCONSTRAINED
        if entry is _UNCONSTRAINED
        else text_or_none(entry)
        for entry in entries
    ]
    if not (unreduced or reduced or kind):
        return P(*parts)
    sets = {"unreduced": frozenset(texts_in(unreduced)), "reduced": frozenset(texts_in(reduced))}
    return P(*parts, **sets, **_of_kind(kind))


def _kind_name(reducing: Any) -> str | None:
    """How unreduced axes are to be reduced, where this JAX tells several ways apart."""
    kind = getattr(reducing, "unreduced_kind", None)
    return None if kind is None else kind.name


def _of_kind(name: Any) -> dict[str, Any]:
    kinds: Any = getattr(spec_lib, "UnreducedKind", None)
    return {} if name is None else {"unreduced_kind": kinds[name]}


def _encode_sharding(sharding: Any, meshes: _Table) -> list[Any]:
    """[mesh, spec, memory], [tiles, order, last is replicated, memory], or [memory]

    The first is by names, the second by tiles, the third on one device.
    """
    if isinstance(sharding, SingleDeviceSharding):
        return [sharding.memory_kind]
    if isinstance(sharding, GSPMDSharding):
        return [*_encode_tiles(sharding._hlo_sharding), sharding.memory_kind]
    of_kinds(sharding, NamedSharding, "a sharding")
    return [meshes.number(sharding.mesh), encode_spec(sharding.spec), sharding.memory_kind]


def _decode_sharding(row: Any, meshes: Sequence[Any], devices: Sequence[Any]) -> Any:
    *parts, memory = row
    memory = text_or_none(memory)
    if not parts:
        (device,) = devices
        return SingleDeviceSharding(device, memory_kind=memory)
    if len(parts) == 3:
        tiles, order, last = parts
        listed = xla_client.DeviceList(tuple(devices))
        by_tiles = _decode_tiles(tiles, order, last, len(devices))
        return GSPMDSharding(listed, by_tiles, memory_kind=memory)
    number, spec = parts
    mesh = item_at(meshes, number)
    if not isinstance(mesh, Mesh):
        raise ValueError("a sharding is on no devices")
    return NamedSharding(mesh, decode_spec(spec), memory_kind=memory)


def _encode_tiles(sharding: Any) -> list[Any]:
    """What XLA found for an argument or a result that has no sharding by names."""
    if sharding.is_replicated():
        return [[], [], False]
    if not sharding.is_tiled() or sharding.subgroup_types():
        raise NotStorable(f"it has a sharding by other things than tiles: {sharding}")
    order = [int(device) for device in sharding.tile_assignment_devices()]
    last = sharding.replicate_on_last_tile_dim()
    return [list(sharding.tile_assignment_dimensions()), order, bool(last)]


def _decode_tiles(tiles: Any, order: Any, last: Any, devices: int) -> Any:
    sizes, numbers = sizes_in(tiles), sizes_in(order)
    if not sizes:
        return xla_client.HloSharding.replicate()
    if sorted(numbers) != list(range(devices)) or math.prod(sizes) != devices or len(sizes) > 64:
        raise ValueError("tiles that are not one for each device")
    types = [xla_client.OpSharding.Type.REPLICATED] if of_kind(bool, last) else []
    assignment = np.array(numbers, np.int64).reshape(sizes)
    return xla_client.HloSharding.subgroup_with_device_ordering(assignment, subgroup_types=types)


def _encode_layout(layout: Any) -> list[Any] | None:
    """[major to minor, tiling, bits of an element smaller than a byte]"""
    if layout is None:
        return None
    of_kinds(layout, layout_lib.Layout, "a layout")
    tiling = None if layout.tiling is None else [list(tile) for tile in layout.tiling]
    return [list(layout.major_to_minor), tiling, layout.sub_byte_element_size_in_bits]


def _decode_layout(row: Any) -> Any:
    if row is None:
        return None
    major_to_minor, tiling, bits = row
    tiles = None if tiling is None else tuple(sizes_in(tile) for tile in tiling)
    return layout_lib.Layout(sizes_in(major_to_minor), tiles, of_kind(int, bits))
