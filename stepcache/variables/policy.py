"""Placements and transfer policies: frozen data, checked when made.

A placement says where the master copy of some variables lives. `Read` says how a step in another
memory gets their value, `Write` how an update gets back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from jax.sharding import PartitionSpec

from stepcache.errors import OptionError
from stepcache.sharding import Rules

CACHES = (None, "device")
MODES = ("assign", "add", "apply")
UPDATES = ("device", "host")
_WIRE = (
    "it only costs time on one machine; store the values in the dtype that is to travel, such as "
    "bfloat16"
)


def check(
    holds: bool, what: str, where: str, expected: str, got: object, hint: str | None = None
) -> None:
    """Raises `OptionError` unless something holds."""
    if not holds:
        raise OptionError(what, where=where, expected=expected, got=repr(got), hint=hint)


def check_choices(policy: Any, **choices: tuple) -> None:
    where = type(policy).__name__
    for name, legal in choices.items():
        expected = f"one of {', '.join(map(repr, legal))}"
        value = getattr(policy, name)
        check(value in legal, f"unknown {name}", where, expected, value)


def is_number(value: Any, kinds: Any, least: float = 0) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool) and value >= least


class _Policy:
    """Shows the fields that differ from their defaults, and refuses options that are gone."""

    __slots__ = ()
    _gone: ClassVar[Mapping[str, str]] = {}  # What to do instead, by option.

    def __new__(cls, *_: Any, **options: Any) -> Any:
        for name in options.keys() & cls._gone:
            raise OptionError(f"{name}= is gone: {cls._gone[name]}", where=cls.__name__)
        return super().__new__(cls)

    def __str__(self) -> str:
        shown = (
            f"{field.name}={value!r}"
            if field.name != "optimizer"
            else f"{field.name}={type(value).__name__}(…)"  # Its functions say nothing.
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
            if (value := getattr(self, field.name)) != field.default
        )
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, slots=True)
class Replicated:
    """The master copy is on every device of the session's mesh. Without a mesh it is not moved."""

    def __str__(self) -> str:
        return "replicated"


@dataclass(frozen=True, slots=True)
class Sharded:
    """The master copy is split over the devices of the session's mesh, leaf by leaf.

    Attributes:
        rules: `Rules`, or pairs of a regex and a `PartitionSpec`. The regex is searched in the path
            of a leaf: the name of the variables (empty if they have none) and the leaf's keys,
            joined by `/`. A leaf that no rule matches is replicated.

    A leaf of the state of `Write(optimizer=...)` has a path such as `params/optimizer/0/mu/w`. It
    gets the sharding of the parameter at the end of its path, here `w`, if the shapes are equal.
    Otherwise it is replicated, as scalars and factored moments are. To place it otherwise, write a
    rule that matches its path alone: `("/optimizer/.*mu/", PartitionSpec("data"))`.
    """

    rules: Rules

    def __init__(self, rules: Rules | Iterable[tuple[str, PartitionSpec]]):
        expected = "Rules, or pairs of a regex and a PartitionSpec"
        is_legal = isinstance(rules, Iterable | Rules)
        check(is_legal, "Sharded places leaves by rules", "Sharded", expected, rules)
        object.__setattr__(self, "rules", rules if isinstance(rules, Rules) else Rules(rules))

    def __str__(self) -> str:
        return f"sharded by {len(self.rules)} rule{'s' if len(self.rules) != 1 else ''}"


@dataclass(frozen=True, slots=True)
class OnHost:
    """The master copy is in host memory, split evenly over the hosts of the devices.

    A step copies the value to its devices. If the step carries it, the new value is copied back;
    with `read=Read()` both copies are part of the step's program. Variables are made, assigned,
    saved and restored share by share, and `.value` returns numpy arrays. None of this takes device
    memory, so the value may be larger than that. In a pod, `.value` and `save` gather replicated
    leaves through the devices, one buffer at a time; leaves that rules split over processes stay in
    host memory, as `jax.Array`s.

    Attributes:
        on_device: sharding of the value while a step uses it: `Replicated()` or `Sharded(rules)`.
        update: where `push` runs the optimizer: on the "device", or on the "host".

    The idea is ZeRO-Offload's (Ren et al., 2021): optimizer state does not need to be on the
    device between steps.
    """

    on_device: Replicated | Sharded = Replicated()
    update: Literal["device", "host"] = "device"

    def __post_init__(self):
        check(
            isinstance(self.on_device, Replicated | Sharded),
            "a value is read into the devices' own memories",
            "OnHost(on_device=...)",
            "Replicated() or Sharded(rules)",
            self.on_device,
        )
        check_choices(self, update=UPDATES)

    def __str__(self) -> str:
        return f"on the host, read {self.on_device}"


Placement = Replicated | Sharded | OnHost


def on_host(placement: Placement) -> OnHost:
    """Returns the placement on the host from which a value is read to where it is now."""
    return placement if isinstance(placement, OnHost) else OnHost(on_device=placement)


@dataclass(frozen=True, slots=True)
class Read(_Policy):
    """How a step reads variables whose master copy is in another memory.

    Attributes:
        cache: None copies the value at each call of a step. "device" keeps a copy in device memory,
            which is valid while its version is the newest: a write invalidates it for all readers.
        max_staleness: of variables in a server, the number of steps that a copy may serve after the
            last call at which it was known to be current. For the next step after those, a newer
            value is read in the background, while the last of them computes.

    Every device copies its share of a value from the host, and all of them gather.

    Raises:
        OptionError: a field has no such value, or two fields contradict each other.

    `Read()` is TensorFlow's `caching_device=None`. A caching device of TensorFlow keeps a copy
    during one `session.run`, and a write of the same run does not invalidate it. Here, a session
    always reads its own writes, and the version decides whether a copy is valid.
    """

    cache: Literal["device"] | None = None
    max_staleness: int = 0
    _gone: ClassVar = {
        "max_age": "max_staleness bounds how many steps a copy may serve",
        "prefetch": "max_staleness=k reads a newer value in the background while a copy may serve",
        "route": "each device copies its share, and all gather: it crosses the host's link once",
        "wire": _WIRE,
    }

    def __post_init__(self):
        check_choices(self, cache=CACHES)
        steps = self.max_staleness
        is_legal = is_number(steps, int)
        check(is_legal, "max_staleness is a number of steps", "Read", "an int ≥ 0", steps)
        if self.cache is None and steps:
            what = f"cache=None contradicts max_staleness={steps}"
            raise OptionError(what, where="Read", hint='set cache="device" to keep a copy')


@dataclass(frozen=True, slots=True)
class Write(_Policy):
    """What `Variables.push` does with an update.

    Attributes:
        mode: "assign" makes the update the new value; "add" adds it; "apply" passes it, as
            gradients, to `optimizer`, which runs where the master copy lives.
        optimizer: an `optax.GradientTransformation`, for mode "apply".
        every: number of updates that are summed and written as one. `Variables.flush` writes the
            sum of those that are pending.

    Raises:
        OptionError: a field has no such value, or two fields contradict each other.
    """

    mode: Literal["assign", "add", "apply"] = "assign"
    optimizer: Any = None
    every: int = 1
    _gone: ClassVar = {"wire": _WIRE}

    def __post_init__(self):
        check_choices(self, mode=MODES)
        is_legal = is_number(self.every, int, 1)
        check(is_legal, "every counts updates", "Write", "an int ≥ 1", self.every)
        methods = (getattr(self.optimizer, name, None) for name in ("init", "update"))
        check(
            self.mode != "apply" or all(map(callable, methods)),
            'mode="apply" needs an optimizer',
            *("Write", "an optax.GradientTransformation", self.optimizer),
        )
        if self.mode != "apply" and self.optimizer is not None:
            what = f"mode={self.mode!r} contradicts optimizer=..."
            raise OptionError(what, where="Write", hint='set mode="apply" to run the optimizer')
        if self.mode == "assign" and self.every > 1:
            what = f'mode="assign" contradicts every={self.every}'
            raise OptionError(what, where="Write", hint="assigned values cannot be summed")


def check_kinds(placement: object, read: object, write: object) -> None:
    """Raises `OptionError` for what is no policy."""
    rows = (("placement", placement, Placement), ("read", read, Read), ("write", write, Write))
    for name, given, kinds in rows:
        expected = " or ".join(f"{kind.__name__}(...)" for kind in get_args(kinds) or (kinds,))  # type: ignore[union-attr]
        is_one = isinstance(given, kinds)
        check(is_one, f"{name} is no policy", f"Variables({name}=...)", expected, given)


def check_policies(placement: object, read: object, write: object) -> None:
    """Raises `OptionError` for what is no policy, and for an option that has no effect."""
    check_kinds(placement, read, write)
    assert isinstance(read, Read) and isinstance(write, Write)
    if not isinstance(placement, OnHost) and read != Read():
        raise OptionError(
            f"{read} would do nothing: the master copy is on the devices already, and steps take "
            "it as it is",
            where="Variables(read=...)",
            hint="remove it, or use placement=OnHost()",
        )
    if read.max_staleness:
        what = f"{read} would do nothing: no other process writes, and a copy is always current"
        hint = "remove max_staleness=, which is for variables on servers"
        raise OptionError(what, where="Variables(read=...)", hint=hint)
