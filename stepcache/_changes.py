"""Changes that are undone, whatever interrupts them: `Undoing`, and `Shared` for those of several
users.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any


class Undoing:
    """Undoes changes, the last one first: `with Undoing() as undoing, undoing:`.

    It is entered twice because Ctrl-C may come while it is left, and even before the first line
    that leaves it. For the same reason what undoes a change is added before the change is made, and
    may find that it was not made, or that it was undone already.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []
        self.has_failed = False  # Whether an exception left it.

    def add(self, undo: Callable[..., Any], *args: Any) -> None:
        """Has a function called at the end; again if an exception interrupts it."""
        self._undo.append(partial(undo, *args))

    def use(self, change: Shared) -> bool:
        """Uses a shared change until the end; False where it cannot be made."""
        self.add(change.stop, self)
        return change.start(self)

    def hold(self, manager: contextlib._GeneratorContextManager[Any]) -> None:
        """Enters a context manager made by `contextlib`, which is left at the end."""
        self.add(manager.gen.close)
        manager.__enter__()

    def close(self) -> None:
        """Undoes what has not been undone yet."""
        while self._undo:
            self._undo[-1]()
            self._undo.pop()

    def __enter__(self) -> Undoing:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: Any) -> None:
        self.has_failed |= kind is not None
        self.close()


class Shared(ABC):
    """A change to the process that is made for its first user, and undone after its last.

    A forked child, where the threads of the users are not, undoes it too. A user is any object that
    is compared by its identity.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._users: dict[int, Any] = {}
        shared.append(self)

    @abstractmethod
    def _make(self, users: int) -> bool:
        """Makes the change for one user more than these; False where that cannot be done."""

    @abstractmethod
    def _undo(self) -> None:
        """Undoes the change, as far as it was made."""

    def start(self, user: Any) -> bool:
        """Begins a use; False where the change cannot be made."""
        with self._lock:
            users = len(self._users)
            self._users[id(user)] = user  # First: `stop` undoes what is made by half.
            made = self._make(users)
            if not made:
                del self._users[id(user)]
            return made

    def stop(self, user: Any) -> bool:
        """Ends a use, if there is one; False where not, as in a process that was forked since."""
        with self._lock:
            used = self._users.pop(id(user), None) is not None
            if not self._users:
                self._undo()
            return used

    def reset(self) -> None:
        """Undoes the change, whoever has asked for it."""
        self._lock, self._users = threading.Lock(), {}
        self._undo()


shared: list[Shared] = []
