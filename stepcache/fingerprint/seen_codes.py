"""Code of libraries that recordings have seen, and need not see again to have it count.

All traces enter much of JAX's code, of stepcache's, and of a few modules of Python's library that
these use, so it is seen once in a process, and counts in each trace.
"""

from __future__ import annotations

import functools
from types import CodeType

from stepcache.fingerprint import active_recordings as active
from stepcache.fingerprint.callers import FOR_THEMSELVES
from stepcache.fingerprint.known_packages import IN_EACH_TRACE
from stepcache.fingerprint.provenance import package_of

counted: dict[int, CodeType] = {}
"""Code that has counted in some trace, by identity: so it does in each."""

made_by_frameworks: dict[int, CodeType] = {}
"""Code that frameworks have made by exec, by identity, such as methods of their dataclasses, and
that of named tuples."""

_of_jax: dict[int, CodeType] = {}
_shared_of_jax: dict[int, CodeType] = {}


def of_jax_so_far() -> dict[int, CodeType]:
    """What counts in all traces by now; the same dictionary as before where there is no more."""
    global _shared_of_jax
    shared = _shared_of_jax
    if len(shared) != len(_of_jax):
        shared = _shared_of_jax = _of_jax.copy()
    return shared


def count_in(codes: dict[int, CodeType]) -> None:
    """Has code of JAX's count as entered in this trace, and in all that come."""
    _of_jax.update(codes)


def note(code: CodeType) -> None:
    """Notes that code counts in the recordings of this thread."""
    if id(code) in counted and _is_in_all(code.co_filename):
        _of_jax[id(code)] = code
        return
    for recording in active.current():
        recording.entered[id(code)] = code


@functools.lru_cache(maxsize=8192)
def _is_in_all(filename: str) -> bool:
    return package_of(filename) in IN_EACH_TRACE or filename in FOR_THEMSELVES


def is_done_with(code: CodeType) -> bool:
    """Whether code that was seen once need not be seen again, in this trace or in another one."""
    identity = id(code)  # It calls audit hooks each time.
    return identity in _of_jax or identity in made_by_frameworks
