"""A host and what it is sent: no process, no network."""

import numpy as np
import pytest

from stepcache.errors import ServerLostError, VariablesError
from stepcache.serving.host import Host
from stepcache.serving.messages import BlockLayout, JoinRequest, ReadRequest, WriteRequest, Written
from tests.serving.network import Block, MemoryTables, Network, Weighted, client

TYPES = [("w", [300], "float32"), ("few", [3], "bfloat16"), ("count", [2], "int32")]
LAYOUT = BlockLayout(TYPES)


@pytest.fixture
def host():
    host = Host(1, Block, Weighted, MemoryTables())
    host.handle(JoinRequest("me", "", 1), None)
    zeros = np.zeros(LAYOUT.size_bytes, np.uint8)
    create = WriteRequest("me", 1, 1, "params", "create", types=TYPES)
    assert isinstance(host.handle(create, zeros)[0], Written)
    return host


def write(host, payload, mode="add"):
    number = host.state().applied["me"].sequence + 1
    return host.handle(WriteRequest("me", number, 1, "params", mode), payload)[0]


def test_blocks_of_another_size_are_refused(host):
    size = LAYOUT.size_bytes
    for other in (0, 1, size - 1, size + 64, 1 << 20):
        assert write(host, np.zeros(other, np.uint8)).kind == "type"
    assert not host.state().variables["params"].value.data.any()


def test_modes_and_reads_that_are_none_are_refused(host):
    assert write(host, np.zeros(LAYOUT.size_bytes, np.uint8), "eval").kind == "malformed"
    reply, _ = host.handle(ReadRequest(["params"], [0, 0]), None)
    assert reply.kind == "malformed"


@pytest.mark.filterwarnings("error")
def test_any_bytes_of_the_right_size_are_an_update(host):
    """They may be wrong, as any update may be: NaNs, or numbers out of all bounds."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        noise = rng.integers(0, 256, LAYOUT.size_bytes, np.uint8)
        with np.errstate(all="ignore"):  # Of the sum.
            assert isinstance(write(host, noise), Written)


def test_only_a_write_that_is_done_or_kept_counts():
    network, kept = Network(0, faults=0.0), []
    each, layout = client(network), BlockLayout([("w", [9], "float32")])
    zeros = [np.zeros(9, np.float32)]
    each.write("params", "create", layout, zeros)

    def push(mode):
        kept.append(False)
        return each.write("params", mode, layout, zeros, on_kept=lambda: kept.append(True))

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
