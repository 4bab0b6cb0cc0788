"""A follower of a shared compile: loads the program that the leader sends."""

from __future__ import annotations

import contextlib
import functools
import logging
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from stepcache.events import Change
from stepcache.fingerprint.dependencies import agree, differences
from stepcache.programs.lookup import LookupResult
from stepcache.programs.pods.part import Part
from stepcache.programs.pods.roles import without_host
from stepcache.programs.resolution import Resolution
from stepcache.storage import plain
from stepcache.storage.dependency_record import DependencyRecord, Traced, unpack_records

_log = logging.getLogger("stepcache")


class Follower(Part):
    """A follower of a shared compile."""

    def __post_init__(self):
        super().__post_init__()
        self._is_asked = self.round.rank in self.roles.asked
        # If this rank depends on other values than the leader, it does not wait for its trace.
        self._traces = self.report.code != self.roles.code

    def _resolved(self) -> Resolution:
        if not (self.roles.builds and self._traces):
            self._compare(None)
        if not self.roles.builds and self.report.program == self.roles.program:
            return self._load(self.result) or self._trace()
        try:
            return self._follow()
        except Exception as error:
            self._compare(None, error)  # The leader waits for it.
            raise
        finally:
            with contextlib.suppress(Exception):  # The leader waits until all have received.
                self._answer_leader(lambda digest: b"")
                _ = self._leaders_trace, self._leaders_program

    @functools.cached_property
    def _leaders_trace(self) -> tuple[Traced | None, str]:
        """What the leader sent by `_send_trace`."""
        packed = self.round.channel.receive("trace", self.roles.leader)
        traced, why_not = plain.unpack(zlib.decompress(packed))
        return (Traced.unpacked(traced) if traced is not None else None), why_not

    @functools.cached_property
    def _leaders_program(self) -> tuple[DependencyRecord | None, bytes, str]:
        """What the leader sent by `_send_program`."""
        received = self.round.channel.receive("program", self.roles.leader)
        packed, data, why_not = plain.unpack(received)
        record = unpack_records(packed)[0] if packed else None
        return record, zlib.decompress(data), why_not

    def _answer_leader(self, find: Callable[[str], bytes]) -> None:
        """Sends the executable that the leader asks this rank for, if it does and this rank has it.

        Args:
            find: returns a stored executable by its digest; empty if there is none.
        """
        if self._is_asked:
            self._is_asked, rank = False, self.round.rank
            digest = self.round.channel.receive(f"wanted/{rank}", self.roles.leader).decode()
            if digest:
                self.round.channel.send("executable", find(digest), 1)

    def _answer_from_disk(self) -> None:
        if self.archive is not None:
            self._answer_leader(self.archive.executable_bytes)

    def _follow(self) -> Resolution:
        """Returns the program that the leader has or builds."""
        if self._traces:
            return self._trace_and_load()
        with self.stopwatch.stage("wait"):
            self._answer_from_disk()
            traced, why_not = self._leaders_trace
        if traced is None:
            return self._build_alone(why_not)
        with self.stopwatch.stage("hash"):
            changes = self._differences_from(traced)
        if changes:
            text = "%s is traced on this rank too: it depends on other values than on rank %d: %s"
            shown = "; ".join(map(str, changes[:3]))
            _log.info(text, self.report.label, self.roles.leader, shown)
        if changes or traced.tree is None:
            return self._trace_and_load()
        with self.stopwatch.stage("wait"):
            record, data, why_not = self._leaders_program
        if record is None:
            return self._build_alone(why_not)
        resolution = None
        try:
            resolution = self._load(LookupResult(record), data)
        except Exception as error:
            self._log_cannot_load(error)
        if resolution is None:
            return self._trace()
        if data and self.archive is not None:
            archive, address = self.archive, self.lookup.address
            archive.worker.submit(lambda: archive.keep(address, record, data))
        return replace(resolution, giver=self.roles.leader)

    def _differences_from(self, traced: Traced) -> tuple[Change, ...]:
        """Returns the dependencies of the leader's trace that are not the same here."""
        dependencies = without_host(traced.dependencies)
        own = without_host(self.lookup.with_used(traced.used).dependencies)
        return () if agree(dependencies, own) else differences(dependencies, own)

    def _trace_and_load(self) -> Resolution:
        """Returns a program that is traced here, with the executable of the leader."""
        resolution = self._trace(self._find_leaders)
        if resolution.publication is None or resolution.program.level != 2:
            return resolution
        data = self._leaders_program[1]
        publication = resolution.publication._replace(data=data)
        return replace(resolution, publication=publication)

    def _find_leaders(self, digest: str, load: Callable[[bytes], Any]) -> Any:
        """Loads the leader's executable, if it is the one of the program lowered here."""
        with self.stopwatch.stage("wait"):
            self._answer_from_disk()
            _ = self._leaders_trace  # The leader waits until all have received it.
            record, data, why_not = self._leaders_program
        if record is None or digest != record.program:
            self._log_builds_alone(why_not or "XLA gets another program on this rank")
            return None
        if not data:
            return self.archive.find(digest, load) if self.archive is not None else None
        return load(data)
