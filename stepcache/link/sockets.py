"""Where the socket of a directory is."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from stepcache.errors import CacheDirectoryError
from stepcache.storage.private_files import make_directory

_MAX_SOCKET_PATH = 100  # Of 107 that the system allows.


def socket_path(directory: Path) -> str:
    """Returns a path for the socket of a directory, short enough and in a private directory."""
    name = hashlib.sha256(str(directory).encode()).hexdigest()[:24]
    for parent in (tempfile.gettempdir(), "/tmp"):
        private = Path(parent) / f"stepcache-{os.geteuid()}"
        path = str(private / f"{name}.ipc")
        if len(path) <= _MAX_SOCKET_PATH:
            make_directory(private, "sockets", "set TMPDIR to another directory")
            return path
    raise CacheDirectoryError("there is no directory with a short path for a socket", got=path)
