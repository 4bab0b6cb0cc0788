"""`Session(max_step_bytes=...)`: limits the bytes that a call moves, before anything moves."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Any

from jax.sharding import Sharding

from stepcache.calls.context import Scope
from stepcache.calls.placement import moved_bytes
from stepcache.calls.residence import Use
from stepcache.calls.signature import Leaf, Path
from stepcache.calls.step_spec import Request
from stepcache.sharding import Placed
from stepcache.variables.plan import check_bytes


def check_budget(scope: Scope, step: str, request: Request | None, use: Use | None) -> None:
    """Checks that a call moves no more bytes than its session allows.

    Args:
        scope: of the session.
        step: the step's name.
        request: the call, as its program takes it; None if it is unknown.
        use: the `Variables` that it passes, if it passes any.

    Raises:
        TransferBudgetError: it would move more.
    """
    if scope.max_step_bytes is None:
        return
    needed: collections.Counter[str] = collections.Counter()
    for path, value, given, placed, asked in _rows(request) if request is not None else ():
        if use is None or not use.holds(path.slashed):
            needed[path.text] += moved_bytes(value, given, placed, asked)
    if use is not None:
        needed.update(use.plan().bytes_by_transfer)
    check_bytes(step, needed, scope.max_step_bytes)


def _rows(request: Request) -> Iterable[tuple[Path, Any, Leaf, Placed | None, Sharding | None]]:
    call = request.call
    given = call.signature.leaves
    return zip(call.paths, call.leaves, given, request.placed, request.asked, strict=True)
