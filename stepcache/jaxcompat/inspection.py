"""Looking into JAX's objects: shardings, traces, lowered modules, the environment."""

from __future__ import annotations

import functools
import itertools
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jaxlib.version
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractMesh, Mesh, NamedSharding, SingleDeviceSharding

from stepcache.jaxcompat.contexts import setting
from stepcache.jaxcompat.hooks import cpu_features
from stepcache.jaxcompat.private import PRIVATE_API

if PRIVATE_API:
    from jax._src import config as jax_config
    from jax._src import xla_bridge
    from jaxlib import xla_client


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
    seen: dict[int, Any] = {}
    stack, visited = [jaxpr], set()
    while stack:
        current = stack.pop()
        if id(current) in visited:
            continue
        visited.add(id(current))
        seen.update((id(const), const) for const in getattr(current, "consts", ()) or ())
        inner = getattr(current, "jaxpr", current)
        for equation in inner.eqns:
            if equation.params:
                for value in equation.params.values():
                    if hasattr(value, "consts"):
                        stack.append(value)
                stack.extend(jaxprs_in_params(equation.params))
    return [const for const in seen.values() if hasattr(const, "nbytes")]


def module_outline(lowered: Any) -> str:
    """A lowered module as text, without the lines of source code that it comes from."""
    return str(lowered.stablehlo()) if PRIVATE_API else lowered.as_text()


# Settings that change neither a trace nor what XLA makes of it.
_IRRELEVANT = frozenset(
    "jax_backend_target jax_captured_constants_report_frames jax_captured_constants_warn_bytes "
    "jax_check_proxy_envs jax_check_tracer_leaks jax_compilation_cache_check_contents "
    "jax_compilation_cache_dir jax_compilation_cache_expect_pgle "
    "jax_compilation_cache_include_metadata_in_key jax_compilation_cache_max_size "
    "jax_compiler_detailed_logging_min_ops jax_cpu_enable_async_dispatch "
    "jax_cpu_get_global_topology_timeout_minutes jax_cpu_get_local_topology_timeout_minutes "
    "jax_cross_host_transfer_socket_address jax_cross_host_transfer_timeout_seconds "
    "jax_cross_host_transfer_transfer_size jax_cross_host_transport_addresses "
    "jax_cuda_visible_devices jax_debug_leaked_clients_on_clear_backends jax_debug_log_modules "
    "jax_distributed_debug jax_dump_ir_modes jax_dump_ir_to jax_enable_compilation_cache "
    "jax_enable_preemption_service jax_enable_recoverability jax_explain_cache_misses "
    "jax_force_dcn_cross_host_transfers jax_hlo_source_file_canonicalization_regex "
    "jax_include_debug_info_in_dumps jax_include_full_tracebacks_in_locations "
    "jax_log_checkpoint_residuals jax_log_compiles jax_logging_level jax_num_cpu_devices "
    "jax_oneapi_visible_devices jax_pallas_verbose_errors "
    "jax_persistent_cache_enable_xla_caches jax_persistent_cache_min_compile_time_secs "
    "jax_persistent_cache_min_entry_size_bytes jax_pgle_aggregation_percentile "
    "jax_pgle_profiling_runs jax_platform_name jax_platforms jax_pprint_use_color "
    "jax_raise_persistent_cache_errors jax_remove_custom_partitioning_ptr_from_cache_key "
    "jax_rocm_visible_devices jax_send_traceback_to_runtime jax_share_binary_between_hosts "
    "jax_share_binary_between_hosts_timeout_ms jax_sort_devices_by_process_index "
    "jax_source_url_schema jax_thread_guard jax_traceback_filtering "
    "jax_traceback_in_locations_limit jax_tracer_error_num_traceback_frames jax_transfer_guard "
    "jax_transfer_guard_device_to_device jax_transfer_guard_device_to_host "
    "jax_transfer_guard_host_to_device jax_xla_backend jax_no_execution jax_no_tracing".split()
)
# What XLA, its backends and its libraries read from the environment.
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "TF_XLA_FLAGS", "NVIDIA_TF32_OVERRIDE")
_VARIABLE_PREFIXES = ("TF_CUDNN_", "CUDNN_", "CUBLAS_", "NCCL_ALGO", "NCCL_PROTO", "MIOPEN_")
# Flags about where XLA writes dumps, and about the number of devices, which the topology includes.
_IRRELEVANT_FLAGS = ("--xla_dump_", "--xla_force_host_platform_device_count")


def process_environment() -> dict[str, str]:
    """Facts about this process that decide what a trace and a compilation give.

    Starts JAX's default backend.
    """
    dependencies = dict(_machine(jax.default_backend()))
    dependencies["environment devices"] = f"{jax.device_count()}, {jax.local_device_count()} local"
    dependencies["environment processes"] = str(jax.process_count())
    dependencies["environment optimize"] = str(sys.flags.optimize)
    for name in (*_VARIABLES, *os.environ):
        if name in _VARIABLES or name.startswith(_VARIABLE_PREFIXES):
            value = os.environ.get(name, "")
            flags = [flag for flag in value.split() if not flag.startswith(_IRRELEVANT_FLAGS)]
            if flags:
                dependencies[f"environment {name}"] = " ".join(flags)
    flags = [each for each in sys.argv if each.startswith(("--xla", "--jax_"))]
    if flags:
        dependencies["environment argv"] = " ".join(flags)
    return dependencies | _settings_as_facts(tuple(map(setting, _relevant_settings())))


@functools.lru_cache(maxsize=16, typed=True)
def _settings_as_facts(values: tuple[Any, ...]) -> dict[str, str]:
    names = _relevant_settings()
    return {f"config {name}": repr(value) for name, value in zip(names, values, strict=True)}


@functools.lru_cache(maxsize=1)
def _relevant_settings() -> tuple[str, ...]:
    values = jax_config.config._value_holders if PRIVATE_API else jax.config.values
    return tuple(name for name in sorted(values) if name not in _IRRELEVANT)


@functools.lru_cache(maxsize=4)
def _machine(backend: str) -> tuple[tuple[str, str], ...]:
    device, own = jax.devices(backend)[0], jax.local_devices(backend=backend)[0]
    dependencies = {
        "environment python": f"{platform.python_implementation()} {platform.python_version()}",
        "environment system": f"{platform.system()} {platform.machine()}",
        "package jax": jax.__version__,
        "package jaxlib": jaxlib.version.__version__,
        "environment backend": f"{backend} {device.client.platform_version}".strip(),
        "environment device kind": own.device_kind,
    }
    if jax.process_count() > 1:  # XLA's fingerprint of a pod differs between its processes.
        kinds = ", ".join(sorted({each.device_kind for each in jax.devices(backend)}))
        dependencies["environment topology"] = f"{kinds} in {jax.process_count()} processes"
    elif PRIVATE_API:
        try:
            topology = xla_client.get_topology_for_devices([device])
            dependencies["environment topology"] = f"{topology.fingerprint():x}"
        except Exception as error:
            dependencies["environment topology"] = f"unknown ({type(error).__name__})"
    if backend == "cpu":
        dependencies["environment CPU"] = cpu_features()
    return tuple(dependencies.items())


def live_backend(devices: Any) -> bool:
    """Whether devices can run a program, and are not just the description of some topology."""
    if not PRIVATE_API:
        return True
    clients = {device.client for device in devices}
    return all(any(client is each for each in xla_bridge.backends().values()) for client in clients)
