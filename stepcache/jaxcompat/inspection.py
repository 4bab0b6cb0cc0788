"""Looking into JAX's objects: shardings, traces, lowered modules, the environment."""

from __future__ import annotations

import functools
import itertools
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jaxlib.version
from jax.sharding import AbstractMesh, Mesh, NamedSharding, SingleDeviceSharding

from stepcache.jaxcompat.hooks import cpu_features
from stepcache.jaxcompat.private import PRIVATE_API

if PRIVATE_API:
    from jax._src import xla_bridge
    from jax._src.core import jaxprs_in_params
else:
    from jax.extend.core import jaxprs_in_params

COMPILER_FILE = str(Path(jax.__file__).with_name("_src") / "compiler.py")
"""The code in which a thread waits while XLA compiles, in threads of its own."""


def devices_text(devices: Iterable[tuple[str, int]]) -> str:
    """Platforms and numbers of devices, in order: "cpu:0…3,cpu:7"."""
    runs = itertools.groupby(enumerate(devices), lambda each: (each[1][0], each[1][1] - each[0]))
    bounds = ((kind, [number for _, (_, number) in run]) for (kind, _), run in runs)
    return ",".join(
        f"{kind}:{numbers[0]}" + (f"…{numbers[-1]}" if numbers[1:] else "")
        for kind, numbers in bounds
    )


def sharding_text(sharding: Any, numbers: Mapping[Any, int] | None = None) -> str:
    """A sharding or a mesh as text that is the same in every process.

    `numbers` say what to call each device; by default its own number.
    """

    def devices_of(devices: Iterable[Any]) -> str:
        return devices_text(
            (device.platform, numbers[device] if numbers else device.id) for device in devices
        )

    if isinstance(sharding, Mesh):
        kinds = ",".join(map(str, sharding.axis_types))
        devices = () if sharding.empty else sharding.devices.flat
        return f"{dict(sharding.shape)} ({kinds}) over {devices_of(devices)}"
    if isinstance(sharding, AbstractMesh):
        kinds = ",".join(map(str, sharding.axis_types))
        return f"{dict(sharding.shape)} ({kinds}), abstract"
    kind = getattr(sharding, "memory_kind", None)
    if isinstance(sharding, NamedSharding):
        return f"{sharding.spec} on {sharding_text(sharding.mesh, numbers)} in {kind}"
    if isinstance(sharding, SingleDeviceSharding):
        return f"{devices_of(sharding.device_set)} in {kind}"
    return f"{sharding} over {devices_of(sharding._device_assignment)}"


def captured_arrays(jaxpr: Any) -> list[Any]:
    """The arrays that a trace captured by closure, those of nested functions included."""
    seen, visited, stack = dict[int, Any](), set[int](), [jaxpr]
    while stack:
        current = stack.pop()
        if id(current) in visited:
            continue
        visited.add(id(current))
        seen.update((id(const), const) for const in getattr(current, "consts", ()) or ())
        inner = getattr(current, "jaxpr", current)
        for equation in inner.eqns:
            stack += [each for each in equation.params.values() if hasattr(each, "consts")]
            stack += jaxprs_in_params(equation.params)
    return [const for const in seen.values() if hasattr(const, "nbytes")]


def module_outline(lowered: Any) -> str:
    """A lowered module as text, without the lines of source code that it comes from."""
    return str(lowered.stablehlo()) if PRIVATE_API else lowered.as_text()


# What XLA, its backends and its libraries read from the environment.
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "TF_XLA_FLAGS", "NVIDIA_TF32_OVERRIDE")
_VARIABLE_PREFIXES = ("TF_CUDNN_", "CUDNN_", "CUBLAS_", "NCCL_ALGO", "NCCL_PROTO", "MIOPEN_")
# Flags that say where XLA writes dumps and results of autotuning, as in JAX's own cache key; and
# how many devices there are, which is said apart.
_IRRELEVANT_FLAGS = (
    "--xla_dump_",
    "--xla_force_host_platform_device_count",
    "--xla_gpu_per_fusion_autotune_cache_dir",
)


def process_environment() -> dict[str, str]:
    """Facts about this process that decide what a trace and a compilation give.

    Starts JAX's default backend.
    """
    facts = dict(_machine(jax.default_backend()))
    facts["environment devices"] = f"{jax.device_count()}, {jax.local_device_count()} local"
    facts["environment processes"] = str(jax.process_count())
    facts["environment optimize"] = str(sys.flags.optimize)
    for name in (*_VARIABLES, *os.environ):
        if name in _VARIABLES or name.startswith(_VARIABLE_PREFIXES):
            value = os.environ.get(name, "")
            flags = [flag for flag in value.split() if not flag.startswith(_IRRELEVANT_FLAGS)]
            if flags:
                facts[f"environment {name}"] = " ".join(flags)
    flags = [each for each in sys.argv if each.startswith(("--xla", "--jax_"))]
    if flags:
        facts["environment argv"] = " ".join(flags)
    return facts


@functools.lru_cache(maxsize=4)
def _machine(backend: str) -> tuple[tuple[str, str], ...]:
    device, own = jax.devices(backend)[0], jax.local_devices(backend=backend)[0]
    facts = {
        "environment python": f"{platform.python_implementation()} {platform.python_version()}",
        "environment system": f"{platform.system()} {platform.machine()}",
        "package jax": jax.__version__,
        "package jaxlib": jaxlib.version.__version__,
        "environment backend": f"{backend} {device.client.platform_version}".strip(),
        "environment device kind": own.device_kind,
    }
    if backend == "cpu":
        facts["environment CPU"] = cpu_features()
    return tuple(facts.items())


def live_backend(devices: Any) -> bool:
    """Whether devices can run a program, and are not just the description of some topology."""
    backends = list(xla_bridge.backends().values()) if PRIVATE_API else []
    return not PRIVATE_API or all(any(x.client is each for each in backends) for x in devices)
