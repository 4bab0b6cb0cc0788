"""Measures how long a value takes from host memory to devices and back.

Each time is what a transfer adds to a program that waits for it: the median of several runs of a
trivial program with the transfer, less that of the program alone.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from stepcache import jaxcompat
from stepcache.sharding import Placer, Rules, processes_of
from stepcache.variables.link_times import ROUTES, LinkTimes, keep, kept_times, machine_of, today
from stepcache.variables.masters import hold
from stepcache.variables.packing import Packed
from stepcache.variables.policy import OnHost, Placement, Read, Sharded
from stepcache.variables.routes import Route
from stepcache.variables.shares import HostLayout
from stepcache.variables.transfer import Meter, write

SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24)
"""Bytes of the values that are measured."""
_LEAVES, _LEAF_BYTES = 16, 1 << 12
_RUNS, _RUN_BYTES = (7, 25), 1 << 22  # Of values of more bytes than these; and of others.


def fastest_read(placement: Placement, tree: Any, placer: Placer | None) -> Read:
    """Returns the policy that takes the least time of those that change no result.

    A copy is kept on the devices unless it would take more than an eighth of the memory of one.
    The links are measured, so that `route="auto"` is the fastest here.
    """
    if not isinstance(placement, OnHost):
        return Read()
    size_bytes = sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree_util.tree_leaves(tree))
    devices = _devices(placer)
    if len(devices) > 1 and len(processes_of(devices)) == 1:
        link_times(placer)
    here = [each for each in devices if each.process_index == jax.process_index()]
    limits = [(each.memory_stats() or {}).get("bytes_limit", math.inf) for each in here]
    return Read(cache="device") if size_bytes <= min(limits) / 8 else Read()


def link_times(placer: Placer | None) -> LinkTimes:
    """Returns the times between this host and some devices, by default one; measures unknown ones.

    They are kept in the user's cache directory, for this machine and number of devices, and not
    where `STEPCACHE_DIR` is `off`. A mesh over several processes is measured each time, by all of
    them together.
    """
    devices = _devices(placer)
    machine, spans = machine_of(devices), len(processes_of(devices)) > 1
    kept = kept_times(machine)
    if spans:
        return _measured(machine, placer, routes=("gather",))
    if not kept:
        kept.append(_measured(machine, placer))
        keep(kept[0])
    return kept[0]


def _devices(placer: Placer | None) -> list[Any]:
    return list(placer.mesh.devices.flat) if placer else [jaxcompat.default_device()]


def _measured(machine: str, placer: Placer | None, routes: Sequence[str] = ROUTES) -> LinkTimes:
    """Measures transfers of values of several sizes, and of several leaves."""
    seconds = {
        f"{operation} {size}": took
        for size in SIZES
        for operation, took in _operations(placer, [size], routes).items()
    }
    times = LinkTimes(machine, today(), seconds, {}, _overlap(placer))
    several = _operations(placer, [_LEAF_BYTES] * _LEAVES, routes)
    for operation, took in several.items():
        more = took - times.of(operation, _LEAVES * _LEAF_BYTES)
        times.leaf_seconds[operation] = max(0.0, more) / (_LEAVES - 1)
    return times


def _operations(
    placer: Placer | None, sizes: Sequence[int], routes: Sequence[str]
) -> dict[str, float]:
    """The seconds of each operation on a value of leaves of such sizes."""
    master = _master(placer, sizes)
    layout, packed = master.host_layout, master.packed
    resident = Route(layout, "gather").read(packed, Meter())
    reads = {route: Route(layout, route) for route in routes}
    runs: dict[str, Callable[[], Any]] = {
        name: functools.partial(lambda route: _looked_at(route.read(packed, Meter())), route)
        for name, route in reads.items()
    }
    runs["program"] = lambda: layout.read(list(packed.buffers))
    runs["carry"] = functools.partial(_carried, layout, list(packed.buffers))
    ahead = reads["fanout" if "fanout" in routes else "gather"]
    runs["ahead"] = lambda: _looked_at(ahead.read(packed, Meter(), ahead=True))
    if placer is not None:
        rules = Rules([("", PartitionSpec(tuple(placer.mesh.axis_names)))])
        shards = _master(placer, sizes, OnHost(Sharded(rules)))
        split = Route(shards.host_layout, "gather")
        runs["split"] = lambda: _looked_at(split.read(shards.packed, Meter()))
    idle = _median(lambda: _looked_at(resident), sum(sizes))
    found = {name: max(0.0, _median(run, sum(sizes)) - idle) for name, run in runs.items()}
    found.setdefault("split", found["gather"])  # On one device they are the same.
    return found | {"write": _median(lambda: write(resident, layout, Meter()).buffers, sum(sizes))}


def _master(placer: Placer | None, sizes: Sequence[int], placement: Any = None) -> Any:
    tree = [np.ones(size // 4, np.float32) for size in sizes]
    return hold("links", tree, placement or OnHost(), placer, Read(), Meter())


@functools.partial(jax.jit, static_argnums=0)
def _carried(layout: HostLayout, buffers: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """A program that reads a value, changes it, and writes it back."""
    leaves = layout.unpack(buffers)  # Returned, so that XLA reads all of it on each device.
    return leaves, layout.pack([each * 2 for each in leaves])


@jax.jit
def _look(buffers: Sequence[Any]) -> list[Any]:
    return [each.ravel()[:1] for each in buffers]


def _looked_at(packed: Packed) -> list[Any]:
    """The outputs of a program that takes a value, and does next to nothing."""
    return _look(packed.buffers)


def _median(run: Callable[[], Any], size_bytes: int = 0) -> float:
    # As often in each process of a pod, whatever it takes there: they run programs together.
    times = []
    for number in range(_RUNS[size_bytes <= _RUN_BYTES] + 2):
        started = time.perf_counter()
        jax.block_until_ready(run())
        if number > 1:
            times.append(time.perf_counter() - started)
    return float(np.median(times))


def _overlap(placer: Placer | None) -> float:
    """The share of a read ahead that is hidden by a program that computes for as long."""
    master = _master(placer, [SIZES[-1]])
    route = Route(master.host_layout, "fanout" if master.is_here else "gather")
    resident = route.read(master.packed, Meter())

    @jax.jit
    def busy(buffers: Sequence[Any], turns: Any) -> Any:
        x = buffers[0][:4096].reshape(64, 64)
        return jax.lax.fori_loop(0, turns, lambda _, x: jax.numpy.tanh(x @ x), x)

    def ahead() -> Any:
        return route.read(master.packed, Meter(), ahead=True).buffers

    reading, turns = _median(ahead, SIZES[-1]), 100
    computing = _median(lambda: busy(resident.buffers, turns), SIZES[-1])
    turns = int(turns * max(1.0, reading / computing))
    computing = _median(lambda: busy(resident.buffers, turns), SIZES[-1])
    both = _median(lambda: (busy(resident.buffers, turns), ahead()), SIZES[-1])
    return min(1.0, max(0.0, (reading + computing - both) / min(reading, computing)))
