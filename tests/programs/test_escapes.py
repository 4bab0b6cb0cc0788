"""What code may do with an object that a variable stands for, and what it reads of it."""

import textwrap
from types import CodeType

import pytest

from stepcache.fingerprint.bytecode import names_of
from stepcache.fingerprint.escapes import passed_on, passes_on, reached_by


def compiled(body):
    lines = textwrap.indent(body.replace("; ", "\n"), "    ")
    module = compile(f"def f(self, x):\n{lines}", "x.py", "exec")
    return next(each for each in module.co_consts if isinstance(each, CodeType))


@pytest.mark.parametrize(
    ("body", "reached"),
    [
        ("return x * self.rate", "rate"),
        ("return self.config.rate + x.other", "config rate"),
        ("return self.read(x.other)", "read"),
        ("own = self; return own.rate", "rate"),
        ("config = self.config; return x.other * config.rate", "config rate"),
        ("x = self.config; return x.rate", "config rate"),
        ("if self.config is not None: return self.config.rate", "config rate"),
        ("if self.is_on: self.count = 1; del self.count", "is_on"),
        ("return jnp.sum(x) * [self.rate for _ in x][0]", "rate"),
        ("own = CONFIG.model; return own.rate", "rate"),
        ("import config; return config.RATE.value", "RATE value"),
    ],
)
def test_what_is_read_of_an_object_that_stays(body, reached):
    code = compiled(body)
    assert not passes_on(code, "self")
    found = [reached_by(each, frozenset(("self",))) for each in names_of(code).codes]
    assert set().union(*found) == set(reached.split())


@pytest.mark.parametrize(
    "body",
    [
        "return g(self)",
        "return self",
        "return self == x",
        "return [self]",
        "yield self",
        "x.own = self",
        "x[0] = self",
        "self.count += 1",
        "own = self; return g(own)",
        "own = self; return lambda: own.rate",
        "return lambda: g(self)",
        "return lambda given=self: given.rate",
        "return (own := self).rate",
        "return (x or self).rate if x else (self or x).rate",
        "base = super(); return base.read()",
        "for own in self: x = own.rate",
        "with self as own: x = own.rate",
        "raise x from self",
    ],
)
def test_an_object_that_is_passed_on(body):
    assert passes_on(compiled(body), "self")


@pytest.mark.parametrize(
    ("body", "passed"),
    [
        ("return self.config.rate", ".rate"),
        ("return self.net(x)", ""),
        ("return g(self.config)", ".config"),
        ("config = self.config; return config.scale(config.rate)", ".rate"),
        ("config = self.config; return g(config)", ".config"),
        ("return self.config is None", ""),
        ("return self.config is x", ".config"),
        ("return super().read(x)", ""),
    ],
)
def test_attributes_that_are_passed_on(body, passed):
    found = {each for each in passed_on(compiled(body)) if each.startswith(".")}
    assert found - {".read"} == set(passed.split())
