"""The leader of a shared compile: loads the program or builds it, and sends it to the others."""

from __future__ import annotations

import contextlib
import logging
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from stepcache.errors import first_line
from stepcache.jaxcompat import storing
from stepcache.programs.pods.part import Part
from stepcache.programs.resolution import Resolution
from stepcache.storage import plain
from stepcache.storage.dependency_record import DependencyRecord, Traced, pack_records

_log = logging.getLogger("stepcache")


class Leader(Part):
    """The leader of a shared compile."""

    def __post_init__(self):
        super().__post_init__()
        self._to_ask = list(self.roles.asked)
        self._received = b""  # An executable that another rank had on its disk.

    def _resolved(self) -> Resolution:
        if self.roles.builds:
            return self._build_and_send()
        self._compare(None)
        return self._load_and_send()

    def _load_and_send(self) -> Resolution:
        record, archive = self.result.record, self.archive
        assert record is not None and archive is not None
        if self.roles.followers:
            with self.stopwatch.stage("give"):
                data = archive.executable_bytes(record.program, self.stopwatch.stage)
                if data:
                    self._send_trace(record.traced)
                    self._send_program(record, data)
            if not data:
                return self._build_and_send()
        return self._load(self.result) or self._trace()

    def _build_and_send(self) -> Resolution:
        if self.roles.builds and self.round.rank != self.decision.first:
            _log.warning(
                "rank %d also builds %s: it runs on another kind of host than rank %d",
                self.round.rank,
                self.report.label,
                self.decision.first,
            )
        try:
            resolution = self._trace(self._find, self._send_trace)
            with self.stopwatch.stage("give"):
                publication = resolution.publication
                if publication is None:
                    self._send_program(None, b"", "; ".join(resolution.untrackable))
                    return resolution
                record = publication.record(time.time())
                if self.decision.shares_directory and self.archive is not None:
                    why_not = self.archive.publish(publication)
                    self._send_program(None if why_not else record, b"", why_not)
                    return replace(resolution, publication=None)
                data, why_not = self._serialized(resolution)
                self._send_program(record if data else None, data, why_not)
                return replace(resolution, publication=publication._replace(data=data))
        except BaseException as error:
            with contextlib.suppress(Exception):
                self._send_trace(None, first_line(error))
                self._send_program(None, b"", first_line(error))
            raise

    def _find(self, digest: str, load: Callable[[bytes], Any]) -> Any:
        """Loads the executable of the lowered program from this disk, or from another rank's."""
        found = self.call.find(digest, load)
        if found is not None:
            return found
        with self.stopwatch.stage("wait"):
            data = self._ask(digest)
        try:
            found = load(data) if data else None
        except Exception as error:
            self._log_cannot_load(error)
            return None
        self._received = data
        return found

    def _ask(self, digest: str) -> bytes:
        """Asks other ranks for an executable, one after the other; returns b"" if none has it.

        Args:
            digest: of the lowered program. Empty only tells the ranks not to wait any more.
        """
        data, channel = b"", self.round.channel
        while self._to_ask:
            rank, wanted = self._to_ask.pop(0), "" if data else digest
            channel.send(f"wanted/{rank}", wanted.encode(), 1)
            if wanted:
                data = channel.receive("executable", rank)
        return data

    def _serialized(self, resolution: Resolution) -> tuple[bytes, str]:
        """The executable; empty, and why, if it cannot be given to others."""
        assert resolution.publication is not None
        if "compile" in resolution.program.seconds:
            try:
                return resolution.publication.serialized(), ""
            except storing.NotStorable as error:
                return b"", str(error)
        if self._received or self.archive is None:
            return self._received, ""
        why_not = "the leader cannot read the executable from its disk"
        return self.archive.executable_bytes(resolution.digest), why_not

    def _send_trace(self, traced: Traced | None, why_not: str = "") -> None:
        """Sends what the trace depends on; None if the followers have to build for themselves."""
        self._ask("")
        if self.roles.followers:
            packed = plain.pack([traced.packed() if traced is not None else None, why_not])
            self.round.channel.send("trace", zlib.compress(packed, 1), self.roles.followers)

    def _send_program(
        self, record: DependencyRecord | None, data: bytes, why_not: str = ""
    ) -> None:
        """Sends the program.

        Args:
            record: the build; None if the followers have to build for themselves.
            data: the executable; empty if all ranks find it in the shared directory.
            why_not: why there is no record.
        """
        if self.roles.followers:
            label = self.report.label
            packed = pack_records(label, [record])[1] if record is not None else b""
            message = plain.pack([packed, zlib.compress(data, 1), why_not])
            self.round.channel.send("program", message, self.roles.followers)
