"""What tests of transfers look at: what moved, what lies in which memory, and meshes to move on."""

import collections
import contextlib
import gc

import jax
from jax.sharding import AxisType

import stepcache as sc
from stepcache.events import Moved, recorder
from stepcache.variables.plan import DEVICE_LINK, HOST_LINK

SHAPES = {
    "no mesh": None,
    "1": ((1,), ("data",)),
    "2": ((2,), ("data",)),
    "4": ((4,), ("data",)),
    "8": ((8,), ("data",)),
    "2x2": ((2, 2), ("data", "model")),
    "4x2": ((4, 2), ("data", "model")),
}


def mesh_of(name: str):
    """ "8" and "4x2" have Auto axes, "8 explicit" Explicit ones; None for "no mesh"."""
    shape = SHAPES[name.removesuffix(" explicit")]
    if shape is None:
        return None
    sizes, names = shape
    kind = AxisType.Explicit if name.endswith("explicit") else AxisType.Auto
    count = 1
    for size in sizes:
        count *= size
    devices = jax.devices()[:count]
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(names), devices=devices)


def session(name: str, **options):
    """A session on a mesh of `mesh_of`, as a context; none for "no mesh"."""
    mesh = mesh_of(name)
    return contextlib.nullcontext() if mesh is None else sc.Session(mesh, **options)


class Watched:
    """The bytes that crossed each link, call by call, since it was made."""

    def __init__(self):
        self.calls: list[dict[str, int]] = []

    def __call__(self, event) -> None:
        if isinstance(event, Moved):
            self.calls.append(dict(event.link_bytes))

    @property
    def host_bytes(self) -> int:
        return sum(call.get(HOST_LINK, 0) for call in self.calls)

    @property
    def device_bytes(self) -> int:
        return sum(call.get(DEVICE_LINK, 0) for call in self.calls)


@contextlib.contextmanager
def watching():
    """Gives a `Watched` that hears of the calls made inside."""
    watched = Watched()
    unsubscribe = recorder.subscribe(watched)
    try:
        yield watched
    finally:
        unsubscribe()


def live_buffers() -> dict[tuple, int]:
    """Bytes of each live buffer, by memory kind, device and address: what several arrays share
    counts once."""
    gc.collect()
    buffers = {}
    for array in jax.live_arrays():
        if array.is_deleted() or jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
            continue
        jax.block_until_ready(array)
        for shard in array.addressable_shards:
            if shard.data.nbytes:
                place = (array.sharding.memory_kind, shard.device)
                buffers[(*place, shard.data.unsafe_buffer_pointer())] = shard.data.nbytes
    return buffers


def live_bytes(more_than=None) -> collections.Counter:
    """Live bytes by memory kind; those that are not in `more_than`, of `live_buffers`, if given."""
    known, found = more_than or {}, collections.Counter()
    for place, size in live_buffers().items():
        if place not in known:
            found[place[0]] += size
    return found
