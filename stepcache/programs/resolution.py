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
    """A call for which there is no program in memory."""

    request: Request
    archive: Archive | None
    stopwatch: Stopwatch
    before_trace: Callable[[LookupResult], None]  # Given what the archive knew; it may raise.
    watch: bool  # Keep with the program what the step depends on, even without an archive.

    def find(self, digest: str, load: storing.Load) -> Any:
        """The stored executable of a lowered module; None if there is none."""
        if self.archive is None:
            return None
        return self.archive.find(digest, load, self.stopwatch.stage)


@dataclass(frozen=True, slots=True)
class Lowered:
    """A lowered program, as processes compare it."""

    outline: str  # The module as text, without locations.
    dependencies: Callable[[], dict[str, str]]  # Gives what the trace depended on.
    # Gives the lines of source code, each (file, line) and the innermost first, that a line of the
    # outline comes from; none where the step was not traced here.
    sources: Callable[[int], list[tuple[str, int]]] = lambda line: []


@dataclass(frozen=True, slots=True)
class Sharing:
    """How a trace is shared with other processes."""

    find: storing.Find  # Looks for the executable of a lowered module.
    compare: Callable[[Lowered], None]  # Is given what was lowered, before XLA compiles it.
    tell: Callable[[Traced], None]  # Is given what the trace depended on, in another thread.


@dataclass(frozen=True, slots=True)
class Resolution:
    """A program, and how it was obtained."""

    program: Program
    result: LookupResult  # What the archive knew.
    untrackable: tuple[str, ...] = ()  # Why a later process will have to trace the step.
    digest: str = ""  # Of the executable; empty where it is not, and will not be, on disk.
    address: Address | None = None  # Of the lookup; None where there is no archive.
    publication: Publication | None = None  # What is to be stored.
    lowered: Lowered | None = None  # Where processes compare it.
    giver: int | None = None  # The rank of the process that it came from; None for this one.
    # Of the other processes, where they keep no run log beside this one's: level and seconds by
    # stage, by rank.
    others: dict[int, tuple[int, dict[str, float]]] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()  # Of what the step depends on, since its last trace here.
    has_compared: bool = True  # Whether the processes have compared the host values of the call.
