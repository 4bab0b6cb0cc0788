"""What a program puts into an installed package is a dependency of the steps that read it there."""

import pytest

from stepcache import jaxcompat
from tests.programs.starts import WITHOUT_A_TRACE, WITHOUT_COMPILING, levels, start

pytestmark = pytest.mark.skipif(
    not jaxcompat.PRIVATE_API, reason="programs are stored through JAX's private API"
)

PACKAGE = """
from collections import OrderedDict, defaultdict, deque
from functools import singledispatch
from types import MappingProxyType, SimpleNamespace

class Two: factor = 2
class Three: factor = 3
class Holder: factor = 1
class Base: kind = handler = None

class Registry:
    def __init__(self):
        self.handler, self._items = None, {}
    def register(self, name, value):
        self._items[name] = value
    def named(self, name):
        return self._items[name]

class Scaler:
    def __call__(self, x):
        return x * self.factor

@singledispatch
def dispatched(given): return 1

scaler = Scaler()
handler = None
handlers, table, nested, several, queue = [], {}, {"a": {}}, set(), deque()
ordered, default, space, below = OrderedDict(), defaultdict(dict), SimpleNamespace(), {}
proxy, registry, holders = MappingProxyType(below), Registry(), {"a": Holder()}

def unchanged(x):
    handler, handlers, table, nested, several, queue, ordered, default, space, below
    proxy, registry, holders, Base, scaler, dispatched
    return x

def scaled(x):
    return x * READ
"""

PROGRAM = """
import given_pkg

class Scale:
    def __init__(self, factor):
        self.factor = factor
    def __call__(self, x):
        return x * self.factor

class Double: factor = 2
class Triple: factor = 3

def double(x): return x * 2
def triple(x): return x * 3

@sc.step
def another(x):
    return given_pkg.unchanged(x)

if FIRST:
    another(np.arange(3))
GIVEN

@sc.step
def step(x):
    Double, Triple, double, triple, Scale  # So all of them are known to be reached.
    return given_pkg.scaled(x)
"""
READS_IT = """
import given_pkg

@sc.step
def step(x):
    return given_pkg.scaled(x)
"""
EDITS = {"(2)": "(3)", "'2'": "'3'", "Double": "Triple", "double": "triple", "Two": "Three"}


def program(given: str, after_another_step: bool) -> str:
    return PROGRAM.replace("GIVEN", f"given_pkg.{given}").replace("FIRST", str(after_another_step))


@pytest.mark.sample(every=8)
@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("handler = Scale(2)", "handler.factor"),
        ("handler = Scale(2)", "handler(1)"),
        ("handlers.append(Scale(2))", "handlers[-1].factor"),
        ("several.add(Scale(2))", "sum(each.factor for each in several)"),
        ("queue.append(Scale(2))", "queue[0].factor"),
        ("queue.append(int('2'))", "queue[0]"),
        ("table['a'] = Scale(2)", "table['a'].factor"),
        ("table['a'] = Double", "table['a'].factor"),
        ("table['a'] = double", "table['a'](1)"),
        ("table[given_pkg.Base] = Scale(2)", "table[Base].factor"),
        ("table[0] = Scale(2)", "table[0].factor"),
        ("nested['a']['b'] = Scale(2)", "nested['a']['b'].factor"),
        ("ordered['a'] = int('2')", "ordered['a']"),
        ("ordered['a'] = Scale(2)", "ordered['a'].factor"),
        ("default['a']['b'] = int('2')", "default['a']['b']"),
        ("default['a']['b'] = Scale(2)", "default['a']['b'].factor"),
        ("below['a'] = int('2')", "proxy['a']"),
        ("below['a'] = Scale(2)", "proxy['a'].factor"),
        ("space.factor = int('2')", "space.factor"),
        ("space.handler = Scale(2)", "space.handler.factor"),
        ("registry.handler = Scale(2)", "registry.handler.factor"),
        ("registry.register('a', Scale(2))", "registry.named('a').factor"),
        ("registry.register('a', Double)", "registry.named('a').factor"),
        ("registry.register('a', double)", "registry.named('a')(1)"),
        ("dispatched.register(int)(double)", "dispatched(1)"),
        ("dispatched.register(int)(lambda given: int('2'))", "dispatched(1)"),
        ("holders['a'].factor = int('2')", "holders['a'].factor"),
        ("holders['a'].handler = Scale(2)", "holders['a'].handler.factor"),
        ("scaler.factor = int('2')", "scaler(1)"),
        ("scaler.factor = Double.factor", "scaler(1)"),
        ("table['a'] = given_pkg.scaler; given_pkg.scaler.factor = int('2')", "table['a'](1)"),
        ("Base.handler = Scale(2)", "Base.handler.factor"),
        ("Base.kind = Double", "Base.kind.factor"),
        ("Base.kind = given_pkg.Two", "Base.kind.factor"),
    ],
)
def test_an_edit_of_what_is_put_there_is_seen(given, read, install, tmp_path):
    """Where another step has looked at the package before, and in a few cases where none has."""
    after_another_step = "handler" not in given
    install("given_pkg", {"__init__.py": PACKAGE.replace("READ", read)})
    source = program(given, after_another_step)
    start(source, "given_pkg", tmp_path)
    second = start(source, "given_pkg", tmp_path)
    assert levels(second) == WITHOUT_A_TRACE, second.step.last_miss
    for before, after in EDITS.items():
        given = given.replace(before, after)
    with pytest.raises(AssertionError, match=r"\[0.0, 3.0, 6.0\]"):
        start(program(given, after_another_step), "given_pkg", tmp_path)


def test_what_is_kept_there_for_another_class_is_no_dependency(install, tmp_path):
    install("given_pkg", {"__init__.py": PACKAGE.replace("READ", "(2 + 0 * len(table))")})
    source = """
    import given_pkg

    given_pkg.table[given_pkg.Base] = given_pkg.Holder()
    {}

    @sc.step
    def step(x):
        return given_pkg.scaled(x)
    """
    another = """
    class Another: factor = 3
    given_pkg.table[Another] = given_pkg.Holder()
    given_pkg.table[Another].kind = Another
    """
    start(source.format(""), "given_pkg", tmp_path)
    second = start(source.format(another), "given_pkg", tmp_path)
    assert levels(second) == WITHOUT_A_TRACE, second.step.last_miss


def test_stacks_for_each_thread_that_are_empty_again(install, tmp_path):
    """As haiku has: Python notes the generic alias that made a stack, which is no state of it."""
    stacks = """
    import collections, threading
    from typing import Generic, TypeVar

    T = TypeVar("T")

    class Local(threading.local, Generic[T]):
        def __init__(self):
            self.items = collections.deque()
        def __call__(self, item):
            self.items.append(item)

    stack = Local[int]()

    def scaled(x):
        stack(2)
        return x * stack.items.pop()
    """
    install("given_pkg", {"__init__.py": stacks})
    start(READS_IT, "given_pkg", tmp_path)
    assert levels(start(READS_IT, "given_pkg", tmp_path)) == WITHOUT_A_TRACE


def test_nothing_of_a_lazy_object_is_called(install, tmp_path):
    """To look at a module that is imported at its first use would import it, and may raise."""
    lazy = """
    import types

    asked = []

    def ask(of, name):
        asked.append(name)
        raise ImportError(f"no module for {name}")

    class LazyModule(types.ModuleType):
        __getattr__ = ask

    class Proxy:
        def __getattribute__(self, name):
            ask(self, name)
        def __call__(self):
            pass

    class Asks(type):
        __getattr__ = ask

    class Class(metaclass=Asks):
        pass

    module, proxy, table = LazyModule("missing"), Proxy(), {"a": Proxy(), "b": LazyModule("other")}

    def scaled(x):
        module, proxy, table, Class
        return x * 2
    """
    install("given_pkg", {"__init__.py": lazy})
    start(READS_IT, "given_pkg", tmp_path)
    second = start(READS_IT, "given_pkg", tmp_path)
    assert levels(second) == WITHOUT_A_TRACE, second.step.last_miss
    assert second.given_pkg.asked == []


def test_a_module_that_a_package_imports_by_its_name(install, tmp_path, monkeypatch):
    by_name = """
    import importlib

    def scaled(x):
        return x * importlib.import_module("named_in_a_config").RATE
    """
    install("given_pkg", {"__init__.py": by_name})
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "named_in_a_config.py").write_text("RATE = 2.0\n")
    monkeypatch.syspath_prepend(sources)
    start(READS_IT, "given_pkg", tmp_path)
    second = start(READS_IT, "given_pkg", tmp_path)
    assert levels(second) == WITHOUT_COMPILING
    assert "importlib.import_module" in str(second.step.last_miss)
