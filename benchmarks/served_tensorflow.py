"""TensorFlow's `ParameterServerStrategy`, for `benchmarks.served`."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator

from benchmarks.served_processes import BATCH, ROWS, WIDTH, Group, free_port

_TENSORFLOW = (
    f"""
ROWS, WIDTH, BATCH = {ROWS}, {WIDTH}, {BATCH}
"""
    + """
import json, os, sys, time
import tensorflow as tf
role, index, size, workers = sys.argv[1], *map(int, sys.argv[2:5])
spec = tf.train.ClusterSpec(json.loads(sys.argv[5]))
if role != "chief":
    tf.distribute.Server(spec, job_name=role, task_index=index, protocol="grpc").join()
resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
    spec, rpc_layer="grpc", task_type="chief", task_id=0
)
strategy = tf.distribute.ParameterServerStrategy(resolver)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    variable = tf.Variable(tf.zeros([size] if size else [ROWS, WIDTH]))

@tf.function
def step():
    if size:
        largest = tf.reduce_max(variable.read_value())
        variable.assign_add(tf.fill([size], largest * 0 + 1))
    else:
        ids = tf.random.uniform([BATCH], 0, ROWS, tf.int64)
        rows = tf.nn.embedding_lookup(variable, ids)
        update = tf.fill(tf.shape(rows), tf.reduce_max(rows) * 0 + 1)
        variable.scatter_sub(tf.IndexedSlices(0.1 * update, ids))

def work(iterations):
    for _ in range(iterations * workers):
        coordinator.schedule(step)
    coordinator.join()

work(2)
print(json.dumps({"seconds": 0.0}), flush=True)
for line in sys.stdin:
    started = time.perf_counter()
    work(int(line))
    print(json.dumps({"seconds": time.perf_counter() - started}), flush=True)
"""
)


@contextlib.contextmanager
def tensorflow_group(python: str, workers: int, size: int) -> Iterator[Group]:
    cluster = {
        "chief": [f"127.0.0.1:{free_port()}"],
        "ps": [f"127.0.0.1:{free_port()}"],
        "worker": [f"127.0.0.1:{free_port()}" for _ in range(workers)],
    }
    roles = [("ps", 0), *(("worker", index) for index in range(workers))]
    rest = [str(size), str(workers), json.dumps(cluster)]
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": environment}
    servers = [
        subprocess.Popen([python, "-c", _TENSORFLOW, role, str(index), *rest], **silent)
        for role, index in roles
    ]
    try:
        group = Group([[python, "-c", _TENSORFLOW, "chief", "0", *rest]])
        yield group
        group.end()
    finally:
        for process in servers:
            process.kill()
            process.wait()
