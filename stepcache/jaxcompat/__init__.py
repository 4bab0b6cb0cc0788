"""Everything that depends on JAX's private names, and on which version of JAX is installed.

No file outside this package touches `jax._src`, `jaxlib` internals, `jax.extend` or
`jax.experimental`. Each function here has a public-API fallback, used where a private name is gone
(one warning says so) or where `STEPCACHE_DISPATCH=public` asks for it.

Other rooms use the names below, `coordination` and `specs`. The files in here import from each
other, never from the package: `private` stands below all of them.
"""

from stepcache.jaxcompat.arguments import (
    PINNED_HOST,
    ArgumentRoles,
    Tracer,
    abstract,
    argument_roles,
    committed,
    custom_layout,
    default_device,
    explicit_transfer,
    is_committed,
    is_on_host,
    key_impl,
    maker_of_arrays,
    stand_in,
    tree_differences,
)
from stepcache.jaxcompat.contexts import (
    ContextToken,
    arguments_outlive_calls,
    backends_are_initialized,
    carried_settings,
    check_not_forked,
    entered_session,
    entering,
    environment,
    has_concrete_mesh,
    is_tracing,
    jit_is_disabled,
    keeps_what_is_read,
    must_delegate,
    setting,
    tracing_context,
)
from stepcache.jaxcompat.executables import (
    NotStorable,
    load_executable,
    serialize_executable,
    why_not_storable,
)
from stepcache.jaxcompat.hooks import Compilation, call_on_clear_caches, compile_all, hide_frames
from stepcache.jaxcompat.inspection import (
    captured_arrays,
    devices_text,
    live_backend,
    module_outline,
    process_environment,
    sharding_text,
)
from stepcache.jaxcompat.private import CAN_STORE, PRIVATE_API
from stepcache.jaxcompat.stages import (
    FloatingPointCheckError,
    InvalidInputError,
    Runnable,
    Staged,
    explain_floating_point_error,
    forget_traces,
    jit,
    make_dispatcher,
    recommitted,
    unhide_methods,
)
