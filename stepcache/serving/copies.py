"""`Copies`: which copy of a value may serve a reader, by version and by steps.

It decides, and moves nothing. A copy serves while its version is current. With `max_staleness` it
may also serve after a write, but not a session that wrote, or has read, a newer version.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Any

from stepcache.units import counted
from stepcache.variables.policy import Read


@dataclass(slots=True)
class Copy:
    """A copy of one version of a value."""

    version: int
    value: Any
    served_steps: int = 0  # Since it was fetched, or last found to be current.


class _Outside:
    """Who reads outside of sessions."""


_OUTSIDE = _Outside()


class Copies:
    """The copy that a process keeps of one value."""

    def __init__(self, policy: Read):
        self._policy = policy
        self._kept: Copy | None = None
        # The newest version that each session has seen.
        self._known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def saw(self, reader: Any, version: int) -> None:
        """Records that a session, or None, wrote or read a version: it reads no older one from now
        on.
        """
        with self._lock:  # Who looks does not hold the lock of the variables.
            key = reader or _OUTSIDE
            self._known[key] = max(version, self._known.get(key, 0))

    def serving(
        self, reader: Any, current: int | None, *, carried: bool = False
    ) -> tuple[Copy | None, str]:
        """The copy that may serve a session, or None, now; or None, and why none may.

        `current` is the version of the value; None if it has not been asked for. A `carried` value
        has to be current.
        """
        copy, policy = self._kept, self._policy
        if copy is None:
            return None, "no copy is kept" if policy.cache is None else "there is no copy yet"
        if copy.version == current:
            return copy, f"a copy of version {current} is there"
        if carried:
            return None, "a carried value has to be current"
        now = "it has not been compared" if current is None else f"{current} is current"
        behind = f"the copy has version {copy.version}, and {now}"
        if self._known.get(reader or _OUTSIDE, 0) > copy.version:
            return None, f"{behind}: this session wrote it, or has seen it"
        if not policy.max_staleness:
            return None, behind
        if copy.served_steps >= policy.max_staleness:
            return None, f"{behind}: it has served {counted(copy.served_steps, 'step')}"
        return copy, f"{behind}, which max_staleness allows"

    def served(self, copy: Copy, current: int | None) -> None:
        """Records that a copy serves a step. A current one starts a new period of staleness."""
        if copy.version == current:
            copy.served_steps = 0
        else:
            copy.served_steps += 1

    def keep(self, version: int, value: Any) -> None:
        """Keeps a new copy, if the policy keeps copies and no newer one is kept already."""
        if self._policy.cache is not None and (self._kept is None or self._kept.version <= version):
            self._kept = Copy(version, value)

    def arrived(self, version: int, value: Any) -> None:
        """Keeps a copy of the version that was found to be current.

        Its value is None if the copy that is kept may have that version.
        """
        if value is None:
            if self._kept is not None and self._kept.version == version:
                self._kept.served_steps = 0
        else:
            self._kept = Copy(version, value)

    def drop(self) -> None:
        """Drops the copy."""
        self._kept = None

    def reset(self) -> None:
        """Drops the copy, and the versions that sessions have seen: their numbers start again."""
        self.drop()
        self._known.clear()
