"""Which of JAX's private names are there, and whether they are used.

The other rooms import JAX's private modules where `PRIVATE_API` is true: then all names that a step
is traced, compiled and called by are there. Where `CAN_STORE` is, so are those that its program is
stored by.
"""

from __future__ import annotations

import os
from pkgutil import resolve_name

import jax

from stepcache.errors import StepCacheWarning, warn

_TO_CALL = {
    "jax._src.api_util": "maybe_recursive_nan_check InternalFloatingPointError",
    "jax._src.array": "ArrayImpl",
    "jax._src.config": "trace_context trace_context_names config explicit_device_put_scope",
    "jax._src.core": "trace_state_clean shaped_abstractify check_eval_args MemorySpace "
    "update_aval_with_sharding pytype_aval_mappings mem_space_to_kind jaxprs_in_params",
    "jax._src.dispatch": "check_arg get_intermediate_shardings",
    "jax._src.dtypes": "InvalidInputException",
    "jax._src.interpreters.mlir": "LoweringParameters",
    "jax._src.interpreters.partial_eval": "trace_to_jaxpr",
    "jax._src.interpreters.pxla": "JitGlobalCppCacheKeys cc_shard_arg ExecuteReplicated "
    "batched_device_put",
    "jax._src.lib._jax": "pjit PjitFunctionCache",
    "jax._src.mesh": "get_concrete_mesh",
    "jax._src.pjit": "_get_fastpath_data _infer_params _infer_params_cached _resolve_and_lower "
    "convert_to_metaty",
    "jax._src.source_info_util": "register_exclusion",
    "jax._src.stages": "DeviceAssignmentMismatchError _device_assignment_mismatch_error",
    "jax._src.traceback_util": "api_boundary register_exclusion",
    "jax._src.tree_util": "dispatch_registry equality_errors_pytreedef",
    "jax._src.util": "test_event register_cache",
}
_TO_STORE = {
    "jax._src.cache_key": "get _hash_accelerator_config",
    "jax._src.compiler": "compile_or_get_cached backend_compile_and_load get_compile_options",
    "jax._src.interpreters.mlir": "module_to_bytecode",
    "jaxlib.lapack": "prepare_lapack_call",
}


def _lacking(names: dict[str, str]) -> list[str]:
    """Those of some names, by the module or class that has them, which this JAX lacks."""
    lacking = []
    for place, listed in names.items():
        try:
            found = resolve_name(place)
        except (ImportError, AttributeError):
            lacking.append(place)
        else:
            lacking += [f"{place}.{name}" for name in listed.split() if not hasattr(found, name)]
    return lacking


if lacking := _lacking(_TO_CALL):
    warn(
        f"jax {jax.__version__} lacks {', '.join(lacking)}: stepcache falls back to JAX's public "
        "API, where a call costs more",
        StepCacheWarning,
    )

PRIVATE_API = not lacking and os.environ.get("STEPCACHE_DISPATCH", "cpp") != "public"
CAN_STORE = PRIVATE_API and not _lacking(_TO_STORE)
