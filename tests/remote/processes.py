"""The processes behind a session with tasks: which they are, and whether they have ended."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import stepcache as sc
from stepcache.link.processes import Process
from stepcache.remote import starting
from stepcache.remote.local_tasks import address


def directory_of(session):
    return session._scope.target.connection.where


def processes_below(pid):
    """The processes whose parent is another one, by `/proc`."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if int((path / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(path.name))
        except (OSError, IndexError):
            pass
    return found


def tasks_of(session):
    coordinator = Process.parse(address(directory_of(session))["process"])
    return coordinator.pid, processes_below(coordinator.pid)


def wait_until(is_so, seconds=20):
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)


def has_ended(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def resident_bytes(pid):
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class RunningTasks:
    """Tasks that run until they are closed, for any number of sessions."""

    def __init__(self, directory, size):
        self.directory = directory
        starting._spawn(directory, *starting.size_of(size), owner=None)

    def session(self, **options):
        return sc.Session(target=f"local:{self.directory}", **options)

    def close(self):
        coordinator = Process.parse(address(self.directory)["process"])
        os.kill(coordinator.pid, signal.SIGTERM)
        wait_until(coordinator.has_ended)


class ServedTasks:
    """Tasks that `stepcache serve` runs, for several clients."""

    def __init__(self, directory, size="1x1"):
        self.directory = directory
        command = [sys.executable, "-m", "stepcache", "serve", "--tasks", size]
        command += ["--directory", str(directory)]
        self._process = subprocess.Popen(command)
        self._sessions = []
        wait_until(lambda: address(directory) is not None, 60)

    def session(self, name=None, **options):
        made = sc.Session(target=f"local:{self.directory}", name=name, **options)
        self._sessions.append(made)
        return made

    def close(self):
        for each in self._sessions:
            each.close()
        self._process.terminate()
        assert self._process.wait(20) == 0
