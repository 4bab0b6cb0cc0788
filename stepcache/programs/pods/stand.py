"""`Stand`: what a process of a pod says of a call before it brings a program for it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from stepcache.calls.host_values import digest_of
from stepcache.programs.archive import Archive, LookupResult
from stepcache.programs.lookup import Lookup
from stepcache.storage import plain
from stepcache.storage.dependency_record import digest_dependencies

# What one host may have and another not: then one of each kind builds what all agree on.
_OF_HOST = (
    "environment CPU",
    "environment device kind",
    "environment devices",
    "environment system",
    "environment topology",
)
_OF_CALL = ("arguments", "mesh", "package jax", "package jaxlib")
_BEGIN_OF_CALL = ("argument ", "option ", "config ", "environment ")
# Read from where a process was started; what of it JAX heeds is a setting too.
_OF_PROCESS = ("environment variable ", "environment argv", "environment python")


@dataclass(frozen=True, slots=True)
class Facts:
    """What a call depends on before it is traced, but for what is a matter of each host.

    Attributes:
        call: what the call is: leaves, shardings, statics, options, settings, flags. The same on
            all processes, or it is an error.
        code: the rest, as code, closures and globals. Where it differs, the step is traced, and
            what is lowered decides.
    """

    call: dict[str, str]
    code: dict[str, str]

    @classmethod
    def of(cls, lookup: Lookup) -> Facts:
        """Those of a lookup. To be asked before any record is looked at."""
        call, code = {}, {}
        statics = {f"static {static.name}" for static in lookup.statics}
        for name, dependency in lookup.base.dependencies.items():
            if name in _OF_HOST:
                continue
            # Of a static object it is its class; what it holds may or may not be used.
            is_static = name in statics and not dependency.startswith(("code ", "see "))
            (call if is_static or _is_of_call(name) else code)[name] = dependency
        return cls(call, code)


def _is_of_call(name: str) -> bool:
    of_call = name in _OF_CALL or name.startswith(_BEGIN_OF_CALL)
    return of_call and not name.startswith(_OF_PROCESS)


def known_to_all(dependencies: dict[str, str]) -> dict[str, str]:
    """Facts that are no matter of each host."""
    return {name: dependency for name, dependency in dependencies.items() if name not in _OF_HOST}


OF_ONE = ""
"""In the place of what one process says and no other one."""


@dataclass(frozen=True, slots=True)
class Stand:
    """What a process says before it brings a program.

    Attributes:
        label: the step, by file and name.
        call: digest of what all have to have in common.
        code: digest of what the step is known to depend on otherwise; `OF_ONE` in `brief`.
        host: digest of what decides whether a program made by one loads on the other.
        directory: names the directory of programs; empty for none, and in `brief`.
        stocked: whether there is any program in it.
        program: digest of the program that it has on disk; empty for none.
        trusts: whether it would run that without tracing the step.
        values: digest of the host values that it hands in whole; empty where they are unknown.
    """

    label: str
    call: str
    code: str
    host: str
    directory: str
    stocked: bool
    program: str
    trusts: bool
    values: str

    def packed(self) -> bytes:
        return plain.pack([getattr(self, name) for name in self.__slots__])

    @classmethod
    def unpacked(cls, data: bytes) -> Stand:
        return cls(*plain.unpack(data))


def brief(voices: dict[int, bytes]) -> dict[int, bytes]:
    """Packed stands of all, by rank, without what tells each process from all others.

    That its code or its directory is no other one's is all that the others have to know of it.
    """
    stands = {rank: Stand.unpacked(voice) for rank, voice in voices.items()}
    codes = Counter(each.code for each in stands.values())
    directories = Counter(each.directory for each in stands.values())
    return {
        rank: replace(
            each,
            code=each.code if codes[each.code] > 1 else OF_ONE,
            directory=each.directory if directories[each.directory] > 1 else OF_ONE,
        ).packed()
        for rank, each in stands.items()
    }


def stand_of(
    lookup: Lookup,
    dependencies: Facts,
    result: LookupResult,
    archive: Archive | None,
    values: dict[str, str] | None,
) -> Stand:
    """What this process says."""
    host = lookup.base.dependencies
    return Stand(
        lookup.address.label,
        digest_dependencies(dependencies.call),
        digest_dependencies(dependencies.code),
        digest_dependencies({name: host.get(name, "") for name in _OF_HOST}),
        archive.name() if archive is not None else "",
        archive is not None and archive.has_programs(),
        result.record.program if result.record is not None else "",
        archive is None or archive.verify != "before",
        digest_of(values),
    )
