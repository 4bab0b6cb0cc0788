"""Several hosts that share one set of variables: what is where, and what that changes."""

import functools
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from click.testing import CliRunner

import stepcache as sc
from stepcache.cli import main
from stepcache.errors import VariablesError
from stepcache.serving.client import Client
from stepcache.serving.durable_host import DurableHost
from stepcache.serving.hosts import Hosts, first_host, leaves_by_host
from stepcache.serving.local_transport import LocalTransport
from stepcache.serving.messages import BlockLayout
from stepcache.serving.transport import place_of
from tests.serving.servers import LIMIT_SECONDS, LocalHosts

SUM = sc.Write(mode="add")
TREE = {f"w{n}": np.full(1000 * (n + 1), n, np.float32) for n in range(6)}


@pytest.fixture(scope="module")
def engine():
    return LocalHosts


@pytest.fixture
def clients(shared_server):
    """A client of each host."""
    places = [Path(place_of(str(shared_server.directory), host)) for host in range(3)]
    made = [Client(functools.partial(LocalTransport, place), str(place)) for place in places]
    yield made
    for each in made:
        each.close()


@sc.step
def total(tree):
    return sum(map(jnp.sum, jax.tree.leaves(tree)))


def plus(tree, value):
    return jax.tree.map(lambda leaf: leaf + value, tree)


# ---- what is where -------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[], [5], [1, 2, 3, 4, 5, 6, 7], [100, 1, 1, 1], [4] * 10])
@pytest.mark.parametrize("hosts", [1, 2, 3, 8])
def test_leaves_are_balanced_by_their_bytes(sizes, hosts):
    found = leaves_by_host("params", sizes, hosts)
    assert sorted(leaf for share in found.values() for leaf in share) == [*range(len(sizes))]
    filled = [sum(sizes[leaf] for leaf in found.get(host, [])) for host in range(hosts)]
    assert max(filled) - min(filled) <= max(sizes, default=0)
    first = next(iter(found))
    assert first == first_host("params", hosts)
    assert not sizes or sizes.index(max(sizes)) in found[first]


def test_all_processes_find_the_same():
    """Also those of other versions, which may share a directory."""
    assert [first_host(f"{n}", 7) for n in range(9)] == [2, 2, 1, 4, 6, 1, 5, 3, 5]


def test_hosts_are_asked_at_the_same_time():
    hosts, all_are_asked = Hosts(lambda _: None), threading.Barrier(3)
    assert len(hosts.together([lambda: all_are_asked.wait(LIMIT_SECONDS)] * 3)) == 3


def test_what_fails_on_one_host_is_done_on_the_others():
    hosts, go_on, done = Hosts(lambda _: None), threading.Event(), []

    def fail():
        go_on.set()
        raise VariablesError("no")

    def last():
        go_on.wait(LIMIT_SECONDS)
        done.append(True)

    for calls in ([fail, last], [last, fail]):
        with pytest.raises(VariablesError, match="no"):
            hosts.together(calls)
        go_on.clear()
    assert len(done) == 2


# ---- variables -----------------------------------------------------------------------------------


def test_each_host_has_its_leaves(connection, name, clients, shared_server):
    params = connection.variables(name, TREE, write=SUM)
    params.push(plus(TREE, 1))
    found = [client.describe(name) for client in clients]
    assert sorted(path for each in found for path, *_ in each.types) == sorted(TREE)
    assert all(each.number == 1 for each in found) and params.version == 3
    with shared_server.connect() as other:
        same = other.variables(name, plus(TREE, 7))
        assert total(same) == total(plus(jax.tree.map(lambda leaf: leaf * 2, TREE), 1))
        assert same.version == 3


@pytest.mark.parametrize("cache", ["device", None])
def test_a_write_that_one_host_has_done_is_seen(connection, name, clients, cache):
    """Of a push of another process, that the other hosts have not got yet."""
    params = connection.variables(name, TREE, read=sc.Read(cache=cache))
    expected = float(total(params))
    for client in clients:
        types = client.describe(name).types
        client.write(name, "add", BlockLayout(types), [np.ones(shape) for _, shape, _ in types])
        expected += sum(shape[0] for _, shape, _ in types)
        for _ in range(2):
            assert float(total(params)) == expected
        assert float(total(params.value)) == expected


def test_what_several_hosts_have_cannot_be_carried(connection, name):
    @sc.step(carry="state")
    def grow(state):
        return plus(state, 1)

    params = connection.variables(name, TREE, write=SUM)
    with pytest.raises(VariablesError, match="several hosts") as raised:
        grow(params)
    assert "push" in str(raised.value)
    with pytest.raises(VariablesError, match="several hosts"):
        grow.explain(params)
    assert params.version == 0
    params.assign(plus(TREE, 1))
    assert np.array_equal(params.value["w2"], TREE["w2"] + 1)
    small = connection.variables(f"{name}-one leaf", {"w": np.zeros(3, np.float32)})
    grow(small)
    assert small.value["w"][0] == 1


@pytest.mark.slow
def test_an_optimizer_sees_all_leaves(connection, name, clients):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
    write = sc.Write(mode="apply", optimizer=optimizer)
    served, local = connection.variables(name, TREE, write=write), sc.Variables(TREE, write=write)
    for number in range(3):
        gradients = jax.tree.map(lambda leaf, n=number: np.cos(leaf + n), TREE)
        served.push(gradients)
        local.push(gradients)
    for path, leaf in served.value.items():
        np.testing.assert_allclose(leaf, local.value[path], rtol=1e-5, atol=1e-6)
    there = [client.describe(name) is not None for client in clients]
    assert there.index(True) == first_host(name, 3) and sum(there) == 1
    reader = connection.variables(name, TREE)
    assert float(total(reader)) == float(total(served)) and reader.version == 3


@pytest.mark.parametrize(
    "other",
    [
        TREE | {"more": np.zeros(1, np.float32)},
        {path: leaf for path, leaf in TREE.items() if path != "w0"},
        TREE | {"w0": np.zeros(1000, np.int32)},
        TREE | {"w5": np.zeros(1, np.float32)},
        {"w5": TREE["w5"]},
        {},
    ],
    ids=["more", "fewer", "type", "size", "one", "none"],
)
def test_another_tree_is_refused(connection, name, other, clients):
    params = connection.variables(name, TREE)
    before = [client.describe(name).types for client in clients]
    with pytest.raises(VariablesError, match="already exist"):
        connection.variables(name, other)
    with pytest.raises(VariablesError, match="already exist"):
        connection.variables(name, TREE, write=sc.Write(mode="apply", optimizer=optax.sgd(0.1)))
    assert [client.describe(name).types for client in clients] == before
    assert params.version == 0


def test_what_was_made_in_part_is_made_whole(connection, name, clients):
    """A process was killed when it had made what some hosts have."""
    shares = leaves_by_host(name, [leaf.nbytes for leaf in TREE.values()], 3)
    first, host, _ = shares
    types = [(f"w{leaf}", [*TREE[f"w{leaf}"].shape], "float32") for leaf in shares[host]]
    values = [np.full(shape, 9, np.float32) for _, shape, _ in types]
    clients[host].write(name, "create", BlockLayout(types), values)
    found = connection.variables(name, TREE).value
    assert {path for path in TREE if found[path][0] == 9} == {path for path, *_ in types}
    assert clients[first].describe(name) is not None


# ---- tables --------------------------------------------------------------------------------------


def test_rows_go_round_the_hosts(connection, name, clients):
    table = connection.table(name, 100, (4,), stddev=1.0)
    ids = np.array([[7, 99], [0, 50], [7, 1]])
    before = table.lookup(np.arange(100)).spread()
    rows = table.lookup(ids)
    assert np.array_equal(rows.spread(), before[ids])
    table.push(rows, np.arange(32, dtype=np.float32).reshape(8, 4))
    after = table.lookup(np.arange(100)).spread()
    changed = after - before
    np.testing.assert_allclose(changed[rows.ids], np.arange(20).reshape(5, 4), atol=1e-5)
    assert np.array_equal(np.flatnonzero(np.abs(changed).max(axis=1) > 1e-3), rows.ids)
    for host, client in enumerate(clients):
        _, block = client.rows(name, np.arange(33))
        assert np.array_equal(block[: 33 * 16].view(np.float32).reshape(33, 4), after[host::3][:33])


def test_rows_of_different_hosts_begin_differently(connection, name):
    rows = connection.table(name, 300, (4,), stddev=1.0).lookup(np.arange(300)).spread()
    assert len(np.unique(rows, axis=0)) == 300 and abs(rows.std() - 1) < 0.1


def test_a_table_with_fewer_rows_than_hosts(connection, name):
    table = connection.table(name, 2, (3,))
    rows = table.lookup([0, 1])
    table.push(rows, np.ones((8, 3), np.float32))
    assert table.lookup([0, 1]).spread().sum() == 6
    with pytest.raises(VariablesError, match="out of range"):
        table.lookup([2])


# ---- the number of hosts -------------------------------------------------------------------------


class Block:
    def __init__(self, size_bytes):
        self.data = np.zeros(size_bytes, np.uint8)


@pytest.mark.parametrize("before, after", [(1, 2), (2, 1), (2, 3)])
def test_a_directory_has_always_as_many_hosts(tmp_path, before, after):
    for _ in range(2):
        DurableHost(tmp_path, Block, hosts=before).close()
    with pytest.raises(VariablesError, match=f"another number of hosts[^$]*{before} hosts"):
        DurableHost(tmp_path, Block, hosts=after)
    DurableHost(tmp_path, Block, hosts=before).close()


def test_several_hosts_need_ray(tmp_path):
    done = CliRunner().invoke(main, ["serve", "--variables", str(tmp_path), "--hosts", "2"])
    assert done.exit_code == 2 and "--ray NAME" in done.output


def test_a_closed_connection_says_so(shared_server, name):
    connection = shared_server.connect()
    params, table = connection.variables(name, TREE, write=SUM), connection.table(name + "t", 9)
    with pytest.raises(sc.OptionError, match="no such host"):
        connection.status(3)
    connection.close()
    for call in (
        lambda: params.value,
        lambda: params.push(TREE),
        lambda: table.lookup([1, 2, 3]),
        connection.flush,
        connection.status,
    ):
        with pytest.raises(VariablesError, match="the connection has been closed"):
            call()
