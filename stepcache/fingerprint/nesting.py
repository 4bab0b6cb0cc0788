"""`Nesting`: whether the user's code runs in a trace that JAX makes within a step's own trace."""

from __future__ import annotations

import weakref
from collections.abc import Set
from types import CodeType
from typing import Any

from stepcache import jaxcompat


class Nesting:
    """Looks at where the user's code is entered in the trace of a step, which runs in one thread.

    Args:
        own: the code of the step's own function.

    Attributes:
        found: whether code of the user's was entered anywhere but in the step's own trace.
        seen: the identities of the code that was entered before.
    """

    def __init__(self, own: Set[CodeType]):
        self._own = own
        self._trace: Any = lambda: None  # Weakly: to keep a trace is a leak.
        self.found = False
        self.seen: set[int] = set()

    def enter(self, code: CodeType) -> bool:
        """Notes that the user's code is being entered; False if the next time does not matter."""
        self.seen.add(id(code))
        if not self.found:
            traces = jaxcompat.active_jaxpr_traces()
            own = self._trace()
            if own is None and len(traces) == 1 and code in self._own:
                self._trace = weakref.ref(traces[0])
            elif traces:
                self.found = traces[0] is not own
        return not self.found
