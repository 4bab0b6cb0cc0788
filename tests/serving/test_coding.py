"""Coded blocks: what a host does with them, and error feedback. No process, no network."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from stepcache.errors import ServerLostError, VariablesError
from stepcache.serving.coding import Coding, ErrorFeedback
from stepcache.serving.host import Host
from stepcache.serving.messages import (
    JoinRequest,
    MalformedMessageError,
    ReadRequest,
    Values,
    WriteRequest,
    Written,
)
from stepcache.variables.wire import BLOCK
from tests.serving.network import Block, MemoryTables, Network, Weighted, client

SIZE = 3 * BLOCK + 40
TYPES = [("w", [SIZE], "float32"), ("few", [3], "float32"), ("count", [2], "int32")]
NUMBERS = st.floats(-1000, 1000, width=32, allow_subnormal=False)  # XLA takes those for zero.
numbers = itertools.count(1)


def value(seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=SIZE).astype(np.float32), np.ones(3, np.float32), np.arange(2)]


def block_of(coding, leaves):
    block = Block(coding.layout.size_bytes)
    coding.layout.fill(block.data, leaves)
    return block.data


@pytest.fixture
def host():
    host, raw = Host(1, Block, Weighted, MemoryTables()), Coding(TYPES)
    host.handle(JoinRequest("me", "", 1), None)
    create = WriteRequest("me", next_number(host), 1, "params", "create", types=TYPES)
    assert isinstance(host.handle(create, block_of(raw, value()))[0], Written)
    return host


def next_number(host):
    return host.state().applied["me"].sequence + 1


def write(host, payload, mode="add", wire=""):
    row = ("me", next_number(host), 1, "params", mode)
    return host.handle(WriteRequest(*row, wire=wire), payload)[0]


def read(host, *wires):
    reply, blocks = host.handle(ReadRequest(["params"], [0], True, [*wires]), None)
    return reply, blocks


def bytes_of(host):
    return host.state().variables["params"].value.data.copy()


# ---- a host --------------------------------------------------------------------------------------


def step_of(wire, largest):
    return largest / 254 if wire == "int8" else largest / 256


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_a_version_is_coded_once_for_all_readers(host, wire):
    coding = Coding(TYPES, wire)
    (first,), (second,) = read(host, wire)[1], read(host, wire)[1]
    assert first is second and first.data.size == coding.layout.size_bytes
    w, few, count = coding.decode(first.data)
    assert 0 < np.abs(w - value()[0]).max() <= step_of(wire, np.abs(value()[0]).max())
    assert np.array_equal(few, np.ones(3)) and np.array_equal(count, [0, 1])
    write(host, block_of(Coding(TYPES), [np.ones(SIZE), np.ones(3), np.ones(2)]))
    (third,) = read(host, wire)[1]
    assert third is not first and coding.decode(third.data)[2][0] == 1
    assert coding.decode(first.data)[2][0] == 0  # Whoever has it reads on.
    (raw,) = read(host)[1]
    assert raw.data.size == Coding(TYPES).layout.size_bytes


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_a_coded_update_is_added(host, wire):
    coding, update = Coding(TYPES, wire), value(1)
    write(host, block_of(coding, coding.encode(update)), wire=wire)
    (block,) = read(host)[1]
    found = Coding(TYPES).decode(block.data)
    sums = [old + new for old, new in zip(value(), update, strict=True)]
    assert np.abs(found[0] - sums[0]).max() <= step_of(wire, np.abs(update[0]).max()) * 1.001
    assert np.array_equal(found[1], sums[1]) and np.array_equal(found[2], sums[2])


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_coded_blocks_of_another_size_are_refused(host, wire):
    before, coding = bytes_of(host), Coding(TYPES, wire)
    sizes = [0, 1, coding.layout.size_bytes - 1, coding.layout.size_bytes + 64, 1 << 20]
    for size in [*sizes, Coding(TYPES).layout.size_bytes]:
        assert write(host, np.zeros(size, np.uint8), wire=wire).kind == "type"
    assert np.array_equal(bytes_of(host), before)


def test_wires_that_are_none_are_refused(host):
    before, coding = bytes_of(host), Coding(TYPES, "int8")
    payload = block_of(coding, coding.encode(value()))
    for wire in ("int4", "fp8", "x" * 1000):
        assert write(host, payload, wire=wire).kind == "malformed"
        assert read(host, wire)[0].kind == "malformed"
    for mode in ("assign", "eval"):
        assert write(host, payload, mode, "int8").kind == "malformed"
    assert read(host, "int8", "int8")[0].kind == "malformed"
    assert np.array_equal(bytes_of(host), before)


@pytest.mark.filterwarnings("error")
def test_any_bytes_of_the_right_size_are_an_update(host):
    """They may be wrong, as any update may be: NaNs, or numbers out of all bounds."""
    rng = np.random.default_rng(0)
    for wire in ("bf16", "int8"):
        for _ in range(50):
            coding = Coding(TYPES, wire)
            noise = rng.integers(0, 256, coding.layout.size_bytes, np.uint8)
            with np.errstate(all="ignore"):  # Of the sum.
                assert isinstance(write(host, noise, wire=wire), Written)
            assert isinstance(read(host, wire)[0], Values)


def test_there_is_no_such_coding():
    with pytest.raises(MalformedMessageError, match="unknown wire"):
        Coding(TYPES, "zip")


@pytest.mark.parametrize("size", [1, BLOCK, 300 * BLOCK + 1])
def test_a_value_in_chunks_is_coded_as_in_one(size):
    coding = Coding([("w", [size, 3], "float32")], "int8")
    values = np.random.default_rng(0).normal(size=(size, 3)).astype(np.float32)
    data = block_of(coding, coding.encode([values]))
    arrays = ErrorFeedback(coding).encode([jnp.asarray(values)])[0]
    (once,), (again,) = coding.decode(block_of(coding, arrays)), coding.decode(data)
    np.testing.assert_allclose(once, again, rtol=1e-6, atol=1e-6)


# ---- error feedback ------------------------------------------------------------------------------


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("place", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize("wire", ["bf16", "int8"])
@given(
    updates=st.lists(arrays.arrays(np.float32, BLOCK + 9, elements=NUMBERS), min_size=1, max_size=9)
)
def test_what_was_sent_is_the_sum_of_the_updates_but_for_one_rounding(place, wire, updates):
    coding = Coding([("w", [BLOCK + 9], "float32")], wire)
    feedback = ErrorFeedback(coding)
    sent, wanted, largest = 0.0, 0.0, 0.0
    for update in updates:
        encoded, left = feedback.encode([place(update)])
        feedback.keep(left)
        sent = sent + coding.decode(block_of(coding, encoded))[0].astype(np.float64)
        wanted = wanted + update.astype(np.float64)
        largest = max(largest, np.abs(update).max())
    float32 = len(updates) * 1e-6 * largest  # What float32 rounds itself.
    np.testing.assert_allclose(sent + np.asarray(left[0]), wanted, atol=float32)
    # The last update, with what was left out before it, is not twice as large as the largest.
    assert np.abs(sent - wanted).max() <= 2 * step_of(wire, largest) + float32


def test_small_updates_beside_large_ones_arrive():
    coding = Coding([("w", [BLOCK], "float32")], "int8")
    feedback, sent = ErrorFeedback(coding), 0.0
    update = np.full(BLOCK, 0.001, np.float32)
    update[0] = 1
    for _ in range(1000):
        encoded, left = feedback.encode([update])
        feedback.keep(left)
        sent = sent + coding.decode(block_of(coding, encoded))[0]
    assert np.array_equal(
        coding.decode(block_of(coding, coding.encode([update])))[0][1:], [0] * 255
    )
    np.testing.assert_allclose(sent[1:], 1, atol=2 / 254)


@pytest.mark.parametrize("place", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_an_update_that_is_not_finite_is_not_kept(place):
    coding = Coding([("w", [BLOCK], "float32")], "int8")
    feedback, update = ErrorFeedback(coding), np.ones(BLOCK, np.float32)
    update[5] = np.nan
    encoded, left = feedback.encode([place(update)])
    feedback.keep(left)
    assert np.isnan(coding.decode(block_of(coding, encoded))[0]).all()
    encoded, _ = feedback.encode([place(np.ones(BLOCK, np.float32))])
    np.testing.assert_allclose(coding.decode(block_of(coding, encoded))[0], 1)


def test_a_narrow_value_is_left_out_in_float32():
    coding = Coding([("w", [BLOCK], "bfloat16")], "int8")
    feedback, sent = ErrorFeedback(coding), 0.0
    update = jnp.full(BLOCK, 0.7, jnp.bfloat16).at[0].set(100)
    for _ in range(50):
        encoded, left = feedback.encode([update])
        feedback.keep(left)
        sent = sent + coding.decode(block_of(coding, encoded))[0].astype(np.float64)
    np.testing.assert_allclose(sent, 50 * np.asarray(update, np.float64), atol=1)


# ---- which writes count --------------------------------------------------------------------------


def test_only_a_write_that_is_done_or_kept_counts():
    network, kept = Network(0, faults=0.0), []
    each, coding = client(network), Coding([("w", [BLOCK], "float32")], "int8")
    zeros = [np.zeros(BLOCK, np.float32)]
    raw = Coding([("w", [BLOCK], "float32")])
    each.write("params", "create", raw.layout, zeros)

    def push(mode):
        arrays = coding.encode(zeros)
        kept.append(False)
        options = {"wire": "int8", "on_kept": lambda: kept.append(True)}
        return each.write("params", mode, coding.layout, arrays, **options)

    push("add")
    with pytest.raises(VariablesError, match="without an optimizer"):
        push("apply")
    request = each._transport.request
    each._transport.request = lambda *_: None
    for _ in range(2):
        with pytest.raises(ServerLostError):
            push("add")  # It is sent later.
    each._transport.request = request
    assert kept == [False, True, False, False, True, False, True]
    assert each.read(["params"], [0])[0][0].number == 3
