"""Of absl's flags and of a `ConfigDict`, those settings count that a trace has asked for."""

import pytest

from stepcache import jaxcompat
from stepcache.fingerprint import asked_by_name
from tests.programs.starts import WITHOUT_A_TRACE, WITHOUT_COMPILING, levels, start

pytestmark = pytest.mark.skipif(
    not jaxcompat.PRIVATE_API, reason="programs are stored through JAX's private API"
)

PROGRAM = """
import copy
from absl import flags
from ml_collections import ConfigDict, FrozenConfigDict
from pydantic import BaseModel, PrivateAttr

FLAGS = flags.FlagValues()
FACTOR = flags.DEFINE_float("factor", 2.0, "", flag_values=FLAGS)
flags.DEFINE_string("directory", "first", "", flag_values=FLAGS)
FLAGS(["program"])

class Own(ConfigDict):
    def hidden(self):
        return self._fields["factor"].get()

config = ConfigDict({"factor": 2, "directory": "first", "model": {"factor": 2, "directory": ""}})
class Inner(BaseModel):
    factor: int = 2
    directory: str = "first"

class Model(Inner, extra="allow", frozen=False):
    inner: Inner = Inner()
    _factor: int = PrivateAttr(2)
    _directory: str = PrivateAttr("first")

    @property
    def twice(self):
        return self.factor * 2

    def of_inner(self):
        return self.inner.factor

model = Model(more=2, run_in="first")
numbers = ConfigDict({7: 2, 8: 0})
config.same = config.get_ref("factor")
# Edited.
own = Own(config)
frozen = FrozenConfigDict(config)
NAMES = "fac", "tor"

def of_globals():
    return FLAGS.factor

@sc.step
def step(x):
    return x * READ
"""
OTHERS = """numbers[8] = 1
model.directory = model._directory = model.inner.directory = model.run_in = "second"
FLAGS.directory = config.directory = config.model.directory = "second"
"""
FACTORS = """FLAGS.factor = 3.0
model.factor = model._factor = model.inner.factor = model.more = model.absent = 3
config.factor = config.model.factor = numbers[7] = config.absent = 3
"""


def program(read, edit="# Edited."):
    return PROGRAM.replace("READ", read).replace("# Edited.", edit)


@pytest.mark.sample(every=6)
@pytest.mark.parametrize(
    "read",
    [
        "config.factor",
        "config['factor']",
        "numbers[7]",
        "config[NAMES[0] + NAMES[1]]",
        "config.get('factor', 5)",
        "config.get('absent', 2)",
        "getattr(config, 'absent', 2)",
        "(3 if 'absent' in config else 2)",
        "config.model.factor",
        "config['model.factor']",
        "config.same",
        "frozen.factor",
        "frozen.model['factor']",
        "FLAGS.factor",
        "FLAGS['factor'].value",
        "FLAGS[NAMES[0] + NAMES[1]].value",
        "of_globals()",
        "FACTOR.value",
        "model.factor",
        "model.inner.factor",
        "model.of_inner()",
        "(model.twice // 2)",
    ],
)
def test_what_was_not_asked_for_does_not_count(read, tmp_path):
    start(program(read), "no_package", tmp_path)
    second = start(program(read, OTHERS), "no_package", tmp_path)
    assert levels(second) == WITHOUT_A_TRACE
    with pytest.raises(AssertionError, match="3"):
        start(program(read, FACTORS), "no_package", tmp_path)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    "read",
    [
        "(2 + 0 * len(config.to_json()))",
        "(2 + 0 * len(str(FLAGS)))",
        "(2 + 0 * len({**config}))",
        "(2 + 0 * len(list(frozen)))",
        "{frozen: 2}[frozen]",
        "(2 + 0 * len(FLAGS.flag_values_dict()))",
        "dict(config.items())['factor']",
        "own.hidden()",
        "config._fields['factor'].get()",
        "vars(config)['_fields']['factor'].get()",
        "frozen.as_configdict().factor",
        "copy.deepcopy(config).factor",
        "getattr(config, NAMES[0] + NAMES[1])",
    ],
)
def test_all_count_where_any_may_have_been_read(read, tmp_path):
    start(program(read), "no_package", tmp_path)
    again = start(program(read), "no_package", tmp_path)
    assert levels(again) == WITHOUT_A_TRACE
    second = start(program(read, OTHERS), "no_package", tmp_path)
    assert levels(second) == WITHOUT_COMPILING
    assert "directory: 'first' → 'second'" in str(second.step.last_miss)


def test_what_is_asked_of_a_flag_itself(tmp_path):
    read = "(2 if not FLAGS['factor'].present and FLAGS['factor'].default == 2 else 3)"
    start(program(read), "no_package", tmp_path)
    assert levels(start(program(read, OTHERS), "no_package", tmp_path)) == WITHOUT_A_TRACE
    for edit in ("FLAGS(['program', '--factor=2.0'])", "FLAGS.set_default('factor', 3.0)"):
        with pytest.raises(AssertionError, match="3"):
            start(program(read, edit), "no_package", tmp_path)


@pytest.fixture
def copied_packages(monkeypatch):
    """As where they are not in `site-packages`: nobody sees what they read."""
    with monkeypatch.context() as patch:
        patch.setattr(asked_by_name, "_FILES", {})
        asked_by_name.keeps_settings.cache_clear()
        yield
    asked_by_name.keeps_settings.cache_clear()


@pytest.mark.parametrize("read", ["config.factor", "FLAGS.factor", "FACTOR.value"])
def test_of_a_copy_of_such_a_package_all_count(read, copied_packages, tmp_path):
    start(program(read), "no_package", tmp_path)
    assert levels(start(program(read), "no_package", tmp_path)) == WITHOUT_A_TRACE
    with pytest.raises(AssertionError, match="3"):
        start(program(read, FACTORS), "no_package", tmp_path)


def test_all_count_where_another_package_knows_where_they_are_kept(install, tmp_path):
    install("settings_pkg", {"__init__.py": "def read(given): return given._fields['fac' + 'tor']"})
    read = "settings_pkg.read(numbers)"
    source = f"import settings_pkg\n{program(read)}".replace("{7: 2", "{'factor': 2")
    source = source.replace("8: 0", "'run': 0")
    start(source, "settings_pkg", tmp_path)
    assert levels(start(source, "settings_pkg", tmp_path)) == WITHOUT_A_TRACE
    with pytest.raises(AssertionError, match="3"):
        start(source.replace("'factor': 2", "'factor': 3"), "settings_pkg", tmp_path)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    "read",
    [
        "model._factor",
        "model.more",
        "getattr(model, 'absent', 2)",
        "model.model_dump()['factor']",
        "dict(model)['factor']",
        "vars(model)['factor']",
        "model.inner.model_copy(update={'more': 2}).factor",
        "getattr(model, NAMES[0] + NAMES[1])",
    ],
)
def test_what_pydantic_is_asked_to_do_needs_a_trace(read, tmp_path):
    """It compiles what it does, and nobody can look into that."""
    for _ in range(2):
        last = start(program(read), "no_package", tmp_path)
    assert levels(last) == WITHOUT_COMPILING
    assert "cannot be looked into" in str(last.step.last_miss)
    with pytest.raises(AssertionError, match="3"):
        start(program(read, FACTORS), "no_package", tmp_path)
