"""A logger for each rank, a metrics file and a progress bar on rank 0 only."""

import csv
import logging
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import stepcache as sc


class MetricWriter:
    def __init__(self, path):
        self.file = open(path, "w")
        self.rows = csv.writer(self.file)

    def scalars(self, step, **values):
        self.rows.writerow([step, *(float(value) for value in values.values())])
        self.file.flush()


def setup_logging(rank):
    logger = logging.getLogger(f"train.rank{rank}")
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter(f"[rank {rank}] %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
    return logger


def main():
    jax.distributed.initialize()
    rank = jax.process_index()
    logger = setup_logging(rank)
    writer = MetricWriter("metrics.csv") if rank == 0 else None
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))

    def loss_fn(params, batch):
        logger.debug("tracing the loss")
        return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)

    @sc.step(carry="params", batch="batch")
    def train_step(params, batch):
        logger.info("tracing train_step for %s rows", batch["x"].shape[0])
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(grads)))
        if writer is not None:
            writer.rows.writerow(["tracing"])
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss, norm

    params = {"w": jnp.zeros(5), "b": jnp.zeros(())}
    with sc.Session(mesh):
        for step in range(6):
            x = np.random.default_rng(step).normal(size=(8, 5)).astype(np.float32)
            x = np.split(x, jax.process_count())[rank]
            params, loss, norm = train_step(params, {"x": x, "y": x.sum(axis=1)})
            logger.info("step %d: loss %.6f, gradient %.6f", step, loss, norm)
            if writer is not None:
                writer.scalars(step, loss=loss, norm=norm)
    if writer is not None:
        writer.file.close()


if __name__ == "__main__":
    main()
