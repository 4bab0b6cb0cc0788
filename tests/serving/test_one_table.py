"""The table of copies, in two pages of the documentation: each cell is measured."""

import re
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import stepcache as sc
from stepcache.events import Moved
from stepcache.variables.plan import DEVICE_LINK, HOST_LINK, SERVER_LINK

DOCS = Path(__file__).parent.parent.parent / "docs"
ROWS, WIDTH = 16, 8
SIZE = ROWS * WIDTH * 4
LATE = sc.Read(cache="device", max_staleness=1)
READS = {
    "": sc.Read(),
    '`Read(cache="device")`': sc.Read(cache="device"),
    "`max_staleness=k`": LATE,
}
NOTHING, QUESTION = "nothing", "nothing but the question"


def documented(page):
    """The rows of the table: kind of variable and policy, and its other cells."""
    text = (DOCS / page).read_text(encoding="utf-8")
    (table,) = re.findall(r"<!-- table: copies -->(.*?)<!-- end of table -->", text, re.DOTALL)
    rows, kind = {}, ""
    for line in table.strip().splitlines()[2:]:
        first, *cells = (cell.strip() for cell in line.strip().strip("|").split("|"))
        policy = first.removeprefix("… with ") if first.startswith("…") else ""
        kind = kind if policy else first.partition(":")[0]
        rows[kind, policy] = cells
    return rows


TABLE = documented("what-is-cached.md")


@sc.step
def total(value, *rest):
    return value.sum()


@sc.step
def total_of_rows(rows):
    return rows.values.sum()


class Case:
    """Readers and a writer of one kind of variable."""

    def __init__(self, devices, read, write):
        self.devices, self.read, self.write = devices, read, write


def crossing(devices, links):
    """Bytes by link, in the words of the table."""
    if not links:
        return NOTHING
    words = {
        HOST_LINK: "host ↔ device: once",
        DEVICE_LINK: "device ↔ device: once for each further device",
        SERVER_LINK: "server ↔ process: once",
    }
    sizes = {HOST_LINK: SIZE, DEVICE_LINK: (devices - 1) * SIZE, SERVER_LINK: SIZE}
    if SERVER_LINK in links and HOST_LINK in links:
        words[HOST_LINK] = "host ↔ device: once for each device"
        sizes[HOST_LINK] = devices * SIZE
    if SERVER_LINK in links and HOST_LINK not in links:
        if links[SERVER_LINK] > SIZE:
            assert links[SERVER_LINK] < 1.5 * SIZE
            return "server ↔ process: the rows of the batch and their numbers"
        assert links[SERVER_LINK] < 20 * ROWS
        return "server ↔ process: numbers and versions of the rows"
    assert links == {link: sizes[link] for link in links}, links
    return "; ".join(words[link] for link in (SERVER_LINK, HOST_LINK, DEVICE_LINK) if link in links)


def test_both_pages_have_the_same_table():
    assert documented("reading-variables.md") == TABLE and len(TABLE) == 9


@pytest.fixture(params=[1, 8])
def case(request, connection, name):
    """Makes a case of a kind of variable and a policy."""
    devices = request.param
    mesh = jax.make_mesh((devices,), ("data",), (AxisType.Auto,), devices=jax.devices()[:devices])
    session, elsewhere = sc.Session(mesh), sc.Session(mesh)
    ones = np.ones((ROWS, WIDTH), np.float32)

    def make(kind, read):
        if kind.startswith("on "):
            placement = sc.Replicated() if kind == "on devices" else sc.OnHost()
            with session:
                value = sc.Variables(ones, placement=placement, read=read)
        elif kind == "in a server":
            with session:
                value = connection.variables(name, ones, read=read)
            theirs = sc.connect(connection.address)
            request.addfinalizer(theirs.close)
            with elsewhere:
                other = theirs.variables(name, ones)
        else:
            table = connection.table(name, ROWS, (WIDTH,), read=read)
            theirs = sc.connect(connection.address)
            request.addfinalizer(theirs.close)
            other = theirs.table(name, ROWS, (WIDTH,))

            def write_rows():
                rows = other.lookup(np.arange(ROWS))
                other.push(rows, ones)

            return Case(1, lambda: total_of_rows(table.lookup(np.arange(ROWS))), write_rows)
        written = other if kind == "in a server" else value

        def read_it():
            with session:
                return total(value)

        def write():
            with elsewhere:
                written.assign(written.value + 1)

        return Case(devices, read_it, write)

    return make


IN_PROCESS = [row for row in TABLE if row[0] != "on tasks"]


@pytest.mark.parametrize("row", IN_PROCESS, ids=" ".join)
def test_each_cell_is_what_happens(case, row):
    kind, policy = row
    by_default, where, invalid, moved_when_same = TABLE[row]
    one = case(kind, READS[policy])
    found: Counter[str] = Counter()

    def note(event):
        if isinstance(event, Moved):
            found.update(dict(event.link_bytes))

    def moved_by(call):
        found.clear()
        jax.block_until_ready(call())
        return {link: size for link, size in found.items() if size}

    unsubscribe = sc.recorder.subscribe(note)
    try:
        first = float(one.read())
        unchanged = moved_by(one.read)
        said = crossing(one.devices, unchanged)
        documented = moved_when_same.replace(QUESTION, NOTHING)
        if one.devices == 1:
            documented = documented.replace("; device ↔ device: once for each further device", "")
        assert said == documented
        kept = said == NOTHING or "versions of the rows" in said
        assert kept == (where != "") and (by_default == "no") == (not policy and not kept)
        one.write()
        if "k steps" in invalid:  # The next step gets the older value; the one after it the new.
            assert float(one.read()) == first
        assert float(one.read()) != first
        if "newer version" in invalid:
            one.write()
            assert moved_by(one.read) != unchanged
    finally:
        unsubscribe()


@pytest.mark.slow
def test_the_row_of_tasks_is_what_happens():
    by_default, _, _, moved = TABLE["on tasks", ""]
    assert (by_default, moved) == ("none is needed", NOTHING)
    found = []
    with sc.Session(target="local:1x2") as session:
        value = sc.Variables(np.ones((ROWS, WIDTH), np.float32))
        assert float(total(value)) == ROWS * WIDTH
        unsubscribe = sc.recorder.subscribe(found.append)
        assert float(total(value)) == ROWS * WIDTH
        unsubscribe()
    session.close()
    assert not [
        event
        for event in found
        if isinstance(event, Moved) and sum(dict(event.link_bytes).values())
    ]
