"""What a plan says of a call is what the call does: bytes, routes, and who shares a transfer."""

import functools
import math
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import arrays_of, raw
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from moving import SHAPES, live_buffers, mesh_of, session, watching

import stepcache as sc
from stepcache.variables import transfer
from stepcache.variables.masters import InHostMemory, Reader
from stepcache.variables.plan import DEVICE_LINK, HOST_LINK, Plan, Transfer
from stepcache.variables.shares import HostLayout

# ---- predicted equals measured ---------------------------------------------------------------


class Arrivals:
    """Bytes of the shards of all arrays that `transfer` has put somewhere."""

    def __init__(self, patch):
        self.bytes = 0
        read, write = transfer.read, transfer.write
        counted_read = functools.wraps(read)(
            lambda packed, layout, *args, **kwargs: self._counted(
                read(packed, layout, *args, **kwargs), layout.on_device, layout
            )
        )
        patch.setattr(transfer, "read", counted_read)
        patch.setattr(
            transfer,
            "write",
            lambda packed, layout, meter: self._counted(
                write(packed, layout, meter), layout.on_host, layout
            ),
        )

        take = InHostMemory.take

        def counted_take(master, reader, meter):
            packed = take(master, reader, meter)
            if isinstance(packed.layout, HostLayout):  # Its program reads it.
                self._expect(packed, packed.layout.on_device)
            return packed

        patch.setattr(InHostMemory, "take", counted_take)

    def _expect(self, packed, buffers):
        for array, buffer, on_host in zip(
            packed.buffers, buffers, packed.layout.on_host, strict=True
        ):
            if on_host is not None:
                assert (array.shape, array.sharding.memory_kind) == (on_host.shape, "pinned_host")
                shard = math.prod(buffer.sharding.shard_shape(buffer.shape))
                self.bytes += shard * buffer.dtype.itemsize * len(buffer.sharding.device_set)

    def _counted(self, arrived, buffers, layout):
        arrays = getattr(arrived, "buffers", arrived)
        for array, buffer, on_host in zip(arrays, buffers, layout.on_host, strict=True):
            if on_host is not None:  # Random keys stay on the devices.
                assert array.shape == buffer.shape
                self.bytes += sum(shard.data.nbytes for shard in array.addressable_shards)
        return arrived


DTYPES = ("float32", "bfloat16", "int8", "bool", "complex64", "int32", "key", "weak")
SIZES = st.one_of(st.sampled_from([0, 1, 7, 8, 9, 64, 16_384, 20_001]), st.integers(0, 9000))


@st.composite
def leaves(draw):
    dtype = draw(st.sampled_from(DTYPES))
    if dtype == "weak":
        return 2.5
    shape = draw(st.sampled_from([(), (None,), (None, 3), (2, None), (8, None)]))
    shape = tuple(draw(SIZES) // (2 * len(shape) - 1) if n is None else n for n in shape)
    if dtype == "key":
        return jax.random.split(jax.random.key(0), shape) if math.prod(shape) < 9 else np.ones(2)
    return (np.arange(math.prod(shape)) % 5).astype(jnp.dtype(dtype)).reshape(shape)


@st.composite
def rules_for(draw, tree, mesh):
    """Rules that split some of the leaves over axes by which they divide."""
    rules = []
    for name, leaf in tree.items() if mesh is not None else ():
        shape = np.shape(leaf)
        axes = [axis for axis in mesh.shape if shape and shape[0] % mesh.shape[axis] == 0]
        if axes and draw(st.booleans()):
            rules.append((f"/{name}$", P(draw(st.sampled_from(axes)))))
    return rules


READS = st.sampled_from([sc.Read(), sc.Read(cache="device")])
MESHES = [*SHAPES, "8 explicit", "4x2 explicit"]


@settings(suppress_health_check=list(HealthCheck))
@given(st.data())
def test_predicted_bytes_are_the_bytes_that_move(data):
    """Over trees, meshes, placements and policies: what `explain` says before a call, what its
    event says after it, and the shards that arrived."""
    name = data.draw(st.sampled_from(MESHES), "mesh")
    trees = [
        {str(number): leaf for number, leaf in enumerate(data.draw(st.lists(leaves(), max_size=5)))}
        for _ in range(2)
    ]
    carried_step = sc.step(advance, carry="state")
    reading_step = sc.step(lambda more, state: advance(state))
    with pytest.MonkeyPatch.context() as patch, session(name), watching() as moved:
        arrivals = Arrivals(patch)
        made = []
        for tree in trees:
            rules = data.draw(rules_for(tree, mesh_of(name)), "rules")
            on_device = sc.Sharded(rules) if rules else sc.Replicated()
            placement = data.draw(st.sampled_from([sc.OnHost(on_device=on_device), on_device]))
            read = sc.Read() if placement is on_device else data.draw(READS, "read")
            made.append(sc.Variables(tree, placement=placement, read=read))
        assigned_bytes = 0
        for action in data.draw(st.text("wrba", min_size=1, max_size=5), "actions"):
            if action == "a":
                value, before = made[0].value, len(moved.calls)
                made[0].assign(value)
                planned = made[0]._master.plan_put("", Reader(None))
                assigned_bytes += sum(each.bytes for each in planned)
                assert moved.calls[before:] == [
                    dict(each.link_bytes) for each in planned if each.bytes
                ]
                continue
            step, args = {
                "w": (carried_step, (made[0], made[1])),
                "b": (carried_step, (made, None)),
                "r": (reading_step, (made[1], made[0])),
            }[action]
            explained = step.explain(*args)
            arrivals.bytes, before = 0, len(moved.calls)
            versions = [each.version for each in made]
            step(*args)
            assert explained.plan.bytes == arrivals.bytes
            assert explained.plan.bytes == explained.moved_bytes
            assert moved.calls[before:] == [explained.plan.link_bytes] * bool(arrivals.bytes)
            for planned in explained.plan.transfers:
                index = [each.name for each in made].index(planned.variable)
                writes = planned.route == "scatter"
                assert planned.version == (made[index].version if writes else versions[index])
        total = carried_step.stats().moved_bytes + reading_step.stats().moved_bytes
        assert total + assigned_bytes == moved.host_bytes + moved.device_bytes


def advance(state, more=None):
    def change(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x
        return ~x if x.dtype == bool else -x

    return jax.tree.map(change, state)


def test_the_gathering_program_copies_shares_from_the_host_and_nothing_else():
    """As XLA has it: its parameters in host memory are the bytes that cross the host's link."""
    with session("8"):
        tree = {"big": np.ones(100_003, np.float32), "few": np.ones(13, jnp.bfloat16)}
        hosted = sc.Variables(tree, placement=sc.OnHost())
        planned = sc.step(lambda state: state["few"]).explain(hosted).plan
    layout, buffers = hosted._master.host_layout, arrays_of(hosted)
    for program, side in (
        (layout.read.lower(buffers), 0),
        (layout.write.lower(layout.read(buffers)), 1),
    ):
        text = program.compile().as_text()
        signature = re.search(r"entry_computation_layout=\{(.*)->(.*)", text)
        in_host_memory = re.findall(r"(\w+)\[(\d+)\]\{0:[^}]*S\(5\)\}", signature[side + 1])
        widths = {"f32": 4, "bf16": 2}
        per_device = sum(widths[kind] * int(size) for kind, size in in_host_memory)
        assert per_device * 8 == planned.link_bytes[HOST_LINK] == 8 * (12_501 * 4 + 2 * 2)
        assert ("all-gather" in text) is (side == 0)


# ---- the lower bound -------------------------------------------------------------------------


V = 4 * 10_000  # Divides by 8 devices.


def read_often(mesh, read, steps=3, size=10_000, readers=1):
    """The bytes over the host's link, and between devices, of each of so many calls."""
    total = sc.step(lambda state: state.sum())
    with session(mesh), watching() as moved:
        hosted = sc.Variables(np.ones(size, np.float32), placement=sc.OnHost(), read=read)
        for _ in range(steps):
            for _ in range(readers):
                assert float(total(hosted)) == size
    calls = [(call.get(HOST_LINK, 0), call.get(DEVICE_LINK, 0)) for call in moved.calls]
    return calls


@pytest.mark.parametrize(("mesh", "devices"), [("1", 1), ("2", 2), ("8", 8), ("4x2", 8)])
def test_a_value_crosses_the_hosts_link_once_for_all_devices(mesh, devices):
    assert read_often(mesh, sc.Read()) == [(V, (devices - 1) * V)] * 3


def test_a_copy_on_the_device_moves_each_version_once():
    """However many steps and readers: the lower bound."""
    calls = read_often("8", sc.Read(cache="device"), steps=4, readers=3)
    assert calls == [(V, 7 * V)]
    total, bump = (
        sc.step(lambda state: state.sum()),
        sc.step(lambda state: state + 1, carry="state"),
    )
    with session("8"), watching() as moved:
        read = sc.Read(cache="device")
        hosted = sc.Variables(np.ones(10_000, np.float32), placement=sc.OnHost(), read=read)
        for _ in range(3):
            bump(hosted)
            assert float(total(hosted)) == float(total(hosted)) == 10_000 * (hosted.version + 1)
    assert moved.host_bytes == V + 3 * V, "one read, and what three writes brought back"


def test_padding_is_less_than_a_value_for_each_device_and_buffer():
    """Shares are equal, so the last of them may hold less than it moves."""
    for size in (1, 7, 9, 9_999, 10_001):
        ((host, between),) = read_often("8", sc.Read(), steps=1, size=size)
        padded = -(-size // 8) * 8
        assert host == 4 * padded < 4 * (size + 8)
        assert between == 8 * 4 * size - host


def test_a_write_moves_every_share_once():
    bump = sc.step(lambda state: state + 1, carry="state")
    with session("8"), watching() as moved:
        read = sc.Read(cache="device")
        hosted = sc.Variables(np.ones(10_001, np.float32), placement=sc.OnHost(), read=read)
        bump(hosted)
        bump(hosted)
    assert moved.calls[1] == {HOST_LINK: 4 * 10_008}


def test_resident_variables_move_nothing():
    bump = sc.step(lambda state: state + 1, carry="state")
    with session("8"), watching() as moved:
        resident = sc.Variables(np.ones(10_001, np.float32))
        planned = bump.explain(resident).plan
        bump(resident)
    assert moved.calls == [] and planned.bytes == 0 and planned.link_bytes == {}
    (only,) = planned.transfers
    assert (only.route, only.why) == ("none", "the master copy is there")


def test_explain_says_how_often_a_value_crosses():
    total = sc.step(lambda state: state.sum())
    for mesh, why in (
        ("1", "there is one device"),
        ("8", "the value crosses the host's link once, not 8 times"),
    ):
        with session(mesh):
            hosted = sc.Variables(np.ones(100_000, np.float32), placement=sc.OnHost())
            explained = total.explain(hosted)
        (only,) = explained.plan.transfers
        assert only.why == why and why in " ".join(str(explained).split())


def test_sums_over_a_plan():
    def transfer_of(*links):
        return Transfer("v", 0, "host", "devices", "gather", "why", (), links)

    plan = Plan(
        (transfer_of((HOST_LINK, 3), (DEVICE_LINK, 5)), transfer_of(), transfer_of((HOST_LINK, 4)))
    )
    assert plan.link_bytes == {HOST_LINK: 7, DEVICE_LINK: 5} and plan.bytes == 12
    assert plan.transfers[0].bytes == 8
    assert Plan().bytes == 0 and Plan().link_bytes == {}


# ---- canonicalization ------------------------------------------------------------------------


@pytest.mark.parametrize("cache", [None, "device"])
def test_two_arguments_of_one_call_share_a_transfer(cache):
    step = sc.step(lambda a, b, more: a.sum() + b.sum() + more["again"].sum())
    with session("8"), watching() as moved:
        read = sc.Read(cache=cache)
        hosted = sc.Variables(np.ones(10_000, np.float32), placement=sc.OnHost(), read=read)
        explained = step.explain(hosted, hosted, {"again": hosted})
        assert float(step(hosted, hosted, {"again": hosted})) == 30_000
    assert [call[HOST_LINK] for call in moved.calls] == [V]
    (shared,) = explained.plan.transfers
    assert shared.readers == ("a", "b", "more") and shared.bytes == V + 7 * V
    assert "for a and b and more" in " ".join(str(explained).split())


def test_a_carried_and_a_read_argument_share_a_transfer():
    step = sc.step(lambda state, other: (state + other, state.sum()), carry="state")
    with session("8"), watching() as moved:
        hosted = sc.Variables(np.ones(10_000, np.float32), placement=sc.OnHost())
        explained = step.explain(hosted, hosted)
        step(hosted, hosted)
        np.testing.assert_array_equal(hosted.value, 2)
    assert [call[HOST_LINK] for call in moved.calls] == [2 * V], "one read and one write"
    assert [each.route for each in explained.plan.transfers] == ["gather", "scatter"]


def test_steps_and_sessions_share_a_copy():
    first = sc.step(lambda state: state.sum())
    second = sc.step(lambda state, x: state.max() * x)
    with watching() as moved:
        with session("8"):
            read = sc.Read(cache="device")
            hosted = sc.Variables(np.ones(10_000, np.float32), placement=sc.OnHost(), read=read)
            assert first.explain(hosted).plan.bytes == 8 * V
            first(hosted), second(hosted, 2.0), first(hosted)
            (planned,) = second.explain(hosted, 2.0).plan.transfers
            assert planned.route == "none" and "a copy of version 0 is there" in planned.why
        with session("8"):
            second(hosted, 3.0)
        assert len(moved.calls) == 1
        with session("8"):
            hosted.assign(np.full(10_000, 2, np.float32))
            assert float(first(hosted)) == 20_000
        written, read_once = {HOST_LINK: V}, {HOST_LINK: V, DEVICE_LINK: 7 * V}
        assert moved.calls[1:] == [written, read_once], "what is assigned is not on the devices"


@pytest.mark.parametrize("mesh", ["no mesh", "8"])
def test_threads_share_a_copy(mesh):
    total = sc.step(lambda state: state + 1)
    with session(mesh):
        read = sc.Read(cache="device")
        hosted = sc.Variables(np.ones(10_000, np.float32), placement=sc.OnHost(), read=read)
        total.warm(hosted)
    ready, seen = threading.Barrier(4), []

    def work():
        with session(mesh):
            ready.wait(30)
            for _ in range(5):
                seen.append(float(raw(total(hosted)).min()))

    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    with watching() as moved:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert seen == [2.0] * 20
    assert [call[HOST_LINK] for call in moved.calls] == [V]


# ---- explain ---------------------------------------------------------------------------------


def test_explain_tells_of_variables_and_transfers():
    step = sc.step(lambda state, frozen, x: (state + x, frozen.sum()), carry="state")
    with session("8"):
        state = sc.Variables(np.ones(10_000, np.float32), placement=sc.OnHost(), name="moments")
        frozen = sc.Variables(np.ones(3, np.float32), name="frozen")
        explained = step.explain(state, frozen, np.float32(1))
    text = " ".join(str(explained).split())
    assert "state: Variables('moments', version 0" in text
    assert "frozen: Variables('frozen', version 0" in text
    assert "moments version 0: host → devices by gather" in text
    assert "40.0 kB host ↔ device, 280.0 kB device ↔ device" in text
    assert "moments version 1: devices → host by scatter" in text
    assert "frozen version 0: nothing moves: the master copy is there" in text
    assert [row.path for row in explained.arguments] == ["state", "frozen", "x"]
    assert [row.variables for row in explained.arguments] == ["moments", "frozen", ""]
    assert explained.moved_bytes == explained.plan.bytes + 8 * 4
    assert len(explained.variables) == 2


def test_explain_runs_nothing_and_moves_nothing():
    def refuse(state):
        raise AssertionError("explain has traced")

    step = sc.step(refuse, carry="state")
    with session("8"):
        read = sc.Read(cache="device")
        hosted = sc.Variables(np.ones(10_001, np.float32), placement=sc.OnHost(), read=read)
        hosted.block_until_ready()
        with watching() as moved:
            before = live_buffers()
            first = step.explain(hosted)
            second = step.explain(hosted)
            assert live_buffers() == before
    assert first.plan == second.plan and not first.hit
    assert moved.calls == [] and hosted.version == 0
    assert (step.stats().traces, step.stats().moved_bytes) == (0, 0)


@pytest.mark.parametrize("mesh", ["no mesh", "1", "8"])
def test_explain_knows_a_hit_from_a_miss(mesh):
    step = sc.step(lambda state, more: (state + 1, more["w"].sum()), carry="state")
    with session(mesh):
        hosted = sc.Variables(np.ones(7, np.float32), placement=sc.OnHost())
        resident = sc.Variables({"w": np.ones(7, np.float32)})
        assert not step.explain(hosted, resident).hit
        step.warm(hosted, resident)
        with sc.no_recompile():
            for _ in range(3):
                assert step.explain(hosted, resident).hit
                step(hosted, resident)


def test_stats_and_monitoring_count_what_moved():
    heard = []

    def listen(name, **details):
        if name == "/stepcache/moved":
            heard.append(details)

    jax.monitoring.register_event_listener(listen)

    def mover(state):
        return state + 1

    step = sc.step(mover, carry="state")
    try:
        with session("8"):
            hosted = sc.Variables(np.ones(10_000, np.float32), placement=sc.OnHost())
            for _ in range(2):
                step(hosted)
    finally:
        jax.monitoring.unregister_event_listener(listen)
    assert step.stats().moved_bytes == 2 * (V + 7 * V + V)
    assert heard == 2 * [
        {"step": "mover", "link": HOST_LINK, "size_bytes": 2 * V},
        {"step": "mover", "link": DEVICE_LINK, "size_bytes": 7 * V},
    ]


def test_what_a_step_that_raises_has_read_is_counted():
    step = sc.step(lambda state: state[:2], carry="state")
    variables = sc.Variables(np.zeros(1000, np.float32), placement=sc.OnHost())
    with pytest.raises(sc.CarryError):
        step(variables)
    assert step.stats().moved_bytes == 4000 and variables.version == 0


def test_a_reader_is_named_once():
    step = sc.step(lambda pair: pair[0] + pair[1])
    variables = sc.Variables(np.zeros(3, np.float32), placement=sc.OnHost())
    assert step.explain([variables, variables]).plan.transfers[0].readers == ("pair",)


def test_errors_of_jax_name_the_user_s_function():
    step = sc.step(lambda state, text: state)
    with pytest.raises(TypeError, match="<lambda>"):
        step(sc.Variables(np.zeros(3)), "x")
