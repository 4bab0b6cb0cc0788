"""Tables of rows that a server holds."""

import pickle
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepcache as sc
from stepcache.errors import OptionError, VariablesError
from stepcache.serving.tables import TableType
from stepcache.variables.plan import SERVER_LINK
from tests.serving.network import table_of

OPTIMIZERS = {
    "sgd": (sc.RowOptimizer("sgd", 0.1), optax.sgd(0.1)),
    "adagrad": (
        sc.RowOptimizer("adagrad", 0.1, eps=1e-7),
        optax.chain(optax.scale_by_rss(0.0, eps=0.0), optax.scale(-0.1)),
    ),
    "adam": (sc.RowOptimizer("adam", 0.1), optax.adam(0.1)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_that_are_always_updated_go_as_under_optax(name):
    ours, theirs = OPTIMIZERS[name]
    table = table_of(TableType(6, [3], "float32", 0.5, 1, ours))
    value = table.arrays["rows"].copy()
    state = theirs.init(value)
    for number in range(5):
        gradients = np.cos(value + number)
        table.update(np.arange(6), gradients)
        updates, state = theirs.update(jnp.asarray(gradients), state, value)
        value = np.asarray(optax.apply_updates(value, updates))
    np.testing.assert_allclose(table.arrays["rows"], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_only_the_rows_of_an_update_change(name):
    ours, _ = OPTIMIZERS[name]
    table = table_of(TableType(6, [3], "float32", 0.5, 1, ours))
    alone = table_of(TableType(6, [3], "float32", 0.5, 1, ours))
    before = table.arrays["rows"].copy()
    for _ in range(3):
        table.update(np.array([4, 1]), np.ones((2, 3), np.float32))
        alone.update(np.array([1]), np.ones((1, 3), np.float32))
    others = [0, 2, 3, 5]
    assert np.array_equal(table.arrays["rows"][others], before[others])
    assert np.array_equal(table.arrays["rows"][1], alone.arrays["rows"][1])


@pytest.mark.parametrize(
    "options", [("adagrad",), ("sgd", -1), ("add", 0.1), ("rmsprop", 0.1)], ids=str
)
def test_optimizers_that_make_no_sense_are_refused(options):
    with pytest.raises(OptionError):
        sc.RowOptimizer(*options)


def test_each_row_moves_once(connection, name, moved):
    table = connection.table(name, 1000, (4,), stddev=1.0)
    rows = table.lookup([[7, 7, 9], [900, 7, 9]])
    assert moved[SERVER_LINK] == 3 * (8 + 4 * 4)
    assert rows.values.shape == (8, 4) and not rows.values[3:].any()
    spread = rows.spread()
    assert spread.shape == (2, 3, 4)
    assert np.array_equal(spread[0, 0], spread[1, 1]) and spread.std() > 0.1
    again = connection.table(name, 1000, (4,), stddev=1.0).lookup(np.array([900]))
    assert np.array_equal(again.spread()[0], spread[1, 0])


@pytest.mark.sample(every=2)
def test_batches_of_other_sizes_find_the_same_program(connection, name):
    table = connection.table(name, 1000, (4,))

    @sc.step
    def total(rows):
        return rows.spread().sum()

    for count in (9, 12, 16, 11):  # Of so many different ids, in batches of one size.
        total(table.lookup(np.arange(20) % count))
    assert total.stats().compiles == 1


def test_a_recommender_learns_what_a_dense_one_does(connection, name):
    """Rows that are used by several ids of a batch get the sum of their gradients."""
    random = np.random.default_rng(0)
    ids = random.integers(0, 50, (20, 16))
    target = random.normal(size=50).astype(np.float32)
    table = connection.table(name, 50, (1,), optimizer=sc.RowOptimizer("sgd", 0.2))

    @sc.step
    def gradients(rows, y):
        def loss_of(values):
            return jnp.sum((rows.spread(values)[..., 0] - y) ** 2)

        return jax.value_and_grad(loss_of)(rows.values)

    dense, losses = np.zeros(50, np.float32), []
    for batch in ids:
        rows = table.lookup(batch)
        loss, update = gradients(rows, target[batch])
        table.push(rows, update)
        losses.append(float(loss))
        step = np.zeros(50, np.float32)
        np.add.at(step, batch, 2 * (dense[batch] - target[batch]))
        dense -= np.float32(0.2) * step
    np.testing.assert_allclose(
        table.lookup(np.arange(50)).spread()[:, 0], dense, rtol=1e-4, atol=1e-5
    )
    assert losses[-1] < losses[0] / 10


@pytest.mark.sample(every=2)
def test_a_table_outlives_its_server(server):
    how = sc.RowOptimizer("adam", 0.1)
    with server.connect() as connection:
        table = connection.table("users", 100, (8,), stddev=0.1, seed=3, optimizer=how)
        rows = table.lookup([1, 2, 3])
        for _ in range(3):
            table.push(rows, np.ones_like(rows.values))
        connection.flush()
        table.push(rows, np.ones_like(rows.values))  # In no snapshot.
        before = table.lookup(np.arange(100)).spread()
        server.kill()
        server.start()
        assert np.array_equal(table.lookup(np.arange(100)).spread(), before)
        server.stop()
        server.start()
        assert np.array_equal(table.lookup(np.arange(100)).spread(), before)
        with pytest.raises(VariablesError, match="already exists"):
            connection.table("users", 101, (8,), stddev=0.1, seed=3, optimizer=how)


def test_what_is_no_row_is_refused(connection, name):
    table = connection.table(name, 10, (2,))
    for ids in ([10], [-1], [0.5], 0.5, np.array([1 << 40])):
        with pytest.raises(VariablesError, match="out of range"):
            table.lookup(ids)
    rows = table.lookup([1, 2, 2])
    of_each_id = np.ones((3, 2))
    for update in (np.ones((8, 3)), of_each_id, np.ones((8, 2), complex), None):
        with pytest.raises(VariablesError, match="does not match"):
            table.push(rows, update)
    for no_rows in (jax.tree.map(lambda leaf: leaf, rows), [1, 2]):
        with pytest.raises(VariablesError, match="no row numbers"):
            table.push(no_rows, np.ones((8, 2)))
    with pytest.raises(VariablesError, match="transformation"):
        jax.jit(table.lookup)(np.arange(3))
    with pytest.raises(VariablesError, match="connect in the other process"):
        pickle.dumps(table)
    keyed, _ = jax.tree_util.tree_flatten_with_path(rows)
    assert [jax.tree_util.keystr(path) for path, _ in keyed] == [".values", ".index"]
    assert table.lookup([]).spread().shape == (0, 2)
    assert table.lookup(np.zeros((0, 3))).spread().shape == (0, 3, 2)


@pytest.mark.parametrize(
    ("argument", "arguments"),
    [
        ("rows", {"rows": -1}),
        ("rows", {"rows": 1.5}),
        ("rows", {"rows": 1 << 41}),
        ("shape", {"rows": 10, "shape": 2}),
        ("optimizer", {"rows": 10, "optimizer": "adam"}),
        ("stddev", {"rows": 10, "stddev": -1.0}),
        ("stddev", {"rows": 10, "stddev": float("nan")}),
        ("stddev", {"rows": 10, "stddev": "1"}),
        ("seed", {"rows": 10, "seed": -1}),
        ("seed", {"rows": 10, "seed": 1.5}),
        ("seed", {"rows": 10, "seed": 1 << 70}),
        ("dtype", {"rows": 10, "dtype": str}),
        ("dtype", {"rows": 10, "dtype": int, "optimizer": sc.RowOptimizer("sgd", 0.1)}),
    ],
)
def test_what_is_no_table_is_refused_by_the_argument_that_says_so(argument, arguments):
    with sc.connect("local:nowhere") as connection:  # It is never asked.
        with pytest.raises(OptionError, match=f"cannot be made: {argument} is invalid"):
            connection.table("users", **arguments)


def test_a_table_and_variables_have_different_names(connection, name):
    connection.table(name, 10)
    with pytest.raises(VariablesError):
        connection.variables(name, {"w": np.zeros(2)})
    connection.variables(f"{name}-2", {"w": np.zeros(2)})
    with pytest.raises(VariablesError, match="not of a table"):
        connection.table(f"{name}-2", 10)


def test_a_large_table_moves_only_its_rows(connection, name, moved):
    table = connection.table(name, 1_000_000, (16,), optimizer=sc.RowOptimizer("adagrad", 0.1))
    rows = table.lookup(np.arange(0, 1_000_000, 31_250))
    table.push(rows, np.ones_like(rows.values))
    assert moved[SERVER_LINK] == 2 * 32 * (8 + 64)


def test_updates_are_added_up_and_each_row_sent_once(connection, name, moved):
    row = (name, 100, (4,), np.float32)
    policy = {"optimizer": sc.RowOptimizer("add"), "read": sc.Read("device", max_staleness=2)}
    summing, other = connection.table(*row, every=3, **policy), connection.table(*row, **policy)
    for ids in ([1, 2], [2, 3, 2]):
        rows = summing.lookup(ids)
        update = np.ones_like(rows.values)
        summing.push(rows, update)
        update[:] = 7  # It was copied.
    assert not np.asarray(other.lookup([1, 2, 3]).values).any()
    moved.clear()
    rows = summing.lookup([1, 2])  # Copies serve meanwhile.
    summing.push(rows, np.ones_like(rows.values))
    assert moved[SERVER_LINK] == 3 * (8 + 16)
    assert summing.lookup([1, 2, 3]).values[:3, 0].tolist() == [2, 3, 1]
    summing.push(rows, np.ones_like(rows.values))
    summing.flush()
    summing.flush()
    assert summing.lookup([1, 2]).values[:2, 0].tolist() == [3, 4]


@pytest.mark.parametrize("how", ["push", "flush"])
def test_a_sum_that_a_host_cannot_get_is_pending_again(connection, name, how, monkeypatch):
    """A push that raises changes nothing but rows of the hosts that have it, or will get it."""
    table = connection.table(name, 100, (4,), every=3, optimizer=sc.RowOptimizer("add"))
    other = connection.table(name, 100, (4,), optimizer=sc.RowOptimizer("add"))
    rows, ids = table.lookup([1, 2, 3, 4]), np.array([1, 2, 3, 4])
    update = np.ones_like(rows.values)
    for _ in range(2):
        table.push(rows, update)
    client, hosts = connection.hosts.clients[0], len(connection.hosts.clients)
    with monkeypatch.context() as patch:
        patch.setattr(client._transport, "allocate", mock.Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            table.flush() if how == "flush" else table.push(rows, update)
    sent = 2 if how == "flush" else 3
    expected = np.where(ids % hosts == 0, 0, sent)
    assert other.lookup(ids).values[:4, 0].tolist() == expected.tolist()
    table.flush()
    expected = np.where(ids % hosts == 0, 2, sent)
    assert other.lookup(ids).values[:4, 0].tolist() == expected.tolist()


def test_the_end_of_a_connection_sends_sums(connection, name):
    how = {"optimizer": sc.RowOptimizer("add")}
    table = connection.table(name, 10, (4,), "bfloat16", **how)
    with sc.connect(connection.address) as other:
        summing = other.table(name, 10, (4,), "bfloat16", every=1000, **how)
        rows = summing.lookup([5])
        for _ in range(600):  # One by one, in bfloat16, they would add up to 256.
            summing.push(rows, np.ones_like(rows.values))
    assert table.lookup([5]).values[0, 0] == 600


def test_updates_of_different_types_are_added_up_in_that_of_the_table(connection, name):
    table = connection.table(name, 10, (2,), every=2)
    rows = table.lookup([1])
    table.push(rows, np.ones((8, 2), np.int32))
    table.push(rows, np.full((8, 2), 0.5, np.float32))
    assert table.lookup([1]).values[0].tolist() == [1.5, 1.5]


@pytest.mark.parametrize("every", [0, True, 1.5])
def test_every_counts_updates(connection, name, every):
    with pytest.raises(OptionError, match="every counts updates"):
        connection.table(name, 10, every=every)
    with pytest.raises(OptionError, match="cannot be added up"):
        connection.table(name, 10, every=2, optimizer=sc.RowOptimizer("assign"))
