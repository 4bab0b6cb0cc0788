"""What a trace really used: code entered, files and environment variables read, impure calls.

A recording runs in one thread, around one trace. On Python 3.12 and later it is made by
`sys.monitoring`, which costs little; before, by `sys.setprofile`, which about doubles the time of
that one trace.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import linecache
import random
import sys
import tokenize
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from stepcache import _process_hooks
from stepcache.fingerprint import active_recordings as active
from stepcache.fingerprint import (
    compiled_calls,
    imports,
    jax_alone,
    opened_files,
    seen_codes,
    set_order,
    shared_state,
)
from stepcache.fingerprint.asked_by_name import (
    READERS_OF_ENVIRONMENT,
    keeps_settings,
    settings_read,
    variables_read,
)
from stepcache.fingerprint.callers import (
    OF_EQUINOX,
    calls_matter,
    is_bystander,
    is_for_caches_of_jax,
    is_import_hook,
    is_of_imports,
    responsible,
)
from stepcache.fingerprint.classes import OF_FIELDS, is_plain
from stepcache.fingerprint.compiled_calls import decided_by, is_harmless, may_be_impure
from stepcache.fingerprint.findings import Findings
from stepcache.fingerprint.known_packages import FRAMEWORKS
from stepcache.fingerprint.nondeterminism import why_impure
from stepcache.fingerprint.provenance import (
    PYTHON,
    USER,
    origin_of,
    origin_of_file,
    origin_of_module,
)

_IMPORT_MODULE = importlib.import_module.__code__
_READ_LINES = (linecache.updatecache.__code__, tokenize.open.__code__)
_SEED = random.Random.seed.__code__
_READERS_OF_FIELDS = {
    id(function.__code__): function.__code__
    for function in (dataclasses.fields, dataclasses.replace, vars(dataclasses).get("_replace"))
    if function is not None
}
"""What reads all fields of a dataclass, by identity: all else in `dataclasses` calls these."""


@dataclass(slots=True, eq=False)
class Recording(Findings):
    """Finds what a trace uses, between `begin` and `end`."""

    _watch: _Watch | None = field(default=None, init=False, repr=False)
    _why_not: str = field(default="", init=False, repr=False)
    _within: FrameType | None = field(default=None, init=False, repr=False)  # An import around it.

    def begin(self) -> None:
        """Begins to watch this thread; `end` ends that, also where this is interrupted."""
        if not active.any_active():
            active.collections.thread.collecting = False
        importing = imports.of_this_thread()
        self._within, importing.frame = importing.frame if active.any_active() else None, None
        active.collections.start(self)
        active.state.__dict__.setdefault("stack", []).append(self)
        self._watch = watch = _Watch()
        self._why_not = watch.start(self)

    def end(self) -> None:
        """Ends what `begin` began. To call it again changes nothing."""
        stack = getattr(active.state, "stack", [])
        if self in stack:
            stack.remove(self)
        watch = self._watch
        if watch is not None:
            self.unavailable = self._why_not or watch.stop(self) or self.unavailable
            if active.collections.thread.collecting:
                self.unavailable = _NO_END_OF_COLLECTION
            self.of_jax = seen_codes.of_jax_so_far()
            self._watch = None
            imports.of_this_thread().frame = self._within
        active.collections.stop(self)

    def __enter__(self) -> Recording:
        self.begin()
        return self

    def __exit__(self, *exception) -> None:
        self.end()


def _enter(code: CodeType, frame: FrameType) -> bool:
    """Notes code; False where the same code may yet be entered in a way that counts."""
    if code in active.collections.codes:
        return True
    if code in READERS_OF_ENVIRONMENT:
        for recording in active.current():
            recording.variables |= variables_read(code, frame)
        return False
    if keeps_settings(code.co_filename):
        for recording in active.current():
            recording.settings |= settings_read(code, frame)
        seen_codes.note(code)
        return False
    if code in _READ_LINES and frame.f_locals["filename"].endswith(".py"):
        return False  # Of the source, for a traceback.
    if code is _IMPORT_MODULE:
        _note_import(frame)
        return False
    if id(code) in _READERS_OF_FIELDS:
        _note_reader_of_fields(code, frame)
        return False
    if code is _SEED:
        if frame.f_locals.get("a") is None:  # Compiled code then asks the system for a seed.
            _blame(why_impure("random.Random.seed"), frame)
        return False
    made = code.co_filename.startswith("<")
    if made:  # By exec: whose it is, its globals tell.
        name = frame.f_globals.get("__name__", "")
        of_tuple = name.startswith("namedtuple_")
        if of_tuple or origin_of_module(name) != USER:
            if of_tuple or name.partition(".")[0] in FRAMEWORKS:
                seen_codes.made_by_frameworks[id(code)] = code
            return True
        if code.co_name == "__hash__" and is_for_caches_of_jax(frame):
            return False
        if code.co_filename.startswith(OF_EQUINOX):
            _note_class(code, frame)
    origin = origin_of_file(code.co_filename)
    if origin != PYTHON and is_import_hook(frame):
        return False
    if origin == USER and not made and is_bystander(frame):
        return False
    if origin != USER and not made:
        seen_codes.counted[id(code)] = code
    opened_files.watch_before(code, frame.f_globals)
    if set_order.loops_over_given(code, frame):
        for recording in active.current():
            recording.over_sets.add(id(code))
        if origin != USER:  # Another recording will not see it entered.
            set_order.over_sets_of_packages.add(id(code))
    shared_state.note_writes(code, frame)
    seen_codes.note(code)
    return True


def _has_to_be_seen_again(code: CodeType) -> bool:
    """Whether it matters where code is entered the next time, too; it is being entered."""
    if id(code) in seen_codes.counted:
        return False
    looking = [each for each in active.current() if each.nesting and id(code) in each.entered]
    return True in [each.nesting.enter(code) for each in looking]


def _note_reader_of_fields(code: CodeType, frame: FrameType) -> None:
    """Notes that all fields of an object of the user's are read.

    JAX has dataclasses of its own; and of modules of flax and pytrees, all fields count anyway.
    """
    given = frame.f_locals.get(code.co_varnames[0])
    cls = given if isinstance(given, type) else type(given)
    if origin_of(cls) == USER and is_plain(cls):
        fields = inspect.getattr_static(cls, OF_FIELDS, {})
        for recording in active.current():
            recording.settings |= {OF_FIELDS, *fields}


def _note_class(code: CodeType, frame: FrameType) -> None:
    """Notes for which class equinox has generated code: it is a global or an argument there."""
    cls = frame.f_globals.get("module_cls") or frame.f_locals.get("module_cls")
    if isinstance(cls, type):
        for recording in active.current():
            recording.generated[id(code)] = cls


def _note_import(frame: FrameType) -> None:
    """Notes that a library asks for a module of the user's, by a name that it was given."""
    name = frame.f_locals.get("name")
    if isinstance(name, str) and not name.startswith(".") and origin_of_module(name) == USER:
        _call(importlib.import_module, frame.f_back)


def _call(function: Any, frame: FrameType | None) -> None:
    """Notes a call of a function written in C, where its result is not the same in each run."""
    _blame(compiled_calls.why_call_is_impure(function), frame)


def _blame(why: str | None, frame: FrameType | None) -> None:
    """Notes why what a frame has called is not the same in each run, if there is a reason."""
    caller = responsible(frame) if why is not None else None
    if caller is not None:
        for recording in active.current():
            recording.impure[f"{caller}: {why}"] = None


class _Watch:
    """Watches a thread for one recording."""

    def __init__(self) -> None:
        is_monitored = sys.version_info >= (3, 12)
        self._profile = None if is_monitored else _process_hooks.ThreadProfile(_profiler())

    def start(self, user: Recording) -> str:
        """Begins to watch this thread; why it cannot, or nothing."""
        if self._profile is None:
            return "" if _monitor.start(user) else _NO_TOOL
        if not self._profile.start():
            return "a profiler written in C is active, so its trace cannot be recorded"
        jax_alone.watch_binds(user)
        return ""

    def stop(self, user: Recording) -> str:
        """Ends that; why the trace was not watched to its end, or nothing."""
        if self._profile is None:
            return "" if _monitor.stop(user) else "the process was forked while it was traced"
        jax_alone.stop_watching(user)
        return "" if self._profile.stop() else _ANOTHER_PROFILER


_NO_END_OF_COLLECTION = "the end of a garbage collection was not seen while it was traced"
_NO_TOOL = "all of sys.monitoring's tools are taken, so its trace cannot be recorded"
_ANOTHER_PROFILER = "another profiler was set while it was traced, and may have hidden a part of it"


def _profiler() -> Callable[[FrameType, Any, Any], None]:
    # By their identities, for hashing code looks at all of it; and kept, so that those stay theirs.
    seen = _seen_for_good.copy()
    importing = imports.of_this_thread()

    def see(value: Any, lasts: bool) -> None:
        seen[id(value)] = value
        if lasts:
            _seen_for_good[id(value)] = value

    def see_again(passed: dict[int, Any]) -> None:
        for each in passed:
            seen.pop(each, None)

    def entered(code: CodeType, frame: FrameType) -> None:
        if code is imports.FIND_AND_LOAD:
            if importing.begin(frame):
                _process_hooks.at_return(frame, lambda: see_again(importing.end(frame)))
        elif not active.current():
            return
        elif importing.passes_over(code):
            seen[id(code)] = importing.passed[id(code)] = code
        elif id(code) in seen_codes.counted:
            seen_codes.note(code)
            see(code, seen_codes.is_done_with(code))
        elif _enter(code, frame) and not _has_to_be_seen_again(code):
            see(code, seen_codes.is_done_with(code))

    def called(function: Any, frame: FrameType) -> None:
        owner = function.__self__
        known = decided_by(function, owner)
        if id(known) in seen:
            return
        if known is sys.setprofile:
            if frame.f_globals is not vars(_process_hooks):
                for recording in active.state.stack:
                    recording.unavailable = _ANOTHER_PROFILER
            return
        if is_of_imports(frame.f_code) or importing.passes_over(frame.f_code):
            return
        matters = calls_matter(frame.f_code.co_filename)
        if matters:
            opened_files.watch_before_call(function, owner)
        if may_be_impure(known):
            if matters:
                _call(function, frame)
        elif (lasts := is_harmless(known)) or (matters and compiled_calls.decides(known)):
            see(known, lasts)

    def profile(
        frame: FrameType,
        event: str,
        argument: Any,
        # Called millions of times: no name is looked up.
        seen: Any = seen,
        identity: Any = id,
        kind_of: Any = type,
    ) -> None:
        if event == "call":
            if identity(frame.f_code) not in seen:
                entered(frame.f_code, frame)
        elif event == "c_call":
            if identity(argument) in seen or identity(kind_of(argument.__self__)) in seen:
                return
            called(argument, frame)

    return profile


_seen_for_good: dict[int, Any] = {}


def _py_start(code: CodeType, offset: int) -> Any:
    if seen_codes.is_done_with(code):  # Python forgets that with events that another trace ends.
        return _monitor.disable(code, for_good=True)
    importing = imports.of_this_thread()
    if code is imports.FIND_AND_LOAD:
        importing.begin(sys._getframe(1))
        return None
    if not active.current():
        return None
    if importing.passes_over(code):
        importing.passed[id(code)] = code
        return _monitor.disable(code)
    if id(code) in seen_codes.counted:
        seen_codes.note(code)
    elif not _enter(code, sys._getframe(1)):
        return None
    if seen_codes.is_done_with(code):
        return _monitor.disable(code, for_good=True)
    if calls_matter(code.co_filename):
        _monitor.see_calls_from(code)
    return None if _has_to_be_seen_again(code) else _monitor.disable(code)


def _on_call(code: CodeType, offset: int, function: Any, first: Any) -> None:
    # Called hundreds of thousands of times, mostly for the same few functions.
    kind = type(function)
    if kind is _FUNCTION or id(function) in _seen_for_good or kind is _OPERATOR:
        return
    if kind is _BUILTIN or kind is _BOUND_OPERATOR:
        owner = function.__self__
    else:
        owner = first if kind is _METHOD else None
    known = decided_by(function, owner)
    if id(known) in _seen_for_good or not active.any_active():
        return
    if not imports.of_this_thread().passes_over(code):
        _see_call(function, owner, known, sys._getframe(1))


_FUNCTION, _BUILTIN = types.FunctionType, types.BuiltinFunctionType
_METHOD, _OPERATOR = types.MethodDescriptorType, types.WrapperDescriptorType
_BOUND_OPERATOR = types.MethodWrapperType


def _see_call(function: Any, owner: Any, known: Any, frame: FrameType) -> None:
    """Looks at a call of what is not written in Python; see `decided_by` for the arguments."""
    kind = type(function)
    if kind is _BOUND_OPERATOR and known is type(owner):
        return
    if kind is _BUILTIN or kind is _METHOD:
        opened_files.watch_before_call(function, owner)
        if may_be_impure(known):
            _call(function if kind is _BUILTIN else getattr(owner, function.__name__), frame)
            return
    if kind is _METHOD:
        if is_harmless(function.__objclass__):
            _seen_for_good[id(function)] = function
    elif not hasattr(function, "__code__"):
        module = getattr(function, "__module__", None)
        if module is None or module in compiled_calls.IMPURE_MODULES:
            _call(function, frame)
    if is_harmless(known):
        _seen_for_good[id(known)] = known


def _on_end(code: CodeType, offset: int, outcome: Any) -> None:
    if code is imports.FIND_AND_LOAD:
        passed = imports.of_this_thread().end(sys._getframe(1))
        if passed:
            _monitor.see_again(passed.values())


_monitor = _process_hooks.CallMonitor(_py_start, _on_call, imports.FIND_AND_LOAD, _on_end)
