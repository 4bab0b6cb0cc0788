"""Ctrl-C at any moment of a build leaves the process as it was, and the next call builds."""

import contextlib
import dis
import functools
import gc
import itertools
import subprocess
import sys
import threading
import types
from typing import Any

import jax
import numpy as np
import pytest

import stepcache as sc
from stepcache import _changes, _process_hooks
from stepcache.jaxcompat import contexts, hooks, stages
from stepcache.programs import build, resolve, store, worker
from stepcache.report import progress
from stepcache.storage import building

MONITORING: Any = getattr(sys, "monitoring", None)


def codes_of(*things):
    """The code of functions, and of those in classes and modules, with what is defined in them."""
    found, left = set(), list(things)
    while left:
        thing = left.pop()
        if isinstance(thing, types.ModuleType):
            name = thing.__name__
            own = [x for x in vars(thing).values() if getattr(x, "__module__", "") == name]
            left += [x for x in own if isinstance(x, types.FunctionType | type)]
        elif isinstance(thing, type):
            left += [x for x in vars(thing).values() if isinstance(x, types.FunctionType)]
        else:
            code = getattr(getattr(thing, "__wrapped__", thing), "__code__", thing)
            found.add(code)
            left += [x for x in code.co_consts if isinstance(x, types.CodeType)]
    return found


HOOKS = codes_of(
    *(_changes, _process_hooks._Setting, _process_hooks.quick_switching),
    *(hooks.compile_through, hooks.reuse_contexts),
    *(hooks._Replacement, contexts.tracing_context, contextlib._GeneratorContextManager),
    worker._UnderWay,
)
BUILD = codes_of(
    *(build.build, build.trace, stages.Staged.lower, stages.Staged.compile),
    *(store.ProgramStore.find, store.ProgramStore.lock_or_find, building.BuildLock.try_lock),
    *(building.Building.__init__, building._File.lock),
    *(store.take_or_compile, resolve.Resolver.resolve),
)


class Interrupt:
    """Context manager in which one place where Python looks for signals raises KeyboardInterrupt.

    These places are the beginnings of functions, and what comes after calls.

    Args:
        codes: of which functions.
        place: which one of them; without one, `places` are noted.
    """

    def __init__(self, codes, place=None):
        self.codes, self.place, self.places, self.raised = codes, place, {}, False

    def _call(self, frame, event, argument):
        if frame.f_code not in self.codes:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self._pass((frame.f_code, -1))
        return self._opcode

    def _opcode(self, frame, event, argument):
        if event == "opcode":
            self._instruction(frame.f_code, frame.f_lasti)
        return self._opcode

    def _instruction(self, code, offset):
        if threading.get_ident() == self.thread:
            if offset in starts(code):
                self._pass((code, -1))
            if offset in after_calls(code):
                self._pass((code, offset))

    def _pass(self, place):
        self.places.setdefault(place)
        if place == self.place and not self.raised:
            self.raised = True
            raise KeyboardInterrupt

    def __enter__(self):
        self.thread = threading.get_ident()
        if not MONITORING:
            sys.settrace(self._call)
            return self
        self.tool = next(tool for tool in range(6) if MONITORING.get_tool(tool) is None)
        MONITORING.use_tool_id(self.tool, "a test")
        self._watch(self._instruction)
        return self

    def _watch(self, call):
        """Has a function called; without one, none any more.

        It is told of instructions alone: if two tools ask for `PY_START`, as a recording does,
        Python 3.12 tells nobody of instructions any more.
        """
        event = MONITORING.events.INSTRUCTION
        MONITORING.register_callback(self.tool, event, call)
        for code in self.codes:
            MONITORING.set_local_events(self.tool, code, event if call else 0)

    def __exit__(self, *_):
        if MONITORING:
            self._watch(None)
            MONITORING.free_tool_id(self.tool)
        else:
            sys.settrace(None)


AFTER_CALLS = {}


def after_calls(code):
    if code not in AFTER_CALLS:
        listed = [each for each in dis.get_instructions(code) if each.opname != "CACHE"]
        pairs = itertools.pairwise(listed)
        AFTER_CALLS[code] = {b.offset for a, b in pairs if a.opname.startswith("CALL")}
    return AFTER_CALLS[code]


@functools.cache
def starts(code):
    """Where a function begins, or goes on after a `yield`: what comes after `RESUME`."""
    pairs = itertools.pairwise(dis.get_instructions(code))
    return {b.offset for a, b in pairs if a.opname == "RESUME"}


def state():
    private = sys.modules["jax._src.compiler"], sys.modules["jax._src.cache_key"]
    return {
        "threshold": gc.get_threshold(),
        "interval": sys.getswitchinterval(),
        "compiler": (private[0].compile_or_get_cached, private[1]._hash_accelerator_config),
        "contexts": sys.modules["jax._src.interpreters.mlir"].make_ir_context,
        "thread": (hooks._of_thread.obtain, hooks._of_thread.is_lowering),
        "tracing": worker.tracing.begun.is_set(),
        "mesh": (jax.sharding.get_mesh(), jax.sharding.get_abstract_mesh()),
        "progress": list(progress.SHOWN._running),
        "users": sum(len(each._users) for each in _changes.shared),
    }


def changed(before):
    now = state()
    return {name for name in now if now[name] != before[name]}


def interrupted_everywhere(
    codes, work, after, rest=lambda: None, every=1, skipped=None, at_last=lambda where: None
):
    """Does something with an interrupt at each place in turn, and looks after each.

    Args:
        codes: where.
        work: what is done.
        after: what is done after each, given the place in words.
        rest: waits for work in the background.
        every: so many places, one is taken.
        skipped: a place that is not.
        at_last: looks once nothing holds the exception.

    Returns:
        How many places there are.
    """
    work()
    rest()
    before = state()
    with Interrupt(codes) as passed:
        work()
    rest()
    assert not changed(before)
    assert skipped is None or passed.places.pop(skipped) is None
    for place in list(passed.places)[::every]:
        where = f"{place[0].co_qualname} at {place[1]}"
        with Interrupt(codes, place) as interrupt:
            # Held as a notebook holds the latest exception, with all frames.
            try:
                work()
                held = None
            except KeyboardInterrupt as error:
                held = error
        rest()
        assert interrupt.raised, where
        assert not changed(before), f"{changed(before)} after an interrupt in {where}"
        after(where)
        del held
        at_last(where)
    rest()
    return len(passed.places)


def inner(x):
    return x + 1


def test_an_interrupted_change_is_undone():
    def work():
        with _changes.Undoing() as undoing, undoing:
            undoing.hold(_process_hooks.quick_switching())
            undoing.hold(contexts.tracing_context(None))
            undoing.use(worker.tracing)
            undoing.use(_process_hooks.rare_collections)
            hooks.reuse_contexts(undoing)
            if hooks.CAN_STORE:
                hooks.compile_through(undoing, lambda compilation: None)
            inside.append(state())

    inside, before = [], state()
    work()
    differing = {name for name in before if inside[0][name] != before[name]}
    assert {"threshold", "interval", "tracing", "users"} <= differing
    assert interrupted_everywhere(HOOKS, work, lambda where: None) > 50


def test_an_interrupt_while_a_session_is_entered_or_left_leaves_it():
    """But for the one moment before the first line of `__exit__`, which Python calls once."""
    session = sc.Session()
    inside = codes_of(_changes.Undoing, contexts.entering)
    inside |= codes_of(sc.Session.__enter__, sc.Session.__exit__)

    def work():
        with outer, session:
            assert sc.current_session() is session

    def after(where):
        assert sc.current_session() is default and session._entered.latest is None, where
        assert outer._entered.latest is None, where

    outer, default = sc.Session(), sc.current_session()
    last = (sc.Session.__exit__.__code__, -1)
    assert interrupted_everywhere(inside, work, after, skipped=last) > 15


@pytest.mark.slow
@pytest.mark.parametrize("every", [6, 1])
def test_an_interrupted_build_leaves_the_process_as_it_was(tmp_path, every):
    """And no program locked: other processes would wait for it as long as this one lives."""
    cache = sc.ProgramCache(tmp_path)
    with sc.Session(jax.make_mesh((1,), ("data",)), cache=cache):
        step = sc.step(lambda x: inner(x))
        numbers = iter(range(1, 10_000))

        def work():
            step(np.ones(next(numbers), np.float32))

        def after(where):
            step.clear_cache()
            size = next(numbers)
            np.testing.assert_array_equal(step(np.ones(size, np.float32)), np.full(size, 2.0))
            assert step.last_miss.not_stored == "", where

        def nothing_is_locked(where):
            cache.flush()
            (path,) = tmp_path.rglob("compiling")
            lock = "fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)"
            code = f"import fcntl\nwith open({str(path)!r}, 'r+') as file: {lock}"
            subprocess.run([sys.executable, "-c", code], check=True)

        at_last = {"at_last": nothing_is_locked}
        assert interrupted_everywhere(BUILD, work, after, cache.flush, every, **at_last) > 60
