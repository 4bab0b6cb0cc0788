"""Everything that depends on JAX's private names, and on which version of JAX is installed.

No file outside this package touches `jax._src`, `jaxlib` internals, `jax.extend` or
`jax.experimental`. Each function here has a public-API fallback, used where a private name is gone
(one warning says so) or where `STEPCACHE_DISPATCH=public` asks for it.

Other rooms use the names below, `inspection` and `storing`. The files in here import from each
other, never from the package: `private` stands below all of them.
"""

from stepcache.jaxcompat.arguments import (
    ArgumentRoles,
    Tracer,
    abstract,
    argument_roles,
    custom_layout,
    is_array_type,
    maker_of_arrays,
    tree_differences,
    uncommitted,
)
from stepcache.jaxcompat.contexts import (
    ContextToken,
    ValueToken,
    arguments_outlive_calls,
    backends_are_initialized,
    carried_settings,
    entered_session,
    entering,
    environment,
    is_tracing,
    jit_is_disabled,
    keeps_what_is_read,
    must_delegate,
    recording_context,
    setting,
    tracing_context,
)
from stepcache.jaxcompat.dispatcher import make_dispatcher
from stepcache.jaxcompat.hooks import call_on_clear_caches, hide_frames
from stepcache.jaxcompat.private import PRIVATE_API
from stepcache.jaxcompat.stages import (
    FloatingPointCheckError,
    InvalidInputError,
    Runnable,
    Staged,
    captured_arrays,
    equations_of,
    explain_floating_point_error,
    forget_traces,
    jit,
    lowering_modules,
    lowering_rules,
    outline,
    sources_of,
    unhide_methods,
)

__all__ = [
    "PRIVATE_API",
    "ArgumentRoles",
    "ContextToken",
    "FloatingPointCheckError",
    "InvalidInputError",
    "Runnable",
    "Staged",
    "Tracer",
    "ValueToken",
    "abstract",
    "argument_roles",
    "arguments_outlive_calls",
    "backends_are_initialized",
    "call_on_clear_caches",
    "captured_arrays",
    "carried_settings",
    "custom_layout",
    "entered_session",
    "entering",
    "environment",
    "equations_of",
    "explain_floating_point_error",
    "forget_traces",
    "hide_frames",
    "is_array_type",
    "is_tracing",
    "jit",
    "jit_is_disabled",
    "keeps_what_is_read",
    "lowering_modules",
    "lowering_rules",
    "make_dispatcher",
    "maker_of_arrays",
    "must_delegate",
    "outline",
    "recording_context",
    "setting",
    "sources_of",
    "tracing_context",
    "tree_differences",
    "uncommitted",
    "unhide_methods",
]
