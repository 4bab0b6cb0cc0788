"""`StateWriter`: writes snapshots or images of a host in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable

from stepcache.serving.held import HostState


class StateWriter:
    """Writes states of the host in a thread, one at a time: its snapshots, or its images.

    Attributes:
        name: plural noun for counts and logs.
        moment: moment of the last state that was written.
    """

    def __init__(self, name: str, write: Callable[[HostState], None], moment: int):
        self.name, self.moment, self._write = name, moment, write
        self._state: HostState | None = None
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a state is being written, or waits for `end`."""
        return self._thread is not None

    @property
    def has_ended(self) -> bool:
        """Whether a state waits for `end`."""
        return self._thread is not None and not self._thread.is_alive()

    def begin(self, state: HostState) -> None:
        """Starts to write a state."""
        self._state, self._error = state, None
        self._thread = threading.Thread(target=self._run, name=f"stepcache {self.name}")
        self._thread.daemon = True
        self._thread.start()

    def _run(self) -> None:
        try:
            assert self._state is not None
            self._write(self._state)
        except Exception as error:
            self._error = error

    def end(self) -> tuple[HostState, Exception | None]:
        """Waits until the state is written. Returns it, and the error if that failed."""
        state, thread = self._state, self._thread
        assert state is not None and thread is not None
        thread.join()
        if self._error is None:
            self.moment = state.moment
        self._state = self._thread = None
        return state, self._error
