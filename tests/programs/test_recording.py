"""What a recording sees, on both of Python's ways to watch code, and what it leaves alone."""

import dataclasses
import datetime
import logging
import os
import random
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest
from scipy.spatial import _distance_pybind

from stepcache.fingerprint import callers
from stepcache.fingerprint.provenance import state_of_file
from stepcache.fingerprint.recorder import Recording

MONITORED = sys.version_info >= (3, 12)


def inner(x):
    return x + 1


def outer(x):
    return inner(x) * 2


def other(x):
    return x


def test_code_is_seen():
    with Recording() as recording:
        outer(1)
    assert {outer.__code__, inner.__code__} <= recording.codes
    assert other.__code__ not in recording.codes


def test_each_recording_sees_for_itself():
    for _ in range(3):
        with Recording() as recording:
            outer(1)
        assert inner.__code__ in recording.codes


def test_a_recording_in_a_recording_sees_what_was_entered_before():
    with Recording() as first:
        outer(1)
        with Recording() as second:
            outer(1)
        other(1)
    assert inner.__code__ in second.codes
    assert other.__code__ not in second.codes
    assert {inner.__code__, other.__code__} <= first.codes


def test_two_threads_see_their_own_code_and_not_the_other_s():
    barrier = threading.Barrier(2)
    recordings = {}

    def run(name, function):
        with Recording() as recording:
            outer(1)
            barrier.wait()
            outer(1)
            function(1)
            barrier.wait()
        recordings[name] = recording

    def mine(x):
        return x

    threads = [threading.Thread(target=run, args=each) for each in (("a", mine), ("b", other))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for recording in recordings.values():
        assert inner.__code__ in recording.codes
    assert mine.__code__ in recordings["a"].codes - recordings["b"].codes
    assert other.__code__ in recordings["b"].codes - recordings["a"].codes


def test_files_are_seen_as_they_were_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("1")
    with Recording() as recording:
        (tmp_path / "a.txt").read_text()
        with open("a.txt") as file:  # noqa: PTH123
            file.read()
        (tmp_path / "written.txt").write_text("1")
        with pytest.raises(FileNotFoundError):
            (tmp_path / "missing.txt").read_text()
    state = state_of_file("a.txt")
    assert state is not None
    assert recording.files == {
        str(tmp_path / "a.txt"): state,
        "a.txt": state,
        str(tmp_path / "missing.txt"): None,
    }


def test_a_path_that_goes_back_behind_a_link_is_left_as_it_is(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "data").write_text("1")
    (tmp_path / "link").symlink_to(tmp_path / "a" / "b")
    path = f"{tmp_path}/link/../data"

    def read():
        open(path).close()  # noqa: PTH123

    with Recording() as recording:
        read()
    assert recording.files == {path: state_of_file(path)} and recording.files[path]


def test_a_pipe_is_no_file_to_read_again(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = os.open(tmp_path / "pipe", os.O_RDWR)
    try:
        with Recording() as recording:
            (tmp_path / "pipe").open("rb").close()
    finally:
        os.close(writer)
    assert not recording.files and "it reads" in "\n".join(recording.impure)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no /dev/shm")
def test_a_file_in_shared_memory_is_a_file():
    with tempfile.NamedTemporaryFile(dir="/dev/shm", suffix=".npy") as file:
        np.save(file, np.arange(3.0))
        file.flush()
        with Recording() as recording:
            np.load(file.name)
    assert set(recording.files) == {file.name}


OPENERS = """
import codecs, gzip, io, os, pathlib, sys, tokenize, zipfile
import numpy as np
from io import FileIO, open_code
from os import open as low_open
from stepcache.fingerprint.recorder import Recording
alias, path = open, sys.argv[1]
class Mine(FileIO): pass
class Reader: pass
reader, by_kind = Reader(), {"text": open}
reader.read = open
openers = {
    "open": lambda: open(path).close(),
    "alias": lambda: alias(path).close(),
    "called by C": lambda: list(map(open, [path]))[0].close(),
    "alias called by C": lambda: list(map(alias, [path]))[0].close(),
    "an attribute": lambda: reader.read(path).close(),
    "an item": lambda: by_kind["text"](path).close(),
    "a default": lambda opener=open: opener(path).close(),
    "io.open": lambda: io.open(path).close(),
    "io.FileIO": lambda: io.FileIO(path).close(),
    "FileIO": lambda: FileIO(path).close(),
    "subclass": lambda: Mine(path).close(),
    "open_code": lambda: open_code(path).close(),
    "os.open": lambda: os.close(os.open(path, os.O_RDONLY)),
    "low open": lambda: os.close(low_open(path, os.O_RDONLY)),
    "os.fdopen": lambda: os.fdopen(os.open(path, os.O_RDONLY)).close(),
    "pathlib": lambda: pathlib.Path(path).read_bytes(),
    "codecs": lambda: codecs.open(path).close(),
    "gzip": lambda: gzip.open(path).close(),
    "tokenize": lambda: tokenize.open(path).close(),
    "zipfile": lambda: zipfile.is_zipfile(path),
    "np.load": lambda: np.load(path),
    "np.fromfile": lambda: np.fromfile(path),
    "np.memmap": lambda: np.memmap(path, mode="r"),
    "np.DataSource": lambda: np.lib.npyio.DataSource().open(path).close(),
}
for name, opener in openers.items():
    child = os.fork()  # What one of them sets up is not there for the next.
    if not child:
        with Recording() as recording:
            try:
                opener()
            except SyntaxError:  # It was opened, and is no source.
                pass
        os._exit({*recording.files} != {path})
    if os.waitpid(child, 0)[1]:
        print(name)
"""


@pytest.mark.slow
def test_files_are_seen_however_they_are_opened(tmp_path):
    np.save(tmp_path / "data.npy", np.arange(3.0))
    command = [sys.executable, "-c", OPENERS, str(tmp_path / "data.npy")]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert result.stdout == "", "not seen"


@pytest.mark.parametrize(
    "read",
    [
        lambda: os.environ.get("SC_SOME"),
        lambda: os.getenv("SC_SOME"),
        lambda: "SC_SOME" in os.environ,
        lambda: os.environb.get(b"SC_SOME"),
    ],
)
def test_variables_are_seen(read):
    for _ in range(2):
        with Recording() as recording:
            read()
        assert recording.variables == {"SC_SOME"}


def test_all_variables_are_seen(monkeypatch):
    monkeypatch.setenv("SC_ANY", "1")
    with Recording() as recording:
        list(os.environ)
    assert "SC_ANY" in recording.variables


def test_what_is_another_each_run_is_seen():
    def impure():
        return time.time() + random.random() + os.getpid()

    with Recording() as recording:
        impure()
    text = "\n".join(recording.impure)
    assert all(each in text for each in ("time.time", "random", "getpid", "impure"))


class Stamp(datetime.datetime):
    pass


class Day(datetime.date):
    pass


class Kinds(type):
    def __new__(cls, *what):
        return type.__new__(cls, *what)

    def __call__(cls, *what):
        return type.__call__(cls, *what)


class Lazy(types.ModuleType):
    def __new__(cls, *what):
        return types.ModuleType.__new__(cls, *what)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: Stamp.now(), "datetime.datetime.now"),
        (lambda: Stamp.today(), "datetime.date.today"),
        (lambda: Day.today(), "datetime.date.today"),
        (lambda: datetime.datetime.today(), "datetime.date.today"),
        (lambda: Stamp(2000, 1, 1).timestamp(), "datetime.datetime.timestamp"),
        (lambda: random.uniform(1, 2), "random numbers"),
        (lambda: vars(random)["_inst"].random(), "random numbers"),
        (lambda: time.time(), "time.time"),
        (lambda: os.stat(0), "posix.stat"),
    ],
)
def test_calls_of_c_are_told_apart_by_whose_they_are(call, named):
    """Whatever of the same kinds was called before, in this trace or in an earlier one."""

    def others():
        Kinds("Made", (), {})()
        Lazy("made")
        type.mro(Kinds)
        random.Random(0).random()
        os.fspath("a")
        datetime.timedelta(1).total_seconds()
        return type(None).__new__(type(None)), str.join("", []), {}.get(1)

    for _ in range(2):
        with Recording() as recording:
            others()
        assert not recording.impure
        with Recording() as recording:
            others()
            call()
        assert named in "\n".join(recording.impure)


def test_calls_of_what_is_compiled_of_mujoco_are_seen(monkeypatch):
    """Of pybind11's functions, as mujoco's are: each is bound to a record of its own."""
    pairs = np.ones((2, 2))

    def calls():
        return _distance_pybind.pdist_cityblock(pairs), _distance_pybind.pdist_euclidean(pairs)

    with Recording() as recording:
        calls()
    assert not recording.impure
    name = f"mujoco._functions.{_distance_pybind.pdist_euclidean.__name__}"
    monkeypatch.setattr(_distance_pybind.pdist_euclidean, "__module__", "mujoco._functions")
    with Recording() as recording:
        calls()
    assert [name in why for why in recording.impure] == [True]


@pytest.mark.slow
def test_no_files_are_watched_for_what_opens_none(tmp_path):
    """An audit hook cannot be taken away, and is called for each `id()` of the process."""
    script = """
    import bisect, hashlib, io, linecache, os, traceback
    from stepcache import _process_hooks
    from stepcache.fingerprint.recorder import Recording

    class Options(dict): pass

    harmless = [
        lambda: linecache.getlines(__file__),
        lambda: io.StringIO().write(""),
        lambda: os.path.normpath("a/../b"),
        lambda: Options(a=1).get("a"),
        lambda: traceback.extract_stack(),
        lambda: bisect.bisect_left([1], 1),
        lambda: hashlib.sha256(b"a").digest(),
    ]

    def reads():
        open(__file__).close()

    hooks = []
    _process_hooks.audit = hooks.append
    for number, each in enumerate(harmless):
        with Recording():
            each()
        assert not hooks, number
    with Recording():
        reads()
    assert hooks
    """
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(script))
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@dataclasses.dataclass
class Dated:
    made: float = dataclasses.field(default_factory=time.time)


@pytest.mark.parametrize(
    "call",
    [
        Dated,
        lambda: list(map(random.choice, ["ab"])),
        random.Random,
        lambda: random.Random(1).seed(),
        lambda: np.random.default_rng(None),
        lambda: np.random.Generator(np.random.PCG64()),
    ],
)
def test_what_python_calls_for_others_is_seen(call):
    with Recording() as recording:
        call()
    assert recording.impure


@pytest.mark.parametrize(
    "call",
    [
        lambda: random.Random(1).random() + random.Random("a").random(),
        lambda: np.random.default_rng(1).normal() + np.random.PCG64(1).random_raw(),
        lambda: repr(Dated(1.0)) + repr(np.ones(2)),
    ],
)
def test_what_follows_from_seeds_and_values_is_the_same_in_each_run(call):
    with Recording() as recording:
        call()
    assert not recording.impure


def test_parts_of_paths_depend_on_nothing():
    def parts():
        path = Path(__file__).parent / "data" / ".." / "rates.txt"
        return os.path.normpath(path), path.parts, path.with_suffix(".npy").as_posix()

    with Recording() as recording:
        parts()
    assert parts.__code__ in recording.codes
    assert not recording.impure and not recording.files


def test_another_thread_is_told_of():
    with Recording() as recording:
        thread = threading.Thread(target=inner, args=(1,))
        thread.start()
        thread.join()
    assert "thread" in "\n".join(recording.impure)


@pytest.mark.skipif(MONITORED, reason="sys.setprofile is used before Python 3.12")
def test_a_profiler_of_the_user_is_still_called():
    seen = []
    sys.setprofile(lambda frame, event, argument: seen.append(frame.f_code))
    try:
        with Recording() as recording:
            with Recording():
                outer(1)
        mine = sys.getprofile()
        assert mine is not None
    finally:
        sys.setprofile(None)
    assert seen.count(inner.__code__) == 2  # Its call and its return.
    assert inner.__code__ in recording.codes


@pytest.mark.skipif(MONITORED, reason="sys.setprofile is used before Python 3.12")
def test_a_profiler_in_c_is_left_alone():
    import cProfile

    profiler = cProfile.Profile()
    profiler.enable()
    try:
        with Recording() as recording:
            outer(1)
        outer(1)
    finally:
        profiler.disable()
    assert "profiler" in (recording.unavailable or "")


@pytest.mark.skipif(not MONITORED, reason="sys.monitoring is used from Python 3.12 on")
def test_all_monitoring_tools_are_taken():
    """In a process that has recorded nothing before: once it has, one number stays ours."""
    script = """
        import sys
        from stepcache.fingerprint.recorder import Recording
        monitoring = sys.monitoring
        def traced():
            pass
        for tool in range(6):
            monitoring.use_tool_id(tool, "test")
        with Recording() as first:
            with Recording() as second:
                traced()
        for recording in (first, second):
            assert "monitoring" in (recording.unavailable or "")
        for tool in range(6):
            monitoring.free_tool_id(tool)
        with Recording() as recording:
            traced()
        assert recording.unavailable is None
        assert traced.__code__ in recording.codes
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)


def test_only_python_s_own_logging_passes_by():
    """Not a package of the user's, nor a Python that is installed in a directory of that name."""

    def made(filename):
        space = {"sys": sys}
        exec(compile("def here(): return sys._getframe()", filename, "exec"), space)
        return space["here"]

    here = made("/home/me/app/logging/__init__.py")
    with Recording() as recording:
        here()
    assert here.__code__ in recording.codes
    assert not callers.passes_by(made("/opt/logging/lib/python3.11/pathlib.py")())
    assert callers.passes_by(made(logging.__file__)())


def test_import_hooks_are_not_the_traces(monkeypatch):
    """As setuptools puts one there, and each editable install."""

    def missing():
        return None

    class Hook:
        def find_spec(self, name, path, target=None):
            return missing()

    monkeypatch.setattr(sys, "meta_path", [Hook(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "this_too", raising=False)
    with Recording() as recording:
        with pytest.raises(ImportError):
            import this_too  # noqa: F401  # type: ignore[reportMissingImports]
        outer(1)
    codes = {Hook.find_spec.__code__, missing.__code__}
    assert not codes & recording.codes and outer.__code__ in recording.codes
    with Recording() as recording:
        Hook().find_spec("a", None)
    assert codes <= recording.codes
