"""Wires of served variables: what moves, what arrives, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import stepcache as sc
from stepcache.errors import OptionError, VariablesError
from stepcache.variables.plan import SERVER_LINK
from tests.serving.servers import two

WIRES = ("bf16", "int8")
SIZE = 64 * 1024  # Of four bytes each: more than travel inside a message.
CODED = {"bf16": 2 * SIZE, "int8": SIZE + SIZE // 256 * 4}


@sc.step
def look(params):
    return params["w"] * 1


@sc.step(carry="params")
def grow(params):
    return {"w": params["w"] + 1}


def normal(seed=0):
    return np.random.default_rng(seed).normal(size=SIZE).astype(np.float32)


def bytes_written(connection):
    hosts = range(connection.status().hosts)
    return sum(connection.status(host).counts.get("bytes written", 0) for host in hosts)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("cache", [None, "device", "host"])
@pytest.mark.parametrize("wire", WIRES)
def test_what_a_coded_read_moves_is_what_explain_says(connection, name, moved, wire, cache):
    tree = {"w": normal(), "few": np.ones(3, np.float32), "n": np.arange(4, dtype=np.int32)}
    params = connection.variables(name, tree, read=sc.Read(cache=cache, wire=wire))
    few = {"bf16": 6, "int8": 12}[wire]  # Too few to become smaller with a scale.
    for turn in range(3):
        plan = look.explain(params).plan
        moved.clear()
        seen = np.asarray(look(params))
        assert dict(moved) == plan.link_bytes
        is_fetched = turn == 0 or cache is None
        assert moved[SERVER_LINK] == is_fetched * (CODED[wire] + few + 16)
        if is_fetched:
            assert plan.transfers[0].wire == wire and plan.transfers[0].error_bound
    exact = params.value  # What is looked at is not coded.
    assert np.array_equal(exact["w"], normal()) and np.array_equal(exact["n"], np.arange(4))
    error = np.abs(seen - normal())
    largest = np.abs(normal()).max()
    assert 0 < error.max() <= largest / (254 if wire == "int8" else 256) * 1.001


@pytest.mark.parametrize("wire", WIRES)
def test_what_a_coded_push_moves_is_what_the_host_gets(connection, name, moved, wire):
    params, _ = two(connection, name, 0.0, SIZE, write=sc.Write(mode="add", wire=wire))
    for update in (normal(1), jnp.asarray(normal(2))):
        moved.clear()
        before = bytes_written(connection)
        params.push({"w": update})
        assert moved[SERVER_LINK] == CODED[wire] == bytes_written(connection) - before
    with sc.Session(max_step_bytes=CODED[wire] - 1), pytest.raises(sc.TransferBudgetError):
        params.push({"w": normal()})
    with sc.Session(max_step_bytes=CODED[wire]):
        params.push({"w": normal()})


@pytest.mark.parametrize("wire", WIRES)
def test_pushes_of_two_processes_add_up(connection, name, wire):
    write = sc.Write(mode="add", wire=wire, every=2)
    pair = two(connection, name, 0.0, SIZE, write=write)
    for number in range(10):
        for index, each in enumerate(pair):
            each.push({"w": normal(10 * index + number)})
    sums = sum(normal(seed).astype(np.float64) for seed in range(20))
    largest = max(np.abs(normal(seed)).max() for seed in range(20))
    error = np.abs(pair[0].value["w"] - sums).max()
    # What each process has left out: less than one rounding of its last sum of two updates.
    assert 0 < error <= 2 * 2.2 * largest * 2 / 254


@pytest.mark.parametrize("wire", WIRES)
def test_an_optimizer_gets_coded_gradients(connection, name, wire):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(256, 1024)).astype(np.float32)
    y = x @ rng.normal(size=1024).astype(np.float32)

    @sc.step
    def gradients(params, x, y):
        return jax.value_and_grad(lambda p: jnp.mean((x @ p["w"] - y) ** 2))(params)

    losses, tree = {}, {"w": np.zeros(1024, np.float32)}
    for coded in (None, wire):
        write = sc.Write(mode="apply", optimizer=optax.sgd(0.02, momentum=0.9), wire=coded)
        params = connection.variables(f"{name}{coded}", tree, write=write)
        for _ in range(30):
            loss, update = gradients(params, x, y)
            params.push(update)
        losses[coded] = float(loss)
    assert losses[None] < 200
    np.testing.assert_allclose(losses[wire], losses[None], rtol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("wire", [pytest.param("bf16", marks=pytest.mark.slow), "int8"])
def test_a_coded_push_is_done_once_though_the_server_is_killed(engine, tmp_path, wire):
    server = engine(tmp_path / "server", snapshot_seconds=3600).start()
    with server.connect() as connection:
        tree = {"w": np.zeros(SIZE, np.float32)}
        params = connection.variables("params", tree, write=sc.Write(mode="add", wire=wire))
        connection.flush()
        for _ in range(3):
            params.push({"w": normal()})
        before = params.value["w"]
        server.kill()
        server.start()
        assert np.array_equal(params.value["w"], before)
        params.push({"w": normal()})
        assert np.abs(params.value["w"] - 4 * normal()).max() < 0.04
    server.stop()


@pytest.mark.parametrize("rules", [[], [("w", PartitionSpec("data"))]], ids=["whole", "split"])
def test_coded_copies_on_a_mesh(connection, name, mesh, moved, rules):
    with sc.Session(mesh):
        placement = sc.Sharded(rules) if rules else sc.Replicated()
        read = sc.Read(cache="device", wire="int8")
        params = connection.variables(name, {"w": normal()}, placement=placement, read=read)
        planned = look.explain(params).plan.link_bytes
        moved.clear()
        seen = look(params)
        assert dict(moved) == planned and moved[SERVER_LINK] == CODED["int8"]
        assert seen.sharding.is_fully_replicated is not bool(rules)
    assert np.abs(np.asarray(seen) - normal()).max() <= np.abs(normal()).max() / 254 * 1.001


@pytest.mark.sample(every=2)
def test_a_call_may_take_a_value_twice_coded_and_exact(connection, name):
    tree = {"w": normal()}
    exact = connection.variables(name, tree)
    coded = connection.variables(name, tree, read=sc.Read(cache="device", wire="int8"))
    both = sc.step(lambda exact, coded: (exact["w"] * 1, coded["w"] * 1))
    for _ in range(2):
        found, rounded = both(exact, coded)
        assert np.array_equal(found, normal()) and not np.array_equal(rounded, found)
        assert np.abs(rounded - found).max() < 0.1


@pytest.mark.parametrize("wire", WIRES)
def test_a_carried_value_is_not_coded(connection, name, wire):
    params, theirs = two(connection, name, read=sc.Read(cache="device", wire=wire))
    with pytest.raises(VariablesError, match="would be rounded"):
        grow.explain(params)
    with pytest.raises(VariablesError, match="leave the wire out"):
        grow(params)
    assert theirs.value["w"][0] == 1 and theirs.version == 0


def test_a_wire_for_assigned_values_is_refused(connection, name):
    with pytest.raises(OptionError, match="only updates are coded"):
        connection.variables(name, {"w": np.zeros(1)}, write=sc.Write(wire="int8"))
