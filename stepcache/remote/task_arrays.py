"""The arrays that a task holds for clients."""

from collections.abc import Sequence
from typing import Any


class Failed:
    """Stands for an array that is not there, and says why."""

    def __init__(self, why: str):
        self.why = why


class RunFailed(Exception):
    """A command needs an array that is not there, or that a failed run did not make."""


_MISSING = Failed("an array is not there: it was donated, or dropped")


class Arrays:
    """The arrays and variables of all clients, on this task's part of the devices."""

    def __init__(self) -> None:
        self._outputs: dict[tuple[int, int], list[Any]] = {}  # By client, and number of the run.
        self._variables: dict[int, list[Any]] = {}

    def keep(self, client: int, number: int, arrays: list[Any]) -> None:
        """Keeps the outputs of a run."""
        if arrays:
            self._outputs[client, number] = arrays

    def look_up(self, client: int, number: int, ref: Sequence[Any]) -> list[Any]:
        """Returns the arrays that a reference of run `number` names, or what stands for them.

        The reference is `["o", runs ago, first, count]`, `["v", variable]`, or of some of its
        leaves `["v", variable, first, count]`.
        """
        if ref[0] == "v":
            found = self._variables.get(ref[1], [_MISSING])
            return found[ref[2] : ref[2] + ref[3]] if len(ref) > 2 else found
        _, ago, first, count = ref
        found = self._outputs.get((client, number - ago), [])[first : first + count]
        found = [_MISSING if each is None else each for each in found]
        return found + [_MISSING] * (count - len(found))

    def take(self, client: int, number: int, ref: Sequence[Any]) -> None:
        """Drops arrays that a run has donated."""
        if ref[0] == "o":
            self.free(client, [[number - ref[1], ref[2], ref[3]]])

    def free(self, client: int, rows: Sequence[Sequence[int]]) -> None:
        """Drops outputs of runs: rows of run, first output and count."""
        for number, first, count in rows:
            arrays = self._outputs.get((client, number))
            if arrays is not None:
                arrays[first : first + count] = [None] * len(arrays[first : first + count])
                if all(each is None for each in arrays):
                    del self._outputs[client, number]

    def bind(self, variable: int, arrays: list[Any]) -> None:
        """Makes arrays the value of a variable."""
        self._variables[variable] = arrays

    def drop(self, client: int, variables: Sequence[int]) -> None:
        """Drops the outputs of a client's runs, and variables."""
        for key in [key for key in self._outputs if key[0] == client]:
            del self._outputs[key]
        for number in variables:
            self._variables.pop(number, None)
