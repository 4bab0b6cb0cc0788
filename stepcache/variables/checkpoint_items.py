"""What a checkpoint may hold: `Variables` in parts, pytrees and numbers, by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from stepcache.errors import VariablesError
from stepcache.sharding import current_reader
from stepcache.variables.checkpoint_tree import Name
from stepcache.variables.masters import Master
from stepcache.variables.policy import Write
from stepcache.variables.transfer import Meter
from stepcache.variables.updates import Updates

NOTHING: Name = ("%nothing",)
"""The name of what is stored in a checkpoint without leaves: orbax stores no empty trees."""


@dataclass
class Parts:
    """What a checkpoint holds, or will hold, of some variables.

    Attributes:
        trees: of arrays or templates: "" the value, "optimizer" its state, "pending" the sum of
            pending updates.
        about: the version, the write mode, and the number of pending updates; empty where what is
            stored was no `Variables`.
        state: the optimizer's state, to be overwritten.
    """

    trees: dict[str, Any]
    about: dict[str, Any]
    state: Master | None = None


class Savable:
    """The half of `Variables` that checkpoints use."""

    name: str
    write: Write
    value: Any
    _number: int
    _lock: Any
    _master: Master
    _updates: Updates
    _made_of: dict[str, str]
    _moving: Callable[..., contextlib.AbstractContextManager[Meter]]

    def _parts(self) -> Parts:
        """The parts to save. Under the lock."""
        master, updates = self._master, self._updates
        trees = {"": self.value}
        if (state := updates.state) is not None:
            state.check_not_lost(self.name)
            with self._moving("save") as meter:
                trees["optimizer"] = state.layout.tree.unflatten(state.leaves(meter))
        if (pending := updates.pending_leaves) is not None:
            trees["pending"] = master.layout.tree.unflatten(pending)
        about = {"version": master.version, "mode": self.write.mode, "pending": updates.pending}
        return Parts(trees, about)

    def _wanted_parts(self, stored: set[str], about: dict[str, Any], partial: bool) -> Parts:
        """Templates of the parts to restore, of those stored, and what is stored `about` them.

        Raises:
            TransferBudgetError: it would move more than the session allows.
        """
        wanted = Parts({"": self._master.templates()}, about)
        is_same_mode = about.get("mode") == self.write.mode
        if "pending" in stored and is_same_mode:
            wanted.trees["pending"] = self._master.templates()
        # A checkpoint from before the first push has no state.
        has_state = "optimizer" in stored or not (is_same_mode or partial)
        has_state = has_state and self.write.mode == "apply"
        state = self._updates.state if has_state else None
        written = (self._master,) if state is None else (self._master, state)
        with self._lock, self._moving("restore", *written) as meter:
            if has_state:
                before = self._updates.state
                wanted.state = self._updates.state_to_restore(self._master, meter)
                self._updates.state = before  # Until all has been read.
                wanted.trees["optimizer"] = wanted.state.templates()
        return wanted

    def _put_parts(self, wanted: Parts, restored: dict[str, list[Any]]) -> None:
        """Takes the leaves that were restored, or None for those that stay. Under the lock."""
        about, reader, leaves = wanted.about, current_reader(), restored[""]
        for slot, leaf in zip(self._master.layout.slots, leaves, strict=True):
            if leaf is not None:
                self._made_of.pop(slot.path, None)
        with self._moving("restore") as meter:
            if not leaves or any(leaf is not None for leaf in leaves):
                self._master.version = max(self._master.version, about.get("version", 0) - 1)
                self._master.assign(_filled(leaves, self._master, meter), reader, meter)
            if (state := wanted.state) is not None:
                state.assign(_filled(restored["optimizer"], state, meter), reader, meter)
                self._updates.state = state
            elif about.get("mode") == "apply":
                self._updates.state = None
        if about:
            self._updates.resume(restored.get("pending"), about["pending"])


def _filled(leaves: list[Any], master: Master, meter: Meter) -> list[Any]:
    """Leaves, with the current ones in the place of None."""
    if all(leaf is not None for leaf in leaves):
        return leaves
    pairs = zip(leaves, master.leaves(meter), strict=True)
    return [now if leaf is None else leaf for leaf, now in pairs]


def joined_part(name: str, part: str) -> str:
    return f"{name}:{part}" if part else name


def check_names(items: dict[str, Any]) -> None:
    for name in items:
        if not name.isidentifier():
            raise VariablesError("items of a checkpoint are named as arguments are", got=repr(name))
    if not items:
        raise VariablesError("nothing is named", expected="params=..., step=... and the like")


@contextlib.contextmanager
def locked(items: dict[str, Any]) -> Iterator[None]:
    """Locks all variables, in the order in which steps lock them."""
    variables = {id(item): item for item in items.values() if isinstance(item, Savable)}
    with contextlib.ExitStack() as stack:
        for each in sorted(variables.values(), key=lambda each: each._number):
            stack.enter_context(each._lock)
        yield
