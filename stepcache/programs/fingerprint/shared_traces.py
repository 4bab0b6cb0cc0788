"""Which traces of nested functions JAX may reuse from one step to another while both are recorded.

JAX keeps the traces of nested functions, most of `jax.numpy` among them, and does not enter these
again. So what they used is not seen a second time. Where nothing of the user's but the step's own
function can be nested, what they used is the libraries', and the recordings of all such steps
are taken together: each has used what any of them has. Other steps share no traces.
"""

from __future__ import annotations

import threading
from types import CodeType
from typing import Any

from stepcache.jaxcompat import primitives_of
from stepcache.programs.fingerprint import installed_packages
from stepcache.programs.fingerprint.origin import INSTALLED, USER, origin_of_file
from stepcache.programs.fingerprint.recording import Recording

_lock = threading.Lock()
_active = False
_epoch = 0
_together = Recording()
_primitives: set[str] = set()
_lowered: set[str] = set()


def begin() -> tuple[int, Recording] | None:
    """Begins a recording that shares traces; None while another thread makes one.

    Returns:
        What tells the traces that may be shared from others, and what was used by them.
    """
    global _active
    with _lock:
        if _active:
            return None
        _active = True
        return _epoch, _together


def token(epoch: int) -> tuple[str, int, int]:
    """Names the traces that may be shared: made since then, with the libraries as they are."""
    return "libraries", epoch, installed_packages.replacements()


def was_lowered(staged: Any) -> bool:
    """Whether all primitives in a trace have been lowered while that was recorded.

    How a primitive is lowered is the libraries' affair, so it need not be recorded again.
    """
    global _primitives
    _primitives = primitives_of(staged.jaxpr)
    return _primitives <= _lowered


def end(recording: Recording | None, own: set[CodeType]) -> Recording:
    """Ends a recording that shares traces.

    Args:
        recording: what the step used; None where its trace failed.
        own: the code of the step's own function.

    Returns:
        What all of them have used.
    """
    global _active, _epoch, _together
    with _lock:
        _active = False
        together = _together if recording is None else _together.with_all_of(recording)
        if recording is None or not _is_of_libraries(recording, own):
            _epoch, _together = _epoch + 1, Recording()
            _lowered.clear()
            return together
        _lowered.update(_primitives)
        if not together.codes <= _together.codes | own:
            _together = Recording({c for c in together.codes if _is_installed(c)})
        return together


def _is_installed(code: CodeType) -> bool:
    return origin_of_file(code.co_filename) == INSTALLED


def _is_of_libraries(recording: Recording, own: set[CodeType]) -> bool:
    """Whether a step used nothing but its own code and that of libraries."""
    if recording.files or recording.variables or recording.impure or recording.unavailable:
        return False
    return all(origin_of_file(code.co_filename) != USER for code in recording.codes - own)
