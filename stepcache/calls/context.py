"""`Scope`: what a session decides for the calls made in it, and which one is current.

The session is the front door to it; the engine knows only this.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stepcache import jaxcompat
from stepcache.calls.signature import Path
from stepcache.errors import UnmatchedRuleWarning, warn
from stepcache.sharding import Placer, devices_of, processes_of
from stepcache.weak_objects import WeakObjects

if TYPE_CHECKING:  # A single process has none.
    from stepcache.pods.rounds import Peers

recompiles_forbidden: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "recompiles_forbidden", default=False
)

_EXAMPLES = 3


@dataclass(eq=False, repr=False, slots=True, weakref_slot=True)
class Scope:
    """What a session decides for the calls made in it."""

    placer: Placer | None  # The mesh and the rules; None places nothing.
    cache: Any  # The `ProgramCache`, a room of a higher floor.
    on_miss: str = "compile"  # Or "warn" or "error".
    count_hits: bool = False  # Keep the C++ dispatcher out, so that every call is counted.
    max_step_bytes: int | None = None  # What one call may move.
    # Returns the `Peers` of some ranks; None for a single process.
    together: Callable[[tuple[int, ...]], Peers | None] = lambda ranks: None
    closed: bool = False  # No call may be made in it any more.
    built: bool = False  # A program has been built in it.
    # Rules that have matched a leaf so far, or that have been warned about.
    matched: set[int] = field(default_factory=set)
    seen: WeakObjects = field(default_factory=WeakObjects)  # `Variables` with matched leaves.
    shown: tuple[str, ...] = ()  # Paths of some leaves of the last of them.
    session: weakref.ref[Any] | None = None  # The front door to it.
    target: Any = None  # Runs its steps on other processes; None where they run in this one.
    warm_programs: int = 0  # So many of each step are compiled whatever `on_miss` says.

    @property
    def mesh(self):
        return self.placer.mesh if self.placer else None

    @property
    def is_watched(self) -> bool:
        """Whether each call has to enter Python, to be counted, checked or judged."""
        return self.count_hits or self.max_step_bytes is not None

    @property
    def peers(self) -> Peers | None:
        """The processes of the mesh; None for one process, or without a mesh."""
        return self.together(processes_of(devices_of(self.mesh))) if self.mesh else None

    def match_rules(self, paths: Sequence[str]) -> None:
        """Notes the rules that match leaves which no call places: those of `Variables`."""
        assert self.placer is not None
        self.shown = tuple(paths[:_EXAMPLES])
        matches = map(self.placer.rules.match, paths)
        self.matched |= {index for index in matches if index is not None}

    def check_rules(self, step: str, paths: Sequence[Path], *, carries: bool) -> None:
        """Warns of rules that match nothing, once each, where a step with state is built.

        A rule anchored at an argument (`^prompt/`) that the step does not have is about another
        step, and is left to the end of the session.
        """
        if self.placer is None:
            return
        self.built = True
        rules = self.placer.rules
        unseen = set(range(len(rules))) - self.matched
        if not unseen:
            return
        # Leaves of `Variables` were placed by paths of their own, which begin with their name.
        given = [path.slashed for path in paths if not path.holder]
        matches = map(rules.match, given)
        found = {index for index in matches if index is not None}
        self.matched |= found
        if not found and not carries:
            return
        arguments = {path.argument for path in paths}
        about = {index for index in unseen - found if rules.anchor(index) in (None, *arguments)}
        shown = self.shown if len(given) < len(paths) else ()
        examples = ", ".join((*shown, *given)[:_EXAMPLES])
        self.warn_of_rules(about, f"{step}, nor of a step before it ({examples}, …)")

    def warn_of_rules(self, indices: Iterable[int], matching_no_leaf_of: str) -> None:
        """Warns of each of these rules, once."""
        for index in sorted(indices):
            self.matched.add(index)
            pattern, spec = self.placer.rules.rules[index]  # type: ignore[union-attr]
            message = f"rule {pattern!r}, {spec}, matches no leaf of {matching_no_leaf_of}"
            warn(message, UnmatchedRuleWarning)


def token_of(scope: Scope) -> jaxcompat.ContextToken | None:
    """Represents a scope in JAX's own keys, without keeping it alive.

    Scopes that decide alike have one token, and one that decides as calls outside any session do
    has none. So entering a session does not make JAX trace and compile anew whatever runs in it,
    steps or not.
    """
    decides = (scope.placer, scope.cache.number, scope.count_hits, scope.max_step_bytes)
    decides += (scope.target and scope.target.number,)
    if decides == (None, DEFAULT_SCOPE.cache.number, False, None, None):
        return None
    with _naming:
        token = _tokens.get(decides)
        if token is None:
            token = _tokens[decides] = jaxcompat.ContextToken()
        return token


_tokens: weakref.WeakValueDictionary[tuple, jaxcompat.ContextToken] = weakref.WeakValueDictionary()
_naming = threading.Lock()

DEFAULT_SCOPE = Scope(None, None)
"""The scope of calls outside any session: it places nothing. `session` gives it a cache."""


def current_scope() -> Scope:
    """The scope of the innermost session of this thread."""
    return jaxcompat.entered_session() or DEFAULT_SCOPE


def in_mesh_of(scope: Scope) -> contextlib.AbstractContextManager[None]:
    """Context manager of what JAX itself traces or runs in a scope: it means the scope's mesh.

    Inside a transformation it means nothing.
    """
    return jaxcompat.tracing_context(None if jaxcompat.is_tracing() else scope.mesh)


@contextlib.contextmanager
def no_recompile():
    """Context manager that raises `RecompileError`, with the reason, if a step needs a new program.

    A call whose program is in memory runs, even if JAX's dispatcher has dropped its entry.
    `step.warm` may build. In effect for the current thread, or the current asyncio task.
    """
    token = recompiles_forbidden.set(True)
    try:
        yield
    finally:
        recompiles_forbidden.reset(token)
