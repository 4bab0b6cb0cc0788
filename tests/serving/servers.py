"""Hosts of variables in processes of their own, a class for each engine, that tests kill."""

import os
import signal
import time
from pathlib import Path

import numpy as np

import stepcache as sc
from stepcache.link.processes import Process
from stepcache.serving.hosts import first_host
from stepcache.serving.local_transport import address
from tests import forking

PROJECT = Path(__file__).parents[2]
LIMIT_SECONDS = 60
SIZE = 5000  # Of a value of four bytes each: as many as travel inside a message.


class Child:
    """A Python script in a process of its own. What it prints goes to files.

    Args:
        directory: of the files.
        script: absolute, or relative to the project.
        arguments: of the script.
    """

    def __init__(self, directory, script, *arguments):
        self._files = [
            directory / f"{Path(script).stem} {time.monotonic_ns()} {n}" for n in range(2)
        ]
        self.process = forking.start(
            PROJECT / script,
            list(map(str, arguments)),
            env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(PROJECT)},
            cwd=PROJECT,
            stdout=self._files[0],
            stderr=self._files[1],
        )
        self.pid, self.kill = self.process.pid, self.process.kill
        self.send_signal = self.process.send_signal

    def is_running(self):
        return self.process.poll() is None

    def printed(self):
        """Its output and its errors so far."""
        return [each.read_text() if each.exists() else "" for each in self._files]

    def wait_until(self, is_ready):
        limit = time.monotonic() + LIMIT_SECONDS
        while True:
            was_running = self.is_running()
            if is_ready():
                return
            assert was_running and time.monotonic() < limit, self.printed()
            time.sleep(0.005)

    def end(self):
        """Waits for its end. Returns its exit code, its output and its errors."""
        limit = time.monotonic() + 2 * LIMIT_SECONDS
        while self.is_running():
            assert time.monotonic() < limit, self.printed()
            time.sleep(0.005)
        return self.process.returncode, *self.printed()


def run_python(directory, code):
    """Runs code in a process of its own. Returns what it prints."""
    script = directory / f"script {time.monotonic_ns()}.py"
    script.write_text(code)
    status, printed, errors = Child(directory, script).end()
    assert status == 0, errors
    return printed


def run_command(directory, *arguments):
    """Runs `stepcache`. Returns its exit code, its output and its errors."""
    return Child(directory, "stepcache/__main__.py", *arguments).end()


class Server:
    """What the engines have in common.

    Attributes:
        directory: of the snapshots.
        address: for `connect`.
        hosts: how many share the set.
        pid: of the process that holds the variables.
    """

    hosts = 1

    def __init__(self, directory, **options):
        self.directory, self.options = directory, options

    def connect(self, **options):
        return sc.connect(self.address, **{"timeout": LIMIT_SECONDS, **options})

    def worker(self, name, first, count):
        """A process that pushes; see `workers`. It has begun when this returns."""
        script, directory = "tests/serving/workers.py", self.directory.parent
        child = Child(directory, script, self.address, name, first, count)
        child.wait_until(lambda: child.printed()[0].startswith("ready\n"))
        return child


class LocalServer(Server):
    """`stepcache serve`."""

    engine = "local"
    child = None
    script = ("stepcache/__main__.py", "serve", "--variables")

    @property
    def address(self):
        return f"local:{self.directory}"

    @property
    def pid(self):
        return self.child.pid

    def start(self):
        options = [f"--snapshot-every={seconds}s" for seconds in self.options.values()]
        self.child = Child(self.directory.parent, *self.script, self.directory, *options)
        self.child.wait_until(self.is_there)
        return self

    def is_there(self):
        found = address(self.directory)
        return found and Process.parse(found["process"]).pid == self.pid

    def kill(self):
        self.child.kill()
        self.child.end()

    def stop(self):
        """Ends it as a user does. Returns what it has printed."""
        self.child.send_signal(signal.SIGTERM)
        _, printed, errors = self.child.end()
        return printed + errors


class LocalHosts(LocalServer):
    """Three hosts that share one set, in one process; the first comes last."""

    hosts = 3
    script = ("tests/serving/local_hosts.py",)


class RayServer(Server):
    """An actor. Ray starts it again after a kill, whether or not a test asks for it.

    Processes of this machine use its socket.
    """

    engine = "ray"
    shares = True
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
            options = {"shares": self.shares, **self.options}
            (about,) = ray_engine.start(self.name, self.directory, **options)
            self.pid = about.pid
        return self

    def about(self):
        """What the actor says of itself, once it has started."""
        import ray

        return ray.get(ray.get_actor(self.name, namespace="stepcache").about.remote())

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)

    def stop(self):
        from stepcache.errors import VariablesError
        from stepcache.serving import ray_engine

        try:
            return f"{ray_engine.stop(self.name)} writes"
        except VariablesError as error:
            return str(error)


class RayCalls(RayServer):
    """An actor that all processes call through Ray, as those of other machines do."""

    shares = False


def two(connection, name, value=1.0, size=SIZE, **options):
    """Variables of the same name in two connections, as two processes have them."""
    tree = {"w": np.full(size, value, np.float32)}
    first = connection.variables(name, tree, **options)
    other = sc.connect(connection.address)
    return first, other.variables(name, tree, **options)


def names_on_one_host(connection, name):
    """Two names whose variables are of one moment: the moments of two hosts say nothing."""
    names, hosts = [f"{name}{n}" for n in range(99)], connection.status().hosts
    return [each for each in names if first_host(each, hosts) == first_host(name, hosts)][:2]
