"""What processes do that push: `tests/serving/workers.py ADDRESS NAME FIRST COUNT`.

Each pushes one 1 at each of its places, and prints the number of each push that was acknowledged.
"""

import os
import sys
import time

import numpy as np

import stepcache as sc

PLACES = 20_000  # So many that an update travels in shared memory.
PAUSE_SECONDS = 0.005  # Between two pushes, so that something can happen meanwhile.


def push(out, address, name, first, count):
    with sc.connect(address, timeout=60) as connection:
        tree = {"counts": np.zeros(PLACES, np.float32)}
        params = connection.variables(name, tree, write=sc.Write(mode="add"))
        print("ready", file=out, flush=True)
        for number in range(first, first + count):
            update = np.zeros(PLACES, np.float32)
            update[number] = 1
            params.push({"counts": update})
            print(number, file=out, flush=True)
            time.sleep(PAUSE_SECONDS)
            if number % 5 == 0:
                assert params.value["counts"][number] == 1
        connection.flush()
        print("done", file=out, flush=True)


if __name__ == "__main__":
    address, name, first, count = sys.argv[1:]
    acknowledgements = os.fdopen(os.dup(1), "w")
    sys.stdout = sys.stderr  # Ray prints what it sees of crashes, in the middle of lines of others.
    push(acknowledgements, address, name, int(first), int(count))
