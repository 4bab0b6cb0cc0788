"""`Programs`: what the coordinator knows of the programs that tasks compile."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from stepcache.remote.messages import Message
from stepcache.serving.messages import MalformedMessageError

MAX_PROGRAMS = 4096


@dataclass
class _Program:
    """A program.

    Attributes:
        name: of its step.
        body, blob: of the message that defines it.
        number: by which tasks know it.
        ready: by task that has compiled it, what that says of the outputs.
        waiting: clients that wait for it, and the numbers of their commands.
        is_sent: whether the tasks have it.
    """

    name: str
    body: bytes
    blob: bytes | bytearray
    number: int
    ready: dict[int, bytes] = field(default_factory=dict)
    waiting: list[tuple[int, int]] = field(default_factory=list)
    is_sent: bool = False


class Programs:
    """The programs of all clients, by their digests. The least recently used ones are dropped."""

    def __init__(self, tasks: int):
        self._tasks = tasks
        self._programs: OrderedDict[bytes, _Program] = OrderedDict()
        self._by_number: dict[int, bytes] = {}
        self._last = 0

    def __iter__(self) -> Iterator[_Program]:
        return iter(self._programs.values())

    @property
    def compiling(self) -> list[str]:
        """Names of the programs that tasks compile."""
        return [each.name for each in self if each.is_sent and len(each.ready) < self._tasks]

    def started(self) -> None:
        """Notes that the tasks are started, and know no program yet."""
        for program in self:
            program.ready, program.is_sent, program.waiting = {}, False, []

    def left(self, client: int) -> None:
        """Notes that a client has left."""
        for program in self:
            program.waiting = [each for each in program.waiting if each[0] != client]

    def is_ready(self, task: int, number: int, body: bytes) -> list[tuple[int, int]]:
        """Notes that a task has compiled a program. Returns who has waited, once all have."""
        digest = self._by_number.get(number)
        if digest is None:
            return []
        program = self._programs[digest]
        program.ready[task] = body
        if len(program.ready) < self._tasks:
            return []
        waiting, program.waiting = program.waiting, []
        return waiting

    def has_failed(self, number: int) -> list[tuple[int, int]]:
        """Notes that a program cannot be compiled. Returns who has waited."""
        digest = self._by_number.pop(number, None)
        return self._programs.pop(digest).waiting if digest is not None else []

    def defined(self, message: Message) -> _Program | None:
        """Returns the program that a client names by its digest; None if its bytes are missing."""
        about = message.data(dict[str, Any])
        digest, name = about.get("digest"), about.get("name")
        if not isinstance(digest, bytes) or not isinstance(name, str):
            raise MalformedMessageError("a program has no digest, or no name")
        if digest not in self._programs:
            if not message.blob:
                return None
            if hashlib.sha256(message.blob).digest() != digest[:32]:
                raise MalformedMessageError("a program does not have the digest that it names")
            self._last += 1
            self._programs[digest] = _Program(name, message.body, message.blob, self._last)
            self._by_number[self._last] = digest
            self._trim()
        self._programs.move_to_end(digest)
        return self._programs[digest]

    def _trim(self) -> None:
        for digest in list(self._programs)[: max(0, len(self._programs) - MAX_PROGRAMS)]:
            if not self._programs[digest].waiting:
                del self._by_number[self._programs.pop(digest).number]
