"""A task: a process that compiles programs, holds arrays, and runs what the coordinator orders.

    python -m stepcache.remote.task ADDRESS RANK TASKS DEVICES POD_ADDRESS INCARNATION

Commands are carried out one after the other, in the order in which they come. A program is a step
of stepcache here, so that its executable is kept on disk like any other, and in a pod the tasks
agree on it, one compiles it and the others load it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import signal
import sys
import threading
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import export
from jax.sharding import AxisType, NamedSharding

from stepcache._process_hooks import signals_handled
from stepcache.errors import RankLostError, first_line
from stepcache.jaxcompat.specs import decode_spec
from stepcache.link.processes import Process
from stepcache.remote.clients import MAX_FORMS
from stepcache.remote.messages import Kind, Message, Values, decode, packed, receive_array
from stepcache.remote.task_arrays import Arrays, Failed, RunFailed
from stepcache.remote.task_programs import Program
from stepcache.serving.channel import Channel
from stepcache.serving.shared_memory import Opened, Pool
from stepcache.variables.packing import is_key_type

_REPORTED_AT_ONCE = 8  # Of runs that are done while others are under way.
_IN_FLIGHT = 4  # Runs that are dispatched before the oldest one is waited for.


class Task:
    """Carries out commands.

    Args:
        channel: to the coordinator.
        incarnation: of the tasks.
        shares: whether values that are sent may be in shared memory.
    """

    def __init__(self, channel: Channel[Message], incarnation: int, shares: bool = True):
        self._channel, self._incarnation = channel, incarnation
        self._arrays = Arrays()
        self._programs: dict[int, Any] = {}
        self._forms: dict[int, OrderedDict[int, dict[str, Any]]] = {}
        self._meshes: dict[tuple, jax.sharding.Mesh] = {}
        self._pool = Pool() if shares else None
        self._opened: defaultdict[int, Opened] = defaultdict(Opened)  # By client.
        self._sent: dict[int, dict[int, Any]] = {}  # Blocks of replies, by client and fetch.
        self._pending: deque[tuple[int, int, Any]] = deque()
        self._waits = jax.process_count() > 1 and jax.default_backend() == "cpu"

    def run(self) -> None:
        """Carries out commands. Raises `OSError` when the coordinator has ended."""
        while True:
            message = self._channel.receive()
            if message is not None:
                self._carry_out(message)
            if message is None and not self._pending:
                self._channel.wait()
            elif message is None or len(self._pending) > _IN_FLIGHT:
                self._finish()

    def _send(self, message: Message) -> None:
        self._channel.send(message._replace(incarnation=self._incarnation).encoded())
        while not self._channel.flush():
            self._channel.wait(to_send=True)

    def _carry_out(self, message: Message) -> None:
        try:
            getattr(self, f"_{message.kind.name.lower()}")(message)
        except Exception as error:
            why = str(error) if isinstance(error, RunFailed) else first_line(error)
            self._failed(message, why, isinstance(error, RankLostError))

    def _failed(self, message: Message, why: str, is_lost: bool) -> None:
        kind = message.kind
        value = message.value if kind is Kind.PROGRAM else kind
        rest = packed(why=why, command=kind.name, is_lost=is_lost)
        self._send(Message(Kind.FAILED, message.client, 0, message.number, value, rest))
        if kind in (Kind.RUN, Kind.PUT):
            self._pending.append((message.client, message.number, None))

    def _finish(self) -> None:
        """Waits for the oldest run that was dispatched, and reports it."""
        client, number, arrays = self._pending.popleft()
        if arrays is not None:
            try:
                jax.block_until_ready([each for each in arrays if not each.is_deleted()])
            except Exception as error:
                body = packed(why=first_line(error), command=Kind.RUN.name)
                self._send(Message(Kind.FAILED, client, 0, number, Kind.RUN, body))
        if number % _REPORTED_AT_ONCE == 0 or not self._is_done_next(client):
            self._send(Message(Kind.DONE, client, 0, number))

    def _is_done_next(self, client: int) -> bool:
        """Returns whether the next run is of this client, and is done already."""
        if not self._pending or self._pending[0][0] != client:
            return False
        if not (arrays := self._pending[0][2]) or arrays[0].is_deleted():
            return True
        return hasattr(arrays[0], "is_ready") and arrays[0].is_ready()  # Random keys do not say.

    def _form(self, message: Message) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the call form of a run, and the body of its message."""
        about = message.data(dict[str, Any]) if message.body else {}
        forms = self._forms.setdefault(message.client, OrderedDict())
        if "form" in about:
            forms[message.value] = about["form"]
            while len(forms) > MAX_FORMS:
                forms.popitem(last=False)
        return forms[message.value], about

    def _values(self, message: Message, about: dict[str, Any]) -> Callable[[Any], np.ndarray]:
        """Returns what finds the values that a message brings, by their descriptions."""
        return lambda row: receive_array(row, about, self._opened[message.client], message.blob)

    def _run(self, message: Message) -> None:
        form, about = self._form(message)
        program = self._programs.get(form["program"])
        if program is None:
            raise RunFailed(f"there is no program {form['program']}")
        while self._waits and self._pending:  # Reported before this run, which may never end.
            self._finish()
        client, number = message.client, message.number
        leaves: list[Any] = []
        rows, value_of = iter(about.get("feeds", [])), self._values(message, about)
        for ref in form["refs"]:
            if ref[0] == "f":
                shardings = program.in_shardings[len(leaves) : len(leaves) + ref[1]]
                leaves += [self._placed(next(rows, None), each, value_of) for each in shardings]
            else:
                leaves += self._arrays.look_up(client, number, ref)
        try:
            for leaf in leaves:
                if isinstance(leaf, Failed):
                    raise RunFailed(leaf.why)
            outputs = program.call(*leaves)
            if self._waits:  # Processes that share CPUs may deadlock with several runs in flight.
                jax.block_until_ready(outputs)
        except Exception as error:
            why = str(error) if isinstance(error, RunFailed) else first_line(error)
            self._keep(client, number, form, program.outputs_of_failed(leaves, Failed(why)))
            raise
        self._keep(client, number, form, outputs)
        self._pending.append((client, number, outputs))

    def _keep(self, client: int, number: int, form: dict[str, Any], outputs: list[Any]) -> None:
        """Keeps the outputs of a run, and drops what it has taken."""
        for ref in form["takes"]:
            self._arrays.take(client, number, ref)
        kept = list(outputs)
        for variable, first, count in form["writes"]:
            self._arrays.bind(variable, kept[first : first + count])
            kept[first : first + count] = [None] * count
        self._arrays.keep(client, number, kept)

    def _placed(self, row: Any, sharding: Any, value_of: Callable[[Any], np.ndarray]) -> Any:
        """Returns an array of a value that a message brings, or what stands for it."""
        try:
            array, keys = row if len(row) == 2 else (row, None)
            data = value_of(array)
            own = sharding if keys is None else _of_key_data(sharding)
            made = jax.make_array_from_callback(
                data.shape, own, lambda index: np.array(data[index])
            )
            return made if keys is None else _wrapped(sharding, keys)(made)
        except Exception as error:
            return Failed(first_line(error))

    def _put(self, message: Message) -> None:
        about = message.data(dict[str, Any])
        mesh, value_of = self._mesh(about["mesh"]), self._values(message, about)
        arrays = [
            self._placed(row, NamedSharding(mesh, decode_spec(spec)), value_of)
            for row, spec in zip(about["feeds"], about["specs"], strict=True)
        ]
        self._arrays.keep(message.client, message.number, arrays)
        for each in arrays:
            if isinstance(each, Failed):
                raise RunFailed(each.why)
        self._pending.append((message.client, message.number, [*arrays]))

    def _bind(self, message: Message) -> None:
        client, number = message.client, message.number
        refs = message.data(dict[str, Any])["refs"]
        found = [each for ref in refs for each in self._arrays.look_up(client, number, ref)]
        for ref in refs:
            self._arrays.take(client, number, ref)
        self._arrays.bind(message.value, found)

    def _free(self, message: Message) -> None:
        self._arrays.free(message.client, message.data(dict[str, Any])["rows"])

    def _drop(self, message: Message) -> None:
        # Its runs end first. Until all tasks have dropped it, the coordinator knows the client, and
        # notices a run that fails on one task alone, while the others wait in it.
        while any(client == message.client for client, *_ in self._pending):
            self._finish()
        self._arrays.drop(message.client, message.data(dict[str, Any])["variables"])
        for each in (self._forms, self._sent, self._opened):
            each.pop(message.client, None)
        self._send(Message(Kind.DROP, message.client))

    def _mesh(self, code: Any) -> jax.sharding.Mesh:
        names, sizes, kinds = (tuple(each) for each in code)
        if (names, sizes, kinds) not in self._meshes:
            if math.prod(sizes) != len(jax.devices()):
                raise RunFailed(
                    f"the mesh {dict(zip(names, sizes, strict=True))} has {math.prod(sizes)} "
                    f"devices, and the tasks have {len(jax.devices())}"
                )
            types = tuple(getattr(AxisType, kind) for kind in kinds)
            self._meshes[names, sizes, kinds] = jax.make_mesh(sizes, names, axis_types=types)
        return self._meshes[names, sizes, kinds]

    def _program(self, message: Message) -> None:
        about = message.data(dict[str, Any])
        mesh = self._mesh(about["mesh"])
        self._programs[message.value] = program = Program(about, message.blob, mesh)
        body = packed(specs=program.compile(), devices=len(jax.devices()))
        self._send(Message(Kind.READY, 0, 0, 0, message.value, body))

    def _fetch(self, message: Message) -> None:
        about = message.data(dict[str, Any])
        if about["from"] == 1 and jax.process_index():
            return  # All tasks have the whole of it.
        values, rows = Values(self._pool), []
        where = message.client, message.value
        found = [each for ref in about["refs"] for each in self._arrays.look_up(*where, ref)]
        for each in found:
            if isinstance(each, Failed):
                raise RunFailed(each.why)
        jax.block_until_ready(found)  # JAX ends the process that reads what a step failed to make.
        for index, array in enumerate(() if about["only_look"] else found):
            rows += [[index, bounds, values.add(data)] for bounds, data in _own_shards(array)]
        sent = self._sent.setdefault(message.client, {})
        for number in [number for number in sent if number < about["first"]]:
            del sent[number]  # The client has locked what it still reads.
        sent[message.number] = values.kept
        body = packed(rows=rows, **values.fields)
        self._send(Message(Kind.DATA, message.client, 0, message.number, 0, body, values.blob))


def _of_key_data(sharding: Any) -> Any:
    """The sharding of the numbers that random keys are made of."""
    return NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*sharding.spec))


@functools.lru_cache(maxsize=256)
def _wrapped(sharding: Any, keys: str) -> Callable[[jax.Array], jax.Array]:
    """Returns a program that makes random keys of their numbers."""
    wrap = functools.partial(jax.random.wrap_key_data, impl=keys)
    return jax.jit(wrap, out_shardings=sharding)


def _own_shards(array: jax.Array) -> Iterator[tuple[list[list[int]], np.ndarray]]:
    """Yields the bounds and the data of the shards that this task sends, of all tasks the one."""
    if is_key_type(array.dtype):
        array = jax.random.key_data(array)
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            bounds = [
                [index.start or 0, size if index.stop is None else index.stop]
                for index, size in zip(shard.index, array.shape, strict=True)
            ]
            yield bounds, np.asarray(shard.data)


def _watch_parent(parent: int) -> None:
    """Ends this process when the coordinator has ended, even while a collective waits."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def main(arguments: Sequence[str], key: bytes = b"") -> None:
    """Runs a task, given the arguments of the command, and the key of `TaskGroup`."""
    address, rank, tasks, devices, pod, incarnation = arguments
    threading.Thread(target=_watch_parent, args=(os.getppid(),), daemon=True).start()
    jax.config.update("jax_num_cpu_devices", int(devices))  # Of other platforms all are used.
    if int(tasks) > 1:
        first = int(rank) * int(devices)
        # Ray shows each task its own devices only.
        own = None if key else list(range(first, first + int(devices)))
        jax.distributed.initialize(pod, int(tasks), int(rank), local_device_ids=own)
    found = jax.devices()
    body = packed(
        task=int(rank),
        process=str(Process.current()),
        devices=len(found),
        platform=export.default_export_platform(),  # Not "gpu": "cuda" or "rocm".
        kind=found[0].device_kind,
    )
    channel = Channel.to(address, decode, key)
    channel.send(Message(Kind.HELLO, 0, int(incarnation), body=body).encoded())
    # JAX takes SIGTERM for a notice to come.
    with signals_handled((signal.SIGTERM,), signal.SIG_DFL):  # type: ignore[arg-type]
        with contextlib.suppress(ConnectionError):
            Task(channel, int(incarnation), shares=not key).run()
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
