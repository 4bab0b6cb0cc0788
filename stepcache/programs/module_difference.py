"""Says where two lowered modules differ: the first places, in words, with the user's source line.

Operations are compared by name, attributes, types and constants, and not by the results that they
read: one changed operation would change all that follow. What they read is compared last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import zip_longest

from stepcache.events import Change
from stepcache.origin import file_label, is_users_file
from stepcache.programs.module_text import ModuleText, Operation, constant_in_words, pieces_of
from stepcache.units import counted

_MOST_CHANGES = 3
_WINDOW = 1000  # Operations that are matched at once: a match takes time with their square.


@dataclass(frozen=True, slots=True)
class ModuleDifference:
    """Where two modules differ: the first places, up to three, and how many there are more.

    Settings and arguments come first, then source lines, those with an unknown operation before
    others, then outputs. The `path` of a change names its place, such as `model.py:31 in layer`.
    """

    changes: tuple[Change, ...]
    more: int = 0

    def __str__(self) -> str:
        more = [f"and {counted(self.more, 'more place')}"] if self.more else []
        return "; ".join([*map(str, self.changes), *more])


def difference(before: str, after: str) -> ModuleDifference | None:
    """Returns where two modules differ; None if only in locations, or in ways that it cannot tell.

    Args:
        before: StableHLO with locations, as `jax.stages.Lowered.as_text(debug_info=True)`.
        after: the same of the module to compare it with.
    """
    changes: dict[str, Change] = {}
    try:
        old, new = ModuleText(before), ModuleText(after)
        for place, one, other in _differences(old, new):
            changes.setdefault(place, Change("code", place, one, other))
    except Exception as error:  # Text of a form not known here must not hide the miss it explains.
        changes["module"] = Change("code", "module", "one text", f"another text ({error!r})")
    first = tuple(changes.values())[:_MOST_CHANGES]
    return ModuleDifference(first, len(changes) - len(first)) if changes else None


def _place_of(module: ModuleText, operation: Operation) -> str:
    """The innermost line in a file of the user's; without one, the innermost line of any file."""
    frames = module.frames(operation)
    for file, line, function in [f for f in frames if is_users_file(f[0])] or frames:
        function = function.rpartition("<locals>.")[2].replace("<module>", "")
        return f"{file_label(file)}:{line}" + (f" in {function}" if function else "")
    return "module"


_Difference = tuple[str, str, str]  # The place, and the words for before and after.
_Pair = tuple[Operation | None, Operation | None]


def _differences(old: ModuleText, new: ModuleText) -> list[_Difference]:
    """Returns causes before their effects, as far as an order can tell them apart."""
    if len(old.arguments) == len(new.arguments):  # Their names are no part of the program.
        old.arguments = dict(zip(new.arguments, old.arguments.values(), strict=True))
    before, after = (each.settings | each.arguments | each.outputs for each in (old, new))
    first, last = [], []
    for name in before | after:
        one, other = (each.get(name, "absent") for each in (before, after))
        words = [", ".join(pieces_of(*each)) or "without" for each in ((one, other), (other, one))]
        is_last = name in new.outputs or name not in before or name not in after
        if words[0] != words[1]:
            (last if is_last else first).append((name, *words))
    found = [*first, *_of_operations(old, new), *last]
    return found or [("name of the function", old.name, new.name)] * (old.name != new.name)


def _of_operations(old: ModuleText, new: ModuleText) -> list[_Difference]:
    numbers: dict[tuple | None, int] = {}  # Numbers of keys are faster to compare.
    for operation in old.operations + new.operations:
        operation.key = numbers.setdefault(_key(operation), len(numbers))
    before, after = old.operations, new.operations
    is_alike = (old.arguments.keys(), old.outputs) == (new.arguments.keys(), new.outputs)
    if Counter(each.key for each in before) == Counter(each.key for each in after):
        for one, other in zip(before, after, strict=True):
            is_moved = one.key != other.key
            if is_moved or (is_alike and one.read != other.read):
                note = " (the same operations in another order)" if is_moved else " of other values"
                return [(_place_of(new, other), _words(one, other), _words(other, one) + note)]
    names = {each.name for each in before} ^ {each.name for each in after}
    found: dict[str, tuple[bool, str, str]] = {}
    for one, other in _pairs(before, after):
        place = _place_of(new, other) if other else _place_of(old, one) if one else ""
        # An operation that one module does not know says most, as the barrier of `jax.checkpoint`.
        is_known = not any(each and each.name in names for each in (one, other))
        if place not in found or is_known < found[place][0]:
            found[place] = is_known, _words(one, other), _words(other, one)
    return [(place, *words[1:]) for place, words in sorted(found.items(), key=lambda e: e[1][0])]


def _key(operation: Operation) -> tuple | None:
    """Returns what makes two operations the same."""
    if operation.name == "return" and operation.function == "main":
        return None  # Outputs are compared by name.
    # What a loop carries follows from its body and its bound, which say more.
    parts = operation.attributes_and_type[: 1 if operation.name.endswith("while") else 2]
    return operation.name, *parts, *operation.constants


def _pairs(before: list[Operation], after: list[Operation]) -> Iterator[_Pair]:
    """Yields the operations that differ, beside those of the same name, or else at their place."""
    while before or after:
        sides = ([each.key for each in side[:_WINDOW]] for side in (before, after))
        codes = SequenceMatcher(None, *sides, autojunk=False).get_opcodes()
        while len(codes) > 1 and codes[-1][0] != "equal":
            codes.pop()  # What follows the last match may match beyond the window.
        for low, high, other_low, other_high in (each[1:] for each in codes if each[0] != "equal"):
            ones, others = before[low:high], after[other_low:other_high]
            sides = ([operation.name for operation in side] for side in (ones, others))
            for _, *at in SequenceMatcher(None, *sides, autojunk=False).get_opcodes():
                for one, other in zip_longest(ones[at[0] : at[1]], others[at[2] : at[3]]):
                    if not (one and other and one.key == other.key):
                        yield one, other
        before, after = before[codes[-1][2] :], after[codes[-1][4] :]


def _words(operation: Operation | None, other: Operation | None) -> str:
    """Returns an operation in words, as far as it differs from another."""
    if operation is None:
        return "absent"
    beside = [*(other.constants if other else []), *[""] * len(operation.constants)]
    read = " and ".join(map(constant_in_words, operation.constants, beside))
    link = "by" if operation.name in ("multiply", "divide") else "with"
    words = [f"{link} {read}"] if read else []
    if other is None:
        words += pieces_of(operation.attributes_and_type[1])
    elif operation.name == other.name:
        words = words if operation.constants != other.constants else []
        texts = zip(operation.attributes_and_type, other.attributes_and_type, strict=True)
        words += [piece for sides in texts for piece in pieces_of(*sides)]
    return f"{operation.name} {', '.join(words)}".strip()
