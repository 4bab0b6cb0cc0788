"""Blocks of memory that processes of one machine share, without files that could be left behind.

A block lies in a memfd of Linux, which has no name, and which the kernel frees with the last
process that maps it. Other processes of the same user open it through `/proc/<pid>/fd`. It is
sealed against shrinking: a reader of a file that shrinks would be killed. A reader locks its
blocks, so that their memory is not reused.
"""

from __future__ import annotations

import collections
import errno
import fcntl
import mmap
import os
import resource
import stat
import struct
import threading
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stepcache.link import plain
from stepcache.serving.messages import MalformedMessageError

INLINE_BYTES = 64 << 10
"""Smaller blocks are sent as part of a message."""

_F_ADD_SEALS, _F_GET_SEALS, _F_SEAL_SHRINK = 1033, 1034, 2
_SEGMENT_BYTES = 16 << 20  # Size of a file for several blocks: open files are limited.
_KEPT_UNUSED_BYTES = 1 << 30
_PAGE_BYTES = 4096
_OPENED_AT_MOST, _OPENED_BYTES = 512, 4 << 30


_PLACE = tuple[int, int, int, int, int]


class Place(NamedTuple):
    """The address of a block for other processes: in a file that this process has open."""

    pid: int
    descriptor: int
    inode: int
    offset: int
    size_bytes: int

    @classmethod
    def of(cls, row: Any) -> Place:
        """Returns the address that a message brings. Raises `MalformedMessageError` for none."""
        if not plain.fits(row, _PLACE) or not 0 < row[-1] < 1 << 62:
            raise MalformedMessageError("a block has no place")
        return cls(*row)


class _Segment:
    """One memfd, mapped, for blocks of one size."""

    def __init__(self, slot_bytes: int):
        self.slot_bytes = slot_bytes
        size_bytes = slot_bytes * max(1, _SEGMENT_BYTES // slot_bytes)
        self.descriptor = os.memfd_create("stepcache", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        closing = weakref.finalize(self, os.close, self.descriptor)
        closing.atexit = False
        os.ftruncate(self.descriptor, size_bytes)
        fcntl.fcntl(self.descriptor, _F_ADD_SEALS, _F_SEAL_SHRINK)
        self.map = mmap.mmap(self.descriptor, size_bytes)  # Closed when no array refers to it.
        self.inode = os.fstat(self.descriptor).st_ino
        self.free = list(range(0, size_bytes, slot_bytes))
        self.slots = len(self.free)

    def take(self) -> int | None:
        """Takes a free block that no process reads; returns its offset, or None."""
        for offset in reversed(self.free):
            if not _is_locked(self.descriptor, offset):
                self.free.remove(offset)
                return offset
        return None


class Block:
    """Memory of a value. It is freed or reused when no reference to it is left.

    Attributes:
        data: the bytes, in one dimension.
        place: address for other processes; None for private memory.
    """

    __slots__ = ("__weakref__", "data", "place")

    def __init__(self, data: np.ndarray, place: Place | None = None):
        self.data, self.place = data, place


def private(size_bytes: int) -> Block:
    """Allocates a block of private memory."""
    return Block(np.empty(size_bytes, np.uint8))


class Pool:
    """Allocates blocks. It reuses the memory of freed blocks, as new memory costs page faults.

    A block is freed with its last reference here. A process that still reads it must have locked it
    before.
    """

    def __init__(self) -> None:
        self._segments: dict[int, list[_Segment]] = collections.defaultdict(list)
        self._unused_bytes = 0  # Of segments without blocks.
        self._lock = threading.RLock()  # The garbage collector may free blocks at any point.

    def allocate(self, size_bytes: int) -> Block:
        """Allocates a block of this many bytes, of undefined content."""
        if size_bytes < INLINE_BYTES or not CAN_SHARE:
            return private(size_bytes)
        slot_bytes = _slot_bytes(size_bytes)
        with self._lock:
            segment, offset = self._taken(slot_bytes)
        data = np.frombuffer(segment.map, np.uint8, size_bytes, offset)
        place = Place(os.getpid(), segment.descriptor, segment.inode, offset, size_bytes)
        block = Block(data, place)
        weakref.finalize(block, self._give_back, segment, offset).atexit = False
        return block

    def _taken(self, slot_bytes: int) -> tuple[_Segment, int]:
        """Takes a block of this size; returns its segment and its offset there."""
        for segment in self._segments[slot_bytes]:
            was_unused = len(segment.free) == segment.slots
            if (offset := segment.take()) is not None:
                self._unused_bytes -= was_unused * slot_bytes * segment.slots
                return segment, offset
        segment = _Segment(slot_bytes)
        self._segments[slot_bytes].append(segment)
        return segment, segment.free.pop()

    def _give_back(self, segment: _Segment, offset: int) -> None:
        with self._lock:
            segment.free.append(offset)
            if len(segment.free) < segment.slots:
                return
            size_bytes = segment.slot_bytes * segment.slots
            if self._unused_bytes + size_bytes <= _KEPT_UNUSED_BYTES:
                self._unused_bytes += size_bytes
            else:
                self._segments[segment.slot_bytes].remove(segment)


def _slot_bytes(size_bytes: int) -> int:
    """Rounds a size up by at most a fifth, so that many blocks are of one size."""
    step = max(_PAGE_BYTES, 1 << max(size_bytes.bit_length() - 4, 0))
    return -(-size_bytes // step) * step


class _OpenedFile:
    """A file of another process, mapped for reading."""

    def __init__(self, place: Place):
        path = f"/proc/{place.pid}/fd/{place.descriptor}"
        self.descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor).atexit = False
        found = os.fstat(self.descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_ino != place.inode:
            raise OSError(errno.ESTALE, "the block is gone", path)
        sealed = fcntl.fcntl(self.descriptor, _F_GET_SEALS) & _F_SEAL_SHRINK
        if not sealed or not found.st_size:
            raise OSError(errno.EINVAL, "the file holds no blocks", path)
        self.size_bytes = found.st_size
        self._map = mmap.mmap(self.descriptor, found.st_size, prot=mmap.PROT_READ)
        self._readers: collections.Counter[int] = collections.Counter()  # By offset.
        self._lock = threading.RLock()  # The garbage collector may free arrays at any point.
        self._pid = os.getpid()

    def array(self, place: Place) -> np.ndarray:
        if not 0 <= place.offset <= len(self._map) - place.size_bytes:
            raise OSError(errno.EINVAL, "the block is outside its file", str(place))
        return np.frombuffer(self._map, np.uint8, place.size_bytes, place.offset)

    def locked(self, place: Place) -> np.ndarray:
        data = self.array(place)
        with self._lock:
            self._readers[place.offset] += 1
            _set_lock(self.descriptor, place.offset, fcntl.F_RDLCK)
        weakref.finalize(data, self._unlock, place.offset).atexit = False
        return data

    def _unlock(self, offset: int) -> None:
        if self._pid != os.getpid():  # A forked child has the locks in common with its parent.
            return
        with self._lock:
            self._readers[offset] -= 1
            if not self._readers[offset]:
                del self._readers[offset]
                _set_lock(self.descriptor, offset, fcntl.F_UNLCK)


class Opened:
    """Maps blocks of other processes for reading. It keeps the maps, as new ones cost page faults.

    A file stays open as long as its map, so that no other file gets its inode number. The latest
    512 are kept, of 4 GiB at most: a map keeps memory that its owner may have freed.
    """

    def __init__(self) -> None:
        self._size_bytes = 0
        self._files: collections.OrderedDict[tuple[int, int], _OpenedFile] = (
            collections.OrderedDict()
        )
        self._lock = threading.Lock()

    def open(self, place: Place) -> np.ndarray:
        """Maps a block, read only, whose owner must not reuse the memory meanwhile.

        Raises `OSError`, as `locked` does, if there is no such block or its file is not sealed.
        """
        return self._file(place).array(place)

    def locked(self, place: Place) -> np.ndarray:
        """Maps and locks a block: its owner does not reuse the memory before the array is freed."""
        return self._file(place).locked(place)

    def passed_on(self, place: Place) -> tuple[Place, np.ndarray]:
        """Maps and locks a block for other processes.

        Returns its address in this process, valid while the array is referred to; and the array.
        """
        file = self._file(place)
        data = file.locked(place)
        return place._replace(pid=os.getpid(), descriptor=file.descriptor), data

    def _file(self, place: Place) -> _OpenedFile:
        key = (place.pid, place.inode)
        with self._lock:
            if key not in self._files:
                self._files[key] = made = _OpenedFile(place)
                self._size_bytes += made.size_bytes
            self._files.move_to_end(key)
            while len(self._files) > 1 and (
                len(self._files) > _OPENED_AT_MOST or self._size_bytes > _OPENED_BYTES
            ):
                self._size_bytes -= self._files.popitem(last=False)[1].size_bytes
            return self._files[key]

    def forget(self, pid: int) -> None:
        """Drops the maps of a process that has ended."""
        with self._lock:
            for key in [key for key in self._files if key[0] == pid]:
                self._size_bytes -= self._files.pop(key).size_bytes


# ---- locks -------------------------------------------------------------------------------------
# A reader locks the first byte of a block in its own open file. The kernel releases the lock when
# the reader ends, even if it is killed.

_FLOCK = "hhqqi"  # Type, whence, start, length and process of a `struct flock`.


def _set_lock(descriptor: int, offset: int, kind: int) -> None:
    row = struct.pack(_FLOCK, kind, os.SEEK_SET, offset, 1, 0)
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, row)


def _is_locked(descriptor: int, offset: int) -> bool:
    row = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, offset, 1, 0)
    found = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, row)
    return struct.unpack(_FLOCK, found)[0] != fcntl.F_UNLCK


def allow_many_files() -> None:
    """Lets this process open as many files as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _can_share() -> bool:
    if not hasattr(os, "memfd_create") or not Path("/proc/self/fd").is_dir():
        return False
    descriptor = os.memfd_create("stepcache", os.MFD_CLOEXEC)
    try:
        _set_lock(descriptor, 0, fcntl.F_RDLCK)
    except OSError:  # Some sandboxes have no such locks.
        return False
    finally:
        os.close(descriptor)
    return True


CAN_SHARE = _can_share()
