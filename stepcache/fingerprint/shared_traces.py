"""Which traces of nested functions JAX may reuse from one step to another while both are recorded.

JAX caches the traces of nested functions, including most of `jax.numpy`, and does not enter these
functions again, so a later recording does not see what they used. If the step's own function is the
only user code that a trace can enter, the cached traces are of library code alone. Such steps share
them as long as they use only JAX, whose code counts in every recording. When one of them uses
another library or reads a file, sharing starts anew. Other steps share no traces.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Set
from types import CodeType

from stepcache._changes import Undoing
from stepcache.fingerprint import installed_packages
from stepcache.fingerprint.provenance import PYTHON, origin_of_file, package_of
from stepcache.fingerprint.recorder import OF_JAX, Recording

_lock = threading.Lock()
_active: tuple[str, int, int] | None = None
_epoch = 0


def begin(undoing: Undoing) -> tuple[str, int, int] | None:
    """Begins a recording that shares traces; `undoing` ends it if `end` has not.

    Returns:
        A token of the traces that may be shared. It changes when a trace uses more than JAX, and
        when an object of JAX has been replaced. None while another thread makes such a recording.
    """
    global _active
    with _lock:
        if _active is not None:
            return None
        token = ("of libraries", _epoch, installed_packages.replacements())
        undoing.add(end, token, None, frozenset())
        _active = token
        return token


def is_outdated(token: tuple[str, int, int], looked: bool) -> bool:
    """Whether an object of JAX has been replaced since `begin` gave a token.

    `looked` says whether the libraries that the step used have been examined since then.
    """
    if not looked:
        installed_packages.look_again()
    return token[2] != installed_packages.replacements()


def end(token: tuple[Hashable, ...], recording: Recording | None, own: Set[CodeType]) -> None:
    """Ends the recording that `begin` gave a token of, if that has not been done.

    Args:
        token: the token.
        recording: what the step used; None where its trace failed.
        own: the code of the step's own function.
    """
    global _active, _epoch
    with _lock:
        if _active is not token:
            return
        if recording is None or not _is_of_jax(recording, own):
            _epoch += 1
        _active = None


def _is_of_jax(recording: Recording, own: Set[CodeType]) -> bool:
    """Whether a step used nothing but its own code, Python's and JAX's."""
    if recording.files or recording.variables or recording.impure or recording.unavailable:
        return False
    entered = recording.entered.values()
    others = (code for code in entered if origin_of_file(code.co_filename) != PYTHON)
    return all(package_of(code.co_filename) in _SHARED or code in own for code in others)


_SHARED = OF_JAX | {"stepcache"}
