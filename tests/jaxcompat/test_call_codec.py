"""What JAX knows of a program's arguments and results, as plain data, there and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import stepcache as sc
from stepcache import jaxcompat
from stepcache.jaxcompat import call_codec
from stepcache.jaxcompat.call_codec import FIELDS, decode_call, encode_call
from stepcache.jaxcompat.checked_data import NotStorable
from stepcache.storage import plain

pytestmark = pytest.mark.skipif(not jaxcompat.CAN_STORE, reason="JAX's public API is in use")


def call(avals=(), shardings=None, layouts=None):
    count = len(avals) if shardings is None else len(shardings)
    avals = avals or [aval((8,))] * count
    shardings = shardings or [SingleDeviceSharding(jax.devices()[0])] * count
    layouts = [None] * count if layouts is None else layouts
    return {
        "input_avals": avals,
        "output_avals": avals[::-1],
        "input_shardings": shardings,
        "output_shardings": shardings[::-1],
        "xla_in_layouts": layouts,
        "dispatch_in_layouts": layouts,
        "xla_out_layouts": layouts[::-1],
        "committed": True,
        "name": "jit_step",
        "kept_var_idx": {0, 2},
    }


def aval(shape, dtype=jnp.float32, **more):
    from jax._src import core

    return core.ShapedArray(shape, jnp.dtype(dtype), **more)


def there_and_back(described, arrays=(), devices=None):
    if devices is None:
        spread = isinstance(described["input_shardings"][0], NamedSharding)
        devices = jax.devices() if spread else jax.devices()[:1]
    data = plain.unpack(plain.pack(encode_call(described, arrays, devices)))
    read, read_arrays = decode_call(data, devices)
    assert read == {name: described[name] for name in FIELDS}
    return data, read_arrays


DTYPES = ["float32", "bool", "int8", "uint32", "float16", "bfloat16", "float8_e4m3fn", "int4"]
DTYPES += ["complex64", "float64"]


@pytest.mark.parametrize("name", DTYPES)
def test_types_and_arrays(name):
    dtype = jnp.dtype(name)
    array = np.arange(6).reshape(2, 3).astype(dtype)
    _, (read,) = there_and_back(call([aval((2, 3), dtype), aval((), dtype)]), [array])
    assert (read.dtype, read.shape) == (dtype, (2, 3))
    assert read.tobytes() == array.tobytes()


def test_weak_and_extended_types():
    from jax._src import core

    keys = [jax.random.key(0, impl=impl).aval for impl in ("threefry2x32", "rbg")]
    found = [*keys, aval((), weak_type=True), aval((3,), jax.dtypes.float0)]
    there_and_back(call(found))
    there_and_back(call([aval((4,), memory_space=core.MemorySpace.Host)]))


def test_types_that_say_where_they_are(mesh):
    from jax._src import core

    manual = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Manual,) * 2)
    explicit = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)

    def on(where, *spec):
        return NamedSharding(where.abstract_mesh, P(*spec))

    axes = core.ManualAxisType(varying=frozenset({"data"}))
    found = [
        aval((8, 4), sharding=on(explicit, "data", "model")),
        aval((8, 4), sharding=on(explicit, ("data", "model"), None)),
        aval((8,), sharding=on(manual, None), manual_axis_type=axes),
        aval((8,), sharding=on(mesh, None)),
    ]
    data, _ = there_and_back(call(found))
    assert len(data["meshes"]) == 3


def test_shardings_of_every_kind(mesh):
    explicit = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    backwards = jax.sharding.Mesh(np.array(jax.devices()[::-1]).reshape(2, 4), ("a", "b"))
    specs = [P(), P("data"), P(("data", "model"), None), P(None, P.UNCONSTRAINED)]
    found = [NamedSharding(mesh, spec) for spec in specs]
    found += [NamedSharding(explicit, P(unreduced={"x"})), NamedSharding(explicit, P("x"))]
    found += [NamedSharding(explicit, P(reduced={"x"})), NamedSharding(backwards, P("b", "a"))]
    found += [NamedSharding(mesh, P(), memory_kind="unpinned_host")]
    data, _ = there_and_back(call(shardings=found))
    assert len(data["meshes"]) == 3 and len(data["shardings"]) == len(found)
    (device,) = one = jax.devices()[5:6]
    alone = jax.sharding.Mesh(np.array(one), "x")
    found = [SingleDeviceSharding(device), NamedSharding(alone, P("x"))]
    found += [SingleDeviceSharding(device, memory_kind="unpinned_host")]
    there_and_back(call(shardings=found), devices=one)


def test_layouts():
    from jax.experimental.layout import Layout

    layouts = [None, Layout((1, 0)), Layout((0, 1), ((8, 128), (2, 1))), Layout((), (), 4)]
    there_and_back(call([aval((8, 8))] * 4, layouts=layouts))


def test_devices_are_positions():
    """A program for the first devices of one process serves the last ones of another."""
    first, last = jax.devices()[:2], jax.devices()[6:]
    found = [NamedSharding(jax.sharding.Mesh(np.array(first), "x"), P("x"))]
    data, _ = there_and_back(call(shardings=found), devices=first)
    (read,) = decode_call(data, last)[0]["input_shardings"]
    assert list(read.mesh.devices) == last


def test_equal_things_are_written_once():
    avals = [aval((8,)), aval((4,))] * 500
    data, _ = there_and_back(call(avals))
    assert len(data["avals"]) == 2 and len(plain.pack(data)) < 10_000


class Unknown:
    memory_kind = None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("input_avals", [Unknown()]),
        ("input_shardings", [Unknown()]),
        ("xla_in_layouts", [Unknown()]),
        ("input_shardings", [SingleDeviceSharding(jax.devices()[-1])]),
        ("input_shardings", ["XLA's own"]),
        ("input_avals", [object]),
    ],
)
def test_what_is_not_known_is_not_stored(field, value):
    if value == ["XLA's own"]:
        from jax._src.lib import xla_client
        from jax._src.sharding_impls import GSPMDSharding

        value = [GSPMDSharding(jax.devices()[:1], xla_client.HloSharding.manual())]
    with pytest.raises((NotStorable, ValueError)):
        encode_call(call([aval((8,))]) | {field: value}, [], jax.devices()[:1])


def test_axes_without_a_text_are_not_stored():
    numbered = jax.sharding.Mesh(np.array(jax.devices()), (7,))
    with pytest.raises(NotStorable, match="an axis"):
        encode_call(call(shardings=[NamedSharding(numbered, P(7))]), [], jax.devices())


def test_what_would_be_read_back_otherwise_is_not_stored(monkeypatch):
    """As where a later JAX tells types apart by more than is written here."""
    monkeypatch.setattr(call_codec, "_decode_aval", lambda row, meshes: aval((9,)))
    with pytest.raises(NotStorable, match="input_avals"):
        encode_call(call([aval((8,))]), [], jax.devices()[:1])


def test_programs_say_the_same_when_they_are_read_back(tmp_path, mesh):
    """Of a program that was loaded, JAX knows what it knew of the one that was built."""

    def step(state, batch):
        out = jax.lax.with_sharding_constraint(batch * state["w"], P("data", "model"))
        return {"w": state["w"] + out.sum()}, jax.random.key(0), (out, out.reshape(4, 2, 4))

    def run():
        cache = sc.ProgramCache(tmp_path / "programs", verify="off")
        made = sc.step(step, carry="state")
        with sc.Session(mesh, cache=cache):
            results = made({"w": np.float32(2)}, np.ones((8, 4), np.float32))
            text = str(made.explain({"w": np.float32(2)}, np.ones((8, 4), np.float32)))
        cache.flush()
        return made.stats(), jax.tree.map(lambda x: (x.aval, x.sharding), results), text

    built, loaded = run(), run()
    assert (built[0].traces, loaded[0].traces, loaded[0].loads) == (1, 0, 1)
    assert built[1] == loaded[1]
    assert jaxcompat.PRIVATE_API
