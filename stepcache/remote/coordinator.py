"""`Coordinator`: puts the commands of all clients in one order for all tasks.

It knows no transport, no clock and no JAX, so that it can be tested by simulation. Each method
returns the messages to send.

The tasks of a pod have to run the same programs in the same order, and all of them or none. So a
client sends a command once, to the coordinator, which passes it on to every task. A client that
ends in the middle of anything cannot leave a step that some tasks have started and others not.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from stepcache.remote.messages import COMMANDS, Kind, Message, packed
from stepcache.serving.messages import MalformedMessageError
from stepcache.storage.load_markers import Process

MAX_PROGRAMS = 4096
MAX_FORMS = 4096
_MAX_NAME = 200


@dataclass
class Output:
    """What the coordinator sends: to all tasks, in this order, and to clients."""

    tasks: list[Message] = field(default_factory=list)
    clients: list[tuple[int, Message]] = field(default_factory=list)  # With their numbers.


@dataclass
class _Client:
    name: str
    process: str
    watches: str = ""
    done: list[int] = field(default_factory=list)  # By task: the last run that it has done.
    told: int = 0  # The last run that the client knows to be done on all tasks.
    slowest: int = 0  # How many tasks have done no more than that.
    commands: int = 0
    bytes: int = 0

    def starts(self, tasks: int) -> None:
        """Notes that tasks have done nothing yet."""
        self.done, self.told, self.slowest = [0] * tasks, 0, tasks

    def reached(self, task: int, number: int) -> bool:
        """Notes what a task has done. Returns whether all tasks have done more than before."""
        before, self.done[task] = self.done[task], max(self.done[task], number)
        if before != self.told or number <= before:
            return False
        self.slowest -= 1
        if self.slowest:
            return False
        self.told = min(self.done)
        self.slowest = self.done.count(self.told)
        return True


@dataclass
class _Program:
    name: str
    body: bytes
    blobs: tuple[Any, ...]
    number: int
    ready: dict[int, Any] = field(default_factory=dict)  # By task: what it says of its outputs.
    waiting: list[int] = field(default_factory=list)
    is_sent: bool = False


@dataclass
class _Variable:
    number: int
    leaves: list[Any]
    version: int = 0


class Coordinator:
    """Orders the commands of clients, and keeps the programs and the names of variables.

    Args:
        tasks: how many there are.

    Attributes:
        incarnation: raised each time the tasks are started.
    """

    def __init__(self, tasks: int):
        self.tasks, self.incarnation = tasks, 0
        self.devices: dict[str, Any] = {}  # What the tasks say of their devices.
        self._joined: set[int] = set()
        self._clients: dict[int, _Client] = {}
        self._last_client = self._last_program = self._last_variable = 0
        self._programs: OrderedDict[bytes, _Program] = OrderedDict()
        self._by_number: dict[int, bytes] = {}
        self._variables: dict[str, dict[str, _Variable]] = {}  # By name of the client, and own.
        self._forms: dict[int, OrderedDict[int, tuple[int, ...]]] = {}  # Variables they write.
        self._by_variable: dict[int, _Variable] = {}
        self.counts = {"commands": 0, "malformed": 0, "refused": 0, "messages": 0, "bytes": 0}

    @property
    def is_ready(self) -> bool:
        """Whether all tasks have joined."""
        return len(self._joined) == self.tasks

    # ---- tasks -----------------------------------------------------------------------------------

    def started(self) -> None:
        """Notes that the tasks are being started. All that they held is gone."""
        self.incarnation += 1
        self._joined.clear()
        self._variables.clear()
        self._by_variable.clear()
        self._forms.clear()
        for program in self._programs.values():
            program.ready, program.is_sent, program.waiting = {}, False, []
        for client in self._clients.values():
            client.starts(self.tasks)

    def joined(self, task: int, devices: dict[str, Any]) -> Output:
        """Notes that a task is ready for commands."""
        self._joined.add(task)
        self.devices = devices
        return Output(clients=list(map(self._welcomed, self._clients)) if self.is_ready else [])

    def lost(self, why: str, ranks: list[int]) -> Output:
        """Notes that tasks have ended. Every client is told; what the tasks held is gone."""
        body = packed(why=why, ranks=ranks)
        message = Message(Kind.LOST, incarnation=self.incarnation, body=body)
        return Output(clients=[(number, message) for number in self._clients])

    def from_task(self, task: int, message: Message) -> Output:
        """Takes a message of a task."""
        output = Output()
        if message.incarnation != self.incarnation:
            return output
        kind, client = message.kind, self._clients.get(message.client)
        if kind is Kind.READY:
            self._program_ready(task, message, output)
        elif kind is Kind.DONE and client is not None:
            if client.reached(task, message.number):
                output.clients.append((message.client, message._replace(number=client.told)))
        elif kind in (Kind.DATA, Kind.FAILED) and client is not None:
            output.clients.append((message.client, message._replace(value=task)))
        elif kind is Kind.FAILED and not message.client:
            self._program_failed(message, output)
        return output

    def _program_ready(self, task: int, message: Message, output: Output) -> None:
        digest = self._by_number.get(message.value)
        if digest is None:
            return
        program = self._programs[digest]
        program.ready[task] = message.body
        if len(program.ready) == self.tasks:
            waiting, program.waiting = program.waiting, []
            output.clients += [(number, self._ready(program)) for number in waiting]

    def _program_failed(self, message: Message, output: Output) -> None:
        digest = self._by_number.pop(message.value, None)
        if digest is None:
            return
        program = self._programs.pop(digest)
        output.clients += [(number, message) for number in program.waiting]

    def _ready(self, program: _Program) -> Message:
        body = next(iter(program.ready.values()))
        return Message(Kind.READY, 0, self.incarnation, 0, program.number, body)

    # ---- clients ---------------------------------------------------------------------------------

    def from_client(self, number: int, message: Message) -> Output:
        """Takes a message of a client.

        Args:
            number: of the client; 0 if it has not introduced itself.
            message: the message.

        Returns:
            What to send. Of a client that introduces itself the first message is its own.

        Raises:
            MalformedMessageError: it is no message that a client sends.
        """
        self.counts["messages"] += 1
        self.counts["bytes"] += message.size_bytes
        if message.kind is Kind.HELLO:
            return self._hello(message)
        client = self._clients.get(number)
        if client is None:
            raise MalformedMessageError("it is of a client that has not introduced itself")
        client.commands += 1
        client.bytes += message.size_bytes
        if message.kind is Kind.BYE:
            return self.left(number)
        if message.kind is Kind.STATUS:
            body = packed(**self.status())
            return Output(clients=[(number, Message(Kind.STATUS, number, body=body))])
        if message.incarnation != self.incarnation or not self.is_ready:
            return self._refuse(number, message, "the tasks were started again", "restarted")
        if message.kind is Kind.OPEN:
            return self._open(number, client, message)
        if message.kind not in COMMANDS:
            raise MalformedMessageError(f"no client sends {message.kind.name}")
        if client.watches and message.kind not in (Kind.FETCH, Kind.FREE):
            return self._refuse(number, message, "this client only watches", "read only")
        return self._command(number, client, message)

    def _hello(self, message: Message) -> Output:
        about = message.data(dict[str, Any])
        name, process, watches = (about.get(key, "") for key in ("name", "process", "watch"))
        if not all(isinstance(each, str) for each in (name, process, watches)) or (
            max(map(len, (name, process, watches))) > _MAX_NAME
        ):
            raise MalformedMessageError("a client has no name")
        if Process.parse(process) is None:  # Nobody could tell when it has ended.
            raise MalformedMessageError("a client names no process")
        self._last_client += 1
        number = self._last_client
        client = self._clients[number] = _Client(name, process, watches)
        client.starts(self.tasks)
        taken = [
            other.process
            for n, other in self._clients.items()
            if n != number and name and other.name == name and not other.watches and not watches
        ]
        if taken:
            why = f"a client named {name!r} is connected: process {taken[0]}"
            output = self._refuse(number, message, why, "name")
            del self._clients[number]
            return output
        if not self.is_ready:  # It is welcomed again when they are.
            return Output(clients=[(number, Message(Kind.WELCOME, number))])
        return Output(clients=[self._welcomed(number)])

    def _welcomed(self, number: int) -> tuple[int, Message]:
        body = packed(tasks=self.tasks, **self.devices)
        return number, Message(Kind.WELCOME, number, self.incarnation, body=body)

    def left(self, number: int) -> Output:
        """Notes that a client has left, or has ended. A client without a name leaves nothing."""
        client = self._clients.pop(number, None)
        if client is None:
            return Output()
        self._forms.pop(number, None)
        for program in self._programs.values():
            program.waiting = [each for each in program.waiting if each != number]
        variables: list[int] = []
        if not client.name:
            own = self._variables.pop(_owner(number, client), {})
            variables = [each.number for each in own.values()]
            for each in variables:
                self._by_variable.pop(each, None)
        if not self.is_ready:
            return Output()
        body = packed(variables=variables)
        return Output([Message(Kind.DROP, number, self.incarnation, body=body)])

    def _refuse(self, number: int, message: Message, why: str, kind: str) -> Output:
        self.counts["refused"] += 1
        body = packed(why=why, kind=kind)
        about = self.incarnation, message.number, int(message.kind)
        reply = Message(Kind.REFUSED, number, *about, body)
        return Output(clients=[(number, reply)])

    # ---- variables -------------------------------------------------------------------------------

    def _open(self, number: int, client: _Client, message: Message) -> Output:
        about = message.data(dict[str, Any])
        name, leaves = about.get("name"), about.get("leaves")
        if not isinstance(name, str) or not isinstance(leaves, list) or len(name) > _MAX_NAME:
            raise MalformedMessageError("variables have no name, or no types")
        own = self._variables.setdefault(client.watches or _owner(number, client), {})
        found = own.get(name)
        is_new = found is None
        if found is None and client.watches:
            return self._refuse(number, message, f"there are no variables {name!r}", "unknown")
        if found is not None and not leaves:
            leaves = found.leaves
        if found is not None and found.leaves != leaves:
            why = f"variables {name!r} are there, with other leaves"
            return self._refuse(number, message, why, "other leaves")
        if found is None:
            self._last_variable += 1
            found = own[name] = _Variable(self._last_variable, leaves)
            self._by_variable[found.number] = found
        body = packed(new=is_new, version=found.version, leaves=found.leaves)
        reply = Message(Kind.OPENED, number, self.incarnation, message.number, found.number, body)
        return Output(clients=[(number, reply)])

    # ---- commands --------------------------------------------------------------------------------

    def _command(self, number: int, client: _Client, message: Message) -> Output:
        self.counts["commands"] += 1
        message = message._replace(client=number)
        if message.kind is Kind.PROGRAM:
            return self._program(number, message)
        if message.kind is Kind.RUN:
            self._note_writes(number, message)
        elif (
            message.kind is Kind.BIND
            and (found := self._by_variable.get(message.value)) is not None
        ):
            found.version += 1
        return Output([message])

    def _note_writes(self, number: int, message: Message) -> None:
        forms = self._forms.setdefault(number, OrderedDict())
        if message.body and (writes := _form_writes(message)) is not None:
            forms[message.value] = writes
            while len(forms) > MAX_FORMS:
                forms.popitem(last=False)
        if message.value not in forms:
            raise MalformedMessageError(f"there is no call form {message.value}")
        for each in forms[message.value]:
            if (found := self._by_variable.get(each)) is not None:
                found.version += 1

    def _program(self, number: int, message: Message) -> Output:
        about = message.data(dict[str, Any])
        digest, name = about.get("digest"), about.get("name")
        if not isinstance(digest, bytes) or not isinstance(name, str):
            raise MalformedMessageError("a program has no digest, or no name")
        program = self._programs.get(digest)
        if program is None:
            if not message.blobs:
                reply = Message(Kind.NEED_PROGRAM, number, self.incarnation, message.number)
                return Output(clients=[(number, reply)])
            if hashlib.sha256(bytes(message.blobs[0])).digest() != digest[:32]:
                raise MalformedMessageError("a program does not have the digest that it names")
            self._last_program += 1
            program = _Program(name, message.body, tuple(message.blobs), self._last_program)
            self._programs[digest] = program
            self._by_number[program.number] = digest
            self._trim()
        self._programs.move_to_end(digest)
        if len(program.ready) == self.tasks:
            return Output(clients=[(number, self._ready(program))])
        program.waiting.append(number)
        if program.is_sent:
            return Output()
        program.is_sent = True
        command = Message(
            Kind.PROGRAM, 0, self.incarnation, 0, program.number, program.body, program.blobs
        )
        return Output([command])

    def _trim(self) -> None:
        for digest in list(self._programs)[: max(0, len(self._programs) - MAX_PROGRAMS)]:
            program = self._programs[digest]
            if not program.waiting:
                del self._programs[digest], self._by_number[program.number]

    # ---- what it holds ---------------------------------------------------------------------------

    def processes(self) -> list[tuple[int, str]]:
        """Returns the number and the process of each client."""
        return [(number, client.process) for number, client in self._clients.items()]

    @property
    def clients(self) -> int:
        """How many clients are connected."""
        return len(self._clients)

    def status(self) -> dict[str, Any]:
        """Returns what is held, as plain data."""
        return {
            "tasks": self.tasks,
            "joined": len(self._joined),
            "incarnation": self.incarnation,
            "programs": [[each.name, each.number] for each in self._programs.values()],
            "variables": [
                [owner, name, each.version, len(each.leaves)]
                for owner, own in self._variables.items()
                for name, each in own.items()
            ],
            "clients": [
                [n, each.name, each.process, each.told, each.commands, each.bytes]
                for n, each in self._clients.items()
            ],
            "counts": dict(self.counts),
        }


def _owner(number: int, client: _Client) -> str:
    return client.name or f"#{number}"


def _form_writes(message: Message) -> tuple[int, ...] | None:
    """Returns the variables that a new call form writes; None if the message brings no form."""
    about = message.data(dict[str, Any])
    if "form" not in about:
        return None
    writes = about["form"].get("writes") if isinstance(about["form"], dict) else None
    if not isinstance(writes, list) or not all(isinstance(each, int) for each, *_ in writes):
        raise MalformedMessageError("a call form does not say what it writes")
    return tuple(each for each, *_ in writes)
