"""Which code runs because a trace imports an installed package.

It is no part of the trace: what it calls and reads counts no more than where the package was
imported before. To record it would take ten times as long as the import. Code of the user's that it
calls counts, as anywhere.
"""

from __future__ import annotations

import importlib
import threading
from types import CodeType, FrameType
from typing import Any

from stepcache.fingerprint.provenance import INSTALLED, USER, origin_of_file, origin_of_module

FIND_AND_LOAD: CodeType = vars(importlib)["_bootstrap"]._find_and_load.__code__
"""What Python calls, with a name, to import a module that is not loaded."""


class Importing:
    """The import of a package that a thread is in, if it is in one.

    Attributes:
        frame: that of the outermost one within the innermost recording.
        passed: what was passed over meanwhile, by identity, and has to be looked at after it.
    """

    __slots__ = ("frame", "passed")

    def __init__(self) -> None:
        self.frame: FrameType | None = None
        self.passed: dict[int, Any] = {}

    def begin(self, frame: FrameType) -> bool:
        """`FIND_AND_LOAD` is entered; returns whether an import of a package begins with that."""
        begins = self.frame is None and origin_of_module(frame.f_locals["name"]) == INSTALLED
        if begins:
            self.frame = frame
        return begins

    def passes_over(self, code: CodeType) -> bool:
        """Whether code that is entered, or that calls something, does so for the import."""
        return self.frame is not None and origin_of_file(code.co_filename) != USER

    def end(self, frame: FrameType) -> dict[int, Any]:
        """`FIND_AND_LOAD` is left; returns what was passed over if that was the outermost."""
        if frame is not self.frame:
            return {}
        passed, self.frame, self.passed = self.passed, None, {}
        return passed


_threads = threading.local()


def of_this_thread() -> Importing:
    """The import that this thread is in."""
    try:
        return _threads.importing
    except AttributeError:
        importing = _threads.importing = Importing()
        return importing
