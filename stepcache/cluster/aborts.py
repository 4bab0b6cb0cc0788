"""Aborts of this process: put off for some seconds, so that Python can say why, and seen meanwhile.

When JAX notices that the coordinator has gone, or that a process has been silent for the heartbeat
time-out, a thread of its own aborts each process. There is no hook before that (jaxlib's callback
cannot be a Python function).
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
from pathlib import Path

_THREADS = Path("/proc/self/task")
# A handler of a signal runs with that signal blocked, and no other.
_IN_THE_HANDLER = f"SigBlk:\t{1 << (signal.SIGABRT - 1):016x}"


def put_off_aborts() -> None:
    """Has an abort wait for six seconds, and then go on, so that nothing hangs.

    The signal's handler is the C library's `sleep`, the number of the signal being its argument.
    """
    library = ctypes.CDLL(None)
    library.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    library.signal.restype = ctypes.c_void_p
    library.signal(signal.SIGABRT, ctypes.cast(library.sleep, ctypes.c_void_p))


def is_aborting() -> bool:
    """Whether an abort is being put off just now, where Linux shows that."""
    with contextlib.suppress(OSError):
        for thread in _THREADS.iterdir():
            with contextlib.suppress(OSError):
                if _IN_THE_HANDLER in (thread / "status").read_text():
                    return True
    return False
