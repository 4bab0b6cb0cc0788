"""Placements and policies are data, checked when they are made."""

import copy
import dataclasses
import pickle

import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import stepcache as sc
from stepcache.variables import policy

ADAM = optax.adam(1e-3)


@pytest.mark.parametrize("cache", policy.CACHES)
def test_every_legal_word_is_accepted(cache):
    assert sc.Read(cache=cache).cache == cache


@pytest.mark.parametrize(
    ("kind", "gone", "instead"),
    [
        (sc.Read, {"wire": "int8"}, "such as bfloat16"),
        (sc.Write, {"wire": None}, "such as bfloat16"),
        (sc.Read, {"max_age": 2.0}, "max_staleness"),
        (sc.Read, {"route": "each"}, "crosses the host's link once"),
        (sc.Read, {"prefetch": True}, "max_staleness"),
    ],
)
def test_an_option_that_is_gone_says_what_to_do(kind, gone, instead):
    (name,) = gone
    with pytest.raises(sc.OptionError, match=f"{name}= is gone: .*{instead}") as raised:
        kind(**gone)
    assert raised.value.where == kind.__name__


@pytest.mark.parametrize(
    ("fields", "named", "expected"),
    [
        ({"cache": "gpu"}, "unknown cache", "None, 'device'"),
        ({"cache": "host"}, "unknown cache", "None, 'device'"),
        ({"cache": True}, "unknown cache", "None"),
        ({"max_staleness": -1}, "max_staleness", "an int ≥ 0"),
        ({"max_staleness": 1.5}, "max_staleness", "an int ≥ 0"),
        ({"max_staleness": True}, "max_staleness", "an int ≥ 0"),
        ({"max_staleness": None}, "max_staleness", "an int ≥ 0"),
    ],
)
def test_a_wrong_field_of_read_is_named(fields, named, expected):
    with pytest.raises(sc.OptionError) as raised:
        sc.Read(**{"cache": "device", **fields})
    (value,) = fields.values()
    assert named in raised.value.what and raised.value.where == "Read"
    assert expected in raised.value.expected and raised.value.got == repr(value)


def test_a_bound_without_a_copy_contradicts_it():
    with pytest.raises(sc.OptionError, match="cache=None contradicts max_staleness=2") as raised:
        sc.Read(max_staleness=2)
    assert 'cache="device"' in raised.value.hint
    assert sc.Read(cache="device", max_staleness=2).max_staleness == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": "replace"}, "unknown mode"),
        ({"every": 0}, "every counts updates"),
        ({"every": 2.0}, "every counts updates"),
        ({"every": True}, "every counts updates"),
        ({"mode": "apply"}, 'mode="apply" needs an optimizer'),
        ({"mode": "apply", "optimizer": optax.adam}, 'mode="apply" needs an optimizer'),
        ({"mode": "add", "optimizer": ADAM}, "mode='add' contradicts optimizer="),
        ({"optimizer": ADAM}, "mode='assign' contradicts optimizer="),
        ({"every": 3}, 'mode="assign" contradicts every=3'),
    ],
)
def test_a_wrong_field_of_write_is_named(fields, message):
    with pytest.raises(sc.OptionError, match=message) as raised:
        sc.Write(**fields)
    assert raised.value.where == "Write"


@pytest.mark.parametrize(
    "write",
    [
        lambda: sc.Write(),
        lambda: sc.Write(mode="add", every=4),
        lambda: sc.Write(mode="apply", optimizer=ADAM, every=2),
        lambda: sc.Write(mode="apply", optimizer=optax.chain(optax.clip(1.0), ADAM)),
    ],
)
def test_what_write_accepts(write):
    assert write() == write() or write().optimizer is not ADAM


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sc.OnHost(on_device=sc.Replicated), "devices' own memories"),
        (lambda: sc.OnHost(on_device=sc.OnHost()), "devices' own memories"),
        (lambda: sc.OnHost(update="gpu"), "unknown update"),
        (lambda: sc.Sharded([("kernel",)]), "a rule is a pair"),
        (lambda: sc.Sharded([("(", P())]), "does not compile"),
        (lambda: sc.Sharded(None), "Sharded"),
        (lambda: sc.Sharded(P("data")), "a rule is a pair"),
    ],
)
def test_a_wrong_placement_is_named(make, message):
    with pytest.raises(sc.OptionError, match=message):
        make()


POLICIES = [
    sc.Replicated(),
    sc.Sharded([("kernel", P(None, "model"))]),
    sc.OnHost(),
    sc.OnHost(on_device=sc.Sharded([("kernel", P("data"))]), update="host"),
    sc.Read(),
    sc.Read(cache="device", max_staleness=3),
    sc.Write(mode="add", every=2),
]


@pytest.mark.parametrize("one", POLICIES, ids=str)
def test_a_policy_is_data(one):
    assert one == copy.deepcopy(one) == pickle.loads(pickle.dumps(one))
    assert hash(one) == hash(copy.deepcopy(one))
    assert all(one != other for other in POLICIES if other is not one)
    for field in dataclasses.fields(one):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(one, field.name, None)


def test_a_changed_policy_is_checked_anew():
    with pytest.raises(sc.OptionError, match="contradicts"):
        dataclasses.replace(sc.Read(cache="device", max_staleness=2), cache=None)


def test_rules_may_be_given_as_pairs():
    pairs = [("kernel", P(None, "model")), ("bias", P())]
    assert sc.Sharded(pairs) == sc.Sharded(sc.Rules(pairs)) == sc.Sharded(iter(pairs))
    assert sc.Sharded(pairs).rules == sc.Rules(pairs)


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (sc.Replicated(), "replicated"),
        (sc.Sharded([("a", P())]), "sharded by 1 rule"),
        (sc.Sharded([("a", P()), ("b", P())]), "sharded by 2 rules"),
        (sc.OnHost(), "on the host, read replicated"),
        (sc.Read(), "Read()"),
        (sc.Read(cache="device", max_staleness=2), "Read(cache='device', max_staleness=2)"),
        (sc.Write(mode="add", every=2), "Write(mode='add', every=2)"),
    ],
    ids=str,
)
def test_a_policy_reads_as_what_differs_from_the_defaults(one, text):
    assert str(one) == text


@pytest.mark.parametrize(
    "option",
    [
        {"placement": "host"},
        {"placement": sc.OnHost},
        {"placement": sc.Replicated},
        {"placement": None},
        {"read": "device"},
        {"read": "auto"},
        {"read": sc.Read},
        {"write": "add"},
        {"write": sc.Write},
    ],
    ids=str,
)
def test_variables_take_policies_and_nothing_else(option):
    (name,) = option
    with pytest.raises(sc.OptionError) as raised:
        sc.Variables({"w": np.ones(2)}, **option)
    assert raised.value.where == f"Variables({name}=...)"


IDLE = {
    "a copy of devices": ({"read": sc.Read(cache="device")}, sc.Replicated()),
    "a late copy on the host": ({"read": sc.Read("device", max_staleness=1)}, sc.OnHost()),
    "a copy of split leaves": ({"read": sc.Read(cache="device")}, sc.Sharded([("w", P())])),
}


@pytest.mark.parametrize("idle", IDLE)
def test_an_option_that_would_do_nothing_is_refused(idle, mesh):
    option, placement = IDLE[idle]
    with sc.Session(mesh), pytest.raises(sc.OptionError, match="nothing") as raised:
        sc.Variables({"w": np.ones(2)}, placement=placement, name="table", **option)
    error = raised.value
    (name,) = option
    assert error.where == f"Variables({name}=...)" and error.hint
    assert "cache=" in error.what


def test_options_that_do_something_are_accepted():
    sc.Variables({"w": np.ones(2)}, read=sc.Read(cache="device"), placement=sc.OnHost())


@pytest.mark.parametrize("on_host", [False, True])
def test_a_rule_of_a_placement_that_matches_no_leaf_is_told_of(on_host, mesh):
    sharded = sc.Sharded([("kernel", P(None, "model")), ("karnel", P("data")), ("b", P("data"))])
    write = sc.Write(mode="apply", optimizer=ADAM)
    placement = sc.OnHost(on_device=sharded) if on_host else sharded
    tree = {"kernel": np.ones((4, 4), np.float32), "b": np.ones(8, np.float32)}
    with sc.Session(mesh):
        with pytest.warns(sc.UnmatchedRuleWarning) as caught:
            variables = sc.Variables(tree, placement=placement, write=write, name="model")
        variables.push(tree)  # Whose optimizer's state has leaves of its own.
    (said,) = (str(each.message) for each in caught)
    assert "'karnel'" in said and "no leaf of model" in said and "model/kernel" in said
    assert caught[0].filename == __file__


def test_the_policies_in_force_are_shown():
    policies = {"read": sc.Read(cache="device"), "write": sc.Write(mode="add")}
    variables = sc.Variables({"w": np.ones(2)}, placement=sc.OnHost(), name="table", **policies)
    for part in ("'table'", "Read(cache='device')", "Write(mode='add')"):
        assert part in repr(variables)
    assert "Read" not in repr(sc.Variables({"w": np.ones(2)}))
