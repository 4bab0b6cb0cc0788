"""Placements and transfer policies: data, checked when made, and carried out elsewhere.

A placement says where the master copy of some variables lives. `Read` says how a step in another
memory gets their value, `Write` how a new value gets back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from jax.sharding import PartitionSpec

from stepcache.errors import OptionError
from stepcache.sharding import Rules

ROUTES = ("auto", "each", "fanout", "gather")
WIRES = (None, "bf16", "fp8", "int8")
CACHES = (None, "device", "host")
MODES = ("assign", "add", "apply")
UPDATES = ("device", "host")


def _check(where: str, name: str, value: object, legal: Iterable[object]) -> None:
    if value not in tuple(legal):
        raise OptionError(
            f"unknown {name}",
            where=where,
            expected=f"one of {', '.join(map(repr, legal))}",
            got=repr(value),
        )


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _contradiction(where: str, one: str, other: str, hint: str) -> OptionError:
    return OptionError(f"{one} contradicts {other}", where=where, hint=hint)


@dataclass(frozen=True, slots=True)
class Replicated:
    """The master copy is on every device of the session's mesh; without a mesh, where it was."""

    def __str__(self) -> str:
        return "replicated"


@dataclass(frozen=True, slots=True)
class Sharded:
    """The master copy is split over the devices of the session's mesh, leaf by leaf.

    Attributes:
        rules: `Rules`, or pairs of a regex and a `PartitionSpec`. The regex is searched in the path
            of a leaf: the name of the variables, empty for those without one, and the leaf's keys,
            joined by `/`. A leaf that no rule matches is replicated.
    """

    rules: Rules

    def __init__(self, rules: Rules | Iterable[tuple[str, PartitionSpec]]):
        if not isinstance(rules, Iterable | Rules):
            raise OptionError(
                "Sharded places leaves by rules",
                where="Sharded",
                expected="Rules, or pairs of a regex and a PartitionSpec",
                got=repr(rules),
            )
        object.__setattr__(self, "rules", rules if isinstance(rules, Rules) else Rules(rules))

    def __str__(self) -> str:
        return f"sharded by {len(self.rules)} rule{'s' if len(self.rules) != 1 else ''}"


@dataclass(frozen=True, slots=True)
class OnHost:
    """The master copy is in the memory of the hosts, split evenly over the devices' hosts.

    A step reads it into the memory of its devices, and what it returns for it is written back.
    Variables are made, assigned, saved and restored share by share, and `.value` gives numpy
    arrays: none of this takes memory of the devices, so that the value may be larger than that. In
    a pod, `.value` and `save` gather leaves through the devices, one buffer at a time; leaves that
    rules split over processes stay in the hosts' memory, as `jax.Array`s.

    Attributes:
        on_device: where a value that has been read lies on the devices: `Replicated()` or
            `Sharded(rules)`.
        update: where `push` with an optimizer computes: on the "device", or on the "host".
        memory_kind: which of the devices' memories is the host's.

    The idea is ZeRO-Offload's (Ren et al., 2021): optimizer state does not need to be on the
    device between steps.
    """

    on_device: Replicated | Sharded = Replicated()
    update: Literal["device", "host"] = "device"
    memory_kind: str = "pinned_host"

    def __post_init__(self):
        if not isinstance(self.on_device, Replicated | Sharded):
            raise OptionError(
                "a value is read into the devices' own memories",
                where="OnHost(on_device=...)",
                expected="Replicated() or Sharded(rules)",
                got=repr(self.on_device),
            )
        _check("OnHost", "update", self.update, UPDATES)

    def __str__(self) -> str:
        return f"on the host ({self.memory_kind}), read {self.on_device}"


Placement = Replicated | Sharded | OnHost


@dataclass(frozen=True, slots=True)
class Read:
    """How a step gets the value of variables whose master copy lives in another memory.

    Attributes:
        cache: None reads them anew for each call of a step; "device" keeps a copy in the devices'
            memory, "host" in the memory of the reader's host, for masters in another process:
            there is no such placement yet, and the others refuse it. A copy is valid while its
            version is current: a write makes it invalid at once, for all readers of the process.
        max_staleness: a copy may serve so many more steps after the one that fetched it, before it
            is asked whether its version is still current.
        max_age: the same in seconds; both bounds hold where both are given.
        prefetch: whether the read for the next step is started while a step computes. It takes
            device memory for one more copy. Where a copy is kept there is nothing to read ahead,
            and it has no effect.
        route: how one value reaches several devices. "each": every device copies all of it from the
            host; "fanout": one device does, and gives it to the others; "gather": every device
            copies its share, and they gather the rest from each other, by a program that waits for
            the step before it; "auto": "gather", but "fanout" for what is prefetched by one
            process, and `explain()` says why.
        wire: how values are coded on the way: None as they are, "bf16", "fp8", or "int8" with a
            scale for each block. The error it makes is bounded, and `explain()` gives the bound.

    Raises:
        OptionError: a field has no such value, or two of them contradict each other.

    `Read(cache=None)` is TensorFlow's `caching_device=None`. There a caching device held one
    snapshot for each `session.run`, which no write of the same run made invalid. Here a session
    always reads its own writes, and whether a copy is valid is decided by its version.
    """

    cache: Literal["device", "host"] | None = None
    max_staleness: int = 0
    max_age: float | None = None
    prefetch: bool = False
    route: Literal["auto", "each", "fanout", "gather"] = "auto"
    wire: Literal["bf16", "fp8", "int8"] | None = None

    def __post_init__(self):
        _check("Read", "cache", self.cache, CACHES)
        _check("Read", "route", self.route, ROUTES)
        _check("Read", "wire", self.wire, WIRES)
        value = self.max_staleness
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise OptionError(
                "max_staleness counts steps", where="Read", expected="an int ≥ 0", got=repr(value)
            )
        if not isinstance(self.prefetch, int) or self.prefetch not in (0, 1):
            raise OptionError(
                "prefetch says whether the next step's read is started ahead",
                where="Read",
                expected="True or False",
                got=repr(self.prefetch),
                hint="a read further ahead than the next step is not supported",
            )
        object.__setattr__(self, "prefetch", bool(self.prefetch))
        if self.max_age is not None and not _is_positive(self.max_age):
            raise OptionError(
                "max_age is a time in seconds",
                where="Read",
                expected="a number > 0, or None",
                got=repr(self.max_age),
            )
        keep = 'say cache="device" to keep a copy'
        if self.cache is None and self.max_staleness:
            raise _contradiction("Read", "cache=None", f"max_staleness={self.max_staleness}", keep)
        if self.cache is None and self.max_age is not None:
            raise _contradiction("Read", "cache=None", f"max_age={self.max_age}", keep)

    def __str__(self) -> str:
        return _changed(self, Read.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class Write:
    """What `Variables.push` does with an update.

    Attributes:
        mode: "assign" takes the update for the new value; "add" adds it; "apply" hands it, as
            gradients, to `optimizer`, which runs where the master copy lives.
        optimizer: an `optax.GradientTransformation`, for mode "apply".
        every: so many updates are added up before they are written as one.
        wire: how updates are coded on the way, as in `Read`: those that are added or applied under
            `OnHost(update="host")`.

    Raises:
        OptionError: a field has no such value, or two of them contradict each other.
    """

    mode: Literal["assign", "add", "apply"] = "assign"
    optimizer: Any = None
    every: int = 1
    wire: Literal["bf16", "fp8", "int8"] | None = None

    def __post_init__(self):
        _check("Write", "mode", self.mode, MODES)
        _check("Write", "wire", self.wire, WIRES)
        if not isinstance(self.every, int) or isinstance(self.every, bool) or self.every < 1:
            raise OptionError(
                "every counts updates", where="Write", expected="an int ≥ 1", got=repr(self.every)
            )
        if self.mode == "apply" and not (
            callable(getattr(self.optimizer, "init", None))
            and callable(getattr(self.optimizer, "update", None))
        ):
            raise OptionError(
                'mode="apply" needs an optimizer',
                where="Write",
                expected="an optax.GradientTransformation",
                got=repr(self.optimizer),
            )
        if self.mode != "apply" and self.optimizer is not None:
            raise _contradiction(
                "Write", f"mode={self.mode!r}", "optimizer=...", 'say mode="apply" to run it'
            )
        if self.mode == "assign" and self.every > 1:
            raise _contradiction(
                "Write",
                'mode="assign"',
                f"every={self.every}",
                "values that are assigned do not add up",
            )

    def __str__(self) -> str:
        return _changed(self, Write.__dataclass_fields__)


def check_policies(placement: object, read: object, write: object) -> None:
    """Whether these are policies, and not their names or classes, and go together.

    Raises:
        OptionError: one of them is not, or has an option that would do nothing.
    """
    rows = (("placement", placement, Placement), ("read", read, Read), ("write", write, Write))
    for name, given, kinds in rows:
        if not isinstance(given, kinds):
            kinds = getattr(kinds, "__args__", (kinds,))
            raise OptionError(
                f"{name} is no policy",
                where=f"Variables({name}=...)",
                expected=" or ".join(f"{getattr(kind, '__name__', kind)}(...)" for kind in kinds),
                got=repr(given),
            )
    assert isinstance(read, Read) and isinstance(write, Write)
    on_host = isinstance(placement, OnHost)
    if read.cache == "host":
        there = "host" if on_host else "devices"
        raise _idle(
            "read",
            'cache="host"',
            f"the master copy is on the {there} already",
            'say cache="device" to keep a copy on the devices' if on_host else "leave it out",
        )
    if read.wire is not None and not on_host:
        raise _idle(
            "read",
            f"wire={read.wire!r}",
            "the master copy is on the devices already, and no read crosses a link",
            "leave it out, or say placement=OnHost()",
        )
    computes = isinstance(placement, OnHost) and placement.update == "host"
    if write.wire is not None and (write.mode == "assign" or not computes):
        raise _idle(
            "write",
            f"wire={write.wire!r}",
            "only updates that the host adds or applies are coded on their way to it",
            'leave it out, or say mode="add" or "apply" and placement=OnHost(update="host")',
        )


def _idle(policy: str, option: str, why: str, hint: str) -> OptionError:
    return OptionError(
        f"{option} would do nothing: {why}", where=f"Variables({policy}=...)", hint=hint
    )


def _changed(policy: Any, fields: Iterable[str]) -> str:
    """A policy, by what differs from its defaults."""
    default = type(policy)()
    shown = (
        f"{name}={getattr(policy, name)!r}"
        for name in fields
        if getattr(policy, name) != getattr(default, name)
    )
    return f"{type(policy).__name__}({', '.join(shown)})"
