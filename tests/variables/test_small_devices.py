"""A state that is larger than the memory of the devices, which is counted at every Python call."""

import json
import os
import subprocess
import sys

import pytest

PROLOGUE = """
import contextlib, json, sys, tempfile, threading

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
import numpy as np
import orbax.checkpoint  # Its import is none of what is watched.
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P, SingleDeviceSharding

import stepcache as sc

programs = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, *_, **__: programs.append(name) if name.endswith("backend_compile_duration") else 0
)


def device_bytes():
    buffers = {}  # By address: arrays that share one count once.
    for array in jax.live_arrays():
        if not array.is_deleted() and array.sharding.memory_kind == "device":
            for shard in array.addressable_shards:
                place = shard.device, shard.data.unsafe_buffer_pointer()
                buffers[place] = shard.data.nbytes
    return sum(buffers.values())


@contextlib.contextmanager
def watching(name):
    # The most that lay on all devices at any call or return, of Python's functions or C's, beyond
    # what lay there before; and how many programs were compiled, without which none can run.
    before, most, compiled = device_bytes(), 0, len(programs)
    busy = threading.local()

    def look(frame, event, argument):
        nonlocal most
        if not getattr(busy, "now", False):
            busy.now = True
            most = max(most, device_bytes() - before)
            busy.now = False

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    told[name] = [most, len(programs) - compiled]


def same(variables, expected):
    value = variables.value
    assert jax.tree.structure(value) == jax.tree.structure(expected)
    for got, wanted in zip(jax.tree.leaves(value), jax.tree.leaves(expected), strict=True):
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        np.testing.assert_array_equal(got, wanted)


def state(scale):
    return {
        "w": scale * np.arange(64 * 4096, dtype=np.float32).reshape(64, 4096),
        "odd": np.full((100_003,), scale, np.int32),
        "small": [np.full(n, scale, np.float32) for n in (3, 5, 1000)],
    }


SIZE = sum(leaf.nbytes for leaf in jax.tree.leaves(state(1)))
told = {"size": SIZE}
mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
"""

HOST_VALUES = """
for name, mesh_of, on_device in (
    ("replicated", mesh, sc.Replicated()),
    ("sharded", mesh, sc.Sharded([("w", P("data"))])),
    ("alone", None, sc.Replicated()),
):
    directory = tempfile.mkdtemp()
    with sc.Session(mesh_of) if mesh_of else contextlib.nullcontext():
        with watching(name + ", made"):
            variables = sc.Variables(state(1), placement=sc.OnHost(on_device=on_device))
        with watching(name + ", assigned"):
            variables.assign(state(2))
        with watching(name + ", pushed"):
            variables.push(state(3))
        with watching(name + ", looked at"):
            same(variables, state(3))
        with watching(name + ", saved"):
            sc.save(directory, value=variables)
        variables.assign(state(4))
        with watching(name + ", restored"):
            sc.restore(directory, value=variables)
        same(variables, state(3))
        # The master has one copy, and what is read of it is right.
        masters = variables._master.arrays()
        assert {array.sharding.memory_kind for array in masters} == {"pinned_host"}
        held = sum(s.data.nbytes for array in masters for s in array.addressable_shards)
        assert SIZE <= held < SIZE + 8 * 64
        total = sc.step(lambda state: state["odd"].sum())
        assert int(total(variables)) == 3 * 100_003
print(json.dumps(told))
"""

ARRAYS = """
# Arrays that are on one device, split over all, or in the hosts' memory: none is copied to others.
for name, sharding in {
    "one device": SingleDeviceSharding(jax.devices()[2]),
    "all devices": NamedSharding(mesh, P(("data", "model"))),
    "hosts": NamedSharding(mesh, P("data"), memory_kind="pinned_host"),
}.items():
    given = {"w": jax.device_put(state(5)["w"], sharding)}
    with sc.Session(mesh):
        with watching(name + ", made"):
            placement = sc.OnHost(on_device=sc.Sharded([("w", P())]))
            variables = sc.Variables(given, placement=placement)
        same(variables, {"w": state(5)["w"]})
        variables.assign({"w": state(6)["w"]})
        with watching(name + ", assigned"):
            variables.assign(given)
        given["w"].delete()
        same(variables, {"w": state(5)["w"]})
        (master,) = variables._master.arrays()
        assert master.sharding.memory_kind == "pinned_host"
print(json.dumps(told))
"""


def told_by(script: str) -> dict:
    environment = {**os.environ, "STEPCACHE_DIR": "off"}
    command = [sys.executable, "-W", "ignore::UserWarning", "-c", PROLOGUE + script]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.sample(every=2)
@pytest.mark.parametrize("script", [HOST_VALUES, ARRAYS], ids=["host values", "arrays"])
def test_a_state_larger_than_the_devices_memory_lives_on_the_host(script):
    """Made, assigned, pushed, looked at, saved and restored with a device memory of 1 % of it."""
    told = told_by(script)
    size = told.pop("size")
    assert size > 1_400_000 and len(told) == (18 if script is HOST_VALUES else 6)
    for what, (most_bytes, programs) in told.items():
        assert most_bytes <= size / 100, (what, most_bytes, size)
        assert programs == 0, what
