"""Functions and classes as plain data, and what is not written so."""

import dataclasses
import functools
import sys
import types
from typing import NamedTuple

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from equinox._module._flatten import MISSING
from flax import linen as nn
from flax import nnx

from stepcache.jaxcompat.storing import NotStorable, NotThere
from stepcache.jaxcompat.tree_codec import decode_value, encode_value
from stepcache.programs.held_objects import HeldObjects
from stepcache.storage import plain


def holder():
    return HeldObjects(None, [], list)


def written(value):
    writer = holder()
    code = plain.pack(encode_value(value, writer))
    kept = decode_value(plain.unpack(code), writer)
    assert kept is value or kept == value
    return code


def there_and_back(value):
    """What another process, which has the same modules, reads."""
    code = written(value)
    read = decode_value(plain.unpack(code), holder())
    assert written(read) == code
    return read


def squared(x):
    return x * x


LAMBDA = lambda x: x  # noqa: E731


@functools.lru_cache
def decorated(x):
    return x + 1


def logged(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper


@logged
def wrapped(x):
    return x + 2


class Rule(NamedTuple):
    init: object
    update: object


@dataclasses.dataclass(frozen=True)
class Config:
    width: int
    activation: object = squared


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    config: Config
    inner: object


@dataclasses.dataclass
class Changing:
    width: int


class Owner:
    kept = staticmethod(squared)

    @staticmethod
    def doubled(x):
        return 2 * x

    kept_by_class = lambda self: self  # noqa: E731

    def method(self, x=lambda x: x, *, other=lambda x: -x):
        return x


BY_NAME = {
    "a function": squared,
    "a function of Python": sys.exit,
    "a function of a package": optax.adam,
    "a function under another name": nnx.initializers.zeros_init,
    "a custom derivative of JAX": jax.nn.relu,
    "a jitted function of JAX": jax.nn.gelu,
    "a ufunc of JAX": jax.numpy.add,
    "a decorated function": wrapped,
    "what a decorated function wraps": wrapped.__wrapped__,
    "a cached function's own": decorated.__wrapped__,
    "a static method": Owner.doubled,
    "a method of a class": Owner.method,
    "a class": Owner,
    "an object that a package has": MISSING,
    "a lambda of a module": LAMBDA,
    "a default": Owner.method.__defaults__[0],
    "a default by its name": Owner.method.__kwdefaults__["other"],
    "a default of a package": eqx.nn.MLP(1, 1, 1, 1, key=jax.random.key(0)).final_activation,
    "an attribute of a class": Owner.kept_by_class,
    "a class of a package": nnx.Param,
}


@pytest.mark.parametrize("name", BY_NAME)
def test_what_a_module_has_under_its_name_is_found_there(name):
    assert there_and_back(BY_NAME[name]) is BY_NAME[name]


def scaled_by(factor, *, more=0, kinds=("a",)):
    def scale(x, offset=1, *, times=2):
        return (x * factor + offset + more) * times * len(kinds)

    scale.note = "kept"
    return scale


def composed(*functions):
    return lambda x: functools.reduce(lambda y, function: function(y), functions, x)


def counting():
    count = 1

    def increased(x):
        nonlocal count
        count += 1
        return x + count

    return increased


MADE = {
    "a closure": scaled_by(3, more=1.5, kinds={"a": (1, None), "b": [b"c"]}),
    "closures in closures": composed(scaled_by(2), squared, composed(scaled_by(4), jax.nn.relu)),
    "one function twice": composed(*[scaled_by(2)] * 3),
    "a partial": functools.partial(scaled_by(2), offset=5),
    "a closure that changes what it alone captured": counting(),
}


@pytest.mark.parametrize("name", MADE)
def test_a_function_that_another_one_made_is_made_of_its_code(name):
    function = MADE[name]
    read = there_and_back(function)
    assert read is not function
    assert [read(x) for x in (2, 3)] == [function(x) for x in (2, 3)]


def test_what_a_function_is_known_by_is_kept():
    function, read = MADE["a closure"], there_and_back(MADE["a closure"])
    for name in ("__name__", "__qualname__", "__module__", "__defaults__", "__kwdefaults__"):
        assert getattr(read, name) == getattr(function, name)
    assert vars(read) == {"note": "kept"} and read.__globals__ is globals()


@pytest.mark.parametrize("value", [Config(2), Slotted(Config(2, jax.nn.relu), Rule(1, squared))])
def test_values_with_fields(value):
    read = there_and_back(value)
    assert read == value and type(read) is type(value)


class Scaled(nn.Module):
    inner: nn.Module
    widths: tuple = (2, 3)
    scale: float = 0.5
    activation: object = squared

    @nn.compact
    def __call__(self, x):
        for width in self.widths:
            x = self.activation(nn.Dense(width)(self.inner(x)))
        return x * self.scale


class Counted(Scaled):
    def __post_init__(self):
        super().__post_init__()


@pytest.mark.parametrize("name", [None, "scaled"])
def test_models_of_linen(name):
    dense = nn.Dense(2, kernel_init=nn.initializers.variance_scaling(2.0, "fan_in", "normal"))
    model = Scaled(dense, (4,), activation=jax.nn.relu, name=name)
    x = np.ones(3, np.float32)
    params = model.init(jax.random.key(0), x)
    apply = there_and_back(model.apply)
    np.testing.assert_array_equal(apply(params, x), model.apply(params, x))
    assert [*vars(apply.__self__)] == [*vars(model)]
    assert apply.__self__._id != model._id and apply.__self__._state == model._state
    assert apply.__self__.name == name


def test_one_function_is_one_again():
    one = scaled_by(2)
    first, (second, third) = there_and_back((one, (one, scaled_by(2))))
    assert first is second is not third


def test_a_list_that_two_functions_captured_is_one_again():
    noted = []
    add, count = there_and_back(composed_of(noted))
    add(3), add(4)
    assert count() == 2 and noted == []


def composed_of(noted):
    return (lambda x: noted.append(x)), lambda: len(noted)


OPTIMIZERS = {
    "adamw": lambda: optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1.0, 2, 9)),
    "chained": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9)),
    "masked": lambda: optax.masked(optax.adam(0.1), {"w": True}),
    "with a mask that the user made": lambda: optax.add_decayed_weights(0.1, mask=mask_of("w")),
    "by labels": lambda: optax.multi_transform({"a": optax.sgd(0.1)}, {"w": "a"}),
    "with hyperparameters": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
}


def mask_of(name):
    return lambda tree: {key: key == name for key in tree}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name):
    params, updates = [{"w": np.ones(2, np.float32)}] * 2
    results = []
    for optimizer in (there_and_back(OPTIMIZERS[name]()), OPTIMIZERS[name]()):
        state = optimizer.init(params)
        for _ in range(2):
            found, state = optimizer.update(updates, state, params)
        results.append((found, state))
    jax.tree.map(np.testing.assert_array_equal, *results)


def of_two():
    count = 0

    def increased():
        nonlocal count
        count += 1

    def current():
        return count

    return increased, current


def recursive():
    def function(n):
        return n and function(n - 1)

    return function


def emptied():
    def function():
        return missing

    if holder is None:
        missing = 1
    return function


def extended():
    config = Config(1)
    object.__setattr__(config, "more", 1)
    return config


def of_a_class():
    class Local:
        def method(self):
            return __class__

    return Local


def executed(source):
    space = {"__name__": "executed"}
    exec(source, space)
    return space["function"]


NOT_WRITTEN = {
    "two that share a variable": lambda: of_two()[1],
    "the one of them that changes it": lambda: of_two()[0],
    "one that captured itself": recursive,
    "one that captured nothing yet": emptied,
    "one that captured an array": lambda: scaled_by(np.ones(2)),
    "one that captured an object": lambda: scaled_by(object()),
    "a class that a function made": of_a_class,
    "a method of such a class": lambda: of_a_class().method,
    "code that was executed": lambda: executed("def function(): pass"),
    "code that was executed, made by a function": lambda: executed(
        "def make(): return lambda: 1\nfunction = make()"
    ),
    "a method of an object": lambda: Owner().method,
    "a method of a package's object": lambda: optax.MultiSteps(
        optax.adam(0.1), 2
    ).gradient_transformation(),
    "an object of the user's": Owner,
    "a dataclass that can change": lambda: Changing(1),
    "a dataclass with more than its fields": extended,
    "a tuple of another class": lambda: type("T", (tuple,), {})((1,)),
    "a module": lambda: sys,
    "a bound model": lambda: nn.Dense(2).bind({}),
    "a model with a constructor of the user's": lambda: Counted(nn.Dense(2)),
    "a model that keeps an array": lambda: Scaled(nn.Dense(2), scale=np.ones(2)),
    "a lambda of a module with a default": lambda: WITH_DEFAULT,
}
WITH_DEFAULT = lambda x, y=squared: x + y  # noqa: E731


@pytest.mark.parametrize("name", NOT_WRITTEN)
def test_what_is_not_written(name):
    value = NOT_WRITTEN[name]()
    with pytest.raises((NotStorable, ValueError, RecursionError)):
        encode_value(value, holder())


@pytest.mark.parametrize("made", [False, True], ids=["by its name", "made"])
@pytest.mark.parametrize(
    "source",
    [
        "def function(x): return x + 2\ndef make(n): return lambda x: x + n + 1",
        "function = make = 3",
        "def make(n): pass\nclass function: pass",
        "",
        None,
    ],
    ids=["other code", "no function", "another kind", "no such name", "no module"],
)
def test_a_process_that_has_another_function_there_does_not_read_it(source, made, monkeypatch):
    module = types.ModuleType("there")
    monkeypatch.setitem(sys.modules, "there", module)
    exec("def function(x): return x + 1\ndef make(n): return lambda x: x + n", vars(module))
    function = module.make(1) if made else module.function
    code = written(function)
    for name in ("function", "make"):
        delattr(module, name)
    if source is None:
        monkeypatch.delitem(sys.modules, "there")
    else:
        exec(source, vars(module))
    with pytest.raises(NotThere):
        decode_value(plain.unpack(code), holder())


def malformed():
    code = plain.unpack(written(scaled_by(2)))[1]
    yield from (
        {**code, "code": place}
        for place in (
            [*code["code"][:3], [99999], code["code"][4]],
            [*code["code"][:3], [], code["code"][4]],
            [*code["code"][:3], ["a"], code["code"][4]],
            ["sys", *code["code"][1:]],
            ["gone", *code["code"][1:]],
            [1, 2, 3],
            None,
        )
    )
    yield from (
        {**code, "rest": rest}
        for rest in (["list", [None, None]], ["list", []], ["list", [1, None, None]], None, 1)
    )
    yield from ({name: each for name, each in code.items() if name != gone} for gone in code)
    yield from ({**code, "captured": captured} for captured in ([], [1], [[]], None, 1, "ab"))
    yield from ({"again": 3}, {"again": "a"}, {"method": "x", "of": 3}, {"method": "bit_length"})
    yield from ({"partial": ["list", []]}, {"items": [1], "of": {"at": ["os", "system", 0, ""]}})
    yield from ({"at": ["os", "system", 0, "x"], "number": 0}, {"at": [1, 2, 3, 4], "number": 0})
    yield from ({"at": ["os", "path.join", -1, ""], "number": 0}, {"at": ["os", "environ.get"]})


@pytest.mark.parametrize("number", range(len([*malformed()])))
def test_malformed_data_is_refused(number):
    data = [*malformed()][number]
    with pytest.raises((ValueError, TypeError, IndexError, KeyError, AttributeError)):
        decode_value(["held", data], holder())
