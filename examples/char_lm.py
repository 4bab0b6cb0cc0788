"""A character language model on real text: the source of Python's own standard library.

A flax transformer with optax's adamw, over a data × model mesh of all devices (8 CPU devices where
there is nothing else). Prints what the first call explains, trains, meets a last batch of another
size and prints why that one missed, and writes a few lines of Python-like text. Run it again: it
compiles nothing, and says so.

    python examples/char_lm.py
"""

import os
import sysconfig
from pathlib import Path

import jax

if jax.config.jax_platforms == "cpu" or not any(Path("/dev").glob("nvidia[0-9]*")):
    jax.config.update("jax_num_cpu_devices", 8)
    # XLA sizes its thread pool by this. With fewer threads than collectives that wait for devices,
    # a loaded machine can deadlock.
    os.environ.setdefault("NPROC", "32")

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P
from rich import print
from rich.progress import track

import stepcache as sc

CONTEXT, BATCH, LAST_BATCH, STEPS = 64, 32, 24, 400
WIDTH, HEADS, LAYERS, VOCABULARY = 96, 4, 3, 128


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm1, self.norm2 = (nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x), mask=jnp.tril(jnp.ones((CONTEXT, CONTEXT), bool)))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class CharLM(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.position = nnx.Embed(CONTEXT, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.position(jnp.arange(CONTEXT))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# Adam's moments have the paths of their parameters at the end of their own: one rule places all.
RULES = [
    (r"attention/(query|key|value)/kernel", P(None, "model", None)),
    (r"attention/(query|key|value)/bias", P("model", None)),
    (r"attention/out/kernel", P("model", None, None)),
    (r"up/kernel", P(None, "model")),
    (r"up/bias", P("model")),
    (r"down/kernel", P("model", None)),
]

graph, params = nnx.split(CharLM(nnx.Rngs(0)))
optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 6e-3, 30, STEPS))


@sc.step(carry="state", batch="batch")
def train_step(state, batch):
    def loss_of(params):
        logits = nnx.merge(graph, params)(batch["inputs"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return losses.mean()

    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    updates, moments = optimizer.update(gradients, state["optimizer"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": moments}, loss


@sc.step
def next_character(params, prompt, length, key):
    logits = nnx.merge(graph, params)(prompt[None])[0, length - 1]
    return jax.random.categorical(key, logits / 0.7)


def read_text() -> np.ndarray:
    library = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(library.glob("*.py")))
    return np.frombuffer(text.decode(errors="ignore").encode("ascii", "ignore"), np.uint8)


def batches(text: np.ndarray, rng: np.random.Generator):
    for size in [BATCH] * (STEPS - 1) + [LAST_BATCH]:
        starts = rng.integers(0, len(text) - CONTEXT - 1, size)
        windows = text[starts[:, None] + np.arange(CONTEXT + 1)].astype(np.int32)
        yield {"inputs": windows[:, :-1], "targets": windows[:, 1:]}


def generate(params, text: str, count: int) -> str:
    for key in jax.random.split(jax.random.key(1), count):
        tail = text[-CONTEXT:]
        prompt = np.zeros(CONTEXT, np.int32)
        prompt[: len(tail)] = [ord(character) for character in tail]
        text += chr(next_character(params, prompt, len(tail), key))
    return text


def main() -> None:
    devices = jax.device_count()
    model = 2 if devices % 2 == 0 else 1
    automatic = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((devices // model, model), ("data", "model"), axis_types=automatic)
    losses = []
    with sc.Session(mesh, rules=RULES):
        state = {
            "params": sc.Variables(params, name="params"),
            "optimizer": sc.Variables(optimizer.init(params), name="optimizer"),
        }
        stream = batches(read_text(), np.random.default_rng(0))
        first = next(stream)
        print(train_step.explain(state, first))
        state, loss = train_step(state, first)
        losses.append(loss)
        print(str(train_step.last_miss))
        for batch in track(stream, "training", total=STEPS - 1):
            state, loss = train_step(state, batch)
            losses.append(loss)
        print(f"the last batch has {LAST_BATCH} rows instead of {BATCH}:\n{train_step.last_miss}")
        print(generate(state["params"], "def ", 160))
    first_loss, last_loss = float(losses[0]), float(np.mean(losses[-20:]))
    stats = train_step.stats()
    print(f"loss {first_loss:.2f} → {last_loss:.2f} in {STEPS} steps; {stats}")
    if stats.loads:
        print(f"warm start: loaded from disk {stats.loads}, compiled {stats.compiles}")
    assert stats.misses == 2, "one program a batch size, and no other"
    assert first_loss > 4.5 and last_loss < 2.2, (first_loss, last_loss)


if __name__ == "__main__":
    main()
