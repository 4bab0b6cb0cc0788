"""Values of variables in directories that orbax reads and writes.

Leaves are stored by number, with a list of their paths beside them: a path may hold anything.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from stepcache.errors import VariablesError, first_line, refuse_url
from stepcache.sharding import current_company
from stepcache.variables.describing import joined
from stepcache.variables.packing import Slot


def save(
    directory: str | os.PathLike, slots: Sequence[Slot], leaves: Sequence[Any], version: int
) -> None:
    """Writes leaves with their version. What was there is replaced when all is written.

    Args:
        directory: where to.
        slots: what the leaves are.
        leaves: arrays, in the same order.
        version: of the value.

    Raises:
        VariablesError: `directory` is a URL.
    """
    company = current_company()
    write = functools.partial(_write, _path(directory), slots, leaves, version)
    if company is None:
        write()
        _replace(_path(directory))
        return
    company.guarded(write)
    if jax.process_index() == 0:
        _replace(_path(directory))
    company.wait_for_all(f"saving {directory}")


_NEW, _OLD = ".new", ".old"


def _beside(path: Path, what: str) -> Path:
    return path.with_name(path.name + what)


def _replace(path: Path) -> None:
    """Puts what has been written in the place of what was there: at each moment one is whole."""
    new, old = _beside(path, _NEW), _beside(path, _OLD)
    shutil.rmtree(old, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        path.rename(old)
    new.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def _write(path: Path, slots: Sequence[Slot], leaves: Sequence[Any], version: int) -> None:
    import orbax.checkpoint as ocp

    stored: dict[str, Any] = {
        "none": np.zeros(1)
    }  # Orbax stores no empty trees, and no empty arrays.
    for number, (slot, leaf) in enumerate(zip(slots, leaves, strict=True)):
        if slot.size:
            stored[str(number)] = jax.random.key_data(leaf) if _is_key(slot) else leaf
    about = {"version": version, "leaves": [_about(slot) for slot in slots]}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(_beside(path, _NEW), stored, force=True, custom_metadata=about)


def restore(directory: str | os.PathLike, slots: Sequence[Slot], name: str) -> tuple[list, int]:
    """Reads leaves, each to where it belongs now, whatever mesh it lay on.

    Args:
        directory: where `save` wrote.
        slots: the leaves that are wanted.
        name: of the variables.

    Returns:
        Arrays in the order of `slots`, and the version; of random keys, their data.

    Raises:
        VariablesError: `directory` is a URL, there is nothing to read, or a leaf is missing, new,
            or of another type.
    """
    path = _path(directory)
    if not path.exists() and _beside(path, _OLD).exists():  # A save was cut off between two names.
        path = _beside(path, _OLD)
    company = current_company()
    read = functools.partial(_read, path, slots, name)
    return read() if company is None else company.guarded(read)


def _read(path: Path, slots: Sequence[Slot], name: str) -> tuple[list, int]:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        try:
            metadata = checkpointer.metadata(path)
            known, about = metadata.item_metadata.tree, metadata.custom_metadata
            rows, version = about["leaves"], int(about["version"])
        except Exception as error:
            raise _unreadable(path, name, error) from error
        _check_same(rows, slots, name)
        wanted: dict[str, Any] = {"none": np.zeros(1)}
        for number in known.keys() - wanted.keys():
            wanted[number] = _target(known[number], slots[int(number)])
        try:
            read = checkpointer.restore(path, wanted)
            leaves = [_leaf(read, number, slot) for number, slot in enumerate(slots)]
        except Exception as error:
            raise _unreadable(path, name, error) from error
    return leaves, version


def _unreadable(path: Path, name: str, error: Exception) -> VariablesError:
    return VariablesError(
        "there is nothing that can be restored",
        where=name,
        got=first_line(error),
        hint=f"{path} has to be a directory that Variables.save wrote, whole",
    )


def _check_same(rows: Sequence[Any], slots: Sequence[Slot], name: str) -> None:
    stored = {path: (kind, tuple(shape)) for path, kind, shape in rows}
    mine = {path: (kind, tuple(shape)) for path, kind, shape in map(_about, slots)}
    for path in dict.fromkeys((*mine, *stored)):
        expected, got = mine.get(path), stored.get(path)
        if expected != got:
            raise VariablesError(
                "another value was stored",
                where=joined(name, path),
                expected="no such leaf"
                if expected is None
                else f"{expected[0]}{list(expected[1])}",
                got="no such leaf" if got is None else f"{got[0]}{list(got[1])}",
            )


def _text(kind: tuple[str, tuple[int, ...]] | None) -> str:
    return "no such leaf" if kind is None else f"{kind[0]}{list(kind[1])}"


def _target(stored: Any, slot: Slot) -> jax.ShapeDtypeStruct:
    """What orbax is to read, and where to."""
    sharding: Any = slot.sharding or SingleDeviceSharding(jax.local_devices()[0])
    if _is_key(slot) and isinstance(sharding, NamedSharding):
        # Its data has a dimension more, which is not split.
        sharding = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(stored.shape, stored.dtype, sharding=sharding)


def _leaf(read: Any, number: int, slot: Slot) -> Any:
    if not slot.size:
        return np.zeros(slot.shape, slot.dtype)
    return read[str(number)]


def _is_key(slot: Slot) -> bool:
    return jax.numpy.issubdtype(slot.dtype, jax.dtypes.extended)


def _about(slot: Slot) -> list[Any]:
    return [slot.path, str(slot.dtype), list(slot.shape)]


def _path(directory: str | os.PathLike) -> Path:
    refuse_url(directory, VariablesError, "directory")
    return Path(directory).expanduser().absolute()
