"""Eight CPU devices for all tests. Programs stay in memory, or, with `STEPCACHE_TEST_DISK=1`, go to
a fresh directory for each test, as they do for users."""

import gc
import itertools
import os
from collections import defaultdict
from importlib.metadata import version

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if os.environ["JAX_PLATFORMS"] == "cpu":
    # Most of a test's time is XLA's, which compiles small programs that run once or twice. It would
    # split each in parts for all threads.
    quickly = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    os.environ.setdefault("XLA_FLAGS", quickly)
os.environ["STEPCACHE_DIR"] = "off"  # What is kept on disk is a test's own affair.
os.environ["STEPCACHE_REMOTE"] = "off"
# Processes that tests start keep the bytecode of stepcache's modules, as those of users do.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.pop("COLUMNS", None)  # So is the width of a table. (xdist sets that of its terminal.)

import jax

if os.environ["JAX_PLATFORMS"] == "cpu":
    jax.config.update("jax_num_cpu_devices", 8)
    # XLA sizes its thread pool by this. With fewer threads than collectives that wait for devices,
    # a loaded machine can deadlock.
    os.environ.setdefault("NPROC", "32")

import hypothesis
import pytest
from jax._src import compiler
from jax.sharding import AxisType

from stepcache.calls.context import DEFAULT_SCOPE
from stepcache.programs.cache import ProgramCache
from tests.sampling import LEFT_OUT, slow_is_asked_for

OLDER_EMITTERS = "--xla_cpu_use_fusion_emitters=false"


@pytest.fixture(scope="session", autouse=True)
def eight_devices():
    if os.environ["JAX_PLATFORMS"] == "cpu":
        assert jax.device_count() == 8


@pytest.fixture(autouse=os.environ.get("STEPCACHE_TEST_DISK") == "1")
def fresh_directory(tmp_path, monkeypatch):
    directory = tmp_path / "programs"
    directory.mkdir(mode=0o700)
    monkeypatch.setenv("STEPCACHE_DIR", str(directory))
    cache = ProgramCache()
    monkeypatch.setattr(DEFAULT_SCOPE, "cache", cache)
    yield
    cache.flush()


@pytest.fixture
def mesh():
    """4 × 2 devices, "data" × "model"."""
    if jax.device_count() < 8:
        pytest.skip("it takes eight devices")
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


@pytest.fixture
def one_device_mesh():
    return jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))


def pytest_configure(config):
    """Few examples of what hypothesis makes. XLA's older emitters for fusions, which compile in
    half the time, where jaxlib still has them."""
    examples = 150 if slow_is_asked_for(config) else 15
    hypothesis.settings.register_profile("ours", max_examples=examples, deadline=None)
    hypothesis.settings.load_profile("ours")
    flags, has_them = os.environ.get("XLA_FLAGS", ""), version("jaxlib").startswith("0.10.")
    quickly = flags.startswith("--xla_backend_optimization_level=0")
    if quickly and has_them and not slow_is_asked_for(config):
        os.environ["XLA_FLAGS"] = f"{flags} {OLDER_EMITTERS}"


@pytest.fixture
def users_emitters(monkeypatch):
    """XLA fuses, and so rounds, as it does for users: for tests that compare two programs' bits."""
    if OLDER_EMITTERS in os.environ.get("XLA_FLAGS", ""):
        made = compiler.get_compile_options

        def with_them(*arguments, env_options_overrides=None, **options):
            overrides = {"xla_cpu_use_fusion_emitters": True} | (env_options_overrides or {})
            return made(*arguments, env_options_overrides=overrides, **options)

        monkeypatch.setattr(compiler, "get_compile_options", with_them)


def pytest_addoption(parser):
    what = "how long each soak of tests/serving/test_soak.py takes; those of an hour are slow"
    parser.addoption("--soak-seconds", type=float, help=what)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With `--dist loadfile`, one worker runs all files of a directory that shares processes:
    `tests/serving` has one Ray, and `tests/remote` tasks."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False  # Files of few tests may take longest.

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            directory = file.rpartition("/")[0]
            return directory if directory in ("tests/serving", "tests/remote") else file

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_finish():
    """Leaves what was imported and collected out of garbage collections: they took a tenth."""
    gc.collect()
    gc.freeze()


def pytest_runtest_teardown(item, nextitem):
    """And what the tests of a file have left: mostly what JAX keeps."""
    if nextitem is not None and nextitem.path != item.path:
        pytest_collection_finish()


def pytest_generate_tests(metafunc):
    """`seeds(count, few=1)` gives a test its `seed`: all but a few of them are slow."""
    marker = metafunc.definition.get_closest_marker("seeds")
    if marker is not None:
        few = marker.kwargs.get("few", 1)
        count = marker.args[0] if slow_is_asked_for(metafunc.config) else few
        slow = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(few, count)]
        metafunc.parametrize("seed", [*range(few), *slow])


@pytest.hookimpl(tryfirst=True)  # Before items are chosen by `-m`.
def pytest_collection_modifyitems(config, items):
    """Tests that are `slow`, and cases that a sample leaves out, run where they are asked for."""
    tests = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sample") and not item.get_closest_marker("slow"):
            tests[item.parent, item.originalname].append(item)
    for cases in tests.values():
        marker = cases[0].get_closest_marker("sample")
        chosen = cases[:: marker.kwargs["every"]] if marker.kwargs else covering(cases)
        for item in cases:
            if item not in chosen:
                item.add_marker(pytest.mark.slow)
    if not slow_is_asked_for(config):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.stash[LEFT_OUT] = slow
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
    order = {path: number for number, path in enumerate(in_turn([item.path for item in items]))}
    items.sort(key=lambda item: order[item.path])


def in_turn(paths):
    """The longest directories, then files that wait for other processes in turn with those that do
    not, as workers share cores; small ones last."""
    longest, waiting, others = {}, {}, {}
    groups = {"serving": longest, "remote": longest, "cluster": waiting}
    for path in paths:
        groups.get(path.parent.name, others)[path] = None
    pairs = itertools.zip_longest(waiting, reversed(others))
    return [*longest, *filter(None, itertools.chain.from_iterable(pairs))]


def covering(cases):
    """Few of the cases of a test, in which each value of each parameter is there at least once."""
    values = {item: {(k, str(v)) for k, v in item.callspec.params.items()} for item in cases}
    missing, chosen = set().union(*values.values()), []
    while missing:
        chosen.append(max(cases, key=lambda item: len(values[item] & missing)))
        missing -= values[chosen[-1]]
    return chosen
