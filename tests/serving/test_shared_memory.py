"""Blocks that processes share: their memory is not used again while somebody reads it."""

import os
import warnings

import numpy as np
import pytest

from stepcache.serving import shared_memory
from stepcache.serving.shared_memory import CAN_SHARE, Opened, Pool
from tests.serving.servers import Child

pytestmark = pytest.mark.skipif(not CAN_SHARE, reason="the system shares no memory")
SIZES = [100_000, 20 << 20]  # Many in one file, and one.


def block(pool, size, value):
    made = pool.allocate(size)
    made.data[:] = value
    return made


@pytest.mark.parametrize("size", SIZES)
def test_memory_is_used_again(size):
    pool = Pool()
    places = {(each.place.inode, each.place.offset) for each in (pool.allocate(size),)}
    for _ in range(5):
        made = pool.allocate(size)
        places.add((made.place.inode, made.place.offset))
        del made
    assert len(places) == 1


@pytest.mark.parametrize("size", SIZES)
def test_memory_that_is_read_is_not_used_again(size):
    pool, opened = Pool(), Opened()
    first = block(pool, size, 7)
    place = first.place
    readers = [opened.locked(place), opened.locked(place)]
    del first
    for _ in range(2):
        others = [block(pool, size, 9) for _ in range(3)]
        assert all(each.place != place for each in others)
        assert (readers[-1] == 7).all()
        readers.pop()  # The other one still reads; then nobody does.
        del others
    assert pool.allocate(size).place == place or size == SIZES[0]
    held = [pool.allocate(size) for _ in range(4)]
    assert any(each.place == place for each in held)


READER = """
import sys, time
from stepcache.serving.shared_memory import Opened, Place
data = Opened().locked(Place(*map(int, sys.argv[1:])))
print(data[0], flush=True)
time.sleep(600)
"""


def test_what_a_killed_process_has_read_is_used_again(tmp_path):
    pool = Pool()
    first = block(pool, SIZES[1], 7)
    place = first.place
    row = [place.pid, place.descriptor, place.inode, place.offset, place.size_bytes]
    script = tmp_path / "reader.py"
    script.write_text(READER)
    reader = Child(tmp_path, script, *row)
    reader.wait_until(lambda: reader.printed()[0] == "7\n")
    del first
    held = [pool.allocate(SIZES[1]) for _ in range(3)]
    assert all(each.place != place for each in held)
    reader.kill()
    reader.end()
    assert pool.allocate(SIZES[1]).place == place


def test_a_forked_child_does_not_unlock_what_its_parent_reads():
    pool, opened = Pool(), Opened()
    first = block(pool, SIZES[1], 7)
    place, read = first.place, opened.locked(first.place)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns of threads.
        child = os.fork()
    if not child:
        del read
        os._exit(0)
    os.waitpid(child, 0)
    del first
    assert all(each.place != place for each in [pool.allocate(SIZES[1]) for _ in range(3)])
    assert (read == 7).all()


def test_a_part_of_a_block_keeps_it():
    pool, opened = Pool(), Opened()
    place = block(pool, SIZES[1], 7).place
    part = opened.locked(place)[64:128].view(np.float32).reshape(4, 4)
    before = part.copy()
    assert block(pool, SIZES[1], 9).place != place
    assert np.array_equal(part, before)


@pytest.mark.parametrize("size", SIZES)
def test_a_block_can_be_passed_on(size):
    """A third process opens it in one that has, though its owner is gone by then."""
    pool, opened = Pool(), Opened()
    first = block(pool, size, 7)
    place, held = opened.passed_on(first.place)
    assert (place.inode, place.offset) == (first.place.inode, first.place.offset)
    assert place.descriptor != first.place.descriptor
    del first
    assert (Opened().open(place) == 7).all()
    others = [block(pool, size, 9) for _ in range(3)]
    assert all(
        (each.place.inode, each.place.offset) != (place.inode, place.offset) for each in others
    )
    assert (held == 7).all()


def test_maps_keep_a_bounded_amount_of_memory(monkeypatch):
    monkeypatch.setattr(shared_memory, "_OPENED_BYTES", 50 << 20)
    opened = Opened()
    held = [block(Pool(), SIZES[1], value) for value in range(6)]
    read = [opened.open(each.place)[0] for each in held for _ in range(2)]
    assert read[::2] == read[1::2] == [*range(6)]
    assert len(opened._files) == 2
