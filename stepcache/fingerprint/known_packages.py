"""What is known of installed packages, by their names: which of their code matters, and how.

Of a package that is not named here, the worst is assumed: see docs/limits.md.
"""

from __future__ import annotations

OF_JAX = frozenset(("jax", "jaxlib", "numpy", "ml_dtypes"))
"""The packages that count as JAX."""

IN_EACH_TRACE = OF_JAX | {"stepcache"}
"""Their code runs in each trace, and they keep counters and caches in their modules, which differ
from process to process."""

FRAMEWORKS = ("jax", "jaxlib", "flax", "optax", "stepcache", "orbax", "absl", "etils")
"""They call the clock and the like for their own logs; it does not reach the trace."""

TRUSTED = frozenset("jax jaxlib numpy scipy ml_dtypes flax optax stepcache".split())
"""Compiled packages that are known to read nothing behind Python's back."""

WITH_KNOWN_COMPILED_CODE = TRUSTED | {"tree", "mujoco"}
"""Those, and some whose compiled code is known. dm-tree's takes containers apart, and reads and
keeps nothing else; mjx, which is mujoco's part for JAX, takes enumerations and constants of the
rest, of which a call is seen."""

COMPILED_OF_MUJOCO = frozenset(
    f"mujoco._{each}"
    for each in "batch callbacks functions render rollout simulate specs structs".split()
)
"""The modules of mujoco's objects and functions. Enumerations and constants keep to themselves."""

NAMED_BY_THEMSELVES = frozenset(("numpy", "flax", "optax"))
"""They read a `name` of objects of their own classes alone: of types of numbers, of parameters of
functions. Users have such an attribute for that of a run."""

ASK_THEIR_OWN = TRUSTED | frozenset(
    "absl chex diffrax einops equinox etils haiku jaxtyping lineax mujoco numpyro optimistix orbax "
    "penzai typeguard typing_extensions.py beartype wadler_lindig".split()
)
"""They ask objects of their own classes alone, where they ask by computed names."""

THE_SAME_IN_ANY_ORDER = ("einops", "opt_einsum", "mujoco")
"""Of a set, they multiply lengths, and compare names; mjx loops over numbers, and brings groups in
order."""
