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
from stepcache.programs.archive import Answer
from stepcache.programs.levels import Brought
from stepcache.programs.pods.part import Part
from stepcache.programs.pods.roles import without_host
from stepcache.storage import plain
from stepcache.storage.dependency_record import (
    Candidate,
    Traced,
    agree,
    differences,
    unpack_candidates,
)

_log = logging.getLogger("stepcache")


class Follower(Part):
    """A follower of a shared compile."""

    def __post_init__(self):
        super().__post_init__()
        self._is_asked = self.round.rank in self.roles.asked
        # If this rank depends on other values than the leader, it does not wait for its trace.
        self._traces = self.report.code != self.roles.code

    def _resolved(self) -> Brought:
        if not (self.roles.builds and self._traces):
            self._compare(None)
        if not self.roles.builds and self.report.program == self.roles.program:
            return self._load(self.answer) or self._trace()
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
    def _leaders_program(self) -> tuple[Candidate | None, bytes, str]:
        """What the leader sent by `_send_program`."""
        received = self.round.channel.receive("program", self.roles.leader)
        packed, data, why_not = plain.unpack(received)
        candidate = unpack_candidates(packed)[0] if packed else None
        return candidate, zlib.decompress(data), why_not

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

    def _follow(self) -> Brought:
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
            candidate, data, why_not = self._leaders_program
        if candidate is None:
            return self._build_alone(why_not)
        brought = None
        try:
            brought = self._load(Answer(candidate), data)
        except Exception as error:
            self._log_cannot_load(error)
        if brought is None:
            return self._trace()
        if data and self.archive is not None:
            archive, address = self.archive, self.question.address
            archive.worker.submit(lambda: archive.keep(address, candidate, data))
        return replace(brought, giver=self.roles.leader)

    def _differences_from(self, traced: Traced) -> tuple[Change, ...]:
        """Returns the dependencies of the leader's trace that are not the same here."""
        facts = without_host(traced.facts)
        own = without_host(self.question.with_used(traced.used).facts)
        return () if agree(facts, own) else differences(facts, own)

    def _trace_and_load(self) -> Brought:
        """Returns a program that is traced here, with the executable of the leader."""
        brought = self._trace(self._find_leaders)
        if brought.publication is None or brought.program.level != 2:
            return brought
        data = self._leaders_program[1]
        return replace(brought, publication=replace(brought.publication, data=data))

    def _find_leaders(self, digest: str, load: Callable[[bytes], Any]) -> Any:
        """Loads the leader's executable, if it is the one of the program lowered here."""
        with self.stopwatch.stage("wait"):
            self._answer_from_disk()
            _ = self._leaders_trace  # The leader waits until all have received it.
            candidate, data, why_not = self._leaders_program
        if candidate is None or digest != candidate.program:
            self._log_builds_alone(why_not or "XLA gets another program on this rank")
            return None
        if not data:
            return self.archive.find(digest, load) if self.archive is not None else None
        return load(data)
