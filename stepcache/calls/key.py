"""`Key`: the named parts that decide which program a call needs, and their digest."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from stepcache.calls.identity import Identity
from stepcache.calls.signature import Signature, shorten
from stepcache.events import Change


@dataclass(frozen=True, slots=True)
class Key:
    """Everything that decides which program a call needs. Equal keys need the same program.

    Attributes:
        identity: which function the step is.
        signature: what the call looks like, after placement.
        mesh: the identity of the session's mesh; empty without one.
        options: the step's options by name, such as donated arguments and compiler options.
        environment: settings of JAX that change a trace or a compilation, by name.
    """

    identity: Identity
    signature: Signature
    mesh: tuple
    options: tuple[tuple[str, Hashable], ...]
    environment: tuple[tuple[str, Hashable], ...]
    _hash: int = field(init=False, compare=False, repr=False, default=0)

    def __post_init__(self):
        parts = (self.identity, self.signature, self.mesh, self.options, self.environment)
        object.__setattr__(self, "_hash", hash(parts))

    def __hash__(self) -> int:
        return self._hash

    def parts(self) -> Iterator[tuple[str, str]]:
        """Name and text of each part, for people and for the digest."""
        yield "identity", str(self.identity)
        yield "tree", str(self.signature.tree)
        for number, leaf in enumerate(self.signature.leaves):
            yield f"leaf {number}", repr(leaf)
        for static in self.signature.statics:
            yield f"static {static.name}", f"{static.kind.__qualname__} {static.value!r}"
        yield "mesh", repr(self.mesh)
        for name, value in (*self.options, *self.environment):
            yield name, repr(value)

    @property
    def digest(self) -> str:
        """SHA-256 of the named parts, in hex."""
        hasher = hashlib.sha256()
        for name, text in self.parts():
            for piece in (name, text):
                data = piece.encode()
                hasher.update(len(data).to_bytes(8, "little"))
                hasher.update(data)
        return hasher.hexdigest()


def diff_settings(before: Key, after: Key) -> tuple[Change, ...]:
    """Where two keys differ apart from their signatures."""
    changes = []
    if before.mesh != after.mesh:
        old, new = _mesh_sides(before.mesh, after.mesh)
        changes.append(Change("mesh", "mesh", old, new))
    for part, name in (("options", "options"), ("config", "environment")):
        olds, news = dict(getattr(before, name)), dict(getattr(after, name))
        for setting in dict.fromkeys((*olds, *news)):
            old, new = olds.get(setting), news.get(setting)
            if old != new:
                changes.append(Change(part, setting, shorten(str(old)), shorten(str(new))))
    return tuple(changes)


def _mesh_sides(before: tuple, after: tuple) -> tuple[str, str]:
    if not before or not after:
        old, new = (str(dict(mesh[0])) if mesh else "none" for mesh in (before, after))
        return old, new
    index = next(i for i, (x, y) in enumerate(zip(before, after, strict=True)) if x != y)
    old, new = (str(dict(mesh[0])) if index == 0 else str(mesh[index]) for mesh in (before, after))
    return shorten(old), shorten(new)
