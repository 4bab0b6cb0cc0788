"""Which files a trace opens, as seen by an audit hook of Python.

Once there, the hook is called for everything that Python audits, each `id()` among it, and cannot
be taken away. So it is added when code is about to run that may open a file, and not before.
"""

from __future__ import annotations

import io
import os
import sys
from types import CodeType
from typing import Any

from stepcache import _process_hooks
from stepcache.fingerprint import imports
from stepcache.fingerprint.active_recordings import any_active, current
from stepcache.fingerprint.callers import is_of_imports, passes_by, responsible
from stepcache.fingerprint.compiled_calls import decided_by, opens_nothing
from stepcache.fingerprint.nondeterminism import inherited_from
from stepcache.fingerprint.provenance import PYTHON, USER, origin_of_file, state_of_file

_BLAMED_EVENTS = {
    "os.listdir": "lists a directory",
    "os.scandir": "lists a directory",
    "glob.glob": "lists a directory",
    "subprocess.Popen": "starts another process",
    "socket.connect": "uses the network",
    "urllib.Request": "uses the network",
    "sqlite3.connect": "reads a database",
}
_EVENTS = frozenset(("open", *_BLAMED_EVENTS))
_IOBASE = io.IOBase.__base__  # `issubclass` of the abstract one takes a tenth of a millisecond.
_IN_MEMORY = frozenset((io.StringIO, io.BytesIO))
_OPENERS = frozenset("open open_code FileIO fromfile listdir scandir Popen connect".split())


def watch_before(code: CodeType, module: dict[str, Any]) -> None:
    """Watches files from now on if code, about to run with these globals, may open one."""
    if not is_of_imports(code) and _names_an_opener(code, module):
        _process_hooks.audit(_audit)


def watch_before_call(function: Any, owner: Any = None) -> None:
    """Watches files from now on if a call of a function written in C, or of a class, may open one.

    `owner` is what it is a method of.
    """
    if isinstance(function, type):
        opens = _is_of_files(function)
    else:
        known = decided_by(function, owner)
        if known is not function:
            known = inherited_from(known, function.__name__)
        opens = not opens_nothing(known)
    if opens:
        _process_hooks.audit(_audit)


def _names_an_opener(code: CodeType, module: dict[str, Any]) -> bool:
    """Whether code speaks of what opens files; calls of classes, and from C, do not show."""
    if not _OPENERS.isdisjoint(code.co_names):
        return True
    values = [module.get(name) for name in code.co_names]
    # `isinstance` would ask a proxy for its class, as one of a module that is not imported yet.
    classes: list[Any] = [each for each in values if issubclass(type(each), type)]
    return any(map(_is_of_files, classes)) or any(
        each is opener for each in values for opener in (open, os.open, io.open_code)
    )


def _is_of_files(cls: type) -> bool:
    return _IOBASE in cls.__mro__ and _IN_MEMORY.isdisjoint(cls.__mro__)


def _audit(event: str, arguments: tuple) -> None:
    if event not in _EVENTS or not any_active():
        return
    if event == "open":
        _opened(*arguments[:2])
    else:
        caller = responsible(sys._getframe(1))
        if caller is not None:
            for recording in current():
                recording.impure[f"{caller}: it {_BLAMED_EVENTS[event]}"] = None


def _opened(path: Any, mode: Any = None) -> None:
    if isinstance(path, int) or (isinstance(mode, str) and ("w" in mode or not {*"r+"} & {*mode})):
        return
    frame = sys._getframe(2)
    while frame is not None and origin_of_file(frame.f_code.co_filename) == PYTHON:
        if passes_by(frame):
            return
        frame = frame.f_back
    if frame is not None and imports.of_this_thread().passes_over(frame.f_code):
        return
    text = os.fsdecode(path)
    if ".." not in text:  # Where one follows a link, it does not lead back.
        text = os.path.normpath(text)
    by_user = frame is not None and origin_of_file(frame.f_code.co_filename) == USER
    if text.endswith((".pyc", ".py", ".so")) and not by_user:
        return  # A library that shows source lines.
    of_system = text.startswith(_SYSTEM_FILES) and not text.startswith(_SHARED_MEMORY)
    if of_system and (not by_user or text == os.devnull):
        return
    state = state_of_file(text)
    for recording in current():
        if of_system or (state is None and os.path.exists(text)):  # noqa: PTH110
            caller = frame.f_code.co_qualname if frame is not None else "step"
            recording.impure[f"{caller}: it reads {text}"] = None
        else:
            recording.files[text] = state


_SYSTEM_FILES, _SHARED_MEMORY = ("/proc/", "/sys/", "/dev/"), "/dev/shm/"
