"""A server of variables in a process of its own."""

import os
import signal
import subprocess
import sys
import time

import pytest

import stepcache as sc
from stepcache.serving.local_transport import address
from stepcache.storage.load_markers import Process

LIMIT_SECONDS = 60


class Server:
    """`stepcache serve`, which tests start, kill and stop."""

    def __init__(self, directory, *options):
        self.directory, self.options = directory, options
        self.process = None

    def start(self):
        command = [sys.executable, "-m", "stepcache.cli", "serve", "--variables"]
        self.process = subprocess.Popen(
            [*command, str(self.directory), *self.options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        limit = time.monotonic() + LIMIT_SECONDS
        while time.monotonic() < limit:
            found = address(self.directory)
            if found and Process.parse(found["process"]).pid == self.process.pid:
                return self
            assert self.process.poll() is None, self.process.stdout.read()
            time.sleep(0.02)
        raise AssertionError("the server does not start")

    def kill(self):
        self.process.kill()
        self.process.wait()

    def stop(self):
        """Ends it as a user does. Returns what it has printed."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        printed, _ = self.process.communicate(timeout=LIMIT_SECONDS)
        return printed

    def connect(self, **options):
        return sc.connect(f"local:{self.directory}", **{"timeout": LIMIT_SECONDS, **options})


@pytest.fixture
def server(tmp_path):
    server = Server(tmp_path / "server").start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("shared") / "server").start()
    yield server
    server.stop()


@pytest.fixture
def connection(shared_server):
    with shared_server.connect() as connection:
        yield connection


@pytest.fixture
def name(request):
    """A name that no other test gives to variables."""
    return f"{request.node.name}-{os.getpid()}"
