"""`advise`: what a step takes and moves with other placements and policies, as tried here."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax

from stepcache.engine import Engine
from stepcache.errors import OptionError
from stepcache.events import Moved, recorder
from stepcache.resident.call import ResidentCall
from stepcache.sharding import current_reader
from stepcache.units import counted, readable_bytes, readable_seconds, shown_as_printed
from stepcache.variables.packing import bytes_per_device
from stepcache.variables.plan import DEVICE_LINK, HOST_LINK, SERVER_LINK
from stepcache.variables.policy import OnHost, Placement, Read, Write, on_host
from stepcache.variables.transfer import Meter
from stepcache.variables.variables import Variables

_CLOSE = 1.02  # Times that differ by less are not told apart.
_SETTLING = 2  # Calls that compile, and read for the first time.
_ROUNDS, _MOST_CALLS, _SECONDS = 3, 48, 20.0
_SENT_BYTES = 1 << 28  # Larger values are not sent to a server for a trial.
_LATE, _EVERY = (4, 16), (4, 16)
_FEWEST_READS = 4  # After which past reads and writes say how often there are some.


@dataclass(frozen=True)
class Choice:
    """A placement and policies for some variables, and what they cost.

    Attributes:
        variables: their name.
        placement, read, write: as for `Variables`.
        seconds: time of a step, with the transfers and the push that it waits for.
        link_bytes: bytes that crossed each link in a step, on average.
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
    """What a step takes under several policies. Print it, or read its fields.

    Attributes:
        step: name of the step.
        seconds: time of a step with the current policies.
        choices: for each of the variables, the fastest first.
        between: steps between two writes in the trials, by the name of the variables.
    """

    step: str
    seconds: float
    choices: tuple[Choice, ...] = ()
    between: tuple[tuple[str, float], ...] = ()

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
        for name, between in self.between:
            every = "each step" if between == 1 else f"every {between:g} steps"
            lines.append(f"  {name} is written {every}")
        return "\n".join(lines)

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


class _Subject(NamedTuple):
    """Variables that are tried, under some policies."""

    variables: Variables
    # Writes them as another session or process does; None where nobody writes.
    write: Callable[[], None] | None = None
    # Pushes an update, as is done after each call; None where there is none.
    push: Callable[[], None] | None = None


def advise(step: Any, *args: Any, writes_every: float | None = None, **kwargs: Any) -> Advice:
    """Tries other placements and policies of a step's `Variables`: what it takes, and moves.

        print(sc.advise(train_step, params, batch))

    The step is run with each policy, in turns, on copies of its arguments, for about 20 s in all;
    longer if a call takes longer than a second. Its callbacks run, too; `stats()` does not count
    these calls. For served variables, a server of the same engine is started for the trials.

    Args:
        step: a step.
        *args: arguments of a call, some of them `Variables`.
        writes_every: number of steps from one write to the next, for variables that the step does
            not carry; by default as counted so far.
        **kwargs: other arguments of the call.

    Returns:
        An `Advice`; print it. One push a step is made for served variables with `Write` mode "add"
        or "apply".

    Raises:
        OptionError: `step` is not a step, the call has no `Variables`, the session has a target or
            several processes, or served variables are larger than 256 MiB.

    The trade of communication for staleness: Parameter Server (Li et al., OSDI 2014), SSP (Ho et
    al., NIPS 2013).
    """
    engine = getattr(step, "_engine", None)
    if not isinstance(engine, Engine):
        raise OptionError("advise takes a step", where="advise", got=repr(step))
    where = f"advise({engine.spec.name})"
    if getattr(current_reader(), "target", None) is not None or jax.process_count() > 1:
        what = "advise tries the devices of this process"
        raise OptionError(what, where=where, got="a session with a target, or over several")
    call = ResidentCall(engine.spec, args, kwargs)
    if not call.variables:
        what = "the call has no Variables, whose policies could be others"
        hint = "pass sc.Variables(state) in the place of the state"
        raise OptionError(what, where=where, hint=hint)
    choices, betweens = [], []
    for number, each in enumerate(call.variables):
        carried = number < call.carried
        between = 1.0 if carried else writes_every or _seen_between(each)
        betweens.append((each.name, between))
        with contextlib.ExitStack() as stack:
            stack.enter_context(engine.miss_log.measuring())
            make = stack.enter_context(_subjects(each, carried, where))
            policies = list(_policies(each, carried))
            calls = [
                _Calls(step, args, kwargs, each, make(*policy), between, policy[1].max_staleness)
                for policy in policies
            ]
            for one in calls:
                one.run(_SETTLING)
            once = max(sum(one.seconds_of_last for one in calls), 1e-6)
            count = max(2, min(_MOST_CALLS, int(_SECONDS / len(call.variables) / _ROUNDS / once)))
            for one in calls:
                one.clear()
            for _, one in itertools.product(range(_ROUNDS), calls):  # The machine may be noisy.
                one.run(count)
        found = [_choice(each, policy, one) for policy, one in zip(policies, calls, strict=True)]
        choices += sorted(found, key=lambda choice: choice.seconds)
    now = statistics.fmean(each.seconds for each in choices if each.is_current)
    return Advice(engine.spec.name, now, tuple(choices), tuple(betweens))


def _seen_between(variables: Variables) -> float:
    held = variables._held()
    is_known = held.reads >= _FEWEST_READS and held.version > 0
    return max(1.0, round(held.reads / held.version)) if is_known else 1.0


def _policies(variables: Variables, carried: bool) -> Iterator[tuple[Placement, Read, Write]]:
    """Yields those of now, and others that could take their place."""
    placement, read, write = variables.placement, variables.read, variables.write
    reads = [Read(), Read(cache="device")]
    if variables._master.applies_updates:
        if not carried:
            reads += [Read(cache="device", max_staleness=late) for late in _LATE]
        found = [(placement, each, write) for each in (read, *reads)]
        if _pushes(variables, carried):
            found += [(placement, read, replace(write, every=each)) for each in _EVERY]
    else:
        there = on_host(placement)
        found = [(placement, read, write), (there.on_device, Read(), write)]
        found += [(there, each, write) for each in reads]
    yield from dict.fromkeys(found)


def _pushes(variables: Variables, carried: bool) -> bool:
    return variables.write.mode != "assign" and not carried


def _moved(variables: Variables, placement: Placement, read: Read) -> Variables:
    """A copy of variables in this process, under another placement and policy."""
    placing = variables._placing
    about: dict[str, Any] = {"name": placing.prefix or None, "pack": placing.pack}
    return Variables(variables.value, placement=placement, read=read, **about)


@contextlib.contextmanager
def _subjects(
    variables: Variables, carried: bool, where: str
) -> Iterator[Callable[[Placement, Read, Write], _Subject]]:
    """Context manager of a trial, with what makes its subjects."""
    tree = variables.value
    if not variables._master.applies_updates:
        leaves = jax.tree_util.tree_leaves(tree)

        def make(placement: Placement, read: Read, write: Write) -> _Subject:
            made = _moved(variables, placement, read)
            if carried or not isinstance(placement, OnHost):
                return _Subject(made)
            return _Subject(made, lambda: made._master.assign(leaves, None, Meter()))

        yield make
        return
    from stepcache.serving.connecting import connect
    from stepcache.serving.trial_server import own_server

    if variables.nbytes > _SENT_BYTES:
        what, got = "the value is too large to be sent to a server for trials", variables.nbytes
        raise OptionError(what, where=where, expected="256 MiB at most", got=readable_bytes(got))
    update = jax.tree_util.tree_map(jax.numpy.zeros_like, tree)
    master: Any = variables._master
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(own_server(master._source.address))
        ours, others = (stack.enter_context(connect(address)) for _ in range(2))
        numbers = itertools.count()

        def make_served(placement: Placement, read: Read, write: Write) -> _Subject:
            about: dict[str, Any] = {"placement": placement, "read": read, "write": write}
            name = f"trial{next(numbers)}"
            made = ours.variables(name, tree, **about)
            if _pushes(variables, carried):
                return _Subject(made, push=lambda: made.push(update))
            written = others.variables(name, tree, write=write)
            return _Subject(made, None if carried else lambda: written.assign(tree))

        yield make_served


class _Calls:
    """Calls of a step under one policy of some variables; the others are on the devices."""

    def __init__(
        self,
        step: Any,
        args: tuple,
        kwargs: dict[str, Any],
        variables: Variables,
        subject: _Subject,
        between: float,
        late: int,
    ):
        def stand_in(leaf: Any) -> Any:
            if leaf is variables:
                return subject.variables
            is_other = isinstance(leaf, Variables)
            return _moved(leaf, on_host(leaf.placement).on_device, Read()) if is_other else leaf

        self._given = jax.tree.map(stand_in, (args, kwargs))
        self._step, self._subject = step, subject
        # A whole number of periods of writes, and of steps that a copy serves.
        self._period = max(1, round(between))
        self._round, self._number = self._period * (late // self._period + 1), 0
        self.clear()

    def clear(self) -> None:
        """Forgets what calls took."""
        self.seconds: list[float] = []  # Of a call, the mean of each round.
        self.moved: Counter[str] = Counter()
        self.seconds_of_last, self.count, self._counts = 0.0, 0, True

    def run(self, calls: int) -> None:
        """Makes some calls, and waits for what each computes."""
        seconds, subject = [], self._subject
        calls -= calls % self._round if calls > self._round else 0
        unsubscribe = recorder.subscribe(self._note)
        try:
            for _ in range(calls):
                if subject.write is not None and self._number % self._period == 0:
                    self._counts = False
                    subject.write()
                self._number, self._counts = self._number + 1, True
                # Arrays may be donated; variables stay, and with them the copies that they keep.
                args, kwargs = jax.tree.map(
                    lambda x: x.copy() if isinstance(x, jax.Array) else x, self._given
                )
                jax.block_until_ready((args, kwargs))
                started = time.perf_counter()
                for each in jax.tree.leaves(self._step(*args, **kwargs)):
                    if isinstance(each, jax.Array | Variables):
                        each.block_until_ready()
                if subject.push is not None:
                    subject.push()
                seconds.append(time.perf_counter() - started)
        finally:
            unsubscribe()
        self.seconds.append(statistics.fmean(seconds))
        self.seconds_of_last, self.count = seconds[-1], self.count + calls

    def _note(self, event: Any) -> None:
        if isinstance(event, Moved) and self._counts:
            self.moved.update(dict(event.link_bytes))


def _choice(variables: Variables, policy: tuple[Placement, Read, Write], calls: _Calls) -> Choice:
    placement, read, write = policy
    late = f"up to {counted(read.max_staleness, 'step')} late" if read.max_staleness else ""
    summed = f"updates up to {counted(write.every - 1, 'step')} late" if write.every > 1 else ""
    held_bytes = bytes_per_device(calls._subject.variables._master.on_devices())
    is_elsewhere = isinstance(placement, OnHost) or variables._master.applies_updates
    is_kept = read.cache is not None or not is_elsewhere
    return Choice(
        variables.name,
        placement,
        read,
        write,
        statistics.median(calls.seconds),
        {link: size / calls.count for link, size in calls.moved.items() if size},
        max(held_bytes.values(), default=0) if is_kept else 0,
        ", ".join(filter(None, (late, summed))),
        is_current=policy == (variables.placement, variables.read, variables.write),
    )
