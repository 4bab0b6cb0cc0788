"""Several processes: pods of `jax.distributed`, and how they agree."""
