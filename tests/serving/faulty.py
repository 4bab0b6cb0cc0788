"""`FaultyNetwork`: stands between clients and a local server, and loses, doubles and delays."""

import heapq
import json
import random
import threading
import time

import zmq

from stepcache.serving.local_transport import ADDRESS_FILE


class FaultyNetwork(threading.Thread):
    """Clients of its address reach a server through it. A context manager.

    Args:
        server: a local one.
        directory: short-lived, of its own.
        seed: of what befalls messages.
        loss: each so many messages one is lost.
        doubling: how likely it is that a request comes twice.
        delay: seconds, at most, by which a message may be late: later ones may overtake it.
    """

    def __init__(self, server, directory, seed, loss=200, doubling=0.1, delay=0.02):
        super().__init__(daemon=True)
        self.random = random.Random(seed)
        self.server, self.directory = server, directory
        self.loss, self.doubling, self.delay = loss, doubling, delay
        self.messages = self.lost = self.doubled = self.overtaken = 0
        self.is_ended = False
        directory.mkdir(mode=0o700)
        self.address = f"local:{directory}"

    def __enter__(self):
        self.context = zmq.Context()
        self.front = self.context.socket(zmq.ROUTER)
        self.front.bind(f"ipc://{self.directory}/s")
        self.publish()
        self.start()
        return self

    def __exit__(self, *exception):
        self.is_ended = True
        self.join()
        self.context.destroy(linger=0)

    def publish(self):
        """Says that this is where the server listens."""
        row = json.loads((self.server.directory / ADDRESS_FILE).read_text())
        self.upstream, row["address"] = row["address"], f"ipc://{self.directory}/s"
        (self.directory / ADDRESS_FILE).write_text(json.dumps(row))

    def run(self):
        poller, backs, due, number = zmq.Poller(), {}, [], 0
        poller.register(self.front, zmq.POLLIN)
        while not self.is_ended:
            for socket, _ in poller.poll(1):
                frames = socket.recv_multipart()
                is_request = socket is self.front
                client = frames.pop(0) if is_request else backs[socket]
                if is_request and client not in backs.values():
                    back = self.context.socket(zmq.DEALER)
                    back.connect(self.upstream)
                    backs[back] = client
                    poller.register(back, zmq.POLLIN)
                for _ in range(self.times(is_request)):
                    at = time.monotonic() + self.random.uniform(0, self.delay)
                    number += 1
                    self.overtaken += bool(due) and at < max(due)[0]
                    heapq.heappush(due, (at, number, is_request, client, frames))
            while due and due[0][0] < time.monotonic():
                _, _, is_request, client, frames = heapq.heappop(due)
                if is_request:
                    next(b for b, of in backs.items() if of == client).send_multipart(frames)
                else:
                    self.front.send_multipart([client, *frames])

    def times(self, is_request):
        """How often a message is delivered."""
        self.messages += 1
        if self.messages % self.loss == 0:
            self.lost += 1
            return 0
        if is_request and self.random.random() < self.doubling:
            self.doubled += 1
            return 2
        return 1
