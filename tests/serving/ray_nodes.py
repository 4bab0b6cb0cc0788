"""A Ray cluster of five nodes on this machine, one of which is lost: `python -m ... DIRECTORY`.

Three hosts share variables, workers on a fourth node push and read. Ray's logs go to standard
error; what is found goes to standard output, as JSON.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import stepcache as sc
from stepcache.serving import ray_engine

HOSTS, LEAVES, PUSHES = 3, 6, 60
STORE_BYTES = 150 << 20


def raylet_of(pid):
    """The process of the node that an actor is on."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def wait_until_all_are_seen(nodes):
    """Before that, an actor may be put on another node than is asked for."""
    nothing = ray.remote(num_cpus=0)(lambda: None)
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        while True:
            try:
                ray.get(nothing.options(scheduling_strategy=there).remote())
                break
            except ray.exceptions.RayError:
                time.sleep(0.2)


@ray.remote(num_cpus=1)
def work(number):
    """Pushes ones at places of its own, also to rows of a table; reads what it has pushed."""
    tree = {f"w{n}": np.zeros((2, PUSHES), np.float32) for n in range(LEAVES)}
    with sc.connect("ray:params", timeout=120) as connection:
        params = connection.variables("params", tree, write=sc.Write(mode="add"))
        table = connection.table("table", 2 * PUSHES)
        for push in range(PUSHES):
            update = {path: np.zeros_like(leaf) for path, leaf in tree.items()}
            for leaf in update.values():
                leaf[number, push] = 1
            params.push(update)
            rows = table.lookup([number * PUSHES + push])
            table.push(rows, np.ones(8, np.float32))
            if push % 10 == 0:
                assert all(leaf[number, push] == 1 for leaf in params.value.values())
            time.sleep(0.1)
    return tree


def main():
    head = {"num_cpus": 0, "object_store_memory": STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [cluster.add_node(num_cpus=2, object_store_memory=STORE_BYTES) for _ in range(4)]
    ray.init(address=cluster.address, log_to_driver=False)
    raylets = {node.all_processes["raylet"][0].process.pid: node for node in nodes}
    wait_until_all_are_seen(nodes)
    found = {}

    def start():
        directory, options = Path(sys.argv[1]), {"snapshot_seconds": 0.5}
        actors = ray_engine.start("params", directory, hosts=HOSTS, **options)
        return [raylet_of(about.pid) for about in actors]

    before = found["before"] = start()
    free = next(node for pid, node in raylets.items() if pid not in before)
    there = NodeAffinitySchedulingStrategy(free.node_id, soft=False)
    workers = [work.options(scheduling_strategy=there).remote(number) for number in range(2)]
    time.sleep(4)
    lost = next(pid for pid in before[1:] if pid in raylets)  # Not that of this process.
    found["lost"] = lost
    cluster.remove_node(raylets[lost], allow_graceful=False)
    tree = ray.get(workers)[0]
    with sc.connect("ray:params", timeout=120) as connection:
        value = connection.variables("params", tree).value
        rows = connection.table("table", 2 * PUSHES).lookup(np.arange(2 * PUSHES)).spread()
    found["values"] = sorted({float(each) for leaf in value.values() for each in leaf.flat})
    found["rows"] = sorted({float(each) for each in rows})
    found["after"] = start()
    ray_engine.stop("params")
    print(json.dumps(found), flush=True)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
