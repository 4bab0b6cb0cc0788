"""`Resolution`: the program of a call, and how it was obtained. Data only.

`MissedCall` is the call. `Lowered` and `Sharing` are what processes of a pod exchange while one of
them makes the program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stepcache.calls.step_spec import Request
from stepcache.events import Change
from stepcache.jaxcompat import storing
from stepcache.programs.archive import Archive
from stepcache.programs.build import Program, Stopwatch
from stepcache.programs.lookup import LookupResult
from stepcache.storage.dependency_record import Address, Publication, Traced


@dataclass(frozen=True, slots=True)
class MissedCall:
    """A call for which there is no program in memory.

    Attributes:
        request: the call.
        archive: the programs on disk, or None.
        stopwatch: times the stages.
        before_trace: called with what the archive knew, before a trace; it may raise.
        watch: keep with the program what the step depends on, even without an archive.
    """

    request: Request
    archive: Archive | None
    stopwatch: Stopwatch
    before_trace: Callable[[LookupResult], None]
    watch: bool

    def find(self, digest: str, load: storing.Load) -> Any:
        """The stored executable of a lowered module; None if there is none."""
        if self.archive is None:
            return None
        return self.archive.find(digest, load, self.stopwatch.stage)


@dataclass(frozen=True, slots=True)
class Lowered:
    """A lowered program, as processes compare it.

    Attributes:
        outline: the module as text, without locations.
        dependencies: gives what the trace depended on.
        sources: gives the lines of source code, each (file, line) and the innermost first, that a
            line of the outline comes from; none where the step was not traced here.
    """

    outline: str
    dependencies: Callable[[], dict[str, str]]
    sources: Callable[[int], list[tuple[str, int]]] = lambda line: []


@dataclass(frozen=True, slots=True)
class Sharing:
    """How a trace is shared with other processes.

    Attributes:
        find: looks for the executable of a lowered module.
        compare: is given what was lowered, before XLA compiles it.
        tell: is given what the trace depended on, as soon as that is known, in another thread.
    """

    find: storing.Find
    compare: Callable[[Lowered], None]
    tell: Callable[[Traced], None]


@dataclass(frozen=True, slots=True)
class Resolution:
    """A program, and how it was obtained.

    Attributes:
        program: the program.
        result: what the archive knew.
        untrackable: why a later process will have to trace the step.
        digest: of the executable; empty where it is not, and will not be, on disk.
        address: of the lookup; None where there is no archive.
        publication: what is to be stored, or None.
        lowered: what was lowered, where processes compare it.
        giver: the rank of the process that it came from; None for this one.
        others: of the other processes, where they keep no run log beside this one's: level and
            seconds by stage, by rank.
        changes: what the step depends on, and what has changed since it was last traced here.
        has_compared: whether the processes have compared the host values of the call.
    """

    program: Program
    result: LookupResult
    untrackable: tuple[str, ...] = ()
    digest: str = ""
    address: Address | None = None
    publication: Publication | None = None
    lowered: Lowered | None = None
    giver: int | None = None
    others: dict[int, tuple[int, dict[str, float]]] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()
    has_compared: bool = True
