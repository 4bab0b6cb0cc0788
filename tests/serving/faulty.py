"""`FaultyNetwork`: stands between clients and a local server, and loses, doubles and delays."""

import contextlib
import heapq
import json
import random
import selectors
import threading
import time

from stepcache.serving.channel import Channel, Listener
from stepcache.serving.local_transport import ADDRESS_FILE, joined, splitter


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
        self.selector = selectors.DefaultSelector()
        self.listener = Listener(f"{self.directory}/s")
        self.listener.listen()
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.publish()
        self.start()
        return self

    def __exit__(self, *exception):
        self.is_ended = True
        self.join()
        for key in list(self.selector.get_map().values()):
            key.fileobj.close()
        self.selector.close()

    def publish(self):
        """Says that this is where the server listens."""
        row = json.loads((self.server.directory / ADDRESS_FILE).read_text())
        self.upstream, row["address"] = row["address"], f"{self.directory}/s"
        (self.directory / ADDRESS_FILE).write_text(json.dumps(row))

    def accept(self):
        """Connects a client with the server."""
        front = Channel(self.listener.accept()[0], splitter(1 << 30))
        try:
            back = Channel.to(self.upstream, splitter(1 << 30))
        except OSError:
            front.close()
            return
        for one, other in ((front, back), (back, front)):
            self.selector.register(one, selectors.EVENT_READ, (one, other, one is front))

    def end(self, *ends):
        """Ends a connection on both sides."""
        for each in ends:
            with contextlib.suppress(KeyError, ValueError):
                self.selector.unregister(each)
            each.close()

    def run(self):
        due, number = [], 0
        while not self.is_ended:
            for key, _ in self.selector.select(0.001):
                if key.data is None:
                    self.accept()
                    continue
                source, target, is_request = key.data
                try:
                    while (frames := source.receive()) is not None:
                        for _ in range(self.times(is_request)):
                            at = time.monotonic() + self.random.uniform(0, self.delay)
                            number += 1
                            self.overtaken += bool(due) and at < max(due)[0]
                            heapq.heappush(due, (at, number, source, target, joined(frames)))
                except OSError:
                    self.end(source, target)
            while due and due[0][0] < time.monotonic():
                _, _, source, target, data = heapq.heappop(due)
                try:
                    target.send(data)
                    while not target.flush():
                        target.wait(0.1)
                except OSError:
                    self.end(source, target)

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
