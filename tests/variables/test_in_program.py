"""A step that carries variables on the host reads and writes them inside its own program."""

import contextlib
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from moving import mesh_of, session, watching
from test_host import bump, every_kind_of_leaf

import stepcache as sc
from stepcache import jaxcompat
from stepcache.variables.plan import HOST_LINK
from stepcache.variables.shares import HostLayout

pytestmark = pytest.mark.skipif(
    not jaxcompat.PRIVATE_API, reason="JAX names memories of a program through its private API"
)
MESHES = ("no mesh", "1", "8", "8 explicit", "4x2")


def train(state, batch):
    """The moments come first, of the same shapes: JAX must not write them over the parameters."""
    moments = jax.tree.map(lambda m: 0.5 * m + batch.sum(), state["moments"])
    params = jax.tree.map(jnp.add, state["params"], moments)
    return {"moments": moments, "params": params}, batch.sum()


def tree():
    return {"w": np.ones((5, 3), np.float32), "b": np.float32(2), "alone": np.ones(8, np.float32)}


def on_host(**options):
    return sc.Variables(tree(), placement=sc.OnHost(), **options)


BATCH = np.ones(4, np.float32)


@contextlib.contextmanager
def no_program_of_their_own():
    """What moves values by a program beside that of a step raises."""

    def refuse(layout):
        raise AssertionError("a read or a write outside of the step's program")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("read", "write"):
            patch.setattr(HostLayout, name, property(refuse))
        yield


@pytest.mark.parametrize("mesh", MESHES)
def test_values_cross_inside_the_program_as_the_plan_says(mesh):
    step = sc.step(train, carry="state")
    with session(mesh), watching() as moved, no_program_of_their_own():
        state = {"params": sc.Variables(tree()), "moments": on_host()}
        planned = step.explain(state, BATCH).plan.link_bytes
        for number in range(3):
            params = state["params"]._master.arrays()
            moments = state["moments"]._master.arrays()
            step(state, BATCH)
            assert all(array.is_deleted() for array in params)
            assert not any(array.is_deleted() for array in moments), "a failed program lost them"
            kinds = {array.sharding.memory_kind for array in state["moments"]._master.arrays()}
            assert kinds == {"pinned_host"}
            assert state["moments"].version == number + 1
        assert moved.calls == [planned] * 3
        jaxpr = step.trace(state, BATCH).jaxpr.jaxpr
        crossing = [
            math.prod(equation.invars[0].aval.shape) * equation.invars[0].aval.dtype.itemsize
            for equation in jaxpr.eqns
            if equation.primitive.name == "device_put"
            and equation.invars[0].aval.memory_space != equation.outvars[0].aval.memory_space
        ]
        assert len(crossing) == 2 * 3
        assert sum(crossing) == planned[HOST_LINK]
        np.testing.assert_allclose(state["moments"].value["w"], 7.125)
        assert step.stats().misses == 1


def settle(state):
    """One more, and no number comes back weakly typed."""
    return jax.tree.map(lambda x: jnp.asarray(x, x.dtype), bump(state))


@pytest.mark.sample(every=6)
@pytest.mark.parametrize("change", [bump, settle])
@pytest.mark.parametrize("mesh", MESHES)
def test_a_program_takes_each_buffer_from_the_memory_in_which_it_lies(mesh, change):
    """GPUs refuse any other; CPU devices take what they get."""
    step = sc.step(change, carry="state")
    with session(mesh):
        state = sc.Variables(every_kind_of_leaf(), placement=sc.OnHost())
        for _ in range(2):
            text = step.lower(state).as_text()
            (arguments,) = re.findall(r"func public @main\((.*)\) -> ", text)
            found = [
                "pinned_host" if '"pinned_host"' in each else "device"
                for each in re.split(r"%arg\d+: ", arguments)[1:]
            ]
            arrays = state._master.arrays()
            assert found == [array.sharding.memory_kind for array in arrays]
            assert found.count("pinned_host") > 10
            empty = {array.sharding.memory_kind for array in arrays if array.size == 0}
            assert empty == {"device"}, "GPUs return them nowhere else"
            step(state)


@pytest.mark.parametrize("warm", [False, True])
def test_nothing_is_committed_where_nobody_has_placed_anything(warm):
    """As without `OnHost`: another step finds its program after this one has returned arrays."""

    @sc.step(carry=("params", "moments", "more"))
    def step(params, moments, more, batch):
        moments = jax.tree.map(lambda m: m + batch.sum(), moments)
        return jax.tree.map(jnp.add, params, moments), moments, more + 1, batch.sum()

    look = sc.step(lambda params, more: (params["w"].sum() + more, jax.random.key(0)))
    params, moments, more = sc.Variables(tree()), on_host(), jnp.zeros(())
    look(params, more)
    if warm:
        step.warm(params, moments, more, BATCH)
    for _ in range(3):
        params, moments, more, total = step(params, moments, more, BATCH)
        assert not (more.committed or total.committed)
        look(params, more)
    assert step.stats().misses == look.stats().misses == 1
    at = jax.devices()[3]
    _, _, more, total = step(params, moments, jax.device_put(more, at), BATCH)
    assert more.committed and total.devices() == {at}
    assert {array.devices().pop() for array in moments._master.arrays()} == {jax.devices()[0]}
    np.testing.assert_array_equal(moments.value["b"], 2 + 4 * 4)


@pytest.mark.parametrize("mesh", MESHES)
def test_people_are_shown_the_leaves_of_the_user(mesh):
    step = sc.step(train, carry="state")
    with session(mesh):
        hosted, resident = (
            {"params": sc.Variables(tree()), "moments": each}
            for each in (on_host(), sc.Variables(tree()))
        )
        shown = [step.explain(state, BATCH).arguments for state in (hosted, resident)]
        rows = [[(each.path, each.type, each.target) for each in rows] for rows in shown]
        assert rows[0] == rows[1]
        shapes = [
            jax.tree.map(lambda x: x.shape, step.eval_shape(s, BATCH)) for s in (hosted, resident)
        ]
        assert shapes[0] == shapes[1]
        step(resident, BATCH)
        step(hosted, BATCH)
        assert "Variables \u2192 Variables in host memory" in str(step.last_miss)


@pytest.mark.parametrize("mesh", ["no mesh", "8"])
def test_the_program_is_found_on_disk(mesh, tmp_path):
    def life():
        def function(state, batch):
            return train(state, batch)

        step, cache = sc.step(function, carry="state"), sc.ProgramCache(tmp_path)
        with sc.Session(mesh_of(mesh), cache=cache):
            state = {"params": sc.Variables(tree()), "moments": on_host()}
            for _ in range(2):
                step(state, BATCH)
        cache.flush()
        return step.stats(), state["moments"].value["w"]

    built, loaded = life(), life()
    assert (built[0].compiles, loaded[0].compiles, loaded[0].loads) == (1, 0, 1)
    np.testing.assert_array_equal(built[1], loaded[1])


@pytest.mark.parametrize("case", ["placed outputs", "several devices", "inner mesh"])
def test_programs_that_cannot_name_one_device(case):
    mesh = mesh_of("8")
    options = {}
    if case == "placed outputs":
        options["out_shardings"] = SingleDeviceSharding(jax.devices()[0])

    @sc.step(carry="moments", **options)
    def step(moments, batch):
        if case == "inner mesh":
            batch = jax.lax.with_sharding_constraint(batch, NamedSharding(mesh, P("data")))
        return jax.tree.map(lambda m: m + batch.sum(), moments), batch

    batch = np.ones(8, np.float32)
    if case == "several devices":
        batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
    moments = on_host()
    for _ in range(2):
        moments, out = step(moments, batch)
    assert len(out.devices()) == (1 if case == "placed outputs" else 8)
    np.testing.assert_array_equal(moments.value["b"], 18)
    assert step.stats().misses == 1


@pytest.mark.parametrize("on_device", [sc.Replicated(), sc.Sharded([("w", P("data", "model"))])])
def test_a_mesh_with_axes_of_two_types(on_device):
    kinds = (AxisType.Explicit, AxisType.Auto)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=kinds, devices=jax.devices())
    step = sc.step(lambda state, x: ({"w": state["w"] + x}, x), carry="state")
    with sc.Session(mesh):
        hosted = sc.Variables({"w": np.zeros((8, 4), np.float32)}, placement=sc.OnHost(on_device))
        for _ in range(2):
            step(hosted, 1.0)
        np.testing.assert_array_equal(hosted.value["w"], 2)
