"""`Explanation`: the predicted result of one call of a step, as a record and as text."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Sharding

from stepcache import jaxcompat
from stepcache.calls.placement import moved_bytes
from stepcache.calls.signature import Call, Parameters, Unreadable, short_sharding
from stepcache.calls.step_spec import Request
from stepcache.engine import Engine
from stepcache.events import Captured, Miss
from stepcache.resident.call import ResidentCall
from stepcache.resident.form import HELD
from stepcache.units import counted, readable_bytes, readable_time, shown_as_printed, terminal_width
from stepcache.variables.plan import Plan

if TYPE_CHECKING:  # Rich calls `__rich_console__`, and is not imported before.
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

_STAGES = ("trace", "lower", "compile")


@dataclass(frozen=True, slots=True)
class Argument:
    """One leaf of a call.

    Attributes:
        name: the argument that contains it.
        path: its path as rules match it, such as `state/w`.
        type: dtype and shape, such as `float32[8,128]`.
        size_bytes: size of the whole array.
        source: its place now: "host", "cpu:0" or a spec such as `P('data')`.
        target: the place that the program expects.
        why: the role of its argument, and the rule or default that places it.
        moved_bytes: bytes that this call moves to all devices for this leaf; 0 for a leaf of
            `Variables`, whose transfers are in `Explanation.plan`.
        variables: name of the `Variables` that hold it; empty for a leaf of the call itself.
    """

    name: str
    path: str
    type: str
    size_bytes: int
    source: str
    target: str
    why: str
    moved_bytes: int
    variables: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a call of a step would do: hit or miss, placements, transfers. Print it, or read fields.

    Attributes:
        step: name of the step.
        hit: whether the program is in memory.
        miss: the reason of a miss; None on a hit.
        mesh: axes and sizes of the session's mesh; None without a mesh.
        arguments: one row for each dynamic leaf.
        statics: name and value of each static argument.
        build_seconds: seconds to trace, lower and compile the program; None on a miss.
        captured: arrays that the step captured by closure; empty on a miss.
        delegated: the reason why the call would go to `jax.jit`; None if it would not.
        predicted: whether the last runs used a program for such a call that is on disk. A miss then
            loads it, if its trace gives the same module.
        trusted_since: when the step was traced, in seconds since the epoch, if a KEY vouches for
            it, so that a miss runs its export; else None.
        variables: a line for each of the `Variables` of the call.
        variable_leaves: number of their leaves.
        plan: the transfers that they need.
        rank: index of this process among those of the mesh.
        processes: number of processes of the mesh, which agree on each new program.
    """

    step: str
    hit: bool
    miss: Miss | None
    mesh: dict[str, int] | None
    arguments: tuple[Argument, ...] = ()
    statics: tuple[tuple[str, str], ...] = ()
    build_seconds: tuple[float, ...] | None = None
    captured: tuple[Captured, ...] = ()
    delegated: str | None = None
    predicted: bool = False
    trusted_since: float | None = None
    variables: tuple[str, ...] = ()
    variable_leaves: int = 0
    plan: Plan = field(default_factory=Plan)
    rank: int = 0
    processes: int = 1

    @property
    def moved_bytes(self) -> int:
        """Bytes that the call moves for its arguments and its variables."""
        return sum(argument.moved_bytes for argument in self.arguments) + self.plan.bytes

    def __str__(self) -> str:
        return "\n".join(self._lines(terminal_width()))

    _repr_pretty_ = shown_as_printed

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[Text]:
        from rich.text import Text

        for number, line in enumerate(self._lines(options.max_width)):
            yield Text(line, style="" if number else "bold")

    def _lines(self, width: int) -> list[str]:
        lines = [self._headline()]
        if not self.delegated:
            lines += str(self.miss).splitlines() if self.miss is not None else []
            lines += [*self._variable_rows(), *self._rows(), *self._footer()]
        return [_wrapped(line, width) for line in lines]

    def _headline(self) -> str:
        if self.delegated:
            return f"{self.step}: goes to jax.jit: {self.delegated}"
        if self.trusted_since is not None:
            since = readable_time(self.trusted_since)
            return f"{self.step}: miss, but trusted since {since}. A call would run its export."
        if self.predicted:
            then = "find its program on disk if the module is the same"
            return f"{self.step}: miss, but predicted. A call would trace and lower it, and {then}."
        if not self.hit:
            return f"{self.step}: miss. A call would trace, lower and compile a program."
        assert self.build_seconds is not None
        stages = zip(_STAGES, self.build_seconds, strict=True)
        times = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in stages)
        return f"{self.step}: hit. The program is in memory; building it took {times}."

    def _variable_rows(self) -> Iterable[str]:
        yield from (f"  {line}" for line in self.variables)
        for each in self.plan.transfers:
            if each.route == "none":
                what = f"nothing moves: {each.why}"
            else:
                links = ", ".join(f"{readable_bytes(n)} {link}" for link, n in each.link_bytes)
                way = f"{each.source} → {each.target} by {each.route}"
                what = f"{way} ({each.why}); {links}"
            readers = f", for {' and '.join(each.readers)}" if len(each.readers) > 1 else ""
            yield f"      {each.variable} version {each.version}{readers}: {what}"

    def _rows(self) -> Iterable[str]:
        """Yields two lines for each group of leaves of one argument, source, target and reason."""
        groups: dict[tuple, list[Argument]] = {}
        for row in self.arguments:
            if not row.variables:
                groups.setdefault((row.name, row.source, row.target, row.why), []).append(row)
        cells = [
            (
                _abbreviated(rows[0].path),
                f"× {len(rows)}" if len(rows) > 1 else "",
                rows[0].type if len({row.type for row in rows}) == 1 else "of several types",
                readable_bytes(sum(row.size_bytes for row in rows)),
            )
            for rows in groups.values()
        ]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for texts, ((_, *place, why), rows) in zip(cells, groups.items(), strict=True):
            padded = "  ".join(map(str.ljust, texts[:3], widths))
            yield f"  {padded}  {texts[3]:>{widths[3]}}"
            moved = readable_bytes(sum(row.moved_bytes for row in rows))
            yield f"      {' → '.join(place)}, {why}; moves {moved}"

    def _footer(self) -> Iterable[str]:
        where = f"mesh {self.mesh}" if self.mesh else "no mesh: placed as by jax.jit"
        passed = sum(not row.variables for row in self.arguments)
        leaves = counted(passed + self.variable_leaves, "leaf")
        if self.variable_leaves:
            leaves += f", {self.variable_leaves} of variables"
        yield f"{leaves}; {where}; {readable_bytes(self.moved_bytes)} moved."
        if self.processes > 1:
            then = ", which agree on a new program before it runs" if self.miss else ""
            yield f"rank {self.rank} of {self.processes} processes{then}."
        if self.statics:
            yield "static: " + ", ".join(f"{name}={value}" for name, value in self.statics)
        for each in self.captured:
            size = f"{readable_bytes(each.size_bytes)} inside the program"
            yield f"captured by closure: {each.name}, {each.type}, {size}"


_UNIT = re.compile(r"(\d) ([kMGT]?B|s)\b")


def _wrapped(line: str, width: int) -> str:
    """Breaks a line at a width, not between a number and its unit, and indents what follows."""
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    joined = _UNIT.sub("\\1\xa0\\2", line)
    filled = textwrap.fill(joined, width, subsequent_indent=indent, break_on_hyphens=False)
    return filled.rstrip().replace("\xa0", " ")


def explain(engine: Engine, args: tuple, kwargs: dict[str, Any]) -> Explanation:
    """Explains a call. Runs nothing, and traces only if JAX must raise an error for an argument."""
    name, parameters = engine.spec.name, engine.spec.parameters
    to_jax = partial(Explanation, name, False, None, None)
    if jaxcompat.is_tracing():
        return to_jax(delegated="it is inside another transformation")
    if jaxcompat.jit_is_disabled():
        return to_jax(delegated="jax.disable_jit is in effect")
    if not _may_bind(engine.spec.fun, args, kwargs):
        engine.trace(args, kwargs)  # JAX says which argument is missing, or too many.
    if engine.scope().target is not None:
        return _on_tasks(engine, args, kwargs)
    if jaxcompat.must_delegate():
        return to_jax(delegated="a setting asks for checks that only a call of jax.jit makes")
    resident = engine.resident_call(args, kwargs)
    engine, args, kwargs = engine.resident(args, kwargs)
    scope = engine.scope()
    try:
        request = engine.request(scope, args, kwargs)
    except Unreadable:
        engine.spec.jitted.trace(*args, **kwargs)
        return to_jax(delegated="cached programs do not support the type of an argument")
    if request.key in engine._not_holdable:
        return to_jax(delegated="the function captures what no cached program can hold")
    program = scope.cache.peek(request.key)
    foreseen = (None, False, None) if program else engine.foresee(scope, request)
    miss, predicted, since = foreseen
    arguments = [*_arguments(parameters, request)]
    if resident:
        buffers = engine.spec.buffers(request.call)
        passed = [each for number, each in enumerate(arguments) if number not in buffers]
        arguments = [*_leaves_of(resident, parameters, request.shown), *passed]
    return Explanation(
        name,
        program is not None,
        miss,
        dict(scope.mesh.shape) if scope.mesh is not None else None,
        tuple(arguments),
        _statics(request),
        _by_stage(program.seconds if program else None),
        program.captured if program else (),
        predicted=predicted,
        trusted_since=since,
        variables=tuple(resident.in_words()) if resident else (),
        variable_leaves=sum(len(x._layout.slots) for x in resident.variables) if resident else 0,
        plan=resident.plan() if resident else Plan(),
        rank=jax.process_index() if len(request.ranks) > 1 else 0,
        processes=max(1, len(request.ranks)),
    )


def _may_bind(fun: Callable, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a function can take arguments, as far as its signature tells."""
    try:
        signature = inspect.signature(fun)
    except (TypeError, ValueError):  # It is written in C.
        return True
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _on_tasks(engine: Engine, args: tuple, kwargs: dict[str, Any]) -> Explanation:
    scope = engine.scope()
    planned = scope.target.planned(engine, scope, args, kwargs)
    request, seconds, arguments = planned.request, planned.seconds, []
    leaves = zip(request.call.paths, request.leaves, request.placed, planned.sources, strict=True)
    for path, leaf, placed, source in leaves:
        place, moved = ("client", leaf.size_bytes) if source is None else ("tasks", 0)
        why = placed.why if placed else "it is there already"
        arguments.append(_argument(path, leaf, place, _spec(leaf.sharding), why, moved))
    return Explanation(
        engine.spec.name,
        seconds is not None,
        None if seconds is not None else engine.miss_log.why(request),
        dict(scope.target.mesh.shape),
        tuple(arguments),
        _statics(request),
        _by_stage(seconds),
    )


def _statics(request: Request) -> tuple[tuple[str, str], ...]:
    statics = request.shown.signature.statics  # Those of modules are many, and have a dot.
    return tuple((each.name, repr(each.value)) for each in statics if "." not in each.name)


def _by_stage(seconds: Mapping[str, float] | None) -> tuple[float, ...] | None:
    return None if seconds is None else tuple(seconds.get(stage, 0.0) for stage in _STAGES)


def _argument(path: Any, leaf: Any, *rest: Any) -> Argument:
    """The row of a leaf; `rest` begins with its source."""
    return Argument(path.argument, path.slashed, str(leaf), leaf.size_bytes, *rest)


def _leaves_of(call: ResidentCall, parameters: Parameters, shown: Call) -> Iterable[Argument]:
    """Yields a row for each leaf of variables, once if they are passed twice."""
    places = [(f"{place}/", each.name) for _, place, each in call.paths()]
    for path, leaf in zip(shown.paths, shown.signature.leaves, strict=True):
        if not path.holder.startswith(HELD):
            continue
        name = next(name for place, name in places if f"{path.slashed}/".startswith(place))
        role = parameters.role_of(path.argument) or "read"
        yield _argument(path, leaf, "variables", _spec(leaf.sharding), role, 0, name)


def _arguments(parameters: Parameters, request: Request) -> Iterable[Argument]:
    """Yields a row for each leaf of the call itself."""
    call = request.call
    leaves = zip(
        *(call.paths, call.leaves, call.signature.leaves, request.leaves),
        *(request.placed, request.asked),
        strict=True,
    )
    for path, value, given, leaf, placed, asked in leaves:
        if given.sharding is not None:
            source = _spec(given.sharding)
        elif (at := getattr(value, "sharding", None)) is not None:
            device = next(iter(at.device_set))
            source = f"{device.platform}:{device.id}"
        else:
            source = "abstract" if isinstance(value, jax.ShapeDtypeStruct) else "host"
        if placed is not None:
            target, why = _spec(placed.sharding), placed.why
        elif asked is not None and leaf.sharding == given.sharding:
            target, why = _spec(asked), "the step's in_shardings"
        elif given.sharding is not None:
            target, why = "stays", "already placed"
        else:
            target, why = "as jax.jit", "not placed by a session"
        role = parameters.role_of(path.argument)
        if role and placed is None:
            why = f"{role}, {why}"
        moved = moved_bytes(value, given, placed, asked)
        yield _argument(path, leaf, source, target, why, moved)


def _spec(sharding: Sharding | None) -> str:
    return short_sharding(sharding).removeprefix("@ ")


def _abbreviated(path: str, limit: int = 36) -> str:
    """Shortens a path to its argument and its last keys."""
    argument, *keys = path.split("/")
    while len(path) > limit and len(keys) > 1:
        keys = keys[1:]
        path = "/".join((argument, "…", *keys))
    return path
