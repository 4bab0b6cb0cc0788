"""`Session`: a mesh or none, a program cache, and what a miss may do."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterable
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from stepcache import jaxcompat
from stepcache._changes import Undoing
from stepcache.calls.context import DEFAULT_SCOPE, Scope, current_scope, token_of
from stepcache.dispatcher import clear_all
from stepcache.errors import OptionError, SessionClosedError
from stepcache.pods.hang import AGREE_SECONDS, HANG_SECONDS
from stepcache.programs.cache import ProgramCache
from stepcache.sharding import DataAxis, Placer, Rules
from stepcache.step import NOT_GIVEN, make_step
from stepcache.units import listed

if TYPE_CHECKING:  # A single process imports nothing for the agreement of several.
    from stepcache.pods.rounds import Peers

OnMiss = Literal["compile", "warn", "error"]
# Options that other versions had, and what to do instead.
_GONE = {
    "check_replicas_every": "call session.check_replicas(tree) where the loop saves or logs",
    "on_hang": "a hang is logged; deadline= bounds the waiting for tasks",
}


class Session:
    """Options that calls of steps share: mesh, sharding rules, program cache, what a miss does.

    Enter a session with `with`, on each thread that uses it; the innermost session counts. A
    session is thread-safe, and its programs are kept when you leave it.

    Without a mesh, a session places nothing: arrays stay where `jax.jit` would have them, and a
    step finds programs that it built outside the session in the same cache.

    With a mesh, host arrays and uncommitted arrays of a call are placed before it runs. The first
    rule whose regex is found in a leaf's path (`state/layers/0/kernel`) decides. Without such a
    rule, leaves of a batch (`step(batch=...)`) are split along `data_axis` on dimension 0; scalars
    and all other leaves are replicated. A leaf that cannot be placed as asked is an error. Arrays
    that you have placed, and arguments with the step's own `in_shardings`, are left as they are.
    Inside another transformation of JAX, a step behaves like `jax.jit`, and nothing is placed.

    A rule that has matched no leaf is reported by a warning when a step with a carry is first
    built. For a rule anchored at another step's argument (`^prompt/`), the warning comes when you
    leave the session.

    Args:
        mesh: devices and axes, from `jax.make_mesh`; by default none.
        cache: the `ProgramCache`; by default one that all sessions share.
        rules: `Rules`, or pairs of a regex and a `PartitionSpec`. They need a mesh.
        data_axis: the mesh axis, or axes, over which a batch is split; None replicates it.
        on_miss: what a call does on a cache miss. "compile" builds the program; "warn" also warns
            with the reason, except for the first program of a step; "error" raises
            `RecompileError`, so that only `step.warm` builds programs.
        count_hits: count every hit in `step.stats()`. Each call then goes through Python, because
            JAX's C++ dispatcher does not report its hits.
        max_step_bytes: the most bytes that one call of a step may move between memories for its
            arguments and variables; 0 forbids all transfers. A call that would move more raises
            `TransferBudgetError` before anything moves. Each call then goes through Python. Calls
            that are passed to `jax.jit` are not limited: those inside another
            transformation, and those with a mutable reference, whose `Variables` alone are counted.
        agree_timeout: how long the processes of a pod wait, in seconds, for one that does not take
            part in the agreement on a new program.
        hang_after: seconds without progress, in a session over several processes, after which each
            process logs its stacks once, and rank 0 where all are (logger `stepcache`). None never
            does.
        target: other processes that run the steps. "local:2x4" starts two tasks of four devices
            each on this machine. "local:DIRECTORY" and "ray:NAME" connect to the tasks that
            `stepcache serve --tasks` runs on this machine, or on a Ray cluster. The mesh is then a
            `jax.sharding.AbstractMesh` of the tasks' devices; by default all are along the data
            axis. `Variables` that are made in the session are on the tasks.
        name: name of this client of the tasks. With a name, the tasks outlive the session: the next
            session of this name finds them, and the values of its `Variables`. Without a name,
            tasks that this session started end with it.
        watch: name of another client of the tasks, whose variables this session may only read.
        deadline: seconds after which waiting for the tasks raises `DeadlineError`: when you read an
            output or variables, or call a step while many runs are pending. The tasks go on,
            nothing is lost, and you can wait again. Compilations have no deadline.

    In a pod (`jax.distributed.initialize`), each process passes its part of a batch along
    `data_axis`, and all other arguments whole. Each process traces and lowers a step. Before a new
    program first runs, all compare their calls, what they have lowered, and a digest of each
    argument that is passed whole; a difference raises `AgreementError` on all of them. One process
    compiles the program, the others load it. If a process is lost, ends or leaves its session while
    others wait for it in a collective, they raise `RankLostError`. A process whose main thread is
    blocked by a device prints this error instead, and ends with exit code 1 within seconds.

    Raises:
        PlacementError: a rule or `data_axis` names an axis that the mesh does not have.
        OptionError: an unknown `on_miss`; a malformed rule; rules or a `data_axis` without a mesh;
            options of a target without a target; a `cache` that is not a `ProgramCache`; a
            `max_step_bytes` that is not a number of bytes; an option that is gone.
    """

    def __init__(
        self,
        mesh: Mesh | AbstractMesh | None = None,
        *,
        cache: ProgramCache | None = None,
        rules: Rules | Iterable[tuple[str, PartitionSpec]] | None = None,
        data_axis: DataAxis = "data",
        on_miss: OnMiss = "compile",
        count_hits: bool = False,
        max_step_bytes: int | None = None,
        agree_timeout: float = AGREE_SECONDS,
        hang_after: float | None = HANG_SECONDS,
        target: str | None = None,
        name: str | None = None,
        watch: str | None = None,
        deadline: float | None = None,
        **gone: Any,
    ):
        for option in gone:
            if option not in _GONE:
                raise TypeError(f"Session() got an unexpected keyword argument {option!r}")
            raise OptionError(f"{option} is gone", where="Session", hint=_GONE[option])
        _check_choice("on_miss", on_miss, get_args(OnMiss))
        _check_count("max_step_bytes counts bytes", max_step_bytes, 0)
        hang_seconds = float("inf") if hang_after is None else hang_after
        wait_seconds = float("inf") if deadline is None else deadline
        limits = {"agree_timeout": agree_timeout, "hang_after": hang_seconds}
        limits["deadline"] = wait_seconds
        for option, seconds in limits.items():
            if not (isinstance(seconds, Real) and seconds > 0):
                raise OptionError(f"{option} must be positive", where="Session", got=repr(seconds))
        of_target = {"name": name, "watch": watch, "deadline": deadline}
        useless = [option for option, given in of_target.items() if given is not None]
        if target is None and useless:
            raise OptionError(f"{listed(useless)} without a target", where="Session")
        if cache is not None and not isinstance(cache, ProgramCache):
            raise OptionError("cache is a ProgramCache", where="Session", got=repr(cache))
        cache_used = cache or DEFAULT_SCOPE.cache
        if target is not None and cache_used.trust:
            what = "trust= is for steps of this process, and not for those on tasks"
            raise OptionError(what, where="Session(target)", got=f"trust={cache_used.trust!r}")
        given = rules if isinstance(rules, Rules) else Rules(rules or ())
        with contextlib.ExitStack() as opened:
            tasks = None
            if target is not None:
                from stepcache.remote.starting import open_target

                waiting = {"hang_seconds": hang_seconds, "deadline_seconds": wait_seconds}
                who = target, mesh, data_axis, name, watch
                tasks = open_target(*who, **waiting)
                opened.callback(tasks.connection.close)
                mesh = tasks.mesh
            placer = _placer(mesh, given, data_axis, Mesh if tasks is None else AbstractMesh)
            together = functools.partial(_peers_of, agree_seconds=agree_timeout)
            scope = Scope(placer, cache_used, on_miss, count_hits, max_step_bytes, together)
            scope.target = tasks
            self._open(scope)
            self._hang_seconds = hang_seconds
            if tasks is not None:
                tasks.session = weakref.ref(self)
            _ = self._scope.peers  # From now on they know of each other.
            opened.pop_all()

    def _open(self, scope: Scope) -> None:
        self._scope = scope
        scope.session = weakref.ref(self)
        self._token = token_of(scope)
        self._entered = threading.local()
        self._hang_seconds = HANG_SECONDS

    @classmethod
    def _without_mesh(cls) -> Session:
        session = cls.__new__(cls)
        session._open(DEFAULT_SCOPE)
        return session

    @property
    def mesh(self) -> Mesh | None:
        """The mesh; None without one."""
        return self._scope.mesh

    @property
    def rules(self) -> Rules:
        """The rules."""
        return self._scope.placer.rules if self._scope.placer else Rules()

    @property
    def cache(self) -> ProgramCache:
        """The program cache."""
        return self._scope.cache

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self._scope.closed

    def step(self, fun: Any = NOT_GIVEN, /, **options: Any) -> Any:
        """`stepcache.step`, bound to this session wherever it is called."""
        return make_step(fun, options, lambda: self._scope)

    def check_replicas(self, tree: Any) -> None:
        """Checks that all replicas of values, on several processes or devices, are equal.

        Reads every byte of the replicas on this process's devices, which takes as long as a copy to
        the host. In a pod all processes must call it. Host arrays are compared without this call
        when a program is new, and `Variables` when a step first uses them; this method also finds
        later differences.

        Args:
            tree: `Variables`, or any tree of arrays, numbers and `Variables`. Variables in host
                memory are not compared, because each process has a different share of them.

        Raises:
            AgreementError: values differ; it names their paths, and the ranks.
        """
        from stepcache.variables.variables import check_tree

        check_tree(tree, self._scope.peers, "in check_replicas")

    def __enter__(self) -> Session:
        if self.closed:
            raise SessionClosedError("this session has been closed", hint="make a new one")
        entered = Undoing()
        try:
            entered.add(setattr, self._entered, "latest", getattr(self._entered, "latest", None))
            self._entered.latest = entered
            entered.hold(jaxcompat.entering(self._scope, self._token))
            if (peers := self._scope.peers) is not None:
                peers.watch.enter(peers.name, peers.ranks, self._hang_seconds)
        except BaseException:
            entered.close()
            raise
        return self

    def __exit__(self, *exception) -> None:
        entered = self._entered.latest
        try:
            entered.close()
        finally:
            entered.close()  # Ctrl-C may have come before the first line of the other call.
        if (peers := self._scope.peers) is not None:
            peers.watch.leave(peers.name, exception[1])
            if isinstance(exception[1], Exception):
                peers.watch.raise_if_lost_by(exception[1])
        if self._scope.built and exception[0] is None:
            unmatched = set(range(len(self.rules))) - self._scope.matched
            self._scope.warn_of_rules(unmatched, "any step of the session")

    def close(self) -> None:
        """Ends the session: from now on a step called in it raises `SessionClosedError`.

        A call whose program is running on another thread completes. A call that is building its
        program raises when the build ends. On a thread that has not left the session, a call may
        still hit if an open session with the same mesh, rules and cache makes the same call.
        Programs stay in the cache, which other sessions may share. Steps that were started on tasks
        run to their end, unless the tasks end with the session.

        Raises:
            OptionError: this is the default session.
        """
        if self._scope is DEFAULT_SCOPE:
            raise OptionError("the default session cannot be closed", where="Session.close")
        self._scope.closed = True
        if self._scope.target is not None:
            self._scope.target.connection.close()
        clear_all()

    def __repr__(self) -> str:
        mesh = dict(self.mesh.shape) if self.mesh is not None else None
        state = ", closed" if self.closed else ""
        return f"Session(mesh={mesh}, rules={len(self.rules)}, {self.cache!r}{state})"


def _check_choice(name: str, given: Any, choices: Iterable[str]) -> None:
    if given not in choices:
        what = f"unknown {name}"
        expected = f"one of {', '.join(map(repr, choices))}"
        raise OptionError(what, where="Session", expected=expected, got=repr(given))


def _check_count(what: str, given: Any, least: int) -> None:
    whole = isinstance(given, int | np.integer) and not isinstance(given, bool)
    if given is not None and not (whole and given >= least):
        expected = f"an int ≥ {least}, or None"
        raise OptionError(what, where="Session", expected=expected, got=repr(given))


def _placer(mesh: Any, rules: Rules, data_axis: DataAxis, kind: type) -> Placer | None:
    if isinstance(data_axis, list):
        data_axis = tuple(data_axis)
    if mesh is None:
        for name, given in (("rules", len(rules) > 0), ("data_axis", data_axis != "data")):
            if given:
                what = f"{name} without a mesh: there is nothing to place leaves on"
                hint = f"Session(mesh, {name}=...), with a mesh from jax.make_mesh"
                raise OptionError(what, where="Session", hint=hint)
        return None
    if not isinstance(mesh, kind):
        what = "mesh must be a jax.sharding.Mesh"
        hint = 'jax.make_mesh((4, 2), ("data", "model"))'
        raise OptionError(what, where="Session", got=type(mesh).__name__, hint=hint)
    return Placer(mesh, rules, data_axis)


def _peers_of(ranks: tuple[int, ...], agree_seconds: float = AGREE_SECONDS) -> Peers | None:
    """The processes of a call; None for a single one, which imports nothing for it."""
    if len(ranks) < 2:
        return None
    from stepcache.pods.rounds import peers_of

    return peers_of(ranks, agree_seconds)


DEFAULT_SCOPE.cache, DEFAULT_SCOPE.together = ProgramCache(), _peers_of
_DEFAULT_SESSION = Session._without_mesh()


def current_session() -> Session:
    """The innermost `with Session(...)` of this thread, else a default one.

    The default session has no mesh and no rules: it places nothing, so that a step runs where
    `jax.jit` would run it.
    """
    scope = current_scope()
    return (scope.session and scope.session()) or _DEFAULT_SESSION
