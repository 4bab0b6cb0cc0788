"""Images of a host: its arrays in files, written without waiting for the disk.

The kernel keeps what a process has written to a file even if the process is killed. So an image
survives a kill of the host as a snapshot does, and costs one copy in memory. It does not survive a
crash of the machine: only snapshots, which wait for the disk, do. The kernel writes the files to
the disk about every 30 seconds, however many images are written until then.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepcache.link import plain
from stepcache.serving.held import HostState
from stepcache.serving.shared_memory import Block
from stepcache.serving.snapshots import arrays_of, begun, contents
from stepcache.storage.private_files import write_at

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_LENGTH_BYTES, _PAGE_BYTES = 8, 4096
_NAMES = ("image-0", "image-1")

_log = logging.getLogger("stepcache")

CAN_IMAGE = _BOOT_ID.exists()
"""Whether the system identifies its boot, so that images of earlier boots are recognized."""


class Images:
    """Two files, so that one is whole while the other one is written.

    A file holds the length of its head, the head, and from the next page on the arrays. The length
    is written last; it is 0 until the rest is whole.

    Args:
        directory: directory of the host.
    """

    def __init__(self, directory: Path):
        self._paths = [directory / name for name in _NAMES]

    def write(self, state: HostState) -> None:
        """Overwrites the older of the two images."""
        items, about = contents(state)
        head = plain.pack([_BOOT_ID.read_text(), about])
        path, *rest = self._paths
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            write_at(descriptor, 0, memoryview(bytes(_LENGTH_BYTES)))
            offset = write_at(descriptor, _LENGTH_BYTES, memoryview(head))
            for array in arrays_of(items):
                offset = write_at(descriptor, _next_page(offset), array.data)
            length = len(head).to_bytes(_LENGTH_BYTES, "little")
            write_at(descriptor, 0, memoryview(length))
        finally:
            os.close(descriptor)
        self._paths = [*rest, path]

    def newest(self, allocate: Callable[[int], Block]) -> HostState | None:
        """Reads the newest image that was written since the machine booted; None for none."""
        found = [(about["moment"], path, about) for path in self._paths if (about := _about(path))]
        if not found:
            return None
        _, path, about = max(found, key=lambda row: row[0])
        try:
            with path.open("rb") as file:
                offset = _LENGTH_BYTES + int.from_bytes(file.read(_LENGTH_BYTES), "little")
                state, items = begun(about, allocate)
                for array in arrays_of(items):
                    file.seek(_next_page(offset))
                    if file.readinto(array.data) != array.size:
                        raise OSError("the file is too short")
                    offset = file.tell()
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.error("the image %s cannot be read: %s", path, error)
            return None
        self._paths = [*(each for each in self._paths if each != path), path]
        return state

    def remove(self) -> None:
        """Removes both images."""
        for path in self._paths:
            path.unlink(missing_ok=True)


def _next_page(offset: int) -> int:
    return -(-offset // _PAGE_BYTES) * _PAGE_BYTES


def _about(path: Path) -> dict[str, Any] | None:
    """Reads the head of an image; None if the image is not whole, or of an earlier boot."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            boot, about = plain.unpack(file.read(length))
    except (OSError, ValueError, TypeError):
        return None
    return about if boot == _BOOT_ID.read_text() else None
