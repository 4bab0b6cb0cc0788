"""Trees of outputs as plain data, there and back; and what of them is not stored."""

import dataclasses
import enum
import functools
import re
import sys
import types
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import equinox as eqx
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.core import freeze
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from stepcache.calls.signature import Static
from stepcache.jaxcompat import CAN_STORE
from stepcache.jaxcompat.checked_data import NotStorable
from stepcache.jaxcompat.tree_codec import decode_tree, decode_value, encode_tree, encode_value
from stepcache.programs.held_objects import HeldObjects
from stepcache.storage import plain

pytestmark = pytest.mark.skipif(not CAN_STORE, reason="JAX's public API is in use")


class Metrics(NamedTuple):
    loss: Any
    count: Any


class Color(enum.Enum):
    RED = 1
    BLUE = "blue"


class Bits(enum.Flag):
    A = 1
    B = 2


@flax.struct.dataclass
class State:
    params: Any
    apply: Any = flax.struct.field(pytree_node=False)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Config:
    value: Any
    static: Any = dataclasses.field(metadata={"static": True})


def there_and_back(value, known=None, holder=None):
    tree, known = jax.tree.structure(value), jax.tree.structure(known)
    code = plain.unpack(plain.pack(encode_tree(tree, known, holder)))
    read = decode_tree(code, known, holder)
    assert read == tree and str(read) == str(tree)
    return code


@functools.cache
def module():
    return nnx.Linear(2, 3, rngs=nnx.Rngs(0))


TREES = {
    "a leaf": lambda: 1,
    "nothing": lambda: None,
    "containers": lambda: {"a": [1, (2, None, ())], "b": {}, "c": {3: [1]}},
    "dicts by other keys": lambda: {(1, "a"): 1, (2, "b"): [2]},
    "ordered": lambda: OrderedDict(b=1, a=[2]),
    "with a default": lambda: defaultdict(list, a=[1], b=[2, 3]),
    "a named tuple of mine": lambda: Metrics(1, {"n": 2}),
    "a dataclass": lambda: Config(1, ("train", 3, None, Color.BLUE, jnp.dtype("bfloat16"))),
    "optax": lambda: optax.chain(optax.clip(1.0), optax.adamw(1e-3)).init({"w": jnp.ones(2)}),
    "masked": lambda: optax.masked(optax.adam(1.0), {"a": True, "b": False}).init(
        {"a": jnp.ones(2), "b": jnp.ones(2)}
    ),
    "numbers of numpy": lambda: Config(
        1,
        (
            np.int64(-1),
            np.float32(0.1),
            np.bool_(True),
            np.complex64(1j),
            jnp.bfloat16.dtype.type(2),
        ),
    ),
    "a frozen dict that is kept": lambda: Config(1, freeze({"rate": 0.1, "axes": ("a",)})),
    "dropout of nnx": lambda: nnx.Dropout(0.1, rngs=nnx.Rngs(0)),
    "frozen": lambda: freeze({"params": {"w": 1}}),
    "partitioned": lambda: linen.Partitioned(jnp.ones(2), names=("a", None)),
    "state of nnx": lambda: nnx.state(module()),
    "gradients of nnx": lambda: nnx.grad(lambda m: m(jnp.ones((1, 2))).sum())(module()),
    "metrics of nnx": lambda: nnx.MultiMetric(loss=nnx.metrics.Average("loss")),
    "optimizer of nnx": lambda: nnx.state(nnx.Optimizer(module(), optax.adam(1e-3), wrt=nnx.Param)),
}


@pytest.mark.parametrize("name", TREES)
def test_trees_of_many_kinds(name):
    there_and_back(TREES[name]())


class _NumPyArrayHashWrapper:
    """What mjx keeps of an array."""

    def __init__(self, array):
        self.array = array

    def __eq__(self, other):
        return np.array_equal(self.array, other.array) and self.array.dtype == other.array.dtype

    def __hash__(self):
        return hash(self.array.tobytes())

    def __repr__(self):
        return repr(self.array)


@pytest.mark.parametrize(
    "array",
    [np.arange(6, dtype=np.int32).reshape(2, 3), np.zeros((0, 3)), np.full((), 2)],
)
def test_arrays_that_mjx_keeps_beside_leaves(array, monkeypatch):
    module = types.ModuleType("mujoco.mjx._src.dataclasses")
    module._NumPyArrayHashWrapper = _NumPyArrayHashWrapper
    monkeypatch.setitem(sys.modules, module.__name__, module)
    value = Config(1, (_NumPyArrayHashWrapper(array), "box"))
    with pytest.raises(NotStorable):  # The user's, of the same name.
        there_and_back(value)
    monkeypatch.setattr(_NumPyArrayHashWrapper, "__module__", module.__name__)
    code = there_and_back(value)
    read = decode_tree(code, jax.tree.structure(None)).node_data()[1]
    assert read[0][0].array.flags.writeable and read[0][0].array is not array


def test_parts_of_the_arguments_are_named_by_their_position():
    known = ({"a": State({"w": 1}, lambda x: x)}, [2, 3])
    code = there_and_back((known[0], 7, known[1]), known)
    assert code == ["tuple", [["known", [0]], "leaf", ["known", [1]]]]


class Owner:
    def __init__(self):
        self.tx, self.nested = optax.adam(0.1), {"parts": [lambda x: x, "text"]}

    def apply(self, x):
        return x


def holder_of(fun, **statics):
    given = [Static(name, type(each), each) for name, each in statics.items()]
    return HeldObjects(fun, given, lambda: [reads.__code__])


def reads(owner):
    return owner.tx, owner.nested["parts"], owner.chosen


def test_what_the_function_of_a_step_holds_is_named_by_how_it_leads_there():
    owner, other, third = Owner(), Owner(), optax.sgd(0.1)

    def function(x, second=third):
        return helper(owner.apply(x))

    def helper(x):
        return owner.apply(x)

    holder = holder_of(functools.partial(function, other), given=module)
    held = {
        "method": (owner.apply, ["function", "function", "owner", "method apply"]),
        "attribute": (owner.tx, ["function", "function", "owner", "tx"]),
        "item": (
            owner.nested["parts"][0],
            ["function", "function", "owner", "nested", "parts", "0"],
        ),
        "argument": (other, ["function", "0"]),
        "default": (third, ["function", "function", "default 0"]),
        "static": (module, ["static given"]),
    }
    for name, (value, path) in held.items():
        assert holder.name_of(value) == path, name
        assert holder.named(path) == value, name
        code = there_and_back(State({"w": 1}, (value, 3)), holder=holder)
        assert code[2] == ["tuple", [["tuple", [["held", path], 3]]]], name
    assert holder.name_of(Owner().apply) is holder.name_of(Owner()) is None
    with pytest.raises(NotStorable):
        there_and_back(State({"w": 1}, Owner().apply), holder=holder)


KEPT_BY_MODULE = [Owner()]


def reads_global():
    return KEPT_BY_MODULE[0].tx


def test_variables_of_modules_are_named_where_code_reads_them():
    """Also those that the step's own function does not lead to: the class of a model reads them."""
    codes = [reads_global.__code__, reads.__code__]
    for fun, name in ((None, "KEPT_BY_MODULE"), (reads_global, "KEPT_BY_MODULE")):
        holder = HeldObjects(fun, [], lambda: codes)
        path = [f"module {__name__}", name, "0", "tx"]
        assert holder.name_of(KEPT_BY_MODULE[0].tx) == path
        assert holder.named(path) is KEPT_BY_MODULE[0].tx
    assert HeldObjects(None, [], lambda: codes[1:]).name_of(KEPT_BY_MODULE[0].tx) is None


def test_code_without_a_file_reads_no_variable_of_the_script(monkeypatch):
    """The script may have one of that name, which the step does not depend on."""
    monkeypatch.setattr(
        sys.modules["__main__"], "of_the_script", made := scaled_by(2), raising=False
    )
    monkeypatch.setitem(sys.modules, "not_to_be_imported", None)
    code = compile("lambda: of_the_script", "<string>", "eval").co_consts[0]
    assert HeldObjects(None, [], lambda: [code]).name_of(made) is None


def test_what_is_not_read_or_has_two_names_is_not_named():
    """The next process may have another object there, and the step does not depend on that."""
    owner = Owner()
    owner.unread = unread = optax.sgd(0.1)
    assert holder_of(lambda x: owner).name_of(unread) is None
    assert holder_of(lambda x: owner).name_of(owner.tx) == ["function", "owner", "tx"]
    owner.itself, owner.chosen = owner, owner.tx
    with pytest.raises(NotStorable):
        holder_of(lambda x: owner).name_of(owner.tx)
    assert holder_of(lambda x: owner).name_of(owner.apply) is not None
    other = [owner]
    with pytest.raises(NotStorable):
        holder_of(lambda x: (owner, other)).name_of(owner.apply)


@pytest.mark.parametrize(
    "name",
    [
        *(
            [],
            ["nothing"],
            ["module gone", "x"],
            ["module sys", "gone"],
            ["module sys"] * 2,
            ["function", "gone"],
            ["function", "function", "owner", "method gone"],
        ),
        *(["function", 1], [b"function"], "function", None, {}, 3, [["function"]]),
        ["function", "function", "owner", "method __init__", "method x"],
    ],
    ids=str,
)
def test_a_malformed_name_of_what_is_held_is_refused(name):
    owner = Owner()
    holder = holder_of(functools.partial(lambda x: owner, 3))
    for code in (["held", name], ["tuple", [["held", name]]]):
        with pytest.raises((ValueError, TypeError, IndexError, KeyError)):
            decode_value(code, holder)
        with pytest.raises((ValueError, TypeError, IndexError, KeyError)):
            decode_value(code)
    with pytest.raises((ValueError, TypeError, IndexError, KeyError)):
        decode_tree(["node", {"held": name}, None, []], jax.tree.structure(1), holder)


def test_what_the_arguments_keep_is_that_of_the_arguments():
    """In a node of another kind: functions of an optimizer that are made anew would be others."""
    optimizer, function = optax.adam(0.1), lambda x: x
    known = jax.tree.structure([3, State({"w": 1}, (optimizer, function)), nnx.split(module())])
    holder = HeldObjects(None, [], list, known)
    outputs = {
        "function": (Config(1, optimizer.update), ["kept 1"]),
        "another one": (Config(1, function), ["kept 2"]),
    }
    for value, name in outputs.values():
        code = encode_tree(jax.tree.structure(value), known, holder)
        assert code[2] == ["tuple", [["held", name]]]
        read = decode_tree(code, known, HeldObjects(None, [], list, known))
        assert read.node_data()[1][0] is value.static
    for name in ("kept 99", "kept -99", "kept x"):
        with pytest.raises((ValueError, IndexError)):
            holder.named([name])


def test_an_object_to_which_two_ways_lead_is_not_made_anew():
    function = scaled_by(2)
    owner, other = Owner(), [function]
    owner.tx = function
    with pytest.raises(NotStorable, match="more than one way leads to <function scaled_by"):
        there_and_back(Config(1, function), holder=holder_of(lambda x: (owner, other)))
    there_and_back(Config(1, function), holder=holder_of(lambda x: owner))
    there_and_back(Config(1, scaled_by(2)), holder=holder_of(lambda x: (owner, other)))


def scaled_by(factor):
    return lambda x: factor * x


def test_a_class_that_is_held_is_one_of_nodes():
    fields = [("kept", made_class(), dataclasses.field(default=0))]
    collection = dataclasses.make_dataclass(
        "Collection", fields, namespace={"__module__": __name__}
    )
    holder = holder_of(lambda x: collection)
    code = there_and_back(fields[0][1](1), holder=holder)
    assert code[1] == {"held": ["function", "collection", "kept"]}
    with pytest.raises(ValueError, match="is no class of nodes"):
        decode_tree(["node", {"held": ["function", "collection"]}, None, []], None, holder)


def made_class():
    @flax.struct.dataclass
    class Made:
        total: Any

    return Made


def test_what_nodes_of_the_arguments_keep_is_kept_by_nodes_of_the_outputs():
    """As in gradients of a module, whose leaves are others than the module's."""
    model = eqx.nn.MLP(2, 2, 4, 2, activation=jnp.tanh, key=jax.random.key(0))
    gradients = eqx.filter_grad(lambda m: m(jnp.ones(2)).sum())(model)
    there_and_back((gradients, jnp.ones(1)), (model, jnp.ones(2)))
    there_and_back(State(None, abs), [State({"w": 1}, abs)])
    with pytest.raises(NotStorable, match="State"):
        there_and_back(State({"w": 1}, abs), [State({"w": 1}, max)])


def test_why_a_tree_is_not_stored_is_said_on_one_line():
    """It is part of a line of `last_miss`; a structure of nnx shows itself on hundreds of lines."""

    class Structure:
        def __repr__(self):
            return "Structure(\n  nodes=[\n    1,\n  ],\n)"

    with pytest.raises(NotStorable, match=re.escape("Structure( nodes=[ 1, ], )")) as raised:
        there_and_back(State(None, Structure()))
    assert "\n" not in str(raised.value)


def test_true_is_not_taken_for_one():
    code = there_and_back(Config(None, (True, 1.0)), [Config([1], (1, 1))])
    assert code[0] == "node"
    there_and_back(Config([1], (True, -0.0)), [Config([1], (1, 0.0))])
    there_and_back({True: 1}, {1: 1})
    with pytest.raises(NotStorable):  # An object that has no form of its own.
        there_and_back(Config([1], (abs, True)), [Config([1], (abs, 1))])


def test_a_tree_too_deep_is_not_stored():
    value: Any = 1
    for _ in range(400):
        value = [value]
    with pytest.raises(NotStorable):
        there_and_back(value)


def local_class():
    class Local(NamedTuple):
        a: Any

    return Local(1)


def renamed():
    cls = dataclasses.make_dataclass("Config", ["value"])
    cls.__module__ = __name__
    jax.tree_util.register_dataclass(cls, ["value"], [])
    return cls(1)


NOT_STORABLE = {
    "a class in a function": local_class,
    "a class that has another's name": renamed,
    "a function": lambda: Config(1, len),
    "a lambda": lambda: Config(1, lambda x: x),
    "an object": lambda: Config(1, object()),
    "a class": lambda: Config(1, Metrics),
    "a module": lambda: Config(1, sys),
    "an array": lambda: Config(1, (np.ones(2),)),
    "a partial": lambda: jax.tree_util.Partial(print, 1),
    "a subclass of a text": lambda: Config(1, type("T", (str,), {})("a")),
    "a combination of flags": lambda: Config(1, Bits.A | Bits.B),
}


@pytest.mark.parametrize("name", NOT_STORABLE)
def test_what_is_no_plain_data_is_not_stored(name):
    with pytest.raises(NotStorable):
        there_and_back(NOT_STORABLE[name]())


# ---- values -------------------------------------------------------------------------------------

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
)
scalars |= st.binary(max_size=5) | st.complex_numbers(allow_nan=False)
scalars |= st.sampled_from(
    [Color.RED, Color.BLUE, int, list, jnp.float32, np.float64, P("a", None)]
)
scalars |= st.sampled_from([P(("a", "b")), np.dtype("int8"), jnp.dtype("bfloat16"), range(3)])
scalars |= st.sampled_from([jax.tree.structure({"a": [1, 2]}), P(P.UNCONSTRAINED), Bits.A])
hashable = st.recursive(
    scalars, lambda inner: st.tuples(inner, inner) | st.frozensets(inner), max_leaves=4
)
values = st.recursive(
    hashable | st.sets(hashable),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(hashable, inner)
        | st.tuples(inner)
        | st.builds(slice, inner, inner, inner)
    ),
    max_leaves=6,
)


def exactly(value):
    """The value with its types, so that 1 is not taken for True."""
    if isinstance(value, tuple | list):
        return type(value), [exactly(each) for each in value]
    if isinstance(value, dict):
        return dict, [(exactly(key), exactly(each)) for key, each in value.items()]
    if isinstance(value, slice):
        return slice, [exactly(each) for each in (value.start, value.stop, value.step)]
    return type(value), value


@given(values)
def test_values_are_read_back_as_they_were(value):
    read = decode_value(plain.unpack(plain.pack(encode_value(value))))
    assert exactly(read) == exactly(value)


# ---- hostile data -------------------------------------------------------------------------------


class Watched(types.ModuleType):
    def __getattribute__(self, name):
        if not name.startswith("__"):
            raise AssertionError(f"{name} was looked up in a way that can run code")
        return super().__getattribute__(name)


def test_looking_for_a_class_runs_nothing(monkeypatch):
    """No `__getattr__` of a module, no import, no descriptor."""
    monkeypatch.setitem(sys.modules, "watched", Watched("watched"))
    for name in ("Thing", "__class__", "__dict__", "__getattribute__"):
        with pytest.raises((ValueError, KeyError)):
            decode_tree(["node", ["watched", name], None, []], _leaf())
    with pytest.raises(KeyError):
        decode_tree(["node", ["turtledemo.clock", "Hand"], None, []], _leaf())
    assert "turtledemo.clock" not in sys.modules


def _leaf():
    return jax.tree.structure(0)


deep: Any = "leaf"
for _ in range(2000):
    deep = ["list", [deep]]

BAD_TREES = {
    "no code": 7,
    "nothing": None,
    "an empty list": [],
    "an unknown kind": ["call", ["os", "system"], ["true"]],
    "a kind that is no text": [["node"], 1],
    "a function": ["node", ["os", "system"], None, []],
    "a class that is no node": ["node", ["subprocess", "Popen"], ["tuple", ["true"]], []],
    "object": ["node", ["builtins", "object"], None, []],
    "type": ["node", ["builtins", "type"], None, []],
    "getattr": ["node", ["builtins", "getattr"], None, []],
    "eval": ["node", ["builtins", "eval"], "1", []],
    "a method of a class": ["node", ["builtins", "object.__subclasses__"], None, []],
    "a dict as a node": ["node", ["builtins", "dict"], 5, ["leaf"]],
    "a tuple as a node": ["node", ["builtins", "tuple"], None, ["leaf"]],
    "none as a node": ["node", ["types", "NoneType"], None, ["leaf"]],
    "a module that is not there": ["node", ["no.such", "Thing"], None, []],
    "a name that is no text": ["node", ["os", 7], None, []],
    "a module that is no text": ["node", [None, "path"], None, []],
    "bytes as names": ["node", [b"os", b"system"], None, []],
    "too many names": ["node", ["os", "path", "join"], None, []],
    "a static call": ["node", ["collections", "OrderedDict"], ["call", "os.system"], []],
    "a static function": ["node", ["collections", "defaultdict"], ["function", "eval"], []],
    "another built-in": [
        "node",
        ["collections", "defaultdict"],
        ["tuple", [["builtin", "eval"]]],
        [],
    ],
    "no enumeration": [
        "node",
        ["collections", "OrderedDict"],
        ["member", ["os", "environ", "A"]],
        [],
    ],
    "no member": [
        "node",
        ["collections", "OrderedDict"],
        ["member", ["inspect", "_ParameterKind", "mro"]],
        [],
    ],
    "too few fields": ["node", [__name__, "Metrics"], None, ["leaf"]],
    "too many keys": ["dict", ["a", "b"], ["leaf"]],
    "a key twice": ["dict", ["a", "a"], ["leaf", "leaf"]],
    "keys that cannot be keys": ["dict", [["list", []]], ["leaf"]],
    "a negative position": ["known", [-1]],
    "a position too far": ["known", [9]],
    "a position that is no number": ["known", ["0"]],
    "like a leaf": ["like", [], []],
    "children that are no list": ["tuple", 5],
    "very deep": deep,
}


@pytest.mark.parametrize("name", BAD_TREES)
def test_a_malformed_tree_is_refused(name):
    with pytest.raises((ValueError, TypeError, KeyError, IndexError, AttributeError)):
        decode_tree(BAD_TREES[name], jax.tree.structure([0]))


BAD_VALUES = {
    "an unknown kind": ["eval", "1"],
    "too many parts": ["tuple", [], []],
    "no parts": ["tuple"],
    "a slice of four": ["slice", [1, 2, 3, 4]],
    "a complex number of texts": ["complex", ["a", "b"]],
    "a range of texts": ["range", ["a"]],
    "no pairs": ["dict", [1]],
    "a set of lists": ["set", [["list", []]]],
    "an integer of texts": ["int", "99"],
    "a mapping of another module": ["mapping", ["subprocess", ["dict", []]]],
    "a mapping of no dict": ["mapping", ["flax.typing", 7]],
    "an unknown type": ["dtype", "object"],
    "a type of two": ["dtype", ["key", "no such"]],
    "a spec of numbers": ["spec", [[1, 2], [], [], None]],
    "a spec of one": ["spec", [[]]],
    "an extension": plain.unpack(b"\xd4\x05\x00"),
}


@pytest.mark.parametrize("name", BAD_VALUES)
def test_a_malformed_value_is_refused(name):
    with pytest.raises((ValueError, TypeError, KeyError, IndexError, AttributeError)):
        decode_value(BAD_VALUES[name])
