"""Entries under the user's own key, as from a bundle that was trusted, whose content is hostile.

Each costs a trace, and is said: nothing in it runs, and the user's step does not notice.
"""

import copy
import dataclasses
import functools
import operator
import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import stepcache as sc
from stepcache.jaxcompat import storing
from stepcache.storage import plain
from stepcache.storage.dependency_record import FORMAT, pack_records, unpack_records

pytestmark = pytest.mark.skipif(not storing.CAN_STORE, reason="nothing is stored")
MARK = "hostile-entry-ran"
TABLE = np.arange(8, dtype=np.float32)


def scale(state, batch):
    return {"w": state["w"] * batch.sum()}, (batch + jax.numpy.asarray(TABLE), None)


def run(directory):
    cache = sc.ProgramCache(directory, verify="off")
    step = sc.step(scale, batch="batch")
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with sc.Session(mesh, cache=cache):
        state, _ = step({"w": np.float32(2)}, np.ones(8, np.float32))
    cache.flush()
    assert state["w"] == 16
    return step.stats(), cache.archive().disk


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    directory = tmp_path_factory.mktemp("hostile") / "programs"
    run(directory)
    return directory


@pytest.fixture
def directory(built, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(built, tmp_path / "spoiled"))


def spoil(directory, change):
    """Stores the build with another description of its call, or another tree."""
    tier = sc.ProgramCache(directory, verify="off").archive().disk
    (entry,) = tier.entries("step")
    (record,) = unpack_records(tier.peek("step", entry.digest).payload)
    changed = change(copy.deepcopy(record))
    if isinstance(changed, bytes):
        tier.publish("step", entry.digest, {"label": "scale", "programs": []}, changed)
        return
    tier.publish("step", entry.digest, *pack_records("scale", [changed]))


def refused(directory):
    stats, tier = run(directory)
    assert (stats.traces, stats.misses, stats.loads) == (1, 1, 1), "traced, then found on level 2"
    assert [each.kind for each in tier.quarantined] == ["step"]
    assert not Path(MARK).exists()
    stats, tier = run(directory)
    assert (stats.traces, stats.loads) == (0, 1), "it was stored anew"
    assert not tier.quarantined


def test_it_loads_where_nothing_is_spoiled(directory):
    stats, tier = run(directory)
    assert (stats.traces, stats.loads) == (0, 1)
    spoil(directory, lambda record: record)
    stats, tier = run(directory)
    assert (stats.traces, stats.loads) == (0, 1) and not tier.quarantined


# ---- pickles: once, this was the format ---------------------------------------------------------


class Reduced:
    def __init__(self, *parts):
        self.parts = parts

    def __reduce__(self):
        return self.parts


def nested_tuples():
    value: Any = ()
    for _ in range(100):
        value = (value, value)
    return value


COMMAND = f"touch {MARK}"
GLOBAL = b"\x80\x04c%s\n%s\n"
PICKLES = {
    "os.system": pickle.dumps(Reduced(os.system, (COMMAND,))),
    "eval": pickle.dumps(Reduced(eval, (f"open({MARK!r}, 'w')",))),
    "exec": pickle.dumps(Reduced(exec, (f"open({MARK!r}, 'w')",))),
    "getattr": pickle.dumps(Reduced(getattr, (object, "__subclasses__"))),
    "a chain of getattr": b"cbuiltins\ngetattr\n(cbuiltins\nobject\nV__subclasses__\ntR(tR.",
    "a partial": pickle.dumps(Reduced(functools.partial, (os.system, COMMAND))),
    "an attribute getter": pickle.dumps(Reduced(operator.attrgetter("system"), ())),
    "a method caller": pickle.dumps(operator.methodcaller("system", COMMAND)),
    "numpy.load": pickle.dumps(Reduced(np.load, (MARK, None, True))),
    "numpy.memmap": pickle.dumps(Reduced(np.memmap, (MARK, "uint8", "w+", 0, 8))),
    "INST": b"(V" + COMMAND.encode() + b"\nios\nsystem\n.",
    "OBJ": b"(cos\nsystem\nV" + COMMAND.encode() + b"\no.",
    "EXT": b"\x80\x02\x82\x01.",
    "a persistent id": b"Pdevice\n.",
    "BUILD": b"cstepcache.errors\nStepCacheError\n)\x81}V__class__\ncos\nsystem\nsb.",
    "a dotted name": b"\x80\x04\x8c\x02os\x8c\x0bpath.system\x93.",
    "a global that is no text": b"\x80\x04K\x01K\x02\x93.",
    "a bomb of memos": pickle.dumps(nested_tuples()),
    "a huge integer": b"\x8b\xff\xff\xff\x7f",
    "JAX's own": pickle.dumps(Reduced(jax.tree_util.tree_map, (print, [COMMAND]))),
}


@pytest.mark.sample
@pytest.mark.parametrize("name", PICKLES)
@pytest.mark.parametrize("field", ["call", "tree"])
def test_a_pickle_is_refused(name, field, directory):
    content = PICKLES[name]
    value = content if field == "call" else ["node", content, ["leaf"]]
    spoil(directory, lambda record: dataclasses.replace(record, **{field: value}))
    refused(directory)


def test_nothing_in_the_package_unpickles():
    """Nor reads code or objects in another way than by Python's imports."""
    unsafe = re.compile(r"pickle\.loads?\(|Unpickler|marshal|shelve|allow_pickle=True|\beval\(")
    for file in Path(sc.__file__).parent.rglob("*.py"):
        assert not unsafe.search(file.read_text()), file


# ---- plain data that makes no sense -------------------------------------------------------------


def call(**changes):
    return lambda found: dataclasses.replace(found, call={**found.call, **changes})


def row(table, place, value):
    """Another value somewhere in the first row of a table."""

    def change(found):
        found.call[table][0][place] = value
        return found

    return change


def placed(devices):
    """Another list of devices for the mesh of the shardings."""

    def change(found):
        mesh = found.call["shardings"][0][0]
        found.call["meshes"][mesh][3] = devices
        return found

    return change


def tiled(*parts):
    """Shardings by tiles, as XLA gives them."""

    def change(found):
        found.call["shardings"] = [[*parts, "device"] for _ in found.call["shardings"]]
        return found

    return change


def deep(count):
    value: Any = "leaf"
    for _ in range(count):
        value = ["list", [value]]
    return value


CALLS = {
    "no map": lambda found: dataclasses.replace(found, call=7),
    "an empty map": lambda found: dataclasses.replace(found, call={}),
    "one more argument": lambda found: call(input_avals=[*found.call["input_avals"], 0])(found),
    "one result less": lambda found: call(output_avals=found.call["output_avals"][1:])(found),
    "a type that is not there": call(input_avals=[99, 99]),
    "a negative type": call(input_avals=[-1, -1]),
    "types by name": call(input_avals=["0", "0"]),
    "types by fractions": call(input_avals=[0.5, 0.5]),
    "shardings that are not there": call(shardings=[]),
    "a name of bytes": call(name=b"jit"),
    "a commitment of text": call(committed="yes"),
    "negative arguments": call(kept_var_idx=[-1]),
    "arguments that are no numbers": call(kept_var_idx=["0"]),
    "a negative size": row("avals", 0, [-8]),
    "a size of text": row("avals", 0, ["8"]),
    "an unknown type of elements": row("avals", 1, "object"),
    "elements of a class": row("avals", 1, ["key", "os.system"]),
    "weak text": row("avals", 2, "yes"),
    "an unknown memory": row("avals", 5, "__class__"),
    "a layout of text": row("avals", 6, [["a"], None, 0]),
    "a mesh that is not there": row("avals", 3, [7, [[], [], [], None]]),
    "a sharding of another kind": call(shardings=[["gspmd", [0], b"\xff" * 64, None]]),
    "a sharding on a type": call(shardings=[["os.system", [[], [], [], None], None]]),
    "a sharding on a negative mesh": row("shardings", 0, -1),
    "a spec of numbers": row("shardings", 1, [[7], [], [], None]),
    "a spec of unknown axes": row("shardings", 1, [["unknown"], [], [], None]),
    "memory of bytes": row("shardings", -1, b"device"),
    "a device that is not there": placed([*range(7), 1 << 20]),
    "a negative device": placed([*range(7), -1]),
    "a device of text": placed(["0"] * 8),
    "a device twice": placed([0] * 8),
    "a device less": placed([*range(7)]),
    "tiles of more than the devices": tiled([4, 4], list(range(8)), False),
    "tiles of a device twice": tiled([8], [0, 1, 2, 3, 4, 5, 6, 6], False),
    "tiles of no device": tiled([8], [0, 1, 2, 3, 4, 5, 6, 8], False),
    "tiles of a negative size": tiled([-8], list(range(8)), False),
    "tiles of texts": tiled(["8"], list(range(8)), False),
    "tiles said by a number": tiled([8], list(range(8)), 1),
    "no devices": placed([]),
    "shardings on no devices": placed(None),
    "a mesh of more than there is": call(meshes=[[["x"], [8], ["Auto"], [0], None]]),
    "a huge mesh": call(meshes=[[["x"], [1 << 60], ["Auto"], [0], None]]),
    "a mesh without names": call(meshes=[[[], [8], ["Auto"], None, None]]),
    "a mesh of an unknown kind": call(meshes=[[["x"], [1], ["mro"], None, None]]),
    "an abstract device of lists": call(meshes=[[["x"], [1], ["Auto"], None, [[], [], []]]]),
    "too few bytes": call(const_args=[[[4], "float32", b"\0" * 15]]),
    "too many bytes": call(const_args=[[[4], "float32", b"\0" * 17]]),
    "an enormous array": call(const_args=[[[1 << 40, 1 << 40], "float32", b""]]),
    "an array of a negative size": call(const_args=[[[-1], "float32", b""]]),
    "an array of objects": call(const_args=[[[1], "object", b"\0" * 8]]),
    "an array of text": call(const_args=[[[1], "uint8", "a"]]),
    "a tree of more leaves": lambda found: dataclasses.replace(found, tree=["list", ["leaf"] * 9]),
    "a tree of a position that is not there": lambda found: dataclasses.replace(
        found, tree=["known", [5, 5]]
    ),
    "a deep tree": lambda found: dataclasses.replace(found, tree=deep(300)),
    "a list that its trace left": lambda found: dataclasses.replace(found, left=["x"]),
    "what nothing depends on": lambda found: dataclasses.replace(found, left={"x": "1"}),
    "no packed data": lambda found: b"\xc1",
    "a list that does not end": lambda found: b"\xdd\xff\xff\xff\xff",
    "a nest of lists": lambda found: b"\x91" * 100_000,
    "a map of nothing": lambda found: b"\x80",
    "records that are none": lambda found: plain.pack({"format": FORMAT, "records": [1]}),
}


@pytest.mark.sample(every=8)
@pytest.mark.parametrize("name", CALLS)
def test_a_malformed_build_is_refused(name, directory):
    spoil(directory, CALLS[name])
    refused(directory)


@pytest.mark.parametrize(
    "payload", [[{"call": b"\x80\x05N."}], {"format": FORMAT + 1, "builds": []}]
)
def test_another_format_is_a_plain_miss(payload, directory, caplog):
    """Entries of earlier and of later versions are replaced, and nothing is said of them."""
    spoil(directory, lambda record: plain.pack(payload))
    stats, tier = run(directory)
    assert (stats.traces, stats.loads) == (1, 1)
    assert not tier.quarantined and not caplog.records
    assert run(directory)[0].traces == 0
