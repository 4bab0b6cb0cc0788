"""Says where two lowered modules differ: the first place, in words, with the user's source line.

Compares operations by name, attributes, types, and the constants and arguments that they read, and
not by the results that they read: a changed operation would change all that follow it. Only where
nothing else differs does the difference lie in which results are read.
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


@dataclass(frozen=True, slots=True)
class ModuleDifference:
    """The first place where two modules differ, and how many other places do.

    Attributes:
        change: its `path` is a source line (`model.py:31 in layer`), an argument, an output or a
            setting of the module.
        more: further source lines, arguments, outputs and settings that differ.
    """

    change: Change
    more: int = 0

    def __str__(self) -> str:
        rest = f"; and {counted(self.more, 'more place')}" if self.more else ""
        return f"{self.change}{rest}"


def difference(
    before: str,
    after: str,
    is_users_file: Callable[[str], bool],
    label_of: Callable[[str], str] = os.path.basename,
) -> ModuleDifference | None:
    """Returns the first difference between two modules; None if only locations differ.

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
        for file, line, function in [f for f in frames if is_users_file(f.file)] or frames:
            function = function.rpartition("<locals>.")[2].replace("<module>", "")
            return f"{label_of(file)}:{line}" + (f" in {function}" if function else "")
        return "module"

    changes: dict[str, Change] = {}
    try:
        old, new = ModuleText(before), ModuleText(after)
        for place, *sides in _differences(old, new, place_of) or _rewired(old, new, place_of):
            changes.setdefault(place, Change("code", place, *sides))
    except Exception as error:  # Text of a form not known here must not hide the miss it explains.
        changes["module"] = Change("code", "module", "one text", f"another text ({error!r})")
    return ModuleDifference(next(iter(changes.values())), len(changes) - 1) if changes else None


_PlaceOf = Callable[[ModuleText, Operation], str]
_Difference = tuple[str, str, str]  # The place, and the words for before and after.
_Listed = tuple[tuple | None, Operation]  # The key of an operation, and the operation.
_ABSENT = "absent"


def _differences(old: ModuleText, new: ModuleText, place_of: _PlaceOf) -> list[_Difference]:
    """Returns causes before their effects, as far as an order can tell them apart."""
    found = list(_named_differences(old.inputs, new.inputs))
    found += _operation_differences(old, new, place_of)
    found += _named_differences(old.outputs, new.outputs)
    for before, after in ((old.inputs, new.inputs), (old.outputs, new.outputs)):
        for name in sorted(before.keys() ^ after.keys()):
            sides = (
                ", ".join(pieces_of(side[name])) if name in side else _ABSENT
                for side in (before, after)
            )
            found.append((name, *sides))
    if old.name != new.name:
        found.append(("name of the function", old.name, new.name))
    return found


def _named_differences(before: dict[str, str], after: dict[str, str]) -> Iterator[_Difference]:
    for name, text in before.items():
        if text != after.get(name, text):
            yield name, apart(text, after[name]), apart(after[name], text)


def _operation_differences(
    old: ModuleText, new: ModuleText, place_of: _PlaceOf
) -> Iterator[_Difference]:
    # An argument that only one of the two reads shifts the places of the others.
    by_name = old.arguments != new.arguments
    bodies, other_bodies = (
        {name: [_key(each, by_name) for each in body] for name, body in module.functions.items()}
        for module in (old, new)
    )
    before, after = _listed(old, bodies, other_bodies), _listed(new, other_bodies, bodies)
    pairs = _pairs(before, after)
    if Counter(key for key, _ in before) == Counter(key for key, _ in after):
        moved = [(one, other) for (a, one), (b, other) in zip(before, after, strict=True) if a != b]
        for one, other in moved[:1]:
            order = f"{in_words(other)}, as part of another order of the same operations"
            yield place_of(new, other), in_words(one), order
        return
    for one, other in pairs:
        place = place_of(new, other) if other else place_of(old, one) if one else ""
        yield place, in_words(one, other), in_words(other, one)


def _key(operation: Operation, by_name: bool) -> tuple | None:
    """What two operations have in common that are no difference."""
    if operation.name == "return" and operation.function == "main":
        return None  # Outputs are compared by name.
    known = {"constant": "shown", "argument": "shown" if by_name else "wire", "result": "kind"}
    read = [getattr(value, known[value.kind]) for value in operation.operands]
    return operation.name, operation.text, *read


def _listed(module: ModuleText, bodies: dict[str, list], others: dict[str, list]) -> list[_Listed]:
    """Returns the operations in the order in which they run, those of a function at its first call.

    A function that the other module has too, or that has no counterpart there, is left out: its
    calls tell enough.
    """
    known = {tuple(body) for body in others.values()}
    names = {NUMBER.sub("", name) for name in others}
    listed: list[_Listed] = []
    seen = {"main"}

    def walk(name: str) -> None:
        is_changed = tuple(bodies[name]) not in known and NUMBER.sub("", name) in names
        for key, operation in zip(bodies[name], module.functions[name], strict=True):
            if operation.callee in bodies and operation.callee not in seen:
                seen.add(operation.callee)
                walk(operation.callee)
            if is_changed:
                listed.append((key, operation))

    if "main" in bodies:
        walk("main")
    return listed


_WINDOW = 1500  # Lines that are matched at once: a match takes time with their square.


def _pairs(
    before: Sequence[_Listed], after: Sequence[_Listed]
) -> Iterator[tuple[Operation | None, Operation | None]]:
    """Yields the operations that differ, beside their counterparts."""
    start = 0
    while start < min(len(before), len(after)) and before[start][0] == after[start][0]:
        start += 1
    before, after = before[start:], after[start:]
    same = 0
    while same < min(len(before), len(after)) and before[-1 - same][0] == after[-1 - same][0]:
        same += 1
    before, after = before[: len(before) - same], after[: len(after) - same]
    while before or after:
        old, new = before[:_WINDOW], after[:_WINDOW]
        codes = _matched([key for key, _ in old], [key for key, _ in new])
        if len(before) > _WINDOW or len(after) > _WINDOW:
            # What follows the last match may match beyond the window.
            while len(codes) > 1 and codes[-1][0] != "equal":
                codes.pop()
        for kind, low, high, other_low, other_high in codes:
            if kind != "equal":
                yield from _paired(old[low:high], new[other_low:other_high])
        before, after = before[codes[-1][2] :], after[codes[-1][4] :]


def _paired(
    before: Sequence[_Listed], after: Sequence[_Listed]
) -> Iterator[tuple[Operation | None, Operation | None]]:
    """The counterpart of an operation is one of the same name, or else the one at its place."""
    names = ([operation.name for _, operation in side] for side in (before, after))
    for _, low, high, other_low, other_high in _matched(*names):
        for one, other in zip_longest(before[low:high], after[other_low:other_high]):
            if not (one and other and one[0] == other[0]):
                yield one and one[1], other and other[1]


def _matched(before: Sequence, after: Sequence) -> list[tuple[str, int, int, int, int]]:
    return SequenceMatcher(None, before, after, autojunk=False).get_opcodes()


def _rewired(old: ModuleText, new: ModuleText, place_of: _PlaceOf) -> Iterator[_Difference]:
    """Where all operations are the same: those that read other results."""
    for before, after in zip(old.functions.values(), new.functions.values(), strict=False):
        for one, other in zip(before, after, strict=False):
            wires = [[value.wire for value in each.operands] for each in (one, other)]
            if _key(one, False) != _key(other, False) or wires[0] != wires[1]:
                sides = in_words(one, other), in_words(other, one)
                which = " (another one)" if sides[0] == sides[1] else ""
                yield place_of(new, other), sides[0], sides[1] + which
