"""`Explanation`: what one call would do, and why, as a record and as a table."""

from __future__ import annotations

import io
import os
import pathlib
import secrets
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Sharding
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.text import Text

from stepcache import jaxcompat
from stepcache.calls.over_buffers import HELD
from stepcache.calls.placement import moved_bytes
from stepcache.calls.residence import Use
from stepcache.calls.signature import Call, Leaf, Parameters, Path, Unreadable, short_sharding
from stepcache.calls.step_spec import Request
from stepcache.engine import Engine
from stepcache.events import Captured, Miss
from stepcache.programs.build import Program
from stepcache.sharding import Placed, Role
from stepcache.units import counted, readable_bytes, terminal_width
from stepcache.variables.plan import Plan


@dataclass(frozen=True, slots=True)
class Argument:
    """One leaf of a call: where it is, where it goes, and why.

    Attributes:
        name: the argument it is part of.
        path: as rules read it, `state/w`.
        type: shape and dtype, `float32[8,128]`.
        size_bytes: of the whole array.
        source: where it is now: "host", "cpu:0" or a spec such as `P('data')`.
        target: where the program has it.
        why: the role of its argument, and the rule or the default that says so.
        moved_bytes: bytes that this call moves to devices for it, over all of them; for a leaf of
            `Variables` the plan of the transfers says that.
        variables: the name of the `Variables` that hold it; empty where the call passes it itself.
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
    """What a call of a step would do. Print it, or read its fields.

    Attributes:
        step: the step's name.
        hit: whether the call finds its program.
        miss: why it does not; None on a hit.
        mesh: axes and sizes of the session's mesh; None where nothing is placed.
        arguments: one row for each dynamic leaf.
        statics: name and value of each static argument.
        build_seconds: what the program took to trace, lower and compile; None on a miss.
        captured: arrays that became part of the program by closure; empty on a miss.
        delegated: why the call would go to `jax.jit` as it is; None where it would not.
        stored: whether a call that misses finds its program on disk, without a trace.
        variables: a line for each of the `Variables` that the call passes.
        variable_leaves: how many leaves these have together.
        plan: the transfers that it needs for them.
        rank: the index of this process among those of the mesh.
        processes: how many those are; they have to agree before a new program runs.
    """

    step: str
    hit: bool
    miss: Miss | None
    mesh: dict[str, int] | None
    arguments: tuple[Argument, ...] = ()
    statics: tuple[tuple[str, str], ...] = ()
    build_seconds: tuple[float, float, float] | None = None
    captured: tuple[Captured, ...] = ()
    delegated: str | None = None
    stored: bool = False
    variables: tuple[str, ...] = ()
    variable_leaves: int = 0
    plan: Plan = field(default_factory=Plan)
    rank: int = 0
    processes: int = 1

    @property
    def moved_bytes(self) -> int:
        """Bytes that the call moves: to devices for its arguments, and for its variables."""
        return sum(argument.moved_bytes for argument in self.arguments) + self.plan.bytes

    def __rich__(self) -> RenderableType:
        parts: list[RenderableType] = [Text(self._headline(), style="bold")]
        if self.delegated:
            return Group(*parts)
        if self.miss is not None:
            parts.append(Text(str(self.miss)))
        lines = (*self._variable_rows(), *self._rows(), *self._footer())
        return Group(*parts, *map(_Line, lines))

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=terminal_width(), color_system=None)
        console.print(self)
        lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        return "\n".join(line.rstrip() for line in lines)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Writes a page with a picture of the plan and with this text; it needs no other file.

        Args:
            path: of the file, which is replaced when the page is whole.

        Raises:
            OSError: it cannot be written there.
        """
        from stepcache.report.picture import plan_html

        target = pathlib.Path(path)
        unfinished = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
        try:
            unfinished.write_text(plan_html(self), encoding="utf-8")
            unfinished.replace(target)
        finally:
            unfinished.unlink(missing_ok=True)

    def _headline(self) -> str:
        if self.delegated:
            return f"{self.step}: goes to jax.jit as it is; {self.delegated}"
        if self.stored:
            return f"{self.step}: miss, but on disk. A call would load the program without a trace."
        if not self.hit:
            return f"{self.step}: miss. A call would trace, lower and compile a program."
        assert self.build_seconds is not None
        stages = zip(("trace", "lower", "compile"), self.build_seconds, strict=True)
        times = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in stages)
        return f"{self.step}: hit. The program is in memory; building it took {times}."

    def _variable_rows(self) -> Iterable[str]:
        yield from (f"  {line}" for line in self.variables)
        for each in self.plan.transfers:
            if each.route == "none":
                what = f"nothing moves: {each.why}"
            else:
                links = ", ".join(f"{readable_bytes(n)} {link}" for link, n in each.link_bytes)
                coded = f" in {each.wire}" if each.wire else ""
                way = f"{each.source} → {each.target} by {each.route}{coded}"
                what = f"{way} ({each.why}); {links}"
            readers = f", for {' and '.join(each.readers)}" if len(each.readers) > 1 else ""
            yield f"      {each.variable} version {each.version}{readers}: {what}"

    def _rows(self) -> Iterable[str]:
        """Two lines for each group of leaves that share an argument, a place and a reason.

        Of variables there is a line each already.
        """
        groups = list(_grouped(row for row in self.arguments if not row.variables))
        if not groups:
            return
        cells = [
            (
                _abbreviated(rows[0].path),
                f"× {len(rows)}" if len(rows) > 1 else "",
                rows[0].type if len({row.type for row in rows}) == 1 else "of several types",
                readable_bytes(sum(row.size_bytes for row in rows)),
            )
            for rows in groups
        ]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for (path, count, kind, size), rows in zip(cells, groups, strict=True):
            first, moved = rows[0], readable_bytes(sum(row.moved_bytes for row in rows))
            yield (
                f"  {path:<{widths[0]}}  {count:<{widths[1]}}  {kind:<{widths[2]}}"
                f"  {size:>{widths[3]}}"
            )
            yield f"      {first.source} → {first.target}, {first.why}; moves {moved}"

    def _footer(self) -> Iterable[str]:
        where = f"mesh {self.mesh}" if self.mesh else "no mesh: as jax.jit places them"
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
        for captured in self.captured:
            yield (
                f"captured by closure: {captured.name}, {captured.type}, "
                f"{readable_bytes(captured.size_bytes)} inside the program"
            )


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of text, indented by more where it wraps."""

    text: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[Text]:
        indent = " " * (len(self.text) - len(self.text.lstrip()) + 4)
        wrapped = textwrap.wrap(
            self.text, options.max_width, subsequent_indent=indent, break_on_hyphens=False
        )
        yield from map(Text, wrapped)


def explain(engine: Engine, args: tuple, kwargs: dict[str, Any]) -> Explanation:
    """Explains a call; runs and traces nothing, but to let JAX raise on an invalid argument."""
    name = engine.recipe.name
    if jaxcompat.is_tracing():
        return Explanation(name, False, None, None, delegated="inside another transformation")
    use = engine.use(args, kwargs)
    if use is not None:
        engine, args, kwargs = engine.resident(args, kwargs)
    scope = engine.scope()
    try:
        request = engine.request(scope, args, kwargs)
    except Unreadable:
        engine.recipe.jitted.trace(*args, **kwargs)
        why = "an argument is of a kind that no cached program can hold"
        return Explanation(name, False, None, None, delegated=why)
    program = scope.cache.peek(request.key)
    miss, stored = (None, False) if program else engine.foresee(scope, request)
    mesh = dict(scope.mesh.shape) if scope.mesh is not None else None
    return Explanation(
        name,
        program is not None,
        miss,
        mesh,
        (
            *(_leaves_of(use, engine.recipe.parameters, request.told) if use else ()),
            *(
                each
                for each in _arguments(engine.recipe.parameters, request)
                if not (use and use.holds(each.path))
            ),
        ),
        tuple((static.name, repr(static.value)) for static in request.call.signature.statics),
        _seconds(program),
        program.captured if program else (),
        stored=stored,
        variables=tuple(use.told()) if use else (),
        variable_leaves=sum(len(each._layout.slots) for each in use.variables) if use else 0,
        plan=use.plan() if use else Plan(),
        rank=jax.process_index() if len(request.ranks) > 1 else 0,
        processes=max(1, len(request.ranks)),
    )


def _seconds(program: Program | None) -> tuple[float, float, float] | None:
    if program is None:
        return None
    return tuple(program.seconds.get(stage, 0.0) for stage in ("trace", "lower", "compile"))  # type: ignore[return-value]


def _leaves_of(use: Use, parameters: Parameters, told: Call) -> Iterable[Argument]:
    """A row for each leaf of variables; of those that are passed twice, where they stand first."""
    places = [(f"{place}/", each.name) for place, each in use.places()]
    for path, leaf in zip(told.paths, told.signature.leaves, strict=True):
        if path.holder != HELD:
            continue
        name = next(name for place, name in places if f"{path.slashed}/".startswith(place))
        role = parameters.role_of(path.argument)
        target = short_sharding(leaf.sharding).removeprefix("@ ")
        yield Argument(
            *(path.argument, path.slashed, str(leaf), leaf.size_bytes),
            *("variables", target, role or "read", 0, name),
        )


def _arguments(parameters: Parameters, request: Request) -> Iterable[Argument]:
    call = request.call
    rows = zip(
        call.paths,
        call.leaves,
        call.signature.leaves,
        request.leaves,
        request.placed,
        request.asked,
        strict=True,
    )
    for path, *row in rows:
        yield _argument(path, parameters.role_of(path.argument), *row)


def _argument(
    path: Path,
    role: Role,
    value: Any,
    given: Leaf,
    leaf: Leaf,
    placed: Placed | None,
    asked: Sharding | None,
) -> Argument:
    if isinstance(value, jax.Array) and given.sharding is None:
        device = next(iter(value.devices()))
        source = f"{device.platform}:{device.id}"
    elif given.sharding is None:
        source = "abstract" if isinstance(value, jax.ShapeDtypeStruct) else "host"
    else:
        source = short_sharding(given.sharding).removeprefix("@ ")
    if placed is not None:
        target, why = short_sharding(placed.sharding).removeprefix("@ "), placed.why
    elif asked is not None and leaf.sharding == given.sharding:
        target, why = short_sharding(asked).removeprefix("@ "), "the step's in_shardings"
    elif given.sharding is not None:
        target, why = "stays", "already placed"
    else:
        target, why = "as jax.jit", "not placed by a session"
    if role and placed is None:
        why = f"{role}, {why}"
    moved = moved_bytes(value, given, placed, asked)
    return Argument(
        path.argument, path.slashed, str(leaf), given.size_bytes, source, target, why, moved
    )


def _grouped(arguments: Iterable[Argument]) -> Iterable[list[Argument]]:
    groups: dict[tuple, list[Argument]] = {}
    for row in arguments:
        groups.setdefault((row.name, row.source, row.target, row.why), []).append(row)
    return groups.values()


def _abbreviated(path: str, limit: int = 36) -> str:
    """A path that is cut between two keys: the argument that it begins with, and its end."""
    argument, *keys = path.split("/")
    if len(path) <= limit or len(keys) < 2:
        return path
    keys = keys[1:]
    while len(keys) > 1 and len("/".join((argument, "…", *keys))) > limit:
        keys = keys[1:]
    return "/".join((argument, "…", *keys))
