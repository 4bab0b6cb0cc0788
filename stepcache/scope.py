"""`Scope`: what a session decides for the calls made in it, and which one is current.

The session is the front door to it; the engine knows only this.
"""

from __future__ import annotations

import contextvars
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from stepcache import jaxcompat
from stepcache.errors import UnmatchedRuleWarning, warn
from stepcache.programs.cache import ProgramCache
from stepcache.programs.pods.peers import Peers
from stepcache.programs.signature import Path
from stepcache.sharding import Placer, processes_of
from stepcache.weak_objects import WeakObjects

recompiles_forbidden: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "recompiles_forbidden", default=False
)

_EXAMPLES = 3


@dataclass(eq=False, slots=True, weakref_slot=True)
class Scope:
    """What a session decides for the calls made in it.

    Attributes:
        placer: the mesh and the rules; None places nothing.
        cache: where programs are kept.
        on_miss: "compile", "warn" or "error".
        count_hits: keep the C++ dispatcher out, so that every call is counted.
        max_step_bytes: what one call may move, or None.
        together: gives the peers of a pod, by the ranks of its processes; None for one process.
        closed: no call may be made in it any more.
        built: a program has been built in it.
        matched: rules that have matched a leaf so far, or that have been warned about.
        seen: the `Variables` whose leaves have been matched.
        shown: paths of some leaves of the last of them.
    """

    placer: Placer | None
    cache: ProgramCache
    on_miss: str = "compile"
    count_hits: bool = False
    max_step_bytes: int | None = None
    together: Callable[[tuple[int, ...]], Peers | None] = lambda ranks: None
    closed: bool = False
    built: bool = False
    matched: set[int] = field(default_factory=set)
    seen: WeakObjects = field(default_factory=WeakObjects)
    shown: tuple[str, ...] = ()

    @property
    def mesh(self):
        return self.placer.mesh if self.placer else None

    @property
    def is_watched(self) -> bool:
        """Whether each call has to enter Python, to be counted, checked or judged."""
        bounded = self.max_step_bytes is not None
        return bool(self.count_hits or self.cache.check_every or bounded)

    @property
    def peers(self) -> Peers | None:
        """The processes of the mesh; None for one process, or without a mesh."""
        return self.together(processes_of(self.mesh.devices.flat)) if self.mesh else None

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
        """Warns of each of these rules, and never again."""
        for index in sorted(indices):
            self.matched.add(index)
            pattern, spec = self.placer.rules.rules[index]  # type: ignore[union-attr]
            message = f"rule {pattern!r}, {spec}, matches no leaf of {matching_no_leaf_of}"
            warn(message, UnmatchedRuleWarning)


class ScopeToken(jaxcompat.ContextToken):
    """Stands for a scope in JAX's own keys, without keeping it alive there.

    Scopes that decide alike have equal tokens, and one that decides as calls outside any session do
    has one that equals None, which JAX's keys hold there. So entering a session does not make JAX
    trace and compile anew whatever runs in it, steps or not.
    """

    __slots__ = ("_alike", "scope")

    def __init__(self, scope: Scope):
        self.scope = weakref.ref(scope)
        decides = (scope.placer, scope.cache.number, scope.count_hits, scope.max_step_bytes)
        outside = (None, DEFAULT_SCOPE.cache.number, False, None)
        self._alike = None if decides == outside else decides

    @property
    def reader(self) -> Scope | None:
        return self.scope()

    @property
    def placer(self) -> Placer | None:
        scope = self.scope()
        return scope.placer if scope is not None else None

    @property
    def peers(self) -> Peers | None:
        scope = self.scope()
        return scope.peers if scope is not None else None

    @property
    def max_step_bytes(self) -> int | None:
        scope = self.scope()
        return scope.max_step_bytes if scope is not None else None

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if other is None:
            return self._alike is None and not self._closed
        if not isinstance(other, ScopeToken):
            return False
        return self._alike == other._alike and not (self._closed or other._closed)

    @property
    def _closed(self) -> bool:
        scope = self.scope()
        return scope is not None and scope.closed

    def __hash__(self) -> int:
        return hash(self._alike)


DEFAULT_SCOPE = Scope(None, ProgramCache())
"""The scope of calls outside any session: it places nothing."""


def current_scope() -> Scope:
    """The scope of the innermost session of this thread."""
    token = jaxcompat.session_context.value
    scope = token.scope() if token is not None else None
    return scope or DEFAULT_SCOPE
