"""Says where two lowered modules differ: the first places, in words, with the user's source line.

Operations are compared by name, attributes, types, and the constants and arguments that they read,
and not by the results that they read: one changed operation would change all that follow. If this
finds nothing, the modules differ in which results are read.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import zip_longest

from stepcache.events import Change
from stepcache.programs.module_text import NUMBER, ModuleText, Operation
from stepcache.programs.module_words import apart, in_words, pieces_of
from stepcache.units import counted

_MOST_CHANGES = 3
_WINDOW = 1000  # Operations that are matched at once: a match takes time with their square.


@dataclass(frozen=True, slots=True)
class ModuleDifference:
    """Where two modules differ.

    Attributes:
        changes: the first places, up to three: settings and arguments, then source lines, those
            with an unknown operation before others, then outputs. The `path` of each names it,
            such as `model.py:31 in layer`.
        more: how many further places differ.
    """

    changes: tuple[Change, ...]
    more: int = 0

    def __str__(self) -> str:
        more = [f"and {counted(self.more, 'more place')}"] if self.more else []
        return "; ".join([*map(str, self.changes), *more])


def difference(
    before: str,
    after: str,
    is_users_file: Callable[[str], bool],
    label_of: Callable[[str], str] = os.path.basename,
) -> ModuleDifference | None:
    """Returns where two modules differ; None if only in locations, or in ways that it cannot tell.

    Args:
        before: StableHLO with locations, as `jax.stages.Lowered.as_text(debug_info=True)`.
        after: the same of the module to compare it with.
        is_users_file: whether a source file is the user's. The innermost line in such a file names
            a place; without one, the innermost line of any file.
        label_of: the name to show for a source file.
    """
    if before == after:
        return None

    def place_of(module: ModuleText, operation: Operation) -> str:
        frames = module.frames(operation)
        for file, line, function in [f for f in frames if is_users_file(f[0])] or frames:
            function = function.rpartition("<locals>.")[2].replace("<module>", "")
            return f"{label_of(file)}:{line}" + (f" in {function}" if function else "")
        return "module"

    changes: dict[str, Change] = {}
    try:
        old, new = ModuleText(before), ModuleText(after)
        found = _differences(old, new, place_of) or list(_rewired(old, new, place_of))
        if not found and old.name != new.name:
            found = [("name of the function", old.name, new.name)]
        for place, one, other in found:
            changes.setdefault(place, Change("code", place, one, other))
    except Exception as error:  # Text of a form not known here must not hide the miss it explains.
        changes["module"] = Change("code", "module", "one text", f"another text ({error!r})")
    first = tuple(changes.values())[:_MOST_CHANGES]
    return ModuleDifference(first, len(changes) - len(first)) if changes else None


_PlaceOf = Callable[[ModuleText, Operation], str]
_Difference = tuple[str, str, str]  # The place, and the words for before and after.
_Listed = tuple[int, Operation]  # The number of its key, and an operation.
_Pair = tuple[Operation | None, Operation | None]


def _differences(old: ModuleText, new: ModuleText, place_of: _PlaceOf) -> list[_Difference]:
    """Returns causes before their effects, as far as an order can tell them apart."""
    arguments, new_arguments = old.arguments, new.arguments
    if len(arguments) == len(new_arguments):  # Their names are no part of the program.
        named = zip(new_arguments, arguments, strict=True)
        arguments = [(name, text) for (name, _), (_, text) in named]
    inputs, new_inputs = old.settings | dict(arguments), new.settings | dict(new_arguments)
    found = [*_in_both(inputs, new_inputs), *_of_operations(old, new, place_of)]
    found += _in_both(old.outputs, new.outputs)
    for before, after in ((inputs, new_inputs), (old.outputs, new.outputs)):
        for name in sorted(before.keys() ^ after.keys()):
            texts = [", ".join(pieces_of(side.get(name, "absent"))) for side in (before, after)]
            found.append((name, texts[0], texts[1]))
    return found


def _in_both(before: dict[str, str], after: dict[str, str]) -> Iterator[_Difference]:
    for name, text in before.items():
        sides = apart(text, after.get(name, text)), apart(after.get(name, text), text)
        if sides[0] != sides[1]:
            yield name, *sides


def _of_operations(old: ModuleText, new: ModuleText, place_of: _PlaceOf) -> list[_Difference]:
    # An argument that only one of the two reads shifts the places of the others.
    by_name = len(old.arguments) != len(new.arguments)
    numbers: dict[tuple | None, int] = {}  # Numbers of keys are faster to compare.
    keys, new_keys = (
        {
            name: [numbers.setdefault(_key(each, by_name), len(numbers)) for each in body]
            for name, body in module.functions.items()
        }
        for module in (old, new)
    )
    before, after = _listed(old, keys, new_keys), _listed(new, new_keys, keys)
    if Counter(key for key, _ in before) == Counter(key for key, _ in after):
        pairs = zip(before, after, strict=True)
        moved = [(one, other) for (key, one), (other_key, other) in pairs if key != other_key]
        order = " (the same operations in another order)"
        return [
            (place_of(new, other), in_words(one, other), in_words(other, one) + order)
            for one, other in moved[:1]
        ]
    names = {operation.name for _, operation in before} ^ {operation.name for _, operation in after}
    found: dict[str, tuple[int, str, str]] = {}
    for one, other in _pairs(before, after):
        place = place_of(new, other) if other else place_of(old, one) if one else ""
        # An operation that the other module does not know at all says most: of those of its line,
        # and of all lines, as with the barrier that `jax.checkpoint` adds.
        is_known = not any(each and each.name in names for each in (one, other))
        words = is_known, in_words(one, other), in_words(other, one)
        found[place] = min(found.get(place, words), words, key=lambda each: each[0])
    return [(place, *words[1:]) for place, words in sorted(found.items(), key=lambda e: e[1][0])]


def _key(operation: Operation, by_name: bool) -> tuple | None:
    """Returns what makes two operations the same."""
    if operation.name == "return" and operation.function == "main":
        return None  # Outputs are compared by name.
    told_by = {"argument": "shown" if by_name else "wire", "result": "kind"}
    read = [getattr(value, told_by.get(value.kind, "shown")) for value in operation.operands]
    # What a loop carries follows from its body and its bound, which say more.
    results = operation.results if not operation.name.endswith("while") else ()
    return operation.name, operation.attributes, *results, *read


def _listed(module: ModuleText, keys: dict[str, list], others: dict[str, list]) -> list[_Listed]:
    """Returns the operations in the order in which they run, those of a function at its first call.

    A function that the other module has too, or that has no counterpart there, is left out: its
    calls tell enough.
    """
    known = {tuple(body) for body in others.values()}
    names = {NUMBER.sub("", name) for name in others}
    listed: list[_Listed] = []
    seen = {"main"}

    def walk(name: str) -> None:
        is_changed = tuple(keys[name]) not in known and NUMBER.sub("", name) in names
        for key, operation in zip(keys[name], module.functions[name], strict=True):
            if operation.callee in keys and operation.callee not in seen:
                seen.add(operation.callee)
                walk(operation.callee)
            if is_changed:
                listed.append((key, operation))

    if "main" in keys:
        walk("main")
    return listed


def _pairs(before: Sequence[_Listed], after: Sequence[_Listed]) -> Iterator[_Pair]:
    """Yields the operations that differ, beside their counterparts."""
    start = _same(before, after)
    before, after = before[start:], after[start:]
    end = _same(before[::-1], after[::-1])
    before, after = before[: len(before) - end], after[: len(after) - end]
    while before or after:
        old, new = before[:_WINDOW], after[:_WINDOW]
        codes = list(_matched([key for key, _ in old], [key for key, _ in new]))
        if len(before) > _WINDOW or len(after) > _WINDOW:
            # What follows the last match may match beyond the window.
            while len(codes) > 1 and codes[-1][0] != "equal":
                codes.pop()
        for kind, low, high, other_low, other_high in codes:
            if kind != "equal":
                yield from _paired(old[low:high], new[other_low:other_high])
        before, after = before[codes[-1][2] :], after[codes[-1][4] :]


def _same(before: Sequence[_Listed], after: Sequence[_Listed]) -> int:
    """Returns how many operations are the same at the start."""
    pairs = enumerate(zip(before, after, strict=False))
    return next(
        (n for n, (one, other) in pairs if one[0] != other[0]), min(len(before), len(after))
    )


def _paired(before: Sequence[_Listed], after: Sequence[_Listed]) -> Iterator[_Pair]:
    """The counterpart of an operation is one of the same name, or else the one at its place."""
    names = ([operation.name for _, operation in side] for side in (before, after))
    for _, low, high, other_low, other_high in _matched(*names):
        for one, other in zip_longest(before[low:high], after[other_low:other_high]):
            if not (one and other and one[0] == other[0]):
                yield one and one[1], other and other[1]


def _matched(before: Sequence, after: Sequence) -> Sequence[tuple[str, int, int, int, int]]:
    return SequenceMatcher(None, before, after, autojunk=False).get_opcodes()


def _rewired(old: ModuleText, new: ModuleText, place_of: _PlaceOf) -> Iterator[_Difference]:
    """Where all operations are the same: those that read other results."""

    def read(module: ModuleText, operation: Operation, other: Operation) -> str:
        words = []
        for value, other_value in zip(operation.operands, other.operands, strict=False):
            if value.wire != other_value.wire:
                made_at = f" ({place_of(module, value.maker)})" if value.maker else ""
                words.append(f"{value.shown}{made_at}")
        return f"{operation.name} of {' and '.join(words)}" if words else ""

    for before, after in zip(old.functions.values(), new.functions.values(), strict=False):
        for one, other in zip(before, after, strict=False):
            if any(sides := (read(old, one, other), read(new, other, one))):
                yield place_of(new, other), *sides
