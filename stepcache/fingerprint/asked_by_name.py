"""What a trace asks for by name: environment variables, and settings that packages keep.

Settings are absl's flags, what is in a `ConfigDict` of ml_collections, and the fields of a model of
pydantic. Code of these packages reads the first two, which a recording sees; of a model, code names
the attribute, or calls the package. So it is known which settings a trace asked for. The others,
such as the directory or the time of a run, are no dependencies.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import Any

from stepcache.fingerprint.bytecode import READS_SETTINGS
from stepcache.fingerprint.provenance import INSTALLED, origin_of, package_of
from stepcache.fingerprint.tokens import qualified_name
from stepcache.fingerprint.trail import Trail

READERS_OF_ENVIRONMENT: dict[CodeType, str] = {
    type(os.environ).__getitem__.__code__: "key",
    **{
        vars(type(os.environ))[name].__code__: ""
        for name in ("__iter__", "__len__", "__repr__")
        if name in vars(type(os.environ))
    },
}
"""Code of `os.environ` that reads it, and its argument that names a variable, if it reads one."""
WHICH_VARIABLES = "(names of all)"
"""Stands among the names of environment variables for what these names are."""

_PYDANTIC = {"pydantic", "pydantic_settings"}
_FILES = {
    "absl": f"absl{os.sep}flags{os.sep}_flagvalues.py",
    "ml_collections": f"ml_collections{os.sep}config_dict{os.sep}config_dict.py",
    **dict.fromkeys(_PYDANTIC, ".py"),
}
# What reads one setting, and its argument that names this.
_READERS_OF_SETTINGS = {
    "FlagValues.__getattr__": "name",
    "FlagValues.__getitem__": "name",
    "FlagValues.__contains__": "name",
    "ConfigDict.__getattr__": "attribute",
    "ConfigDict.__getitem__": "key",
    "ConfigDict.__contains__": "key",
    "ConfigDict.get": "key",
}
_HOLDER = "FlagHolder."  # It asks absl's registry for its flag.


def variables_read(code: CodeType, frame: FrameType) -> set[str]:
    """The environment variables that code of `os.environ` reads."""
    key = READERS_OF_ENVIRONMENT[code]
    if not key:
        return {WHICH_VARIABLES, *map(os.fsdecode, os.environ._data)}  # type: ignore[attr-defined]
    name = frame.f_locals.get(key)
    return {os.fsdecode(name)} if isinstance(name, str | bytes) else set()


@functools.lru_cache(maxsize=8192)
def keeps_settings(filename: str) -> bool:
    """Whether the code in a file is that of objects which keep settings by name."""
    file = _FILES.get(package_of(filename))
    return file is not None and filename.endswith(file)


def settings_read(code: CodeType, frame: FrameType) -> set[str]:
    """What stands, among the names that code reads, for the settings that such code reads.

    Nothing where code of the same package has called it: what that was asked for has been seen.
    """
    if key := _READERS_OF_SETTINGS.get(code.co_qualname):
        return {_setting(frame.f_locals.get(key))}
    caller = frame.f_back
    is_own = caller is not None and keeps_settings(caller.f_code.co_filename)
    return set() if is_own or code.co_qualname.startswith(_HOLDER) else {READS_SETTINGS}


def _setting(key: Any) -> str:
    return f"setting {key!r}" if type(key) in (str, int) else READS_SETTINGS


def _is_watched(cls: type) -> bool:
    """Whether a recording sees what is read of such objects: not of a copy of the package."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return file is not None and keeps_settings(file)


def note_settings(walk: Trail, path: str, cls: type, settings: Iterable[tuple[Any, Any]]) -> None:
    """Notes what an object of a class keeps by name, each as soon as it is known to be read."""
    is_watched = _is_watched(cls)
    for key, value in settings:
        place = f"{path}.{key}" if isinstance(key, str) else f"{path}[{key!r}]"
        if not is_watched or (name := _setting(key)) == READS_SETTINGS:
            walk.value(place, value)
        else:
            walk.when_named(name, place, value)
            walk.when_named(READS_SETTINGS, place, value)


def config_among(cls: type) -> type | None:
    """The `ConfigDict` that a class is, or is derived from, if a recording sees what is read."""
    found = (base for base in cls.__mro__ if qualified_name(base) == _CONFIG)
    return next(filter(_is_watched, found), None)


_CONFIG = "ml_collections.config_dict.config_dict.ConfigDict"


def note_config(walk: Trail, path: str, base: type, state: dict[str, Any]) -> dict[str, Any]:
    """Notes the settings in a `ConfigDict`; returns its other attributes."""
    settings: dict[Any, Any] = state["_fields"]
    note_settings(walk, path, base, list(settings.items()))
    walk.when_named(READS_SETTINGS, f"{path} (order of settings)", tuple(settings))
    if "_configdict" in state:  # The frozen one's, as it was before it was frozen.
        walk.when_named(READS_SETTINGS, f"{path}._configdict", state["_configdict"])
    return {name: each for name, each in state.items() if name not in ("_fields", "_configdict")}


def is_model(cls: type) -> bool:
    """Whether a class is a model of pydantic, and none that another package has defined."""
    packages = {
        base.__module__.partition(".")[0] for base in cls.__mro__ if origin_of(base) == INSTALLED
    }
    return bool(packages) and packages <= _PYDANTIC


def note_model(walk: Trail, path: str, state: dict[str, Any]) -> None:
    """Notes the attributes of a model of pydantic."""
    fields = dict(state)
    for name in ("__pydantic_private__", "__pydantic_extra__"):
        fields |= fields.pop(name, None) or {}
    walk.when_named(READS_SETTINGS, f"{path} (order of attributes)", tuple(fields))
    for name, value in fields.items():
        walk.when_named(READS_SETTINGS, f"{path}.{name}", value)
        walk.when_named(name, f"{path}.{name}", value)
