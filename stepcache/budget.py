"""`Session(max_step_bytes=...)`: what one call may move, judged before anything moves."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Any

from jax.sharding import Sharding

from stepcache.errors import TransferBudgetError
from stepcache.programs.placement import moved_bytes
from stepcache.programs.recipe import Request
from stepcache.programs.signature import Leaf, Path
from stepcache.residence import Use
from stepcache.scope import Scope
from stepcache.sharding import Placed


def check_budget(scope: Scope, step: str, request: Request | None, use: Use | None) -> None:
    """Whether a call moves no more than its session allows.

    Args:
        scope: of the session.
        step: the step's name.
        request: the call, as its program takes it; None where that cannot be said.
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
    for each in use.plan().transfers if use is not None else ():
        needed[f"{each.variable} ({each.route})"] += each.bytes
    total = needed.total()
    if total > scope.max_step_bytes:
        dearest = [(name, size) for name, size in needed.most_common(3) if size]
        raise TransferBudgetError(
            f"{step} would move more than max_step_bytes allows",
            total,
            scope.max_step_bytes,
            where=", ".join(f"{name}: {size} bytes" for name, size in dearest),
            expected=f"at most {scope.max_step_bytes} bytes",
            got=f"{total} bytes",
            hint="step.explain(...) shows all of it; place arguments beforehand, or let Read keep "
            "a copy",
        )


def _rows(request: Request) -> Iterable[tuple[Path, Any, Leaf, Placed | None, Sharding | None]]:
    call = request.call
    given = call.signature.leaves
    return zip(call.paths, call.leaves, given, request.placed, request.asked, strict=True)
