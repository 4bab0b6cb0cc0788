"""The tests of what a step means, once more: as they find it on the ways that users take."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stepcache import jaxcompat

SAMPLE = ("test_step.py",)
TESTS = (*SAMPLE, "test_drop_in.py", "test_session.py", "test_models.py")
# With the public API nothing is served without Python, JAX cannot be told that our frames are its
# own, and its public stages name functions less fully, rebuild trees around placeholders, and lower
# no high primitives.
NOT_PUBLIC = (
    "clear_cache",
    "frames_of_a_user_error",
    "sharding_that_does_not_divide",
    "incompatible_devices",
    "tree_that_validates_its_leaves",
    "class_can_hold_nothing_else",
    "abstract_argument",
    "clear_caches_of_jax",
    "static_that_cannot_be_compared",
    "high_primitive",
)


@pytest.mark.slow
@pytest.mark.sample(every=6)
@pytest.mark.parametrize("names", [SAMPLE, TESTS], ids=len)
@pytest.mark.parametrize(
    ("variable", "value", "left_out"),
    [("STEPCACHE_DISPATCH", "public", NOT_PUBLIC), ("STEPCACHE_TEST_DISK", "1", ())],
    ids=["public API", "programs on disk"],
)
def test_a_step_means_the_same(names, variable, value, left_out):
    if not jaxcompat.PRIVATE_API:
        return
    here = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["-k", " and ".join(f"not {case}" for case in left_out)] if left_out else []
    result = subprocess.run(
        [*command, *(str(here / name) for name in names)],
        env={**os.environ, variable: value},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
