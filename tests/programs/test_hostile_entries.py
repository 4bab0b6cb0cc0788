"""Entries under the user's own key, as of another version, whose content is hostile or malformed.

Nothing in them runs, each costs a compilation at most, and the user's step does not notice.
"""

import os
import pickle
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import stepcache as sc
from stepcache import jaxcompat
from stepcache.cli import main
from stepcache.link import plain
from stepcache.storage.disk_store import DiskStore

pytestmark = pytest.mark.skipif(not jaxcompat.CAN_STORE, reason="nothing is stored")
MARK = "hostile-entry-ran"


def scale(x):
    return x * 2


def run(directory):
    cache, step = sc.ProgramCache(directory), sc.step(scale)
    with sc.Session(cache=cache):
        assert step(np.ones(3, np.float32))[0] == 2
    for _ in range(2):  # What is stored first says then what was used.
        cache.flush()
    return step.stats(), cache.store().disk


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    directory = tmp_path_factory.mktemp("hostile") / "programs"
    run(directory)
    return directory


@pytest.fixture
def directory(built, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(built, tmp_path / "spoiled"))


def spoil(directory, kind, about=None, payload=None):
    """Stores another entry in the place of the one there is of a kind."""
    disk = DiskStore(directory)
    (entry,) = disk.entries(kind)
    info = disk.peek(kind, entry.digest)
    about = info.header if about is None else about
    disk.publish(kind, entry.digest, about, info.payload if payload is None else payload)
    return entry.digest


class Reduced:
    def __init__(self, *parts):
        self.parts = parts

    def __reduce__(self):
        return self.parts


COMMAND = f"touch {MARK}"
PAYLOADS = {
    "os.system": pickle.dumps(Reduced(os.system, (COMMAND,))),
    "eval": pickle.dumps(Reduced(eval, (f"open({MARK!r}, 'w')",))),
    "INST": b"(V" + COMMAND.encode() + b"\nios\nsystem\n.",
    "nothing": b"",
    "no packed data": b"\xc1",
    "a list that does not end": b"\xdd\xff\xff\xff\xff",
    "a nest of lists": b"\x91" * 100_000,
    "a map of nothing": b"\x80",
    "rows that are none": plain.pack([{}, [[1], 2]]),
    "rows of other types": plain.pack([{}, [[None] * 11]]),
}


def test_it_loads_where_nothing_is_spoiled(directory):
    spoil(directory, "prediction")
    spoil(directory, "program")
    stats, disk = run(directory)
    assert (stats.traces, stats.compiles, stats.loads) == (1, 0, 1) and not disk.quarantined


@pytest.mark.parametrize("name", PAYLOADS)
def test_a_program_that_is_none_is_compiled_anew(name, directory):
    digest = spoil(directory, "program", payload=PAYLOADS[name])
    stats, disk = run(directory)
    assert (stats.compiles, stats.loads) == (1, 0)
    assert {each.digest for each in disk.quarantined} == {digest}
    stats, disk = run(directory)
    assert (stats.compiles, stats.loads) == (0, 1), "it was stored anew"
    assert not disk.quarantined and not Path(MARK).exists()


@pytest.mark.parametrize("name", PAYLOADS)
def test_a_prediction_that_is_none_predicts_nothing(name, directory):
    spoil(directory, "prediction", payload=PAYLOADS[name])
    for _ in range(2):
        stats, _ = run(directory)
        assert (stats.compiles, stats.loads) == (0, 1)
    assert not Path(MARK).exists()


ABOUT = {
    "nothing": {},
    "numbers": {"label": 3, "seconds": 3, "captured": 3, "module": 3},
    "texts": {"label": "", "seconds": {"trace": "long"}, "captured": [["a"]], "module": "x"},
    "bytes": {"label": b"\xff", "seconds": [b"x"], "captured": b"x", "module": b"x"},
}


@pytest.mark.parametrize("name", ABOUT)
def test_a_description_that_is_none_is_no_matter(name, directory):
    digest = spoil(directory, "program", about=ABOUT[name])
    stats, disk = run(directory)
    assert (stats.compiles, stats.loads) == (0, 1) and not disk.quarantined
    for words in (["ls"], ["show", digest, "--module"], ["verify"], ["why"]):
        shown = CliRunner().invoke(main, ["cache", *words, "--dir", str(directory)])
        assert shown.exit_code == 0, shown.output


def test_nothing_in_the_package_unpickles():
    """Nor reads code or objects in another way than by Python's imports."""
    unsafe = re.compile(r"pickle\.loads?\(|Unpickler|marshal|shelve|allow_pickle=True|\beval\(")
    for file in Path(sc.__file__).parent.rglob("*.py"):
        assert not unsafe.search(file.read_text()), file
