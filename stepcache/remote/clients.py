"""What the coordinator knows of one client: what it has started, and what tasks have done of it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

MAX_FORMS = 4096
"""Call forms of a client that the coordinator, the tasks, and the client itself remember."""


@dataclass
class Form:
    """What the coordinator has to know of a call form."""

    program: int
    writes: tuple[int, ...]  # Numbers of variables.


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
    commands: int = 0
    bytes: int = 0
    _slowest: int = 0  # How many tasks have done no more than `told`.

    def starts(self, tasks: int) -> None:
        """Notes that tasks have been started, and know nothing yet."""
        self.done, self._slowest = [0] * tasks, tasks
        self.runs = self.told = 0
        self.failed.clear()
        self.forms.clear()

    def add_form(self, number: int, form: Form) -> None:
        """Remembers a call form. The oldest of too many is forgotten, as all others do."""
        self.forms[number] = form
        while len(self.forms) > MAX_FORMS:
            self.forms.popitem(last=False)

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
        return True

    def fails(self, task: int, number: int, why: str) -> None:
        """Notes that a run has failed on a task."""
        tasks, _ = self.failed.setdefault(number, (set(), why))
        tasks.add(task)
        if len(tasks) == len(self.done):
            del self.failed[number]

    def done_by_some(self) -> tuple[int, set[int], str] | None:
        """Returns a run that failed on some tasks and that others have done; None for none.

        Returns:
            Its number, the tasks on which it failed, and why.
        """
        for number, (tasks, why) in self.failed.items():
            others = (done for task, done in enumerate(self.done) if task not in tasks)
            if any(done >= number for done in others):
                return number, tasks, why
        return None

    def __str__(self) -> str:
        return f"client {self.name!r}" if self.name else f"client {self.process.partition('.')[0]}"
