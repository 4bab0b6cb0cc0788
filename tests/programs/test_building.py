"""Of many processes that need one program, one compiles it; a dead one keeps nobody waiting."""

import errno
import gc
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from stepcache.storage import building
from stepcache.storage.building import BuildLock

DIGEST = "0123456789abcdef" * 4
LIMIT_SECONDS = 60


@pytest.fixture
def lock(tmp_path):
    return BuildLock(tmp_path / "compiling")


def start(lock, body):
    """Another process, which has a lock of the same directory. It prints when it is ready."""
    code = f"""
        import os, sys, time
        from pathlib import Path
        from stepcache.storage.building import BuildLock
        lock, digest = BuildLock(Path({str(lock._path)!r})), {DIGEST!r}
    """
    code = textwrap.dedent(code) + textwrap.dedent(body)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def locked_elsewhere(lock, body=""):
    """A process that has locked the program, and then runs `body`, and waits."""
    code = "it = lock.try_lock(digest)\nassert it.is_locked\n" + textwrap.dedent(body)
    holder = start(lock, code + "\nprint('ready', flush=True)\ntime.sleep(600)")
    assert holder.stdout.readline() == "ready\n"
    return holder


def end(process):
    process.kill()
    process.wait()


def test_one_process_at_a_time(lock):
    holder = locked_elsewhere(lock)
    try:
        assert lock.try_lock(DIGEST) is None
        other = lock.try_lock("ab" * 32)
        assert other.is_locked
        assert not os.get_inheritable(other._file.descriptor)
        assert lock._path.stat().st_size == 0
    finally:
        end(holder)


@pytest.mark.parametrize("ends", ["it.release(was_stored=True)", "it = None"])
def test_what_nobody_holds_any_more_is_free(lock, ends):
    holder = locked_elsewhere(lock, ends)
    try:
        building = lock.try_lock(DIGEST)
        assert building is not None and building.is_locked == ("stored" in ends)
    finally:
        end(holder)
    assert lock.try_lock(DIGEST).is_locked


def test_what_cannot_be_stored_keeps_nobody_waiting(lock):
    """Each compiles for itself then, at once: not one after the other."""
    holder = locked_elsewhere(lock, "it.release()")
    try:
        here = lock.try_lock(DIGEST)
        assert here is not None and not here.is_locked
        there = start(lock, "print(lock.try_lock(digest).is_locked)")
        assert there.communicate()[0] == "False\n"
    finally:
        end(holder)


def test_the_lock_of_a_killed_process_is_free(lock):
    holder = locked_elsewhere(lock)
    assert lock.try_lock(DIGEST) is None
    end(holder)
    assert lock.try_lock(DIGEST).is_locked


def test_a_child_that_outlives_its_parent_holds_nobody(lock):
    holder = locked_elsewhere(lock, "if not os.fork(): time.sleep(600)")
    end(holder)
    try:
        assert lock.try_lock(DIGEST).is_locked
    finally:
        subprocess.run(["pkill", "-f", str(lock._path)], check=False)


def test_a_child_that_ends_leaves_the_lock_of_its_parent(lock):
    body = """
    if not (child := os.fork()):
        it.release()
        lock = None
        os._exit(0)
    os.waitpid(child, 0)
    """
    holder = locked_elsewhere(lock, body)
    try:
        assert lock.try_lock(DIGEST) is None
    finally:
        end(holder)


def test_a_directory_that_is_opened_twice_has_one_file(lock):
    """To close one descriptor of the file would unlock what was locked through another."""
    building_here = lock.try_lock(DIGEST)
    other = BuildLock(lock._path)
    assert other.try_lock("ab" * 32)._file is building_here._file
    del other
    gc.collect()
    there = start(lock, "print(lock.try_lock(digest))")
    assert there.communicate()[0] == "None\n"
    building_here.release(was_stored=True)
    descriptor = lock._file.descriptor
    del lock._file
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_many_processes_build_once(lock, tmp_path):
    """Each waits as long as another one builds; the first that builds is killed."""
    body = f"""
    made, tries = Path({str(tmp_path / "made")!r}), Path({str(tmp_path / "tries")!r})
    while not made.exists():
        building = lock.try_lock(digest)
        if building is None:
            time.sleep(0.002)
            continue
        if building.is_locked and not made.exists():
            descriptor = os.open(tries, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            is_first = os.fstat(descriptor).st_size == 0
            os.write(descriptor, b"x")
            time.sleep(0.05)
            if is_first:
                os.kill(os.getpid(), 9)
            made.touch()
        building.release(was_stored=True)
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

    monkeypatch.setattr(building.fcntl, "lockf", refuse)
    for _ in range(2):
        found = lock.try_lock(DIGEST)
        assert not found.is_locked
        found.release()


def test_a_directory_that_is_not_there(tmp_path):
    assert not BuildLock(tmp_path / "absent" / "compiling").try_lock(DIGEST).is_locked
