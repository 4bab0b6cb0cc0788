"""The error tree. Every error says what happened, where, expected and got, and what to try."""

from __future__ import annotations

import os
import re
import sys
import warnings


class StepCacheError(Exception):
    """Base class of all errors that stepcache itself raises.

    Errors that JAX raises are never wrapped: they reach the caller as JAX raised them.

    Args:
        what: one sentence that says what happened.
        where: the argument path, option or variable it is about.
        expected: what would have been accepted.
        got: what was found instead.
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


class OptionError(StepCacheError, TypeError):
    """An option of `step`, `Session`, `Rules` or `ProgramCache` is unknown or makes no sense."""


class PlacementError(StepCacheError, ValueError):
    """A leaf cannot be placed on the session's mesh as its rule, or the data axis, asks."""


class PaddingError(StepCacheError, ValueError):
    """An argument cannot be padded as `sc.Pad` asks, or an output depends on what was added."""


class CarryError(StepCacheError, TypeError):
    """The step's first output does not have the tree, shapes and dtypes of its carry; or an array
    that the step writes over is passed in several places.
    """


class CacheDirectoryError(StepCacheError):
    """The directory of the program cache is a URL, or one where others could put code."""


class StaleProgramError(StepCacheError, RuntimeError):
    """A program was in use that the step's function, traced now, does not give any more.

    Attributes:
        changes: what changed, as `Change` records.
    """

    def __init__(self, what: str, changes=(), **details):
        super().__init__(what, **details)
        self.changes = tuple(changes)


class RecompileError(StepCacheError, RuntimeError):
    """A call needed a new program where none was allowed to be built.

    Attributes:
        miss: the `Miss` that says which part of the key changed.
    """

    def __init__(self, what: str, miss, **details):
        super().__init__(what, **details)
        self.miss = miss


class VariablesError(StepCacheError, ValueError):
    """`Variables` are given what they cannot hold, or used where they are not."""


class TransferBudgetError(StepCacheError, RuntimeError):
    """A call would move more bytes than `Session(max_step_bytes=...)` allows. Nothing was moved.

    Attributes:
        needed_bytes: what the call would have moved.
        max_step_bytes: what it may move.
    """

    def __init__(self, what: str, needed_bytes: int, max_step_bytes: int, **details):
        super().__init__(what, **details)
        self.needed_bytes, self.max_step_bytes = needed_bytes, max_step_bytes


class AgreementError(StepCacheError, RuntimeError):
    """The processes of a pod do not make the same call, or one of them did not take part in time.

    Attributes:
        changes: what differs, as `Change` records: before, the first of `sides`; after, the second.
        sides: the ranks on each side; of very many, the largest sides.
    """

    def __init__(self, what: str, changes=(), sides=(), **details):
        super().__init__(what, **details)
        self.changes, self.sides = tuple(changes), tuple(sides)


class RankLostError(StepCacheError, RuntimeError):
    """A process of the pod was lost, so that no collective can complete.

    Attributes:
        ranks: the lost ranks; empty if unknown.
    """

    def __init__(self, what: str, ranks=(), **details):
        super().__init__(what, **details)
        self.ranks = tuple(ranks)


class ServerLostError(StepCacheError, RuntimeError):
    """The host of served variables has not answered in time. Nothing is known to be lost."""


class TaskError(StepCacheError, RuntimeError):
    """A step failed on the tasks of `Session(target=...)`, or they refuse what a client asks."""


class SessionClosedError(StepCacheError, RuntimeError):
    """A step was called in a session that has been closed."""


class ForkedProcessError(StepCacheError, RuntimeError):
    """A step was called in a process forked from one where JAX was already running."""


class StepCacheWarning(UserWarning):
    """Base class of the warnings that stepcache gives."""


class RecompileWarning(StepCacheWarning):
    """A call built a new program in a session with `on_miss="warn"`."""


class StaleProgramWarning(StepCacheWarning):
    """Something that a step depends on changed in this process after the step was traced.

    Not raised for the contents of lists and dicts, where functions may count their own traces.
    """


class UnmatchedRuleWarning(StepCacheWarning):
    """A rule of a session matched no leaf of a step that it was expected to place."""


_OWN_DIRECTORY = os.path.dirname(os.path.abspath(__file__))
_HIDDEN_DIRECTORIES = (_OWN_DIRECTORY, f"{os.sep}jax{os.sep}", f"{os.sep}jaxlib{os.sep}")


def warn(message: str, category: type[StepCacheWarning]) -> None:
    """Warns at the line of the caller's own code, past our frames and JAX's."""
    level, frame = 1, sys._getframe()
    while frame is not None and any(
        directory in frame.f_code.co_filename for directory in _HIDDEN_DIRECTORIES
    ):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


# `pathlib` and a shell's completion make one slash of two.
_URL = re.compile(r"[a-z][a-z0-9+.-]+:/", re.IGNORECASE)


def refuse_url(place: str | os.PathLike, error: type[StepCacheError], where: str) -> None:
    """Refuses a URL where only a directory of a file system is supported.

    Args:
        place: what the user gave as a directory.
        error: the class of the error.
        where: the option or variable that it was given in.

    Raises:
        StepCacheError: of the class `error`: it is a URL. Used as a path, it would make a directory
            such as `gs:` in the working directory.
    """
    text = os.fsdecode(place)
    if not _URL.match(text):
        return
    raise error(
        "This has to be a directory of a local or mounted file system, and not a URL",
        where=where,
        expected="the path of a directory",
        got=text,
        hint=_instead_of(text, error),
    )


def _instead_of(url: str, error: type[StepCacheError]) -> str:
    if url.lower().startswith("file:"):
        return "leave out file://"
    if error is CacheDirectoryError and url.lower().startswith(("s3:", "gs:")):
        remote = re.sub(":/+", "://", url)
        return f"STEPCACHE_REMOTE={remote} shares programs through an object store"
    return "copy the directory to or from the object store with that store's own tools"


def first_line(error: BaseException | None) -> str:
    """An error in one line: its class, and the first line of what it says."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
