"""One contract for the tiers that programs are kept in, memory and disk."""

import contextlib
import itertools
import random
import tempfile
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepcache.programs.memory import MemoryPrograms
from stepcache.storage.disk_store import DiskStore

BOUND = 8  # In units of size.


class Owner:
    """Uses programs."""

    def __init__(self, number):
        self.number = number


class Memory:
    """A memory tier of named payloads. Each name has an owner of its own, which never leaves."""

    def __init__(self):
        self._tier = MemoryPrograms(max_programs=1000, max_bytes=BOUND)
        self._owners = list(map(Owner, range(100)))

    def put(self, name, size, payload):
        # The cache never puts a key that is there; what replaces one comes after its release.
        self._tier.release(name)
        program = SimpleNamespace(size_bytes=size, payload=payload)
        self._tier.put(name, program, self._owners[name])

    def get(self, name):
        program = self._tier.get(name, self._owners[name])
        return program and program.payload

    def names(self):
        return {name for name in range(100) if self._tier.peek(name) is not None}

    def clear(self):
        return len(self._tier.clear())


class Disk:
    """A disk tier of named payloads; between any two uses passes more than a minute."""

    UNIT_BYTES = 1024

    def __init__(self, directory):
        minutes = itertools.count(1_000_000)
        self._tier = DiskStore(
            Path(directory), BOUND * self.UNIT_BYTES, clock=lambda: next(minutes) * 61.0
        )
        self._stored = {}
        self._tier.publish("program", "00", {}, random.Random(0).randbytes(512))
        self._overhead_bytes = self._tier.size_bytes() - 512
        self._tier.clear()

    def put(self, name, size, payload):
        # The file, with all that comes before the payload, has exactly that size.
        length = size * self.UNIT_BYTES - self._overhead_bytes
        self._stored[name] = (payload, random.Random(payload).randbytes(length))
        assert self._tier.publish("program", f"{name:02x}", {}, self._stored[name][1])

    def get(self, name):
        entry = self._tier.read("program", f"{name:02x}")
        if entry is None:
            return None
        payload, stored = self._stored[name]
        assert entry.payload == stored
        return payload

    def names(self):
        return {int(info.digest, 16) for info in self._tier.entries()}

    def clear(self):
        return self._tier.clear()


@contextlib.contextmanager
def opened(kind):
    if kind == "memory":
        yield Memory()
    else:
        with tempfile.TemporaryDirectory() as directory:
            yield Disk(directory)


@pytest.fixture(params=["memory", "disk"])
def tier(request):
    with opened(request.param) as tier:
        yield tier


def test_what_was_put_is_got(tier):
    tier.put(1, 2, "one")
    tier.put(2, 3, "two")
    assert (tier.get(1), tier.get(2)) == ("one", "two")


def test_a_miss_is_none(tier):
    assert tier.get(1) is None
    tier.put(1, 2, "one")
    assert tier.get(2) is None


def test_the_least_recently_used_leaves_first(tier):
    for name in (1, 2, 3):
        tier.put(name, 3, "payload")
    assert tier.names() == {2, 3}


def test_a_get_makes_it_recent(tier):
    tier.put(1, 4, "one")
    tier.put(2, 4, "two")
    tier.get(1)
    tier.put(3, 4, "three")
    assert tier.names() == {1, 3}


def test_a_listing_does_not_make_it_recent(tier):
    tier.put(1, 4, "one")
    tier.put(2, 4, "two")
    tier.names()
    tier.put(3, 4, "three")
    assert tier.names() == {2, 3}


def test_a_single_one_over_the_bound_is_kept_alone(tier):
    tier.put(1, 1, "one")
    tier.put(2, BOUND + 2, "two")
    assert tier.names() == {2} and tier.get(2) == "two"
    tier.put(3, 1, "three")
    assert tier.names() == {3}


def test_exactly_the_bound_fits(tier):
    tier.put(1, BOUND - 1, "one")
    tier.put(2, 1, "two")
    assert tier.names() == {1, 2}


def test_the_new_one_takes_the_place_of_the_old(tier):
    tier.put(1, 5, "old")
    tier.put(1, 3, "new")
    tier.put(2, 5, "two")
    assert tier.get(1) == "new" and tier.names() == {1, 2}


def test_clear(tier):
    tier.put(1, 2, "one")
    tier.put(2, 2, "two")
    assert tier.clear() == 2
    assert tier.get(1) is None and tier.names() == set()
    tier.put(1, 2, "one")
    assert tier.get(1) == "one"


NAMES = st.integers(0, 5)
ACTIONS = st.lists(st.tuples(NAMES, st.none() | st.integers(1, BOUND + 2)), max_size=25)


@pytest.mark.parametrize("kind", ["memory", "disk"])
@given(actions=ACTIONS)
def test_any_sequence_does_what_the_model_does(kind, actions):
    """Each action is a name and a size to put, or None to get."""
    model = OrderedDict()
    with opened(kind) as tier:
        for number, (name, size) in enumerate(actions):
            if size is None:
                assert tier.get(name) == model.get(name, (None, 0))[0]
                if name in model:
                    model.move_to_end(name)
                continue
            tier.put(name, size, number)
            model.pop(name, None)
            model[name] = (number, size)
            while len(model) > 1 and sum(size for _, size in model.values()) > BOUND:
                model.popitem(last=False)
            assert tier.names() == set(model)
