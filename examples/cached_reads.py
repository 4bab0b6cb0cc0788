"""Which read policy is really best? A model that one session trains, and another one reads.

Every few steps the trainer pushes what its parameters have gained to variables in a server; at each
step a reader evaluates those on text that is held out. Every policy has variables of its own, in
one run, so that all meet the same versions. Prints what each moved, what it cost, what it saw.

    python examples/cached_reads.py
"""

import atexit
import subprocess
import sys
import tempfile
import time
from collections import Counter

import char_lm  # The model and its data, on 8 CPU devices where there is nothing else.
import jax
import numpy as np
import optax
from flax import nnx
from rich import print
from rich.table import Table

import stepcache as sc
from stepcache.events import Moved

STEPS, PUSH_EVERY, SERVER = 40, 5, "server ↔ process"
EXACT = {
    "cache=None": sc.Read(),
    'cache="device"': sc.Read(cache="device"),
}
LATE = {f"+ max_staleness={k}": sc.Read(cache="device", max_staleness=k) for k in (8, 20)}


@sc.step(batch="batch")
def evaluate(params, batch):
    logits = nnx.merge(char_lm.graph, params)(batch["inputs"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


mesh = jax.make_mesh((jax.device_count(),), ("data",), (jax.sharding.AxisType.Auto,))
trainer, reader, pushed = sc.Session(mesh), sc.Session(mesh), jax.device_get(char_lm.params)
place = tempfile.TemporaryDirectory()  # Of a process of its own, which applies the updates.
command = [sys.executable, "-m", "stepcache", "serve", "--variables", place.name]
process = subprocess.Popen(command)
atexit.register(process.wait)  # After this:
atexit.register(process.terminate)
server = sc.connect(f"local:{place.name}")
half = len(text := char_lm.read_text()) // 2
training = char_lm.batches(text[:half], np.random.default_rng(0))
held_out = next(char_lm.batches(text[half:], np.random.default_rng(0)))
served, moved, seconds, losses = {}, {}, Counter(), {}
with trainer:
    state = {"params": pushed, "optimizer": char_lm.optimizer.init(pushed)}
    for name, read in (EXACT | LATE).items():
        moved[name], losses[name] = Counter(), []
        served[name] = server.variables(name, pushed, read=read, write=sc.Write("add"))

sc.recorder.subscribe((events := []).append)
for step in range(STEPS):
    with trainer:
        state, _ = jax.block_until_ready(char_lm.train_step(state, next(training)))
        if step % PUSH_EVERY == 0:
            pushed, last = jax.device_get(state["params"]), pushed
            for each in served.values():
                each.push(jax.tree.map(np.subtract, pushed, last))
            events.clear()  # Here, what is read is counted.
    with reader:
        for name, each in served.items():
            started = time.perf_counter()
            losses[name].append(float(evaluate(each, held_out)))
            seconds[name] += (time.perf_counter() - started) * (step > 0)  # Step 0 compiles.
            for event in events:
                moved[name].update(dict(event.link_bytes) if isinstance(event, Moved) else {})
            events.clear()

table = Table("read policy", "MB from the server", "ms a step", "mean loss")
for name, each in moved.items():
    figures = each[SERVER] / 1e6, seconds[name] / (STEPS - 1) * 1e3
    table.add_row(name, *(f"{each:.1f}" for each in figures), f"{np.mean(losses[name]):.3f}")
print(table)
sent = {name: each[SERVER] for name, each in moved.items()}
assert all(losses[name] == losses["cache=None"] for name in EXACT)
assert sent["cache=None"] == sent['cache="device"'] * PUSH_EVERY, "once a version"
assert sorted(sent, key=sent.get)[:2] == [*LATE][::-1], "a late reader skips versions"
