"""A call in names and texts that any process can compare, and what differs since an earlier run.

It explains misses, and decides nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax

from stepcache import jaxcompat
from stepcache.calls.key import Key
from stepcache.calls.layers import code_of, definition_of
from stepcache.calls.signature import Leaf, Path, Signature, short_type, shorten
from stepcache.events import Change, Miss
from stepcache.programs.prediction import Described
from stepcache.programs.store import ProgramStore

_PARTS = {"argument": "argument", "static": "static", "option": "options", "mesh": "mesh"}
_PARTS |= {"config": "config", "environment": "environment", "package": "package", "holder": "tree"}
_UNSEEN = "another, by what its text does not show, such as a large captured array"
ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def describe(label: str, key: Key, paths: Sequence[Path], signature: Signature) -> Described:
    """Describes a call of the step of this label, by its paths and types, not by its values.

    Args:
        label: of the step.
        key: of its program.
        paths, signature: as they are shown, placed.
    """
    call: dict[str, str] = {}
    for path, leaf in zip(paths, signature.leaves, strict=True):
        call[f"argument {path.text}"] = _leaf_text(leaf)
        if path.holder:
            call[f"holder {path.argument}"] = path.holder
    for static in signature.statics:
        call[f"static {static.name}"] = f"{static.kind.__qualname__} {_text(static.value)}"
    options = {name: value for name, value in key.options if value not in (None, ())}
    if "carry" in options:  # What is donated follows from it.
        options = {name: value for name, value in options.items() if name[:7] != "donate_"}
    call |= {f"option {name}": _text(value) for name, value in options.items()}
    call["mesh"] = _mesh_text(key)
    settings = _settings_texts(key.environment)  # Of the call; this may run in another thread.
    return Described(label, call, jaxcompat.process_environment() | settings)


@functools.lru_cache(maxsize=16)
def _settings_texts(settings: tuple[tuple[str, Hashable], ...]) -> dict[str, str]:
    return {f"config {name}": _text(value) for name, value in settings}


def file_of(fun: Any) -> str:
    """The file of a step's function; empty where it is in none, as in a notebook."""
    code = code_of(definition_of(fun))
    return "" if code is None or code.co_filename.startswith("<") else code.co_filename


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[Change, ...]:
    """What differs between two calls, or two environments."""
    changes = []
    for name in dict.fromkeys((*after, *before)):
        kind, _, rest = name.partition(" ")
        nothing = "arrays" if kind == "holder" else "absent"
        old, new = before.get(name, nothing), after.get(name, nothing)
        if old != new:
            path = rest if kind in ("argument", "holder", "static", "option") else name
            changes.append(Change(_PARTS.get(kind, kind), path, shorten(old), shorten(new)))
    return tuple(changes)


def compared_with_earlier_run(
    miss: Miss, store: ProgramStore, described: Described, digest: str, module: Callable[[], str]
) -> Miss:
    """A miss, with what an earlier run says of it that compiled a program for this step.

    Where that run had another call, the call is compared, by arguments. Where it had the same call,
    the lowered modules are, by their first differing line, and the settings by their names.

    Args:
        miss: why no program was in memory.
        store: knows the earlier runs.
        described: the call.
        digest: of the program that has to be compiled; empty if it is not known.
        module: gives the lowered module as text, with locations.
    """
    rows = store.predictions.of_step(described.label)
    row = store.predictions.find(described.label, described.signature)
    is_first = miss.reason == "first call"
    if row is None:
        if not (rows and is_first):
            return miss
        row = min(rows, key=lambda row: len(differences(row.call, described.call)))
        changes, more = differences(row.call, described.call), 0
    elif any(row[1:3] == (described.signature, digest) for row in rows):
        return dataclasses.replace(miss, reason="gone from disk") if is_first else miss
    else:
        changes, more = differences(store.predictions.environment(row), described.environment), 0
        from stepcache.programs.module_difference import ModuleDifference, difference  # For few.

        before = store.module_of(row.program)
        of_exports = ["@call_exported_" in text for text in (before, module())]
        if before and len({*of_exports}) > 1:  # Their operations are not to be compared.
            old, new = ("its export, for a KEY" if each else "the step" for each in of_exports)
            found = ModuleDifference((Change("code", "what is traced", old, new),))
        else:
            found = difference(before, module()) if before else None
        if found is not None:
            changes, more = (*changes, *found.changes), found.more
        if not changes:
            changes = (Change("code", "the lowered module", "as it was", _UNSEEN),)
    if is_first:
        return dataclasses.replace(
            miss, reason="other run", changes=changes, omitted=more, since=row.time
        )
    return dataclasses.replace(miss, stored=changes, since=row.time)


def _leaf_text(leaf: Leaf) -> str:
    kind = short_type(leaf.shape, leaf.dtype)
    weak = " weak" if leaf.weak_type else ""
    layout = f" {leaf.layout}" if leaf.layout is not None else ""
    return f"{kind}{weak} {_sharding_text(leaf.sharding)}{layout}"


@functools.lru_cache(maxsize=1024)
def _sharding_text(sharding: Hashable) -> str:
    return "uncommitted" if sharding is None else jaxcompat.sharding_text(sharding)


def _mesh_text(key: Key) -> str:
    if not key.mesh:
        return "none"
    axes, names, devices = key.mesh[:3]
    return f"{dict(axes)} ({','.join(names)}) over {jaxcompat.devices_text(devices)}"


def _text(value: Any) -> str:
    """A value as text that is the same in every process, as far as that can be had."""
    if isinstance(value, jax.sharding.Mesh):
        return jaxcompat.sharding_text(value) if not value.empty else "none"
    try:
        return shorten(ADDRESS.sub("", repr(value)), 400)
    except Exception:
        return f"a {type(value).__name__} that cannot be printed"
