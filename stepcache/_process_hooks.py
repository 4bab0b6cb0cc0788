"""Every change that stepcache makes to the whole process or to a whole thread, and how it ends.

docs/process.md lists them for users. What is changed inside JAX stands in `jaxcompat/hooks.py`.
Each hook calls what it found in its place, and removes only itself: where other code has set
something else meanwhile, that stays.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any

from stepcache._changes import Shared, Undoing, shared

# In microseconds as Python keeps it, and no round number, to recognize what a user sets.
_SWITCH_SECONDS = 0.000053


class _Switching(Shared):
    _usual: float | None = None

    def _make(self, users: int) -> bool:
        usual = sys.getswitchinterval()
        if not users and usual > _SWITCH_SECONDS:
            self._usual = usual
            sys.setswitchinterval(_SWITCH_SECONDS)
        return True

    def _undo(self) -> None:
        ours = round(_SWITCH_SECONDS, 6)
        if self._usual is not None and round(sys.getswitchinterval(), 6) == ours:
            sys.setswitchinterval(self._usual)
        self._usual = None


_switching = _Switching()


@contextlib.contextmanager
def quick_switching() -> Iterator[None]:
    """Has Python switch between threads often, until the last user leaves or other code sets it."""
    with Undoing() as undoing, undoing:
        undoing.use(_switching)
        yield


# Objects made since the last collection, at which Python looks for the next one.
_OBJECTS_OF_A_TRACE = 20_000


class _RareCollections(Shared):
    """Has Python collect garbage rarely, until the last user leaves or other code sets it.

    A trace makes many objects and nearly no cycles of them, and Python looks through all objects
    whenever they have become a quarter more: about a seventh of the time of a long trace. To end
    this has Python collect at once, so it does not end between builds that follow each other.
    """

    _usual: tuple[int, int, int] | None = None

    def _make(self, users: int) -> bool:
        usual = gc.get_threshold()
        if not users and 0 < usual[0] < _OBJECTS_OF_A_TRACE:  # 0 is for never.
            self._usual = usual
            gc.set_threshold(_OBJECTS_OF_A_TRACE, *usual[1:])
        return True

    def _undo(self) -> None:
        usual = self._usual
        if usual is not None and gc.get_threshold() == (_OBJECTS_OF_A_TRACE, *usual[1:]):
            gc.set_threshold(*usual)
        self._usual = None


rare_collections = _RareCollections()


class _Collecting(threading.local):
    collecting = False


class CollectionHook(Shared):
    """Tells of garbage collections, from before all that they call to after it.

    Attributes:
        thread: of this thread: `collecting`. It stays true where another callback that removes
            itself has Python skip ours.
        codes: the code that Python calls for it.
    """

    def __init__(self):
        super().__init__()
        self.thread = thread = _Collecting()

        def first(phase: str, info: Any) -> None:
            if phase == "start":
                thread.collecting = True

        def last(phase: str, info: Any) -> None:
            if phase == "stop":
                thread.collecting = False

        self._first, self._last = first, last
        self.codes = frozenset((first.__code__, last.__code__))

    def _make(self, users: int) -> bool:
        if not users:
            # In this order: a collection in between must not begin without an end.
            gc.callbacks.append(self._last)
            gc.callbacks.insert(0, self._first)
        return True

    def _undo(self) -> None:
        for callback in (self._first, self._last):
            with contextlib.suppress(ValueError):
                gc.callbacks.remove(callback)


def set_profile(function: Any) -> None:
    """`sys.setprofile`, also where another thread is about to set one.

    Python 3.11 refuses that, once, while an audit hook is told of the other thread's call.
    """
    for _ in range(100):
        try:
            return sys.setprofile(function)
        except RuntimeError:  # Nothing more is entered here: it would be seen.
            continue
    return sys.setprofile(function)


class ThreadProfile:
    """`sys.setprofile` in this thread. A Python profiler that is there already gets events too."""

    def __init__(self, profile: Callable[[Any, Any, Any], None]):
        self._before = sys.getprofile()
        self._function: Any = None
        if self._before is not None and not callable(self._before):
            return  # Written in C: no Python function can call it.
        users: Any = getattr(self._before, "_stepcache_users", self._before)

        def both(frame: Any, event: Any, argument: Any) -> None:
            profile(frame, event, argument)
            users(frame, event, argument)

        # One call more for each event would be a fifth of the time of a trace.
        self._function = profile if users is None else both
        self._function._stepcache_users = users

    def start(self) -> bool:
        """False where a profiler written in C is active, which stays."""
        if self._function is None:
            return False
        set_profile(self._function)
        return True

    def stop(self) -> bool:
        """Goes back to the profiler of before; False where another was set, which stays."""
        if self._function is None or sys.getprofile() is not self._function:
            return False
        set_profile(self._before)
        return True


def at_return(frame: FrameType, function: Callable[[], None]) -> None:
    """Has a function called when a frame is left, by a profile that `ThreadProfile` has set.

    It is to be called by that profile, which need not look at each return for it.
    """
    before: Any = sys.getprofile()

    def until_return(at: Any, event: Any, argument: Any) -> None:
        before(at, event, argument)
        if at is frame and event == "return":
            set_profile(before)
            function()

    until_return._stepcache_users = getattr(before, "_stepcache_users", None)
    set_profile(until_return)


monitoring: Any = getattr(sys, "monitoring", None)  # Of Python 3.12.


class CallMonitor(Shared):
    """One tool of `sys.monitoring`, of Python 3.12, for all threads that watch calls.

    A place that is disabled stays so for the tool's number, whoever has it next. Python can enable
    all places again only for all tools at once (`restart_events`), which would disturb the others;
    so each code object is made to forget the tool instead. A number that has places which are
    disabled for good is kept, so that no other tool gets it.

    Args:
        on_start: callback of `PY_START`, of all code.
        on_call: callback of `CALL`, of the code given to `see_calls_from`.
        ending: code whose ends are to be seen.
        on_end: callback of `PY_RETURN` of that code, and of `PY_UNWIND` of all code.
    """

    _TOOLS = (4, 3)  # The other numbers belong to debuggers, coverage, profilers and optimizers.

    def __init__(self, on_start: Callable, on_call: Callable, ending: CodeType, on_end: Callable):
        super().__init__()
        names = ("PY_START", "CALL", "PY_RETURN", "PY_UNWIND")
        self._callbacks = dict(zip(names, (on_start, on_call, on_end, on_end), strict=True))
        self._ending = ending
        self._all = monitoring and monitoring.events.PY_START | monitoring.events.PY_UNWIND
        self._tools: list[int] = []
        self._touched: dict[int, CodeType] = {}
        self._calling: set[int] = set()
        self._kept: int | None = None

    def _make(self, users: int) -> bool:
        # What the first user has disabled, a second one has to see: by a second tool, which
        # disables nothing and serves all users.
        return len(self._tools) > min(users, 1) or self._take()

    def disable(self, code: CodeType, *, for_good: bool = False) -> Any:
        """What a callback returns for a place in `code` that it need not see again.

        Not even after the last user has stopped, if it is `for_good`.
        """
        if len(self._tools) != 1:
            return None
        if for_good:
            self._kept = self._tools[0]
        else:
            self._touched[id(code)] = code
        return monitoring.DISABLE

    def see_calls_from(self, code: CodeType) -> None:
        """Has the calls seen that some code makes, until the last user stops."""
        if id(code) not in self._calling:
            self._touched[id(code)] = code
            monitoring.set_local_events(self._tools[0], code, monitoring.events.CALL)
            self._calling.add(id(code))

    def see_again(self, codes: Iterable[CodeType]) -> None:
        """Has places seen again in some code for which `disable` was called."""
        if len(self._tools) != 1:
            return  # A second tool has disabled none.
        tool, events = self._tools[0], monitoring.events
        monitoring.set_events(tool, 0)
        for code in codes:
            self._enable(tool, code)
            if id(code) in self._calling:
                monitoring.set_local_events(tool, code, events.CALL)
        monitoring.set_events(tool, self._all)

    def _enable(self, tool: int, code: CodeType) -> None:
        # Python forgets disabled places with the last event.
        monitoring.set_local_events(tool, code, monitoring.events.PY_START)
        monitoring.set_local_events(tool, code, 0)

    def _take(self) -> bool:
        tool = self._kept if self._kept not in self._tools else None
        for number in self._TOOLS if tool is None else ():
            with contextlib.suppress(ValueError):
                monitoring.use_tool_id(number, _NAME)
                tool = number
                break
        if tool is None:
            return False
        self._tools.append(tool)
        events = monitoring.events
        for name, callback in self._callbacks.items():
            monitoring.register_callback(tool, getattr(events, name), callback)
        monitoring.set_local_events(tool, self._ending, events.PY_RETURN)
        monitoring.set_events(tool, self._all)
        return True

    def _undo(self) -> None:
        # Also those that were taken a moment ago, and are not in the list yet.
        taken = [tool for tool in self._TOOLS if monitoring and monitoring.get_tool(tool) == _NAME]
        for tool in taken:
            monitoring.set_events(tool, 0)
        events = monitoring and monitoring.events
        for tool in set(taken).intersection(self._tools[:1]):
            for code in self._touched.values():
                self._enable(tool, code)
        for tool in taken:
            monitoring.set_local_events(tool, self._ending, 0)
            for name in self._callbacks:
                monitoring.register_callback(tool, getattr(events, name), None)
            if tool != self._kept:
                monitoring.free_tool_id(tool)
        self._tools, self._touched, self._calling = [], {}, set()


_NAME = "stepcache"


@functools.cache
def audit(hook: Callable[[str, tuple], None]) -> None:
    """Adds an audit hook, once. Python has no way to take it away."""
    sys.addaudithook(hook)


at_exit = atexit.register

# Python 3.12.0 to 3.12.2 start no thread any more once the main thread has ended (python#113964).
THREADS_END_EARLY = (3, 12, 0) <= sys.version_info[:3] <= (3, 12, 2)


def before_threads_end(function: Callable[[], None]) -> None:
    """Has a function called when the main thread ends, while executors still take work."""
    import concurrent.futures.thread  # noqa: F401  (What is registered last is called first.)

    register = getattr(threading, "_register_atexit", None)
    (register or atexit.register)(function)


_at_ends: dict[Callable[[], None], Any] = {}


def at_end_of_child(function: Callable[[], None]) -> None:
    """Has a function called at the end of a `multiprocessing` child: forks run no exit handlers."""
    parent = getattr(sys.modules.get("multiprocessing.process"), "parent_process", None)
    if parent is None or parent() is None:
        return
    from multiprocessing import util

    known = _at_ends.get(function)
    if known is None or not known.still_active():  # A child forgets those of its parent.
        _at_ends[function] = util.Finalize(None, function, exitpriority=-100)  # The last.


def at_fork(**functions: Callable[[], None]) -> None:
    """As `os.register_at_fork`, where there is one."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(**functions)


def on_missing_attributes(owner: type, give: Callable[[Any, str, Callable], Any]) -> None:
    """Has a class ask a function for the attributes that an instance lacks, for good.

    The class has a `__getattr__`; `give` gets the instance, the name, and that `__getattr__`.
    """
    as_before: Any = vars(owner)["__getattr__"]

    @functools.wraps(as_before)
    def missing(self: Any, name: str) -> Any:
        return give(self, name, as_before)

    owner.__getattr__ = missing


@contextlib.contextmanager
def without_warnings(text: str) -> Iterator[None]:
    """Ignores the warnings whose message begins so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", text)
        yield


def without_log(undoing: Undoing, name: str, text: str) -> None:
    """Drops what is logged under a name and begins so."""
    logger, keeps = logging.getLogger(name), lambda each: not each.getMessage().startswith(text)
    undoing.add(logger.removeFilter, keeps)
    logger.addFilter(keeps)


@contextlib.contextmanager
def unreported(kind: type[BaseException]) -> Iterator[None]:
    """Keeps Python from reporting uncaught exceptions of one kind."""
    with _without(kind, sys, "unraisablehook"), _without(kind, threading, "excepthook"):
        yield


@contextlib.contextmanager
def _without(kind: type[BaseException], owner: Any, name: str) -> Iterator[None]:
    report = getattr(owner, name)

    def hook(raised: Any) -> None:
        if raised.exc_type is not kind:
            report(raised)

    setattr(owner, name, hook)
    try:
        yield
    finally:
        if getattr(owner, name) is hook:
            setattr(owner, name, report)


def _reset() -> None:
    """Undoes in a forked child what threads asked for that are not there."""
    for each in shared:
        each.reset()


at_fork(after_in_child=_reset)


@contextlib.contextmanager
def signals_handled(numbers: Sequence[int], handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Handles signals, but for those that the process was started to ignore."""
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        for number in numbers:
            if before[number] != signal.SIG_IGN:
                signal.signal(number, handler)
        yield
    finally:
        for number in numbers:
            signal.signal(number, before[number])
