"""Looking into JAX's objects: jitted functions, shardings, arrays, traces, lowered modules, the
environment.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import platform
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractMesh, Mesh, NamedSharding, SingleDeviceSharding

from stepcache.jaxcompat.contexts import setting
from stepcache.jaxcompat.private import CAN_STORE, PRIVATE_API

if PRIVATE_API:
    from jax._src import config as jax_config
    from jax._src import tree_util, xla_bridge
    from jaxlib import xla_client
if CAN_STORE:
    from jax._src import core
    from jax._src.interpreters import ad, batching, mlir, partial_eval, pxla

PLAIN_JIT: Any = jax.jit(lambda: 0)
"""A jitted function without options."""
_JIT_INTERNALS = ("fun_sourceinfo", "fun_signature", "use_resource_env")


def jitted_parts(value: Any) -> tuple[Any, dict[str, Any]] | None:
    """The function inside a jitted one, and its options that are not the default; else None."""
    if type(value).__module__.startswith("stepcache."):
        return getattr(value, "_stepcache_parts", None)  # A step of ours.
    if type(value) is not type(PLAIN_JIT):  # Other objects may answer to any name.
        return None
    info, function = getattr(value, "_jit_info", None), getattr(value, "__wrapped__", None)
    if info is None or function is None:  # As of what `copy.deepcopy` makes of one.
        held = _captured(getattr(getattr(value, "_cache_miss", None), "__wrapped__", None))
        info, function = held.get("jit_info"), held.get("fun")
    if info is None or function is None:
        return None
    defaults = PLAIN_JIT._jit_info._asdict()
    options = {
        name: option
        for name, option in info._asdict().items()
        if name not in _JIT_INTERNALS
        and (type(option), repr(option)) != (type(defaults[name]), repr(defaults[name]))
    }
    return function, options


def _captured(function: Any) -> dict[str, Any]:
    """What a function of JAX's captured, by name."""
    if type(function) is not types.FunctionType or not function.__closure__:
        return {}
    cells = zip(function.__code__.co_freevars, function.__closure__, strict=True)
    return {name: cell.cell_contents for name, cell in cells}


def pytree_functions(cls: type) -> tuple[Callable, ...]:
    """The functions that take instances of a registered class apart and put them together."""
    entry = tree_util._registry.get(cls) if PRIVATE_API else None
    return () if entry is None else (entry.to_iter, entry.from_iter)


def devices_text(devices: Iterable[tuple[str, int]]) -> str:
    """Platforms and numbers of devices, in order: "cpu:0…3,cpu:7"."""
    runs = itertools.groupby(enumerate(devices), lambda each: (each[1][0], each[1][1] - each[0]))
    bounds = ((kind, [number for _, (_, number) in run]) for (kind, _), run in runs)
    return ",".join(
        f"{kind}:{numbers[0]}" + (f"…{numbers[-1]}" if numbers[1:] else "")
        for kind, numbers in bounds
    )


ORIGINS_OF_JAXPRS = ("jaxlib._jax.Traceback", "jax._src.linear_util.DebugInfo")
"""Classes of files, lines and names of arguments, which JAX needs for messages alone."""


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


_digests: dict[int, tuple[weakref.ref, str]] = {}


def array_digest(array: jax.Array) -> str:
    """A digest of the content of a JAX array. It never changes, so it is computed once."""
    known = _digests.get(id(array))
    if known is not None and known[0]() is array:
        return known[1]
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = np.asarray(jax.random.key_data(array))
        digest = f"{jax.random.key_impl(array)} {content_digest(data)}"
    else:
        digest = content_digest(np.asarray(array))
    key = id(array)
    _digests[key] = weakref.ref(array, lambda _: _digests.pop(key, None)), digest
    return digest


def content_digest(array: np.ndarray) -> str:
    """A digest of an array's bytes."""
    data = np.ascontiguousarray(array)
    content = data.reshape(-1).view(np.uint8).data if data.size else b""
    return hashlib.sha256(content).hexdigest()[:16]


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


def equations_of(jaxpr: Any) -> Iterator[Any]:
    """The equations of a trace, those of nested functions included, each once."""
    stack, visited = [jaxpr], set()
    while stack:
        current = stack.pop()
        current = getattr(current, "jaxpr", current)
        if id(current) not in visited:
            visited.add(id(current))
            for equation in current.eqns:
                yield equation
                stack.extend(jaxprs_in_params(equation.params))


def is_primitive(value: Any) -> bool:
    """Whether a value is one of JAX's primitives, or of the user's."""
    return issubclass(type(value), core.Primitive)  # To ask the value would ask proxies.


def lowering_rules(primitive: Any) -> list[Any]:
    """The functions that lower a primitive, for all platforms."""
    tables = (mlir._lowerings, *mlir._platform_specific_lowerings.values())
    return [table[primitive].rule for table in tables if primitive in table]


def tracing_rules(primitive: Any) -> list[Any]:
    """What JAX keeps for a primitive, in it and in the tables of its transformations."""
    tables = [table for table in _tables_of_rules() if primitive in table]
    return [*vars(primitive).values(), *(table[primitive] for table in tables)]


@functools.lru_cache(maxsize=1)
def _tables_of_rules() -> list[dict]:
    modules = (core, ad, batching, partial_eval)
    values = itertools.chain.from_iterable(list(vars(each).values()) for each in modules)
    return [each for each in values if isinstance(each, dict)]


def active_traces() -> list[Any]:
    """The traces that this thread is in, the innermost first."""
    traces, trace = [], core.trace_ctx.trace
    while trace is not None:
        traces.append(trace)
        trace = getattr(trace, "parent_trace", None)
    return traces


def active_jaxpr_traces() -> list[Any]:
    """Those of them that make a jaxpr, as traces under `jax.jit` do."""
    return [trace for trace in active_traces() if isinstance(trace, partial_eval.DynamicJaxprTrace)]


def lowering_modules() -> tuple[Any, ...]:
    """The modules of JAX that call these."""
    return mlir, pxla


def outline(lowered: Any) -> str:
    """A lowered module as text, without locations."""
    return str(lowered.stablehlo()) if PRIVATE_API else lowered.as_text()


def sources_of(lowered: Any, number: int) -> list[tuple[str, int]]:
    """The lines of source code that a line of `outline` comes from, the innermost first.

    They end where the function was called that was lowered. Where nothing is known of the line, as
    of a constant, they are those of the next one of which something is.
    """
    if PRIVATE_API:
        text = lowered.stablehlo().operation.get_asm(enable_debug_info=True)
    else:
        text = lowered.as_text(debug_info=True)
    names = dict(_LOCATION.findall(text))
    lines = [line for line in text.splitlines() if not line.startswith("#loc")]

    def sources(line: str) -> list[tuple[str, int]]:
        found: list[tuple[str, int]] = []
        waiting = [line.rpartition(" loc(")[2]]
        while waiting:
            location = waiting.pop(0)
            found += [(file, int(row)) for file, row in _SOURCE.findall(location)]
            waiting += [names[name] for name in _NAME.findall(location) if name in names]
        return found

    end = next((line for line in lines if _RETURN.match(line)), "")
    callers = set(sources(end))
    for line in lines[number:]:
        found = [source for source in sources(line) if source not in callers]
        if found:
            return found
    return []


_RETURN = re.compile(r"\s*(func\.)?return ")
_LOCATION = re.compile(r"^(#loc\d*) = (.*)$", re.MULTILINE)
_NAME = re.compile(r"#loc\d*")
_SOURCE = re.compile(r'"([^"]+)":(\d+):')


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
        dependencies["environment CPU"] = _cpu_features()
    return tuple(dependencies.items())


def _cpu_features() -> str:
    try:
        with Path("/proc/cpuinfo").open() as file:
            first = itertools.takewhile(str.strip, file)  # The cores of a machine are alike.
            lines = [line for line in first if line.startswith(("flags", "Features", "model name"))]
    except OSError:
        return platform.processor()
    features = "".join(lines)
    return hashlib.sha256(features.encode()).hexdigest()[:16]


def live_backend(devices: Any) -> bool:
    """Whether devices can run a program, and are not just the description of some topology."""
    if not PRIVATE_API:
        return True
    clients = {device.client for device in devices}
    return all(any(client is each for each in xla_bridge.backends().values()) for client in clients)


ASKED_BY_JAX = frozenset(
    # Found by giving objects to all public functions, as a test does.
    "_committed _internal_device_list _is_concrete _raw_platform addressable_memories aval "
    "block_until_ready children client copy_to_host_async create_cpp_call default_memory "
    "device_count devices dimension_as_value dtype inserted_window_dims items join keys kind "
    "lhs_ragged_dimensions local_device_count local_devices lower ndim num_leaves num_nodes "
    "operand_batching_dims platform process_index scatter_dims_to_operand_dims "
    "scatter_indices_batching_dims shape shard_shape sharding size tree_flatten tree_unflatten "
    "type unflatten update_window_dims weak_type "
    # What arrays and shardings have besides.
    "T at device device_set imag is_fully_addressable is_fully_replicated itemsize memory_kind "
    "memory_space mesh nbytes real spec vma".split()
)
"""What JAX may ask an object for that is none of its own. All else that its code reads, it reads of
equations, traces and the like."""


_OF_JAX = f"{Path(str(jax.__file__)).parent}{os.sep}"
_OF_JAXLIB = f"{Path(str(jaxlib.version.__file__)).parent}{os.sep}"
_KNOWN = (f"{_OF_JAX}_src{os.sep}", _OF_JAXLIB)
_PALLAS = f"{_OF_JAX}_src{os.sep}pallas{os.sep}"


def asks_for_known_names(filename: str) -> bool:
    """Whether a file is of JAX, and asks objects of users for `ASKED_BY_JAX` alone."""
    return filename.startswith(_KNOWN) and not filename.startswith(_PALLAS)
