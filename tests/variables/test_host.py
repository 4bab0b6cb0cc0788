"""A loop over variables on the host is the loop over the tree, with its bytes in another memory."""

import gc
import threading
import tracemalloc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparing import arrays_of, assert_same, assert_same_in_numpy, copied, on_devices, raw
from jax.sharding import PartitionSpec as P
from moving import live_buffers, live_bytes, mesh_of, session, watching

import stepcache as sc
from stepcache import jaxcompat
from stepcache.variables import shares
from stepcache.variables.packing import PACKED_BELOW_BYTES

COUNT = PACKED_BELOW_BYTES // 4
"""So many float32 values are a buffer of their own."""
WIDTH = 128
ROWS = COUNT // WIDTH + 1
MESHES = ("no mesh", "1", "8", "8 explicit", "4x2")
ADAM = optax.adam(1e-2)


def bump(state):
    """One more, for any kind of leaf."""

    def change(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.vmap(lambda key: jax.random.fold_in(key, 1))(x.reshape(-1)).reshape(x.shape)
        return ~x if x.dtype == bool else x + jnp.ones((), x.dtype) if not weak(x) else x + 1

    return jax.tree.map(change, state)


def weak(x) -> bool:
    return getattr(x.aval, "weak_type", False)


def every_kind_of_leaf():
    return {
        "large": np.arange(128 * 97, dtype=np.float32).reshape(128, 97),
        "alone": np.arange(COUNT + 1, dtype=np.float32).reshape(-1, 1),
        "flat": np.arange(COUNT, dtype=np.float32),
        "odd": np.arange(7, dtype=np.int32),
        "few": np.arange(3, dtype=np.uint8),
        "bf16": np.arange(10).astype(jnp.bfloat16),
        "fp8": np.arange(5).astype(jnp.float8_e4m3fn),
        "int4": np.arange(5).astype(jnp.int4),
        "large bf16": np.arange(10_001).astype(jnp.bfloat16),
        "bool": np.array([True, False, True]),
        "complex": np.arange(3).astype(np.complex64) * 1j,
        "empty": [np.zeros((0, 3), np.float32), np.zeros((2, 0), np.int8)],
        "scalars": (np.float32(3), jnp.int32(4), np.bool_(True)),
        "numbers": [2.5, 3],
        "keys": {"one": jax.random.key(3), "three": jax.random.split(jax.random.key(1), 3)},
        "old key": jax.random.PRNGKey(0),
        "none": None,
    }


# ---- the same numbers ------------------------------------------------------------------------


def parameters():
    """Leaves that are not packed: packing lets XLA fuse, and round, in another way."""
    random = np.random.default_rng(0)
    return {
        "w": random.normal(size=(ROWS, WIDTH)).astype(np.float32),
        "v": random.normal(size=(WIDTH, ROWS)).astype(np.float32),
        "b": np.zeros(COUNT + 3, np.float32),
    }


def train(state, batch):
    def loss_of(params):
        hidden = jnp.tanh(batch @ params["w"] + params["b"][:WIDTH])
        return jnp.mean((hidden @ params["v"]) ** 2) + jnp.mean(params["b"] ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    updates, moments = ADAM.update(grads, state["moments"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, loss


def adam_loop(mesh, wrap, steps=3):
    """Losses, final state and the misses of a loop whose moments are wrapped."""
    train_step = sc.step(train, carry="state")
    with session(mesh):
        params = parameters()
        state = wrap(params, jax.jit(ADAM.init)(params))
        losses = []
        for number in range(steps):
            batch = np.random.default_rng(number).normal(size=(16, ROWS)).astype(np.float32)
            state, loss = train_step(state, batch)
            losses.append(raw(loss).tobytes())
        wrapped = [each for each in state.values() if isinstance(each, sc.Variables)]
        assert all(each.version == steps for each in wrapped)
        state = {
            name: on_devices(each) if isinstance(each, sc.Variables) else each
            for name, each in state.items()
        }
    return losses, state, train_step.stats().misses


def on_host(read):
    def wrap(params, moments):
        return {
            "params": sc.Variables(params),
            "moments": sc.Variables(moments, placement=sc.OnHost(), read=read),
        }

    return wrap


READS = (
    sc.Read(),
    sc.Read(cache="device"),
)


@pytest.mark.sample(every=6)
@pytest.mark.parametrize("mesh", MESHES)
def test_adam_with_its_moments_on_the_host_computes_what_it_computes_without(mesh):
    def as_it_is(params, moments):
        return {"params": params, "moments": moments}

    def resident(params, moments):
        return {"params": sc.Variables(params), "moments": sc.Variables(moments)}

    losses, plain, _ = adam_loop(mesh, as_it_is)
    assert len(set(losses)) == len(losses)
    for wrap in (resident, *map(on_host, READS if mesh == "8" else READS[:1])):
        got_losses, got, misses = adam_loop(mesh, wrap)
        assert got_losses == losses
        assert_same(plain, got)
        assert misses == 1


@pytest.mark.sample(every=12)
@pytest.mark.parametrize(
    ("mesh", "read"),
    [(mesh, sc.Read(cache=cache)) for mesh in MESHES for cache in (None, "device")],
    ids=str,
)
@pytest.mark.parametrize("pack", [False, True])
def test_every_kind_of_leaf_goes_to_the_host_and_back(mesh, read, pack):
    """Sizes that do not divide by the devices, empty leaves, weak types, bits below a byte."""
    step = sc.step(bump, carry="state")
    with session(mesh):
        tree, host = every_kind_of_leaf(), sc.OnHost()
        resident = sc.Variables(tree, pack=pack)
        hosted = sc.Variables(tree, placement=host, read=read, pack=pack)
        assert_same(resident.value, on_devices(hosted))
        for _ in range(2):
            assert step(hosted) is hosted
            step(resident)
        assert_same(resident.value, on_devices(hosted))
        assert_same_in_numpy(resident.value, hosted.value)
        # A program that reads and writes the host's memory itself is another one.
        assert step.stats().misses == 1 + (jaxcompat.PRIVATE_API and read == sc.Read())
        assert (resident.version, hosted.version) == (2, 2)


@pytest.mark.sample
@pytest.mark.parametrize("mesh", ["4x2", "4x2 explicit"])
@pytest.mark.parametrize(
    "rules",
    [
        [("w", P("data"))],
        [("w", P(None, "model")), ("u", P("model"))],
        [("w", P(("data", "model"))), ("flat", P("data"))],
        [("w", P("model", "data")), ("none", P("data"))],
    ],
    ids=str,
)
@pytest.mark.parametrize("cache", [None, "device"])
def test_a_value_that_is_read_lies_where_rules_say(mesh, rules, cache):
    tree = {
        "w": np.arange(64 * 16, dtype=np.float32).reshape(64, 16),
        "u": np.arange(6 * 3, dtype=np.float32).reshape(6, 3),
        "flat": np.arange(8192, dtype=np.float32),
        "none": np.zeros((0, 2), np.float32),
        "b": np.float32(2),
    }
    step = sc.step(bump, carry="state")
    with session(mesh):
        placement = sc.OnHost(on_device=sc.Sharded(rules))
        hosted = sc.Variables(tree, placement=placement, read=sc.Read(cache=cache))
        sharded = sc.Variables(tree, placement=sc.Sharded(rules))
        for _ in range(2):
            step(hosted)
            step(sharded)
        assert_same(sharded.value, on_devices(hosted))
        assert on_devices(hosted)["w"].sharding.shard_shape((64, 16)) != (64, 16)
        assert_same_in_numpy(sharded.value, hosted.value)
        assert step.stats().misses == 1 + (jaxcompat.PRIVATE_API and cache is None)


def test_rules_need_a_mesh_for_values_that_are_read_too():
    placement = sc.OnHost(on_device=sc.Sharded([("w", P("data"))]))
    with pytest.raises(sc.VariablesError, match="there is none"):
        sc.Variables({"w": np.ones(8)}, placement=placement)


def test_rules_of_a_value_that_is_read_have_to_divide():
    with session("8"):
        with pytest.raises(sc.PlacementError, match="is not divisible"):
            sc.Variables(
                {"w": np.ones(9, np.float32)},
                placement=sc.OnHost(on_device=sc.Sharded([("w", P("data"))])),
            )


def test_leaves_placed_by_the_user_without_a_session():
    """The device they were put on is where they are read to, and its host has the master."""
    at = jax.devices()[3]
    tree = jax.device_put({"a": np.ones(5, np.float32), "b": np.zeros(9000, np.float32)}, at)
    hosted = sc.Variables(tree, placement=sc.OnHost())
    step = sc.step(bump, carry="state")
    step(hosted)
    step(hosted)
    assert all(leaf.devices() == {at} for leaf in on_devices(hosted).values())
    assert all(array.devices() == {at} for array in arrays_of(hosted))
    assert step.stats().misses == 1
    np.testing.assert_array_equal(hosted.value["a"], 3)


def test_without_a_session_a_value_goes_where_the_other_arguments_are():
    """As an uncommitted tree does under jax.jit; and the master stays where it was."""

    @sc.step(carry="state")
    def add(state, x):
        return state + x, x

    hosted = sc.Variables(np.zeros(5, np.float32), placement=sc.OnHost())
    elsewhere = jax.device_put(np.ones(5, np.float32), jax.devices()[3])
    for _ in range(3):
        add(hosted, elsewhere)
    np.testing.assert_array_equal(hosted.value, 3)
    assert hosted.version == 3
    add(hosted, np.ones(5, np.float32))
    np.testing.assert_array_equal(hosted.value, 4)


@pytest.mark.parametrize("mesh", ["no mesh", "8"])
def test_arrays_that_are_in_the_hosts_memory_already(mesh):
    """They are read to the devices that own that memory, and may be deleted."""
    with session(mesh):
        at = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        own = at if mesh == "no mesh" else jax.sharding.NamedSharding(mesh_of(mesh), P("data"))
        there = own.with_memory_kind("pinned_host")
        tree = {"a": np.arange(80_000, dtype=np.float32), "b": np.ones((16, 3), np.int8)}
        given = jax.device_put(tree, there)
        hosted = sc.Variables(given, placement=sc.OnHost())
        jax.tree.map(lambda leaf: leaf.delete(), given)
        assert_same(jax.device_put(tree, own), on_devices(hosted))
        hosted.assign(jax.device_put(tree, there))
        sc.step(bump, carry="state")(hosted)
        assert_same_in_numpy(jax.tree.map(lambda x: x + 1, tree), hosted.value)


def test_values_without_elements_that_are_split_can_be_looked_at():
    """JAX 0.10 does not split what a program returns without elements, as its sharding says."""
    empty = np.zeros((2, 0), np.float32)
    with session("2x2"):
        placement = sc.OnHost(on_device=sc.Sharded([("/w$", P("data"))]))
        state = sc.Variables({"w": empty}, placement=placement, read=sc.Read(cache="device"))
        state = sc.step(lambda state: {"w": -state["w"]}, carry="state")(state)
        assert_same_in_numpy({"w": empty}, state.value)


@pytest.mark.parametrize("mesh", ["no mesh", "8"])
def test_leaves_without_elements_of_all_types(mesh):
    """Random keys, which numpy cannot hold, among them."""
    keys = jax.random.split(jax.random.key(0, impl="unsafe_rbg"), 3)[:0]
    tree = {"f": np.zeros((0, 3), np.float32), "i": np.zeros(0, np.int8), "key": keys}
    tree["weak"] = jnp.zeros((0,)) * 2.0
    with session(mesh):
        hosted, plain = sc.Variables(tree, placement=sc.OnHost()), sc.Variables(tree)
        for _ in range(2):
            assert_same_in_numpy(plain.value, hosted.value)
            assert hosted.value["key"].dtype == keys.dtype
            sc.step(lambda state: state, carry="state")(hosted)


@pytest.mark.parametrize("mesh", ["no mesh", "8"])
def test_to_look_keeps_no_copy(mesh):
    """JAX's arrays keep what numpy was given of them."""
    with session(mesh):
        hosted = sc.Variables(np.ones(1_000_000, np.float32), placement=sc.OnHost())
        tracemalloc.start()
        try:
            value = hosted.value
            held, _ = tracemalloc.get_traced_memory()
            assert held >= value.nbytes
            del value
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert held < hosted.nbytes / 10


@pytest.mark.parametrize("mesh", ["no mesh", "8"])
def test_variables_that_lie_alike_share_the_programs_that_move_them(mesh):
    with session(mesh):
        a, b = (sc.Variables({"a": np.ones(n)}, placement=sc.OnHost()) for n in (3, 3))
        other = sc.Variables({"a": np.ones(4)}, placement=sc.OnHost())
    layouts = [each._master.host_layout for each in (a, b, other)]
    assert layouts[0] is layouts[1] is not layouts[2]


# ---- where the bytes are ---------------------------------------------------------------------


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("mesh", MESHES)
def test_the_master_is_in_pinned_memory_and_each_device_has_its_share(mesh):
    devices = 1 if mesh_of(mesh) is None else mesh_of(mesh).size
    size, small = 10_007, 13
    before = live_buffers()
    with session(mesh):
        tree = {"big": np.ones(size, np.float32), "b": np.ones(small, np.float32)}
        hosted = sc.Variables(tree, placement=sc.OnHost())
    hosted.block_until_ready()
    new = {place: n for place, n in live_buffers().items() if place not in before}
    share = 4 * sum(-(-count // devices) for count in (size, small))
    on_each = {}
    for (kind, device, _), n in new.items():
        assert kind == "pinned_host"
        on_each[device] = on_each.get(device, 0) + n
    assert list(on_each.values()) == [share] * devices


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    ("spec", "shares"), [(P("data"), 8), (P(None, "model"), 8), (P(("data", "model")), 8)]
)
def test_a_leaf_that_is_split_over_some_axes_is_split_over_all_on_the_host(spec, shares):
    before = live_buffers()
    with session("4x2"):
        placement = sc.OnHost(on_device=sc.Sharded([("w", spec)]))
        hosted = sc.Variables({"w": np.ones((64, 16), np.float32)}, placement=placement)
    hosted.block_until_ready()
    assert live_bytes(before) == {"pinned_host": 64 * 16 * 4}
    assert len([place for place in live_buffers() if place not in before]) == shares


def test_a_leaf_that_divides_no_further_is_kept_as_often_as_on_the_devices():
    before = live_buffers()
    with session("4x2"):
        placement = sc.OnHost(on_device=sc.Sharded([("w", P("data"))]))
        hosted = sc.Variables({"w": np.ones((4, 3), np.float32)}, placement=placement)
    hosted.block_until_ready()
    assert live_bytes(before) == {"pinned_host": 2 * 4 * 3 * 4}


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("mesh", ["no mesh", "8"])
def test_device_memory_between_steps_falls_by_the_size_of_the_moments(mesh):
    devices = 1 if mesh_of(mesh) is None else mesh_of(mesh).size
    train_step = sc.step(train, carry="state")
    batch = np.ones((16, ROWS), np.float32)

    def held(read):
        """Bytes of a state that has taken two steps, by memory; `read` None keeps all resident."""
        before = live_buffers()
        with session(mesh):
            params = parameters()
            moments = jax.device_get(jax.jit(ADAM.init)(params))
            placement = sc.Replicated() if read is None else sc.OnHost()
            state = {
                "params": sc.Variables(params),
                "moments": sc.Variables(moments, placement=placement, read=read or sc.Read()),
            }
            size = state["moments"].nbytes
            for _ in range(2):
                state, _ = train_step(state, batch)
        return size, live_bytes(before)

    size, resident = held(None)
    assert size > 100_000 and not resident["pinned_host"]
    _, hosted = held(sc.Read())
    assert resident["device"] - hosted["device"] == size * devices
    assert size <= hosted["pinned_host"] < size + 64 * devices
    _, kept = held(sc.Read(cache="device"))
    assert kept["device"] == resident["device"]


def test_devices_without_memory_of_the_host(monkeypatch):
    monkeypatch.setattr(shares, "PINNED_HOST", "no_such_memory")
    with pytest.raises(sc.VariablesError) as raised:
        sc.Variables(np.ones(3), placement=sc.OnHost(), name="moments")
    text = str(raised.value)
    assert "moments" in text and "'pinned_host'" in text and "Replicated()" in text


# ---- reading, looking, assigning -------------------------------------------------------------


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("read", READS, ids=str)
@pytest.mark.parametrize("mesh", ["no mesh", "8"])
def test_a_step_that_only_reads_changes_nothing(mesh, read):
    total = sc.step(lambda state, x: state["a"].sum() * x)
    with session(mesh):
        hosted = sc.Variables(
            {"a": np.arange(9, dtype=np.float32)}, placement=sc.OnHost(), read=read
        )
        for _ in range(3):
            assert float(total(hosted, np.float32(2))) == 72
        assert hosted.version == 0
        np.testing.assert_array_equal(hosted.value["a"], np.arange(9))
        assert total.stats().misses == 1


@pytest.mark.sample
@pytest.mark.parametrize("read", READS, ids=str)
@pytest.mark.parametrize("mesh", ["no mesh", "8"])
def test_steps_and_assignments_take_turns(mesh, read):
    """Each write raises the version by one, and whoever reads next sees it.

    No copy is one that JAX's guard against accidental transfers forbids.
    """
    step = sc.step(bump, carry="state")
    look = sc.step(lambda state: state["big"].max())
    guard = jax.transfer_guard_host_to_device, jax.transfer_guard_device_to_device
    with session(mesh), guard[0]("disallow"), guard[1]("disallow"):
        tree = {"big": np.zeros(5003, np.float32), "small": np.zeros((), np.int32)}
        hosted = sc.Variables(tree, placement=sc.OnHost(), read=read)
        expected, version = 0, 0
        for action in "s r a s s r r a a r s r".split():
            if action == "s":
                step(hosted)
                expected, version = expected + 1, version + 1
            elif action == "a":
                expected, version = expected + 10, version + 1
                hosted.assign({name: np.full_like(x, expected) for name, x in tree.items()})
            else:
                assert float(look(hosted)) == expected
            assert hosted.version == version
            for leaf in hosted.value.values():
                np.testing.assert_array_equal(leaf, expected)
        assert hosted.version == version


@pytest.mark.parametrize("mesh", ["no mesh", "1", "8"])
def test_what_was_looked_at_stays_as_it_was(mesh):
    step = sc.step(bump, carry="state")
    with session(mesh), watching() as moved:
        hosted = sc.Variables(np.zeros(9001, np.float32), placement=sc.OnHost())
        seen = []
        for number in range(3):
            seen.append((number, hosted.value))
            step(hosted)
        for number, value in seen:
            np.testing.assert_array_equal(value, number)
        assert len(moved.calls) == 3, "to look is no call of a step"


@pytest.mark.parametrize("mesh", ["no mesh", "1", "8"])
@pytest.mark.parametrize("cache", [None, "device"])
def test_nothing_is_shared_with_the_arrays_that_were_given(mesh, cache):
    """JAX may take a numpy array as it is, without a copy (jax#37830)."""
    step = sc.step(bump, carry="state")
    with session(mesh):
        given = np.zeros(1 << 15, np.float32)
        hosted = sc.Variables(given, placement=sc.OnHost(), read=sc.Read(cache=cache))
        given[:] = 7
        np.testing.assert_array_equal(hosted.value, 0)
        again = np.full_like(given, 1)
        hosted.assign(again)
        again[:] = 7
        np.testing.assert_array_equal(hosted.value, 1)
        step(hosted)
        np.testing.assert_array_equal(hosted.value, 2)
        np.testing.assert_array_equal(again, 7)


def test_device_arrays_that_were_given_may_be_donated():
    given = jnp.zeros(9001)
    hosted = sc.Variables(given, placement=sc.OnHost())
    given.delete()
    sc.step(bump, carry="state")(hosted)
    np.testing.assert_array_equal(hosted.value, 1)


@pytest.mark.parametrize("wrong", [np.ones(4), np.ones(3, int), {"a": np.ones(3)}, "x"])
def test_an_assignment_that_does_not_fit_loses_nothing(wrong):
    hosted = sc.Variables(np.zeros(3, np.float32), placement=sc.OnHost())
    with pytest.raises(sc.VariablesError):
        hosted.assign(wrong)
    assert hosted.version == 0
    np.testing.assert_array_equal(hosted.value, 0)


def test_several_on_the_host_in_one_call():
    """Read only and carried, nested, each with a policy of its own."""

    @sc.step(carry="state")
    def step(state, rate, more):
        new = {"a": state["a"] + rate["r"], "b": state["b"] * more[0]}
        return new, state["a"].sum()

    with session("8"), watching() as moved:
        state = {
            "a": sc.Variables(np.zeros(9, np.float32), placement=sc.OnHost()),
            "b": sc.Variables(np.ones(5003, np.float32), placement=sc.OnHost()),
        }
        rate = sc.Variables(
            {"r": np.float32(2)}, placement=sc.OnHost(), read=sc.Read(cache="device")
        )
        factor = sc.Variables(np.float32(3), placement=sc.OnHost())
        for _ in range(3):
            state, total = step(state, rate, [factor])
        assert [each.version for each in (*state.values(), rate, factor)] == [3, 3, 0, 0]
        assert float(total) == 4 * 9
        np.testing.assert_array_equal(state["a"].value, 6)
        np.testing.assert_array_equal(state["b"].value, 27)
        assert len(moved.calls) == 3


@pytest.mark.parametrize("placement", [sc.Replicated(), sc.OnHost()], ids=str)
@pytest.mark.parametrize("form", [list, tuple])
def test_a_carry_that_is_a_sequence_and_comes_back_alone(form, placement):
    """It looks like several outputs, of which the first is the carry."""
    step = sc.step(lambda state: form([bump(each) for each in state]), carry="state")
    state = form(sc.Variables(np.full(3, n, np.float32), placement=placement) for n in (0, 10))
    for _ in range(3):
        new = step(state)
        assert type(new) is form and all(a is b for a, b in zip(new, state, strict=True))
    assert [each.version for each in state] == [3, 3]
    np.testing.assert_array_equal([each.value[0] for each in state], [3, 13])


# ---- calls that fail -------------------------------------------------------------------------


@pytest.mark.sample
@pytest.mark.parametrize("read", READS, ids=str)
@pytest.mark.parametrize("mesh", ["no mesh", "8"])
def test_a_step_that_raises_leaves_value_and_version(mesh, read):
    @sc.step(carry="state", static_argnames="fault")
    def step(state, fault=None):
        if fault == "trace":
            raise RuntimeError("in the trace")
        if fault == "carry":
            return {"a": state["a"][:2], "key": state["key"]}
        if fault == "tree":
            return {"a": state["a"]}
        return bump(state)

    with session(mesh):
        tree = {"a": np.zeros(9001, np.float32), "key": jax.random.key(0)}
        hosted = sc.Variables(copied(tree), placement=sc.OnHost(), read=read)
        step(hosted)
        before = jax.tree.map(raw, hosted.value)
        for fault, error in (
            ("trace", RuntimeError),
            ("carry", sc.CarryError),
            ("tree", sc.CarryError),
        ):
            with pytest.raises(error):
                step(hosted, fault=fault)
            assert hosted.version == 1
            jax.tree.map(np.testing.assert_array_equal, jax.tree.map(raw, hosted.value), before)
        step(hosted)
        assert hosted.version == 2
        np.testing.assert_array_equal(hosted.value["a"], 2)


@pytest.mark.parametrize("read", READS, ids=str)
def test_a_program_that_fails_while_it_runs_leaves_value_and_version(read):
    """By then it has used up what it was given."""
    step = sc.step(lambda state, x: (state + jnp.log(x), None), carry="state")
    hosted = sc.Variables(np.zeros(9001, np.float32), placement=sc.OnHost(), read=read)
    step(hosted, np.float32(1))
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        step(hosted, np.float32(-1))
    assert hosted.version == 1
    np.testing.assert_array_equal(hosted.value, 0)
    step(hosted, np.float32(1))
    assert hosted.version == 2
    np.testing.assert_array_equal(hosted.value, 0)


def test_another_mesh_is_refused():
    with session("8"):
        hosted = sc.Variables(np.ones(8, np.float32), placement=sc.OnHost(), name="moments")
    with session("4x2"):
        with pytest.raises(sc.VariablesError, match="moments"):
            sc.step(bump, carry="state")(hosted)
    assert hosted.version == 0
    with session("8"):
        sc.step(bump, carry="state")(hosted)
    assert hosted.version == 1


@pytest.mark.parametrize("read", [sc.Read(), sc.Read(cache="device")], ids=str)
def test_without_a_mesh_a_value_follows_the_other_arguments_of_each_call(read):
    step = sc.step(lambda state, x: (state + x, None), carry="state")
    hosted = sc.Variables(np.zeros(3, np.float32), placement=sc.OnHost(), read=read)
    for device in (3, 5, 6):
        step(hosted, jax.device_put(np.float32(1), jax.devices()[device]))
    np.testing.assert_array_equal(hosted.value, 3)


def test_without_a_mesh_a_value_is_read_to_the_default_device():
    read = sc.Read(cache="device")
    step = sc.step(lambda state: state + 1)
    with jax.default_device(jax.devices()[3]):
        hosted = sc.Variables(np.zeros(3, np.float32), placement=sc.OnHost(), read=read)
        step(hosted)
        _, copy = hosted._master._copy
        assert [array.devices() for array in copy.buffers] == [{jax.devices()[3]}]


def test_layouts_and_their_programs_go_with_the_variables():
    tree = {"many": np.zeros(1013, np.float32), "one": 0.5, "weak": jnp.full(7, 0.5)}
    hosted = sc.Variables(tree, placement=sc.OnHost(), read=sc.Read(cache="device"))
    step = sc.step(lambda state: (state, None), carry="state")
    step(hosted)
    hosted.assign(hosted.value)
    layout = weakref.ref(hosted._master.host_layout)
    del hosted, step
    jax.clear_caches()
    gc.collect()
    assert layout() is None


# ---- another mesh --------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", [None, "device"])
@pytest.mark.parametrize("pack", [False, True])
def test_what_one_mesh_trains_another_one_evaluates(cache, pack):
    """A copy of each version for each mesh; only the mesh of its own may write."""
    train = sc.step(bump, carry="state")
    evaluate = sc.step(lambda state, x: jax.tree.map(lambda leaf: leaf.sum() * x, state))
    tree = {"w": np.ones((5, 3), np.float32), "b": np.arange(1013, dtype=np.float32)}
    with session("8"):
        state = sc.Variables(
            tree, placement=sc.OnHost(), read=sc.Read(cache=cache), pack=pack, name="state"
        )
    for number in range(4):
        with session("2") as two, watching() as moved:
            for _ in range(2):
                found = evaluate(state, np.float32(2))
            planned = evaluate.explain(state, np.float32(2)).plan
            assert found["w"].devices() == set(two.mesh.devices.flat)
            assert float(found["w"]) == 2 * 15 * (number + 1)
            fetches = [sum(call.values()) for call in moved.calls]
            assert len(fetches) == (1 if cache else 2)
            assert planned.bytes == (0 if cache else fetches[0])
        with session("8"):
            train(state)
        with session("4x2"):
            assert float(evaluate(state, np.float32(1))["w"]) == 15 * (number + 2)
    assert state.version == 4
    with session("2"), pytest.raises(sc.VariablesError, match="mesh of another session"):
        train(state)
    with session("2"):
        other = sc.Variables(np.float32(1), placement=sc.OnHost())
        mixed = sc.step(lambda own, state: (own + state["w"].sum(), None), carry="own")
        mixed(other, state)
        assert float(other.value) == 1 + 15 * 5


def test_a_copy_of_variables_is_read_from_another_mesh_by_itself():
    read = sc.step(lambda state: state.sum())
    with session("8"):
        state = sc.Variables(np.ones(8, np.float32), placement=sc.OnHost())
    with session("2"):
        assert read(state) == 8
    other = state.copy()
    with session("8"):
        state.assign(np.full(8, 2.0, np.float32))
        other.assign(np.full(8, 3.0, np.float32))
    with session("2"):
        assert (read(state), read(other), read(state)) == (16, 24, 16)


def test_to_explain_makes_no_copy_beside_a_step_that_writes():
    """A copy for another mesh is of one whole version."""
    evaluate, has_locked = sc.step(lambda state: state.sum()), threading.Event()
    with session("8"):
        state = sc.Variables(np.ones(8, np.float32), placement=sc.OnHost())

    def explain():
        has_locked.wait()
        with session("2"):
            evaluate.explain(state)

    thread = threading.Thread(target=explain)
    thread.start()
    with state._lock:
        has_locked.set()
        thread.join(0.5)
        assert thread.is_alive() and not state._views
    thread.join()
    assert len(state._views) == 1


# ---- threads ---------------------------------------------------------------------------------


@pytest.mark.parametrize("read", [sc.Read(), sc.Read(cache="device")], ids=str)
@pytest.mark.parametrize("mesh", ["no mesh", "1"])
def test_two_threads_write_and_a_third_sees_whole_versions(mesh, read):
    step = sc.step(bump, carry="state")
    each, failures, done = 12, [], threading.Event()
    with session(mesh):
        tree = {"a": np.zeros(5003, np.float32), "b": np.zeros(3, np.int32)}
        hosted = sc.Variables(tree, placement=sc.OnHost(), read=read)
        step.warm(hosted)

    def caught(work):
        def run():
            try:
                work()
            except BaseException as error:
                failures.append(error)

        return threading.Thread(target=run, daemon=True)

    def write():
        with session(mesh):
            for _ in range(each):
                step(hosted)

    def look():
        last = -1
        while not done.is_set():
            least = hosted.version
            numbers = {float(x) for leaf in hosted.value.values() for x in np.unique(leaf)}
            assert len(numbers) == 1, "half of one version, half of another"
            number = numbers.pop()
            assert max(last, least) <= number <= hosted.version
            last = number

    writers, reader = [caught(write), caught(write)], caught(look)
    for thread in (*writers, reader):
        thread.start()
    for thread in writers:
        thread.join(60)
    done.set()
    reader.join(60)
    assert not failures, failures
    assert not any(thread.is_alive() for thread in (*writers, reader))
    assert hosted.version == 2 * each
    np.testing.assert_array_equal(hosted.value["a"], 2 * each)
