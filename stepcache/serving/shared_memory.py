"""Blocks of memory that processes of one machine share, without files that could be left behind.

A block is a memfd of Linux: it has no name, and goes with the last process that maps it. Others of
the same user open it through `/proc/<pid>/fd`, if the kernel lets them. It is sealed against
shrinking, so that a process that reads it cannot be killed by one that cuts it off.
"""

from __future__ import annotations

import collections
import errno
import fcntl
import mmap
import os
import stat
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path

import numpy as np

INLINE_BYTES = 64 << 10
"""Smaller blocks travel inside messages."""

_F_ADD_SEALS, _F_GET_SEALS, _F_SEAL_SHRINK = 1033, 1034, 2
_SEGMENT_BYTES = 16 << 20  # Of one file with several blocks: a process may open few files.
_KEPT_UNUSED_BYTES = 1 << 30
_PAGE_BYTES = 4096
_OPENED_AT_MOST = 512
CAN_SHARE = hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir()


@dataclass(frozen=True, slots=True)
class Place:
    """Where another process finds a block: in a file that this one has open."""

    pid: int
    descriptor: int
    inode: int
    offset: int
    size_bytes: int


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


class SharedBlock:
    """Memory of a value.

    Attributes:
        data: its bytes.
        place: where others find it; None for memory of this process alone.
    """

    __slots__ = ("__weakref__", "data", "place")

    def __init__(self, data: np.ndarray, place: Place | None = None):
        self.data, self.place = data, place


class Pool:
    """Makes blocks, of memory that earlier ones had if there is any: new memory costs more.

    What is written to a block must be done, and nobody may read it any more, when the last
    reference to the block goes.
    """

    def __init__(self) -> None:
        self._segments: dict[int, list[_Segment]] = collections.defaultdict(list)
        self._unused_bytes = 0  # Of segments without blocks.
        self._lock = threading.RLock()  # Blocks may be freed by the garbage collector, anywhere.

    def allocate(self, size_bytes: int) -> SharedBlock:
        """A block of so many bytes, of any content."""
        if size_bytes < INLINE_BYTES or not CAN_SHARE:
            return SharedBlock(np.empty(size_bytes, np.uint8))
        slot_bytes = _slot_bytes(size_bytes)
        with self._lock:
            segments = self._segments[slot_bytes]
            segment = next((each for each in segments if each.free), None)
            if segment is None:
                segment = _Segment(slot_bytes)
                segments.append(segment)
            elif len(segment.free) == segment.slots:
                self._unused_bytes -= slot_bytes * segment.slots
            offset = segment.free.pop()
        data = np.frombuffer(segment.map, np.uint8, size_bytes, offset)
        place = Place(os.getpid(), segment.descriptor, segment.inode, offset, size_bytes)
        block = SharedBlock(data, place)
        weakref.finalize(block, self._give_back, segment, offset).atexit = False
        return block

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
    """A size that many blocks share: at most a fifth more than is asked for."""
    step = max(_PAGE_BYTES, 1 << max(size_bytes.bit_length() - 4, 0))
    return -(-size_bytes // step) * step


class Opened:
    """Blocks of other processes, mapped to be read. Maps are kept: to make one costs page faults.

    A file stays open as long as its map, so that its inode stands for no other one.
    """

    def __init__(self) -> None:
        self._maps: collections.OrderedDict[tuple[int, int], tuple[int, mmap.mmap]] = (
            collections.OrderedDict()
        )
        self._lock = threading.Lock()

    def open(self, place: Place) -> np.ndarray:
        """The bytes of a block, read only.

        Raises:
            OSError: there is no such block, or it could shrink while it is read.
        """
        key = (place.pid, place.inode)
        with self._lock:
            found = self._maps.get(key)
            if found is None:
                found = self._mapped(place)
                self._maps[key] = found
            self._maps.move_to_end(key)
            while len(self._maps) > _OPENED_AT_MOST:
                self._close(*self._maps.popitem(last=False)[1])
            if not 0 <= place.offset <= len(found[1]) - place.size_bytes:
                raise OSError(errno.EINVAL, "this is no block", str(place))
            return np.frombuffer(found[1], np.uint8, place.size_bytes, place.offset)

    def _mapped(self, place: Place) -> tuple[int, mmap.mmap]:
        path = f"/proc/{place.pid}/fd/{place.descriptor}"
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_ino != place.inode:
                raise OSError(errno.ESTALE, "the block is gone", path)
            sealed = fcntl.fcntl(descriptor, _F_GET_SEALS) & _F_SEAL_SHRINK
            if not sealed or not found.st_size:
                raise OSError(errno.EINVAL, "this is no block", path)
            return descriptor, mmap.mmap(descriptor, found.st_size, prot=mmap.PROT_READ)
        except BaseException:
            os.close(descriptor)
            raise

    def forget(self, pid: int) -> None:
        """Drops the blocks of a process that has ended."""
        with self._lock:
            for key in [key for key in self._maps if key[0] == pid]:
                self._close(*self._maps.pop(key))

    @staticmethod
    def _close(descriptor: int, mapped: mmap.mmap) -> None:
        os.close(descriptor)
        del mapped  # Closed when no array refers to it.
