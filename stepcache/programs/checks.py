"""`Checks`: whether the programs of a step that are in use are still the right ones.

A program that was loaded without a trace is checked by one, in the background, after it has first
run. What a program depends on can be compared with what is there now, every so many calls.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import threading
import time
import zlib
from collections.abc import Sequence
from typing import Any

from stepcache import jaxcompat
from stepcache.errors import StaleProgramError
from stepcache.events import Change, Verified, recorder
from stepcache.jaxcompat import storing
from stepcache.programs.archive import Archive
from stepcache.programs.background import in_background
from stepcache.programs.build import Program, trace
from stepcache.programs.cache import ProgramCache
from stepcache.programs.candidate import Candidate, differences
from stepcache.programs.dispatch import Dispatcher
from stepcache.programs.key import Key
from stepcache.programs.ledger import Ledger
from stepcache.programs.levels import Brought, Levels
from stepcache.programs.question import Question
from stepcache.programs.recipe import Recipe, Request

_log = logging.getLogger("stepcache")
# A call that was under way may still tell the dispatcher about a stale program: it is cleared so
# many times, so far apart, or until the error has been raised.
_STALE_ROUNDS, _STALE_SECONDS = 100, 0.05


class Checks:
    """Checks the programs of one step.

    Args:
        recipe: the step.
        number: tells the step from others of this process.
        levels: what the step depends on is forgotten there when it has changed.
        ledger: counts the checks.
        dispatcher: has to let go of a program that is wrong.

    Attributes:
        stale: raised by the next call; None where nothing is known to be wrong.
    """

    def __init__(
        self,
        recipe: Recipe,
        number: int,
        levels: Levels,
        ledger: Ledger,
        dispatcher: Dispatcher,
    ):
        self._recipe, self._number = recipe, number
        self._levels, self._ledger, self._dispatcher = levels, ledger, dispatcher
        self._unverified: dict[Key, tuple[Archive, Brought]] = {}
        self._calls_until_check = 0
        self.stale: StaleProgramError | None = None

    def raise_if_stale(self) -> None:
        """Raises, once, what a check in the background has found.

        Raises:
            StaleProgramError: a program was not the one that a trace gives.
        """
        if self.stale is not None:
            error, self.stale = self.stale, None
            raise error

    def every(self, cache: ProgramCache, request: Request, program: Program) -> None:
        """Every so many calls: is what the step depends on as it was when it was traced?

        Raises:
            StaleProgramError: it is not.
        """
        if cache.check_every is None:
            return
        self._calls_until_check -= 1
        if self._calls_until_check >= 0:
            return
        self._calls_until_check = cache.check_every - 1
        if program.facts is None or program.used is None:
            return
        now = Question(self._recipe, request).with_used(program.used)
        changes = differences(program.facts, dict(now.facts))
        if changes:
            self._drop(cache, request.key)
            raise self._staleness("depends on what changed after it was traced", changes)

    # ---- by a trace in the background ----------------------------------------------------------

    def expect(self, key: Key, archive: Archive, brought: Brought) -> None:
        """Notes that a program has to be verified, where it was loaded without a trace."""
        if brought.program.level == 1 and archive.verify == "background":
            self._unverified[key] = (archive, brought)

    def verify(self, cache: ProgramCache, request: Request) -> None:
        """Traces the step in the background, if its program is still to be verified."""
        archive, brought = self._unverified.pop(request.key, (None, None))
        if archive is not None and brought is not None:
            in_background(lambda: self._verify(cache, request, archive, brought))

    def _verify(
        self, cache: ProgramCache, request: Request, archive: Archive, brought: Brought
    ) -> None:
        started = time.perf_counter()
        if jaxcompat.environment() != request.key.environment:
            return  # The caller's settings cannot be had in another thread.
        candidate, address = brought.answer.candidate, brought.address
        assert candidate is not None and address is not None
        changes = self._retrace(brought.program, candidate, request)
        seconds, name = time.perf_counter() - started, self._recipe.name
        self._ledger.count(verifications=1)
        archive.note(
            "verified" if changes is None else "stale",
            name,
            address.label,
            seconds={"verify": round(seconds, 4)},
            reason="\n".join(map(str, changes or ())),
        )
        recorder.emit(Verified(name, changes is None, seconds))
        if changes is not None:
            archive.forget(address, candidate)
            self._drop(cache, request.key)
            self._make_stale(changes)

    def _retrace(
        self, program: Program, candidate: Candidate, request: Request
    ) -> tuple[Change, ...] | None:
        """Traces and lowers a step whose program was loaded, as if nothing were known of it.

        Returns:
            What differs from the loaded program; None where it is the same.
        """
        token = jaxcompat.ValueToken((self._number, "retrace", time.monotonic()))
        found: list[str] = []

        def note(digest: str, load: Any) -> None:
            found.append(digest)
            raise _DigestKnown

        with jaxcompat.tracing_context(request.mesh), jaxcompat.recording_context(token):
            try:
                staged = trace(self._recipe, request)
                staged.lower()
                with storing.compiling_through(note), contextlib.suppress(_DigestKnown):
                    staged.compile()
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
                return (Change("code", self._recipe.name, "a program", text, "tracing it raised"),)
        if found == [candidate.program] and staged.out_tree == program.run.out_tree:
            return None
        if staged.out_tree != program.run.out_tree:
            sides = (str(program.run.out_tree), str(staged.out_tree))
            return (Change("code", "the tree of its outputs", *sides),)
        before = zlib.decompress(candidate.outline).decode()
        return _first_difference(before, jaxcompat.outline(staged.lowered)) or (
            Change("environment", "what XLA is given", candidate.program[:12], found[0][:12]),
        )

    def _make_stale(self, changes: Sequence[Change]) -> None:
        """Has the next call raise, whatever the dispatcher was given meanwhile."""
        error = self._staleness("was loaded, but a trace gives another program", changes)
        self.stale = error
        for _ in range(_STALE_ROUNDS):
            self._dispatcher.clear()
            if self.stale is not error or not threading.main_thread().is_alive():
                break
            time.sleep(_STALE_SECONDS)
        if self.stale is error:
            _log.error("%s", error)  # Nobody may call the step again.

    def _drop(self, cache: ProgramCache, key: Key) -> None:
        self._levels.forget()
        cache.drop(key)
        jaxcompat.forget_traces(self._recipe.jitted, self._recipe.fun)
        self._ledger.gone(key, "cleared")
        self._dispatcher.clear()

    def _staleness(self, what: str, changes: Sequence[Change]) -> StaleProgramError:
        shown = "\n  ".join(str(change) for change in changes[:12])
        return StaleProgramError(
            f"a program of {self._recipe.name} {what}:\n  {shown}",
            changes,
            hint="the program has been removed, and the next call builds it anew; what earlier "
            "calls returned came from it",
        )


class _DigestKnown(Exception):
    """The digest of what XLA would be given is known, and that is all that was wanted."""


def _first_difference(before: str, after: str) -> tuple[Change, ...]:
    """The first lines in which two lowered modules differ."""
    old, new = before.splitlines(), after.splitlines()
    for old_line, new_line in zip(old, new, strict=False):
        if old_line != new_line:
            return (Change("code", "in the lowered program", old_line.strip(), new_line.strip()),)
    for line in difflib.unified_diff(old, new, n=0, lineterm=""):
        if line[:1] in "+-" and not line.startswith(("+++", "---")):
            sides = (line[1:].strip(), "absent") if line[0] == "-" else ("absent", line[1:].strip())
            return (Change("code", "in the lowered program", *sides),)
    return ()
