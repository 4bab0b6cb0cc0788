"""A notebook: cells that IPython compiles one by one, some of them run again after an edit."""

import hashlib
import linecache
import sys

CELLS = [
    """
import jax, jax.numpy as jnp, numpy as np
import stepcache as sc

rng = np.random.default_rng(0)
x = rng.normal(size=(16, 3)).astype(np.float32)
y = x @ np.array([1.0, -1.0, 2.0], np.float32)
LEARNING_RATE = 0.1
""",
    """
def loss_fn(w, x, y):
    return jnp.mean((x @ w - y) ** 2)
""",
    """
@sc.step
def train_step(w, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(w, x, y)
    return w - LEARNING_RATE * grads, loss
""",
    """
w = jnp.zeros(3)
for i in range(5):
    w, loss = train_step(w, x, y)
    print(f"step {i}: loss {loss:.6f}")
""",
]
EDITED_LOSS = """
def loss_fn(w, x, y):
    return jnp.mean(jnp.abs(x @ w - y)) + 0.01 * jnp.sum(w**2)
"""
EDITED_RATE = """
LEARNING_RATE = 0.02
"""


def run_cell(source, number, namespace):
    """As IPython does: a file name of its own for each cell, its source for tracebacks."""
    digest = hashlib.sha1(source.encode()).hexdigest()[:12]
    name = f"<ipython-input-{number}-{digest}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), namespace)


namespace = sys.modules["__main__"].__dict__
_, loss, step, loop = CELLS
# The loss is edited, and then the rate; the cell of the step is run again after each.
order = [*CELLS, loop, EDITED_LOSS, step, loop, EDITED_RATE, step, loop]
for number, source in enumerate(order, start=1):
    print(f"[{number}]")
    run_cell(source, number, namespace)
