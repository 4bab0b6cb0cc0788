"""Pods: the processes of `jax.distributed`, how they agree, and how lost ones are detected."""
