"""What a recording finds: code entered, files and environment variables read, impure calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import CodeType

from stepcache.fingerprint.nesting import Nesting


@dataclass(slots=True, eq=False)
class Findings:
    """What a trace used."""

    # The code objects entered, by their identities, for hashing code looks at all of it.
    entered: dict[int, CodeType] = field(default_factory=dict)
    # JAX's own, and what it uses, that any trace has entered so far: it counts as entered (see
    # `seen_codes`). Recordings share one dictionary until there is more: its identity tells what is
    # known of it. Not to be changed.
    of_jax: dict[int, CodeType] = field(default_factory=dict)
    # Of code that equinox has generated for a class, by its identity: that class.
    generated: dict[int, type] = field(default_factory=dict)
    # Paths of the files opened for reading, relative ones as they were given, with the state of
    # each as `state_of_file` gives it.
    files: dict[str, tuple[int, ...] | None] = field(default_factory=dict)
    # Names of environment variables asked for, `WHICH_VARIABLES` among them.
    variables: set[str] = field(default_factory=set)
    # What stands for the settings asked for, among the names that code reads; and the names of
    # fields that `dataclasses` read.
    settings: set[str] = field(default_factory=set)
    # Code, by identity, that loops over a set which a variable of it led to.
    over_sets: set[int] = field(default_factory=set)
    # What it called that makes it valid for this run only.
    impure: dict[str, None] = field(default_factory=dict)
    # What only earlier traces entered, by identity, if dependencies of their programs lead to it.
    explained: frozenset[int] = frozenset()
    unavailable: str | None = None  # Why it has not been watched, or not to its end.
    nesting: Nesting | None = None  # Where it has to be known.

    @property
    def codes(self) -> set[CodeType]:
        """The code objects entered; those of other definitions of the same text are equal."""
        return {*self.entered.values(), *self.of_jax.values()}

    def with_all_of(self, other: Findings) -> Findings:
        """What this trace and a later one used."""
        return Findings(
            self.entered | other.entered,
            max(self.of_jax, other.of_jax, key=len),  # It only grows.
            self.generated | other.generated,
            self.files | other.files,
            self.variables | other.variables,
            self.settings | other.settings,
            self.over_sets | other.over_sets,
            self.impure | other.impure,
            self.explained - other.entered.keys(),
            other.unavailable or self.unavailable,
        )
