"""Of many processes that need one program, one compiles it; a dead one keeps nobody waiting."""

import copy
import errno
import fcntl
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from stepcache.link import file_lock
from stepcache.storage.building import BuildLock

DIGEST = "0123456789abcdef" * 4
LIMIT_SECONDS = 60


@pytest.fixture
def lock(tmp_path):
    return BuildLock(tmp_path / "building")


def start(lock, body):
    """Another process, which has a lock of the same directory. It prints when it is ready."""
    code = f"""
        import os, sys, time
        from pathlib import Path
        from stepcache.storage.building import BuildLock
        lock, digest = BuildLock(Path({str(lock._directory)!r})), {DIGEST!r}
    """
    code = textwrap.dedent(code) + textwrap.dedent(body)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def test_one_at_a_time(lock, tmp_path):
    other = BuildLock(tmp_path / "building")
    building = lock.try_lock(DIGEST)
    assert building.is_locked and other.try_lock(DIGEST) is None
    assert not os.get_inheritable(building.descriptor)
    assert not other.is_held_by_a_live_process(DIGEST), "it is this process's"
    assert other.try_lock("ab").is_locked
    building.release()
    again = other.try_lock(DIGEST)
    assert again.is_locked and lock.try_lock(DIGEST) is None
    again.release()
    again.release()
    assert not list(lock._directory.iterdir())


def test_what_nobody_holds_any_more_is_free(lock):
    building = lock.try_lock(DIGEST)
    assert lock.try_lock(DIGEST) is None
    del building
    assert lock.try_lock(DIGEST).is_locked


def test_the_lock_of_a_killed_process_is_free(lock):
    body = "it = lock.try_lock(digest)\nprint('locked', flush=True)\ntime.sleep(600)"
    holder = start(lock, body)
    assert holder.stdout.readline() == "locked\n"
    assert lock.try_lock(DIGEST) is None and lock.is_held_by_a_live_process(DIGEST)
    holder.kill()
    holder.wait()
    assert not lock.is_held_by_a_live_process(DIGEST)
    assert lock.try_lock(DIGEST).is_locked


def test_a_child_that_releases_the_lock_of_its_parent_does_nothing(lock):
    building = lock.try_lock(DIGEST)
    child = copy.copy(building)
    child._pid, child.descriptor = 1, os.dup(building.descriptor)
    child.release()
    assert lock.try_lock(DIGEST) is None and building.is_locked


def test_a_child_that_outlives_its_parent_holds_nobody(lock):
    body = "it = lock.try_lock(digest)\nos.write(1, b'%d\\n' % (os.fork() or os.getpid()))\n"
    holder = start(lock, body + "time.sleep(600)")
    (child,) = {int(holder.stdout.readline()) for _ in range(2)}
    assert lock.is_held_by_a_live_process(DIGEST)
    holder.kill()
    holder.wait()
    try:
        with (lock._directory / DIGEST).open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert not lock.is_held_by_a_live_process(DIGEST)
        assert not lock.try_lock(DIGEST).is_locked, "each compiles for itself"
    finally:
        os.kill(child, signal.SIGKILL)


def test_what_is_released_is_free_though_children_have_it_open(lock):
    holder = start(
        lock,
        """
        building = lock.try_lock(digest)
        if not os.fork():
            time.sleep(600)
        building.release()
        print("released", flush=True)
        """,
    )
    assert holder.stdout.readline() == "released\n"
    assert not lock.is_held_by_a_live_process(DIGEST)
    assert lock.try_lock(DIGEST).is_locked
    holder.wait()


def test_many_processes_build_once(lock, tmp_path):
    """Each waits as long as another one builds; the first that builds is killed."""
    body = f"""
    made, tries = Path({str(tmp_path / "made")!r}), Path({str(tmp_path / "tries")!r})
    while not made.exists():
        building = lock.try_lock(digest)
        if building is None:
            time.sleep(0.002)
            continue
        if not made.exists():
            descriptor = os.open(tries, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            is_first = os.fstat(descriptor).st_size == 0
            os.write(descriptor, b"x")
            time.sleep(0.05)
            if is_first:
                os.kill(os.getpid(), 9)
            made.touch()
        building.release()
    """
    workers = [start(lock, body) for _ in range(8)]
    limit = time.monotonic() + LIMIT_SECONDS
    codes = sorted(each.wait(limit - time.monotonic()) for each in workers)
    assert codes == [-signal.SIGKILL] + [0] * 7
    assert (tmp_path / "tries").read_text() == "xx"


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(lock, monkeypatch, code):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(file_lock.fcntl, "flock", refuse)
    for _ in range(2):
        building = lock.try_lock(DIGEST)
        assert not building.is_locked
        assert not lock.is_held_by_a_live_process(DIGEST)
        building.release()
