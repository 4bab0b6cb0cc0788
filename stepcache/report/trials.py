"""`Trials`: what a step takes with copies of its variables under other policies, as timed here."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from stepcache.report.policy_costs import PlacedCosts, Tried, untimely
from stepcache.variables.policy import OnHost, Placement, Read, on_host
from stepcache.variables.transfer import Meter
from stepcache.variables.variables import Variables

_SETTLING = 2  # Calls that compile, and read for the first time.
_BLOCK, _BLOCKS = 8, 3
_TRIAL_SECONDS = 20.0

Copies = Callable[[Variables], Variables]


@dataclass(frozen=True)
class Trials:
    """Times calls of a step on copies of its arguments.

    Attributes:
        step, args, kwargs: the call.
    """

    step: Any
    args: tuple
    kwargs: dict[str, Any]

    def seconds(self, copied: Copies, least_runs: int, least_seconds: float) -> float:
        """Returns the mean time of calls on copies that `copied` makes of the variables."""
        calls, times = self._calls(copied), []
        while len(times) < least_runs or sum(times) < least_seconds:
            times.append(next(calls))
        return statistics.fmean(times[len(times) // 2 :])  # The first ones compile, and settle.

    def _calls(self, copied: Copies) -> Iterator[float]:
        """Yields the seconds of one call after the other, and of all that it computes."""

        def copy_of(leaf: Any) -> Any:
            return copied(leaf) if isinstance(leaf, Variables) else leaf

        kept = jax.tree.map(copy_of, (self.args, self.kwargs))
        while True:
            # Arrays may be donated; variables stay, and with them the copies that they keep.
            given, named = jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, kept)
            jax.block_until_ready((given, named))
            started = time.perf_counter()
            for each in jax.tree.leaves(self.step(*given, **named)):
                if isinstance(each, jax.Array | Variables):
                    each.block_until_ready()
            yield time.perf_counter() - started

    def of(self, costs: PlacedCosts, now: float) -> float | None:
        """Times calls under each of the policies of some variables; keeps them in `costs.tried`.

        Other variables of the call are on the devices meanwhile.

        Args:
            costs: of the variables.
            now: what a call takes, about.

        Returns:
            The seconds of a call that reads nothing; None if there is no time to try them.
        """
        policies = list(dict.fromkeys(untimely(*each) for each in costs.policies()))
        calls = int(_TRIAL_SECONDS / (len(policies) * now))
        if calls < _SETTLING + 2:
            return None
        block = min(_BLOCK, calls - _SETTLING)
        blocks = max(1, min(_BLOCKS, (calls - _SETTLING) // block))
        found = {each: self._tried(costs, *each, block, blocks) for each in policies}
        alone = found[on_host(costs.variables.placement).on_device, Read()].seconds
        costs.tried = {
            each: Tried(max(0.0, tried.seconds - alone), max(0.0, tried.after_write - alone))
            for each, tried in found.items()
        }
        costs.measured = "its policies were timed just now"
        return alone

    def _tried(
        self, costs: PlacedCosts, placement: Placement, read: Read, block: int, blocks: int
    ) -> Tried:
        made: list[Variables] = []

        def copied(variables: Variables) -> Variables:
            if variables is not costs.variables:
                return moved(variables, on_host(variables.placement).on_device, Read())
            made.append(moved(variables, placement, read))
            return made[0]

        calls, leaves = self._calls(copied), jax.tree.leaves(costs.variables.value)
        times: list[tuple[list[float], list[float]]] = [([], []) for _ in range(blocks)]
        is_written = isinstance(placement, OnHost) and not costs.carried
        # Of a copy that is kept, calls that find it as it was are needed, too.
        between = max(2 if read.cache else 1, min(block, round(costs.between)))
        for _ in range(_SETTLING):
            next(calls)
        for found, number in itertools.product(times, range(block)):
            after_write = is_written and number % between == 0
            if after_write:
                made[0]._master.assign(leaves, None, Meter())
            found[after_write].append(next(calls))
        means = [
            [statistics.fmean(each) for each in kind if each] for kind in zip(*times, strict=True)
        ]
        alike, after_write = (each or means[not n] for n, each in enumerate(means))
        return Tried(statistics.median(alike), statistics.median(after_write))


def moved(variables: Variables, placement: Placement, read: Read) -> Variables:
    """Returns a copy of variables under another placement and policy."""
    about: dict[str, Any] = {"name": variables._prefix or None, "pack": variables._pack}
    return Variables(variables.value, placement=placement, read=read, **about)
