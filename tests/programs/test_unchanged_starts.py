"""What a later start of an unchanged program finds where a trace itself changes what it reads."""

import gc
import logging
import types
from textwrap import dedent

import jax
import pytest
from flax.linen import module as linen_module

from stepcache import jaxcompat
from stepcache.fingerprint import provenance
from stepcache.fingerprint.nondeterminism import why_impure
from stepcache.fingerprint.recorder import Recording
from stepcache.jaxcompat import storing
from tests.programs.starts import BUILT, WITHOUT_A_TRACE, WITHOUT_COMPILING, levels, start

pytestmark = pytest.mark.skipif(
    not jaxcompat.PRIVATE_API, reason="programs are stored through JAX's private API"
)

FILLS_A_CACHE = {
    "__init__.py": """
    _backends = {}
    _types = {}

    class Backend:
        pass

    def scale(x):
        if "jax" not in _backends:
            _backends["jax"] = Backend()
        _types[type(x)] = _backends["jax"]
        return x * 2
    """
}
USES_IT = """
    import filling_pkg

    def double(x):
        return filling_pkg.scale(x)

    @sc.step
    def step(x):
        return double(x)
    """


@pytest.mark.parametrize("called", ["double", "filling_pkg.scale"])
def test_a_cache_that_a_package_fills_while_it_is_traced(called, install, tmp_path):
    install("filling_pkg", FILLS_A_CACHE)
    source = USES_IT.replace("return double", f"return {called}")
    _, second, third = (start(source, "filling_pkg", tmp_path) for _ in range(3))
    assert levels(second) == WITHOUT_COMPILING
    assert levels(third) == WITHOUT_A_TRACE
    miss = str(second.step.last_miss)
    assert "filling_pkg._backends: dict of objects → dict()" in miss
    assert "names of filling_pkg" not in miss  # Digests would say it again.


def test_what_the_user_puts_into_that_cache_first_is_a_change(install, tmp_path):
    install("filling_pkg", FILLS_A_CACHE)
    for _ in range(3):
        start(USES_IT, "filling_pkg", tmp_path)
    mine = USES_IT.replace(
        "import filling_pkg\n",
        "import filling_pkg\n    filling_pkg._types['mine'] = filling_pkg.Backend()\n",
    )
    assert levels(start(mine, "filling_pkg", tmp_path))[0] == 1


@pytest.mark.parametrize(
    "edit", ["config.factor = 3", "del config.factor", "config.other = 3", "Config.other = 3"]
)
def test_attributes_asked_for_by_constants(edit, tmp_path):
    source = """
    class Config:
        pass

    config = Config()
    config.factor, config.directory = 2, "first"
    # Edited.

    @sc.step
    def step(x):
        if hasattr(config, "other"):
            return x * 3
        return x * getattr(config, "factor", 3)
    """
    start(source, "no_package", tmp_path)
    assert levels(start(source.replace("first", "second"), "no_package", tmp_path)) == (
        WITHOUT_A_TRACE
    )
    with pytest.raises(AssertionError, match=r"\[0.0, 3.0, 6.0\]"):
        start(source.replace("# Edited.", edit), "no_package", tmp_path)


def test_packages_go_through_the_fields_of_modules_and_trees_alone(tmp_path):
    """Flax asks its modules, and dataclasses that are trees, for all their fields."""
    source = """
    import dataclasses
    from flax import linen, struct

    class Config:
        factor, directory = 2, "first"

    class Module(linen.Module):
        config: Config

        @linen.compact
        def __call__(self, x):
            return x * self.config.factor

    @struct.dataclass
    class State:
        x: object

    module = Module(Config())

    @sc.step
    def step(x):
        state = State(None).replace(x=x)
        return dataclasses.replace(state, x=module.apply({}, state.x)).x
    """
    start(source, "no_package", tmp_path)
    again = start(source.replace("first", "second"), "no_package", tmp_path)
    assert levels(again) == WITHOUT_A_TRACE
    with pytest.raises(AssertionError, match=r"\[0.0, 3.0, 6.0\]"):
        start(source.replace("= 2", "= 3"), "no_package", tmp_path)


KEEPS_SETTINGS = """
    class Reference:
        def __init__(self, function):
            self.function = function

    _CONFIG = {}

    def bind(name, **values):
        _CONFIG[("", name)] = values

    def scaled(x):
        return x * _CONFIG[("", "scaled")]["factor"]

    def called(x):
        return _CONFIG[("", "called")]["reference"].function(x)
    """


@pytest.mark.parametrize("name", ["_CONFIG", "__config"])  # e3nn_jax has one of the latter.
@pytest.mark.parametrize("package", ["settings_pkg", "gin"])
def test_settings_that_a_package_keeps_beside_objects(package, name, install, tmp_path):
    files = {"__init__.py": "", "config.py": KEEPS_SETTINGS.replace("_CONFIG", name)}
    install(package, files)
    source = f"""
    from {package} import config

    config.bind("scaled", factor=2)
    config.bind("other", reference=config.Reference(len))

    @sc.step
    def step(x):
        return config.scaled(x)
    """
    start(source, package, tmp_path)
    assert levels(start(source, package, tmp_path)) == WITHOUT_A_TRACE
    with pytest.raises(AssertionError, match=r"\[0.0, 3.0, 6.0\]"):  # Not twice any more.
        start(source.replace("factor=2", "factor=3"), package, tmp_path)


def test_functions_that_gin_calls(install, tmp_path):
    install("gin", {"__init__.py": "", "config.py": KEEPS_SETTINGS})
    source = """
    from gin import config

    def double(x):
        return x * 2

    def triple(x):
        return x * 3

    config.bind("called", reference=config.Reference(double))

    @sc.step
    def step(x):
        return config.called(x)
    """
    start(source, "gin", tmp_path)
    assert levels(start(source, "gin", tmp_path)) == WITHOUT_A_TRACE
    with pytest.raises(AssertionError, match=r"\[0.0, 3.0, 6.0\]"):
        start(source.replace("Reference(double)", "Reference(triple)"), "gin", tmp_path)


def test_a_handler_of_numpyro_around_a_call_is_a_dependency(install, tmp_path):
    text = "_PYRO_STACK = []\ndef apply(x): return x * _PYRO_STACK[-1].factor"
    install("numpyro", {"__init__.py": "", "primitives.py": text})
    source = """
    from numpyro import primitives

    class Scale:
        def __init__(self, factor):
            self.factor = factor

    primitives._PYRO_STACK.append(Scale(2))

    @sc.step
    def step(x):
        return primitives.apply(x)
    """
    start(source, "numpyro", tmp_path)
    assert levels(start(source, "numpyro", tmp_path)) == WITHOUT_A_TRACE
    with pytest.raises(AssertionError, match=r"\[0.0, 3.0, 6.0\]"):
        start(source.replace("Scale(2)", "Scale(3)"), "numpyro", tmp_path)


KEEPS_FOR_ONE_THREAD = """
    import threading

    class _ThreadState(threading.local):
        def __init__(self):
            self.policies = {}

    _thread_local_state = _ThreadState()

    def scaled(x):
        return x * _thread_local_state.policies.get("scaled", 2)
    """


def test_a_policy_that_haiku_keeps_for_one_thread(install, tmp_path):
    """Another thread cannot look at it, nor verify a program by a trace."""
    module = "_src/mixed_precision.py"
    files = {"__init__.py": "", "_src/__init__.py": "", module: KEEPS_FOR_ONE_THREAD}
    install("haiku", files)
    source = """
    from haiku._src import mixed_precision

    mixed_precision._thread_local_state.policies["scaled"] = 2

    @sc.step
    def step(x):
        return mixed_precision.scaled(x)
    """
    start(source, "haiku", tmp_path)
    again = start(source, "haiku", tmp_path)
    assert levels(again) == WITHOUT_COMPILING
    assert "an object of haiku._src.mixed_precision._ThreadState cannot be looked into" in str(
        again.step.last_miss
    )
    with pytest.raises(AssertionError, match=r"\[0.0, 3.0, 6.0\]"):
        start(source.replace("= 2", "= 3"), "haiku", tmp_path)


def test_what_a_package_keeps_for_one_thread(install, tmp_path):
    """Another thread finds out what a trace depended on."""
    text = """
    import threading

    kept = threading.local()

    def scale(x):
        kept.stack = []
        return x * getattr(kept, "factor", 2)
    """
    install("thread_pkg", {"__init__.py": text})
    source = """
    import thread_pkg

    thread_pkg.kept.factor = 2

    @sc.step
    def step(x):
        return thread_pkg.scale(x)
    """
    start(source, "thread_pkg", tmp_path)
    assert levels(start(source, "thread_pkg", tmp_path)) == WITHOUT_A_TRACE
    with pytest.raises(AssertionError, match=r"\[0.0, 3.0, 6.0\]"):
        start(source.replace("factor = 2", "factor = 3"), "thread_pkg", tmp_path)


KEEPS_OBJECTS = """
    import contextvars, threading

    class Policy:
        def __init__(self, factor):
            self.factor = factor

    class Manager:
        shared = threading.local()

        def __init__(self):
            self.local, self.context = threading.local(), contextvars.ContextVar("its")

    class Stacks(threading.local):
        def __init__(self):
            self.policies = [Policy(1)]

    kept, manager, stacks = threading.local(), Manager(), Stacks()
    number, policy = (contextvars.ContextVar(name, default=1) for name in ("number", "policy"))

    def scale(x):
        return x * FACTOR
"""


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    ("set_to", "read"),
    [
        ("kept.policy = pkg.Policy(2)", "getattr(kept, 'policy', Policy(1)).factor"),
        ("kept.policies = [pkg.Policy(2)]", "getattr(kept, 'policies', [Policy(1)])[-1].factor"),
        ("stacks.policies.append(pkg.Policy(2))", "stacks.policies[-1].factor"),
        ("stacks.policies[0].factor = 2", "stacks.policies[0].factor"),
        ("manager.local.factor = 2", "getattr(manager.local, 'factor', 1)"),
        ("manager.shared.factor = 2", "getattr(Manager.shared, 'factor', 1)"),
        ("manager.context.set(2)", "manager.context.get(1)"),
        ("number.set(2)", "number.get()"),
        ("policy.set(pkg.Policy(2))", "getattr(policy.get(), 'factor', 1)"),
        ("kept.mine = Mine(2)", "getattr(kept, 'mine', Policy(1)).factor"),
    ],
)
def test_objects_that_a_package_keeps_for_one_thread_or_context(install, tmp_path, set_to, read):
    """The thread that verifies has not set them: that is no change."""
    install("kept_pkg", {"__init__.py": KEEPS_OBJECTS.replace("FACTOR", read)})
    source = f"""
    import kept_pkg as pkg

    class Mine:
        def __init__(self, factor):
            self.factor = factor

    pkg.{set_to}

    @sc.step
    def step(x):
        return pkg.scale(x)
    """
    start(source, "kept_pkg", tmp_path)
    for _ in range(2):
        again = start(source, "kept_pkg", tmp_path, verify="background")
        assert levels(again) == WITHOUT_A_TRACE, again.step.last_miss
    edited = source.replace("(2)", "(3)").replace("= 2", "= 3")
    with pytest.raises(AssertionError, match=r"\[0.0, 3.0, 6.0\]"):
        start(edited, "kept_pkg", tmp_path)


KEEPS_WHAT_LIVES = {
    "__init__.py": """
    import weakref

    watchers = weakref.WeakKeyDictionary()

    def scale(x):
        return x * (2 + len(watchers))
    """
}
WATCHES = """
    import weak_pkg

    class Watcher:
        pass

    watcher = Watcher()
    weak_pkg.watchers[watcher] = 1
    """
ASKS_WHO_WATCHES = """
    import weak_pkg

    @sc.step
    def step(x):
        return weak_pkg.scale(x)
    """


def test_a_weak_dictionary_of_a_package_that_held_something_for_a_while(install, tmp_path):
    install("weak_pkg", KEEPS_WHAT_LIVES)
    start(ASKS_WHO_WATCHES, "weak_pkg", tmp_path)
    passing = f"{WATCHES}del weak_pkg.watchers[watcher]\n{ASKS_WHO_WATCHES}"
    assert levels(start(passing, "weak_pkg", tmp_path)) == WITHOUT_A_TRACE


def test_what_the_user_keeps_in_a_weak_dictionary_of_a_package_is_a_change(install, tmp_path):
    install("weak_pkg", KEEPS_WHAT_LIVES)
    start(ASKS_WHO_WATCHES, "weak_pkg", tmp_path)
    with pytest.raises(AssertionError, match=r"\[0.0, 3.0, 6.0\]"):  # Not twice any more.
        start(f"{WATCHES}\n{ASKS_WHO_WATCHES}", "weak_pkg", tmp_path)


def test_flax_modules_that_are_alive_elsewhere(tmp_path):
    """Flax keeps them in a weak dictionary, until the garbage collector happens to run."""
    source = """
    from flax import linen as nn

    class Twice(nn.Module):
        def setup(self):
            self.inner = nn.Dense(3, use_bias=False, kernel_init=nn.initializers.ones)

        def __call__(self, x):
            return 2 * x + 0 * self.inner(x)

    @sc.step
    def step(x):
        return Twice().apply({"params": {"inner": {"kernel": jnp.ones((3, 3))}}}, x)
    """
    alive = """
    alive = Twice().bind({"params": {"inner": {"kernel": jnp.ones((3, 3))}}})
    alive.inner
    """
    gc.collect()
    caches = getattr(linen_module, "_caches", None)  # Newer versions of flax have none.
    assert not caches
    start(source, "", tmp_path)
    again = start(source + alive, "", tmp_path)
    assert caches or caches is None
    assert levels(again) == WITHOUT_A_TRACE


def test_a_module_that_a_package_imports_when_it_is_needed(install, tmp_path):
    files = {
        "__init__.py": "",
        "rules/__init__.py": "",
        "rules/double.py": "def apply(x):\n    return x * 2\n",
        "ops.py": """
        from lazy_pkg import rules

        def scale(x):
            from lazy_pkg.rules import double
            return rules.double.apply(x)
        """,
    }
    install("lazy_pkg", files)
    source = "from lazy_pkg import ops\n@sc.step\ndef step(x):\n    return ops.scale(x)\n"
    start(source, "lazy_pkg", tmp_path)
    assert levels(start(source, "lazy_pkg", tmp_path)) == WITHOUT_A_TRACE


def test_a_program_that_xla_cannot_serialize_is_no_alarm(tmp_path, monkeypatch, caplog):
    class Client:
        def serialize_executable(self, executable):
            raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: `LessThan` is not serializable.\nAt")

    executable = types.SimpleNamespace(client=Client())
    serialize = storing.serialize_executable
    monkeypatch.setattr(storing, "serialize_executable", lambda _: serialize(executable))
    source = "@sc.step\ndef step(x):\n    return x * 2\n"
    with caplog.at_level(logging.WARNING, logger="stepcache"):
        start(source, "", tmp_path)
        again = start(source, "", tmp_path)
    assert not caplog.records
    assert levels(again) == BUILT
    why = "it cannot be stored: XLA cannot serialize it: UNIMPLEMENTED: `LessThan` is not"
    assert why in str(again.step.last_miss)


def test_what_cannot_be_stored_is_not_recorded_at_the_next_start(tmp_path, monkeypatch):
    recordings = []
    begin = Recording.begin

    def counted(recording):
        recordings.append(recording)
        return begin(recording)

    monkeypatch.setattr(Recording, "begin", counted)
    source = """
    @sc.step
    def step(x):
        jax.debug.callback(lambda total: None, x.sum())
        return x * 2
    """
    for _ in range(3):
        found = start(source, "", tmp_path)
        assert len(recordings) == 1
        assert levels(found) == BUILT
        why = "must trace the step, because:\n    it cannot be stored: it calls back into Python"
        assert why in str(found.step.last_miss)
    assert levels(start(source.replace("* 2", "* 1 * 2"), "", tmp_path)) == BUILT
    assert len(recordings) == 2


MAKES_A_FLOAT = """
    class Schedule:
        def __init__(self, steps):
            self.steps = steps

        def __call__(self, x):
            self.steps = float(self.steps)
            return x * 2

    def make_schedule(steps):
        schedule = Schedule(steps)
        return schedule, lambda x: schedule(x) * (schedule.steps / schedule.steps)
    """
USES_A_SCHEDULE = """
    import schedule_pkg

    schedule, scale = schedule_pkg.make_schedule(100)

    @sc.step
    def update(x):
        return scale(x)

    def step(x):
        update(x[:2])
        return update(x)
    """


def test_a_first_trace_that_makes_a_float_of_a_number(install, tmp_path):
    """As optax's schedules do: a process that loads the first program still has the integer."""
    install("schedule_pkg", {"__init__.py": MAKES_A_FLOAT})
    for which in ("first", "second", "third"):
        found = start(USES_A_SCHEDULE, "schedule_pkg", tmp_path)
        stats = found.update.stats()
        assert (stats.traces, stats.loads) == ((2, 0) if which == "first" else (0, 2))
        assert type(found.schedule.steps) is (float if which == "first" else int)
        assert not found.update.last_miss.stored


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    ("old", "new", "traces"),
    [
        ("update(x[:2])", "x[:2]", 1),  # No program comes before it.
        ("return update", "schedule.steps = 101; return update", 1),
        ("return update", "schedule.steps = '100'; return update", 1),
        ("return update", "update(x[:1]); return update", 1),  # Its trace makes the float.
        ("(100)", "(101)", 2),
        ("(100)", "(100.0)", 1),
    ],
)
def test_a_program_after_a_first_trace_is_found_after_no_other(old, new, traces, install, tmp_path):
    install("schedule_pkg", {"__init__.py": MAKES_A_FLOAT})
    start(USES_A_SCHEDULE, "schedule_pkg", tmp_path)
    assert old in USES_A_SCHEDULE
    found = start(USES_A_SCHEDULE.replace(old, new), "schedule_pkg", tmp_path)
    assert found.update.stats().traces == traces, found.update.last_miss


@pytest.mark.sample(every=2)
@pytest.mark.parametrize(
    ("old", "new", "traces"),
    [
        ("# Edited.", "", (0, 0)),
        ("# Edited.", "scale = schedule_pkg.make_schedule(100)", (0, 1)),  # Of another one.
        ("update(x)\n        #", "#", (0, 1)),  # Nothing has made a float.
        ("# Edited.", "evaluate(scale, x[:2])", (0, 1)),  # Its own trace makes one.
        ("schedule(100)", "schedule(101)", (1, 1)),
    ],
)
def test_a_number_that_steps_share(old, new, traces, install, tmp_path):
    """As the schedule in a `TrainState` that one step trains, and another one evaluates."""
    package = """
    def make_schedule(steps):
        def schedule(x):
            nonlocal steps
            steps = float(steps)
            return x * 2 * (steps / steps)
        return schedule
    """
    source = """
    import schedule_pkg

    scale = schedule_pkg.make_schedule(100)

    @sc.step
    def update(x):
        return scale(x)

    @sc.step(static_argnums=0)
    def evaluate(function, x):
        return function(x)

    def step(x):
        update(x)
        # Edited.
        return evaluate(scale, x)
    """
    install("schedule_pkg", {"__init__.py": package})
    start(source, "schedule_pkg", tmp_path)
    edited = source.replace(old, new if "scale = " not in new else f"global scale; {new}")
    found = start(edited, "schedule_pkg", tmp_path)
    stats = found.update.stats(), found.evaluate.stats()
    assert tuple(each.traces for each in stats) == traces, found.evaluate.last_miss


@pytest.mark.parametrize("is_verified", [False, True])
def test_a_check_begins_where_the_first_trace_began(is_verified, install, tmp_path):
    """A program for the float is not compared with one for the integer."""
    differs = MAKES_A_FLOAT.replace("return x * 2", "return x * 2 if is_int else x + x")
    differs = differs.replace(
        "self.steps = float", "is_int = type(self.steps) is int; self.steps = float"
    )
    install("schedule_pkg", {"__init__.py": differs})
    start(USES_A_SCHEDULE, "schedule_pkg", tmp_path)
    short = USES_A_SCHEDULE.replace("return update(x)", "return x * 2")
    for _ in range(2 if is_verified else 0):  # The first program is not traced at its third start.
        start(short, "schedule_pkg", tmp_path, verify="background")
    found = start(USES_A_SCHEDULE, "schedule_pkg", tmp_path, verify="background")
    stats = found.update.stats()
    assert (stats.traces, stats.loads) == (0, 2)
    assert stats.verifications == (0 if is_verified else 2)


def test_what_counts_on_from_a_number_is_traced_at_each_start(install, tmp_path):
    counts = MAKES_A_FLOAT.replace("float(self.steps)", "self.steps + 1")
    install("schedule_pkg", {"__init__.py": counts})
    start(USES_A_SCHEDULE, "schedule_pkg", tmp_path)
    again = start(USES_A_SCHEDULE, "schedule_pkg", tmp_path).update
    assert (again.stats().traces, again.stats().loads) == (2, 2)
    assert "steps: the trace changes it from 101 to 102, and others may" in str(again.last_miss)


def test_a_trace_that_looks_at_the_parameters_of_a_function(tmp_path):
    source = """
    import inspect

    def scale(x, factor=2, **others):
        return x * factor

    def call(function, x, **given):
        parameters = inspect.signature(function).parameters.values()
        if all(each.kind is not inspect.Parameter.VAR_KEYWORD for each in parameters):
            given = {}
        assert [each.default is inspect.Parameter.empty for each in parameters][:2] == [True, False]
        return function(x, **given)

    @sc.step
    def step(x):
        return call(scale, x, rate=1)
    """
    start(source, "", tmp_path)
    assert levels(start(source, "", tmp_path)) == WITHOUT_A_TRACE
    with pytest.raises(AssertionError, match=r"\[0.0, 3.0, 6.0\]"):  # Not twice any more.
        start(source.replace("factor=2", "factor=3"), "", tmp_path)


def test_a_package_that_logs(install, tmp_path):
    """Python's loggers remember which levels are enabled."""
    text = """
    import logging

    logger = logging.getLogger("of a package")

    def scale(x):
        logger.debug("tracing")
        return x * 2
    """
    install("logging_pkg", {"__init__.py": text})
    source = """
    import logging
    import logging_pkg

    logging_pkg.logger._cache.clear()

    @sc.step
    def step(x):
        return logging_pkg.scale(x)
    """
    start(source, "logging_pkg", tmp_path)
    assert levels(start(source, "logging_pkg", tmp_path)) == WITHOUT_A_TRACE
    louder = source.replace("logging_pkg.logger._cache.clear()", "logging_pkg.logger.setLevel(10)")
    assert levels(start(louder, "logging_pkg", tmp_path)) == WITHOUT_COMPILING


def test_what_a_configuration_of_omegaconf_has_resolved_before(install, tmp_path):
    """Hydra asks for the time, and so each of its configurations keeps it."""
    text = """
    import dataclasses

    @dataclasses.dataclass
    class ContainerMetadata:
        resolver_cache: dict

    class Config:
        def __init__(self, now):
            self._metadata, self.rate = ContainerMetadata({"now": now}), 2

        def resolved(self):
            return self._metadata.resolver_cache["now"]
    """
    install("omegaconf", {"__init__.py": "", "base.py": text})
    source = """
    from omegaconf import base

    config = base.Config(now=1)

    @sc.step
    def step(x):
        return x * config.rate
    """
    start(source, "omegaconf", tmp_path)
    later = source.replace("now=1", "now=2")
    assert levels(start(later, "omegaconf", tmp_path)) == WITHOUT_A_TRACE
    asking = source.replace("config.rate", "(config.resolved() * 0 + config.rate)")
    start(asking, "omegaconf", tmp_path)
    asking = asking.replace("now=1", "now=2")
    assert levels(start(asking, "omegaconf", tmp_path)) == WITHOUT_COMPILING


def test_functions_that_beartype_makes(install, tmp_path):
    """It writes addresses into the names of their parameters, and remembers a hash of strings."""
    text = """
    class BeartypeConf:
        def __init__(self, given):
            self._conf_args, self._hash = given, hash(given)

        def __hash__(self):
            return self._hash
    """
    files = {"__init__.py": "", "_conf/__init__.py": "", "_conf/confmain.py": text}
    install("beartype", files)
    source = """
    from beartype._conf.confmain import BeartypeConf

    address, seed, kind = 100, 1, "float"
    conf = BeartypeConf(("args",))
    conf._hash = seed
    made = {"BeartypeConf": BeartypeConf, "conf": conf, "__name__": "life"}
    one, other = (f"__beartype_object_{each}" for each in (address, address + 8))
    text = f"def scale(x, *, {one}={kind}, {other}=int, __beartype_conf=conf):"
    text += f"return x * 2 * ({one} is not None)"
    exec(compile(text, f"<@beartype(life.scale) at {address}>", "exec"), made)
    scale = made["scale"]

    @sc.step
    def step(x):
        return scale(x)
    """
    start(source, "beartype", tmp_path)
    later = source.replace("100, 1", "208, 2")
    assert levels(start(later, "beartype", tmp_path)) == WITHOUT_A_TRACE
    other = start(later.replace('"float"', '"int"'), "beartype", tmp_path)
    assert levels(other) == WITHOUT_COMPILING
    assert "(default __beartype_object_0): class builtins.float → class builtins.int" in str(
        other.step.last_miss
    )


@pytest.mark.parametrize("kind", ["FrozenDict", "Frozen"])
def test_a_hash_that_an_object_of_a_package_remembers(kind, install, tmp_path):
    text = """
    class Frozen:
        def __init__(self, given):
            self.given, self._hash = given, None

        def __getitem__(self, name):
            return self.given[name]

        def __hash__(self):
            self._hash = self._hash or hash(tuple(self.given))
            return self._hash
    """
    install("frozen_pkg", {"__init__.py": "from flax.core import FrozenDict\n" + dedent(text)})
    source = f"""
    from frozen_pkg import {kind}

    names = {kind}({{"scale": 2.0}})

    @sc.step
    def step(x):
        return x * names["scale"]

    assert isinstance(hash(names), int)  # That of a string is another in each process.
    """
    start(source, "frozen_pkg", tmp_path)
    assert levels(start(source, "frozen_pkg", tmp_path)) == WITHOUT_A_TRACE
    unasked = source.replace("isinstance(hash(names), int)", "True")
    assert levels(start(unasked, "frozen_pkg", tmp_path)) == WITHOUT_A_TRACE
    edited = source.replace("2.0", "2")
    assert levels(start(edited, "frozen_pkg", tmp_path)) == WITHOUT_COMPILING


def test_a_hash_of_the_users_own_is_an_attribute(tmp_path):
    source = """
    class Frozen:
        def __init__(self):
            self._hash = 2

        def __hash__(self):
            return 5

    frozen = Frozen()

    @sc.step
    def step(x):
        return x * frozen._hash
    """
    start(source, "", tmp_path)
    edited = source.replace("_hash = 2", "_hash = 2.0")
    assert levels(start(edited, "", tmp_path)) == WITHOUT_COMPILING


def test_a_trace_that_copies_an_object(tmp_path):
    """Python then keeps the names of its slots in its class, at the first copy."""
    source = """
    import copy

    class Scale:
        def __init__(self):
            self.factor = 2

    scale = Scale()

    @sc.step
    def step(x):
        again = copy.copy(scale)
        return x * getattr(again, "fac" + "tor")

    step.warm(np.ones(2, np.float32))
    """
    start(source, "", tmp_path)
    assert levels(start(source, "", tmp_path)) == (0, 0, 2)


@pytest.mark.parametrize("name", ["stack", "currentframe", "getsource", "getmodule"])
def test_what_else_inspect_tells_may_differ(name):
    assert why_impure(f"inspect.{name}") is not None


def test_a_reason_tells_whose_init_file_it_is(install, tmp_path):
    install("stamping_pkg", {"__init__.py": "import time\ndef stamp():\n    return time.time()\n"})
    source = """
    import stamping_pkg

    @sc.step
    def step(x):
        stamping_pkg.stamp()
        return x * 2
    """
    miss = start(source, "stamping_pkg", tmp_path).step.last_miss
    assert [each.partition(" ")[0] for each in miss.untrackable] == [
        "stamping_pkg/__init__.py:stamp:"
    ]


@pytest.mark.parametrize(("name", "is_known"), [("tree", True), ("mujoco", True), ("trees", False)])
def test_a_package_with_compiled_code(name, is_known, install, tmp_path):
    """Of dm-tree it is known that its compiled code depends on its arguments alone; of mujoco's, a
    call is seen."""
    files = """
    import sys, types

    native = sys.modules[f"{__name__}._native"] = types.ModuleType(f"{__name__}._native")
    native.__file__ = "_native.so"

    def map_structure(function, value):
        return function(value)
    """
    install(name, {"__init__.py": files})
    source = f"""
    import {name}

    @sc.step
    def step(x):
        return {name}.map_structure(lambda leaf: leaf * 2, x)
    """
    start(source, name, tmp_path)
    again = start(source, name, tmp_path)
    assert (levels(again) == WITHOUT_A_TRACE) == is_known
    why = f"package {name}: it has compiled code, which may read anything"
    assert (why in again.step.last_miss.untrackable) != is_known


@pytest.mark.parametrize(("read", "is_called"), [("name", False), ("default_factory()", True)])
def test_a_package_that_asks_dataclasses_for_their_fields(read, is_called, install, tmp_path):
    """As chex does: what makes the default of a field counts if it may be called."""
    package = f"""
    def count(given):
        return len([each.{read} for each in given.__dataclass_fields__.values()])
    """
    install("fields_pkg", {"__init__.py": package})
    source = """
    import dataclasses, time, fields_pkg

    @dataclasses.dataclass
    class Config:
        run_dir: str = dataclasses.field(default_factory=lambda: f"runs/{time.time()}")
        label: str = dataclasses.field(default_factory=str)

    config = Config()

    @sc.step
    def step(x):
        return x * fields_pkg.count(config)
    """
    start(source, "fields_pkg", tmp_path)
    second = start(source, "fields_pkg", tmp_path)
    assert (levels(second) == WITHOUT_A_TRACE) != is_called, second.step.last_miss


def test_what_singledispatch_remembers_is_no_dependency(install, tmp_path):
    """It keeps which function was called for which class, in a cache."""
    source = """
    import functools

    @functools.singledispatch
    def scale(kind, x):
        return x

    @scale.register
    def _(kind: int, x):
        return x * 2

    @sc.step
    def another(x):
        return scale(3, x)

    @sc.step
    def step(x):
        return scale(another, scale(2, x))

    another(np.arange(3))
    """
    start(source, "none", tmp_path)
    second = start(source, "none", tmp_path)
    assert levels(second) == WITHOUT_A_TRACE, second.step.last_miss


# ---- packages that no distribution contains ----------------------------------------------------

COPIED = {"__init__.py": "from copied_pkg.scaling import twice", "data.txt": "2"}
COPIED |= {"scaling.py": "FACTOR = 2\ndef twice(x): return x * FACTOR"}
USES_COPY = """
import copied_pkg

@sc.step
def step(x):
    return copied_pkg.twice(x)
"""


def test_a_package_without_a_distribution_stands_for_itself(install, tmp_path):
    """It may have been copied to where others are installed."""
    install("copied_pkg", COPIED, is_distributed=False)
    first = start(USES_COPY, "copied_pkg", tmp_path)
    assert not first.step.last_miss.untrackable
    assert levels(start(USES_COPY, "copied_pkg", tmp_path)) == WITHOUT_A_TRACE
    for name in ("__init__.py", "data.txt", "more/new.py"):
        install("copied_pkg", {name: COPIED.get(name, "") + "\n"}, is_distributed=False)
        again = start(USES_COPY, "copied_pkg", tmp_path)
        assert levels(again) == WITHOUT_COMPILING
        assert "package copied_pkg: files" in str(again.step.last_miss)


def test_a_package_of_very_many_files_stands_for_nothing(install, tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "_MOST_FILES", 2)
    install("copied_pkg", COPIED, is_distributed=False)
    for _ in range(2):
        again = start(USES_COPY, "copied_pkg", tmp_path)
        assert "no installed distribution contains it" in str(again.step.last_miss)


@pytest.mark.parametrize("lists_files", [False, True])
def test_the_distribution_of_a_package_of_another_name(lists_files, install):
    install("copied_pkg", COPIED, is_distributed=False)
    about = {"METADATA": "Name: some-project\nVersion: 3\n"}
    if lists_files:
        about["RECORD"] = "copied_pkg/__init__.py,,"
    else:
        about["top_level.txt"] = "copied_pkg"
    install("some_project-3.dist-info", about, is_distributed=False)
    assert provenance.distribution_of("copied_pkg") == ("copied_pkg", "some-project 3")


DIFFERS_IN_EACH_RUN = """
    import dataclasses, time, uuid

    @dataclasses.dataclass(frozen=True)
    class Config:
        rate: float = 2.0
        name: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
        tag: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
        run: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
        started: float = dataclasses.field(default_factory=time.perf_counter)

    class Trainer:
        def __init__(self):
            self.config = Config()
            self.name = f"run at {time.perf_counter()}"
            self.step = sc.step(self.train)

        def train(self, x):
            {statement}
            return x * self.config.rate

    step = Trainer().step
    """


@pytest.mark.parametrize("statement", ["repr(self.config)", "f'{self.config}'", "self.name"])
def test_names_and_times_of_a_run_that_a_step_reads(statement, tmp_path):
    """See `tests/scripts/trainer_attribute.py` for a step that does not."""
    source = DIFFERS_IN_EACH_RUN.replace("{statement}", statement)
    _, second = (start(source, "no_package", tmp_path) for _ in range(2))
    assert levels(second) == WITHOUT_COMPILING


def test_another_dataclass_is_formatted(tmp_path):
    """The code that Python puts around a generated `__repr__` is the same for all of them."""
    source = DIFFERS_IN_EACH_RUN.replace("{statement}", "repr(sc.Read())")
    _, second = (start(source, "no_package", tmp_path) for _ in range(2))
    assert "started" not in str(second.step.last_miss)


RUNS = """
    import runs_pkg

    class Run:
        run = 2

    run = Run()

    @sc.step
    def step(x):
        return runs_pkg.scaled(run, x)
    """


@pytest.mark.parametrize(
    "code",
    [
        "return x * (2 if not callable(owner.run) else owner.run())",
        "run = owner.run\n        return x * (run() if callable(run) else 2)",
    ],
)
def test_an_attribute_that_a_package_calls_if_it_can(code, install, tmp_path):
    """A number cannot be called, but code may ask first."""
    install("runs_pkg", {"__init__.py": f"\n    def scaled(owner, x):\n        {code}\n    "})
    for _ in range(2):
        found = start(RUNS, "runs_pkg", tmp_path)
    assert levels(found) == WITHOUT_A_TRACE
    mine = RUNS.replace("run = Run()", "run = Run()\n    run.run = lambda: 3")
    with pytest.raises(AssertionError, match=r"\[0.0, 3.0, 6.0\]"):
        start(mine, "runs_pkg", tmp_path)


def test_an_attribute_that_a_package_calls(install, tmp_path):
    code = "\n    def scaled(owner, x):\n        return owner.run() * x\n    "
    install("runs_pkg", {"__init__.py": code})
    source = """
    import runs_pkg

    class Run:
        def __init__(self, factor):
            self.factor = factor

        def run(self):
            return self.factor

    class Owner:
        def __init__(self):
            self.inner = Run({factor})
            self.run = 1

        def scaled(self, x):
            return runs_pkg.scaled(self.inner, x)

    step = sc.step(Owner().scaled)
    """
    for _ in range(2):
        found = start(source.replace("{factor}", "2"), "runs_pkg", tmp_path)
    assert levels(found) == WITHOUT_A_TRACE
    with pytest.raises(AssertionError, match=r"\[0.0, 3.0, 6.0\]"):
        start(source.replace("{factor}", "3"), "runs_pkg", tmp_path)


@pytest.mark.parametrize("name", ["_scale", "__scale"])
@pytest.mark.parametrize("set_it", ["setattr(scaling_pkg, 'NAME', 2)", "scaling_pkg.set_to(2)"])
def test_a_private_variable_of_a_package(name, set_it, install, tmp_path):
    """Its name may begin with two underscores, as those of Python's own begin and end."""
    code = """
    NAME = 1

    def set_to(value):
        global NAME
        NAME = value

    def scaled(x):
        return x * NAME
    """
    install("scaling_pkg", {"__init__.py": code.replace("NAME", name)})
    source = f"""
    import scaling_pkg

    {set_it.replace("NAME", name)}

    @sc.step
    def step(x):
        return scaling_pkg.scaled(x)
    """
    start(source, "scaling_pkg", tmp_path)
    assert levels(start(source, "scaling_pkg", tmp_path)) == WITHOUT_A_TRACE
    with pytest.raises(AssertionError, match=r"\[0.0, 3.0, 6.0\]"):
        start(source.replace("2)", "3)"), "scaling_pkg", tmp_path)


@pytest.mark.parametrize("kept", ["jnp.asarray(self.x, jnp.float32)", "self.x * 1.0"])
def test_an_argument_that_computes_when_it_is_flattened_is_verified(kept, tmp_path, caplog):
    """It cannot be flattened once its arrays are described by their shapes alone."""
    source = f"""
    @jax.tree_util.register_pytree_node_class
    class Box:
        def __init__(self, x):
            self.x = x

        def tree_flatten(self):
            return ({kept},), None

        @classmethod
        def tree_unflatten(cls, _, children):
            return cls(*children)

    over_boxes = sc.step(lambda box: box.x * 2)

    def step(x):
        return over_boxes(Box(x))
    """
    start(source, "no_package", tmp_path, verify="background")
    again = start(source, "no_package", tmp_path, verify="background")
    stats = again.over_boxes.stats()
    assert (stats.traces, stats.loads, stats.verifications) == (0, 1, 1)
    assert not caplog.records
