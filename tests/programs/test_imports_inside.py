"""Steps that import packages when they are traced. A later start finds them without the imports."""

import sys

import jax
import optax
import pytest

from stepcache import jaxcompat
from stepcache.fingerprint import imports, module_contents
from stepcache.fingerprint.recorder import Recording
from tests.programs.starts import BUILT, levels, start, unload

pytestmark = pytest.mark.skipif(
    not jaxcompat.PRIVATE_API, reason="programs are stored through JAX's private API"
)

# Its import does what no trace may do; and it has objects that differ in each process.
PACKAGE = {
    "__init__.py": """
    import os, random, tempfile, threading, time

    from late_pkg import inner
    from late_pkg.inner import double

    HERE, NUMBER, NOW, USER = os.getcwd(), random.random(), time.time(), os.environ.get("SC_USER")
    KNOWN = {id(HERE), threading.get_ident()}
    with tempfile.TemporaryFile("w+") as file:
        file.read()
    """,
    "inner.py": "def double(x): return x * 2",
    "part/module.py": "from late_pkg.inner import double",
}
PROGRAM = """
class Config: pass

config = Config()
config.run = "first"

@sc.step
def step(x):
    IMPORT
    return CALL(x)

step(jnp.ones(2))
"""
FORMS = [
    ("import late_pkg", "late_pkg.double"),
    ("import late_pkg", "late_pkg.inner.double"),
    ("import late_pkg.inner", "late_pkg.inner.double"),
    ("import late_pkg.inner as lib", "lib.double"),
    ("from late_pkg import double", "double"),
    ("from late_pkg import inner", "inner.double"),
    ("from late_pkg.inner import double as twice", "twice"),
    ("import late_pkg.part.module", "late_pkg.part.module.double"),
    ("from late_pkg.part import module", "module.double"),
]


@pytest.mark.sample(every=4)
@pytest.mark.parametrize(("imported", "call"), FORMS)
def test_a_package_that_a_trace_imports(imported, call, install, tmp_path, monkeypatch):
    """Of two programs, the second is traced when the package is there."""
    install("late_pkg", PACKAGE)
    source = PROGRAM.replace("IMPORT", imported).replace("CALL", call)
    first = start(source, "late_pkg", tmp_path)
    assert levels(first) == (2, 2, 0), first.step.last_miss
    monkeypatch.setenv("SC_USER", "another")
    second = start(source.replace('"first"', '"second"'), "late_pkg", tmp_path)
    assert levels(second) == (0, 0, 2), second.step.last_miss
    assert "late_pkg" not in sys.modules


@pytest.mark.sample(every=24)
@pytest.mark.parametrize(("imported", "call"), FORMS)
@pytest.mark.parametrize("before", [False, True])
def test_whether_it_was_imported_before_does_not_matter(before, imported, call, install, tmp_path):
    install("late_pkg", PACKAGE)
    source = PROGRAM.replace("IMPORT", imported).replace("CALL", call)
    for number in range(3):
        # A statement in the module would have Python compile the step's own import otherwise.
        earlier = "__import__('late_pkg.part.module')\n" * before
        made = start(earlier + source, "late_pkg", tmp_path)
        assert levels(made)[0] == (2 if number == 0 else 0), made.step.last_miss
        before = not before


@pytest.mark.sample(every=24)
@pytest.mark.parametrize(("imported", "call"), FORMS)
@pytest.mark.parametrize("before", [False, True])
def test_what_is_replaced_in_it_before_the_trace_is_seen(before, imported, call, install, tmp_path):
    install("late_pkg", PACKAGE)
    source = PROGRAM.replace("IMPORT", imported).replace("CALL", call)
    start("__import__('late_pkg')\n" * before + source, "late_pkg", tmp_path)
    edit = (
        "lib = __import__('late_pkg.part.module'); triple = lambda x: x * 3; lib.double = triple; "
    )
    edit += "lib.inner.double = lib.part.module.double = triple\n"
    with pytest.raises(AssertionError, match=r"\[0.0, 3.0, 6.0\]"):
        start(edit + source, "late_pkg", tmp_path)


@pytest.mark.sample(every=12)
@pytest.mark.parametrize(("imported", "call"), FORMS)
def test_an_edit_of_its_files_is_seen(imported, call, install, tmp_path, monkeypatch):
    install("late_pkg", PACKAGE)
    source = PROGRAM.replace("IMPORT", imported).replace("CALL", call)
    start(source, "late_pkg", tmp_path)
    install("late_pkg", PACKAGE | {"inner.py": "def double(x): return x + x + x"})
    monkeypatch.setattr(module_contents, "_contents", {})  # As in another process.
    with pytest.raises(AssertionError, match=r"\[0.0, 3.0, 6.0\]"):
        start(source, "late_pkg", tmp_path)


def test_what_the_trace_calls_after_the_import_counts(install, tmp_path):
    files = PACKAGE | {
        "inner.py": "import random\ndef double(x): return x * 2 + 0 * random.random()",
    }
    install("late_pkg", files)
    source = PROGRAM.replace("IMPORT", "import late_pkg").replace("CALL", "late_pkg.double")
    first = start(source, "late_pkg", tmp_path)
    assert levels(first) == (2, 2, 0)
    assert "late_pkg/inner.py:double: it calls random.random" in str(first.step.last_miss)


def test_users_code_that_such_an_import_calls_counts(install, tmp_path):
    """The package calls what the program has registered, while it is imported."""
    files = {"__init__.py": "import builtins\nFACTOR = builtins.late_hook()"}
    install("late_pkg", files)
    source = """
    import builtins, random

    class Config: pass

    config = Config()
    config.factor = 2

    def hook():
        random.random()
        return config.factor

    builtins.late_hook = hook

    @sc.step
    def step(x):
        import late_pkg
        return x * late_pkg.FACTOR
    """
    first = start(source, "late_pkg", tmp_path)
    assert levels(first) == BUILT
    again = start(source.replace("factor = 2", "factor = 2.0"), "late_pkg", tmp_path)
    assert levels(again)[0] == 1, "it cannot be vouched for"


READS = {"__init__.py": "def read(given): return vars(given)['fac' 'tor']"}


@pytest.mark.parametrize(
    "body",
    [
        "import reading_pkg\nreading_pkg.read(reading_pkg)",
        "import reading_pkg\nreading_pkg.read(reading_pkg)\nraise ImportError",
        "import reading_pkg, late_pkg.absent",
        "raise KeyError",
        "import stepcache, reading_pkg\nreading_pkg.read(reading_pkg)\n"
        "stepcache.step(lambda x: x + 1)(1.0)",
    ],
)
def test_what_code_reads_after_an_import_that_has_called_it_counts(body, install, tmp_path):
    """The import may fail, too."""
    install("reading_pkg", READS | {"__init__.py": READS["__init__.py"] + "\nfactor = 5"})
    install("late_pkg", {"__init__.py": body})
    source = """
    class Config: pass

    config = Config()
    config.factor, config.run = 2, "first"

    @sc.step
    def step(x):
        try:
            import late_pkg
        except (ImportError, KeyError):
            pass
        import reading_pkg
        return x * reading_pkg.read(config)
    """
    first = start(source, "reading_pkg", tmp_path)
    assert levels(first) == BUILT, first.step.last_miss
    unload("late_pkg")
    assert levels(start(source, "reading_pkg", tmp_path))[0] == 0
    unload("late_pkg")
    with pytest.raises(AssertionError, match=r"\[0.0, 3.0, 6.0\]"):
        start(source.replace("2, ", "3, "), "reading_pkg", tmp_path)


def test_a_trace_that_an_import_makes_is_recorded():
    """The import is around it: as where a script is the module of a package."""
    importing = imports.of_this_thread()
    importing.frame = sys._getframe()
    with Recording() as recording:
        jax.make_jaxpr(lambda x: optax.l2_loss(x))(1.0)
    names = {code.co_name for code in recording.entered.values()}
    assert importing.frame is None and "l2_loss" in names


def test_a_trace_within_an_import_within_a_trace_is_recorded():
    importing = imports.of_this_thread()
    with Recording() as outer:
        importing.frame = frame = sys._getframe()
        with Recording() as inner:
            jax.make_jaxpr(lambda x: optax.huber_loss(x))(1.0)
        assert importing.frame is frame
        importing.end(frame)
    assert "huber_loss" in {code.co_name for code in inner.entered.values()}
    assert outer.unavailable is None
