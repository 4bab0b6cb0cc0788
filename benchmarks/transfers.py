"""What reads of variables on the host move and take, next to plain JAX.

    python -m benchmarks.transfers [--quick]

First the bytes over each link for R readers × N devices × K steps, by what is kept, next to the
lower bound, by which each version crosses the host's link once, and to what `jax.device_put` to
every device moves. Then a loop that waits for each step, without a read, with one, and with
`jax.device_put`. On an accelerator, at last, the bandwidth of a read next to that of
`jax.device_put` to one device.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

os.environ["STEPCACHE_DIR"] = "off"  # What is kept between processes is another affair.
os.environ.setdefault("NPROC", "32")  # The size of XLA's thread pool: see examples/char_lm.py.

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from rich.console import Console
from rich.table import Table

import stepcache as sc
from benchmarks.harness import Row, interleaved, show, write
from stepcache.events import Moved
from stepcache.variables.plan import DEVICE_LINK, HOST_LINK

PLAIN = "jax.device_put"


def session(devices: int) -> sc.Session:
    chosen = jax.devices()[:devices]
    return sc.Session(jax.make_mesh((devices,), ("data",), (AxisType.Auto,), devices=chosen))


# ---- bytes -----------------------------------------------------------------------------------

STEPS, PUSH_EVERY, READERS = 8, 4, 4
VERSIONS = STEPS // PUSH_EVERY
VALUE = {"large": np.ones(200_003, np.float32), "few": [np.ones(7, np.float32)] * 3}
KEPT = {"each call": None, "each version": "device"}


def padded(layout, devices: int) -> int:
    """Bytes of the shares that a read copies: of equal size, so padded."""
    sizes = ((np.prod(buffer.shape), buffer.dtype.itemsize) for buffer in layout.buffers)
    return sum(-(-int(size) // devices) * devices * width for size, width in sizes)


def expected(reads: int, devices: int, layout) -> tuple[int, int]:
    """Bytes over the host's link, and between devices, of so many reads."""
    size, shares = layout.size_bytes, padded(layout, devices)
    return reads * shares, reads * (devices * size - shares)


def moved_by(devices: int, read: sc.Read, shared: bool) -> tuple[Counter, Any]:
    """What crosses each link for readers while another session assigns a value every few steps.

    Args:
        devices: how many.
        read: the policy.
        shared: whether the readers are arguments of one call, or calls of their own.
    """
    look = sc.step(lambda *trees: sum(tree["large"][0] for tree in trees))
    moved: Counter = Counter()

    def count(event) -> None:
        if isinstance(event, Moved) and event.step != value.name:  # No assignment.
            moved.update(dict(event.link_bytes))

    writer, reader = session(devices), session(devices)
    with writer:
        value = sc.Variables(VALUE, placement=sc.OnHost(), read=read)
    unsubscribe = sc.recorder.subscribe(count)
    for step in range(STEPS):
        if step and step % PUSH_EVERY == 0:
            with writer:
                value.assign(jax.tree.map(lambda leaf: leaf * (2 + value.version), VALUE))
        with reader:
            for arguments in [[value] * READERS] if shared else [[value]] * READERS:
                seen = float(look(*arguments))
                assert seen == (1 + value.version) * len(arguments)
    unsubscribe()
    return moved, value._layout


def traffic() -> list[dict[str, Any]]:
    """The bytes of every case; those that are not what they have to be are an error."""
    rows = []
    for devices in (1, 2, 4, 8):
        if devices > jax.device_count():
            continue
        for how, cache in KEPT.items():
            for shared in (False, True) if cache is None else (False,):
                moved, layout = moved_by(devices, sc.Read(cache=cache), shared)
                calls = STEPS if shared else STEPS * READERS
                reads = calls if cache is None else VERSIONS
                found = moved[HOST_LINK], moved[DEVICE_LINK]
                assert found == expected(reads, devices, layout), (devices, cache, found)
                readers = f"{READERS} {'arguments' if shared else 'calls'}"
                rows.append(row_of(devices, readers, how, found, layout))
        plain = STEPS * READERS * devices * layout.size_bytes, 0
        rows.append(row_of(devices, f"{READERS} calls", PLAIN, plain, layout))
    return rows


def row_of(devices: int, readers: str, read: str, found, layout) -> dict[str, Any]:
    return {
        "devices": devices,
        "readers": readers,
        "read": read,
        "host_link_bytes": found[0],
        "device_link_bytes": found[1],
        "lower_bound_bytes": VERSIONS * layout.size_bytes,
        "padding_bytes": VERSIONS * (padded(layout, devices) - layout.size_bytes),
    }


def show_traffic(rows: list[dict[str, Any]]) -> None:
    title = f"bytes of {STEPS} steps, {VERSIONS} versions; the bound is once a version"
    table = Table(title=title, title_justify="left")
    for name in ("devices", "readers", "read", "MB from the host", "of the bound"):
        table.add_column(name, justify="right" if name[0] in "Mo" else "left")
    table.add_column("MB between devices", justify="right")
    for row, following in itertools.zip_longest(rows, rows[1:], fillvalue=rows[-1]):
        table.add_row(
            *(str(row[name]) for name in ("devices", "readers", "read")),
            f"{row['host_link_bytes'] / 1e6:.2f}",
            f"{row['host_link_bytes'] / row['lower_bound_bytes']:.4g} ×",
            f"{row['device_link_bytes'] / 1e6:.2f}",
            end_section=row["devices"] != following["devices"],
        )
    Console(width=118).print(table)


# ---- time ------------------------------------------------------------------------------------

BUSY = 2  # The step is so many times as long as the read.


def computing(x, amount):
    """A step that computes: on CPU devices, with the cores that the read needs too."""
    return jax.lax.fori_loop(0, amount.astype(int), lambda _, x: jnp.tanh(x @ x) * 0.5 + 0.1, x)


def waiting(x, amount):
    """A step that leaves the host's cores alone, as that of an accelerator does."""

    def wait(seconds):
        time.sleep(float(seconds))
        return np.asarray(seconds)

    return x + 0 * jax.pure_callback(wait, jax.ShapeDtypeStruct((), np.float32), amount)


def reading(devices: int, busy: Callable, megabytes: int, **settings) -> list[Row]:
    """A loop that waits for each step: without a read, with one, and with `jax.device_put`."""

    @sc.step
    def step(value, x, amount):
        return busy(x, amount).sum() + sum(leaf[0] for leaf in value)

    on_cpu = jax.default_backend() == "cpu"
    x = np.full((devices, 16, 16) if on_cpu else (devices, 2048, 2048), 0.1, np.float32)
    tree = [np.ones((megabytes << 20) // 4 // 8, np.float32)] * 8
    reads = {"no read": sc.Read(cache="device"), "a read": sc.Read()}
    with session(devices):
        mesh = sc.current_session().mesh
        x = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))
        everywhere = jax.NamedSharding(mesh, jax.P())
        values = {n: sc.Variables(tree, placement=sc.OnHost(), read=r) for n, r in reads.items()}

        def call(name: str, amount: Any) -> Any:
            value = jax.device_put(tree, everywhere) if name == PLAIN else values[name]
            return jax.block_until_ready(step(value, x, np.float32(amount)))

        def seconds(name: str, amount: float) -> float:
            """The median time of a step."""
            times = []
            for _ in range(9):
                started = time.perf_counter()
                call(name, amount)
                times.append(time.perf_counter() - started)
            return float(np.median(times))

        idle = seconds("no read", 0)
        wanted = BUSY * max(seconds("a read", 0) - idle, 1e-3)
        amount = 200.0 if busy is computing else 0.05
        for _ in range(3):
            amount *= wanted / max(seconds("no read", amount) - idle, 1e-5)

        def contender(name: str) -> Callable:
            return lambda: call(name, amount)

        case = f"{devices} device{'s' * (devices > 1)}, {busy.__name__}, {megabytes} MiB"
        return interleaved(case, {n: contender(n) for n in (*reads, PLAIN)}, **settings)


def bandwidth(megabytes: int, **settings) -> tuple[list[Row], dict[str, float]]:
    """Reads of one large leaf, next to plain copies to one device, in GB/s."""
    array = np.ones(megabytes << 18, np.float32)
    first = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    pinned = jax.device_put(array, first.with_memory_kind("pinned_host"))
    look = sc.step(lambda value: value[0])
    with session(1):
        value = sc.Variables(array, placement=sc.OnHost(), read=sc.Read())
        contenders = {
            "jax.device_put of numpy": lambda: jax.block_until_ready(jax.device_put(array, first)),
            "jax.device_put of pinned": lambda: jax.block_until_ready(
                jax.device_put(pinned, first)
            ),
            "a read": lambda: jax.block_until_ready(look(value)),
        }
        rows = interleaved(f"{megabytes} MiB to one device", contenders, **settings)
    return rows, {row.contender: array.nbytes / row.median_seconds / 1e9 for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="show that it runs; no real figures")
    quick = parser.parse_args().quick
    jax.config.update("jax_num_cpu_devices", 8)
    settings = {"rounds": 3 if quick else 31, "batch_seconds": 0.005 if quick else 0.1}
    moved = traffic()
    show_traffic(moved)
    details: dict[str, Any] = {"moved": moved}
    devices, on_cpu = jax.device_count(), jax.default_backend() == "cpu"
    megabytes = 2 if quick else 16 if on_cpu else 512
    cases = [(devices, computing, megabytes)]
    if on_cpu:
        cases = [(1, computing, 4 * megabytes), *cases, (devices, waiting, megabytes)]
    rows = [row for case in cases for row in reading(*case, **settings)]
    if on_cpu:
        print("no accelerator here: the bandwidth of reads is not measured")
    else:
        more, details["gigabytes_per_second"] = bandwidth(megabytes, **settings)
        rows += more
        print(details["gigabytes_per_second"])
    show("a loop that waits for each step", rows)
    if not quick:
        print(f"written to {write('transfers', rows, details, **settings)}")


if __name__ == "__main__":
    main()
