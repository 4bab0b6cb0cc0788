"""Dependencies by name: of what kind each is, and where two sets of them differ.

A dependency has a name, which says of what kind it is, and a token, which is equal in two processes
where what it stands for is.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
from collections.abc import Iterable, Set
from dataclasses import replace

from stepcache.events import Change
from stepcache.fingerprint.tokens import is_special

LATE = "put into "
"""Begins the names of dependencies that are there once another module has been imported."""
NAMES_OF = "names of "
"""Begins the names of dependencies on what an installed module calls by which name."""

NAMES_IN = "names in "
"""Begins the names of dependencies on which names there are in such a module."""
IMPORTED = "imported "
"""Begins the names of marks of the modules of packages that functions import."""
IMPORT = "import "
"""Begins the names of dependencies on modules that a function imports."""

# In the order in which differences are reported. The name of any other begins with no prefix.
_KINDS = {
    "static ": "static",
    "option ": "options",
    "argument ": "argument",
    "arguments": "tree",
    "mesh": "mesh",
    "file ": "file",
    "environment variable ": "variable",
    "config ": "config",
    "package ": "package",
    "environment ": "environment",
    "module ": "module",
    NAMES_OF: "module",
    NAMES_IN: "module",
}
KINDS = tuple(dict.fromkeys(("code", "value", *_KINDS.values())))
"""All kinds, the most telling ones first."""
_SHOWN_WITHOUT_KIND = ("static", "config", "argument")
_MAX_CHANGES = 64
_OVER_BUFFERS = "a stepcache.calls.over_buffers._OverBuffers"


def kind_of(name: str, token: str = "") -> str:
    """The kind of a dependency: one of `KINDS`. Only its token tells code from a value."""
    for prefix, kind in _KINDS.items():
        if name.startswith(prefix):
            return kind
    return "code" if token.startswith("code ") else "value"


def digest_dependencies(dependencies: dict[str, str]) -> str:
    """A digest of dependencies, whatever their order."""
    text = repr(sorted(dependencies.items()))
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def agree(recorded: dict[str, str], found: dict[str, str]) -> bool:
    """Whether what is found now is what was recorded.

    Nothing can have been put into a module that is not loaded yet, so nothing is asked of it. What
    a package puts into its own classes when a part of it is imported is there on both sides or not.
    """
    if recorded == found:
        return True
    missing = recorded.keys() - found.keys() - _of_modules_not_loaded(recorded)
    return all(name.startswith(LATE) for name in missing) and all(
        recorded.get(name, token if name.startswith(LATE) else None) == token
        for name, token in found.items()
    )


def differences(before: dict[str, str], after: dict[str, str]) -> tuple[Change, ...]:
    """Where two sets of dependencies differ, the most telling ones first."""
    changes = []
    unknown = _of_modules_not_loaded(before)
    for name in dict.fromkeys((*before, *after)):
        old, new = before.get(name), after.get(name)
        late = name.startswith(LATE) and None in (old, new)
        if old != new and not late and not (new is None and name in unknown):
            changes.append(_change(name, old, new))
    changes = _without_wrapper(changes)
    shown = [change.path for change in changes]
    others = tuple(
        f"{each.path}{mark}" for each in changes if _is_of_another_class(each) for mark in ".[ "
    )
    changes = [
        each
        for each in changes
        if not _is_shown_by_name(each.path, shown) and not each.path.startswith(others)
    ]
    changes.sort(key=lambda change: (KINDS.index(change.part), _is_of_python(change.path)))
    return tuple(changes[:_MAX_CHANGES])


def _without_wrapper(changes: list[Change]) -> list[Change]:
    """Says that one build was over `Variables` and one was not, in the place of what that implies.

    Such a build is of an object of stepcache that wraps the step's function, so its values have
    other names.
    """
    for change in changes:
        sides = (change.before, change.after)
        if change.path == "step" and (_OVER_BUFFERS in sides) and "absent" not in sides:
            before, after = ("Variables" if each == _OVER_BUFFERS else "arrays" for each in sides)
            others = [each for each in changes if each.part not in ("value", "tree", "argument")]
            return [replace(change, before=before, after=after), *others]
    return changes


def _is_of_another_class(change: Change) -> bool:
    """Whether an object is in the place of one of another class: so are its attributes."""
    both = (change.before, change.after)
    return change.part != "code" and all(token.startswith("a ") for token in both)


def _is_of_python(path: str) -> bool:
    """Whether a change is of a method such as `__eq__`, which Python writes for a dataclass."""
    return is_special(path.rpartition(".")[2])


def _is_shown_by_name(path: str, shown: list[str]) -> bool:
    """Whether a change of names in a module is one that is shown by the name itself."""
    owner = f"{path.removeprefix(NAMES_OF)}."
    return path.startswith(NAMES_OF) and any(each.startswith(owner) for each in shown)


def _of_modules_not_loaded(recorded: dict[str, str]) -> set[str]:
    """The dependencies about names in modules that this process has not imported."""
    modules = {name.removeprefix(NAMES_OF) for name in recorded if name.startswith(NAMES_OF)}
    modules |= {name.removeprefix(IMPORTED) for name in recorded if name.startswith(IMPORTED)}
    return names_about({each for each in modules if each not in sys.modules}, recorded)


def names_about(modules: Set[str], dependencies: Iterable[str]) -> set[str]:
    """The dependencies among some that are about names in some modules."""
    if not modules:
        return set()
    owners = tuple(f"{module}." for module in modules)
    of_modules = {f"{kind}{each}" for each in modules for kind in (NAMES_OF, NAMES_IN, IMPORT)}
    return {name for name in dependencies if name in of_modules or name.startswith(owners)}


def _change(name: str, old: str | None, new: str | None) -> Change:
    kinds = {kind_of(name, token) for token in (old, new) if token}
    part = kinds.pop() if len(kinds) == 1 else "value"
    shown = name.partition(" ")[2] if part in _SHOWN_WITHOUT_KIND else name
    note = ""
    if part == "code":
        note = "not there before" if old is None else "gone" if new is None else "its code changed"
    return Change(part, shown, *_where_they_differ(old or "absent", new or "absent"), note)


def _where_they_differ(old: str, new: str) -> tuple[str, str]:
    """Two texts; of long ones what is around their first difference."""
    if max(len(old), len(new)) <= _LONG:
        return old, new
    pairs = enumerate(itertools.zip_longest(old, new))
    start = max(0, next(at for at, (a, b) in pairs if a != b) - _SHOWN_BEFORE)
    parts = [each[start : start + _LONG] for each in (old, new)]
    ends = [each[start + _LONG :] for each in (old, new)]
    shown = ["…" * (start > 0) + p + "…" * bool(e) for p, e in zip(parts, ends, strict=True)]
    return shown[0], shown[1]


_LONG, _SHOWN_BEFORE = 100, 40
