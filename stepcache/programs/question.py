"""`Question`: what a call would have to find on disk, and what an answer has to agree with.

A question is asked before anything is traced. Its `lookup` names all builds of one step for one
signature, mesh and environment; each of them, a `Candidate`, says what its trace used, and serves
where all of that is as it was.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax

from stepcache.events import Change
from stepcache.jaxcompat import inspection
from stepcache.programs.build import Recipe
from stepcache.programs.fingerprint import library
from stepcache.programs.fingerprint.origin import (
    INSTALLED,
    USER,
    file_digest,
    file_label,
    origin_of_file,
)
from stepcache.programs.fingerprint.recording import Recording
from stepcache.programs.fingerprint.tokens import atom
from stepcache.programs.fingerprint.walk import Fingerprint, Walk
from stepcache.programs.key import Key
from stepcache.programs.signature import Leaf, short_type
from stepcache.programs.signature import Path as LeafPath

_LOOKED_UP_BY = ("argument", "mesh", "config ", "environment ", "package jax", "static ", "option ")
_MAX_CHANGES = 64


@dataclass(slots=True)
class Used:
    """What a trace used beyond what the code shows.

    Attributes:
        attributes: attributes of the user's objects that libraries read.
        modules: installed modules entered.
        names: what their code reads of modules, by module.
        files: files read, each as (base, path, path as it was): relative to the "source", to the
            "directory" that the process runs in, or "absolute".
        variables: environment variables read.
    """

    attributes: list[str] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    names: dict[str, list[str]] = field(default_factory=dict)
    files: list[list[str]] = field(default_factory=list)
    variables: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Candidate:
    """One build that may be the answer.

    Attributes:
        program: the digest of its executable.
        facts: the digest of all facts that it depends on.
        told: the facts themselves.
        used: what its trace used.
        devices: of its executable, in order, as positions among the question's devices.
        call: what JAX knows of arguments and results.
        tree: the tree of the outputs, encoded.
        captured: name, type and bytes of the large arrays in it.
        seconds: what each stage took when it was built.
        created_time: seconds since the epoch.
        outline: the lowered module as text, compressed.
    """

    program: str
    facts: str
    told: dict[str, str]
    used: Used
    devices: list[int]
    call: bytes
    tree: Any
    captured: list[list[Any]]
    seconds: dict[str, float]
    created_time: float
    outline: bytes = b""

    def packed(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def unpacked(cls, data: dict[str, Any]) -> Candidate:
        """From `packed`.

        Raises:
            TypeError, KeyError: the data is malformed.
        """
        return cls(**{**data, "used": Used(**data["used"])})


class Question:
    """What a call depends on before it is traced.

    Attributes:
        label: the step, by its file and name.
        lookup: a digest of what all candidates have in common.
        base: the facts known before a trace.
        devices: all devices, those of the call first: executables name theirs by position here.
    """

    def __init__(self, recipe: Recipe, key: Key, leaf_paths: Sequence[LeafPath]):
        self._recipe, self._key, self._paths = recipe, key, leaf_paths
        self.label, self._root = _label_and_root(recipe.fun)
        self.devices = _devices_in_order(key)
        tokens = _leaf_tokens(key.signature.leaves, self.devices)
        self._call_facts = self._facts_of_call(tokens)
        self._base_walk: Walk | None = self._walked()
        self.base = self._base_walk.fingerprint()
        common = [self.label]
        common += [f"{n}={v}" for n, v in self.base.facts.items() if n.startswith(_LOOKED_UP_BY)]
        common.append(self.base.facts["arguments"])
        self.lookup = hashlib.sha256("\n".join((*sorted(common), *tokens)).encode()).hexdigest()

    def _walked(self) -> Walk:
        walk = Walk(self._root)
        walk.value("step", self._recipe.fun)
        for static in self._key.signature.statics:
            walk.value(f"static {static.name}", static.value)
        for name, value in self._recipe.options.items():
            walk.value(f"option {name}", value)
        walk.value("option carry", self._recipe.parameters.carry)
        walk.tree("arguments", self._key.signature.tree)
        walk.facts.update(self._call_facts)
        return walk

    def _facts_of_call(self, tokens: Sequence[str]) -> dict[str, str]:
        facts = inspection.process_environment()
        for name, value in self._key.environment:
            facts.setdefault(f"config {name}", _setting_text(value))
        facts["mesh"] = repr(_renumbered(self._key.mesh, self.devices))
        paths = (path.text for path in self._paths)
        facts.update((f"argument {path}", token) for path, token in zip(paths, tokens, strict=True))
        return facts

    # ---- what only a trace tells of ------------------------------------------------------------

    def with_used(self, used: Used) -> Fingerprint:
        """All facts, for a trace that used this."""
        walk, self._base_walk = self._walk(), None  # What is added now is this trace's affair.
        return self._extended(walk, used)

    def extend(self, used: Used) -> Fingerprint:
        """As `with_used`, for good: the facts of the trace that this question leads to."""
        return self._extended(self._walk(), used)

    def _walk(self) -> Walk:
        if self._base_walk is None:
            self._base_walk = self._walked()
            self._base_walk.fingerprint()
        return self._base_walk

    def _extended(self, walk: Walk, used: Used) -> Fingerprint:
        walk.read_attributes(used.attributes)
        library.note_modules(walk, used.modules, used.names)
        for name in used.variables:
            walk.once(f"environment variable {name}", atom(os.environ.get(name)))
        for base, path, original in used.files:
            walk.once(f"file {path}", self._content(base, path, original))
        return walk.fingerprint()

    def used_by(self, recording: Recording) -> Used:
        """What a trace used."""
        installed = [c for c in recording.codes if origin_of_file(c.co_filename) == INSTALLED]
        names = {name for code in installed for name in (*code.co_names, *_strings(code))}
        return Used(
            sorted((self._walk().waiting() & names) | _asked_for(installed)),
            library.entered_modules(installed),
            library.names_read(installed),
            [self._file_name(path) for path in sorted(recording.files)],
            sorted(recording.variables),
        )

    def blames_of(self, recording: Recording) -> tuple[str, ...]:
        """What of a trace cannot be vouched for. To be asked after `extend`."""
        blames = [*self._walk().blames, *recording.impure]
        if recording.unavailable:
            blames.append(recording.unavailable)
        for code in recording.codes - self._walk().codes:
            if origin_of_file(code.co_filename) == USER and code.co_name != "<module>":
                where = f"{file_label(code.co_filename, None)}:{code.co_qualname}"
                blames.append(f"{where}: the trace went through it, but nothing known leads to it")
        return tuple(blames)

    def _file_name(self, path: str) -> list[str]:
        if not Path(path).is_absolute():
            return ["directory", path, path]
        if self._root and path.startswith(self._root + os.sep):
            return ["source", os.path.relpath(path, self._root), path]
        return ["absolute", path, path]

    def _content(self, base: str, path: str, original: str) -> str:
        """The content of a file, wherever this process would look for it.

        Of a file beside the sources it is not known whether its path was written out; if it still
        exists where it was, it has to be the same there.
        """
        if base != "source":
            return file_digest(os.path.abspath(path))
        here = str(Path(self._root) / path)
        content = file_digest(here)
        if here != original and (there := file_digest(original)) not in (content, "absent"):
            return f"{content}, and {there} at {original}"
        return content


def digest_facts(facts: dict[str, str]) -> str:
    """A digest of facts, whatever their order."""
    hasher = hashlib.sha256()
    for name in sorted(facts):
        hasher.update(
            f"{len(name)} {name}={len(facts[name])} {facts[name]};".encode(errors="replace")
        )
    return hasher.hexdigest()


def agree(told: dict[str, str], found: dict[str, str]) -> bool:
    """Whether what is found now is what was told then.

    Nothing can have been put into a module that is not loaded yet, so nothing is asked of it.
    """
    if told == found:
        return True
    missing = told.keys() - found.keys()
    return all(_is_of_module_not_loaded(name) for name in missing) and all(
        told.get(name) == text for name, text in found.items()
    )


def _is_of_module_not_loaded(fact: str) -> bool:
    return fact.startswith(_NAMES_OF) and fact.removeprefix(_NAMES_OF) not in sys.modules


def differences(before: dict[str, str], after: dict[str, str]) -> tuple[Change, ...]:
    """Where two sets of facts differ, the telling ones first."""
    changes = []
    for name in dict.fromkeys((*before, *after)):
        old, new = before.get(name), after.get(name)
        if old != new and not (new is None and _is_of_module_not_loaded(name)):
            changes.append(_change(name, old, new))
    changes.sort(key=lambda change: _ORDER.index(change.part))
    return tuple(changes[:_MAX_CHANGES])


_ORDER = ["code", "value", "static", "options", "argument", "tree", "mesh", "file", "variable"]
_ORDER += ["config", "package", "environment", "module"]
_NAMES_OF = "names of "
_PARTS = {
    "static ": "static",
    "option ": "options",
    "argument ": "argument",
    "arguments": "tree",
    "mesh": "mesh",
    "file ": "file",
    "environment variable ": "variable",
    "config ": "config",
    "package ": "package",
    "environment ": "environment",
    "module ": "module",
    _NAMES_OF: "module",
}


def _change(name: str, old: str | None, new: str | None) -> Change:
    part = next((part for prefix, part in _PARTS.items() if name.startswith(prefix)), "value")
    shown = name.removeprefix("static ").removeprefix("config ").removeprefix("argument ")
    texts = [text or "" for text in (old, new)]
    if all(text.startswith("code ") or not text for text in texts) and part == "value":
        note = "not there before" if old is None else "gone" if new is None else "its code changed"
        return Change("code", shown, old or "absent", new or "absent", note)
    return Change(part, shown, old or "absent", new or "absent")


def _asked_for(codes: Iterable[Any]) -> set[str]:
    """Attributes that libraries look for in objects which may not have them."""
    asking = [c for c in codes if not _ASKING.isdisjoint(c.co_names)]
    return {name for code in asking for name in _strings(code)}


_ASKING = frozenset(("getattr", "hasattr"))


def _strings(code: Any) -> Iterable[str]:
    return (each for each in code.co_consts if isinstance(each, str) and each.isidentifier())


def step_label(fun: Any) -> str:
    """How to name a step in any process: by its file and name."""
    return _label_and_root(fun)[0]


def _label_and_root(fun: Any) -> tuple[str, str]:
    """How to name a step in any process, and the directory that its modules are imported from."""
    inner = fun
    while not hasattr(inner, "__code__"):
        following = getattr(inner, "__wrapped__", None) or getattr(inner, "func", None)
        following = following or getattr(inner, "__func__", None)
        if following is None or following is inner:
            kind = type(fun)
            return f"{kind.__module__}:{kind.__qualname__}", ""
        inner = following
    filename, module = inner.__code__.co_filename, getattr(inner, "__module__", None)
    label = file_label(filename, module)
    root = "" if filename.startswith("<") else os.path.abspath(filename)[: -len(label) - 1]
    return f"{label}:{inner.__qualname__}", root


# ---- the call ---------------------------------------------------------------------------------


def _devices_in_order(key: Key) -> tuple[Any, ...]:
    """All devices; those that the call speaks of come first, by their numbers.

    So a program on the first four devices of one machine is found for the last four of another.
    """
    numbers = {number for _, number in key.mesh[2]} if key.mesh else set()
    spoken_of = {
        device
        for sharding in {leaf.sharding for leaf in key.signature.leaves if leaf.sharding}
        for device in sharding.device_set
    }
    platform = key.mesh[2][0][0] if key.mesh else None
    everything = jax.devices(platform) if platform else jax.devices()
    ours = {device for device in everything if device.id in numbers} | spoken_of
    ordered = sorted(ours, key=lambda device: device.id)
    return (*ordered, *(device for device in everything if device not in ours))


def _renumbered(mesh: tuple, devices: Sequence[Any]) -> tuple:
    if not mesh:
        return ()
    positions = {(device.platform, device.id): index for index, device in enumerate(devices)}
    return (*mesh[:2], tuple((each[0], positions.get(each, each[1])) for each in mesh[2]))


def _leaf_tokens(leaves: Iterable[Leaf], devices: Sequence[Any]) -> list[str]:
    numbers = {device: index for index, device in enumerate(devices)}
    shardings: dict[Any, str] = {None: "uncommitted"}
    tokens = []
    for leaf in leaves:
        placed = shardings.get(leaf.sharding)
        if placed is None:
            placed = inspection.sharding_text(leaf.sharding, numbers)
            shardings[leaf.sharding] = placed
        weak = " weak" if leaf.weak_type else ""
        layout = f" {leaf.layout}" if leaf.layout is not None else ""
        tokens.append(f"{short_type(leaf.shape, leaf.dtype)}{weak} {placed}{layout}")
    return tokens


def _setting_text(value: Any) -> str:
    if isinstance(value, jax.sharding.Mesh):
        return inspection.sharding_text(value) if not value.empty else "none"
    return repr(value)
