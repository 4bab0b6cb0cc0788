"""Which of JAX's private names are there, and whether they are used.

These are the names that a step is traced, compiled and called by. Where `PRIVATE_API` is true, the
other rooms take the modules that hold them from here. What only `inspection` and `storing` need of
JAX's private modules they import themselves, under the same condition.
"""

from __future__ import annotations

import os
from typing import Any

import jax

from stepcache.errors import StepCacheWarning, warn

try:
    from jax._src import (
        api_util,
        array,
        core,
        dispatch,
        dtypes,
        pjit,
        source_info_util,
        stages,
        traceback_util,
        tree_util,
        util,
    )
    from jax._src import config as jax_config
    from jax._src import lib as jax_lib
    from jax._src import mesh as mesh_lib
    from jax._src.interpreters import mlir, partial_eval, pxla

    _jax: Any = getattr(jax_lib, "_jax")  # noqa: B009  (a reexport, to type checkers)

    _PRIVATE_NAMES = (
        (_jax, "pjit", "PjitFunctionCache"),
        (pjit, "_get_fastpath_data", "_infer_params", "_infer_params_cached"),
        (pjit, "_resolve_and_lower", "convert_to_metaty"),
        (stages, "DeviceAssignmentMismatchError", "_device_assignment_mismatch_error"),
        (mlir, "LoweringParameters"),
        (dtypes, "InvalidInputException"),
        (pxla, "JitGlobalCppCacheKeys", "cc_shard_arg", "ExecuteReplicated", "batched_device_put"),
        (partial_eval, "trace_to_jaxpr"),
        (jax_config, "trace_context", "trace_context_names", "config"),
        (core, "trace_state_clean", "shaped_abstractify", "check_eval_args"),
        (core, "update_aval_with_sharding", "pytype_aval_mappings"),
        (core, "MemorySpace", "mem_space_to_kind"),
        (traceback_util, "api_boundary", "register_exclusion"),
        (source_info_util, "register_exclusion"),
        (tree_util, "dispatch_registry", "equality_errors_pytreedef"),
        (mesh_lib, "get_concrete_mesh"),
        (dispatch, "check_arg", "get_intermediate_shardings"),
        (util, "test_event", "register_cache"),
        (array, "ArrayImpl"),
        (api_util, "maybe_recursive_nan_check", "InternalFloatingPointError"),
    )
    _gone = [
        f"{module.__name__}.{name}"
        for module, *names in _PRIVATE_NAMES
        for name in names
        if not hasattr(module, name)
    ]
except ImportError as import_error:
    _gone = [str(import_error)]

if _gone:
    warn(
        f"jax {jax.__version__} lacks {', '.join(_gone)}: stepcache falls back to JAX's public "
        "API, where a call costs more",
        StepCacheWarning,
    )

PRIVATE_API = not _gone and os.environ.get("STEPCACHE_DISPATCH", "cpp") != "public"
