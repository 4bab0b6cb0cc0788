"""`advise`: what a step's variables would cost under other placements and policies, predicted."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax

from stepcache.calls.residence import Use
from stepcache.engine import Engine
from stepcache.errors import OptionError
from stepcache.report.explanation import explain
from stepcache.sharding import current_reader
from stepcache.units import counted, readable_bytes, readable_seconds, shown_as_printed
from stepcache.variables.plan import DEVICE_LINK, HOST_LINK, SERVER_LINK
from stepcache.variables.policy import OnHost, Placement, Read, Write
from stepcache.variables.variables import Variables

if TYPE_CHECKING:
    from stepcache.report.policy_costs import PolicyCosts

_RUNS, _LEAST_SECONDS = 6, 0.3
_CLOSE = 1.02  # Predictions that differ by less are not told apart.
_QUICK_SECONDS = 10.0
_LEAST_SHARE = 0.05  # Of a step that is no transfer, whatever the links were measured to take.


@dataclass(frozen=True)
class Choice:
    """A placement and policies for some variables, and what they are predicted to cost.

    Attributes:
        variables: their name.
        placement, read, write: as for `Variables`.
        seconds: time of a step, with the transfers and pushes that it waits for.
        link_bytes: bytes that cross each link in a step, on average.
        held_bytes: memory of each device that is used between steps.
        freshness: how results differ from those with `Read()`, in words; empty if they do not.
        is_current: whether the variables have these policies now.
    """

    variables: str
    placement: Placement
    read: Read
    write: Write
    seconds: float
    link_bytes: dict[str, float]
    held_bytes: int
    freshness: str = ""
    is_current: bool = False

    def __str__(self) -> str:
        is_read = isinstance(self.placement, OnHost) or SERVER_LINK in self.link_bytes
        shown = [str(self.read if is_read else self.placement)]
        shown += [str(self.write)] if self.write.every > 1 else []
        return ", ".join(shown)


@dataclass(frozen=True)
class Advice:
    """Predicted costs of a step under several policies. Print it, or read its fields.

    Attributes:
        step: name of the step.
        seconds: time of a step with the current policies.
        choices: for each of the variables, the fastest first.
        measured: the measurements behind the predictions, in words.
    """

    step: str
    seconds: float
    choices: tuple[Choice, ...] = ()
    measured: tuple[str, ...] = ()

    def best(self, variables: str) -> Choice:
        """Returns the fastest choice with the same placement and the same results.

        Of choices within 2 % of it, the current policies win, then those that move fewer bytes.
        """
        of_these = [each for each in self.choices if each.variables == variables]
        now = next(each for each in of_these if each.is_current)
        exact = [
            each
            for each in of_these
            if not each.freshness and each.placement == now.placement and each.write == now.write
        ]
        close = [each for each in exact if each.seconds <= _CLOSE * exact[0].seconds]
        return min(close, key=lambda each: (not each.is_current, sum(each.link_bytes.values())))

    def __str__(self) -> str:
        lines = [f"{self.step}: {readable_seconds(self.seconds)} a step now"]
        for name, group in itertools.groupby(self.choices, key=lambda each: each.variables):
            lines += [f"  {name}", *_table([*group], self.best(name))]
        return "\n".join([*lines, *(f"  {text}" for text in self.measured)])

    _repr_pretty_ = shown_as_printed


def _table(choices: list[Choice], best: Choice) -> list[str]:
    rows: list[tuple[str, ...]] = [("a step", "held", *_LINKS, "", "policy", "results")]
    for each in choices:
        mark = "best" if each is best else "now" if each.is_current else ""
        moved = (readable_bytes(round(each.link_bytes.get(link, 0))) for link in _LINKS)
        about = readable_seconds(each.seconds), readable_bytes(each.held_bytes), *moved
        rows.append((*about, mark, str(each), each.freshness or "the same"))
    used = [n for n, column in enumerate(zip(*rows[1:], strict=True)) if {*column} - {"0 B", ""}]
    columns = [[row[n] for row in rows] for n in used]
    widths = [max(map(len, column)) for column in columns]
    lines = ("  ".join(map(str.ljust, cells, widths)) for cells in zip(*columns, strict=True))
    return [f"    {line}".rstrip() for line in lines]


_LINKS = (SERVER_LINK, HOST_LINK, DEVICE_LINK)


def advise(
    step: Any,
    *args: Any,
    readers: float = 1,
    writes_every: float | None = None,
    step_seconds: float | None = None,
    **kwargs: Any,
) -> Advice:
    """Says how long a step would take with other placements and policies of its `Variables`.

        print(sc.advise(train_step, params, batch))

    If the step builds in less than 10 s, it is run with each policy, on copies of its arguments,
    for 20 s at most in all. Its callbacks run, too; `stats()` does not count these calls. For
    served variables, a server of the same engine is started for the trials.

    Other cases are predicted from the times of the links and of such a server: a step that builds
    longer, one over several processes or in a session that limits misses or bytes, and served
    variables of more than 256 MiB. The times are measured once for each machine, in some seconds,
    and stored in the cache directory.

    Args:
        step: a step.
        *args: arguments of a call, some of them `Variables`.
        readers: number of calls that read the variables during one step.
        writes_every: number of steps from one write to the next, for variables that the step does
            not carry; by default as counted so far.
        step_seconds: time of a step with the current policies; by default it is measured.
        **kwargs: other arguments of the call.

    Returns:
        An `Advice`; print it. One push a step is assumed for variables with `Write` mode "add" or
        "apply".

    Raises:
        OptionError: `step` is not a step, the call has no `Variables`, or the session has a target.

    The trade of communication for staleness: Parameter Server (Li et al., OSDI 2014), SSP (Ho et
    al., NIPS 2013). Here the cost of each policy is measured before you choose one.
    """
    from stepcache.report.policy_costs import Reads, costs_of  # It loads what serves variables.

    engine = getattr(step, "_engine", None)
    if not isinstance(engine, Engine):
        raise OptionError("advise takes a step", where="advise", got=repr(step))
    where = f"advise({engine.spec.name})"
    if getattr(current_reader(), "target", None) is not None:
        what = "advise measures the devices of this process"
        raise OptionError(what, where=where, got="a session with a target")
    use = Use(engine.spec, args, kwargs)
    if not use.variables:
        what = "the call has no Variables, whose policies could be others"
        hint = "pass sc.Variables(state) in the place of the state"
        raise OptionError(what, where=where, hint=hint)
    costs = [
        costs_of(each, Reads(number < use.carried, readers, writes_every))
        for number, each in enumerate(use.variables)
    ]
    with engine.miss_log.measuring():
        computing, now = _measured(step, engine, args, kwargs, costs, step_seconds)
    choices = []
    for each in costs:
        others = computing + sum(other.now(computing) for other in costs if other is not each)
        found = [_choice(each, *policies, others) for policies in each.policies()]
        found = [replace(choice, seconds=now) if choice.is_current else choice for choice in found]
        choices += sorted(found, key=lambda choice: choice.seconds)
    return Advice(engine.spec.name, now, tuple(choices), _told(costs, readers))


def _choice(
    costs: PolicyCosts, placement: Placement, read: Read, write: Write, others: float
) -> Choice:
    seconds, moved = costs.of(placement, read, write, others)
    late = f"up to {counted(read.max_staleness, 'step')} late" if read.max_staleness else ""
    summed = f"updates up to {counted(write.every - 1, 'step')} late" if write.every > 1 else ""
    lost = ", ".join(filter(None, (late, summed)))
    policies = placement, read, write
    now, held = policies == costs.policies_now, costs.held_bytes(placement, read)
    name = costs.variables.name
    return Choice(name, *policies, others + seconds, moved, held, lost, is_current=now)


def _measured(
    step: Any,
    engine: Engine,
    args: tuple,
    kwargs: dict[str, Any],
    costs: Sequence[PolicyCosts],
    step_seconds: float | None,
) -> tuple[float, float]:
    """The seconds of a step that reads nothing, and of one as it is now.

    If programs of the step are built quickly, policies are tried. Otherwise what reads take is
    subtracted.
    """
    from stepcache.report.trials import Trials

    if step_seconds is None:
        trials = Trials(step, args, kwargs)
        is_alone = jax.process_count() == 1  # Processes of a pod run it as often as each other.
        now = trials.seconds(Variables.copy, _RUNS, _LEAST_SECONDS if is_alone else 0.0)
        built = sum(explain(engine, args, kwargs).build_seconds or (math.inf,))
        scope = engine.scope()
        may_build = built < _QUICK_SECONDS and scope.on_miss == "compile"
        if is_alone and may_build and scope.max_step_bytes is None:
            tried = [trials.of(each, len(costs) * now) for each in costs]
            alones = [each for each in tried if each is not None]
            if len(alones) == len(costs):
                computing = statistics.fmean(alones)
                return computing, computing + sum(each.now(computing) for each in costs)
    placed = [each for each in costs if not each.is_served]
    served = sum(each.now(0.0) for each in costs if each.is_served)
    if step_seconds is not None:
        now = step_seconds - served
    alone = max(now - sum(each.now(0.0) for each in placed), _LEAST_SHARE * now)
    return alone, now + served


def _told(costs: Sequence[PolicyCosts], readers: float) -> tuple[str, ...]:
    lines = [f"{readers:g} readers a step" if readers != 1 else "one reader a step"]
    for each in costs:
        every = "each step" if each.between == 1 else f"every {each.between:.3g} steps"
        lines.append(f"{each.variables.name} is written {every}; {each.measured}")
    return tuple(lines)
