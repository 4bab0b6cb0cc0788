"""Values that every process hands in whole are the same on all, or it is a named error."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import stepcache as sc
from stepcache.pods.replicas import token_of
from tests.cluster.pods import run_pod, succeeded

SCRIPT = """
def attempt(name, call):
    started = time.monotonic()
    try:
        with sc.Session(mesh, agree_timeout=5) as session:
            call(session)
        say("ran", name)
    except sc.AgreementError as error:
        say("seconds", name, time.monotonic() - started)
        say("error", name, error.sides, str(error).replace(chr(10), " | "))
def make():
    @sc.step(carry="state", batch="batch")
    def train(state, batch, rate=0.1, key=None):
        return jax.tree.map(lambda x: x + rate * batch["x"].mean(), state), batch["x"].mean()
    return train
generator = np.random.default_rng(int(RANK == 1))
batch = {"x": np.full((2, 3), RANK, np.float32)}  # Each process's own.
same = {"b": np.zeros(3, np.float32)}
def other():
    return {"w": generator.normal(size=(600, 600)).astype(np.float32)} | same
def of_a_known_program(session):
    train = make()
    variables = sc.Variables({"w": np.zeros((600, 600), np.float32)} | same)
    for _ in range(3):
        train(variables, batch)
    train(sc.Variables(other()), batch)
def warmed(session):
    train = make()
    described = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (other(), batch))
    train.warm(*described)
    train(other(), batch)
def of_a_batch(session):
    make()(same, batch | {"count": 3 + RANK})
def assigned(session):
    variables = sc.Variables({"small": np.zeros(3), "large": np.zeros((300, 300))}, name="params")
    session.check_replicas(variables)
    value = lambda shape: np.full(shape, float(RANK == 1))
    variables.assign({"small": value(3), "large": value((300, 300))})
    make()(same, batch)
    session.check_replicas({"all": [variables, 0.5]})
def apart(session):
    shards = jax.make_array_from_callback((6,), NamedSharding(mesh, P("data")),
                                          lambda index: np.arange(6.0)[index] + (RANK == 1))
    session.check_replicas(shards)  # Each process has its own.
    session.check_replicas([np.ones(3), shards, np.arange(3) * (RANK == 1)])
def alike(session):
    train, variables, state = make(), sc.Variables(other() and same), same
    train.warm(state, batch)
    for number in range(5):
        state, _ = train(state, batch, 0.1 / (number + 1), key=jax.random.key(number))
        train(variables, batch)
        train(sc.Variables(same, placement=sc.OnHost()), batch)
    session.check_replicas([variables, state, jax.random.key(0), 0.5])
def replaced(session):
    # Made of values that differ, but never used with them.
    zeros = {"w": np.zeros((600, 600), np.float32)} | same
    sc.save("saved", value=sc.Variables(zeros))
    restored, assigned = sc.Variables(other()), sc.Variables(other())
    sc.restore("saved", value=restored)
    assigned.assign(zeros)
    for variables in (restored, assigned):
        make()(variables, batch)
        session.check_replicas(variables)
for name, call in {
    "carry": lambda session: make()(other(), batch),
    "local-carry": lambda session: make()(jax.tree.map(jnp.asarray, other()), batch),
    "number": lambda session: make()(same, batch, 0.1 + (RANK == 1)),
    "key": lambda session: make()(same, batch, key=jax.random.key(int(RANK == 1))),
    "batch": of_a_batch,
    "variables": lambda session: make()(sc.Variables(other(), name="params"), batch),
    "on-host": lambda session: make()(sc.Variables(other(), placement=sc.OnHost()), batch),
    "known": of_a_known_program, "warmed": warmed, "assigned": assigned, "apart": apart,
    "alike": alike, "replaced": replaced,
}.items():
    attempt(name, call)
"""
EXPECTED = {
    "carry": "state['w']: rank 1 [",
    "local-carry": "state['w']: rank 1 [",
    "number": "rate: rank 1 1.1; ranks 0, 2 0.1",
    "key": "key: rank 1 [",
    "batch": "batch['count']: rank 1 4; rank 0 3 |   batch['count']: rank 2 5; rank 0 3",
    "variables": "state/w: rank 1 [",
    "on-host": "state/w: rank 1 [",
    "known": "state/w: rank 1 [",
    "warmed": "state['w']: rank 1 [",
    "assigned": "params/large: rank 1 [1.0 1.0 1.0 …]",
    "apart": "2: rank 1 [0 1 2]",
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return succeeded(run_pod(tmp_path_factory.mktemp("replicas"), SCRIPT, 3))


@pytest.mark.sample(every=12)
@pytest.mark.parametrize("name", EXPECTED)
def test_values_that_differ_are_an_error_that_names_path_and_ranks(ranks, name):
    errors = set()
    for rank in ranks:
        (error,) = [line for line in rank.said("error") if line.startswith(f"{name} ")]
        (seconds,) = [line for line in rank.said("seconds") if line.startswith(f"{name} ")]
        assert EXPECTED[name] in error and float(seconds.split()[1]) < 5, error
        assert "['b']" not in error and "/b" not in error  # That is the same.
        errors.add(error)
    assert len(errors) == 1


def test_values_that_are_the_same_are_none(ranks):
    for rank in ranks:
        assert rank.said("ran") == ["alike", "replaced"], rank.output


@pytest.mark.parametrize("size", [1, 3, 1000, 70_000, 300_001])
def test_tokens_differ_where_values_do(size):
    one, other = (np.random.default_rng(seed).normal(size=size) for seed in (0, 1))
    assert token_of(one) == token_of(one.copy()) != token_of(other)
    changed = one.copy()
    changed[size // 3] += 1
    assert token_of(changed, whole=True) != token_of(one, whole=True)
    assert token_of(one.astype(np.float16)[::2]) == token_of(one.astype(np.float16)[::2].copy())
    assert token_of(np.zeros((size, 0))) == token_of(np.zeros((size, 0)))


def test_devices_of_one_process_are_compared():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with sc.Session(mesh) as session:
        session.check_replicas({"a": np.ones(3), "v": sc.Variables({"w": np.ones(3)})})
        sharding = NamedSharding(mesh, PartitionSpec())
        shards = [jax.device_put(np.full(3, n == 5), d) for n, d in enumerate(mesh.devices.flat)]
        apart = jax.make_array_from_single_device_arrays((3,), sharding, shards)
        with pytest.raises(sc.AgreementError, match="a: its devices hold"):
            session.check_replicas({"a": apart})


@pytest.mark.parametrize("option", ["check_replicas_every", "on_hang"])
def test_options_that_are_gone_say_what_to_do(option):
    with pytest.raises(sc.OptionError, match=f"{option} is gone"):
        sc.Session(**{option: 3})
    with pytest.raises(TypeError, match="unexpected keyword"):
        sc.Session(**{f"{option}s": 3})
