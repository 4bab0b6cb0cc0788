"""A network, a host that crashes, and clients that are killed, all in one thread, by a seed.

The clients and the host are stepcache's own. Messages are lost, doubled, and delivered late; the
host crashes between any two of them and begins again from its last snapshot or image, or, where the
machine loses power, from its last snapshot. Whatever happens can be played again by the seed.
"""

import random
from dataclasses import dataclass, replace

import numpy as np

from stepcache.serving.client import Client
from stepcache.serving.host import Host
from stepcache.serving.messages import JoinRequest, ReadRequest, SnapshotRequest, Values
from stepcache.serving.tables import HeldTable, SavedTable


class Block:
    def __init__(self, size_bytes):
        self.data = np.zeros(size_bytes, np.uint8)


class Weighted:
    """An optimizer that adds updates, each times a weight, and counts them."""

    state_types = (("count", [], "int64"),)

    def __init__(self, sent):
        self.weight, self.identity = int(sent), sent.decode()

    def init(self, value):
        return [np.zeros((), np.int64)]

    def update(self, value, state, update):
        rows = zip(value, update, strict=True)
        return [old + self.weight * new for old, new in rows], [state[0] + 1]


class MemoryTables:
    """Bases of tables in memory. What a host writes to them goes with it."""

    def __init__(self):
        self.bases = {}

    def make(self, key, kind):
        self.bases[key] = {each: np.zeros(*row) for each, row in kind.arrays().items()}
        noise = [*kind.noise()]
        if noise:
            self.bases[key]["rows"][...] = np.concatenate(noise)

    def open(self, key, kind):
        return {name: array.copy() for name, array in self.bases[key].items()}

    def zeros(self, count):
        return np.zeros(count, np.int64)

    def merge(self, tables, is_merged=lambda: True):
        for table in tables.values():
            for place, row in enumerate(table.ids):
                for name, rows in table.arrays.items():
                    if is_merged():
                        self.bases[table.key][name][row] = rows[place]


def table_of(kind):
    """A table of its own."""
    storage = MemoryTables()
    storage.make("table", kind)
    return HeldTable(SavedTable(kind, "table", 0, 1, 0, 0, np.empty(0, np.int64), {}), storage)


class Killed(BaseException):
    """A client's process has ended, in the middle of a request."""


@dataclass
class Received:
    message: object
    blocks: list


class Network:
    """The host, and what is under way to it.

    Attributes:
        host: the incarnation that is alive.
        states: the values after each write, by epoch and moment: what reads are checked against.
        reads: each (epoch, moment, names, values) that a client was given.
    """

    def __init__(self, seed, make_host=Host, faults=0.35, old_snapshots=False):
        self.random = random.Random(seed)
        self.make_host, self.faults, self.old_snapshots = make_host, faults, old_snapshots
        self.epoch = 0
        self.clients = []
        self.snapshots, self.image = [None], None
        self.files, self.unmerged = MemoryTables(), {}
        self.late, self.asked = [], []
        self.states, self.reads = {}, []
        self.crashes = self.lost = 0
        self.is_slow = False  # Requests may end without a reply.
        self.begin()

    def begin(self):
        self.epoch += 1
        known = self.snapshots[-1]
        if self.image is not None and (known is None or self.image.moment > known.moment):
            known = self.image
        if self.old_snapshots and self.random.random() < 0.2:
            known, self.image = self.random.choice(self.snapshots), None
        self.unmerged = known.tables if known is not None and known is not self.image else {}
        self.host = self.make_host(self.epoch, Block, Weighted, self.files, known)
        self.host.waiting_for = {each.name for each in self.clients if each._unsaved}
        self.note()

    def note(self):
        held = self.host.state().variables
        self.states[self.host.epoch, self.host.moment] = {
            name: each.value.data.copy() for name, each in held.items()
        }

    def crash(self):
        self.crashes += 1
        self.begin()

    def lose_power(self):
        self.image = None
        self.crash()

    def snapshot(self, *, on_disk=True):
        if self.host.waiting_for:
            return
        state = self.host.state(on_disk=on_disk)
        if on_disk:
            if self.happens() and self.random.random() < 0.1:  # It crashes before the snapshot.
                self.files.merge(self.unmerged, lambda: self.random.random() < 0.8)
                self.crash()
                return
            self.files.merge(self.unmerged)
            self.snapshots.append(state)
            self.host.tables.is_stored(state.tables)
            self.unmerged = state.tables
        else:
            self.image = state
        self.host.is_saved(state)

    def deliver(self, message, payload):
        reply, blocks = self.host.handle(message, payload)
        if isinstance(message, SnapshotRequest):
            self.asked.append(message.on_disk)
            stored = self.snapshots[-1]
            reply = replace(reply, stored=stored.moment if stored else 0)
        if isinstance(message, JoinRequest):
            self.lost += reply.lost
        self.note()
        return Received(reply, [block.data for block in blocks])

    def happens(self):
        return self.random.random() < self.faults

    def stir(self):
        """What may happen at any time: a crash, a snapshot, a late message."""
        if self.happens() and self.random.random() < 0.2:
            self.crash()
        if self.happens():
            self.snapshot(on_disk=self.random.random() < 0.5)
        if self.late and self.happens():
            self.deliver(*self.late.pop(self.random.randrange(len(self.late))))


class Transport:
    """Carries the requests of one client through a network."""

    def __init__(self, network):
        self.network, self.is_killed, self.is_busy = network, False, False

    def allocate(self, size_bytes):
        return Block(size_bytes)

    def request(self, message, block, deadline):
        was_busy, self.is_busy = self.is_busy, True
        try:
            return self.carried(message, block)
        finally:
            self.is_busy = was_busy

    def carried(self, message, block):
        network = self.network
        payload = None if block is None else block.data.copy()
        while True:
            network.stir()
            if self.is_killed and network.happens():
                network.late.append((message, payload))  # It may still arrive.
                network.clients = [each for each in network.clients if each._transport is not self]
                network.host.waiting_for &= {each.name for each in network.clients}
                raise Killed
            if network.happens():  # Lost on the way, or late.
                if network.random.random() < 0.5:
                    network.late.append((message, payload))
                if network.is_slow and network.happens():
                    return None
                continue
            received = network.deliver(message, payload)
            if network.happens():  # Doubled.
                network.deliver(message, payload)
            if network.happens():  # The reply is lost.
                continue
            reply = received.message
            if isinstance(message, ReadRequest) and isinstance(reply, Values):
                self.note_read(message, reply, received.blocks)
            return received

    def note_read(self, message, reply, blocks):
        pairs = zip(message.names, reply.sent, strict=True)
        values = dict(zip([name for name, sent in pairs if sent], blocks, strict=True))
        copies = {name: each.copy() for name, each in values.items()}
        self.network.reads.append((reply.epoch, reply.moment, copies))

    def pause(self):
        """Others look whether the host has begun anew; and a snapshot gets what is new."""
        if self.network.host.unsaved:
            self.network.snapshot()
        while self.network.asked:
            self.network.snapshot(on_disk=self.network.asked.pop())
        for each in self.network.clients:
            if not each._transport.is_busy:
                each.keep(1e6)

    def close(self):
        pass


def client(network):
    made = Client(lambda name: Transport(network), "simulated", timeout=1e6, keeps=False)
    network.clients.append(made)
    return made


def check_reads(network):
    """Every read has given the values of one moment."""
    for epoch, moment, values in network.reads:
        state = network.states[epoch, moment]
        for name, data in values.items():
            assert np.array_equal(data, state[name]), f"{name} at {epoch}, {moment} was another"
