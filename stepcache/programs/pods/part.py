"""`Part`: what every process does in a shared compile, whether it leads or follows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from stepcache.distributed.agreement import Round
from stepcache.errors import first_line
from stepcache.jaxcompat import storing
from stepcache.programs.levels import Levels
from stepcache.programs.lookup import Lookup, LookupResult
from stepcache.programs.pods.lowered import check_lowered, digest_of_lowered, merge_lowered
from stepcache.programs.pods.roles import CallReport, Decision, Roles
from stepcache.programs.resolution import Lowered, MissedCall, Resolution, Sharing
from stepcache.storage import plain
from stepcache.storage.dependency_record import Traced

_log = logging.getLogger("stepcache")


@dataclass
class Part:
    """The part of one process in a shared compile."""

    round: Round
    decision: Decision  # Of all processes.
    roles: Roles  # Of those on this kind of host.
    report: CallReport  # Of this process.
    levels: Levels
    call: MissedCall
    lookup: Lookup
    result: LookupResult

    def __post_init__(self):
        self.archive, self.stopwatch = self.call.archive, self.call.stopwatch
        # Whether lowered programs are still to be compared before XLA compiles one.
        self._is_to_compare = self.decision.compares_lowered

    def resolve(self) -> Resolution:
        """Returns the program, once all processes have it."""
        try:
            resolution = self._resolved()
        except Exception as error:
            with self.stopwatch.stage("agree"):
                self._compare(None, error)
                self._conclude(None, error)
            raise
        with self.stopwatch.stage("agree"):
            others = self._conclude(resolution.lowered, None, resolution.program.level)
        return replace(resolution, others=others, has_compared=self.decision.knows_values)

    def _resolved(self) -> Resolution:
        raise NotImplementedError

    def _load(self, result: LookupResult, data: bytes = b"") -> Resolution | None:
        return self.levels.load(self.call, self.lookup, result, data)

    def _build_alone(self, why: str) -> Resolution:
        self._log_builds_alone(why)
        return self._trace()

    def _log_builds_alone(self, why: str) -> None:
        _log.info("rank %d builds %s for itself: %s", self.round.rank, self.report.label, why)

    def _log_cannot_load(self, error: Exception) -> None:
        text = "rank %d builds %s for itself: it cannot load the executable of another rank (%s)"
        _log.warning(text, self.round.rank, self.report.label, error)

    def _trace(
        self, find: storing.Find | None = None, send: Callable[[Traced], None] = lambda traced: None
    ) -> Resolution:
        self.call.before_trace(self.result)
        sharing = Sharing(find or self.call.find, self._compare_before_xla, send)
        return self.levels.trace(self.call, self.lookup, self.result, sharing)

    def _compare_before_xla(self, lowered: Lowered) -> None:
        with self.stopwatch.stage("agree"):
            self._compare(lowered)

    def _compare(self, lowered: Lowered | None, error: BaseException | None = None) -> None:
        """Compares lowered programs before XLA compiles one, if dependencies differ; once.

        Args:
            lowered: by this process; None if it waits for the leader's trace.
            error: why it has lowered nothing.

        Raises:
            AgreementError: another process lowered another program, or failed.
        """
        if self._is_to_compare:
            self._is_to_compare = False
            said = plain.pack([digest_of_lowered(lowered), first_line(error) if error else ""])
            merged = self.round.merge("lowered", said, merge_lowered)
            if error is None:
                check_lowered(self.round, self.report.label, merged, lowered)

    def _conclude(
        self, lowered: Lowered | None, error: BaseException | None, level: int = 0
    ) -> dict[int, tuple[int, dict[str, float]]]:
        """Compares what all processes hold.

        Args:
            lowered: what this process lowered, or loaded.
            error: why this process holds nothing.
            level: how it resolved the miss, as in `Program`.

        Returns:
            Level and seconds by stage of the other ranks; only on the first one, which keeps them
            for those that do not write into its directory.

        Raises:
            AgreementError: another process holds another program, or none.
        """
        seconds = {stage: round(value, 4) for stage, value in self.stopwatch.seconds.items()}
        said = [digest_of_lowered(lowered), first_line(error) if error else "", level, seconds]
        merged = self.round.merge("held", plain.pack(said), merge_lowered)
        if error is not None:
            return {}
        check_lowered(self.round, self.report.label, merged, lowered)
        if self.decision.shares_directory or self.round.rank != self.decision.first:
            return {}
        held = self.round.contributions("held")
        others = {rank: plain.unpack(each) for rank, each in held.items()}
        return {
            rank: (each[2], each[3]) for rank, each in others.items() if rank != self.round.rank
        }
