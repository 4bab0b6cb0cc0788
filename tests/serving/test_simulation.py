"""The state machine and its clients, over a network that loses, doubles, delays and reorders."""

import itertools
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stepcache.errors import ServerLostError, VariablesError
from stepcache.serving.held import LastWrite
from stepcache.serving.host import Host
from stepcache.serving.messages import BlockLayout, SnapshotRequest, WriteRequest
from stepcache.serving.row_optimizers import RowOptimizer
from stepcache.serving.tables import TableType
from tests.serving.network import Killed, Network, check_reads, client

WRITES = 64
NAMES = ("a", "b")
TYPES = [("counts", [WRITES], "float32")]
LAYOUT = BlockLayout(TYPES)


def create(each, name):
    each.create(name, "create", LAYOUT, [np.zeros(WRITES)])


def counts(each, name):
    versions, blocks = each.read([name], [0])
    found = LAYOUT.views(blocks[0])[0].copy()
    return found, versions[0]


def one_hot(number):
    update = np.zeros(WRITES, np.float32)
    update[number] = 1
    return update


def run(network, is_slow=False):
    """Some clients that push, read, and are killed. What a slow host does not confirm is kept.

    Returns the counts of each variable, which writes of it were acknowledged, and which were begun.
    """
    random = network.random
    clients = [client(network) for _ in range(3)]
    for name in NAMES:
        for each in clients:
            create(each, name)
    network.is_slow = is_slow
    begun = {name: set() for name in NAMES}
    acknowledged = {name: set() for name in NAMES}
    seen = {}
    for number in range(WRITES):
        name, index = random.choice(NAMES), random.randrange(len(clients))
        each = clients[index]
        if random.random() < 0.1:
            each._transport.is_killed = True
        begun[name].add(number)
        try:
            version = each.write(name, "add", LAYOUT, [one_hot(number)])
            acknowledged[name].add(number)
            seen.setdefault((index, name), set()).add(number)
            if random.random() < 0.5:
                found, now = counts(each, name)
                own = seen[index, name]
                assert all(found[own_write] == 1 for own_write in own), "its own write is missing"
                assert now.epoch > version.epoch or now.number >= version.number
        except ServerLostError:
            acknowledged[name].add(number)
            seen.setdefault((index, name), set()).add(number)
        except Killed:
            # What no snapshot has of its writes is nobody's any more.
            for of_it, name_of in [key for key in seen if key[0] == index]:
                acknowledged[name_of] -= seen.pop((of_it, name_of))
            clients[index] = client(network)
    network.faults = 0.0
    found = {name: counts(clients[0], name)[0] for name in NAMES}
    for each in clients:  # Each has its writes repeated if the host does not have them.
        for name in NAMES:
            each.write(name, "add", LAYOUT, [np.zeros(WRITES)])
    found = {name: counts(clients[0], name)[0] for name in NAMES}
    return found, acknowledged, begun


def check(network, *how):
    found, acknowledged, begun = run(network, *how)
    for name in NAMES:
        assert found[name].max() <= 1, f"{name}: a write was done twice"
        done = {int(number) for number in np.flatnonzero(found[name])}
        assert done <= begun[name], f"{name}: a write of another variable"
        assert acknowledged[name] <= done, f"{name}: {acknowledged[name] - done} are lost"
    check_reads(network)


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("block", range(4))
def test_writes_are_done_exactly_once(block):
    for seed in range(block * 25, block * 25 + 25):
        check(Network(seed))


@pytest.mark.slow
@pytest.mark.parametrize("block", range(100))
def test_writes_are_done_exactly_once_for_10_000_seeds(block):
    for seed in range(1000 + block * 100, 1000 + block * 100 + 100):
        check(Network(seed))


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("block", range(4))
def test_writes_that_were_not_confirmed_in_time_are_done_exactly_once(block):
    for seed in range(block * 25, block * 25 + 25):
        check(Network(seed, faults=0.5), True)


def test_there_are_crashes_and_losses():
    network = Network(7)
    run(network)
    assert network.crashes > 3 and len(network.snapshots) > 10
    assert network.image is not None


@pytest.mark.parametrize("seed", range(20))
def test_what_was_flushed_is_there_after_a_loss_of_power(seed):
    network = Network(seed)
    each = client(network)
    create(each, "a")
    for number in range(WRITES):
        each.write("a", "add", LAYOUT, [one_hot(number)])
        if number % 8 == 7:
            each.flush()
            network.lose_power()
            assert counts(each, "a")[0].sum() == number + 1


def check_replaced_once(network):
    """Updates that follow the replacement have the weight of the new optimizer, earlier ones not.

    The state has counted each update once.
    """
    random = network.random
    clients = [client(network) for _ in range(3)]
    for each in clients:
        each.create("a", "create", LAYOUT, [np.zeros(WRITES)], rule=b"1")
    begun, acknowledged, replaced = set(), {}, random.randrange(WRITES)
    for number in range(WRITES):
        if number == replaced:
            row = ("a", "replace optimizer", BlockLayout([]), [])
            clients[0].write(*row, rule=b"2")
        index = random.randrange(len(clients))
        clients[index]._transport.is_killed = index > 0 and random.random() < 0.1
        begun.add(number)
        try:
            clients[index].write("a", "apply", LAYOUT, [one_hot(number)])
            acknowledged[number], clients[index]._transport.is_killed = index, False
            if random.random() < 0.5:
                counts(clients[index], "a")
        except Killed:
            acknowledged = {key: other for key, other in acknowledged.items() if other != index}
            clients[index] = client(network)
    network.faults = 0.0
    for each in clients:  # Each has its writes repeated if the host does not have them.
        each.write("a", "apply", LAYOUT, [np.zeros(WRITES)])
    found, _ = counts(clients[0], "a")
    done = {int(number) for number in np.flatnonzero(found)}
    assert acknowledged.keys() <= done <= begun
    for number in done:  # What was never confirmed may have come late.
        weight = 1 if number < replaced else 2
        assert found[number] == weight or (number < replaced and number not in acknowledged)
    count = network.host.state().variables["a"].state.data[:8].view(np.int64)
    assert count == len(done) + len(clients)
    check_reads(network)


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("block", range(4))
def test_an_optimizer_is_replaced_once(block):
    for seed in range(block * 25, block * 25 + 25):
        check_replaced_once(Network(seed))


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_an_optimizer_is_replaced_once_for_2_000_seeds(block):
    for seed in range(1000 + block * 100, 1000 + block * 100 + 100):
        check_replaced_once(Network(seed))


TABLE = TableType(WRITES, [2], "float64", 0.0, 0, RowOptimizer())


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("block", range(4))
def test_rows_are_updated_exactly_once(block):
    for seed in range(block * 10, block * 10 + 10):
        network = Network(seed)
        random = network.random
        clients = [client(network) for _ in range(3)]
        for each in clients:
            row = ("table", "create table", BlockLayout([]), [])
            each.create(*row, rule=TABLE.packed())
        expected = np.zeros(WRITES)
        for _ in range(WRITES):
            ids = np.array(sorted(random.sample(range(WRITES), 5)))
            types = TABLE.update_layout(5).types
            each = random.choice(clients)
            each.write("table", "rows", BlockLayout(types), [ids, np.ones((5, 2))])
            expected[ids] += 1
            if random.random() < 0.3:
                _, data = each.rows("table", ids)
                assert np.array_equal(TABLE.layout(5).views(data)[0][:, 0], expected[ids])
        network.faults = 0.0
        _, data = clients[0].rows("table", np.arange(WRITES))
        assert np.array_equal(TABLE.layout(WRITES).views(data)[0][:, 1], expected)


class WithoutNumbers(Host):
    """Does each write that arrives."""

    def _write(self, request, payload):
        self._applied[request.client] = LastWrite(request.sequence - 1)
        return super()._write(request, payload)


class Forgetful(Host):
    """Says that everything is in a snapshot."""

    def _join(self, request):
        joined = super()._join(request)
        self.saved[request.client] = joined.applied
        return joined

    def _write(self, request: WriteRequest, payload):
        self.saved[request.client] = request.sequence
        return super()._write(request, payload)


class InPlace(Host):
    """Adds to blocks that readers have."""

    def _do(self, request, payload):
        held = self._held.get(request.name)
        if request.mode == "add" and held is not None:
            (old,), (update,) = held.layout.views(held.value.data), held.layout.views(payload)
            old += update
            return False
        return super()._do(request, payload)


@pytest.mark.parametrize("broken", [WithoutNumbers, Forgetful, InPlace])
def test_a_broken_host_is_found(broken):
    found = 0
    for seed in range(40):
        try:
            check(Network(seed, broken))
        except (AssertionError, VariablesError):
            found += 1
    assert found > 10


def test_what_an_older_snapshot_does_not_have_is_counted():
    lost = 0
    for seed in range(60):
        network = Network(seed)
        run_until_lost(network)
        lost += network.lost
    assert lost


def run_until_lost(network):
    each = client(network)
    create(each, "a")
    each.flush()
    network.snapshots = network.snapshots[-1:]
    network.old_snapshots = True
    for number in range(WRITES):
        each.write("a", "add", LAYOUT, [one_hot(number)])
    network.faults = 0.0
    found, _ = counts(each, "a")
    assert found.max() <= 1
    assert WRITES - found.sum() <= network.lost


@pytest.mark.parametrize("others", ["are killed", "go on"])
def test_a_flush_is_for_the_host_that_has_restarted_meanwhile(others):
    """That one may never come to the moment of the earlier one, or have come to it before."""
    network = Network(0, faults=0.0)
    writer, other = client(network), client(network)
    create(writer, "a")
    network.snapshot()
    for number in range(3):
        other.write("a", "add", LAYOUT, [one_hot(number)])
    writer.write("a", "add", LAYOUT, [one_hot(7)])
    transport, deliver, pause = writer._transport, network.deliver, writer._transport.pause

    def crash_after_the_reply(message, payload):
        reply = deliver(message, payload)
        if isinstance(message, SnapshotRequest):
            network.deliver = deliver
            if others == "are killed":
                network.clients.remove(other)
            network.crash()
            network.asked.clear()  # The host that was asked is no more.
            if others == "go on":
                network.host.waiting_for.clear()  # It has waited for the writer long enough.
                for number in range(10, 20):
                    other.write("a", "add", LAYOUT, [one_hot(number)])
                network.snapshot()
        return reply

    pauses = iter(range(20))  # It must not wait for ever.

    def pause_again():
        next(pauses)
        pause()

    network.deliver, transport.pause = crash_after_the_reply, pause_again
    writer.flush()
    network.clients.clear()
    network.lose_power()
    assert counts(client(network), "a")[0][7] == 1


def test_what_one_has_created_outlives_it_and_the_host():
    network = Network(0, faults=0.0)
    creator, other = client(network), client(network)
    create(creator, "a")
    other.write("a", "add", LAYOUT, [one_hot(3)])
    network.clients.remove(creator)
    network.crash()
    assert counts(other, "a")[0].tolist() == one_hot(3).tolist()


def test_what_was_seen_and_not_confirmed_is_seen_again():
    network = Network(0, faults=0.0)
    writer, reader = client(network), client(network)
    create(writer, "a")
    writer.write("a", "add", LAYOUT, [one_hot(1)])
    transport, deliver = writer._transport, network.deliver

    def crash_before_the_reply(message, payload):
        reply = deliver(message, payload)
        if isinstance(message, WriteRequest):
            network.deliver = deliver
            transport.is_busy = False  # Another thread of it looks after the host meanwhile.
            assert counts(reader, "a")[0][2] == 1
            network.crash()
            assert counts(reader, "a")[0].tolist() == (one_hot(1) + one_hot(2)).tolist()
        return reply

    network.deliver = crash_before_the_reply
    writer.write("a", "add", LAYOUT, [one_hot(2)])
    assert counts(reader, "a")[0].tolist() == (one_hot(1) + one_hot(2)).tolist()


def carry(each, name, value, base):
    """Assigns a value that was computed from another one, as a step does with what it carries."""
    return each.write(name, "assign", LAYOUT, [np.full(WRITES, value)], base=base.token)


@pytest.mark.sample(every=8)
@pytest.mark.parametrize("seed", range(40))
def test_the_only_one_that_carries_never_has_a_conflict(seed):
    network = Network(seed)
    each = client(network)
    version = each.create("a", "create", LAYOUT, [np.zeros(WRITES)])
    for step in range(1, WRITES):
        version = carry(each, "a", step, version)
        found, now = counts(each, "a")
        assert found[0] == step and now.token == version.token


@pytest.mark.sample(every=8)
@pytest.mark.parametrize("seed", range(40))
def test_of_two_that_carry_none_writes_over_the_other(seed):
    network = Network(seed)
    clients = [client(network) for _ in range(2)]
    for each in clients:
        create(each, "a")
    clients[0].flush()
    done, conflicts = 0, 0
    for _ in range(40):
        read = [counts(each, "a") for each in clients]
        order = network.random.sample(range(2), 2)
        for index in order:
            (value, *_), version = read[index]
            try:
                carry(clients[index], "a", value + 1, version)
                done += 1
            except VariablesError as error:
                assert "another process has written" in str(error)
                conflicts += 1
    assert conflicts and done + conflicts == 80
    network.faults = 0.0
    for _ in range(2):  # Each repeats what the host does not have.
        found = [counts(each, "a")[0][0] for each in clients]
    assert found == [done, done]


@pytest.mark.sample(every=8)
@pytest.mark.parametrize("seed", range(40))
def test_a_write_confirmed_after_those_of_others_is_not_taken_for_the_newest(seed):
    """The carried value and what others push meanwhile both count, as a step sees them."""
    network = Network(seed)
    carrying, pushing = client(network), client(network)
    create(carrying, "a")
    carrying.flush()
    stir, pushes = network.stir, []

    def stir_and_push():
        stir()
        if network.random.random() < 0.3 and not network.host.waiting_for:
            network.stir, faults, network.faults = stir, network.faults, 0.0
            pushing.write("a", "add", LAYOUT, [one_hot(0)])
            pushes.append(pushing)
            network.stir, network.faults = stir_and_push, faults

    network.stir = stir_and_push
    (kept, version), carried = counts(carrying, "a"), 0
    while carried < 40:
        (current,), blocks = carrying.read(["a"], [version.token])
        if blocks[0] is not None:
            kept = LAYOUT.views(blocks[0])[0].copy()
        try:
            row = ("a", "assign", LAYOUT, [kept + one_hot(1)])
            version = carrying.write(*row, base=current.token)
            kept, carried = kept + one_hot(1), carried + 1
        except VariablesError as error:
            assert "another process has written" in str(error)
            version = current
    network.stir, network.faults = stir, 0.0
    found, _ = counts(carrying, "a")
    assert found[:2].tolist() == [len(pushes), carried]


@pytest.mark.parametrize("first", [0, 1])
def test_an_assignment_that_comes_again_keeps_the_updates_that_followed_it(first):
    network = Network(0, faults=0.0)
    clients = assigning, pushing = client(network), client(network)
    for each in clients:
        create(each, "a")
    pushing.write("a", "add", LAYOUT, [one_hot(0)])
    assigning.write("a", "assign", LAYOUT, [one_hot(1)])
    pushing.write("a", "add", LAYOUT, [one_hot(2)])
    _, version = counts(pushing, "a")
    network.crash()
    clients[first].keep(1e6)
    network.snapshot()
    network.crash()
    for index in (1 - first, first):
        clients[index].keep(1e6)
    found, again = counts(pushing, "a")
    assert found.tolist() == (one_hot(1) + one_hot(2)).tolist()
    assert again.token == version.token


@pytest.mark.parametrize("first", [0, 1])
def test_an_assignment_does_not_undo_that_an_optimizer_was_replaced(first):
    network = Network(0, faults=0.0)
    clients = replacing, assigning = client(network), client(network)
    for each in clients:
        each.create("a", "create", LAYOUT, [np.zeros(WRITES)], rule=b"1")
    assigning.write("a", "apply", LAYOUT, [one_hot(0)])
    replacing.write("a", "replace optimizer", BlockLayout([]), [], rule=b"2")
    assigning.write("a", "assign", LAYOUT, [one_hot(1)])
    assigning.write("a", "apply", LAYOUT, [one_hot(2)])
    expected = one_hot(1) + 2 * one_hot(2)
    for _ in range(2):
        assert counts(assigning, "a")[0].tolist() == expected.tolist()
        network.crash()
        for index in (first, 1 - first):
            clients[index].keep(1e6)


def test_a_new_write_is_not_taken_for_one_before_the_crash():
    network = Network(0, faults=0.0)
    assigning, pushing = client(network), client(network)
    for each in (assigning, pushing):
        create(each, "a")
    assigning.flush()
    counts(pushing, "a")  # It has joined, and has nothing to repeat.
    network.crash()
    assigning.write("a", "assign", LAYOUT, [one_hot(1)])
    pushing.write("a", "add", LAYOUT, [one_hot(2)])
    assert counts(assigning, "a")[0].tolist() == (one_hot(1) + one_hot(2)).tolist()


@pytest.mark.parametrize("mode", ["add", "assign"])
def test_writes_that_were_not_confirmed_are_sent_with_the_next_request(mode):
    """Also those that take more than half of what may be kept; and by the end of a client."""
    network = Network(0, faults=0.0)
    writer, other = client(network), client(network)
    create(writer, "a")
    writer.flush()
    writer._max_unsaved_bytes = LAYOUT.size_bytes * (100 if mode == "add" else 1.5)
    carried = writer._transport.carried
    for turn in range(2):
        writer._transport.carried = lambda *_: None
        for number in range(2 if mode == "add" else 1):
            with pytest.raises(ServerLostError):
                writer.write("a", mode, LAYOUT, [one_hot(2 * turn + number)])
        writer._transport.carried = carried
        if turn == 0:
            writer.write("a", mode, LAYOUT, [one_hot(7)])
            writer.flush()
    writer.close()
    expected = one_hot([0, 1, 2, 3, 7]) if mode == "add" else one_hot(2)
    assert counts(other, "a")[0].tolist() == expected.tolist()


def test_ctrl_c_at_any_line_of_a_write_loses_no_other():
    line = 1
    while interrupted_at(line):
        line += 1
    assert line > 20


def interrupted_at(wanted):
    """Interrupts a write at a line of the client. Returns whether there are so many."""
    network, lines = Network(0, faults=0.0), itertools.count(1)
    each = client(network)
    create(each, "a")
    each.write("a", "add", LAYOUT, [one_hot(0)])

    def trace(frame, event, _):
        if Path(frame.f_code.co_filename).name not in ("client.py", "unsaved.py"):
            return None
        if event == "line" and next(lines) == wanted:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    try:
        sys.settrace(trace)
        each.write("a", "add", LAYOUT, [one_hot(1)])
        was_interrupted = False
    except KeyboardInterrupt:
        was_interrupted = True
    finally:
        sys.settrace(before)
    each._own_lock = threading.RLock()  # The trace may interrupt its release, Ctrl-C cannot.
    for number in range(2, 5):
        each.write("a", "add", LAYOUT, [one_hot(number)])
    network.crash()
    found = counts(each, "a")[0]
    assert found[[0, 2, 3, 4]].tolist() == [1, 1, 1, 1] and found[1] <= 1, wanted
    return was_interrupted


def test_a_refused_write_that_arrives_once_more_is_not_taken_for_the_next():
    network = Network(0, faults=0.0)
    writer, other = client(network), client(network)
    create(writer, "b")
    deliver, sent = network.deliver, []

    def keep_a_copy(message, payload):
        if isinstance(message, WriteRequest):
            sent.append((message, payload.copy()))
        return deliver(message, payload)

    network.deliver = keep_a_copy
    for _ in range(2):
        with pytest.raises(VariablesError, match="it has no variables 'a'"):
            writer.write("a", "add", LAYOUT, [one_hot(1)])
    network.deliver = deliver
    create(other, "a")
    for message, payload in sent:
        deliver(message, payload)
    writer.write("a", "add", LAYOUT, [one_hot(2)])
    for message, payload in sent:
        deliver(message, payload)
    assert counts(writer, "a")[0].tolist() == one_hot(2).tolist()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_rows_that_are_assigned_again_keep_the_latest_values(order):
    network = Network(0, faults=0.0)
    clients = [client(network) for _ in range(2)]
    kind = TableType(WRITES, [2], "float64", 0.0, 0, RowOptimizer("assign"))
    for number, each in enumerate(clients):
        each.create("table", "create table", BlockLayout([]), [], rule=kind.packed())
        ids, types = np.array([number, 2]), kind.update_layout(2).types
        row = ("table", "rows", BlockLayout(types), [ids, np.full((2, 2), number + 1)])
        each.write(*row)
    network.crash()
    for index in order:
        clients[index].keep(1e6)
    _, data = clients[0].rows("table", np.arange(3))
    assert kind.layout(3).views(data)[0][:, 0].tolist() == [1, 2, 2]


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_the_last_optimizer_of_a_table_counts_in_whatever_order_writes_come_again(order, caplog):
    network = Network(0, faults=0.0)
    clients = [client(network) for _ in range(3)]
    modes = ["create table", "alter table", "alter table"]
    for each, mode, rate in zip(clients, modes, [0.0, 1.0, 2.0], strict=True):
        kind = replace(TABLE, optimizer=RowOptimizer("sgd", rate) if rate else TABLE.optimizer)
        each.write("table", mode, BlockLayout([]), [], rule=kind.packed())
    network.crash()
    for index in order:
        clients[index].keep(1e6)
    types = TABLE.update_layout(1).types
    clients[0].write("table", "rows", BlockLayout(types), [[3], np.ones((1, 2))])
    _, data = clients[0].rows("table", np.array([3]))
    assert TABLE.layout(1).views(data)[0].tolist() == [[-2, -2]] and not caplog.records
