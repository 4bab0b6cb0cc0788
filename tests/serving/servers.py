"""Hosts of variables in processes of their own, a class for each engine, that tests kill."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import stepcache as sc
from stepcache.serving.local_transport import address
from stepcache.storage.load_markers import Process

PROJECT = Path(__file__).parents[2]
LIMIT_SECONDS = 60
SIZE = 5000  # Of a value of four bytes each: as many as travel inside a message.


class Server:
    """What the engines have in common.

    Attributes:
        directory: of the snapshots.
        address: for `connect`.
        pid: of the process that holds the variables.
    """

    def __init__(self, directory, **options):
        self.directory, self.options = directory, options

    def connect(self, **options):
        return sc.connect(self.address, **{"timeout": LIMIT_SECONDS, **options})

    def worker(self, name, first, count):
        """A process that pushes; see `workers`. It has begun when this returns."""
        command = [sys.executable, "-m", "tests.serving.workers", self.address, name]
        process = subprocess.Popen(
            [*command, str(first), str(count)],
            cwd=PROJECT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
        assert process.stdout.readline() == "ready\n", process.stderr.read()
        return process


class LocalServer(Server):
    """`stepcache serve`."""

    engine = "local"
    process = None

    @property
    def address(self):
        return f"local:{self.directory}"

    @property
    def pid(self):
        return self.process.pid

    def start(self):
        command = [sys.executable, "-m", "stepcache.cli", "serve", "--variables"]
        options = [f"--snapshot-every={seconds}s" for seconds in self.options.values()]
        self.process = subprocess.Popen(
            [*command, str(self.directory), *options],
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


class RayServer(Server):
    """An actor. Ray starts it again after a kill, whether or not a test asks for it."""

    engine = "ray"
    pid = None

    @property
    def name(self):
        return str(self.directory).replace("/", "-")

    @property
    def address(self):
        return f"ray:{self.name}"

    def start(self):
        from stepcache.serving import ray_engine

        killed, limit = self.pid, time.monotonic() + LIMIT_SECONDS
        while self.pid == killed:
            assert time.monotonic() < limit, "the actor does not start"
            self.pid = ray_engine.start(self.name, self.directory, **self.options).pid
        return self

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)

    def stop(self):
        from stepcache.errors import VariablesError
        from stepcache.serving import ray_engine

        try:
            return f"{ray_engine.stop(self.name)} writes"
        except VariablesError as error:
            return str(error)


def two(connection, name, value=1.0, size=SIZE, **options):
    """Variables of the same name in two connections, as two processes have them."""
    tree = {"w": np.full(size, value, np.float32)}
    first = connection.variables(name, tree, **options)
    other = sc.connect(connection.address)
    return first, other.variables(name, tree, **options)
