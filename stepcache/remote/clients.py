"""What the coordinator knows of one client: what it has started, and what tasks have done of it."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stepcache.link import plain
from stepcache.link.processes import Process
from stepcache.remote.messages import BLOCKS, Message, packed, places_in
from stepcache.serving.messages import MalformedMessageError

MAX_NAME = 200
MAX_FORMS = 4096
"""Call forms of a client that the coordinator, the tasks, and the client itself remember."""


@dataclass
class Form:
    """What the coordinator has to know of a call form."""

    program: int
    writes: tuple[int, ...]  # Numbers of variables.

    @classmethod
    def of(cls, about: dict[str, Any]) -> Form | None:
        """Returns the call form that the body of a run brings; None for none."""
        if "form" not in about:
            return None
        form = about["form"] if isinstance(about["form"], dict) else {}
        program, writes = form.get("program"), form.get("writes")
        if not isinstance(program, int) or not plain.fits(writes, list[tuple[int, int, int]]):
            raise MalformedMessageError("a call form does not say what it runs and writes")
        return cls(program, tuple(variable for variable, *_ in writes or ()))


@dataclass
class Client:
    """A client.

    Attributes:
        name: empty for one whose state is dropped when it ends.
        process: that it is.
        watches: name of another client, whose variables it only reads; empty for none.
        runs: the last run that was passed on to the tasks.
        latest: program of that run.
        done: by task, the last run that it has done.
        told: the last run that the client knows to be done on all tasks.
        failed: by run, which tasks have said that it failed, and why; until all have.
        forms: its call forms, by number.
        opened: opens the blocks of shared memory that it names.
        blocks: those of runs that some task has not done, and the numbers of these runs.
        broken: why nothing that it sends is carried out any more; empty if it is.
        not_dropped_by: once it has left, the tasks that have not dropped what it held.
        commands, bytes: how many messages it has sent, and their size.
    """

    name: str
    process: str
    watches: str = ""
    runs: int = 0
    latest: int = 0
    done: list[int] = field(default_factory=list)
    told: int = 0
    failed: dict[int, tuple[set[int], str]] = field(default_factory=dict)
    forms: OrderedDict[int, Form] = field(default_factory=OrderedDict)
    opened: Any = None
    blocks: deque[tuple[int, list[Any]]] = field(default_factory=deque)
    broken: str = ""
    not_dropped_by: set[int] = field(default_factory=set)
    commands: int = 0
    bytes: int = 0
    _slowest: int = 0  # How many tasks have done no more than `told`.

    @classmethod
    def introduced(cls, message: Message, opened: Any) -> Client:
        """Returns the client that introduces itself by a message."""
        about = message.data(dict[str, Any])
        found = [about.get(key, "") for key in ("name", "process", "watch")]
        if not all(isinstance(each, str) and len(each) <= MAX_NAME for each in found):
            raise MalformedMessageError("a client has no name")
        if Process.parse(found[1]) is None:  # Nobody could tell when it has ended.
            raise MalformedMessageError("a client names no process")
        return cls(*found, opened=opened)

    def starts(self, tasks: int) -> None:
        """Notes that tasks have been started, and know nothing yet."""
        self.done, self._slowest = [0] * tasks, tasks
        self.runs = self.told = 0
        for each in (self.failed, self.forms, self.blocks):
            each.clear()

    def form(self, number: int, about: dict[str, Any]) -> Form:
        """Returns the call form of a run, which it brings itself, or an earlier run has brought.

        The oldest of too many is forgotten, as all others do who know them.
        """
        if (new := Form.of(about)) is not None:
            self.forms[number] = new
            while len(self.forms) > MAX_FORMS:
                self.forms.popitem(last=False)
        if number not in self.forms:
            raise MalformedMessageError(f"there is no call form {number}")
        return self.forms[number]

    def with_blocks(
        self, message: Message, about: dict[str, Any]
    ) -> tuple[Message, list[np.ndarray]]:
        """Opens the shared memory that a command and its body name; raises `OSError` if it cannot.

        Returns the command, which names the memory as this process has opened it; and the memory.
        """
        if not (places := places_in(about)):
            return message, []
        passed = [self.opened.passed_on(place) for place in places]
        body = packed(**{**about, BLOCKS: [place for place, _ in passed]})
        return message._replace(body=body), [data for _, data in passed]

    def reached(self, task: int, number: int) -> bool:
        """Notes what a task has done. Returns whether all tasks have done more than before."""
        before, self.done[task] = self.done[task], max(self.done[task], number)
        if before != self.told or number <= before:
            return False
        self._slowest -= 1
        if self._slowest:
            return False
        self.told = min(self.done)
        self._slowest = self.done.count(self.told)
        while self.blocks and self.blocks[0][0] <= self.told:
            self.blocks.popleft()
        return True

    def fails(self, task: int, number: int, why: str) -> None:
        """Notes that a run has failed on a task."""
        tasks, _ = self.failed.setdefault(number, (set(), why))
        tasks.add(task)
        if len(tasks) == len(self.done):
            del self.failed[number]

    def apart(self, run: int, tasks: Iterable[int], why: str) -> tuple[str, list[int]]:
        """Returns what to say of a run that failed on some tasks alone, and these."""
        who = ", ".join(f"task {task}" for task in sorted(tasks))
        return f"run {run} of {self} failed on {who} alone: {why}", sorted(tasks)

    def done_by_some(self) -> tuple[str, list[int]] | None:
        """Returns the same of a run that others have done; None for none."""
        for number, (tasks, why) in self.failed.items():
            others = (done for task, done in enumerate(self.done) if task not in tasks)
            if any(done >= number for done in others):
                return self.apart(number, tasks, why)
        return None

    def __str__(self) -> str:
        return f"client {self.name!r}" if self.name else f"client {self.process.partition('.')[0]}"


def failed_alone(clients: Mapping[int, Client]) -> dict[tuple[int, int], tuple[str, list[int]]]:
    """Returns runs that failed on some tasks, and that the others have come to.

    Those may wait in a collective, for ever. By client and number, it is what `apart` says.
    """
    return {
        (number, run): client.apart(run, tasks, why)
        for number, client in clients.items()
        for run, (tasks, why) in client.failed.items()
        if all(done + 1 >= run for n, done in enumerate(client.done) if n not in tasks)
    }
