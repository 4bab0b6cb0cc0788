"""`Host`: the state machine of served variables. It uses no transport, no clock and no JAX.

It handles one message after the other. Every version of a value is a block of its own, which does
not change, so that readers and snapshots can keep references to it.

Each write of a client is applied exactly once, in order. Clients number their writes, and the
state, also in snapshots, has the number of the last write of each client. A client repeats a write
that the host has not confirmed, and after a restart of the host also those that no snapshot holds.
"""

from __future__ import annotations

import functools
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from stepcache.link.processes import Process
from stepcache.serving import bulk
from stepcache.serving.held import HeldVariables, HostState, LastWrite
from stepcache.serving.messages import (
    MAX_NAMES,
    BlockLayout,
    Described,
    DescribeRequest,
    Joined,
    JoinRequest,
    MalformedMessageError,
    ReadRequest,
    RefusalError,
    Refused,
    Reply,
    Request,
    RowsRequest,
    SnapshotRequest,
    Status,
    StatusRequest,
    Values,
    WriteRequest,
    Written,
    check_name,
)
from stepcache.serving.optimizers import ExportedRule
from stepcache.serving.repeats import Repeat, Repeats
from stepcache.serving.shared_memory import Block
from stepcache.serving.tables import Tables, TableStorage

MAX_CLIENTS = 65_536
"""How many clients are remembered: those that wrote last."""


def _token(before: int, request: WriteRequest) -> int:
    """Returns the token of a new version, given that of the version before; 0 for an assignment."""
    text = f"{before} {request.client} {request.sequence} {request.name}"
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") | 1


class Host:
    """Holds named variables, and applies writes to them.

    Args:
        epoch: number of this start, higher than that of any earlier one.
        allocate: makes a block of this many bytes.
        load_rule: loads an exported optimizer.
        storage: holds the bases of its tables.
        state: the initial state.

    Attributes:
        waiting_for: clients that may have to repeat writes after a crash. Until they have, no
            client can read or write, as it would not see writes that were confirmed before.
        moment: how many writes were applied, those in the initial state included.
        saved: number of the last write of each client that a snapshot or an image holds.
        unsaved: names of the variables and tables that no snapshot or image holds.
        processes: the process of each client, as `Process` writes it; empty if it is malformed.
    """

    def __init__(
        self,
        epoch: int,
        allocate: Callable[[int], Block],
        load_rule: Callable[[bytes], ExportedRule],
        storage: TableStorage,
        state: HostState | None = None,
    ):
        self.epoch, self._allocate = epoch, allocate
        self._load_rule = functools.lru_cache(maxsize=64)(load_rule)
        state = state or HostState({}, {}, 0, {}, {})
        self.tables = Tables(storage, state.tables)
        self._held = {name: replace(each) for name, each in state.variables.items()}
        self._applied, self.processes = OrderedDict(state.applied), dict(state.processes)
        self.waiting_for: set[str] = set()
        self.moment = state.moment
        self.saved = {client: last.sequence for client, last in state.applied.items()}
        self.unsaved: set[str] = set()
        self._repeats = Repeats()
        # Serial, kind and reason of the last, by client. An exception would keep the value.
        self._refused: dict[str, tuple[int, str, str]] = {}

    def handle(self, request: Request, payload: np.ndarray | None) -> tuple[Reply, list[Block]]:
        """Serves a request.

        Args:
            request: the request.
            payload: the block of the request; not used after this returns.

        Returns:
            The reply, and the blocks to send with it.
        """
        if not self.waiting_for:
            self._repeats.clear()
        try:
            match request:
                case ReadRequest():
                    return self._read(request)
                case RowsRequest():
                    self._check_recovered()
                    row, rows = self.tables.read(request, payload, self.epoch)
                    return Values(self.epoch, self.moment, *row), [self._filled(*rows)]
                case WriteRequest():
                    return self._write(request, payload), []
                case JoinRequest():
                    return self._join(request), []
                case DescribeRequest():
                    return self._described(request.name), []
                case StatusRequest() | SnapshotRequest():
                    return self.status(), []
        except RefusalError as error:
            return Refused(error.kind, str(error), self.epoch), []

    def _check_recovered(self) -> None:
        if self.waiting_for:
            count = len(self.waiting_for)
            raise RefusalError(
                "recovering",
                f"it restarted after a crash, and waits for {count} clients to repeat their writes",
            )

    def _read(self, request: ReadRequest) -> tuple[Reply, list[Block]]:
        self._check_recovered()
        if not len(request.known) == len(request.names) <= MAX_NAMES:
            raise MalformedMessageError("the numbers of names and versions differ")
        held = [self._find(name) for name in request.names]
        sent = [
            request.values and each.token != known
            for each, known in zip(held, request.known, strict=True)
        ]
        blocks = [each.value for each, is_sent in zip(held, sent, strict=True) if is_sent]
        numbers, tokens = [each.number for each in held], [each.token for each in held]
        return Values(self.epoch, self.moment, numbers, tokens, sent), blocks

    def _find(self, name: str) -> HeldVariables:
        if name not in self._held:
            known = ", ".join(sorted(self._held)[:8]) or "none"
            raise RefusalError("unknown", f"it has no variables {name!r}; it has {known}")
        return self._held[name]

    def _described(self, name: str) -> Described:
        is_saved = name not in self.unsaved
        if (table := self.tables.held.get(name)) is not None:
            return Described(self.epoch, table.number, [], True, is_saved)
        held = self._find(name)
        row = (self.epoch, held.number, held.layout.types, bool(held.rule), is_saved)
        return Described(*row, self._rule(held.rule).identity if held.rule else "")

    def _join(self, request: JoinRequest) -> Joined:
        check_name(request.client)
        if request.first < 1:
            raise MalformedMessageError("the client's first write has no number")
        last, before = self._applied.get(request.client, LastWrite()), request.first - 1
        lost = max(before - last.sequence, 0)
        self._applied[request.client] = LastWrite(before) if lost else last
        self.processes[request.client] = request.process if Process.parse(request.process) else ""
        self._applied.move_to_end(request.client)
        if request.complete == self.epoch:
            self.waiting_for.discard(request.client)
        while len(self._applied) > MAX_CLIENTS:
            client, _ = self._applied.popitem(last=False)
            for each in (self.saved, self.processes, self._refused):
                each.pop(client, None)
        saved = self.saved.get(request.client, 0)
        return Joined(self.epoch, self._applied[request.client].sequence, saved, lost)

    def _write(self, request: WriteRequest, payload: np.ndarray | None) -> Reply:
        last = self._applied.get(request.client)
        if request.epoch != self.epoch or last is None:
            raise RefusalError("epoch", f"the client has not joined epoch {self.epoch}")
        if not any(request.stamp):
            self._check_recovered()
        following = last.sequence + 1
        if request.sequence > following:
            raise RefusalError("gap", f"write {request.sequence} arrived before write {following}")
        if request.sequence == following:
            self._do_unless_refused(request, payload)
            self.moment += 1
            held = self.tables.held.get(request.name) or self._find(request.name)
            last = LastWrite(following, self.moment, held.number, held.token)
            self._applied[request.client] = last
            self._applied.move_to_end(request.client)
        saved = self.saved.get(request.client, 0)
        return Written(self.epoch, last.moment, last.number, last.token, saved)

    def _do_unless_refused(self, request: WriteRequest, payload: np.ndarray | None) -> None:
        """Applies a write, unless it was refused before: the next one may have its number."""
        serial, *why = self._refused.get(request.client, (0, "", ""))
        if 0 < request.serial <= serial:
            raise RefusalError(*why)
        try:
            self._do(request, payload)
        except Exception as error:
            kind = error.kind if isinstance(error, RefusalError) else "failed"
            self._refused[request.client] = request.serial, kind, str(error)
            raise

    def _do(self, request: WriteRequest, payload: np.ndarray | None) -> None:
        """Applies a write; changes nothing if it raises."""
        if payload is None or payload.ndim != 1 or payload.dtype != np.uint8:
            raise MalformedMessageError("the write has no value")
        match request.mode:
            case "create":
                self._create(request, payload)
                return
            case "create table" | "alter table" | "rows" if request.name in self._held:
                raise RefusalError(
                    "type", f"{request.name} is the name of variables, not of a table"
                )
            case "create table" | "alter table":
                is_repeat = any(request.stamp) and self.waiting_for
                if is_repeat and not self._repeats.are_latest(request, np.array([-1])).all():
                    return  # A later optimizer of the table has come before. (-1 is no row.)
                row = (request.name, request.rule, _token(0, request))
                if self.tables.create(*row, may_alter=request.mode == "alter table"):
                    self.unsaved.add(request.name)
                return
            case "rows":
                are_latest = None
                if any(request.stamp) and self.waiting_for:
                    are_latest = functools.partial(self._repeats.are_latest, request)
                table = self.tables.update(request.name, request.types, payload, are_latest)
                table.token = _token(table.token, request)
                return
        held = self._find(request.name)
        is_value = request.mode != "replace optimizer"
        expected = held.layout.size_bytes if is_value else 0
        if payload.size != expected:
            raise RefusalError("type", f"{request.name} has {expected} bytes, not {payload.size}")
        stamp = (request.stamp[0], request.stamp[1])  # Unpacking makes lists.
        if is_value and (0, 0) < stamp < held.assigned:
            return  # A later assignment has overwritten the repeated write.
        if request.base not in (0, held.token):
            raise RefusalError(
                "conflict", f"another process has written version {held.number} of {request.name}"
            )
        if any(stamp) and self.waiting_for:
            write = Repeat(stamp, request, self._copy(payload))
            self._held[request.name] = self._repeats.applied(held, write, self._written)
        else:
            self._held[request.name] = self._written(held, request, payload)

    def _written(
        self, held: HeldVariables, request: WriteRequest, payload: np.ndarray
    ) -> HeldVariables:
        """Returns variables after a write."""
        token, assigned = held.token, held.assigned
        match request.mode:
            case "assign":
                value, state, token = self._copy(payload), held.state, 0
                stamp = request.stamp if any(request.stamp) else (self.epoch, self.moment + 1)
                assigned = (stamp[0], stamp[1])
            case "add":
                value, state = self._allocate(held.layout.size_bytes), held.state
                views = map(held.layout.views, (held.value.data, value.data, payload))
                for old, new, update in zip(*views, strict=True):
                    bulk.add(old, update, new)
            case "apply":
                value, state = self._updated(request.name, held, held.layout.views(payload))
            case "replace optimizer" if held.rule:
                held = self._with_rule(request.name, held, request.rule)
                value, state = held.value, held.state
            case _:
                raise MalformedMessageError(f"unknown mode {request.mode!r}")
        token = _token(token, request)
        changed = {"number": held.number + 1, "token": token, "assigned": assigned}
        return replace(held, value=value, state=state, **changed)

    def _create(self, request: WriteRequest, payload: np.ndarray) -> None:
        layout, name = BlockLayout(request.types), request.name
        if payload.size != layout.size_bytes:
            raise MalformedMessageError("the size of the value is not that of its leaves")
        held = self._held.get(name)
        if held is not None:
            if held.layout != layout:
                raise RefusalError(
                    "type", f"{name} already exists, and {held.layout.difference(layout)}"
                )
            if bool(held.rule) != bool(request.rule):
                has = "has an optimizer" if held.rule else "has no optimizer"
                raise RefusalError("type", f"{name} already exists, and {has}")
            return
        if name in self.tables.held:
            raise RefusalError("type", f"{name} is the name of a table, not of variables")
        check_name(name, self._held)
        made = HeldVariables(layout, 0, _token(0, request), (0, 0), self._copy(payload))
        self._held[name] = self._with_rule(name, made, request.rule) if request.rule else made
        self.unsaved.add(name)

    def _updated(
        self, name: str, held: HeldVariables, update: Sequence[np.ndarray]
    ) -> tuple[Block, Block]:
        if held.state is None:
            raise RefusalError("type", f"{name} was created without an optimizer")
        rule, before = self._rule(held.rule), BlockLayout(held.state_types).views(held.state.data)
        try:
            value, state = rule.update(held.layout.views(held.value.data), before, update)
        except Exception as error:
            raise RefusalError("failed", f"the optimizer of {name} failed: {error}") from None
        state_layout = BlockLayout(held.state_types)
        return self._filled(held.layout, value), self._filled(state_layout, state)

    def _with_rule(self, name: str, held: HeldVariables, sent: bytes) -> HeldVariables:
        """Returns variables with this optimizer.

        The state of an optimizer before it is kept if the types are the same, except for leaves
        that begin with another value: a learning rate may be one.
        """
        rule, value = self._rule(sent), held.layout.views(held.value.data)
        try:
            leaves = rule.init(value)
            before = self._rule(held.rule) if held.rule else None
            if held.state and before and before.state_types == rule.state_types:
                kept = BlockLayout(rule.state_types).views(held.state.data)
                rows = zip(kept, before.init(value), leaves, strict=True)
                leaves = [old if np.array_equal(was, new) else new for old, was, new in rows]
        except Exception as error:
            raise RefusalError("failed", f"the optimizer of {name} failed: {error}") from None
        state = self._filled(BlockLayout(rule.state_types), leaves)
        return replace(held, rule=sent, state=state, state_types=rule.state_types)

    def _rule(self, sent: bytes) -> ExportedRule:
        try:
            return self._load_rule(sent)
        except Exception as error:
            raise MalformedMessageError(f"the optimizer cannot be loaded: {error}") from None

    def _copy(self, payload: np.ndarray) -> Block:
        block = self._allocate(payload.size)
        bulk.copy(payload, block.data)
        return block

    def _filled(self, layout: BlockLayout, leaves: Sequence[Any]) -> Block:
        block = self._allocate(layout.size_bytes)
        layout.fill(block.data, leaves)
        return block

    def state(self, *, on_disk: bool = True) -> HostState:
        """Returns the state, for a snapshot on disk or an image. Its blocks do not change."""
        held = {name: replace(each) for name, each in self._held.items()}
        processes = {name: self.processes[name] for name in self._applied if name in self.processes}
        tables = self.tables.saved(on_disk=on_disk)
        return HostState(held, dict(self._applied), self.moment, processes, tables)

    def is_saved(self, state: HostState) -> None:
        """Notes that a snapshot or an image holds a state."""
        self.saved = {
            name: max(state.applied.get(name, LastWrite()).sequence, self.saved.get(name, 0))
            for name in self._applied
        }
        self.unsaved -= state.variables.keys() | state.tables.keys()

    def status(self) -> Status:
        """Returns contents and counters of the host."""
        variables = []
        for name, held in sorted(self._held.items()):
            state_bytes = held.state.data.size if held.state is not None else 0
            sizes = (held.value.data.size, state_bytes, len(held.layout.types))
            variables.append((name, held.number, *sizes))
        variables += self.tables.status()
        clients = [
            (client, self.processes.get(client, ""), last.sequence, self.saved.get(client, 0))
            for client, last in self._applied.items()
        ]
        return Status(self.epoch, variables, clients[-1000:], {"writes": self.moment})
