"""What an installed package reads of an object of the user's is a dependency, named or not."""

import pytest

from stepcache import jaxcompat
from tests.programs.starts import WITHOUT_A_TRACE, levels, start

pytestmark = pytest.mark.skipif(
    not jaxcompat.PRIVATE_API, reason="programs are stored through JAX's private API"
)

PROGRAM = """
import argparse, types
import read_pkg

class Config: pass
class Visitor: pass

config, visitor = Config(), Visitor()
config.factor = 2
SPACE = types.SimpleNamespace(factor=2)
ARGUMENTS = argparse.Namespace(factor=2)
NAMES = "fac-tor"
# Edited.

@sc.step
def step(x):
    Visitor
    return x * read_pkg.read(GIVEN)
"""
PACKAGE = """
class Proxy:
    def __init__(self, given):
        self.given = given
    def __getattr__(self, name):
        return getattr(self.given, name)

def read(given):
    READ
"""
FACTOR = "config.factor = 3"


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("edit", ["jnp.max", "jnp.mean", "lambda x: x * 3"])
def test_an_edit_of_a_function_of_jax_that_an_earlier_trace_has_entered(edit, install, tmp_path):
    """What all traces enter is recorded in the first one alone."""
    install("read_pkg", {"__init__.py": "def read(given, x): return given.chosen(x)"})
    source = """
    import read_pkg

    class Config: pass

    config = Config()
    config.chosen = jnp.sum
    sc.step(lambda x: jnp.sum(x) + jnp.max(x))(jnp.ones(2))

    @sc.step
    def step(x):
        return x * 2 + 0 * read_pkg.read(config, x)
    """
    start(source, "read_pkg", tmp_path)
    second = start(source, "read_pkg", tmp_path)
    assert levels(second) == WITHOUT_A_TRACE, second.step.last_miss
    third = start(source.replace("chosen = jnp.sum", f"chosen = {edit}"), "read_pkg", tmp_path)
    assert levels(third)[0] == 1


@pytest.mark.sample(every=20)
@pytest.mark.parametrize(
    ("read", "given", "edit"),
    [
        ("return vars(given)['fac' 'tor']", "config", FACTOR),
        ("return sum(given.__dict__.values())", "config", FACTOR),
        ("return sum(getattr(given, n) for n in dir(given) if n[0] != '_')", "config", FACTOR),
        ("return getattr(given, ''.join(['fac', 'tor']))", "config", FACTOR),
        ("return getattr(given, 'fac' + 'tor'[:len('abc')])", "config", FACTOR),
        ("return getattr(given[0], given[1].replace('-', ''))", "(config, NAMES)", FACTOR),
        ("return getattr(given, 'vis' + 'it'[:2], lambda: 2)()", "visitor", "Visitor.visit = int"),
        ("return Proxy(given).__getattr__('fac' + 'tor')", "config", FACTOR),
        ("import operator; return operator.attrgetter('fac' + 'tor')(given)", "config", FACTOR),
        (
            "match given:\n        case object(factor=found): return found",
            "config",
            FACTOR,
        ),
        (
            "try: return given.other\n    except AttributeError: return 2",
            "config",
            "config.other = 3",
        ),
        ("return 2 + (len(repr(given)) - 19)", "SPACE", "SPACE.factor = 20"),
        ("return 2 + (len(repr(given)) - 19)", "ARGUMENTS", "ARGUMENTS.factor = 20"),
    ],
)
def test_an_edit_of_what_a_package_reads_is_seen(read, given, edit, install, tmp_path):
    install("read_pkg", {"__init__.py": PACKAGE.replace("READ", read)})
    source = PROGRAM.replace("GIVEN", given)
    start(source, "read_pkg", tmp_path)
    second = start(source, "read_pkg", tmp_path)
    assert levels(second) == WITHOUT_A_TRACE, second.step.last_miss
    with pytest.raises((AssertionError, TypeError, ValueError)):
        start(source.replace("# Edited.", edit), "read_pkg", tmp_path)


@pytest.mark.parametrize(
    "read",
    [
        "return Reader(given).read('factor')",
        "return given.factor + 0 * len(vars())",
        "return getattr(given, 'factor', None) or 2",
    ],
)
def test_what_a_package_reads_of_its_own_objects_does_not_count(read, install, tmp_path):
    package = f"""
class Reader:
    def __init__(self, given):
        self.given = given
        self.__dict__.update(more=2)
    def read(self, name):
        return getattr(self, "gi" + name[:0] + "ven").factor + 0 * len(vars(self))

def read(given):
    {read}
"""
    install("read_pkg", {"__init__.py": package})
    source = PROGRAM.replace("GIVEN", "config")
    start(source, "read_pkg", tmp_path)
    edited = source.replace("# Edited.", "config.unread = 'of this run'")
    second = start(edited, "read_pkg", tmp_path)
    assert levels(second) == WITHOUT_A_TRACE, second.step.last_miss


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    ("keep", "read"),
    [
        ("kept.append(given)", "kept[0].factor"),
        ("kept.append(given)", "json.loads(json.dumps(kept[0], default=vars))['factor']"),
        ("kept.append(given.own)", "kept[0].__self__.factor"),
        ("kept.append(lambda: given)", "kept[0].__closure__[0].cell_contents.factor"),
        ("kept.append(lambda: given)", "getattr(kept[0](), 'fac' + 'tor')"),
        ("pass", "sys._getframe(1).f_locals['self'].factor"),
    ],
)
def test_a_package_may_have_got_hold_of_an_object_before(keep, read, install, tmp_path):
    """Though the step's own code does no more with it than to read its attributes."""
    package = f"""
    import json, sys
    kept = []
    def keep(given): {keep}
    def read(): return {read}
    """
    install("read_pkg", {"__init__.py": package})
    source = """
    import read_pkg

    class Trainer:
        def __init__(self): self.factor = self.unread = 2
        def own(self, x): return x * 1 + self.offset * read_pkg.read()
        offset = 0

    trainer = Trainer()
    read_pkg.keep(trainer)
    # Edited.
    step = sc.step(lambda x: x + trainer.own(x) + 0)
    """
    start(source, "read_pkg", tmp_path)
    assert levels(start(source, "read_pkg", tmp_path)) == WITHOUT_A_TRACE
    third = start(source.replace("# Edited.", "trainer.factor = 3"), "read_pkg", tmp_path)
    assert levels(third)[0] == 1
    assert "factor" in str(third.step.last_miss)


@pytest.mark.parametrize(
    "make",
    [
        "type(given)()",
        "again(given)",
        "getattr(given, '__class__')()",
    ],
)
def test_a_constructor_that_a_package_calls_counts_and_others_do_not(make, install, tmp_path):
    package = f"""
    def again(given):
        made = given.__class__.__new__(type(given))
        getattr(made, "__init__")()
        return made
    def make(given):
        try: return {make}
        except AttributeError: return None
    """
    install("read_pkg", {"__init__.py": package})
    source = """
    import time
    import read_pkg

    class Config:
        def __init__(self): self.factor = 2

    class Trainer:
        def __init__(self): self.config, self.started = Config(), time.time()
        def own(self, x): return x * read_pkg.make(self.config).factor

    trainer = Trainer()
    step = sc.step(trainer.own)
    """
    start(source, "read_pkg", tmp_path)
    second = start(source, "read_pkg", tmp_path)
    assert levels(second) == WITHOUT_A_TRACE
    with pytest.raises(AssertionError):
        start(source.replace("self.factor = 2", "self.factor = 3"), "read_pkg", tmp_path)


@pytest.mark.sample(every=9)
@pytest.mark.parametrize("decorator", ["", "@dataclasses.dataclass", "@flax.struct.dataclass"])
@pytest.mark.parametrize(
    ("field", "edit"),
    [
        ('read_pkg.from_output("loss")', ('"loss"', '"error"')),
        ("read_pkg.from_function(scaled)", ("RATE = 2", "RATE = 4")),
        ("read_pkg.from_function(lambda loss, error: loss * 2)", ("loss * 2", "loss * 4")),
    ],
)
def test_classes_of_fields_that_a_package_has_made(field, edit, decorator, install, tmp_path):
    """As the metrics of clu: what was captured when they were made decides what a step computes."""
    package = """
    import flax

    def from_output(name):
        @flax.struct.dataclass
        class FromOutput:
            total: object
            @classmethod
            def made_of(cls, **outputs): return cls(outputs[name])
        return FromOutput

    def from_function(function):
        @flax.struct.dataclass
        class FromFunction:
            total: object
            @classmethod
            def made_of(cls, **outputs): return cls(function(**outputs))
        FromFunction.__qualname__ = "Made"
        return FromFunction

    def collected(cls, **outputs):
        return {name: each.made_of(**outputs) for name, each in cls.__annotations__.items()}
    """
    install("read_pkg", {"__init__.py": package})
    source = f"""
    import dataclasses, flax
    import read_pkg

    RATE = 2
    def scaled(loss, error): return loss * RATE

    {decorator}
    class Metrics:
        kept: {field}

    @sc.step
    def made(x): return read_pkg.collected(Metrics, loss=x * 2, error=x * 4)["kept"]
    @sc.step
    def step(x):
        total = read_pkg.collected(Metrics, loss=x, error=x * 2)["kept"].total
        return total * (2 if {'"loss"' in edit[0]} else 1)
    made(np.arange(3.0))
    """
    start(source, "read_pkg", tmp_path)
    second = start(source, "read_pkg", tmp_path)
    assert levels(second) == WITHOUT_A_TRACE
    if decorator:  # Else nothing that the step holds leads to the class.
        assert (second.made.stats().traces, second.made.stats().loads) == (0, 1)
    with pytest.raises(AssertionError, match=r"\[0.0, 4.0, 8.0\]"):
        start(source.replace(*edit), "read_pkg", tmp_path)


def test_a_package_may_make_attributes_of_keys(install, tmp_path):
    package = """
    def mappable(cls):
        def __getitem__(self, key): return self.__dict__[key]
        cls.__getitem__ = __getitem__
        return cls
    """
    install("read_pkg", {"__init__.py": package})
    source = """
    import read_pkg

    @read_pkg.mappable
    class Config:
        def __init__(self): self.rate = 2

    config = Config()

    @sc.step
    def step(x): return x * 0 + 2 * np.arange(3) * config["rate"] / config["rate"]
    """
    start(source, "read_pkg", tmp_path)
    assert levels(start(source, "read_pkg", tmp_path)) == WITHOUT_A_TRACE
    edited = start(source.replace("self.rate = 2", "self.rate = 4"), "read_pkg", tmp_path)
    assert levels(edited)[0] == 1
    assert "config.rate" in str(edited.step.last_miss)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    ("imported", "drawn"),
    [
        ("import numpy as np", "np.random.rand()"),
        ("from numpy.random import rand", "rand()"),
        ("from numpy import random as numbers", "numbers.normal()"),
        ("import uuid", "uuid.uuid1().time_low"),
        ("import numpy as np", "(np.datetime64('now') > np.datetime64('2020-01-01'))"),
    ],
)
def test_a_package_that_draws_random_numbers_is_traced_at_each_start(
    imported, drawn, install, tmp_path
):
    install("draws_pkg", {"__init__.py": f"{imported}\ndef draw(x): return x * 2 + 0 * {drawn}"})
    source = "import draws_pkg\n@sc.step\ndef step(x): return draws_pkg.draw(x)"
    start(source, "draws_pkg", tmp_path)
    again = start(source, "draws_pkg", tmp_path)
    assert levels(again)[0] == 1
    assert "draws_pkg/__init__.py:draw" in str(again.step.last_miss)


def test_a_package_that_draws_by_keys_is_not(install, tmp_path):
    text = """
    import random
    import numpy as np
    import jax

    def scaled(x, key=None):
        if x is None:
            return random.random()
        key = jax.random.key(0)
        return x * 2 + 0 * jax.random.normal(key, x.shape) * np.prod(x.shape)
    """
    install("draws_pkg", {"__init__.py": text})
    source = "import draws_pkg\n@sc.step\ndef step(x): return draws_pkg.scaled(x)"
    start(source, "draws_pkg", tmp_path)
    assert levels(start(source, "draws_pkg", tmp_path)) == WITHOUT_A_TRACE


KEPT = [
    ("import random; rng = random.Random(SEED)", "rng.random()"),
    ("import numpy as np; rng = np.random.default_rng(SEED)", "rng.normal()"),
    ("from numpy.random import RandomState; rng = RandomState(SEED)", "rng.rand()"),
    ("from numpy.random import PCG64; rng = PCG64(SEED)", "rng.random_raw() % 7"),
    ("import random; by_name = {'init': random.Random(SEED)}", "by_name['init'].random()"),
    (
        "import numpy as np\nclass Noise:\n    rng = np.random.default_rng(SEED)",
        "Noise.rng.normal()",
    ),
    (
        "import random\nclass Noise:\n    def __init__(self): self.rng = random.Random(SEED)\n"
        "noise = Noise()",
        "noise.rng.random()",
    ),
]


@pytest.mark.sample(every=9)
@pytest.mark.parametrize(("kept", "drawn"), KEPT)
def test_a_package_that_draws_from_its_own_generator_counts_with_its_state(
    kept, drawn, install, tmp_path
):
    text = "SEED\ndef draw(x): return x * 2 + 0 * DRAWN".replace("DRAWN", drawn)
    source = "import draws_pkg\n@sc.step\ndef step(x): return draws_pkg.draw(x)"
    for _ in range(2):
        install("draws_pkg", {"__init__.py": text.replace("SEED", kept.replace("SEED", ""))})
        assert levels(start(source, "draws_pkg", tmp_path / "unseeded"))[0] == 1
    seen = []
    for seed in (0, 0, 0, 10):  # Of another size, for Python looks at sizes and whole seconds.
        install("draws_pkg", {"__init__.py": text.replace("SEED", kept.replace("SEED", str(seed)))})
        seen.append(levels(start(source, "draws_pkg", tmp_path / "seeded")))
    assert seen[2] == WITHOUT_A_TRACE  # The first start could not know what the trace would read.
    assert seen[3][0] == 1
