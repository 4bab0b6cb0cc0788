"""`Copies`: which copy of a value may serve a reader, by version, by steps and by age.

It decides, and moves nothing. A copy serves while its version is current. With `max_staleness` or
`max_age` it may serve on after a write, so long as those allow, but not to a session that wrote, or
has seen, a newer one.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stepcache.units import counted
from stepcache.variables.policy import Read


@dataclass(slots=True)
class Copy:
    """A copy of one version.

    Attributes:
        version: which one.
        value: the copy.
        fetched_seconds: when it was fetched, or found current.
        served_steps: how many steps it has served since.
        exact: whether it came uncoded.
    """

    version: int
    value: Any
    fetched_seconds: float
    served_steps: int = 0
    exact: bool = False


class Copies:
    """The copy that a process keeps of one value in one memory, and the one fetched ahead.

    Args:
        policy: when a copy is valid.
        clock: seconds.
    """

    def __init__(self, policy: Read, clock: Callable[[], float] = time.monotonic):
        self._policy, self._clock = policy, clock
        self._kept: Copy | None = None
        self._ahead: Copy | None = None
        self._known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._known_outside = 0

    def wrote(self, writer: Any, version: int) -> None:
        """Notes that a session wrote a version, which it has to read from now; None for none."""
        self.saw(writer, version)
        if self._ahead is not None and self._ahead.version != version:
            self._ahead = None

    def saw(self, reader: Any, version: int) -> None:
        """Notes that a session knows a version: no older one may serve it from now."""
        if reader is None:
            self._known_outside = max(version, self._known_outside)
        else:
            self._known[reader] = max(version, self._known.get(reader, 0))

    def serving(self, reader: Any, current: int) -> tuple[Copy | None, str]:
        """The copy that may serve a reader now, and why, or why none.

        Args:
            reader: the session that reads.
            current: the current version.
        """
        if self._ahead is not None and self._ahead.version == current:
            return self._ahead, "it was fetched ahead"
        copy = self._kept
        if copy is None:
            return None, "no copy is kept" if self._policy.cache is None else "there is no copy yet"
        if copy.version == current:
            return copy, f"a copy of version {current} is there"
        behind = f"the copy has version {copy.version}, and {current} is current"
        known = self._known_outside if reader is None else self._known.get(reader, 0)
        if known > copy.version:
            return None, f"{behind}: this session wrote it, or has seen it"
        bounds = (self._policy.max_staleness, self._policy.max_age)
        if bounds == (0, None):
            return None, behind
        if bounds[0] and copy.served_steps >= bounds[0]:
            return None, f"{behind}: it has served {counted(copy.served_steps, 'step')}"
        age = self._clock() - copy.fetched_seconds
        if bounds[1] is not None and age > bounds[1]:
            return None, f"{behind}: it is {age:.3g} s old"
        return copy, f"{behind}, which max_staleness or max_age allows"

    def served(self, copy: Copy, current: int) -> None:
        """Notes that a copy serves a step. One that is found to be current begins anew."""
        if copy is self._ahead:
            self._ahead = None
            if self._policy.cache is None:
                return
            self._kept = copy
        if copy.version == current:
            copy.fetched_seconds, copy.served_steps = self._clock(), 0
        else:
            copy.served_steps += 1

    def keep(self, version: int, value: Any, *, exact: bool = False) -> None:
        """Keeps a copy that has just been made, if the policy keeps copies.

        Of two that were fetched at a time the newer stays, whichever came first.
        """
        if self._policy.cache is not None and (self._kept is None or self._kept.version <= version):
            self._kept = Copy(version, value, self._clock(), exact=exact)

    def ahead(self, version: int, value: Any, *, exact: bool = False) -> None:
        """Keeps a copy for the next step."""
        self._ahead = Copy(version, value, self._clock(), exact=exact)

    def drop(self) -> None:
        """Lets go of all copies."""
        self._kept = self._ahead = None
