"""The two models of `benchmarks.communication`: all parameters dense, and a table of rows."""

from __future__ import annotations

import functools
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Model:
    """What is trained.

    Attributes:
        init: makes the dense parameters of a seed.
        batch: the batch for some numbers: the seed, the worker and the step.
        loss: of parameters and a batch, where the table is `params["items"]`; a scalar.
        optimizer: of the dense parameters.
        rules: how `Sharded` splits the parameters over the devices.
        rows, width: the size of the table; 0 for a model without one.
    """

    name: str
    init: Callable[[int], dict[str, np.ndarray]]
    batch: Callable[..., Batch]
    loss: Callable[[Any, Any], jax.Array]
    optimizer: optax.GradientTransformation
    rules: tuple[tuple[str, P], ...]
    rows: int = 0
    width: int = 0

    def whole(self, seed: int) -> dict[str, np.ndarray]:
        """The parameters with the table as one of them."""
        params = self.init(seed)
        if self.rows:
            noise = np.random.default_rng(seed).standard_normal((self.rows, self.width), np.float32)
            params["items"] = 0.1 * noise
        return params


def _layer(random: np.random.Generator, *shape: int) -> np.ndarray:
    return random.standard_normal(shape, np.float32) / shape[0] ** 0.5


# ---- a language model of characters: an MLP over the characters before (Bengio et al., 2003) -----

CONTEXT, EMBEDDED, HIDDEN, CHARACTERS, TEXT_BATCH = 16, 32, 512, 128, 128


@functools.cache
def _text() -> np.ndarray:
    """The source of Python's standard library."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)
    return np.frombuffer(text.decode(errors="ignore").encode("ascii", "ignore"), np.uint8)


def _text_batch(*numbers: int) -> Batch:
    text = _text()
    starts = np.random.default_rng(numbers).integers(0, len(text) - CONTEXT - 1, TEXT_BATCH)
    windows = text[starts[:, None] + np.arange(CONTEXT + 1)].astype(np.int32)
    return {"inputs": windows[:, :-1], "targets": windows[:, -1]}


def _text_params(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        "embed": random.standard_normal((CHARACTERS, EMBEDDED), np.float32),
        "first": _layer(random, CONTEXT * EMBEDDED, HIDDEN),
        "second": _layer(random, HIDDEN, HIDDEN),
        "out": _layer(random, HIDDEN, CHARACTERS),
    }


def _text_loss(params: Any, batch: Any) -> jax.Array:
    x = params["embed"][batch["inputs"]].reshape(len(batch["inputs"]), -1)
    x = jax.nn.relu(x @ params["first"])
    x = x + jax.nn.relu(x @ params["second"])
    logits = x @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


# ---- a recommender: users who meet items, and click or not, as in examples/async_embeddings.py ---

ITEMS, WIDTH, FEATURES, CLICKS_BATCH = 20_000, 16, 32, 512


@functools.cache
def _world() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tastes of the items, tastes of the users' features, and cumulated chances of the items."""
    random = np.random.default_rng(0)
    tastes = random.standard_normal((ITEMS, WIDTH), np.float32) / WIDTH**0.5
    return tastes, _layer(random, FEATURES, WIDTH), np.cumsum((np.arange(ITEMS) + 10.0) ** -1.2)


def _clicks_batch(*numbers: int) -> Batch:
    random, (tastes, projection, sums) = np.random.default_rng(numbers), _world()
    users = random.standard_normal((CLICKS_BATCH, FEATURES), np.float32)
    items = np.searchsorted(sums, random.uniform(0, sums[-1], CLICKS_BATCH)).astype(np.int32)
    fits = 3 * ((users @ projection) * tastes[items]).sum(axis=1)
    clicks = random.uniform(size=CLICKS_BATCH) < 1 / (1 + np.exp(-fits))
    return {"users": users, "items": items, "clicks": clicks.astype(np.float32)}


def _clicks_params(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {"in": _layer(random, FEATURES, 64), "hidden": _layer(random, 64, WIDTH)}


def _clicks_loss(params: Any, batch: Any) -> jax.Array:
    wanted = jnp.tanh(batch["users"] @ params["in"]) @ params["hidden"]
    logits = (wanted * params["items"][batch["items"]]).sum(axis=1)
    return optax.sigmoid_binary_cross_entropy(logits, batch["clicks"]).mean()


MODELS = {
    model.name: model
    for model in (
        Model(
            "characters",
            *(_text_params, _text_batch, _text_loss, optax.adam(1e-3)),
            (("first|second", P(None, "data")), ("out", P("data"))),
        ),
        Model(
            "recommender",
            *(_clicks_params, _clicks_batch, _clicks_loss, optax.adam(1e-2)),
            (("items", P("data")),),
            *(ITEMS, WIDTH),
        ),
    )
}
HELD_OUT = (1 << 20,)
"""The numbers of the batch that nobody trains on."""
