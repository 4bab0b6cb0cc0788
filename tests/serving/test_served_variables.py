"""`Variables` that another process holds: what a step sees, what moves, and what is refused."""

import concurrent.futures
import contextlib
import threading
import time
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import stepcache as sc
from stepcache.errors import OptionError, ServerLostError, VariablesError
from stepcache.serving.transport import place_of
from stepcache.variables.plan import SERVER_LINK
from tests.serving.servers import SIZE, names_on_one_host, two

LARGE = 50_000  # Of four bytes each: more than travel inside a message.


STALE = sc.Read(cache="device", max_staleness=5)


@sc.step
def total(params, x):
    return jax.tree.reduce(jnp.add, jax.tree.map(jnp.sum, params)) * x


@sc.step(carry="state")
def grow(state, x):
    return jax.tree.map(lambda leaf: leaf + x, state), x


# ---- what a step sees ----------------------------------------------------------------------------


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("size", [1, SIZE, LARGE])
def test_a_step_sees_what_another_process_has_written(connection, name, size):
    mine, theirs = two(connection, name, size=size, write=sc.Write(mode="add"))
    assert total(mine, 2.0) == 2 * size
    for count in range(1, 4):
        theirs.push({"w": np.ones(size, np.float32)})
        assert total(mine, 1.0) == (1 + count) * size
        assert mine.version == count
        assert np.array_equal(mine.value["w"], np.full(size, 1.0 + count, np.float32))


def test_the_first_value_counts(connection, name):
    first, second = two(connection, name)
    third = connection.variables(name, {"w": np.zeros(SIZE, np.float32)})
    assert total(third, 1.0) == total(second, 1.0) == total(first, 1.0) == SIZE


def test_unchanged_values_do_not_move(connection, name, moved):
    params, _ = two(connection, name)
    total(params, 1.0)
    assert moved[SERVER_LINK] == 4 * SIZE
    for _ in range(5):
        total(params, 1.0)
    assert moved[SERVER_LINK] == 4 * SIZE


@pytest.mark.parametrize("read", [sc.Read(), sc.Read(cache="device")], ids=str)
def test_what_moves_is_what_explain_says(connection, name, moved, read):
    mine, theirs = two(connection, name, read=read)
    for turn in range(3):
        for _ in range(2):
            planned = total.explain(mine, 1.0).plan.link_bytes
            moved.clear()
            total(mine, 1.0)
            assert dict(moved) == planned
        theirs.assign({"w": np.full(SIZE, turn, np.float32)})


def test_what_a_carried_value_moves_is_what_explain_says(connection, name, moved):
    mine, theirs = two(connection, name)
    for turn in range(3):
        planned = grow.explain(mine, 1.0).plan.link_bytes
        moved.clear()
        grow(mine, 1.0)
        assert dict(moved) == planned
        if turn == 1:
            theirs.assign({"w": np.zeros(SIZE, np.float32)})
    assert np.array_equal(mine.value["w"], np.ones(SIZE, np.float32))


def test_without_a_copy_every_call_reads(connection, name, moved):
    params, _ = two(connection, name, read=sc.Read())
    for _ in range(3):
        total(params, 1.0)
    assert moved[SERVER_LINK] == 3 * 4 * SIZE


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_copy_serves_no_longer_than_its_staleness(connection, name, staleness):
    read = sc.Read(cache="device", max_staleness=staleness)
    mine, theirs = two(connection, name, 0.0, 1, read=read)
    seen = []
    for now in range(12):
        seen.append(int(total(mine, 1.0)))
        theirs.assign({"w": np.full(1, now + 1, np.float32)})
    assert seen == sorted(seen)
    assert all(now - staleness <= value <= now for now, value in enumerate(seen)), seen
    assert len(set(seen)) <= 12 // max(1, staleness) + 1 or not staleness


@pytest.mark.slow
def test_many_may_open_the_same_variables_at_once(connection, name):
    write = sc.Write(mode="apply", optimizer=optax.sgd(1.0))
    writes = [write, write, sc.Write(), write]  # One only reads.
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(sc.connect(connection.address)) for _ in writes]

        def opened(number, each):
            row = (f"{name}-{number}", {"w": np.zeros(2, np.float32)})
            if each > 1:  # They come when the variables are there, but in no snapshot yet.
                while others[each].hosts.described(row[0]) is None:
                    time.sleep(0.001)
            return others[each].variables(*row, write=writes[each])

        with concurrent.futures.ThreadPoolExecutor(len(writes)) as pool:
            for number in range(3):
                made = [pool.submit(opened, number, each) for each in range(len(writes))]
                made = [each.result() for each in made]
                made[0].push({"w": np.ones(2, np.float32)})
                assert made[3].value["w"].tolist() == [-1, -1]


def test_a_session_reads_what_it_has_written(connection, name):
    read = sc.Read(cache="device", max_staleness=100)
    mine, _ = two(connection, name, 0.0, 1, read=read, write=sc.Write(mode="add"))
    for count in range(1, 5):
        mine.push({"w": np.ones(1, np.float32)})
        assert total(mine, 1.0) == count


def test_all_values_of_a_call_are_of_one_moment(connection, name):
    """Another process writes the first, then the second: they never differ by more than one."""
    names, tree = names_on_one_host(connection, name), {"w": np.zeros(1, np.float32)}
    read = sc.Read(cache="device", max_staleness=2)
    pair = [connection.variables(each, tree, read=read) for each in names]
    other = sc.connect(connection.address)
    theirs = [other.variables(each, tree) for each in names]

    @sc.step
    def difference(a, b):
        return a["w"] - b["w"]

    seen = set()
    for now in range(1, 30):
        for index, each in enumerate(theirs):
            each.assign({"w": np.full(1, now, np.float32)})
            if now % 3 == 0:
                total(pair[index], 1.0)  # One of them is newer than the other in this process.
            seen.add(float(difference(*pair)[0]))
    assert seen <= {0.0, 1.0}


def test_copies_of_other_moments_do_not_serve_together(connection, name):
    """Though `explain` has found out since which versions are the newest."""
    names, tree = names_on_one_host(connection, name), {"w": np.zeros(1, np.float32)}
    pair = [connection.variables(each, tree, read=STALE) for each in names]
    theirs = [sc.connect(connection.address).variables(each, tree) for each in names]

    @sc.step
    def difference(a, b):
        return a["w"] - b["w"]

    total(pair[0], 1.0)
    for each in theirs:
        each.assign({"w": np.ones(1, np.float32)})
    total(pair[1], 1.0)
    difference.explain(*pair)
    assert difference(*pair)[0] == 0


def test_copies_that_become_too_old_within_a_call_serve_it(connection, name):
    """As by a look of another thread. Else one of them would be of another moment."""
    tree = {"w": np.zeros(1, np.float32)}
    pair = [connection.variables(f"{name}{n}", tree, read=STALE) for n in range(2)]
    theirs = [sc.connect(connection.address).variables(f"{name}{n}", tree) for n in range(2)]

    @sc.step
    def difference(a, b):
        return a["w"] - b["w"]

    difference(*pair)
    for each in theirs:
        each.assign({"w": np.ones(1, np.float32)})
    taken = pair[0]._master.take

    def take(*row):
        assert pair[1].value["w"] == 1
        return taken(*row)

    pair[0]._master.take = take
    assert difference(*pair)[0] == 0
    assert total(pair[1], 1.0) == 1


def test_a_push_that_was_not_confirmed_is_seen_by_its_process(connection, name, monkeypatch):
    mine, _ = two(connection, name, 0.0, 1, read=STALE, write=sc.Write(mode="add"))
    assert total(mine, 1.0) == 0
    clients = connection.hosts.clients
    with monkeypatch.context() as patch:
        for each in clients:
            patch.setattr(each._transport, "request", lambda *_: None)
        with pytest.raises(ServerLostError):
            mine.push({"w": np.ones(1, np.float32)})
    assert total(mine, 1.0) == 1


# ---- what is written -----------------------------------------------------------------------------


def test_an_optimizer_runs_where_the_variables_are(connection, name):
    tree = {"w": np.linspace(0, 1, 300, dtype=np.float32), "b": np.zeros(3, np.float32)}
    write = sc.Write(mode="apply", optimizer=optax.chain(optax.clip(0.5), optax.adam(1e-2)))
    served = connection.variables(name, tree, write=write)
    local = sc.Variables(tree, write=write)
    for number in range(5):
        gradients = jax.tree.map(lambda leaf, n=number: np.cos(leaf + n), tree)
        served.push(gradients)
        local.push(gradients)
    for path, leaf in served.value.items():
        np.testing.assert_allclose(leaf, local.value[path], rtol=1e-6, atol=1e-7)


def test_sums_are_made_here_and_written_there(connection, name, moved):
    params, _ = two(connection, name, 0.0, write=sc.Write(mode="add", every=3))
    for _ in range(6):
        params.push({"w": np.ones(SIZE, np.float32)})
    assert params.version == 2 and moved[SERVER_LINK] == 2 * 4 * SIZE
    assert np.array_equal(params.value["w"], np.full(SIZE, 6, np.float32))


@pytest.mark.parametrize("end", ["flush", "flush all", "close"])
def test_sums_of_fewer_updates_are_written_at_the_end(connection, name, end):
    write = sc.Write(mode="add", every=4)
    mine, theirs = two(connection, name, 0.0, write=write)
    with sc.connect(connection.address) as third:
        pushed = third.variables(name, {"w": np.zeros(SIZE, np.float32)}, write=write)
        for _ in range(6):
            pushed.push({"w": np.ones(SIZE, np.float32)})
            theirs.push({"w": np.ones(SIZE, np.float32)})
        assert mine.value["w"][0] == 8
        if end == "flush":
            pushed.flush()
            assert mine.value["w"][0] == 10
        elif end == "flush all":
            third.flush()
            assert mine.value["w"][0] == 10
    assert mine.value["w"][0] == 10
    theirs.flush()
    theirs.flush()
    assert mine.value["w"][0] == 12 and theirs.version == 4


@pytest.mark.sample(every=2)
def test_a_sum_that_is_refused_takes_no_other_with_it(connection, name, monkeypatch):
    def refused(asked, *args, **options):
        if asked.endswith("first"):
            raise sc.VariablesError("refused")
        return written(asked, *args, **options)

    tree = {"w": np.zeros(3, np.float32)}
    names = [f"{name} {which}" for which in ("first", "second")]
    with pytest.raises(sc.VariablesError, match="refused"):
        with sc.connect(connection.address) as other:
            for each in names:
                value = other.variables(each, tree, write=sc.Write(mode="add", every=4))
                value.push({"w": np.ones(3, np.float32)})
            written = other.hosts.write
            monkeypatch.setattr(other.hosts, "write", refused)
    assert connection.variables(names[1], tree).value["w"].tolist() == [1, 1, 1]


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("how", ["push", "flush"])
def test_a_sum_that_cannot_be_kept_is_pending_again(connection, name, how, monkeypatch):
    """A push that raises changes nothing, unless its write is kept to be repeated."""
    ones = {"w": np.ones(SIZE, np.float32)}
    mine, theirs = two(connection, name, 0.0, write=sc.Write(mode="add", every=3))
    for _ in range(2):
        mine.push(ones)
    with monkeypatch.context() as patch:
        for client in connection.hosts.clients:
            patch.setattr(client._transport, "allocate", mock.Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            mine.flush() if how == "flush" else mine.push(ones)
    assert theirs.value["w"][0] == 0
    mine.push(ones)
    assert theirs.value["w"][0] == 3


def test_sums_of_a_loop_that_failed_are_not_written(connection, name):
    mine, _ = two(connection, name, 0.0)
    with pytest.raises(ZeroDivisionError), sc.connect(connection.address) as other:
        tree = {"w": np.zeros(SIZE, np.float32)}
        other.variables(name, tree, write=sc.Write(mode="add", every=2)).push(tree)
        1 / 0  # noqa: B018
    assert mine.version == 0 and mine.value["w"][0] == 0


@pytest.mark.slow
def test_sums_are_written_once_though_the_server_is_killed(engine, tmp_path):
    server = engine(tmp_path / "server", snapshot_seconds=3600).start()
    write, ones = sc.Write(mode="add", every=3), {"w": np.ones(SIZE, np.float32)}
    with server.connect() as connection:
        tree = {"w": np.zeros(SIZE, np.float32)}
        params = connection.variables("params", tree, write=write)
        connection.flush()
        for _ in range(4):
            params.push(ones)
        server.kill()
        server.start()
        assert params.value["w"][0] == 3
        for _ in range(3):
            params.push(ones)
        assert params.value["w"][0] == 6
    with server.connect() as connection:
        assert connection.variables("params", tree).value["w"][0] == 7
    server.stop()


def test_an_update_may_be_changed_after_it_was_pushed(connection, name):
    params, _ = two(connection, name, 0.0, LARGE, write=sc.Write(mode="add"))
    update = {"w": np.ones(LARGE, np.float32)}
    for _ in range(3):
        update["w"][:] = 1
        params.push(update)
        update["w"][:] = 77
    assert np.array_equal(params.value["w"], np.full(LARGE, 3, np.float32))


def test_a_value_that_was_looked_at_does_not_change(connection, name):
    params, _ = two(connection, name, 0.0, LARGE, write=sc.Write(mode="add"))
    looked_at = [params.value["w"]]
    for _ in range(5):
        params.push({"w": np.ones(LARGE, np.float32)})
        looked_at.append(params.value["w"])
    assert [value.max() for value in looked_at] == [value.min() for value in looked_at]
    assert [value[0] for value in looked_at] == list(range(6))


def test_a_copy_does_not_change(connection, name):
    """It may lie where the host has it, which must not use that memory again."""
    read = sc.Read(cache="device", max_staleness=100)
    mine, theirs = two(connection, name, 1.0, LARGE, read=read)
    assert total(mine, 1.0) == LARGE
    connection.status()  # The copy is not the last thing that this client was sent.
    for value in range(2, 8):
        theirs.assign({"w": np.full(LARGE, value, np.float32)})
        assert total(mine, 1.0) == LARGE


def test_a_step_that_carries_does_not_write_to_what_others_read(connection, name):
    mine, theirs = two(connection, name, 1.0, LARGE)
    total(mine, 1.0)
    taken = theirs.value["w"]
    grow(mine, 1.0)
    grow(theirs, 1.0)
    assert total(mine, 1.0) == 3 * LARGE and taken.max() == 1


def test_a_training_loop_gives_the_losses_of_one_process(connection, name):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 8)).astype(np.float32)
    y = x @ rng.normal(size=8).astype(np.float32)
    tree = {"w": np.zeros(8, np.float32), "b": np.zeros((), np.float32)}

    def loss_of(params, x, y):
        return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)

    @sc.step
    def gradients(params, x, y):
        return jax.value_and_grad(loss_of)(params, x, y)

    write = sc.Write(mode="apply", optimizer=optax.adam(0.1))
    losses = []
    for params in (connection.variables(name, tree, write=write), sc.Variables(tree, write=write)):
        losses.append([])
        for _ in range(20):
            loss, update = gradients(params, x, y)
            params.push(update)
            losses[-1].append(float(loss))
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert losses[0][-1] < losses[0][0] / 3


def test_two_that_carry_do_not_write_over_each_other(connection, name):
    mine, theirs = two(connection, name, 0.0, 1)
    grow(mine, 1.0)
    grow(theirs, 1.0)
    assert mine.value["w"] == 2
    taken = mine._master.take
    mine._master.take = lambda *args: (taken(*args), grow(theirs, 1.0))[0]
    with pytest.raises(VariablesError, match="another process has written"):
        grow(mine, 1.0)
    mine._master.take = taken
    grow(mine, 1.0)
    assert mine.value["w"] == 4


# ---- meshes, checkpoints, and other ways ---------------------------------------------------------


def test_copies_are_split_over_a_mesh(connection, name, mesh):
    tree = {"w": np.arange(64, dtype=np.float32).reshape(8, 8)}
    with sc.Session(mesh):
        rules = [("w", PartitionSpec("data"))]
        params = connection.variables(name, tree, placement=sc.Sharded(rules))

        @sc.step
        def double(params):
            return params["w"] * 2

        out = double(params)
        assert not out.sharding.is_fully_replicated
        assert np.array_equal(out, tree["w"] * 2)
        state = connection.variables(f"{name}-carried", tree, placement=sc.Sharded(rules))
        for _ in range(2):
            state, _ = grow(state, 1.0)
    assert np.array_equal(state.value["w"], tree["w"] + 2)


def test_a_snapshot_is_a_checkpoint(server):
    tree = {"w": np.arange(3, dtype=np.float32), "layers": [np.ones(2, np.int32)]}
    with server.connect() as connection:
        params = connection.variables("params", tree)
        params.assign(jax.tree.map(lambda leaf: leaf * 2, tree))
        connection.flush()
    found = {"params": {"w": np.zeros(3, np.float32), "layers/0": np.zeros(2, np.int32)}}
    for host in range(server.hosts):
        snapshots = Path(place_of(str(server.directory), host), "snapshots")
        if snapshots.exists():
            found = sc.restore(snapshots, partial=True, values=found)["values"]
    assert np.array_equal(found["params"]["w"], tree["w"] * 2)
    assert np.array_equal(found["params"]["layers/0"], [2, 2])


def test_served_variables_are_saved_and_restored(connection, name, tmp_path):
    params, theirs = two(connection, name)
    sc.save(tmp_path / "saved", params=params)
    theirs.assign({"w": np.zeros(SIZE, np.float32)})
    sc.restore(tmp_path / "saved", params=params)
    assert np.array_equal(theirs.value["w"], np.ones(SIZE, np.float32))
    local = params.copy()
    local.assign({"w": np.full(SIZE, 9, np.float32)})
    assert params.value["w"][0] == 1


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint32", "float16", "bfloat16", "complex64"])
def test_types(connection, name, dtype):
    tree = {"x": np.arange(6).astype(jnp.dtype(dtype)), "empty": np.zeros((0, 3), np.float32)}
    value = connection.variables(name, tree).value
    assert value["x"].dtype == tree["x"].dtype and np.array_equal(value["x"], tree["x"])
    assert value["empty"].shape == (0, 3)


# ---- what is refused ----------------------------------------------------------------------------


def test_another_tree_is_refused_and_open_variables_are_as_before(connection, name):
    open_before, _ = two(connection, name)
    with pytest.raises(VariablesError, match="already exist"):
        connection.variables(name, {"w": np.zeros(SIZE + 1, np.float32)})
    with pytest.raises(VariablesError, match="already exist"):
        connection.variables(name, {"a": np.zeros(2, np.int32), "w": np.zeros(SIZE, np.float32)})
    assert np.array_equal(open_before.value["w"], np.ones(SIZE, np.float32))
    with pytest.raises(OptionError, match="no name"):
        connection.variables("", {"w": np.zeros(SIZE, np.float32)})
    with pytest.raises(VariablesError, match="has no optimizer"):
        write = sc.Write(mode="apply", optimizer=optax.sgd(0.1))
        connection.variables(name, {"w": np.zeros(SIZE, np.float32)}, write=write)


def test_policies_without_effect_are_refused(connection, name):
    with pytest.raises(OptionError):
        connection.variables(name, {"w": np.zeros(1)}, placement=sc.OnHost())


def test_random_keys_are_refused(connection, name):
    with pytest.raises(VariablesError, match="key_data"):
        connection.variables(name, {"key": jax.random.key(0)})


@pytest.mark.parametrize("address", ["", "local:", "ray:", "gs:place", "/some/where"])
def test_unknown_addresses_are_refused(address):
    with pytest.raises(OptionError, match="unknown address"):
        sc.connect(address)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), "1"])
def test_what_is_no_timeout_is_refused(timeout):
    with pytest.raises(OptionError, match="no timeout"):
        sc.connect("local:nowhere", timeout=timeout)


def test_no_server_is_an_error_in_time(engine, tmp_path):
    with engine(tmp_path / "nobody").connect(timeout=0.3) as connection:
        began = time.monotonic()
        with pytest.raises(ServerLostError, match=r"0\.3 s"):
            connection.variables("params", {"w": np.zeros(1)})
        assert time.monotonic() - began < 5


def test_a_closed_connection_says_so(shared_server, name):
    connection = shared_server.connect()
    params = connection.variables(name, {"w": np.zeros(1)})
    connection.close()
    with pytest.raises(VariablesError, match="closed"):
        params.value  # noqa: B018


def test_a_transformation_does_not_keep_the_value(connection, name):
    params, _ = two(connection, name)
    with pytest.raises(VariablesError, match="transformation"):
        jax.jit(lambda: params.value["w"] * 2)()


def test_a_server_waits_for_clients_that_come_first(engine, tmp_path):
    server = engine(tmp_path / "late")
    with server.connect() as connection:
        threading.Timer(0.3, server.start).start()
        params = connection.variables("params", {"w": np.ones(2)})
        assert params.value["w"].sum() == 2
    server.stop()
