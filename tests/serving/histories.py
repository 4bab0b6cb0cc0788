"""What processes saw of a served variable, and whether one order of their operations explains it.

Each process adds 1 at places of its own, and reads. The value is a set that grows: a history is
linearizable (Herlihy and Wing, 1990) if what the reads have seen is a chain of sets, and if each
read sees what was written, or read, before it began.

    tests/serving/histories.py PATH ADDRESS NAME FIRST COUNT STALENESS
"""

import itertools
import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import stepcache as sc
from tests.serving.servers import Child

PLACES = 2000
PAUSE_SECONDS = 0.005  # Between two operations, so that something can happen meanwhile.


@dataclass(frozen=True)
class Operation:
    """One of a history.

    Attributes:
        places: which a read has seen, or to which a write adds.
        start, end: when it was under way, in seconds; what was never answered has no end.
    """

    is_read: bool
    places: frozenset
    start: float
    end: float = float("inf")


def violations(history, lost=frozenset()):
    """What no order of the operations explains, as text.

    Args:
        history: operations of all processes.
        lost: places of writes that may be lost, because their process was killed.
    """
    reads = [each for each in history if each.is_read]
    writes = [each for each in history if not each.is_read]
    found = []
    seen = sorted((each.places - lost for each in reads), key=len)
    if not all(one <= other for one, other in itertools.pairwise(seen)):
        found.append("two reads have seen writes in another order")
    known = {}  # Since when each place has to be seen by reads that begin.
    for each in history:
        for place in each.places - lost:
            known[place] = min(each.end, known.get(place, float("inf")))
    begun = {place: each.start for each in writes for place in each.places}
    for each in reads:
        known_then = {place for place, since in known.items() if since < each.start}
        missing = sorted(known_then - each.places)
        if missing:
            found.append(f"a read has not seen {missing[:5]}, which were there before it began")
        if early := [place for place in each.places if begun.get(place, 0) > each.end]:
            found.append(f"a read has seen {early[:5]} before they were written")
    return found


def record(path, address, name, first, count, staleness):
    with sc.connect(address, timeout=60) as connection:
        tree = {"counts": np.zeros(PLACES, np.float32)}
        read = sc.Read(cache="device", max_staleness=staleness)
        params = connection.variables(name, tree, read=read, write=sc.Write(mode="add"))
        look = sc.step(lambda params: params["counts"] + 0)
        with Path(path).open("w") as out:
            for place in range(first, first + count):
                update = np.zeros(PLACES, np.float32)
                update[place] = 1
                start = time.monotonic()
                print(json.dumps(["write", [place], start]), file=out, flush=True)
                params.push({"counts": update})
                row = ["write", [place], start, time.monotonic()]
                print(json.dumps(row), file=out, flush=True)
                start = time.monotonic()
                counts = np.asarray(look(params))
                assert counts.max() <= 1, "a push was done twice"
                assert counts[place] == 1, "its own push is missing"
                row = ["read", np.flatnonzero(counts).tolist(), start, time.monotonic()]
                print(json.dumps(row), file=out, flush=True)
                time.sleep(PAUSE_SECONDS)


class Recorder:
    """A process that records a history, under another script if one is given. It has begun."""

    def __init__(self, path, address, name, first, count, staleness=0, under=()):
        self.path, self.staleness, self.is_killed = path, staleness, False
        command = (*under, "tests/serving/histories.py")
        self.child = Child(path.parent, *command, path, address, name, first, count, staleness)

        def has_begun():
            if under and not self.child.is_running():
                path.touch()  # It was killed before.
            return path.exists()

        self.child.wait_until(has_begun)

    def kill(self):
        self.is_killed = True
        self.child.kill()

    def history(self):
        """Its operations, when it has ended. Reads began with the one whose copy they may use."""
        code, _, errors = self.child.end()
        assert code == 0 or self.is_killed, errors
        operations, starts = {}, []
        for line in self.path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                kind, places, *times = json.loads(line)
                operation = Operation(kind == "read", frozenset(places), *times)
                if operation.is_read:
                    starts = [*starts, operation.start][-1 - self.staleness :]
                    operation = replace(operation, start=starts[0])
                operations[kind, len(operations) if operation.is_read else places[0]] = operation
        return list(operations.values())


if __name__ == "__main__":
    path, address, name, *numbers = sys.argv[1:]
    record(path, address, name, *map(int, numbers))
