"""The error tree. Each error has: what happened, where, expected and got, and what to try."""

from __future__ import annotations

import copyreg
import logging
import os
import re
import sys
import threading
import warnings


class StepCacheError(Exception):
    """Base class of the errors that stepcache raises. Errors of JAX are never wrapped.

    Args:
        what: one sentence that says what happened.
        where: argument path, option or variable.
        expected: what is accepted.
        got: what was given.
        hint: what to try.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        expected: str | None = None,
        got: str | None = None,
        hint: str | None = None,
    ):
        self.what = what
        self.where = where
        self.expected = expected
        self.got = got
        self.hint = hint
        rows = [("at", where), ("expected", expected), ("got", got), ("try", hint)]
        lines = [what, *(f"  {label}: {text}" for label, text in rows if text is not None)]
        super().__init__("\n".join(lines))

    def __reduce__(self):
        # Without it, Python calls the class with the message alone, and some take more.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class OptionError(StepCacheError, TypeError):
    """An option is unknown, or its value is not possible."""


class PlacementError(StepCacheError, ValueError):
    """A leaf cannot be placed on the session's mesh by its rule or the data axis."""


class PaddingError(StepCacheError, ValueError):
    """An argument cannot be padded, or an output depends on the added rows (`Pad(check=True)`)."""


class StaleProgramError(StepCacheError):
    """A step is not the one for which the KEY of `ProgramCache(trust=)` vouches."""


class CarryError(StepCacheError, TypeError):
    """The first output has another tree, shape or dtype than the carry."""


class DonationError(CarryError, RuntimeError):
    """An array that a step donates is passed in several places."""


class CacheDirectoryError(StepCacheError):
    """The directory of the program cache is a URL, or other users can write to it."""


class RecompileError(StepCacheError, RuntimeError):
    """A call missed inside `no_recompile`, or in a session with `on_miss="error"`.

    Attributes:
        miss: the `Miss`, with the parts of the key that changed.
    """

    def __init__(self, what: str, miss, **details):
        super().__init__(what, **details)
        self.miss = miss


class VariablesError(StepCacheError, ValueError):
    """`Variables` cannot hold a value, or cannot be used in this place."""


class TransferBudgetError(StepCacheError, RuntimeError):
    """A call would move more bytes than `Session(max_step_bytes=...)` allows. Nothing was moved.

    Attributes:
        needed_bytes: bytes that the call would have moved.
        max_step_bytes: the limit.
    """

    def __init__(self, what: str, needed_bytes: int, max_step_bytes: int, **details):
        super().__init__(what, **details)
        self.needed_bytes, self.max_step_bytes = needed_bytes, max_step_bytes


class AgreementError(StepCacheError, RuntimeError):
    """The processes of a pod make different calls, or one did not make the call in time.

    Attributes:
        changes: differences, as `Change` records: `before` for the first of `sides`, `after` for
            the second.
        sides: the ranks on each side; if there are very many sides, the largest.
    """

    def __init__(self, what: str, changes=(), sides=(), **details):
        super().__init__(what, **details)
        self.changes, self.sides = tuple(changes), tuple(sides)


class RankLostError(StepCacheError, RuntimeError):
    """A process of the pod is lost, so that no collective can complete.

    Attributes:
        ranks: the lost ranks; empty if unknown.
    """

    def __init__(self, what: str, ranks=(), **details):
        super().__init__(what, **details)
        self.ranks = tuple(ranks)


class ServerLostError(StepCacheError, RuntimeError):
    """The host of served variables did not reply in time. Writes are kept, and sent again."""


class TaskError(StepCacheError, RuntimeError):
    """A step failed on the tasks of `Session(target=...)`, or they refused a request."""


class DeadlineError(StepCacheError, TimeoutError):
    """The tasks did not answer within `Session(deadline=...)`. They go on, and nothing is lost."""


class SessionClosedError(StepCacheError, RuntimeError):
    """A step was called in a session that has been closed."""


class ForkedProcessError(StepCacheError, RuntimeError):
    """A step was called, or a checkpoint saved, in a process forked after JAX had started."""


class StepCacheWarning(UserWarning):
    """Base class of the warnings of stepcache."""


class RecompileWarning(StepCacheWarning):
    """A call built a new program in a session with `on_miss="warn"`."""


class OptimizerWarning(StepCacheWarning):
    """The server keeps another optimizer for the variables than the one passed to open them."""


class UnmatchedRuleWarning(StepCacheWarning):
    """A rule of a session matches no leaf of the step's arguments."""


_OWN_DIRECTORY = os.path.dirname(os.path.abspath(__file__)) + os.sep


def warn(message: str, category: type[StepCacheWarning]) -> None:
    """Warns at the caller's line: the innermost frame outside of stepcache, JAX and threads.

    A thread of stepcache has no such frame; the warning then points to no line, and is logged where
    a filter turns it into an error, which nobody could catch.
    """
    packages = [sys.modules.get(name) for name in ("jax", "jaxlib", "concurrent.futures")]
    files = [getattr(each, "__file__", None) for each in packages]
    hidden = (_OWN_DIRECTORY, threading.__file__)
    hidden += tuple(os.path.dirname(file) + os.sep for file in files if file)
    level, frame = 1, sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(hidden):
        level, frame = level + 1, frame.f_back
    if frame is not None:
        warnings.warn(message, category, stacklevel=level)
        return
    try:
        warnings.warn_explicit(message, category, "<stepcache>", 0, module="stepcache")
    except category:
        logging.getLogger("stepcache").warning(message)


# `pathlib` and a shell's completion make one slash of two.
_URL = re.compile(r"[a-z][a-z0-9+.-]+:/", re.IGNORECASE)


def refuse_url(place: str | os.PathLike, error: type[StepCacheError], where: str) -> None:
    """Raises an error if a directory is a URL, which would create a directory such as `gs:`."""
    text = os.fsdecode(place)
    if not _URL.match(text):
        return
    what = "Expected a directory of a local or mounted file system, and not a URL"
    hint = _instead_of(text, error)
    raise error(what, where=where, expected="the path of a directory", got=text, hint=hint)


def _instead_of(url: str, error: type[StepCacheError]) -> str:
    if url.lower().startswith("file:"):
        return "leave out file://"
    if error is CacheDirectoryError and url.lower().startswith(("s3:", "gs:")):
        remote = re.sub(":/+", "://", url)
        return f"STEPCACHE_REMOTE={remote} shares programs through an object store"
    return "copy the directory to or from the object store with that store's own tools"


def first_line(error: BaseException | None) -> str:
    """Returns an error as one line: its class, and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}".rstrip(": ")
