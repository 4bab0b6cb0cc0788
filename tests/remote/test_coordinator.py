"""The coordinator alone: one order for all tasks, whatever clients and tasks do; and any bytes."""

import dataclasses
import hashlib
import itertools
import random
import struct
import time
import weakref

import numpy as np
import pytest

import stepcache as sc
from stepcache.remote.coordinator import Coordinator
from stepcache.remote.local_tasks import address
from stepcache.remote.messages import (
    COMMANDS,
    HEADER_BYTES,
    MAX_MESSAGE_BYTES,
    Kind,
    Message,
    decode,
    packed,
    places_in,
)
from stepcache.serving.channel import Channel
from stepcache.serving.messages import MalformedMessageError
from tests.remote.processes import resident_bytes

PROGRAM = b"a program"
DIGEST = hashlib.sha256(PROGRAM).digest()
FORM = {"program": 1, "refs": [], "takes": [], "writes": []}


class Memory:
    """Stands for the shared memory of a client, which is gone once it has ended."""

    def __init__(self, network):
        self._held, self.is_there = network.held, True
        network.memories.append(self)

    def passed_on(self, place):
        if not self.is_there:
            raise FileNotFoundError("no such process")
        held = Held(next(NUMBERS))
        self._held.add(held)
        return place._replace(descriptor=held.number), held


@dataclasses.dataclass(frozen=True, eq=False)
class Held:
    number: int


NUMBERS = itertools.count(100)
BLOCK = [1, 2, 3, 4, 5]


class Network:
    """A coordinator, tasks that carry out what they get later, and clients."""

    def __init__(self, tasks, seed=0):
        self.random = random.Random(seed)
        self.held = weakref.WeakSet()
        self.memories = []  # Of the clients, in the order in which they came.
        self.coordinator = Coordinator(tasks, lambda: Memory(self))
        self.logs = [[] for _ in range(tasks)]
        self.queues = [[] for _ in range(tasks)]
        self.received = {}
        self.restart()

    def restart(self):
        self.coordinator.started()
        self.logs = [[] for _ in self.logs]
        self.queues = [[] for _ in self.queues]
        self.outputs = [set() for _ in self.queues]  # Clients and runs whose outputs are kept.
        for task in range(len(self.queues)):
            self.send(self.coordinator.joined(task, {"devices": 2, "platform": "cpu"}))

    def send(self, output):
        for message in output.tasks:
            for queue in self.queues:
                queue.append(message)
        for client, message in output.clients:
            self.received.setdefault(client, []).append(message)

    def hello(self, name="", watch=""):
        output = self.coordinator.from_client(
            0, Message(Kind.HELLO, body=packed(name=name, process="1.1.here", watch=watch))
        )
        self.send(output)
        return output.clients[0][0]

    def tell(self, client, kind, number=0, value=0, blob=b"", **body):
        incarnation = self.coordinator.incarnation
        message = Message(kind, client, incarnation, number, value, body and packed(**body), blob)
        self.send(self.coordinator.from_client(client, message))

    def work(self, task):
        """One task carries out its next command."""
        message = self.queues[task].pop(0)
        self.logs[task].append((message.kind, message.client, message.number, message.value))
        incarnation = self.coordinator.incarnation
        if message.body and "blocks" in (about := message.data()):
            assert {row[1] for row in about["blocks"]} <= {each.number for each in self.held}
        if message.kind is Kind.PROGRAM:
            reply = Message(Kind.READY, 0, incarnation, 0, message.value, packed(specs=[]))
        elif message.kind in (Kind.RUN, Kind.PUT):
            self.outputs[task].add((message.client, message.number))
            reply = Message(Kind.DONE, message.client, incarnation, message.number)
        elif message.kind is Kind.DROP:
            self.outputs[task] = {row for row in self.outputs[task] if row[0] != message.client}
            reply = Message(Kind.DROP, message.client, incarnation)
        else:
            return
        self.send(self.coordinator.from_task(task, reply))

    def work_all(self):
        while busy := self.busy:
            self.work(self.random.choice(busy))

    @property
    def busy(self):
        """The tasks that have something to do."""
        return [task for task, queue in enumerate(self.queues) if queue]

    def kinds(self, client):
        return [message.kind for message in self.received.get(client, [])]


def defined(network, client):
    network.tell(client, Kind.PROGRAM, digest=DIGEST, name="step")
    if network.kinds(client)[-1] is Kind.NEED_PROGRAM:
        network.tell(client, Kind.PROGRAM, digest=DIGEST, name="step", blob=PROGRAM)


def test_a_program_travels_once_and_every_task_compiles_it():
    network = Network(3)
    first, second = network.hello(), network.hello()
    defined(network, first)
    defined(network, second)
    assert network.kinds(second) == [Kind.WELCOME]  # It is being compiled for the first one.
    network.work_all()
    assert network.kinds(first)[-2:] == [Kind.NEED_PROGRAM, Kind.READY]
    assert network.kinds(second) == [Kind.WELCOME, Kind.READY]
    assert [len(log) for log in network.logs] == [1, 1, 1]


def test_tasks_that_were_started_again_get_programs_without_the_client_sending_them():
    network = Network(2)
    client = network.hello()
    defined(network, client)
    network.work_all()
    network.send(network.coordinator.lost("task 1 was killed", [1]))
    assert network.kinds(client)[-1] is Kind.LOST
    network.restart()
    assert network.kinds(client)[-1] is Kind.WELCOME
    network.tell(client, Kind.PROGRAM, digest=DIGEST, name="step")
    network.work_all()
    assert network.kinds(client)[-1] is Kind.READY
    assert Kind.NEED_PROGRAM not in network.kinds(client)[-2:]


def test_a_program_with_another_digest_is_malformed():
    network = Network(1)
    client = network.hello()
    with pytest.raises(MalformedMessageError, match="digest"):
        network.tell(client, Kind.PROGRAM, digest=DIGEST, name="step", blob=b"another")


def test_what_is_of_an_earlier_incarnation_is_refused():
    network = Network(2)
    client = network.hello()
    network.restart()
    late = Message(Kind.RUN, client, 1, 1, 1, packed(form=FORM))
    network.send(network.coordinator.from_client(client, late))
    assert network.kinds(client)[-1] is Kind.REFUSED
    assert network.queues == [[], []]


def test_a_run_is_done_when_all_tasks_have_done_it():
    network = Network(2)
    client = network.hello()
    for number in (1, 2):
        network.tell(client, Kind.RUN, number, 1, form=FORM)
    network.work(0)
    network.work(0)
    assert Kind.DONE not in network.kinds(client)
    network.work(1)
    assert network.received[client][-1].number == 1


def failed(network, client, task, number, **about):
    """A task says that a run has failed."""
    body = packed(why="no memory", command="RUN", **about)
    message = Message(Kind.FAILED, client, network.coordinator.incarnation, number, Kind.RUN, body)
    return network.coordinator.from_task(task, message)


def test_tasks_come_apart_where_a_run_fails_on_one_and_is_done_by_another():
    network = Network(2)
    client = network.hello(name="train")
    for number in (1, 2):
        network.tell(client, Kind.RUN, number, 1, form=FORM)
    network.work(0)
    assert failed(network, client, 1, 1).lost == (
        "run 1 of client 'train' failed on task 1 alone: no memory",
        [1],
    )


def test_a_run_that_fails_on_all_tasks_is_an_error_of_that_run():
    network = Network(2)
    client = network.hello()
    network.tell(client, Kind.RUN, 1, 1, form=FORM)
    assert failed(network, client, 0, 1).lost is None
    assert list(network.coordinator.failed_alone()) == [(client, 1)]  # So far.
    assert failed(network, client, 1, 1).lost is None
    network.work_all()
    assert not network.coordinator.failed_alone()


def test_a_run_that_failed_alone_is_looked_at_when_others_could_have_ended_it():
    network = Network(2)
    client = network.hello()
    for number in (1, 2):
        network.tell(client, Kind.RUN, number, 1, form=FORM)
    assert failed(network, client, 1, 2).lost is None
    assert not network.coordinator.failed_alone()  # Task 0 has not done run 1 yet.
    network.work(0)
    assert list(network.coordinator.failed_alone()) == [(client, 2)]


def test_a_run_is_not_passed_on_without_the_memory_that_it_names():
    """Nor what the same client has sent after it: it would run without that."""
    network = Network(2)
    killed, other = network.hello(name="killed"), network.hello()
    network.tell(killed, Kind.RUN, 1, 1, form=FORM, blocks=[BLOCK])
    network.work_all()
    network.memories[0].is_there = False
    network.tell(killed, Kind.RUN, 2, 1, blocks=[BLOCK])
    network.tell(killed, Kind.RUN, 3, 1)
    assert network.kinds(killed)[-2:] == [Kind.REFUSED, Kind.REFUSED]
    assert "no such process" in network.received[killed][-1].data()["why"]
    assert network.queues == [[], []]
    network.tell(other, Kind.RUN, 1, 1, form=FORM, blocks=[BLOCK])
    network.work_all()
    assert network.kinds(other)[-1] is Kind.DONE


@pytest.mark.parametrize("has_left", [False, True])
def test_memory_is_held_until_all_tasks_have_read_it(has_left):
    network = Network(2)
    client = network.hello()
    network.tell(client, Kind.RUN, 1, 1, form=FORM, blocks=[BLOCK, BLOCK])
    network.tell(client, Kind.PUT, 2, blocks=[BLOCK])
    if has_left:
        network.send(network.coordinator.left(client))
    while network.queues[0]:
        network.work(0)
    assert len(network.held) == 3
    network.work_all()
    assert len(network.held) == 0


def test_a_run_that_failed_alone_is_looked_at_though_its_client_has_left():
    network = Network(2)
    client = network.hello()
    network.tell(client, Kind.RUN, 1, 1, form=FORM)
    network.send(network.coordinator.left(client))
    assert failed(network, client, 1, 1).lost is None
    del network.queues[1][0]
    network.work(1)  # It drops what the client held.
    assert [key[0] for key in network.coordinator.failed_alone()] == [client]
    network.queues[0].clear()
    network.restart()
    assert not network.coordinator.failed_alone()


def test_a_task_that_reports_the_loss_of_another_ends_all():
    network = Network(2)
    client = network.hello()
    network.tell(client, Kind.RUN, 1, 1, form=FORM)
    output = failed(network, client, 0, 1, is_lost=True)
    assert output.lost == ("no memory", []) and not output.clients


@pytest.mark.parametrize("name", ["", "train"])
def test_what_a_client_that_has_left_has_started_runs_on_all_tasks_to_its_end(name):
    network = Network(2)
    client, other = network.hello(name), network.hello()
    for number in range(1, 6):
        network.tell(client, Kind.RUN, number, 1, form=FORM)
    network.work(0)
    network.send(network.coordinator.left(client))
    network.tell(other, Kind.RUN, 1, 1, form=FORM)
    who = "'train'" if name else "1"
    assert f"task 1: run 1 of client {who} (5 are started" in network.coordinator.where()
    network.work_all()
    runs = [(Kind.RUN, client, number, 1) for number in range(1, 6)]
    assert network.logs[0] == [*runs, (Kind.DROP, client, 0, 0), (Kind.RUN, other, 1, 1)]
    assert network.logs[1] == network.logs[0]
    assert network.outputs == [{(other, 1)}] * 2
    assert network.received[other][-1].kind is Kind.DONE
    assert network.coordinator.where() == ("task 0: has nothing to do; task 1: has nothing to do")


def test_a_client_that_watches_cannot_write():
    network = Network(1)
    watcher = network.hello(watch="train")
    network.tell(watcher, Kind.RUN, 1, 1, form=FORM)
    assert network.kinds(watcher)[-1] is Kind.REFUSED
    assert network.queues == [[]]


@pytest.mark.seeds(1000, few=100)
def test_tasks_carry_out_the_same_commands_in_the_same_order(seed):
    """Clients run, come, and are killed at any moment; tasks are as fast as they like."""
    network = Network(network_tasks := 3, seed)
    chance = network.random
    clients = {network.hello(): 0 for _ in range(3)}
    for client in clients:
        defined(network, client)
    for _ in range(300):
        act = chance.random()
        if act < 0.4 and clients:
            client = chance.choice(list(clients))
            clients[client] += 1
            blocks = {"blocks": [BLOCK]} if chance.random() < 0.5 else {}
            network.tell(client, Kind.RUN, clients[client], 1, form=FORM, **blocks)
        elif act < 0.45 and clients:  # Killed: it may have sent anything before.
            client = chance.choice(list(clients))
            del clients[client]
            if chance.random() < 0.5:  # What it sent at last is read after its end.
                network.memories[client - 1].is_there = False
                network.tell(client, Kind.RUN, 10**6, 1, form=FORM, blocks=[BLOCK])
            network.send(network.coordinator.left(client))
        elif act < 0.5:
            clients[network.hello()] = 0
        elif act < 0.51:
            network.send(network.coordinator.lost("task 0 was killed", [0]))
            network.received.clear()
            network.restart()
            clients = dict.fromkeys(clients, 0)
        elif busy := network.busy:
            network.work(chance.choice(busy))
        shortest = min(network.logs, key=len)
        assert all(log[: len(shortest)] == shortest for log in network.logs)
    network.work_all()
    assert all(log == network.logs[0] for log in network.logs) and network_tasks == 3
    assert not any(number == 10**6 for _, _, number, _ in network.logs[0])
    assert not any(network.queues) and not network.held and not network.coordinator._left
    for kept in network.outputs:  # Nothing of those that have left, all of the others.
        assert kept == {(c, run) for c, runs in clients.items() for run in range(1, runs + 1)}
    for client, runs in clients.items():
        done = [m.number for m in network.received.get(client, []) if m.kind is Kind.DONE]
        assert done == sorted(done) and (not runs or done[-1] == runs)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("tasks", [1, 10, 1000])
def test_a_client_sends_one_message_whatever_the_number_of_tasks(tasks):
    network = Network(tasks)
    client = network.hello()
    network.tell(client, Kind.RUN, 1, 1, form=FORM)
    network.work_all()
    before = dict(network.coordinator.counts)
    network.tell(client, Kind.RUN, 2, 1)
    counts = network.coordinator.counts
    assert counts["messages"] - before["messages"] == 1
    assert counts["bytes"] - before["bytes"] == HEADER_BYTES <= 64
    assert [len(queue) for queue in network.queues] == [1] * tasks
    network.work_all()
    assert network.kinds(client).count(Kind.DONE) == 2


def test_messages_survive_their_encoding_in_any_pieces():
    sent = [Message(kind, 1, 2, 3, 2**63, packed(a=1), b"x") for kind in Kind]
    sent += [Message(Kind.RUN, 2**32 - 1), Message(Kind.DATA, blob=b"abc" * 100_000)]
    assert len(Message(Kind.RUN, 1, 2, 3, 4).encoded()) == HEADER_BYTES
    chance, data = random.Random(0), b"".join(message.encoded() for message in sent)
    found, received = [], bytearray()
    while data:
        size = chance.choice([1, 10, 100, 10_000])
        received += data[:size]
        data = data[size:]
        while (message := decode(received)) is not None:
            found.append(message)
    assert found == sent and not received
    assert len(COMMANDS) == 7


def header(kind=Kind.RUN, magic=b"sc", version=5, client=0, body_bytes=0, blob_bytes=0):
    return struct.pack("<2sBBIIIIQQ", magic, version, kind, client, 0, body_bytes, blob_bytes, 0, 0)


@pytest.mark.parametrize(
    ("bytes_", "match"),
    [
        (header(magic=b"cs"), "another protocol"),
        (header(version=1), "another protocol"),
        (header(kind=99), "there is no message 99"),
        (header(body_bytes=MAX_MESSAGE_BYTES), "it has 1,073,741,860 bytes"),
        (header(body_bytes=2**32 - 1, blob_bytes=2**32 - 1), "it has 8,589,934,626 bytes"),
    ],
)
def test_what_is_no_message_is_found_by_its_header(bytes_, match):
    with pytest.raises(MalformedMessageError, match=match):
        decode(bytearray(bytes_))


@pytest.mark.parametrize(
    "row",
    [7, [1, 2, 3, 4], [1, 2, "3", 4, 5], [1, 2, 3, 4, 0], [1, 2, 3, 4, -5], [1, 2, 3, 4, 1 << 62]],
)
def test_what_is_no_place_of_a_block_is_malformed(row):
    with pytest.raises(MalformedMessageError, match="no place"):
        places_in({"blocks": [row]})


def noise(chance):
    """Bytes that are no message, or nearly one. Returns whether they end the connection, too."""
    choice = chance.randrange(100)
    if choice == 0:
        return header(magic=chance.randbytes(2), kind=chance.randrange(256)), True
    if choice == 1:
        return header(body_bytes=2**32 - 1), True
    numbers = chance.choice([0, 1, 2, 7, 2**32 - 1]), chance.randrange(2**32)
    message = Message(chance.choice([*Kind]), *numbers, *(chance.randrange(2**64) for _ in "ab"))
    if choice < 30:
        return message._replace(body=chance.randbytes(chance.randrange(200))).encoded(), False
    body = {
        chance.choice(["form", "refs", "digest", "name", "leaves", "feeds", "rows", "process"]): (
            chance.choice([None, 1, -1, "x" * 300, b"x", [], [[1]], {"writes": [["x"]]}, {}])
        )
        for _ in range(chance.randrange(4))
    }
    blob = chance.randbytes(chance.choice([0, 10]))
    return message._replace(body=packed(**body), blob=blob).encoded(), False


@pytest.mark.slow
def test_malformed_messages_are_counted_and_nothing_else(one_task):
    connection = one_task._scope.target.connection
    found = address(connection.where)
    step = sc.step(lambda x: x + 1)
    assert float(step(1.0)) == 2
    pid = int(found["process"].split(".")[0])
    chance = random.Random(0)
    memory = []
    for _ in range(10):
        channel, ends = Channel.to(found["address"], decode), False
        for _ in range(1000):
            if ends:
                channel.close()
                channel = Channel.to(found["address"], decode)
            data, ends = noise(chance)
            channel.send(data)
            channel.wait(0.2)  # For the answer: nearly all of it is refused.
            while not ends and channel.receive() is not None:
                pass
        channel.close()
        memory.append(resident_bytes(pid))
    assert float(step(2.0)) == 3
    counts = connection.status()["counts"]
    assert counts["malformed"] > 5000
    assert memory[-1] - memory[2] < 8 << 20


def test_a_hostile_command_fails_alone(one_task):
    """What passes the coordinator's checks and is wrong, the tasks refuse one by one."""
    connection = one_task._scope.target.connection
    step = sc.step(lambda x: x + 1)
    assert float(step(1.0)) == 2
    for kind, body in [
        (Kind.RUN, {"form": {"program": 99, "refs": [], "takes": [], "writes": []}}),
        (Kind.RUN, {"form": {"program": 1, "refs": [["v", 77]], "takes": [], "writes": []}}),
        (Kind.RUN, {"form": {"program": 1, "refs": [["f", 1]], "takes": [], "writes": []}}),
        (Kind.PUT, {"mesh": [["x"], [7], ["Auto"]], "feeds": [], "specs": []}),
        (Kind.PUT, {"nonsense": 1}),
    ]:
        values = connection.values()
        run = connection.run(connection.ready(), 1 << 40, packed(**body), values, kind)
        connection.wait(run)
        with pytest.raises(sc.TaskError, match="failed on the tasks"):
            connection.check(run)
    for kind in (Kind.FREE, Kind.BIND):
        connection.command(kind, 5, nonsense=1)
    time.sleep(0.05)
    np.testing.assert_array_equal(step(np.ones(2, np.float32)), 2)
