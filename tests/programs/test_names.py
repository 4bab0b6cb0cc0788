"""What code names, read from its bytecode, and what its digest sees."""

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import CodeType

import flax
import numpy as np
import optax
import pytest

from stepcache.fingerprint.bytecode import MAKES_ANY, SHOWS_NAMESPACES, Read, names_of
from stepcache.fingerprint.classes import is_special
from stepcache.fingerprint.code_digests import code_digest
from stepcache.fingerprint.code_reads import _may_be_of_the_users
from stepcache.jaxcompat.inspection import ASKED_BY_JAX


def compiled(source, name="f", filename="x.py"):
    """The code object of a function in a text."""
    module = compile(textwrap.dedent(source), filename, "exec")
    return next(c for c in module.co_consts if isinstance(c, CodeType) and c.co_name == name)


def test_chains_that_start_at_globals():
    names = names_of(compiled("def f(x): return a.b.c(x) + d"))
    assert set(names.reads) == {Read("global", "a", ("b", "c")), Read("global", "d", ())}


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ('return self.config["a"]["b"] + self.config.get("c", x)', {("a", "b"), ("c",)}),
        ('return self.config["a"] + config["b"]', {("a",), ("b",)}),
        ('own = self.config; return own["a"] * own.get("b")', {("a",), ("b",)}),
        ('return self.config["a"] + len(self.config)', set()),
        ('return self.config["a"] + of(lambda: self.config)', set()),
        ('return self.config["a"] + x.read("config")', set()),
        ('return self.config["a"] + self.config.get(x)', set()),
        ('return self.config["a" if x else "b"]', set()),
        ("return self.config.get(*x)", set()),
        ('own = self.config; return own["a"], own', set()),
        ('own = self.config; own["a"] = own["b"]', set()),
        ('own = self.config; own = x or own; return own["a"]', set()),
        ('own = self.config or x; return own["a"]', set()),
        ('own = self.config; return lambda: own["a"]', set()),
        ('own = self.config; return own["a"] * eval("own")', set()),
        ('x = self.config; return x["a"]', set()),
    ],
)
def test_attributes_that_are_only_read_by_constant_keys(text, keys):
    names = names_of(compiled(f"def f(self, x): {text}"))
    assert names.keys.get("config", set()) == keys
    assert "config" in names.attributes


def test_captured_variables_are_not_those_of_inner_functions():
    source = """
        def make(rate):
            def f(x):
                own = 1
                def inner(): return own + rate
                return inner()
            return f
    """
    make = compiled(source, "make")
    inner = next(c for c in make.co_consts if isinstance(c, CodeType))
    assert set(names_of(inner).reads) == {Read("captured", "rate", ())}


@pytest.mark.parametrize(
    ("source", "module", "attributes"),
    [
        ("import m\n    return m.rate", "m", (("rate",),)),
        ("import m.n\n    return m.n.rate + m.other", "m", (("n", "rate"), ("other",))),
    ],
)
def test_chains_that_start_at_imports(source, module, attributes):
    imports = names_of(compiled(f"def f():\n    {source}\n")).imports
    assert [(i.module, i.attributes) for i in imports if i.whole] == [(module, attributes)]


def test_names_of_a_from_import():
    (imported,) = names_of(compiled("def f():\n    from ..m import a, b\n    return a")).imports
    assert (imported.level, imported.module, imported.names) == (2, "m", ("a", "b"))


@pytest.mark.parametrize(
    ("text", "shows"), [("5 + (x in n)", True), ("5 + (x == n)", True), ("5 + (5 in x)", False)]
)
def test_code_that_compares_objects(text, shows):
    names = names_of(compiled(f"def f(x, n): return {text}"))
    assert (SHOWS_NAMESPACES in names.attributes) == shows


def test_variables_that_follow_each_other():
    names = names_of(compiled("def f(x):\n    import m; return m.rate(x) + x.config"))
    assert [(i.module, i.attributes) for i in names.imports if i.whole] == [("m", (("rate",),))]


@pytest.mark.parametrize(
    ("text", "makes"),
    [
        ("type(x)(n)", True),
        ("[type, n]", True),
        ("type(x)(x.type)", True),
        ("type(x) is n", False),
        ("x.type == n", False),
        ("f(x, type=n)", False),
        ("x['type']", False),
    ],
)
def test_code_that_may_make_objects_of_any_class(text, makes):
    """`config.type` is not Python's `type`."""
    assert (MAKES_ANY in names_of(compiled(f"def f(x, n): return {text}")).attributes) == makes


@pytest.mark.parametrize("text", ["getattr(x, n)", "vars(x)", "x.__dict__", "'{0.a}'.format(x)"])
def test_dynamic_access_is_known(text):
    assert names_of(compiled(f"def f(x, n): return {text}")).is_dynamic
    assert not names_of(compiled("def f(x): return x.rate")).is_dynamic


@pytest.mark.parametrize(
    ("text", "is_dynamic"),
    [
        ("getattr(x, 'rate')", False),
        ("getattr(x.config.model, 'rate', n.first.rate) + hasattr(x, 'rate')", False),
        ("getattr(x, 'rate', 2) + getattr(n, 'rate', -2.5)", False),
        ("(lambda: getattr(x, 'rate'))", False),
        ("getattr(x, 'rate') + getattr(x, n)", True),
        ("getattr(x, 'rate'), (lambda: getattr(x, n))", True),
        ("getattr(x, n), (lambda: getattr(x, 'rate'))", True),
        ("getattr(x, 'rate'), getattr", True),
        ("getattr(x('rate'), n)", True),
        ("getattr(x('rate', 'rate'), n)", True),
        ("getattr(x.of('rate'), n)", True),
        ("getattr(x, *n)", True),
        ("getattr(*n)", True),
        ("getattr(x, 'rate' if n else 'other')", True),
        ("getattr(x, '__dict__')", True),
        ("getattr(x, 'vars')", True),
        ("getattr(x, 'two words')", True),
        ("x.getattr(x, 'rate')", False),
        ("x.vars(n) + x.eval().rate + x.dir, 'rate'", False),
        ("x.vars(n) + vars(n)", True),
        ("x.deepcopy(n)", True),
    ],
)
def test_to_ask_for_an_attribute_by_a_constant_is_no_dynamic_access(text, is_dynamic):
    names = names_of(compiled(f"def f(x, n): return {text}"))
    assert names.is_dynamic is is_dynamic
    if not is_dynamic:
        assert "rate" in names.attributes
        assert "rate" in names.loads or not names.reads


@pytest.mark.parametrize(
    ("text", "asked", "is_dynamic"),
    [
        ("getattr(lib.nn, x)", {"lib.nn"}, False),
        ("getattr(lib, x.name, n.default)(getattr(lib.nn, n))", {"lib", "lib.nn"}, False),
        ("(lambda: getattr(lib, x))", {"lib"}, False),
        ("[getattr(lib, each) for each in n]", {"lib"}, False),
        ("getattr(lib.nn, x)(getattr(x, n))", {"lib.nn"}, True),
        ("getattr(lib.nn[x], n)", set(), True),
        ("getattr(lib.nn + x, n)", set(), True),
        ("getattr(lib.nn(x), n)", set(), True),
        ("getattr(lib.of(x), n, x)", set(), True),
        ("getattr(lib or x, n)", set(), True),
        ("getattr(lib if n else x, n)", set(), True),
        ("getattr(lib, x + n)", set(), True),
        ("getattr(lib, *x)", set(), True),
        ("(lambda x: lambda: getattr(x, n))", set(), True),
        ("getattr(x, n)", set(), True),
    ],
)
def test_of_what_a_computed_attribute_is_asked(text, asked, is_dynamic):
    names = names_of(compiled(f"def f(x, n): return {text}"))
    assert {".".join((each.name, *each.attributes)) for each in names.asked} == asked
    assert names.is_dynamic is is_dynamic


@pytest.mark.parametrize(
    ("text", "is_dynamic"),
    [
        ("merge(x, vars=True)", False),
        ("merge(x, format=merge(x, dump=n))", False),
        ("merge(x, names=('vars',))", True),
        ("merge(x, vars=True), ('vars',)", True),
        ("merge(x, format=x.format())", True),
        ("merge(x, vars='dir')", True),
    ],
)
def test_the_name_of_an_argument_reads_no_attribute(text, is_dynamic):
    names = names_of(compiled(f"def f(x, n): return {text}"))
    assert names.is_dynamic is is_dynamic
    assert not {"vars", "format"}.isdisjoint(names.attributes)  # Where it is one all the same.


@pytest.mark.parametrize(
    "other",
    [
        "\n\n\ndef f(x, n=1):\n    y = x * 2\n    return y\n",
        'def f(x, n=1):\n    "Text."\n    y = x * 2\n    return y\n',
        "def f(x, n=1):\n    # Text.\n    y = (x *\n         2)\n    return y\n",
        "def f(x, n=1):\n    another = x * 2\n    return another\n",
    ],
)
def test_what_the_digest_does_not_see(other):
    one = compiled("def f(x, n=1):\n    y = x * 2\n    return y\n")
    assert code_digest(one) == code_digest(compiled(other, filename="elsewhere/y.py"))


@pytest.mark.parametrize(
    "other",
    [
        "def f(x): return x * 3",
        "def f(x): return x * 2.0",
        "def f(x): return x * True",
        "def f(x): return x + 2",
        "def f(y): return y * 2",
        "def f(x, y=1): return x * 2",
        "def f(*x): return x * 2",
        "def f(x): yield x * 2",
    ],
)
def test_what_the_digest_sees(other):
    one = code_digest(compiled("def f(x): return x * 2"))
    assert one != code_digest(compiled(other))


def test_a_docstring_that_is_used_counts():
    one = "def f():\n    'a'\n    def g(): return 'a'\n    return g()"
    assert code_digest(compiled(one)) != code_digest(
        compiled(one.replace("return 'a'", "return 'b'"))
    )


def test_the_order_of_a_constant_set_does_not_count():
    one = compiled("def f(x): return x in {'a', 'b', 'c', 'd'}")
    other = compiled("def f(x): return x in {'d', 'c', 'b', 'a'}")
    assert code_digest(one) == code_digest(other)


@pytest.mark.parametrize("filename", [None, "<attrs generated hash m.C>"])
@pytest.mark.parametrize("attributes", ["", "self.rate, "])
def test_the_hash_of_a_name_that_attrs_writes_into_code_does_not_count(filename, attributes):
    """It is another in each process; of older and newer versions the filename differs."""
    attrs = pytest.importorskip("attrs")
    filename = filename or attrs.frozen(type("C", (), {})).__hash__.__code__.co_filename
    text = "def __hash__(self): return hash(({number}, {attributes}))"
    one, other = (text.format(number=n, attributes=attributes) for n in (-5, 2**40))
    assert code_digest(compiled(one, "__hash__", filename)) == code_digest(
        compiled(other, "__hash__", filename)
    )
    one, other = (text.format(number=n, attributes=attributes) for n in (6, 7))
    assert code_digest(compiled(one, "__hash__")) != code_digest(compiled(other, "__hash__"))


@pytest.mark.parametrize(
    ("text", "makes"),
    [
        ("type(x) is n", False),
        ("x.__class__ is n.__class__", False),
        ("type(x).__name__, x.__class__.__qualname__", False),
        ("n.type(x) is n", True),
        ("type(x)(n)", True),
        ("x.__class__(n) is n", True),
        ("(type(x) is n, type(x))", True),
        ("n(x.__class__, n.__name__)", True),
        ("(x.__class__, n.__class__ is n)", True),
    ],
)
def test_a_class_that_is_only_compared_or_named_makes_no_instance(text, makes):
    found = names_of(compiled(f"def f(x, n): return {text}")).attributes
    assert found.isdisjoint(("type", "__class__")) != makes


@pytest.mark.parametrize(
    ("text", "only_tests"),
    [
        ("isinstance(x, A)", True),
        ("isinstance(x[0].y(3), (int, A, x.B))", True),
        ("issubclass(x, A | None)", True),
        ("isinstance(x(1, k=2), A)", True),
        ("isinstance(x, m.A)", True),
        ("type(x) is A", True),
        ("[isinstance(y, A) for y in x]", True),
        ("isinstance(x, A) and A()", False),
        ("isinstance(A(), x)", False),
        ("isinstance(x, A())", False),
        ("isinstance(x, A if x else int)", False),
        ("isinstance((x(), x()), x(x, A))", False),
        ("isinstance(x(A), int)", False),
        ("isinstance(x(1, A), m.B)", False),
        ("isinstance(*x, A)", False),
        ("isinstance(x, [A])", False),
        ("isinstance(x, x | A)", False),
        ("isinstance(x, m.B | A)", False),
        ("x.isinstance(x, A)", False),
        ("x(isinstance, A)", False),
        ("A is type(x)", False),
        ("x == A", False),
        ("x in (A, int)", False),
        ("(type(x) is (A if x else int), 1, x.y, 2, x.z)", False),
        ("(x, A)", False),
    ],
)
def test_code_that_only_asks_whether_objects_are_of_a_class(text, only_tests):
    reads = names_of(compiled(f"def f(x): return {text}")).reads
    found = [read for read in reads if "A" in (read.name, *read.attributes)]
    assert found and all(read.tests for read in found) == only_tests


def test_a_pattern_only_asks_whether_an_object_is_of_a_class():
    text = "def f(x):\n match x:\n  case A(): return 1\n  case m.A(rate=r): return r"
    reads = names_of(compiled(text)).reads
    assert {(each.name, each.tests) for each in reads} == {("A", True), ("m", True)}


@pytest.mark.parametrize(
    ("text", "is_name"),
    [
        ("x['rate']", False),
        ("x['rate'].rate2", False),
        ("'rate' in x", False),
        ("x == 'rate' or 'rate' != x", False),
        ("{'rate': x.y(1)}", False),
        ("{'a': x, 'rate': x.y(1), 'c': 3}", False),
        ("x.get('rate') + x.pop('rate', None)", False),
        ("{'a': 'rate'}", True),
        ("x in 'rate'", True),
        ("'rate'[x]", True),
        ("x.find('rate')", True),
        ("x(x.get, 'rate')", True),
        ("getattr(x.get, 'rate')", True),
        ("x['rate'], x('rate')", True),
        ("['rate'], ('rate', 'a')", True),
        ("x(rate=1)", True),
    ],
)
def test_a_mere_key_is_no_name_of_an_attribute(text, is_name):
    found = names_of(compiled(f"def f(x): return {text}")).attributes
    assert ("rate" in found) == is_name


@pytest.mark.parametrize(
    ("text", "module", "may_be"),
    [
        ("x.rate()", "jax._src.core", "if it can be called"),
        ("x.rate(1).rate", "jax._src.core", True),
        ("callable(x.rate)", "optax", True),
        ("self.rate", "jax._src.core", False),
        ("self.rate", "optax", False),
        ("self.rate", "given_pkg", True),
        ("self.rate", "numpy._core.getlimits", False),
        ("x.rate", "jax._src.core", True),
        ("(x or self).rate", "jax._src.core", True),
        ("[self := x, self.rate]", "jax._src.core", True),
        ("getattr(x, 'rate')", "jax._src.core", True),
        ("rate(x)", "optax", False),
        ("config.rate", "jax._src.core", False),
        ("ir.Location.rate", "jax._src.interpreters.mlir", False),
        ("ir.Location.file.rate", "jax._src.interpreters.mlir", True),
        ("(x or ir).Location.rate", "jax._src.interpreters.mlir", True),
    ],
)
def test_which_attributes_of_the_users_objects_installed_code_may_read(text, module, may_be):
    body = compiled(f"class C:\n    def f(self, x): return {text}", "C")
    (code,) = (each for each in body.co_consts if isinstance(each, CodeType))
    assert _may_be_of_the_users(code, module, "rate", True) == bool(may_be)
    assert _may_be_of_the_users(code, module, "rate", False) == (may_be is True)


def test_a_jump_to_what_has_a_long_argument_is_seen():
    """The place that is jumped to is the `EXTENDED_ARG` before it."""
    many = "; ".join(f"x.g{number}" for number in range(300))
    body = compiled(f"class C:\n    def f(self, x): {many}; return (x or self).rate", "C")
    (code,) = (each for each in body.co_consts if isinstance(each, CodeType))
    assert _may_be_of_the_users(code, "jax._src.core", "rate", True)


def owners_of(attribute, source):
    """What the attribute is read of in the code of a package, as it stands there."""
    left_out = {"tests", "distutils", "f2py"}
    paths = (path for path in source.rglob("*.py") if left_out.isdisjoint(path.parts))
    lines = (line.partition("#")[0] for path in paths for line in path.read_text().splitlines())
    found = {each for line in lines for each in re.findall(rf"([\w.\])]+)\.{attribute}\b", line)}
    return {each.rpartition(".")[2].strip("_") for each in found}


@pytest.mark.parametrize(
    ("package", "attribute", "owners"),
    [
        (optax, "name", "self key dtype"),
        (
            flax,
            "name",
            "self f field x param layer_instance field_info subvalue scope name_or_holder dtype 0] "
            "action key module base_field leaf",
        ),
        (np, "name", "dtype fid x exc e implementation os otype c) typ"),
    ],
)
def test_packages_read_some_attributes_of_their_own_objects_alone(package, attribute, owners):
    """If a new owner may be an object of the user's, `_NAMED_BY_THEMSELVES` is wrong."""
    source = Path(package.__file__).parent
    assert owners_of(attribute, source) <= set(owners.split())


@pytest.mark.slow
@pytest.mark.parametrize("every", [100, pytest.param(1, marks=pytest.mark.slow)])
def test_what_jax_asks_of_objects_that_are_none_of_its_own(every):
    script = Path(__file__).with_name("ask_jax.py")
    command = [sys.executable, str(script), str(every)]
    output = subprocess.run(command, check=True, capture_output=True).stdout
    asked = json.loads(output.splitlines()[-1])
    by_jax = {
        name
        for name, modules in asked.items()
        if any(each.startswith(("jax.", "jaxlib.")) for each in modules) and not is_special(name)
    }
    assert by_jax <= ASKED_BY_JAX
    assert {"shape", "dtype", "sharding"} <= by_jax
