"""What stepcache changes for the whole process: it is listed, and undone, and disturbs nobody."""

import gc
import itertools
import os
import re
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir as lowering

import stepcache as sc
from stepcache import jaxcompat
from stepcache._changes import Undoing, shared
from stepcache._process_hooks import quick_switching
from stepcache.jaxcompat import hooks

ROOT = Path(__file__).parent.parent
needs_private_api = pytest.mark.skipif(not jaxcompat.CAN_STORE, reason="it replaces nothing then")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

PRELUDE = """
import contextlib, ctypes, faulthandler, gc, os, signal, sys, threading, time
import jax, jax.numpy as jnp, numpy as np
"""
STEP = """
@sc.step
def train(x):
    return (x * 2 + 1).sum()
"""


def run(directory, body, *, ours="import stepcache as sc"):
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
    assert ran.returncode == 0, ran.stdout
    return ran.stdout


# ---- what is changed at all ---------------------------------------------------------------------

STATE = """
import atexit, logging, warnings
from jax._src import cache_key, compiler
from jax._src.interpreters import mlir
OURS = logging.getLogger("stepcache")
HANDLER = ctypes.create_string_buffer(512)

def handler(number):
    '''The C function, whoever set it.'''
    ctypes.CDLL(None).sigaction(int(number), None, HANDLER)
    return HANDLER.raw[:8]

def state():
    monitoring = getattr(sys, "monitoring", None)
    return {
        "profile": (sys.getprofile(), threading.getprofile()),
        "trace": (sys.gettrace(), threading.gettrace()),
        "switch interval": sys.getswitchinterval(),
        "gc": (gc.isenabled(), gc.get_threshold(), gc.get_debug(), gc.get_freeze_count()),
        "gc callbacks": list(gc.callbacks),
        "signals": {s: (signal.getsignal(s), handler(s)) for s in signal.valid_signals()},
        "faulthandler": faulthandler.is_enabled(),
        "hooks": (sys.excepthook, sys.unraisablehook, sys.displayhook, sys.breakpointhook),
        "threads' hook": threading.excepthook,
        "streams": (sys.stdin, sys.stdout, sys.stderr),
        "imports": (list(sys.meta_path), list(sys.path_hooks), list(sys.path)),
        "warnings": (list(warnings.filters), warnings.showwarning),
        "logging": (list(logging.root.handlers), logging.root.level, logging.getLoggerClass()),
        "our logging": (list(OURS.handlers), OURS.level, OURS.propagate),
        "environment": (dict(os.environ), os.getcwd(), sys.getrecursionlimit()),
        "tools": monitoring and [monitoring.get_tool(tool) for tool in range(6)],
        "threads": {thread.name.partition("_")[0] for thread in threading.enumerate()},
        "compilation": (compiler.compile_or_get_cached, cache_key._hash_accelerator_config),
        "lowering": mlir.make_ir_context,
        "at exit": atexit._ncallbacks(),
    }

def changed(before):
    now = state()
    now["threads"] |= before["threads"]  # Threads may end.
    return {name for name in now if now[name] != before[name]}
"""


@needs_private_api
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


@needs_private_api
def test_a_build_and_a_load_leave_the_process_as_it_was(tmp_path):
    """But for the thread that stores programs, which waits for the next one."""
    body = """
    jax.jit(lambda x: x + 1)(1.0)
    before = state()
    before["threads"].add("stepcache store")
    train(jnp.ones(3))
    sc.current_session().cache.flush()
    deadline = time.monotonic() + 20
    while changed(before) and time.monotonic() < deadline:
        time.sleep(0.05)
    print(train.stats().compiles, changed(before))
    """
    script = STATE + STEP + textwrap.dedent(body)
    assert [run(tmp_path, script) for _ in range(2)] == ["1 set()\n", "0 set()\n"]


HOOKS = {"_process_hooks.py", "_site/sitecustomize.py", "jaxcompat/hooks.py"}
# What changes a process or JAX: functions by their names, and variables where they are assigned to.
CHANGING = re.compile(
    r"\b(gc\.(?:enable|disable|freeze|set_\w+|callbacks)|sys\.(?:set\w+|addaudithook)\b"
    r"|threading\.set\w+|signal\.(?:signal|set\w+)|library\.sigaction|atexit\.register"
    r"|os\.(?:register_at_fork|umask|chdir|putenv)"
    r"|monitoring\.(?:use|set|free|register|restart)_\w+\(|register_exclusion\("
    r"|register_cache\(|faulthandler\.\w+|logging\.basicConfig|addHandler|warnings\.filter\w+)"
    r"|\b((?:sys|threading)\.(?:\w*hook|std\w+)) = |setattr\(self\._module"
)


def test_all_changes_are_made_in_these_files():
    package = ROOT / "stepcache"
    found = {}
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        text = re.sub(r'^_(RANK|GUARD) = """.*?^"""', "", text, flags=re.S | re.M)  # Run by others.
        for match in CHANGING.finditer(text):
            found.setdefault(str(path.relative_to(package)), set()).add(match[0])
    assert set(found) == HOOKS, found
    assert {"gc.set_threshold", "sys.setswitchinterval", "atexit.register"} <= (
        found["_process_hooks.py"]
    )


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


# ---- settings of Python --------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0.01, 0.001, 0.00005, 0.00001])
@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_the_switch_interval_is_as_the_user_says(seconds, when):
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


@pytest.mark.parametrize(
    ("when", "young"), [("never", 0), *itertools.product(["before", "during"], [0, 500])]
)
def test_no_full_collection_in_a_trace_unless_the_user_says_so(young, when):
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
        assert seen == [(*before[:2], 100_000) if before[0] else before]
        assert gc.get_threshold() == (before if when == "never" else (young, 7, 8))
    finally:
        gc.set_threshold(*usual)


@pytest.mark.parametrize("fails", ["trace", "compile"])
def test_a_setting_ends_with_a_build_that_fails(fails, monkeypatch):
    """And before XLA compiles, which may take minutes."""
    usual, seen = gc.get_threshold(), []

    def compile_it(*args, **options):
        seen.append(gc.get_threshold())
        raise ValueError("compile")

    @sc.step
    def step(x):
        if fails == "trace":
            raise ValueError("trace")
        return x + 1

    monkeypatch.setattr(jaxcompat.stages.Staged, "compile", compile_it)
    with pytest.raises(ValueError, match=fails):
        step(1.0)
    assert gc.get_threshold() == usual and seen == ([usual] if fails == "compile" else [])
    assert not any(each._users for each in shared)


# ---- functions of JAX ----------------------------------------------------------------------------


@needs_private_api
@pytest.mark.parametrize("when", ["before", "in the middle"])
def test_who_wraps_jax_s_compiler_stays(monkeypatch, when):
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

    def obtain(compilation):
        digests.append(compilation.digest)
        return compilation.compile()

    mine = wrap() if when == "before" else None
    with Undoing() as undoing:
        hooks.compile_through(undoing, obtain)
        mine = mine or wrap()
        assert float(jax.jit(lambda x: x + 1)(1.0)) == 2
    assert len(digests) == 1 and private.compile_or_get_cached is mine
    jax.jit(lambda x: x - 1)(1.0)
    with Undoing() as undoing:
        hooks.compile_through(undoing, obtain)
        jax.jit(lambda x: x - 2)(1.0)
    assert len(calls) == (1 if when == "before" else 2) and len(set(digests)) == 2
    assert private.compile_or_get_cached is mine


@needs_private_api
def test_other_threads_get_jax_s_own_functions_through():
    """While this one compiles and lowers."""
    asked, before = [], sys.modules["jax._src.interpreters.mlir"].make_ir_context
    compilations = []

    def obtain(compilation):
        asked.append(threading.current_thread())
        compilations.append(compilation)
        return compilation.compile()

    def other():
        jax.jit(lambda x: x * 3)(1.0)
        contexts.append(hooks._of_thread.context)

    contexts = []
    with Undoing() as undoing:
        hooks.compile_through(undoing, obtain)
        hooks.reuse_contexts(undoing)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(60)
        assert asked == [] and contexts == [(None, 0)]
        jax.jit(lambda x: x * 4)(1.0)
        jax.jit(lambda x: (jax.debug.callback(lambda y: None, x), x)[1])(1.0)
    assert asked == [threading.current_thread()] * 2
    plain, calling = compilations
    assert plain.digest and not plain.calls_back and calling.calls_back
    assert bool(calling.digest) == hooks.binds_callbacks(calling.devices)
    assert sys.modules["jax._src.interpreters.mlir"].make_ir_context is before


@needs_private_api
@pytest.mark.skipif(
    hasattr(sys.modules.get("jax._src.interpreters.mlir"), "_thread_local_context"),
    reason="this JAX itself shares contexts",
)
def test_ten_modules_share_a_context_only_while_steps_are_lowered(monkeypatch):
    made, mlir = [], sys.modules["jax._src.interpreters.mlir"]
    make = mlir.make_ir_context
    monkeypatch.setattr(mlir, "make_ir_context", lambda: made.append(make()) or made[-1])
    monkeypatch.setattr(hooks._of_thread, "context", (None, 0))
    for number in range(20):
        sc.step(lambda x, number=number: x + number)(1.0)
    assert len(made) == 2
    for number in range(3):
        jax.jit(lambda x, number=number: x - number)(1.0)
    assert len(made) == 5


@needs_private_api
def test_what_is_compiled_while_a_step_is_lowered_has_another_context():
    """As a primitive of lineax does, whose lowering evaluates an operation."""
    primitive = Primitive("scaled_by_what_is_computed")

    def scaled(x):
        with jax.ensure_compile_time_eval():
            factor = jnp.asarray(3.0) * 2
        return x * factor

    primitive.def_abstract_eval(lambda x: x)
    lowering.register_lowering(primitive, lowering.lower_fun(scaled, multiple_results=False))
    for number in range(3):
        step = sc.step(lambda x, number=number: primitive.bind(x) + number)
        assert step(2.0) == 12.0 + number


# ---- fork ---------------------------------------------------------------------------------------


@needs_fork
@needs_private_api
def test_children_forked_before_jax_starts_run_steps_and_store_them(tmp_path):
    """Python ends children of `multiprocessing` without the handlers of `atexit`."""
    body = """
    import multiprocessing
    def child():
        train(np.ones(3, np.float32))
        print(train.stats().compiles, flush=True)
    for turn in range(2):
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join()
        assert process.exitcode == 0
    """
    assert run(tmp_path, STEP + textwrap.dedent(body)) == "1\n0\n"
