"""What stepcache changes for the whole process: it is listed, and undone, and disturbs nobody."""

import contextlib
import gc
import itertools
import os
import re
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from stepcache.fingerprint.recorder import Recording
from stepcache.programs.background import LATER

import stepcache as sc
from stepcache._changes import Undoing
from tests.cluster.pods import run_pod, succeeded
from tests.remote.processes import wait_until

ROOT = Path(__file__).parent.parent
MONITORED = sys.version_info >= (3, 12)
before_312 = pytest.mark.skipif(MONITORED, reason="sys.setprofile is used before Python 3.12")
from_312 = pytest.mark.skipif(not MONITORED, reason="sys.monitoring is used from Python 3.12 on")

PRELUDE = """
import contextlib, ctypes, faulthandler, gc, os, signal, sys, threading, time
import jax, jax.numpy as jnp, numpy as np
"""
# A step that is built with a recording; `was_recorded` says whether the next start can do without.
STEP = """
def helper(x):
    doubled = x * 2
    return doubled + 1

@sc.step
def train(x):
    inside()
    return helper(x).sum()

def was_recorded():
    return "must trace the step" not in str(train.last_miss)
"""


def run(directory, body, *, code=0, ours="import stepcache as sc"):
    """Runs a script in a process of its own, with its programs on disk; returns all its output."""
    script = directory / "script.py"
    script.write_text(PRELUDE + ours + "\n" + textwrap.dedent(body), encoding="utf-8")
    environment = os.environ | {
        "STEPCACHE_DIR": str(directory / "programs"),
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
    }
    ran = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        cwd=directory,
    )
    assert ran.returncode == code, ran.stdout
    return ran.stdout


def inner(x):
    return x + 1


def outer(x):
    return inner(x) * 2


# ---- what is changed at all ---------------------------------------------------------------------

STATE = """
import atexit, logging, warnings
OURS = logging.getLogger("stepcache")
HANDLER = ctypes.create_string_buffer(512)

def handler(number):
    '''The C function, whoever set it.'''
    ctypes.CDLL(None).sigaction(int(number), None, HANDLER)
    return HANDLER.raw[:8]

def state():
    from jax._src import cache_key, compiler
    monitoring = getattr(sys, "monitoring", None)
    return {
        "profile": sys.getprofile(),
        "trace": sys.gettrace(),
        "threads' profile": threading.getprofile(),
        "threads' trace": threading.gettrace(),
        "switch interval": sys.getswitchinterval(),
        "gc": (gc.isenabled(), gc.get_threshold(), gc.get_debug(), gc.get_freeze_count()),
        "gc callbacks": list(gc.callbacks),
        "signals": {s: signal.getsignal(s) for s in signal.valid_signals()},
        "signal handlers": {s: handler(s) for s in signal.valid_signals()},
        "hooks": (sys.excepthook, sys.unraisablehook, sys.displayhook, sys.breakpointhook),
        "threads' hook": threading.excepthook,
        "streams": (sys.stdin, sys.stdout, sys.stderr),
        "imports": (list(sys.meta_path), list(sys.path_hooks), list(sys.path)),
        "warnings": (list(warnings.filters), warnings.showwarning),
        "logging": (list(logging.root.handlers), logging.root.level, logging.getLoggerClass()),
        "our logging": (list(OURS.handlers), OURS.level, OURS.propagate),
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "recursion": sys.getrecursionlimit(),
        "faulthandler": faulthandler.is_enabled(),
        # One number of ours is kept, without events.
        "tools": monitoring and {monitoring.get_tool(tool) for tool in range(6)} - {"stepcache"},
        "events": monitoring and [
            monitoring.get_tool(tool) and monitoring.get_events(tool) or 0 for tool in range(6)
        ],
        "threads": {thread.name for thread in threading.enumerate()},
        "compilation": (compiler.compile_or_get_cached, cache_key._hash_accelerator_config),
        "at exit": atexit._ncallbacks(),
    }

def changed(before):
    now = state()
    now["threads"] |= before["threads"]  # Threads may end.
    return {name for name in now if now[name] != before[name]}
"""


def test_an_import_changes_what_the_docs_list(tmp_path):
    """Beside what the packages do that stepcache imports: those are imported before."""
    listed = run(tmp_path, "print(*sys.modules)").split()
    others = [name for name in listed if name.partition(".")[0] not in ("stepcache", "__main__")]
    body = f"""
    import importlib
    for name in {others!r}:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    before = state()
    import stepcache
    print(changed(before))
    """
    assert run(tmp_path, STATE + textwrap.dedent(body), ours="") == "{'at exit'}\n"


def test_a_build_leaves_the_process_as_it_was(tmp_path):
    """The thread that stores programs ends when it has had nothing to do for a while."""
    body = """
    inside = lambda: None
    jax.jit(lambda x: x + 1)(1.0)
    before = state()
    train(jnp.ones(3))
    sc.current_session().cache.flush()
    deadline = time.monotonic() + 20
    while changed(before) and time.monotonic() < deadline:
        time.sleep(0.05)
    print(was_recorded(), changed(before))
    """
    assert run(tmp_path, STATE + STEP + textwrap.dedent(body)) == "True set()\n"
    again = STATE + STEP + textwrap.dedent(body)  # Loaded, then verified.
    assert run(tmp_path, again) == "True set()\n"


@pytest.mark.parametrize("when", ["before", "in the middle"])
def test_who_wraps_jax_s_compiler_stays(monkeypatch, when):
    import jax

    from stepcache.jaxcompat import storing

    private = sys.modules["jax._src.compiler"]
    found = private.compile_or_get_cached
    monkeypatch.setattr(private, "compile_or_get_cached", found)
    calls, digests = [], []

    def wrap():
        within = private.compile_or_get_cached

        def mine(*args, **kwargs):
            calls.append(1)
            return within(*args, **kwargs)

        private.compile_or_get_cached = mine
        return mine

    mine = wrap() if when == "before" else None
    with Undoing() as undoing:
        storing.compile_through(undoing, lambda digest, load: digests.append(digest))
        mine = mine or wrap()
        jax.jit(lambda x: x + 1)(1.0)
    assert len(digests) == 1 and private.compile_or_get_cached is mine
    jax.jit(lambda x: x - 1)(1.0)
    with Undoing() as undoing:
        storing.compile_through(undoing, lambda digest, load: digests.append(digest))
        jax.jit(lambda x: x - 2)(1.0)
    assert len(calls) == (1 if when == "before" else 2) and len(digests) == 2
    assert private.compile_or_get_cached is mine


HOOKS = {"_process_hooks.py", "jaxcompat/hooks.py"}
# What changes a process or JAX: functions by their names, and variables where they are assigned to.
CHANGING = re.compile(
    r"\b(gc\.(?:enable|disable|freeze|set_\w+|callbacks)|sys\.(?:set\w+|addaudithook)\("
    r"|threading\.set\w+|signal\.(?:signal|set\w+)|library\.sigaction|atexit\.register"
    r"|os\.(?:register_at_fork|umask|chdir|putenv)|monitoring\.(?:use|set|free|register|restart)_\w+\(|register_exclusion\("
    r"|register_cache\(|faulthandler\.\w+|logging\.basicConfig|addHandler|warnings\.filter\w+)"
    r"|\b((?:sys|threading)\.(?:\w*hook|std\w+)) = |setattr\(self\._module"
)


def test_all_changes_are_made_in_two_files():
    package = ROOT / "stepcache"
    found = {}
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        text = re.sub(r'^_(RANK|GUARD) = """.*?^"""', "", text, flags=re.S | re.M)  # Run by others.
        for match in CHANGING.finditer(text):
            found.setdefault(str(path.relative_to(package)), set()).add(match[0])
    assert set(found) == HOOKS, found
    assert len(found["_process_hooks.py"]) >= 10, found


def test_the_docs_list_what_the_hooks_change():
    listed = (ROOT / "docs" / "process.md").read_text(encoding="utf-8")
    for path in HOOKS:
        text = (ROOT / "stepcache" / path).read_text(encoding="utf-8")
        for match in re.finditer(
            r"\b(sys|gc|atexit|os)\.(set\w+|addaudithook|callbacks|register\w*|unraisablehook)",
            text,
        ):
            assert f"`{match[0]}`" in listed, match[0]
        for name in re.findall(r'_Replacement\(\w+, "(\w+)"', text):
            assert f".{name}`" in listed, name
    assert "`os._exit(1)`" in listed and "`register_exclusion`" in listed


# ---- profilers ----------------------------------------------------------------------------------


def test_a_profiler_sees_its_events_before_during_and_after_a_trace(tmp_path):
    body = """
    seen = []
    def profiler(frame, event, argument):
        if frame.f_code.co_filename == __file__ and event in ("call", "return"):
            seen.append((frame.f_code.co_name, event))
    inside = lambda: None
    sys.setprofile(profiler)
    helper(1)
    before = list(seen)
    seen.clear()
    train(jnp.ones(3))
    during = [each for each in seen if each[0] in ("train", "helper")]
    assert sys.getprofile() is profiler
    seen.clear()
    helper(1)
    sys.setprofile(None)
    assert before == seen == [("helper", "call"), ("helper", "return")], (before, seen)
    inner = [("helper", "call"), ("helper", "return")]
    assert during[:4] == [("train", "call"), *inner, ("train", "return")], during
    print(was_recorded())
    """
    assert run(tmp_path, STEP + textwrap.dedent(body)) == "True\n"


@pytest.mark.parametrize("when", ["set", "unset", "set and restored"])
def test_a_profiler_that_is_set_inside_a_trace_is_kept(when):
    """On 3.11 it takes the recording's place, which has to say that it did not see everything."""

    def mine(frame, event, argument):
        seen.add(frame.f_code)

    def theirs(frame, event, argument):
        pass

    def traced():
        before = sys.getprofile()
        sys.setprofile(None if when == "unset" else mine)
        outer(1)
        if when == "set and restored":
            sys.setprofile(before)

    seen = set()
    sys.setprofile(theirs)
    try:
        with Recording() as recording:
            traced()
        left = sys.getprofile()
    finally:
        sys.setprofile(None)
    assert left is {"set": mine, "unset": None, "set and restored": theirs}[when]
    assert (inner.__code__ in seen) == (when != "unset")
    if MONITORED:
        assert recording.unavailable is None and inner.__code__ in recording.codes
    else:
        assert "profiler" in (recording.unavailable or "")


@before_312
def test_a_profiler_that_raises_is_dropped_as_python_does():
    def failing(frame, event, argument):
        if frame.f_code is inner.__code__:
            raise ZeroDivisionError

    sys.setprofile(failing)
    try:
        with pytest.raises(ZeroDivisionError):
            with Recording() as recording:
                outer(1)
        assert sys.getprofile() is None
    finally:
        sys.setprofile(None)
    assert "profiler" in (recording.unavailable or "")


def test_a_c_profiler_inside_a_trace_is_kept():
    import cProfile

    profiler = cProfile.Profile()
    with Recording() as recording:
        profiler.enable()
        outer(1)
    kept = sys.getprofile() is profiler or MONITORED
    profiler.disable()
    assert kept and any(each.code is inner.__code__ for each in profiler.getstats())
    assert MONITORED or "profiler" in (recording.unavailable or "")


# ---- debuggers and coverage ---------------------------------------------------------------------


@pytest.mark.slow
def test_a_tracer_sees_the_lines_of_a_traced_step(tmp_path):
    """As coverage and debuggers work: by `sys.settrace`, for each thread."""
    body = """
    lines = set()
    def tracer(frame, event, argument):
        if frame.f_code.co_filename != __file__:
            return None
        if event == "line":
            lines.add((frame.f_code.co_name, frame.f_lineno - frame.f_code.co_firstlineno))
        return tracer
    def inside():
        text = open(__file__).read()
        return len(text)
    sys.settrace(tracer)
    train(jnp.ones(3))
    assert sys.gettrace() is tracer
    sys.settrace(None)
    inside = {("helper", 1), ("helper", 2), ("inside", 1), ("inside", 2)}
    assert {("train", 2), ("train", 3)} | inside <= lines, lines
    print(was_recorded())
    """
    assert run(tmp_path, STEP + textwrap.dedent(body)) == "True\n"


@pytest.mark.slow
def test_pdb_steps_through_a_traced_step(tmp_path):
    body = """
    import io, pdb
    commands = ["next", "p 'doubled is', doubled.shape", "step", "next", "continue"]
    debugger = pdb.Pdb(stdin=io.StringIO("\\n".join(commands)), stdout=sys.stdout, readrc=False)
    debugger.use_rawinput = False
    def square(x):
        squared = x**2
        return squared
    @sc.step
    def train(x):
        debugger.set_trace()
        doubled = x * 2
        y = square(doubled)
        return y.sum()
    print(train(jnp.ones(3)))
    """
    output = run(tmp_path, body)
    places = [line.strip() for line in output.splitlines() if "-> " in line]
    assert [place.rpartition("-> ")[2] for place in places] == [
        "doubled = x * 2",
        "y = square(doubled)",
        "def square(x):",
        "squared = x**2",
    ]
    assert "('doubled is', (3,))" in output and output.endswith("12.0\n")


def test_a_debugger_s_prompt_has_the_terminal_to_itself():
    """The progress line of a long build would overwrite what is typed."""
    import bdb
    import io
    import time

    from rich.console import Console

    from stepcache.events import BuildFailed, StageStarted
    from stepcache.report.progress import BuildProgress

    screen = Console(file=io.StringIO(), force_terminal=True, width=80)
    shown = BuildProgress(0.01, screen)

    class Prompt(bdb.Bdb):
        def user_line(self, frame):
            time.sleep(0.3)
            self.set_continue()

    def traced():
        Prompt().set_trace()
        return 1

    shown(StageStarted("step", 1, "trace"))
    try:
        traced()
    finally:
        sys.settrace(None)
    shown(BuildFailed("step", 1, "trace", "ValueError"))
    assert screen.file.getvalue() == ""


def test_progress_leaves_the_streams_alone():
    """What a step prints while it is traced goes where it always goes."""
    import io
    import time

    from rich.console import Console

    from stepcache.events import BuildFailed, StageStarted
    from stepcache.report.progress import BuildProgress

    screen = Console(file=io.StringIO(), force_terminal=True, width=80)
    shown = BuildProgress(0.01, screen)
    before, mine = sys.stdout, io.StringIO()
    try:
        with contextlib.redirect_stdout(mine):
            shown(StageStarted("step", 1, "trace"))
            deadline = time.monotonic() + 20
            while "step: trace" not in screen.file.getvalue():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            print("printed")
        shown(BuildFailed("step", 1, "trace", "ValueError"))
        assert sys.stdout is before
    finally:
        sys.stdout = before
    assert mine.getvalue() == "printed\n" and "printed" not in screen.file.getvalue()


# ---- audit hooks --------------------------------------------------------------------------------


@pytest.mark.slow
def test_there_is_no_audit_hook_unless_a_step_may_open_a_file(tmp_path):
    """It would be called for each `id()` of the process, for ever."""
    script = """
        import sys
        added = []
        sys.addaudithook(lambda name, _: added.append(name) if name == "sys.addaudithook" else None)
        import jax.numpy as jnp
        import optax
        import stepcache as sc
        optimizer = optax.adamw(1e-3)
        def loss(params, x): return ((x @ params["w"]) ** 2).mean()
        @sc.step(carry="state")
        def train(state, x):
            params, moments = state
            value, grads = jax.value_and_grad(loss)(params, x)
            updates, moments = optimizer.update(grads, moments, params)
            return (optax.apply_updates(params, updates), moments), value
        params = {"w": jnp.ones((3, 3))}
        train((params, optimizer.init(params)), jnp.ones((2, 3)))
        assert added == [], added
        @sc.step
        def reads(x): return x * len(open(sys.argv[0]).read())
        reads(jnp.ones(2))
        assert added == ["sys.addaudithook"], added
    """
    path = tmp_path / "script.py"
    path.write_text("import jax\n" + textwrap.dedent(script), encoding="utf-8")
    environment = os.environ | {"STEPCACHE_DIR": str(tmp_path / "programs")}
    subprocess.run([sys.executable, str(path)], check=True, env=environment)


# ---- sys.monitoring -----------------------------------------------------------------------------


@contextlib.contextmanager
def tool(number, callback):
    monitoring = sys.monitoring  # type: ignore[attr-defined]
    monitoring.use_tool_id(number, "test")
    monitoring.register_callback(number, monitoring.events.PY_START, callback)
    monitoring.set_events(number, monitoring.events.PY_START)
    try:
        yield monitoring
    finally:
        monitoring.set_events(number, 0)
        monitoring.register_callback(number, monitoring.events.PY_START, None)
        monitoring.free_tool_id(number)


@from_312
def test_another_tool_gets_its_events_and_not_those_it_disabled():
    """As coverage does: it is told of each place once."""
    seen = []

    def start(code, offset):
        if code is inner.__code__:
            seen.append(code)
            return sys.monitoring.DISABLE  # type: ignore[attr-defined]
        if code is outer.__code__:
            seen.append(code)
        return None

    with tool(1, start):
        outer(1)
        for _ in range(2):
            with Recording() as recording:
                outer(1)
                with Recording() as second:
                    outer(1)
            assert inner.__code__ in recording.codes and inner.__code__ in second.codes
        outer(1)
    assert seen.count(inner.__code__) == 1 and seen.count(outer.__code__) == 6


@from_312
def test_a_tool_that_comes_after_a_recording_sees_everything():
    """What a recording disabled for its own tool is enabled again for the next who takes it."""
    with Recording():
        outer(1)
    monitoring = sys.monitoring  # type: ignore[attr-defined]
    free = [number for number in (3, 4) if monitoring.get_tool(number) is None]
    assert len(free) >= 1
    for number in free:
        seen = []
        with tool(number, lambda code, offset, seen=seen: seen.append(code)):
            outer(1)
        assert {outer.__code__, inner.__code__} <= set(seen)


@from_312
def test_a_number_for_which_code_is_disabled_for_good_is_kept():
    """JAX's own code is seen once in a process: nobody else gets the number that is blind to it."""
    script = """
        import sys
        import jax
        from stepcache.fingerprint.recorder import Recording
        def traced(constant):
            with Recording() as recording:
                jax.jit(lambda x: jax.numpy.sin(x) + constant).trace(1.0)
            return recording
        first, second = traced(1), traced(2)
        both = [{c for c in each.codes if "jax" in c.co_filename} for each in (first, second)]
        assert both[0] and both[0] <= both[1]
        monitoring = sys.monitoring
        assert [monitoring.get_tool(number) for number in (3, 4)] == [None, "stepcache"]
        seen = []
        monitoring.use_tool_id(3, "another")
        monitoring.register_callback(3, monitoring.events.PY_START, lambda c, o: seen.append(c))
        monitoring.set_events(3, monitoring.events.PY_START)
        jax.jit(lambda x: jax.numpy.sin(x) + 3).trace(1.0)
        monitoring.set_events(3, 0)
        assert any("jax" in code.co_filename for code in seen)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)


@from_312
def test_the_tools_of_coverage_profilers_and_debuggers_are_not_taken():
    """In a process of its own: an earlier recording may have kept a number."""
    script = """
        import sys
        from stepcache.fingerprint.recorder import Recording
        monitoring = sys.monitoring
        monitoring.use_tool_id(3, "another")
        monitoring.use_tool_id(4, "a third")
        with Recording() as recording:
            assert [monitoring.get_tool(number) for number in (0, 1, 2, 5)] == [None] * 4
        assert "monitoring" in recording.unavailable, recording.unavailable
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)


@pytest.mark.slow
def test_threads_that_set_profiles_at_once_refuse_each_other_nothing():
    """Python 3.11 refuses one while a hook in Python is told of another: shown, and ended."""
    script = """
        import sys, threading, time
        from stepcache._process_hooks import ThreadProfile, set_profile

        def audit(event, arguments):
            if event == "sys.setprofile":
                time.sleep(0.0002)  # Lets the other threads run, which set theirs meanwhile.

        sys.addaudithook(audit)
        refused = {"plain": 0, "ours": 0}

        def run(name, set_one):
            start.wait()
            for _ in range(200):
                try:
                    set_one()
                except RuntimeError:
                    refused[name] += 1

        def ours():
            profile = ThreadProfile(lambda frame, event, argument: None)
            profile.start()
            set_profile(None)
            set_profile(profile._function)
            assert profile.stop()

        for name, set_one in {"plain": lambda: sys.setprofile(None), "ours": ours}.items():
            start = threading.Barrier(4)
            threads = [threading.Thread(target=run, args=(name, set_one)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        print(refused)
        assert sys.version_info >= (3, 12) or refused["plain"]
        assert not refused["ours"]
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_many_threads_record_at_once():
    barrier = threading.Barrier(6)
    recordings = []

    def record():
        outer(1)
        for _ in range(5):
            barrier.wait()
            with Recording() as recording:
                outer(1)
                barrier.wait()
                outer(1)
            recordings.append(recording)

    threads = [threading.Thread(target=record) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(recordings) == 30
    for recording in recordings:
        assert recording.unavailable is None
        assert {outer.__code__, inner.__code__} <= recording.codes
    if MONITORED:
        monitoring = sys.monitoring  # type: ignore[attr-defined]
        assert None in [monitoring.get_tool(number) for number in (3, 4)]


# ---- the garbage collector ----------------------------------------------------------------------


@pytest.fixture
def collector():
    was_enabled, callbacks = gc.isenabled(), list(gc.callbacks)
    yield
    assert gc.callbacks == callbacks
    (gc.enable if was_enabled else gc.disable)()


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("inside", [None, gc.enable, gc.disable])
def test_the_collector_is_as_the_user_says(collector, before, inside):
    (gc.enable if before else gc.disable)()
    with Recording():
        assert gc.isenabled() == before
        if inside is not None:
            inside()
        with Recording():
            pass
        expected = before if inside is None else inside is gc.enable
        assert gc.isenabled() == expected
    assert gc.isenabled() == expected


def test_what_a_collection_calls_is_not_the_trace_s(collector):
    """Callbacks before and after it, finalizers, and callbacks of weak references."""

    class Cyclic:
        def __init__(self):
            self.me = self

        def __del__(self):
            os.environ.get("READ_BY_A_FINALIZER")
            finalized.append(self)

    def callback(phase, info):
        called.append(phase)

    finalized, called = [], []
    gc.enable()
    for place in (0, len(gc.callbacks)):
        gc.callbacks.insert(place, callback)
    try:
        with Recording() as recording:
            for _ in range(3):
                Cyclic()
            kept = [[] for _ in range(100_000)]
            outer(1)
        assert len(kept) and finalized and called
        assert Cyclic.__del__.__code__ not in recording.codes
        assert callback.__code__ not in recording.codes
        assert "READ_BY_A_FINALIZER" not in recording.variables
        assert outer.__code__ in recording.codes and recording.unavailable is None
    finally:
        gc.callbacks.remove(callback)
        gc.callbacks.remove(callback)


def test_a_callback_that_goes_in_a_collection_is_told_of(collector):
    """Python then skips the next one: a recording that does not hear of the end says so."""

    def once(phase, info):
        if phase == "stop":
            gc.callbacks.remove(once)

    with Recording() as recording:
        gc.callbacks.insert(len(gc.callbacks) - 1, once)
        gc.collect()
        outer(1)
    assert inner.__code__ in recording.codes or recording.unavailable
    with Recording() as recording:
        outer(1)
    assert inner.__code__ in recording.codes and recording.unavailable is None


# ---- switching between threads ------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0.01, 0.001, 0.00005, 0.00001])
@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_the_switch_interval_is_as_the_user_says(seconds, when):
    from stepcache._process_hooks import quick_switching

    usual = sys.getswitchinterval()
    try:
        if when == "before":
            sys.setswitchinterval(seconds)
        with quick_switching():
            assert sys.getswitchinterval() <= 0.0001
            if when == "during":
                sys.setswitchinterval(seconds)
            with quick_switching():
                pass
        if when == "after":
            sys.setswitchinterval(seconds)
        assert sys.getswitchinterval() == pytest.approx(seconds)
    finally:
        sys.setswitchinterval(usual)


# ---- garbage collections ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("when", "young"), [("never", 0), *itertools.product(["before", "during"], [0, 500, 50_000])]
)
def test_garbage_is_collected_rarely_in_a_trace_unless_the_user_says_so(young, when):
    wait_until(lambda: gc.get_threshold()[0] != 20_000)  # Another test may still store something.
    usual, seen = gc.get_threshold(), []

    @sc.step
    def step(x):
        seen.append(gc.get_threshold())
        if when == "during":
            gc.set_threshold(young, 7, 8)
        return x + 1

    try:
        if when == "before":
            gc.set_threshold(young, 7, 8)
        before = gc.get_threshold()
        step(1.0)
        assert seen == [before if when == "before" and young != 500 else (20_000, *before[1:])]
        assert gc.get_threshold() == (before if when == "never" else (young, 7, 8))
    finally:
        gc.set_threshold(*usual)


def test_garbage_is_collected_as_usual_when_what_was_built_is_stored(tmp_path):
    wait_until(lambda: gc.get_threshold()[0] != 20_000)  # Another test may still store something.
    usual = gc.get_threshold()
    release = threading.Event()
    cache = sc.ProgramCache(tmp_path)
    with sc.Session(cache=cache):
        step = sc.step(lambda x: x + 1)
        cache.archive().worker.submit(lambda: None if release.is_set() else LATER)
        step(1.0)
        assert gc.get_threshold() == (20_000, *usual[1:])
        release.set()
        cache.flush()
    wait_until(lambda: gc.get_threshold() == usual)


# ---- fatal signals ------------------------------------------------------------------------------


@pytest.mark.sample(every=2)
@pytest.mark.parametrize(("number", "name"), [("SIGABRT", "Aborted"), ("SIGSEGV", "Segmentation")])
def test_faulthandler_still_prints(tmp_path, number, name):
    body = f"""
    faulthandler.enable()
    inside = lambda: None
    train(jnp.ones(3))
    print(was_recorded(), flush=True)
    os.kill(os.getpid(), signal.{number})
    """
    import signal

    output = run(tmp_path, STEP + textwrap.dedent(body), code=-getattr(signal, number))
    assert output.startswith("True\n") and f"Fatal Python error: {name}" in output
    assert "script.py" in output.partition("Fatal Python error")[2]


POD = """
import ctypes, faulthandler
numbers = sorted(set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP})
def handlers():
    actions = [ctypes.create_string_buffer(512) for _ in numbers]
    for number, action in zip(numbers, actions):
        ctypes.CDLL(None).sigaction(int(number), None, action)
    return [action.raw[:8] for action in actions], [signal.getsignal(each) for each in numbers]
@sc.step(carry="state", batch="batch")
def train(state, batch):
    return state + batch.sum(), batch.mean()
state, batch = np.ones(3, np.float32), np.ones(4, np.float32)
"""


@pytest.mark.slow
@pytest.mark.sample(every=2)
@pytest.mark.parametrize("how", ["ctypes.CDLL(None).abort()", "os.kill(os.getpid(), 6)"])
def test_an_abort_in_a_pod_ends_the_process_and_faulthandler_prints(tmp_path, how):
    body = f"""
    faulthandler.enable()
    try:
        with sc.Session(mesh):
            for turn in range(1000):
                state, mean = train(state, batch)
                float(mean)
                time.sleep(0.01)
                if turn == 5 and RANK == 1:
                    say("aborting", time.time())
                    {how}
    except sc.RankLostError as error:
        say("lost", error.ranks, time.time())
    """
    ranks = run_pod(tmp_path, POD + textwrap.dedent(body))
    assert ranks[1].code == -6, ranks[1].output
    assert "Fatal Python error: Aborted" in ranks[1].output
    assert "pod.py" in ranks[1].output.partition("Fatal Python error")[2]
    assert ranks[0].code == 0 and ranks[0].said("lost")[0].startswith("(1,)"), ranks[0].output
    assert float(ranks[0].said("lost")[0].split()[1]) - float(ranks[1].said("aborting")[0]) < 5


@pytest.mark.slow
def test_a_pod_leaves_all_signal_handlers_alone(tmp_path):
    body = """
    faulthandler.enable()
    before, hook = handlers(), sys.excepthook
    with sc.Session(mesh):
        state, mean = train(state, batch)
        float(mean)
        say("same", handlers() == before and sys.excepthook is hook)
    jax.distributed.shutdown()
    say("same", handlers() == before and sys.excepthook is hook)
    """
    for rank in succeeded(run_pod(tmp_path, POD + textwrap.dedent(body))):
        assert rank.said("same") == ["True", "True"], rank.output


# ---- fork ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_forked_beside_a_trace_is_free_of_it(tmp_path):
    """Another thread of the parent is in the middle of a recording: it is not in the child."""
    body = """
    from stepcache._process_hooks import quick_switching
    from stepcache.fingerprint.recorder import Recording

    before = gc.isenabled(), list(gc.callbacks), sys.getswitchinterval()
    started, forked, recorded = threading.Event(), threading.Event(), []
    def record():
        with quick_switching(), Recording() as recording:
            helper(1)
            started.set()
            forked.wait()
        assert helper.__code__ in recording.codes and not recording.unavailable
        recorded.append(recording)
    inside = lambda: None
    thread = threading.Thread(target=record)
    thread.start()
    started.wait()
    child = os.fork()
    if not child:
        assert (gc.isenabled(), list(gc.callbacks), sys.getswitchinterval()) == before
        if sys.version_info >= (3, 12):
            tools = set(map(sys.monitoring.get_tool, range(6)))
            assert tools <= {None, "stepcache"}
        with quick_switching(), Recording() as recording:
            helper(1)
        assert helper.__code__ in recording.codes and not recording.unavailable
        assert (gc.isenabled(), list(gc.callbacks), sys.getswitchinterval()) == before
        os._exit(3)
    status = os.waitpid(child, 0)[1]
    forked.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 3 and recorded
    assert (gc.isenabled(), list(gc.callbacks), sys.getswitchinterval()) == before
    """
    run(tmp_path, STEP + textwrap.dedent(body))


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_what_a_forked_child_has_built_the_next_one_loads(tmp_path):
    """Python ends children of `multiprocessing` without the handlers of `atexit`."""
    body = """
    import multiprocessing
    inside = lambda: None
    def child():
        train(np.ones(3, np.float32))
        print(train.last_miss, flush=True)
    for turn in range(2):
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join()
        assert process.exitcode == 0
        print("turn", turn, flush=True)
    """
    built, loaded = run(tmp_path, STEP + textwrap.dedent(body)).split("turn 0")
    assert "loaded from disk" not in built and "without a trace" in loaded
