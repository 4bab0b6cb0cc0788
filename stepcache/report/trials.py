"""`Trials`: what a step takes with copies of its variables under other policies, as timed here."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax

from stepcache.report.policy_costs import PolicyCosts, Subject, Tried, moved
from stepcache.variables.policy import Placement, Read, Write, on_host
from stepcache.variables.variables import Variables

_SETTLING = 2  # Calls that compile, and read for the first time.
_BLOCK, _BLOCKS = 16, 5
_TRIAL_SECONDS = 20.0
_SENT_BYTES = 1 << 28  # Larger values are not sent to a server for a trial.

Copies = Callable[[Variables], Variables]


class Trials(NamedTuple):
    """Times calls of a step on copies of its arguments."""

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

    def of(self, costs: PolicyCosts, now: float) -> float | None:
        """Times calls under each of the policies of some variables; keeps them in `costs.tried`.

        Other variables of the call are on the devices meanwhile. A call takes about `now` seconds.

        Returns:
            The seconds of a call that reads nothing; None if there is no time to try them.
        """
        policies = list(dict.fromkeys(costs.alike(*each) for each in costs.policies()))
        calls = int(_TRIAL_SECONDS / (len(policies) * now))
        if calls < _SETTLING + 2 or (costs.is_served and costs.variables.nbytes > _SENT_BYTES):
            return None
        block = min(_BLOCK, calls - _SETTLING)
        blocks = max(1, min(_BLOCKS, (calls - _SETTLING) // block))
        try_as = partial(self._tried, costs, block, blocks)
        there = on_host(costs.variables.placement).on_device, Read()
        alone = try_as(lambda *_: Subject(moved(costs.variables, *there)), *there).seconds
        with costs.trial() as make:
            if costs.is_served:  # The server is new, and its memory.
                try_as(make, *policies[0])
            found = {each: try_as(make, *each) for each in policies}
        costs.tried = {
            each: tried._replace(
                seconds=max(0.0, tried.seconds - alone),
                after_write=max(0.0, tried.after_write - alone),
            )
            for each, tried in found.items()
        }
        costs.measured = "its policies were timed just now"
        return alone

    def _tried(
        self,
        costs: PolicyCosts,
        block: int,
        blocks: int,
        make: Callable[..., Subject],
        placement: Placement,
        read: Read,
        *write: Write,
    ) -> Tried:
        subject = make(placement, read, *write)

        def copied(each: Variables) -> Variables:
            if each is costs.variables:
                return subject.variables
            return moved(each, on_host(each.placement).on_device, Read())

        calls = self._calls(copied)
        pushes: list[float] = []
        times: list[tuple[list[float], list[float]]] = [([], []) for _ in range(blocks)]
        # Of a copy that is kept, calls that find it as it was are needed, too.
        every = max(2 if read.cache else 1, min(block, round(costs.between)))

        def call(number: int, found: tuple[list[float], list[float]], pushes: list[float]) -> None:
            after_write = subject.write is not None and number % every == 0
            if subject.write is not None and after_write:
                subject.write()
            found[after_write and not read.max_staleness].append(next(calls))
            if subject.push is not None:
                started = time.perf_counter()
                subject.push()
                pushes.append(time.perf_counter() - started)

        for number in range(_SETTLING):
            call(number, ([], []), [])
        for found, number in itertools.product(times, range(block)):
            call(number, found, pushes)
        means = [
            [statistics.fmean(each) for each in kind if each] for kind in zip(*times, strict=True)
        ]
        alike, after_write = (each or means[not n] for n, each in enumerate(means))
        seconds = statistics.median(alike), statistics.median(after_write)
        return Tried(*seconds, push=statistics.fmean(pushes or [0.0]))
