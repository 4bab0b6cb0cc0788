"""What the programs of a pod need of its processes: to be heard by all, and to hand things out.

`cluster.pod` provides it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from stepcache.jaxcompat.coordination import Brief
from stepcache.sharding import Company


class Meeting(Protocol):
    """All processes of a mesh, on the occasion of one new program."""

    def hear(
        self, topic: str, said: bytes, *, patiently: bool = False, brief: Brief | None = None
    ) -> dict[int, bytes]:
        """What every process says on a topic, by rank; waits for the last one.

        What several say alike is read once. So say what is the same on most of them, or shorten it.

        Args:
            topic: the same on all of them.
            said: by this one.
            patiently: wait as long as all are alive, and not only for the agreed time.
            brief: shortens what all said, by rank, to what all have to know of it; one process
                calls it.

        Raises:
            AgreementError: some process has not come in time.
            RankLostError: some process has gone.
        """
        ...

    def said(self, topic: str) -> dict[int, bytes]:
        """What every process has said on a topic that has been heard, by rank and not shortened.

        For one process only, as it reads something of each of the others.
        """
        ...

    def hand_out(self, name: str, data: bytes, takers: Sequence[int]) -> None:
        """Gives bytes to some processes, each of which has to take them."""
        ...

    def take(self, name: str, giver: int) -> bytes:
        """Waits for what a process hands out.

        Raises:
            RankLostError: some process has gone.
        """
        ...


class Peers(Company, Protocol):
    """The processes of a mesh.

    Attributes:
        rank: of this one.
        ranks: of all, in order.
    """

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> Sequence[int]: ...

    def meeting(self, label: str, why: str) -> AbstractContextManager[Meeting]:
        """Comes together with the others; one meeting at a time, in the same order on all.

        Args:
            label: what about, for people.
            why: why this process needs it, in one line; told to all where the others do not come.
        """
        ...

    def suspect(self, error: BaseException) -> None:
        """Finds out whether an error means that a process has gone.

        Raises:
            RankLostError: it does.
            AgreementError: it does, and that one had waited for this one for too long.
        """
        ...
