"""`Coordinator`: puts the commands of all clients in one order for all tasks.

It knows no transport, no clock and no JAX, so that it can be tested by simulation. Each method
returns the messages to send.

The tasks of a pod have to run the same programs in the same order, and all of them or none. So a
client sends a command once, to the coordinator, which passes it on to every task. A client that
ends in the middle of anything cannot leave a step that some tasks have started and others not: the
coordinator holds the memory that a command names before it passes the command on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stepcache.errors import first_line
from stepcache.remote.clients import MAX_NAME, Client, failed_alone
from stepcache.remote.messages import COMMANDS, Kind, Message, packed
from stepcache.remote.program_table import Programs
from stepcache.serving.messages import MalformedMessageError
from stepcache.serving.shared_memory import Opened


@dataclass
class Output:
    """What the coordinator sends: to all tasks, in this order, and to clients.

    Attributes:
        tasks: messages.
        clients: messages, with the numbers of the clients.
        lost: why the tasks have to be ended, and which are to blame; None if they need not.
    """

    tasks: list[Message] = field(default_factory=list)
    clients: list[tuple[int, Message]] = field(default_factory=list)
    lost: tuple[str, list[int]] | None = None


@dataclass
class _Variable:
    number: int
    leaves: list[Any]
    version: int = 0


class Coordinator:
    """Orders the commands of clients, and keeps the programs and the names of variables.

    Args:
        tasks: how many there are.
        opened: makes what opens the shared memory of a client.

    Attributes:
        incarnation: raised each time the tasks are started.
    """

    def __init__(self, tasks: int, opened: Callable[[], Any] = Opened):
        self._new_opened = opened
        self.tasks, self.incarnation = tasks, 0
        self.devices: dict[str, Any] = {}  # What the tasks say of their devices.
        self._joined: dict[int, str] = {}  # Tasks, and their processes.
        self._clients: dict[int, Client] = {}
        self._left: dict[int, Client] = {}  # Whose commands tasks may still carry out.
        self._last_client = self._last_variable = 0
        self._programs = Programs(tasks)
        self._variables: dict[str, dict[str, _Variable]] = {}  # By name of the client, and own.
        self._by_variable: dict[int, _Variable] = {}
        self.counts = {"commands": 0, "malformed": 0, "refused": 0, "messages": 0, "bytes": 0}

    @property
    def is_ready(self) -> bool:
        """Whether all tasks have joined."""
        return len(self._joined) == self.tasks

    def started(self) -> None:
        """Notes that the tasks are being started. All that they held is gone."""
        self.incarnation += 1
        self._joined.clear()
        self._variables.clear()
        self._by_variable.clear()
        self._programs.started()
        self._left.clear()
        for client in self._clients.values():
            client.starts(self.tasks)

    def joined(self, task: int, devices: dict[str, Any]) -> Output:
        """Notes that a task is ready for commands."""
        self._joined[task] = str(devices.get("process", ""))
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
        kind = message.kind
        client = self._clients.get(message.client) or self._left.get(message.client)
        if kind is Kind.FAILED and message.data(dict[str, Any]).get("is_lost"):
            output.lost = message.data()["why"], []
            return output
        if kind is Kind.READY:
            waiting = self._programs.is_ready(task, message.value, message.body)
            reply = Message(Kind.READY, 0, self.incarnation, 0, message.value, message.body)
            output.clients += [(each, reply._replace(number=n)) for each, n in waiting]
        elif kind is Kind.DONE and client is not None:
            if client.reached(task, message.number):
                output.clients.append((message.client, message._replace(number=client.told)))
            output.lost = client.done_by_some()
        elif kind in (Kind.DATA, Kind.FAILED) and client is not None:
            output.clients.append((message.client, message._replace(value=task)))
            if kind is Kind.FAILED and message.value in (Kind.RUN, Kind.PUT):
                client.fails(task, message.number, message.data(dict[str, Any]).get("why", ""))
                output.lost = client.done_by_some()
        elif kind is Kind.DROP and client is not None:
            client.not_dropped_by.discard(task)
            if not client.not_dropped_by:
                self._left.pop(message.client, None)  # No command is left that names its memory.
        elif kind is Kind.FAILED and not message.client:
            waiting = self._programs.has_failed(message.value)
            output.clients += [(each, message._replace(number=n)) for each, n in waiting]
        return output

    def failed_alone(self) -> dict[tuple[int, int], tuple[str, list[int]]]:
        """Returns runs that failed on some tasks, and that the others have come to."""
        return failed_alone(self._served)

    @property
    def _served(self) -> dict[int, Client]:
        """Clients whose commands tasks may still carry out; first those that have left."""
        return self._left | self._clients

    @property
    def compiling(self) -> list[str]:
        """Names of the programs that tasks compile."""
        return self._programs.compiling

    def where(self) -> str:
        """Returns what each task has to do, in words."""
        names = {program.number: program.name for program in self._programs}
        texts = [f"{name!r} is compiled" for name in self.compiling]
        for task in range(self.tasks):
            behind = [
                f"run {client.done[task] + 1} of {client} ({client.runs} are started, the last of "
                f"{names.get(client.latest, '?')!r})"
                for client in self._served.values()
                if client.done[task] < client.runs
            ]
            texts.append(f"task {task}: {', '.join(behind) or 'has nothing to do'}")
        return "; ".join(texts)

    def from_client(self, number: int, message: Message) -> Output:
        """Takes a message of a client; of number 0 if that has not introduced itself.

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
            raise MalformedMessageError("its client has not introduced itself")
        client.commands += 1
        client.bytes += message.size_bytes
        if message.kind is Kind.STATUS:
            reply = Message(Kind.STATUS, number, 0, message.number, 0, packed(**self.status()))
            return Output(clients=[(number, reply)])
        if message.incarnation != self.incarnation or not self.is_ready:
            return self._refuse(number, message, "the tasks were started again", "restarted")
        if message.kind is Kind.OPEN:
            return self._open(number, client, message)
        if message.kind not in COMMANDS or message.kind is Kind.DROP:
            raise MalformedMessageError(f"no client sends {message.kind.name}")
        if message.kind not in (Kind.FETCH, Kind.FREE):
            if client.watches:
                return self._refuse(number, message, "this client only watches", "read only")
            if client.broken:
                return self._refuse(number, message, client.broken, "broken")
        return self._command(number, client, message)

    def _hello(self, message: Message) -> Output:
        client = Client.introduced(message, self._new_opened())
        client.starts(self.tasks)
        self._last_client += 1
        number = self._last_client
        name, watches = client.name, client.watches
        taken = [
            other.process
            for other in self._clients.values()
            if name and other.name == name and not other.watches and not watches
        ]
        if taken:
            why = f"a client named {name!r} is connected: process {taken[0]}"
            return self._refuse(number, message, why, "name")
        self._clients[number] = client
        if not self.is_ready:  # It is welcomed again when they are.
            return Output(clients=[(number, Message(Kind.WELCOME, number))])
        return Output(clients=[self._welcomed(number)])

    def _welcomed(self, number: int) -> tuple[int, Message]:
        body = packed(tasks=self.tasks, **self.devices)
        return number, Message(Kind.WELCOME, number, self.incarnation, body=body)

    def left(self, number: int) -> Output:
        """Notes that a client has left, or has ended. A client without a name leaves nothing.

        What it has started runs to its end on all tasks, which then drop what it held.
        """
        client = self._clients.pop(number, None)
        if client is None:
            return Output()
        self._programs.left(number)
        variables: list[int] = []
        if not client.name:
            own = self._variables.pop(_owner(number, client), {})
            variables = [each.number for each in own.values()]
            for each in variables:
                self._by_variable.pop(each, None)
        if not self.is_ready:
            return Output()
        self._left[number], client.not_dropped_by = client, set(range(self.tasks))
        body = packed(variables=variables)
        return Output([Message(Kind.DROP, number, self.incarnation, body=body)])

    def _refuse(self, number: int, message: Message, why: str, kind: str) -> Output:
        self.counts["refused"] += 1
        body = packed(why=why, kind=kind)
        about = self.incarnation, message.number, int(message.kind)
        reply = Message(Kind.REFUSED, number, *about, body)
        return Output(clients=[(number, reply)])

    def _open(self, number: int, client: Client, message: Message) -> Output:
        about = message.data(dict[str, Any])
        name, leaves = about.get("name"), about.get("leaves")
        if not isinstance(name, str) or not isinstance(leaves, list) or len(name) > MAX_NAME:
            raise MalformedMessageError("variables have no name, or no types")
        own = self._variables.setdefault(client.watches or _owner(number, client), {})
        found = own.get(name)
        if (is_new := found is None) and client.watches:
            return self._refuse(number, message, f"there are no variables {name!r}", "unknown")
        if found is not None and leaves and found.leaves != leaves:
            why = f"variables {name!r} are there, with other leaves"
            return self._refuse(number, message, why, "other leaves")
        if found is None:
            self._last_variable += 1
            found = own[name] = _Variable(self._last_variable, leaves)
            self._by_variable[found.number] = found
        body = packed(new=is_new, version=found.version, leaves=found.leaves)
        reply = Message(Kind.OPENED, number, self.incarnation, message.number, found.number, body)
        return Output(clients=[(number, reply)])

    def _command(self, number: int, client: Client, message: Message) -> Output:
        self.counts["commands"] += 1
        message = message._replace(client=number)
        kind, blocks = message.kind, []
        if kind is Kind.PROGRAM:
            return self._program(number, message)
        about: dict[str, Any] = {}
        if message.body and kind in (Kind.RUN, Kind.PUT):  # They may bring values.
            about = message.data(dict[str, Any])
            try:
                message, blocks = client.with_blocks(message, about)
            except OSError as error:
                # It has just ended, or other processes cannot see its memory. Without this command
                # those after it would have another meaning.
                client.broken = f"memory of this client cannot be opened: {first_line(error)}"
                return self._refuse(number, message, client.broken, "broken")
        if kind is Kind.RUN:
            form = client.form(message.value, about)
            client.latest = form.program
            for each in form.writes:
                if (found := self._by_variable.get(each)) is not None:
                    found.version += 1
        elif kind is Kind.BIND and (found := self._by_variable.get(message.value)) is not None:
            found.version += 1
        if kind in (Kind.RUN, Kind.PUT):
            client.runs = message.number
            if blocks:
                client.blocks.append((message.number, blocks))
        return Output([message])

    def _program(self, number: int, message: Message) -> Output:
        program = self._programs.defined(message)
        about = number, self.incarnation, message.number
        if program is None:
            return Output(clients=[(number, Message(Kind.NEED_PROGRAM, *about))])
        if len(program.ready) == self.tasks:
            reply = Message(Kind.READY, *about, program.number, program.ready[0])
            return Output(clients=[(number, reply)])
        program.waiting.append((number, message.number))
        if program.is_sent:
            return Output()
        program.is_sent = True
        body = program.number, program.body, program.blob
        return Output([Message(Kind.PROGRAM, 0, self.incarnation, 0, *body)])

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
            "processes": [self._joined.get(task, "") for task in range(self.tasks)],
            "incarnation": self.incarnation,
            "programs": [[each.name, each.number] for each in self._programs],
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


def _owner(number: int, client: Client) -> str:
    return client.name or f"#{number}"
