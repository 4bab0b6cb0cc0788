"""Trusted starts: a released step runs its export, and is not traced.

A KEY vouches that a step with the same signature, mesh and settings is the same program. The first
start under it traces the step and exports it with `jax.export`, over its flat leaves. The program
is what calls that export, in this start as in all later ones: so each lowers to the same module,
which finds its executable as any other does.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from jax import export, lax
from jax.tree_util import tree_leaves, tree_structure, tree_unflatten, treedef_children

from stepcache import jaxcompat
from stepcache.calls.key import Key
from stepcache.calls.signature import Call
from stepcache.calls.step_spec import Request, StepSpec
from stepcache.errors import StaleProgramError, first_line
from stepcache.link import plain
from stepcache.programs.build import trace
from stepcache.programs.earlier_runs import ADDRESS
from stepcache.programs.module_difference import difference
from stepcache.programs.prediction import Described, digest_of
from stepcache.programs.store import ProgramStore
from stepcache.units import readable_bytes, readable_time

_CAPTURED_BYTES = 1 << 20  # Of arrays that are captured, in what is exported.


class _NotExportable(Exception):
    """Why a step cannot be exported, as a text of one line."""


class Export(NamedTuple):
    """A step, exported over its flat leaves."""

    program: str  # Digest of the program that calls it.
    time: float  # When the step was traced, in seconds since the epoch.
    outputs: Any  # The form of its outputs, as `_form` gives it.
    weak: list[int]  # The numbers of the outputs that are weakly typed.
    data: bytes  # Of `jax.export`.
    kept: list[int]  # The numbers of the leaves that it takes.
    is_committed: bool  # Whether its outputs are; those of a call of an export always are.

    def function(self, spec: StepSpec, call: Call) -> Callable:
        """What is traced in the place of the step's function, for calls such as this one."""
        exported, trees = export.deserialize(bytearray(self.data)), _trees_of(call)

        @functools.wraps(spec.fun)
        def run(*args: Any, **kwargs: Any) -> Any:
            dynamic = tuple(args[n] for n in call.positions), {n: kwargs[n] for n in call.kwargs}
            leaves = tree_leaves(dynamic)
            # A weakly typed carry is traced twice, and what it has first is thrown away.
            given = zip([leaves[n] for n in self.kept], exported.in_avals, strict=True)
            leaves = [x if x.dtype == aval.dtype else x.astype(aval.dtype) for x, aval in given]
            outputs = list(exported.call(*leaves))
            for number in self.weak:
                x = outputs[number]
                weakly = {"new_dtype": x.dtype, "weak_type": True, "sharding": None}
                outputs[number] = lax.convert_element_type_p.bind(x, **weakly)
            return _rebuilt(self.outputs, iter(outputs), trees)

        return run


class Trust:
    """The exports of one KEY, in one store.

    Args:
        key: vouches for the steps.
        prove_every: each so many starts in this directory, steps are traced and compared.
        store: has the exports, beside the programs.
    """

    def __init__(self, key: str, prove_every: int, store: ProgramStore):
        self.key, self.store, self._prove_every = key, store, prove_every
        # By the name of an export: the call that it is for, and the digest of its program.
        self.programs: dict[str, tuple[Key, str]] = {}
        self._distrusted: dict[str, str] = {}  # Why.
        self.is_due = self._count_start() % prove_every == 0  # Whether this start traces.

    def _count_start(self) -> int:
        """The number of this start in the directory."""
        starts = self.store.disk.root / "starts"
        try:
            starts.mkdir(mode=0o700, exist_ok=True)
            name = hashlib.sha256(self.key.encode("utf-8", "surrogatepass")).hexdigest()
            with (starts / name).open("ab", buffering=0) as file:  # Others may append as well.
                file.write(b".")
                return os.fstat(file.fileno()).st_size
        except OSError:  # A directory that cannot be written counts none.
            return random.randrange(self._prove_every)

    def release(self, described: Described, request: Request, place: str) -> Release:
        """What the KEY says of a call that is not in memory; `place` is that of the function."""
        signature = request.key.signature
        facts = described.call | {
            "KEY": self.key,
            "label": f"{described.label} at {place}",
            "environment": digest_of(described.environment),
            "tree": ADDRESS.sub("", str(signature.tree)),
            "statics": ADDRESS.sub("", repr(signature.statics)),
        }
        name = hashlib.sha256(digest_of(facts).encode()).hexdigest()
        first, _ = self.programs.setdefault(name, (request.key, ""))
        return Release(self, name, described.label, is_first=first == request.key)

    def read(self, name: str) -> Export | None:
        """An export by its name, from the disk or the shared cache; None if there is none."""
        disk = self.store.disk
        if not self._is_there(name) or (entry := disk.read("export", name)) is None:
            return None
        try:
            found = Export(*plain.unpack(entry.payload))
            if not plain.fits(found, Export):
                raise ValueError("a field has another type")
            return found
        except (TypeError, ValueError) as error:
            disk.discard("export", name, f"it is malformed: {error}")
            return None

    def why_distrusted(self, name: str) -> str:
        """Why a KEY vouches no longer: what was found here, or by a machine with the same cache."""
        if name not in self._distrusted and self._is_there(marker := _marker_of(name)):
            entry = self.store.disk.peek("export", marker)
            about = entry.header if entry is not None else None
            self._distrusted[name] = str((about or {}).get("distrusted", "its entry is damaged"))
        return self._distrusted.get(name, "")

    def distrust(self, name: str, label: str, why: str) -> None:
        """Has a step traced in each start from now on, until the entry that says so is removed."""
        self._distrusted[name] = why
        self.publish(_marker_of(name), {"label": label, "distrusted": why, "export": name})

    def publish(self, name: str, about: dict[str, str], payload: bytes = b"") -> None:
        """Stores an entry, here and in the shared cache."""
        self.store.disk.publish("export", name, about, payload)
        if self.store.remote is not None:
            self.store.remote.upload("export", name, about, payload)

    def _is_there(self, name: str) -> bool:
        disk, remote = self.store.disk, self.store.remote
        return disk.holds("export", name) or bool(remote and remote.fetch(name, "export"))


def _marker_of(name: str) -> str:
    return hashlib.sha256(f"{name} is distrusted".encode()).hexdigest()


class Release:
    """One call that is not in memory, of a step for which a KEY may vouch.

    Attributes:
        since: when its step was traced, in seconds since the epoch, if its export runs; else None.
        is_committed: as of its `Export`.
        why_traced: why it will not in later starts either; else empty.
    """

    def __init__(self, trust: Trust, name: str, label: str, *, is_first: bool):
        self._trust, self._name, self._label, self._is_first = trust, name, label, is_first
        why = trust.why_distrusted(name)
        self.why_traced = f"the KEY {trust.key!r} is distrusted for this step: {why}" if why else ""
        self._known = None if why else trust.read(name)
        self._made: Export | None = None
        # Another step of this process may look the same and be exported: then both are traced.
        self._is_proof = trust.is_due or not is_first
        self.since = None if self._known is None or self._is_proof else self._known.time
        self.is_committed = True

    @property
    def in_words(self) -> str:
        """Since when the step is trusted, to follow other words; empty if it is traced."""
        return f" (trusted since {readable_time(self.since)})" if self.since else ""

    def trace(self, spec: StepSpec, request: Request) -> jaxcompat.Staged:
        """Traces a call of the step's export; the step itself, if there is none or it is proved."""
        known = self._known
        if known is not None and not self._is_proof:
            self.is_committed = known.is_committed
            return trace(spec.over(known.function(spec, request.call)), request)
        staged = trace(spec, request)
        if self.why_traced or not staged.can_be_held():
            return staged
        try:
            made = _exported(spec, request, staged)
            calling = trace(spec.over(made.function(spec, request.call)), request)
            calling.lower()
        except Exception as error:  # Of many kinds, by what it is that JAX has no form for.
            why = str(error) if isinstance(error, _NotExportable) else first_line(error)
            self.why_traced = f"the KEY cannot vouch for it: {why}"
            return staged
        self._made, self.is_committed = made, made.is_committed
        return calling

    def check(self, digest: str, module: Callable[[], str], step: str) -> None:
        """Compares the program of a step that was traced with that of the KEY's first start.

        Args:
            digest: of the program.
            module: gives its module as text.
            step: the name of the step.

        Raises:
            StaleProgramError: it is another one.
        """
        trust, known, store = self._trust, self._known, self._trust.store
        key, of_first = trust.programs[self._name]
        if self._is_first and not of_first:
            trust.programs[self._name] = key, digest
        expected = known.program if known is not None else of_first
        if not (known or self._made):
            return  # It cannot be exported.
        if self.since or expected in ("", digest) or trust.why_distrusted(self._name):
            return
        self._made = None  # It is not to be stored.
        if known is None or not self._is_first:
            what = "another step of the process looks the same, and is not"
            self.why_traced = f"the KEY cannot vouch for it: {what}"
            trust.distrust(self._name, self._label, what)
            return
        before = store.module_of(expected)
        found = difference(before, module()) if before else None
        where = str(found) if found is not None else "what its text does not show"
        trust.distrust(self._name, self._label, where)
        raise StaleProgramError(
            f"{step} is not the step that trust={trust.key!r} vouches for",
            where=where,
            expected=f"the program that was traced on {readable_time(known.time)}",
            got="another one; nothing has run",
            hint="give trust= another KEY with each change of code, configuration or captured "
            "values. Under this one the step is traced in each start from now on",
        )

    def keep(self, digest: str) -> None:
        """Stores what was exported, once its program is; in the background."""
        if self._made is not None and self._known is None and digest:
            made = self._made._replace(program=digest)
            self._trust.publish(self._name, {"label": self._label}, plain.pack(list(made)))


def _trees_of(call: Call) -> dict[str, Any]:
    """The trees of the arguments of a call, by name."""
    return {name: tree_structure(argument) for name, argument in call.arguments.items()}


def _exported(spec: StepSpec, request: Request, staged: jaxcompat.Staged) -> Export:
    """Exports what a step was traced to. Raises `_NotExportable`, or what JAX raises."""
    jaxpr = staged.jaxpr
    if jaxpr.effects:
        raise _NotExportable(f"it has side effects ({', '.join(map(str, jaxpr.effects))})")
    captured = sum(each.nbytes for each in jaxcompat.captured_arrays(jaxpr))
    if captured > _CAPTURED_BYTES:
        raise _NotExportable(f"it captures {readable_bytes(captured)} of arrays by closure")
    outputs = _form(staged.out_tree, _trees_of(request.call))
    weak = [number for number, aval in enumerate(staged.out_avals) if aval.weak_type]
    staged.lower()
    return Export("", time.time(), outputs, weak, *staged.exported(spec.name))


def _form(tree: Any, arguments: Mapping[str, Any]) -> Any:
    """The form of a tree as plain data. Raises `_NotExportable` where it has none.

    Subtrees that are those of an argument, as the carry is, are named by it: they may have classes
    of any kind.
    """
    if tree.num_nodes == tree.num_leaves == 1:
        return "leaf"
    for argument, of_argument in arguments.items():
        if tree == of_argument:
            return ["argument", argument]
    kind, about = tree.node_data() or (type(None), None)
    children = [_form(child, arguments) for child in treedef_children(tree)]
    name = kind.__module__, kind.__qualname__
    if kind in (tuple, list, type(None)):
        return [kind.__name__, children]
    if kind is dict and all(type(key) in (str, int) for key in about or ()):
        return ["dict", children, list(about or ())]
    if getattr(kind, "is_exportable", False):
        return ["class", children, *name, about]
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        with contextlib.suppress(Exception):
            if _named(*name) is kind:
                return ["namedtuple", children, *name]
    what = f"it returns {'.'.join(name)}, which is no plain container, and no argument's tree"
    raise _NotExportable(what)


def _named(module: str, name: str) -> Any:
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))


def _rebuilt(form: Any, outputs: Iterator[Any], arguments: Mapping[str, Any]) -> Any:
    """Outputs in the form that `_form` has given."""
    if form == "leaf":
        return next(outputs)
    kind, children, *about = form
    if kind == "argument":
        tree = arguments[children]
        return tree_unflatten(tree, [next(outputs) for _ in range(tree.num_leaves)])
    values = [_rebuilt(child, outputs, arguments) for child in children]
    match kind:
        case "NoneType":
            return None
        case "dict":
            return dict(zip(about[0], values, strict=True))
        case "namedtuple":
            return _named(*about)(*values)
        case "class":
            return _named(*about[:2])(about[2], values)
    return tuple(values) if kind == "tuple" else values
