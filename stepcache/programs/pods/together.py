"""Resolves a new program in all processes of a pod: one has it, or makes it, the others load it."""

from __future__ import annotations

import contextlib
import logging
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from stepcache.calls.host_values import compare, handed_in_whole
from stepcache.calls.step_spec import Request, StepSpec
from stepcache.distributed.peers import Peers
from stepcache.programs.archive import Archive, LookupResult
from stepcache.programs.build import Stopwatch
from stepcache.programs.levels import Levels
from stepcache.programs.lookup import Lookup
from stepcache.programs.pods.gathering import Gathering
from stepcache.programs.pods.lowered import Different
from stepcache.programs.pods.stand import Facts, stand_of
from stepcache.programs.resolution import Lowered, Resolution, Sharing
from stepcache.storage.dependency_record import DependencyRecord, Traced

_DOES_NOT_LOAD = "what another process made does not load here (%s)"

_log = logging.getLogger("stepcache")


def bring_together(
    levels: Levels,
    spec: StepSpec,
    request: Request,
    archive: Archive | None,
    stopwatch: Stopwatch,
    before_trace: Callable[[LookupResult], None],
    peers: Peers,
    why: str,
    *,
    watch: bool = False,
) -> Resolution:
    """As `Levels.resolve`, with the other processes of a pod.

    Args:
        levels: of the step.
        spec: the step.
        request, archive, stopwatch, before_trace, watch: as for `Levels.resolve`.
        peers: the processes.
        why: why the call needs a new program, in one line.

    Raises:
        AgreementError: they are not about to run the same program, or one has not come.
        RankLostError: one has gone.
    """
    with peers.meeting(spec.name, why) as meeting:
        with stopwatch.stage("hash"):
            lookup = Lookup(spec, request)
            dependencies, values = Facts.of(lookup), handed_in_whole(request)
        result = LookupResult()
        if archive is not None:
            with stopwatch.stage("read"):
                result = archive.look_up(lookup)
        with stopwatch.stage("agree"):
            stand = stand_of(lookup, dependencies, result, archive, values)
            gathering = Gathering(meeting, peers, lookup, dependencies, values, stand)
        resolver = _Bringing(
            levels, gathering, request, archive, lookup, result, stopwatch, before_trace, watch
        )
        try:
            resolution = resolver.resolution()
        except Different:
            gathering.conclude(resolver.lowered, None)
            raise
        except Exception as error:
            with stopwatch.stage("agree"):
                gathering.compare(None, error)
                gathering.conclude(None, error)
            raise
        with stopwatch.stage("agree"):
            level, seconds = resolution.program.level, stopwatch.seconds
            told = gathering.conclude(resolution.lowered, None, level, seconds)
        return replace(resolution, others=told, has_compared=gathering.has_compared)


def compare_values(spec: StepSpec, request: Request, peers: Peers) -> None:
    """Compares the host values of a call with those that the other processes hand in.

    Raises:
        AgreementError: they differ, or a process has not come.
        RankLostError: one has gone.
    """
    values = {tuple(peers.ranks): handed_in_whole(request) or {}}
    with peers.meeting(spec.name, "its first call since it was warmed") as meeting:
        compare(meeting.hear, peers.rank, f"before {spec.name}", values)


@dataclass
class _Bringing:
    """One process's part in resolving a program."""

    levels: Levels
    gathering: Gathering
    request: Request
    archive: Archive | None
    lookup: Lookup
    result: LookupResult
    stopwatch: Stopwatch
    before_trace: Callable[[LookupResult], None]
    watch: bool
    lowered: Lowered | None = None
    taken: bytes = b""

    def resolution(self) -> Resolution:
        gathering = self.gathering
        if not (gathering.builds and gathering.traces):
            gathering.compare(None)
        if gathering.gives:
            return self._build_and_give() if gathering.builds else self._load_and_give()
        if not gathering.builds and gathering.has_it:
            return self._load(self.result) or self._trace()
        try:
            return self._adopt()
        except Exception as error:
            gathering.compare(None, error)  # The one that gives waits for it.
            raise
        finally:
            gathering.take_all()

    # ---- by the one that has it, or makes it -------------------------------------------------

    def _load_and_give(self) -> Resolution:
        record, archive = self.result.record, self.archive
        assert record is not None and archive is not None
        if self.gathering.takers:
            with self.stopwatch.stage("give"):
                data = archive.executable_bytes(record.program)
                if data:
                    self.gathering.tell(record.traced)
                    self._give(record, data)
            if not data:
                return self._build_and_give()
        return self._load(self.result) or self._trace()

    def _build_and_give(self) -> Resolution:
        if self.gathering.builds_again:
            text = "%s is built here as well: what the others make is for another kind of host"
            _log.warning(text, self.lookup.address.label)
        try:
            resolution = self._trace(self._found, self.gathering.tell)
            with self.stopwatch.stage("give"):
                publication = resolution.publication
                if publication is None:
                    self._give(None, b"", "; ".join(resolution.untrackable))
                    return resolution
                record = publication.record(time.time())
                if self.gathering.all_share and self.archive is not None:
                    self.archive.publish(publication)
                    self._give(record, b"")
                    return replace(resolution, publication=None)
                data = self._serialized(resolution)
                self._give(record if data else None, data, "it cannot be read from disk")
                return replace(resolution, publication=replace(publication, data=data))
        except BaseException as error:
            with contextlib.suppress(Exception):
                why_not = f"{type(error).__name__}: {error}"
                self.gathering.tell(None, why_not)  # If it has told before, that stands.
                self._give(None, b"", why_not)
            raise

    def _found(self, digest: str, load: Callable[[bytes], Any]) -> Any:
        """The executable of what was lowered here: from disk, or of another process's disk."""
        found = self.archive.find(digest, load) if self.archive is not None else None
        if found is not None:
            return found
        with self.stopwatch.stage("wait"):
            data = self.gathering.ask(digest)
        try:
            found = load(data) if data else None
        except Exception as error:
            self._say_why(_DOES_NOT_LOAD % error, logging.WARNING)
            return None
        self.taken = data
        return found

    def _serialized(self, resolution: Resolution) -> bytes:
        assert resolution.publication is not None
        if "compile" in resolution.program.seconds:
            return resolution.publication.serialized()
        if self.taken:
            return self.taken
        return self.archive.executable_bytes(resolution.digest) if self.archive is not None else b""

    def _give(self, record: DependencyRecord | None, data: bytes, why_not: str = "") -> None:
        self.gathering.give(self.lookup.address.label, record, data, why_not)

    # ---- by the others -----------------------------------------------------------------------

    def _adopt(self) -> Resolution:
        """The program that another process makes, or has."""
        if self.gathering.traces:
            return self._trace_and_load()
        with self.stopwatch.stage("wait"):
            self._answer()
            traced, why_not = self.gathering.told()
        if traced is None:
            return self._build_here(why_not)
        with self.stopwatch.stage("hash"):
            changes = self.gathering.differing(traced)
        if changes:
            text = "%s is traced here as well, as it depends on other things than on rank %d: %s"
            shown = "; ".join(map(str, changes[:3]))
            _log.info(text, self.lookup.address.label, self.gathering.giver, shown)
        if changes or traced.tree is None:  # It is traced here as well, but not compiled.
            return self._trace_and_load()
        with self.stopwatch.stage("wait"):
            record, data, why_not = self.gathering.receive()
        if record is None:
            return self._build_here(why_not)
        try:
            resolution = self._load(LookupResult(record), data)
        except Exception as error:
            self._say_why(_DOES_NOT_LOAD % error, logging.WARNING)
            resolution = None
        if resolution is not None and data and self.archive is not None:
            archive, address = self.archive, self.lookup.address
            archive.worker.submit(lambda: archive.keep(address, record, data))
        if resolution is None:
            return self._trace()
        return replace(resolution, giver=self.gathering.giver)

    def _trace_and_load(self) -> Resolution:
        """A program by a trace of this process, and the executable that another one made."""
        resolution = self._trace(self._received)
        if resolution.publication is None or resolution.program.level != 2:
            return resolution
        _, data, _ = self.gathering.receive()
        return replace(resolution, publication=replace(resolution.publication, data=data))

    def _received(self, digest: str, load: Callable[[bytes], Any]) -> Any:
        """The executable that another process made, of what has been traced here."""
        with self.stopwatch.stage("wait"):
            self._answer()
            self.gathering.told()  # What hands out the program has told by now, and waits for it.
            record, data, why_not = self.gathering.receive()
        if record is not None and digest != record.program and self._differs_from(record):
            raise Different
        if record is None or digest != record.program:
            self._say_why(why_not or "what is traced here is another program")
            return None
        if not data:
            return self.archive.find(digest, load) if self.archive is not None else None
        return load(data)

    def _answer(self) -> None:
        """Says whether the executable that another process is about to build is on disk here."""
        if self.archive is not None:
            self.gathering.answer(self.archive.executable_bytes)

    def _differs_from(self, record: DependencyRecord) -> bool:
        outline = zlib.decompress(record.outline).decode()
        return self.lowered is not None and outline != self.lowered.outline

    # ---- by each -----------------------------------------------------------------------------

    def _load(self, result: LookupResult, data: bytes = b"") -> Resolution | None:
        return self.levels.load(
            self.request, self.archive, self.lookup, result, self.stopwatch, self.watch, data
        )

    def _build_here(self, why_not: str) -> Resolution:
        self._say_why(why_not)
        return self._trace()

    def _say_why(self, why_not: str, level: int = logging.INFO) -> None:
        _log.log(level, "%s builds for itself: %s", self.lookup.address.label, why_not)

    def _trace(
        self,
        find: Callable[[str, Callable[[bytes], Any]], Any] | None = None,
        tell: Callable[[Traced], None] = lambda traced: None,
    ) -> Resolution:
        self.before_trace(self.result)
        if find is None:
            find = self.archive.find if self.archive is not None else lambda digest, load: None
        return self.levels.trace(
            self.request,
            self.archive,
            self.lookup,
            self.result,
            self.stopwatch,
            self.watch,
            Sharing(find, self._compare, tell),
        )

    def _compare(self, lowered: Lowered) -> None:
        self.lowered = lowered
        with self.stopwatch.stage("agree"):
            self.gathering.compare(lowered)
