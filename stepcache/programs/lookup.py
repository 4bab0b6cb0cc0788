"""`Lookup`: finds the program of a call on disk by what the call depends on, without a trace.

Its digest covers all that is known before a trace: code, values, signature, mesh and environment.
Each `DependencyRecord` stored under that digest says what its trace used beyond that, and serves if
all of it is unchanged.
"""

from __future__ import annotations

import copy
import functools
import gc
import os
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CellType, CodeType, FunctionType
from typing import Any

import jax

from stepcache.calls.key import Key
from stepcache.calls.layers import code_of, definition_of
from stepcache.calls.signature import Leaf, short_type
from stepcache.calls.step_spec import Request, StepSpec
from stepcache.distributed.global_arrays import part_of, spans_processes
from stepcache.events import Change
from stepcache.fingerprint import installed_packages, set_order, shared_state
from stepcache.fingerprint.asked_by_name import WHICH_VARIABLES
from stepcache.fingerprint.bytecode import names_of
from stepcache.fingerprint.code_reads import reads_of
from stepcache.fingerprint.dependencies import digest_dependencies, names_about
from stepcache.fingerprint.findings import Findings
from stepcache.fingerprint.modules_as_values import with_library_modules
from stepcache.fingerprint.nondeterminism import why_impure
from stepcache.fingerprint.provenance import (
    INSTALLED,
    USER,
    file_digest,
    file_label,
    origin_of_file,
    origin_of_module,
    state_of_file,
)
from stepcache.fingerprint.tokens import atom, digest, plain_text
from stepcache.fingerprint.trail import MAKE_ANY, entered_among
from stepcache.fingerprint.visitor import Fingerprint, Walk
from stepcache.jaxcompat import default_device, inspection, storing
from stepcache.programs.held_objects import HeldObjects
from stepcache.programs.left_by_traces import Left, as_left
from stepcache.storage.dependency_record import Address, DependencyRecord, Used

NEVER_STORED = "it cannot be stored: "
"""Begins the reason of a program which is of a kind that no process can store."""


@dataclass(frozen=True, slots=True)
class LookupResult:
    """What the archive knows about a lookup."""

    record: DependencyRecord | None = None  # Agrees with every dependency.
    since: float | None = None  # When the build was made that `changes` compares with.
    changes: tuple[Change, ...] = ()  # What differs from that build.
    untrackable: tuple[str, ...] = ()  # Why no record could be looked for, or none was kept.
    used: Used = field(default_factory=Used)  # By the trace of that build.
    # The dependencies of that trace as they were at the lookup.
    found: dict[str, str] = field(default_factory=dict)
    assumes: bool = False  # The record agrees with what traces leave that were not made here.
    remote: str = ""  # URL of the shared cache that has the record; empty where it is on disk.

    @property
    def is_never_stored(self) -> bool:
        """Whether the last run built the same program, and found that it cannot be stored."""
        return any(why.startswith(NEVER_STORED) for why in self.untrackable)


class Lookup:
    """What a call depends on before a trace (`base`), and where its records are (`address`)."""

    def __init__(self, spec: StepSpec, request: Request):
        self._attributes: set[str] = set()  # Those that libraries are known to read by now.
        self._left: Left = {}
        self._spec, self._key, self._paths = spec, request.key, request.call.paths
        self.statics = request.key.signature.statics
        label, self._root = _label_and_root(spec.fun)
        self._devices = _devices_in_order(self._key)
        tokens = _leaf_tokens(self._key.signature.leaves, self._devices)
        self._call_facts = self._call_dependencies(tokens)
        self._base_walk: Walk | None = self._walked()
        self.base = self._base_walk.fingerprint()
        self._imported = frozenset(self._base_walk.imported)
        self.address = self._address(label)

    def _address(self, label: str) -> Address:
        late = self.late_among(self.base.dependencies)
        known = {name: token for name, token in self.base.dependencies.items() if name not in late}
        dependencies = {"label": label, **known}
        if self._spec.parameters.carry:  # What is donated follows from the carry and the function.
            names = ("donate_argnums", "donate_argnames")
            dependencies["donated"] = str([self._spec.options.get(name) for name in names])
        return Address(label, digest_dependencies(dependencies), self._devices)

    def late_among(self, dependencies: Iterable[str]) -> set[str]:
        """Those about packages that functions import: they are there once that has been done."""
        return names_about(self._imported, dependencies)

    def after(self, left: Left) -> Lookup:
        """This lookup as if traces had left what they leave, which were not made here."""
        other = copy.copy(self)
        other._left, other._base_walk = left, None
        other.base = other._after(self.base)
        other.address = other._address(self.address.label)
        return other

    def _walked(self) -> Walk:
        walk = Walk(self._root)
        walk.value("step", self._spec.fun)
        for static in self.statics:
            way = walk.confined.way_to_argument(self._spec.fun, static.name)
            walk.value(f"static {static.name}", static.value, way)
        for name, value in self._spec.given.items():
            plain = tuple(value) if isinstance(value, list) else value
            if plain_text(plain) is None:
                walk.value(f"option {name}", value)
            else:
                walk.once(f"option {name}", repr(plain))
        parameters = self._spec.parameters
        for name, names in (("carry", parameters.carry), ("batch", parameters.batch)):
            if names:
                walk.once(f"option {name}", ", ".join(map(repr, names)))
        walk.tree("arguments", self._key.signature.tree)
        walk.dependencies.update(self._call_facts)
        return walk

    def _call_dependencies(self, tokens: Sequence[str]) -> dict[str, str]:
        dependencies = _setting_texts(self._key.environment) | inspection.process_environment()
        dependencies["mesh"] = _mesh_text(self._key.mesh, self._devices)
        paths = (path.text for path in self._paths)
        dependencies.update(
            (f"argument {path}", token) for path, token in zip(paths, tokens, strict=True)
        )
        return dependencies

    def with_used(self, used: Used) -> Fingerprint:
        """All dependencies, for a trace that used this."""
        walk, self._base_walk = self._walk(), None  # What is added now concerns this trace only.
        return self._extended(walk, used)

    def extend(self, used: Used) -> Fingerprint:
        """As `with_used`, for good: the dependencies of the trace that this lookup leads to."""
        self._attributes.update(used.attributes)
        return self._extended(self._walk(), used)

    def restart(self) -> None:
        """Drops what `extend` has added."""
        self._attributes, self._base_walk = set(), None

    def _walk(self) -> Walk:
        if self._base_walk is None:
            self._base_walk = self._walked()
            self._base_walk.fingerprint()
        return self._base_walk

    def cells(self) -> dict[str, CellType]:
        """Where the captured numbers among the dependencies are kept."""
        return self._walk().cells

    def values_now(self, used: Used) -> dict[str, str]:
        """The dependencies about code and values as they are at this moment."""
        walk = self._walked()
        walk.read_attributes(used.attributes)
        return walk.fingerprint().dependencies

    def _extended(self, walk: Walk, used: Used) -> Fingerprint:
        walk.read_attributes(used.attributes)
        if walk.first_time(("names", id(used.names))):
            walk.alive.append(used.names)
            installed_packages.note_modules(walk, used.modules, used.names)
        for name in used.variables:
            found = digest(sorted(os.environ)) if name == WHICH_VARIABLES else os.environ.get(name)
            walk.once(f"environment variable {name}", atom(found))
        for base, path, original in used.files:
            walk.once(f"file {path}", self._content(base, path, original))
        return self._after(walk.fingerprint())

    def _after(self, found: Fingerprint) -> Fingerprint:
        if not self._left:
            return found
        return replace(found, dependencies=as_left(found.dependencies, self._left))

    def own_code(self) -> set[CodeType]:
        """The code of the step's own function, with what is nested in it."""
        code = code_of(definition_of(self._spec.fun))
        return set(names_of(code).codes) if code is not None else set()

    def is_alone(self) -> bool:
        """Whether no other code of the user's is known to be reached than the step's own."""
        return self.reached_code() <= self.own_code()

    def reached_code(self) -> set[CodeType]:
        """The code of the user's that is known to be reached."""
        return self._walk().codes

    def held_objects(self) -> HeldObjects:
        """What the step's function and its arguments hold."""
        tree = self._key.signature.tree
        return HeldObjects(self._spec.fun, self.statics, self.reached_code, tree)

    def encoded(self, tree: Any) -> Any:
        """A tree of outputs as a record keeps it. Raises `NotStorable` if none can."""
        return storing.encode_tree(tree, self._key.signature.tree, self.held_objects())

    def used_by(self, recording: Findings) -> Used:
        """What a trace used."""
        reads = reads_of(recording.entered.values(), recording.of_jax)
        waiting = self._walk().waiting(set(recording.entered.values()), recording.of_jax)
        named = reads.of_others(waiting) | (self._attributes & reads.attributes)
        named |= entered_among(waiting.keys() | self._attributes) | recording.settings
        if shared_state.disturbs_others(recording):
            named.add(shared_state.ALONE)
        return Used(
            sorted((reads.asked_for - MAKE_ANY) | named),
            reads.modules,
            with_library_modules(reads.names, self._walk()),
            [self._file_name(path) for path in sorted(recording.files)],
            sorted(recording.variables),
        )

    def untrackable_in(self, recording: Findings) -> tuple[str, ...]:
        """What a trace used that cannot be fingerprinted. Call it after `extend`."""
        reads = reads_of(recording.entered.values(), recording.of_jax)
        untrackable = [*self._walk().untrackable, *recording.impure, *reads.draws]
        untrackable += set_order.where_looped_over(recording)
        if recording.unavailable:
            untrackable.append(recording.unavailable)
        for path, state in recording.files.items():
            if state_of_file(path) != state:
                untrackable.append(f"file {path}: it was written to while the step was traced")
        unknown = set(_of_the_users(recording).values()) - self._walk().codes
        shown = [code for code in recording.entered.values() if code.co_name == "__repr__"]
        for code in shown:
            if "id" in code.co_names and origin_of_file(code.co_filename) == USER:
                where = f"{file_label(code.co_filename, None)}:{code.co_qualname}"
                untrackable.append(f"{where}: {why_impure('builtins.id')}")
        if any(code.co_filename.startswith("<") for code in unknown):
            unknown -= _explained_by_classes(unknown, recording, self._walk())
        for code in unknown:
            where = f"{file_label(code.co_filename, None)}:{code.co_qualname}"
            untrackable.append(f"{where}: the trace entered it, but no dependency leads to it")
        return tuple(dict.fromkeys(untrackable))

    def explained_in(self, recording: Findings) -> frozenset[int]:
        """The user's code, by identity, that a trace entered and that a dependency leads to."""
        reached = self.reached_code()
        entered = _of_the_users(recording).items()
        return recording.explained.union(each for each, code in entered if code in reached)

    def _file_name(self, path: str) -> tuple[str, str, str]:
        if not Path(path).is_absolute():
            return "directory", path, path
        if self._root and path.startswith(self._root + os.sep):
            return "source", path.removeprefix(self._root + os.sep), path
        return "absolute", path, path

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


def _of_the_users(recording: Findings) -> dict[int, CodeType]:
    """The user's code that a trace entered, but for what other programs of the step explain."""
    return {
        identity: code
        for identity, code in recording.entered.items()
        if identity not in recording.explained
        and origin_of_file(code.co_filename) == USER
        and code.co_name != "<module>"
    }


def _explained_by_classes(codes: set[CodeType], recording: Findings, walk: Walk) -> set[CodeType]:
    """The code that a library has generated, for itself or from a class that is followed.

    As equinox does. JAX has a `flatten_with_keys` where Python cannot look for it, so functions of
    other libraries are found by their code, but not once the collector has frozen them.
    """
    explained = {
        recording.entered[identity]
        for identity, cls in recording.generated.items()
        if id(cls) in walk.seen or origin_of_module(cls.__module__) == INSTALLED
    }
    generated = [code for code in codes - explained if code.co_filename.startswith("<")]
    for function in gc.get_referrers(*generated) if generated else ():
        if type(function) is FunctionType:
            cls = function.__globals__.get("module_cls")
            known = isinstance(cls, type) and id(cls) in walk.seen
            if known or origin_of_module(function.__module__) == INSTALLED:
                explained.add(function.__code__)
    return explained


def step_label(fun: Any) -> str:
    """How to name a step in any process: by its file and name."""
    return _label_and_root(fun)[0]


def _label_and_root(fun: Any) -> tuple[str, str]:
    """How to name a step in any process, and the directory that its modules are imported from."""
    inner = definition_of(fun)
    if inner is None:
        kind = type(fun)
        return f"{kind.__module__}:{kind.__qualname__}", ""
    filename, module = inner.__code__.co_filename, getattr(inner, "__module__", None)
    label = file_label(filename, module)
    root = "" if filename.startswith("<") else os.path.abspath(filename)[: -len(label) - 1]
    return f"{label}:{inner.__qualname__}", root


def _devices_in_order(key: Key) -> tuple[Any, ...]:
    """All devices; those that the call speaks of come first, by their numbers.

    So a program on the first four devices of one machine is found for the last four of another. A
    call that speaks of none runs on a device that each process of a pod chooses for itself: that
    device is first there, before all of them.
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
    if not ours and jax.process_count() > 1:
        return (default_device(), *everything)
    ordered = sorted(ours, key=lambda device: device.id)
    return (*ordered, *(device for device in everything if device not in ours))


def _mesh_text(mesh: tuple, devices: Sequence[Any]) -> str:
    if not mesh:
        return "none"
    positions: dict[Any, Any] = {
        (device.platform, device.id): index for index, device in enumerate(devices)
    }
    placed = inspection.devices_text((each[0], positions.get(each, each[1])) for each in mesh[2])
    return f"{dict(mesh[0])} ({','.join(mesh[1])}) over {placed}"


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
        kind = short_type(leaf.shape, leaf.dtype)
        if spans_processes(leaf.sharding) and (part := part_of(leaf.sharding, leaf.shape)):
            kind = f"{short_type(part, leaf.dtype)} of {kind}"
        tokens.append(f"{kind}{weak} {placed}{layout}")
    return tokens


@functools.lru_cache(maxsize=32)
def _setting_texts(environment: tuple[tuple[str, Hashable], ...]) -> dict[str, str]:
    """Settings as dependencies. Not to be changed."""
    return {f"config {name}": _setting_text(value) for name, value in environment}


def _setting_text(value: Any) -> str:
    if isinstance(value, jax.sharding.Mesh):
        return inspection.sharding_text(value) if not value.empty else "none"
    return repr(value)
