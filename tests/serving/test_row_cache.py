"""Copies of rows of a served table on the device: which serve, and what moves."""

import jax
import numpy as np
import pytest

import stepcache as sc
from stepcache.errors import OptionError
from stepcache.serving.row_cache import RowCache
from stepcache.variables.plan import HOST_LINK, SERVER_LINK

ROW_BYTES = 16
SENT, ASKED = 8 + 8 + 1 + ROW_BYTES, 8 + 8 + 1


def looked_up(table, ids, moved):
    """The rows of different ids, and the bytes that came from or went to the server."""
    moved.clear()
    rows = table.lookup(ids)
    return np.asarray(rows.spread())[:, 0].tolist(), moved[SERVER_LINK]


def push(table, ids, moved):
    rows = table.lookup(ids)
    table.push(rows, np.ones_like(rows.values))


def tables(connection, name, rows=100, **options):
    """A table with a cache, and one of the same rows without."""
    with_cache = connection.table(name, rows, (4,), **options)
    return with_cache, connection.table(name, rows, (4,))


# ---- at both engines -----------------------------------------------------------------------------


def test_only_rows_that_somebody_has_updated_are_sent_again(connection, name, moved):
    cached, other = tables(connection, name, read=sc.Read(cache="device"))
    assert looked_up(cached, [1, 2, 3], moved) == ([0, 0, 0], 3 * SENT)
    assert looked_up(cached, [1, 2, 3], moved) == ([0, 0, 0], 3 * ASKED)
    push(other, [2], moved)
    assert looked_up(cached, [3, 2, 4], moved) == ([0, 1, 0], 2 * SENT + ASKED)
    assert moved[HOST_LINK] == 8 * ROW_BYTES  # Rows are padded.
    push(cached, [3], moved)
    assert looked_up(cached, [1, 2, 3], moved) == ([0, 1, 1], SENT + 2 * ASKED)


@pytest.mark.sample(every=2)
def test_a_copy_serves_so_many_more_lookups(connection, name, moved):
    cached, other = tables(connection, name, read=sc.Read(cache="device", max_staleness=2))
    assert looked_up(cached, [1, 2], moved) == ([0, 0], 2 * SENT)
    push(other, [1, 2], moved)
    assert looked_up(cached, [1, 5], moved) == ([0, 0], SENT)  # 5 is fetched now.
    assert looked_up(cached, [1, 5], moved) == ([0, 0], 0)
    assert looked_up(cached, [1, 5], moved) == ([1, 0], SENT)
    assert looked_up(cached, [1, 2], moved) == ([1, 1], SENT)
    push(cached, [2], moved)
    assert looked_up(cached, [2], moved) == ([2], SENT)  # Its own push is seen at once.


@pytest.mark.slow
def test_copies_of_an_epoch_say_nothing_about_another(server, moved):
    with server.connect() as connection, server.connect() as second:
        cached, _ = tables(connection, "rows", read=sc.Read(cache="device"))
        other = second.table("rows", 100, (4,))
        for each in ([1], [1], [2]):
            push(other, each, moved)
        assert looked_up(cached, [1, 2, 3], moved)[0] == [2, 1, 0]
        second.flush()
        server.kill()
        server.start()
        assert looked_up(cached, [1, 2, 3], moved) == ([2, 1, 0], 3 * SENT)
        assert looked_up(cached, [1, 2, 3], moved) == ([2, 1, 0], 3 * ASKED)
        push(other, [3], moved)
        assert looked_up(cached, [1, 2, 3], moved) == ([2, 1, 1], 2 * ASKED + SENT)


@pytest.mark.slow
def test_a_cache_of_few_rows_changes_nothing_but_the_bytes(connection, name, moved):
    random = np.random.default_rng(0)
    options = {"read": sc.Read(cache="device"), "cache_rows": 12}
    cached, other = tables(connection, name, 60, **options)
    for _ in range(30):
        ids = random.integers(0, 60, random.integers(0, 20))  # Some batches have too many rows.
        assert np.array_equal(cached.lookup(ids).spread(), other.lookup(ids).spread())
        push(random.choice([cached, other]), random.integers(0, 60, 5), moved)
    assert looked_up(cached, np.arange(20), moved)[1] == 20 * (8 + ROW_BYTES)


def test_a_step_takes_rows_of_the_cache(connection, name):
    cached, _ = tables(connection, name, read=sc.Read(cache="device"))

    @sc.step
    def total(rows):
        return rows.spread().sum()

    for count in (9, 12, 16, 11):
        rows = cached.lookup(np.arange(20) % count)
        assert isinstance(rows.values, jax.Array) and total(rows) == 0
    assert total.stats().compiles == 1


@pytest.mark.parametrize(
    "options",
    [
        {"read": "device"},
        {"cache_rows": 10},
        {"read": sc.Read(cache="device"), "cache_rows": 0},
        {"read": sc.Read(cache="device"), "dtype": np.float64},
    ],
    ids=str,
)
def test_options_without_effect_are_refused(connection, name, options):
    with pytest.raises(OptionError):
        connection.table(name, 10, (4,), **options)


# ---- against a model -----------------------------------------------------------------------------


class Rows:
    """A host's rows: each is its number of updates."""

    def __init__(self, count):
        self.values, self.versions = np.zeros((count, 1)), np.zeros(count, int)
        self.number, self.epoch, self.asked = 0, 1, []

    def update(self, ids):
        self.number += 1
        self.values[ids] += 1
        self.versions[ids] = self.number

    def fetch(self, ids, compared, epochs):
        self.asked = ids.tolist()
        is_sent = (self.versions[ids] > compared) | (epochs != self.epoch)
        now = (np.full(ids.size, each) for each in (self.number, self.epoch))
        return *now, is_sent, self.values[ids[is_sent]]


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_no_copy_is_older_than_allowed(steps):
    random, host = np.random.default_rng(steps), Rows(40)
    policy = sc.Read(cache="device", max_staleness=steps)
    cache, before, own = RowCache(policy, 16, (1,), np.dtype("float32")), [], np.zeros(40)
    for number in range(400):
        before.append(host.values[:, 0].copy())
        ids = np.unique(random.zipf(1.3, 10) % 40)
        found, _ = cache.lookup(ids, 16, host.fetch)
        found = np.asarray(found)[:, 0]
        assert not found[ids.size :].any()
        oldest = np.maximum(before[max(0, number - steps)], own)[ids]
        assert (found[: ids.size] >= oldest).all() and (found[: ids.size] <= before[-1][ids]).all()
        if number % 3 == 0:
            updated = np.unique(random.integers(0, 40, 6))
            host.update(updated)
            if number % 2:
                cache.invalidate(updated)
                own[updated] = host.values[updated, 0]
        if number % 50 == 49:  # The host begins anew: its versions stand for other writes.
            host.epoch, host.number, host.versions = host.epoch + 1, 0, np.zeros(40, int)


def test_the_rows_looked_up_longest_ago_make_room():
    host, policy = Rows(10), sc.Read(cache="device", max_staleness=100)
    cache = RowCache(policy, 4, (1,), np.dtype("float32"))
    for ids, asked in (([0, 1], [0, 1]), ([2, 3], [2, 3]), ([0], None), ([4], [4]), ([0, 1], [1])):
        host.asked = None
        cache.lookup(np.array(ids), 8, host.fetch)
        assert host.asked == asked


def test_a_failed_lookup_changes_nothing():
    host, policy = Rows(4), sc.Read(cache="device", max_staleness=100)
    cache, ids = RowCache(policy, 4, (1,), np.dtype("float32")), np.arange(3)

    def lost(*_):
        raise ConnectionError

    with pytest.raises(ConnectionError):
        cache.lookup(ids, 8, lost)
    host.update(ids)
    assert np.asarray(cache.lookup(ids, 8, host.fetch)[0])[:3].tolist() == [[1], [1], [1]]
