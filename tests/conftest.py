"""Eight CPU devices for all tests, and a fresh program cache for each."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["STEPCACHE_DIR"] = "off"  # What is kept on disk is a test's own affair.

import jax

if os.environ["JAX_PLATFORMS"] == "cpu":
    jax.config.update("jax_num_cpu_devices", 8)
    # XLA sizes its thread pool by this. With fewer threads than collectives that wait for devices,
    # a loaded machine can deadlock.
    os.environ.setdefault("NPROC", "32")

import pytest
from jax.sharding import AxisType


@pytest.fixture(scope="session", autouse=True)
def eight_devices():
    if jax.default_backend() == "cpu":
        assert jax.device_count() == 8


@pytest.fixture
def mesh():
    """4 × 2 devices, "data" × "model"."""
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


@pytest.fixture
def one_device_mesh():
    return jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))


def pytest_collection_modifyitems(config, items):
    """Long soaks run only where they are asked for: `-m slow`."""
    if "slow" not in (config.option.markexpr or ""):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="a long soak: run it with -m slow"))
