"""`RecordedTrace`: records one trace of a step, and examines it while XLA compiles.

While XLA compiles, Python is free: another thread finds out then what the trace depended on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from types import CodeType
from typing import Any

from stepcache import jaxcompat
from stepcache._changes import Undoing
from stepcache.fingerprint import shared_traces
from stepcache.fingerprint.findings import Findings
from stepcache.fingerprint.lowering_rules import code_of_lowering
from stepcache.fingerprint.nesting import Nesting
from stepcache.fingerprint.recorder import Recording
from stepcache.fingerprint.seen_codes import count_in
from stepcache.fingerprint.shared_traces import SharedTraces
from stepcache.jaxcompat import storing
from stepcache.programs.background import beside
from stepcache.programs.builds import builds
from stepcache.programs.resolution import Lowered, Sharing
from stepcache.storage.dependency_record import Traced


class RecordedTrace:
    """One trace of a step.

    Args:
        find: looks for the executable of a lowered module, on disk or in other processes.
        sharing: with other processes, or None.
        examine: finds out what a recorded trace depends on.
        records: whether the trace is recorded at all.
    """

    def __init__(
        self,
        find: storing.Find,
        sharing: Sharing | None,
        examine: Callable[[Findings, jaxcompat.Staged], Traced],
        records: bool,
    ):
        self._find, self._sharing, self._examine = find, sharing, examine
        self._records = records
        self._recording = Recording()
        self._examined: Future[Traced] | None = None
        self.digest = ""  # Of what XLA was given; empty where JAX had compiled it before.
        self.is_shared = True  # Whether steps go on sharing what this one shared.
        self.is_loaded = False  # Whether the executable was found, and not compiled.
        self.lowered: Lowered | None = None  # Where processes compare it.

    def watch(
        self,
        own: set[CodeType],
        shared: SharedTraces | None,
        token: tuple[Hashable, ...],
        undoing: Undoing,
    ) -> None:
        """Records what is traced and lowered until the end of `undoing`.

        Args:
            own: the code of the step's own function.
            shared: the traces that it shares with other steps; None where it does not.
            token: identifies the traces that it shares with its own.
            undoing: ends the recording.
        """
        recording = self._recording

        def end_sharing(shared: SharedTraces) -> None:
            used = None if undoing.has_failed else recording
            self.is_shared = shared_traces.end(shared, used, own)

        if shared is not None:
            undoing.add(end_sharing, shared)
            recording.nesting = None if shared.alone else Nesting(own)
        if self._records:
            undoing.add(recording.end)
            recording.begin()
        jaxcompat.trace_anew(undoing, jaxcompat.ValueToken(shared or token))

    def is_lowered_by_jax(self, staged: jaxcompat.Staged) -> bool:
        """Whether the recording may end before the trace is lowered: JAX's own code does that."""
        with jaxcompat.recording_paused():
            codes = code_of_lowering(staged.jaxpr)
            if codes is not None:
                count_in(codes)
            return codes is not None

    def compile_through(self, undoing: Undoing, staged: jaxcompat.Staged) -> None:
        """Looks for the executable, and examines the trace meanwhile, until `undoing` ends."""
        if self._sharing is not None:
            self.lowered = self._compared(staged, self._sharing)

        def to_xla() -> None:
            """Called when XLA is about to compile or load, without Python's lock."""
            if self._examined is None:
                builds.in_xla(undoing)
                self._examined = beside(undoing, lambda: self._told(staged))

        def find(digest: str, load: Callable[[bytes], Any]) -> Any:
            def load_by_xla(data: bytes) -> Any:
                to_xla()
                return load(data)

            self.digest = digest
            executable = self._find(digest, load_by_xla)
            self.is_loaded = executable is not None
            to_xla()
            return executable

        if storing.CAN_STORE:
            storing.compile_through(undoing, find)
        else:
            self.digest = storing.lowered_digest(staged)
            to_xla()

    def _told(self, staged: jaxcompat.Staged) -> Traced:
        traced = self._examine(self._recording, staged)
        if self._sharing is not None:
            self._sharing.tell(traced)
        return traced

    def _compared(self, staged: jaxcompat.Staged, sharing: Sharing) -> Lowered:
        """What was lowered, once the other processes have compared it with theirs."""

        def dependencies() -> dict[str, str]:
            examined = self._examined
            found = examined.result() if examined else self._examine(self._recording, staged)
            return found.dependencies

        sources = functools.partial(jaxcompat.sources_of, staged.lowered)
        lowered = Lowered(jaxcompat.outline(staged.lowered), dependencies, sources)
        sharing.compare(lowered)
        return lowered

    def result(self, staged: jaxcompat.Staged) -> Traced:
        """What the trace depended on. Raises what examining or sharing it raised."""
        if self._examined is None:  # JAX had compiled it before.
            return self._told(staged)
        return self._examined.result(timeout=0)
