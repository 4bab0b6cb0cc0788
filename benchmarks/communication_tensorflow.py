"""What TensorFlow's `caching_device` caches, for `benchmarks.communication`.

A parameter server holds a variable, and clones on one worker read it in one `session.run`, each on
a CPU device of its own. TensorFlow's own trace of the run names each tensor that the worker
received from another task, with its size.
"""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from benchmarks.served_processes import free_port

_PROGRAM = """
import json, os, re, statistics, subprocess, sys, time
import tensorflow as tf
tf1 = tf.compat.v1
tf1.disable_eager_execution()
role, size, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
counts, spec = json.loads(sys.argv[4]), tf.train.ClusterSpec(json.loads(sys.argv[5]))
config = tf1.ConfigProto(device_count={"CPU": max(counts)})
server = tf.distribute.Server(spec, job_name=role, task_index=0, config=config, protocol="grpc")
if role == "ps":
    server.join()
PS, WORKER = "/job:ps/task:0/device:CPU:0", "/job:worker/task:0/device:CPU:"
UNITS = {"B": 1, "KB": 2**10, "MB": 2**20}

def received(session, fetches):
    "Counts what one run received from the server: tensors of the variable's size, and bytes."
    about, options = tf1.RunMetadata(), tf1.RunOptions(trace_level=tf1.RunOptions.FULL_TRACE)
    values = session.run(fetches, options=options, run_metadata=about)
    labels = [node.timeline_label for device in about.step_stats.dev_stats
              for node in device.node_stats if node.node_name == "RecvTensor"]
    sizes = []
    for label in labels:
        if " from /job:ps" in label:
            number, unit = re.match(r"\\[([\\d.]+)([KM]?B)\\]", label).groups()
            sizes.append(float(number) * UNITS[unit])
    large = [each for each in sizes if each > 2 * size]
    return values, len(large), len(large) * 4 * size

def measured(resource, caching, clones):
    with tf1.Graph().as_default():
        cache = WORKER + "0" if caching else None
        with tf1.device(PS), tf1.variable_scope("v", caching_device=cache, use_resource=resource):
            variable = tf1.get_variable("w", [size], initializer=tf1.zeros_initializer())
        reads = []
        for clone in range(clones):
            with tf1.device(WORKER + str(clone)):
                reads.append(tf.reduce_max(tf.convert_to_tensor(variable)))
        with tf1.device(PS):
            write = tf1.assign_add(variable, tf.ones([size])).op
        with tf1.control_dependencies(reads), tf1.control_dependencies([write]):
            with tf1.device(WORKER + "0"):
                after = tf.reduce_max(tf.convert_to_tensor(variable) + 0)
        with tf1.Session(server.target) as session:
            session.run(variable.initializer)
            for _ in range(3):
                session.run(reads)
            _, unchanged, unchanged_bytes = received(session, reads)
            session.run(write)
            values, changed, changed_bytes = received(session, reads)
            assert values == [1.0] * clones, values
            sees_write = float(session.run(after)) == 2.0
            seconds = []
            for _ in range(rounds):
                started = time.perf_counter()
                session.run(reads)
                seconds.append(time.perf_counter() - started)
    return {
        "variable": "resource" if resource else "reference", "caching_device": caching,
        "clones": clones, "changed": changed, "changed_bytes": changed_bytes,
        "unchanged": unchanged, "unchanged_bytes": unchanged_bytes,
        # What a reference variable's read sees after such a write, TensorFlow does not define.
        "sees_a_write_of_the_same_run": sees_write if resource else None, "seconds": seconds,
    }

rows = [measured(resource, caching, clones)
        for clones in counts for resource in (False, True) for caching in (False, True)]
print(json.dumps({"rows": rows, "version": tf.__version__}), flush=True)
os._exit(0)
"""


def caching_device(
    python: str, size: int, counts: tuple[int, ...], rounds: int
) -> tuple[list[dict[str, Any]], str]:
    """Measures reads with and without `caching_device`, of both kinds of variables.

    Args:
        python: an interpreter that has TensorFlow.
        size: how many float32 numbers the variable has.
        counts: the numbers of clones.
        rounds: how often each is timed.

    Returns:
        A row for each number of clones, kind of variable and `caching_device`; the version.
    """
    cluster = {role: [f"127.0.0.1:{free_port()}"] for role in ("ps", "worker")}
    rest = [str(size), str(rounds), json.dumps(counts), json.dumps(cluster)]
    quiet = {"stderr": subprocess.DEVNULL, "env": os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}}
    server = subprocess.Popen([python, "-c", _PROGRAM, "ps", *rest], **quiet)
    try:
        worker = [python, "-c", _PROGRAM, "worker", *rest]
        done = subprocess.run(worker, stdout=subprocess.PIPE, check=True, text=True, **quiet)
    finally:
        server.kill()
        server.wait()
    found = json.loads(done.stdout.splitlines()[-1])
    return found["rows"], found["version"]
