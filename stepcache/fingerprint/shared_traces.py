"""Which traces of nested functions JAX may reuse from one step to another while both are recorded.

JAX caches the traces of nested functions, including most of `jax.numpy`, and does not enter these
functions again, so a later recording does not see what they used. Steps share such traces as long
as these are of JAX's code alone, which counts in every recording:

- If a step's own function is the only user code that a trace can enter, no nested trace enters any.
- Steps that call other functions of the user's share among themselves, as long as these functions
  run in the step's own trace alone. `Nesting` looks out for one that runs in a nested trace.

When one of either kind uses another library or reads a file, or when a nested trace enters the
user's code, sharing starts anew among its kind.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Set
from types import CodeType
from typing import NamedTuple

from stepcache import jaxcompat
from stepcache._changes import Undoing
from stepcache.fingerprint import installed_packages
from stepcache.fingerprint.findings import Findings
from stepcache.fingerprint.known_packages import IN_EACH_TRACE
from stepcache.fingerprint.nesting import Nesting
from stepcache.fingerprint.provenance import PYTHON, origin_of_file, package_of


class SharedTraces(NamedTuple):
    """Identifies the traces that the steps of one kind may share."""

    alone: bool  # The kind.
    epoch: int
    replacements: int


_lock = threading.Lock()
_active: SharedTraces | None = None
_epochs = {True: 0, False: 0}

# Code that uses these runs in nested traces, most of the time.
_NESTING = frozenset(
    "jit pjit scan while_loop fori_loop cond switch checkpoint remat custom_jvp custom_vjp "
    "shard_map eval_shape make_jaxpr associative_scan".split()
)


def may_nest(codes: Iterable[CodeType]) -> bool:
    """Whether code names what runs functions in nested traces, or these cannot be told from others.

    To begin to share is futile then.
    """
    return not jaxcompat.PRIVATE_API or any(
        not _NESTING.isdisjoint(each.co_names) for each in codes
    )


def begin(undoing: Undoing, alone: bool) -> SharedTraces | None:
    """Begins a recording that shares traces; `undoing` ends it if `end` has not.

    Args:
        undoing: its end.
        alone: whether the step's own function is the only user code that a trace can enter.

    Returns:
        A token of the traces that may be shared. It changes when a trace uses more than JAX, and
        when an object of JAX has been replaced. None while another thread makes such a recording.
    """
    global _active
    with _lock:
        if _active is not None:
            return None
        token = SharedTraces(alone, _epochs[alone], installed_packages.replacements())
        undoing.add(end, token, None, frozenset())
        _active = token
        return token


def is_outdated(token: SharedTraces, looked: bool) -> bool:
    """Whether an object of JAX has been replaced since `begin` gave a token.

    `looked` says whether the libraries that the step used have been examined since then.
    """
    if not looked:
        installed_packages.look_again()
    return token.replacements != installed_packages.replacements()


def end(token: SharedTraces, recording: Findings | None, own: Set[CodeType]) -> bool:
    """Ends the recording that `begin` gave a token of, if that has not been done.

    Args:
        token: the token.
        recording: what the step used; None where its trace failed.
        own: the code of the step's own function.

    Returns:
        Whether the token is that of the next one, too.
    """
    global _active
    with _lock:
        if _active is not token:
            return False
        stays = recording is not None and _is_of_jax(recording, own)
        if not stays:
            _epochs[token.alone] += 1
        _active = None
        return stays


def _is_of_jax(recording: Findings, own: Set[CodeType]) -> bool:
    """Whether a step used nothing but its own code, Python's and JAX's, and no trace nested it."""
    nesting = recording.nesting or Nesting(own)
    if nesting.found:
        return False
    if recording.files or recording.variables or recording.impure or recording.unavailable:
        return False
    entered = recording.entered.items()
    others = (each for each in entered if origin_of_file(each[1].co_filename) != PYTHON)
    return all(
        package_of(code.co_filename) in IN_EACH_TRACE or code in own or number in nesting.seen
        for number, code in others
    )
