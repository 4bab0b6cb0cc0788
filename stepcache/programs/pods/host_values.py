"""Compares the host arguments of a call that every process of a pod passes whole."""

from __future__ import annotations

import jax
import numpy as np

from stepcache.calls.step_spec import Request
from stepcache.distributed.global_arrays import spans_processes
from stepcache.distributed.peers import Peers
from stepcache.distributed.replicas import compare, is_local, token_of


def replicated_host_values(request: Request) -> dict[str, str] | None:
    """Returns tokens of the host values that every process passes whole, by path.

    None for a call with `jax.ShapeDtypeStruct` in the place of values, as for `step.warm`.
    """
    call, tokens = request.call, {}
    rows = zip(call.leaves, call.paths, request.placed, request.asked, strict=True)
    for value, path, placed, asked in rows:
        sharding = placed.sharding if placed is not None else asked
        if not spans_processes(sharding) or not is_local(value):
            continue
        if isinstance(value, jax.ShapeDtypeStruct):
            return None
        if placed is None or np.shape(value) == placed.shape:
            tokens[path.text] = token_of(value)
    return tokens


def compare_call_values(name: str, request: Request, peers: Peers) -> None:
    """Compares the replicated host values of a call with those of the other processes.

    Raises `AgreementError` if they differ or one is late, `RankLostError` if one was lost.
    """
    values = {tuple(peers.ranks): replicated_host_values(request) or {}}
    with peers.round(name, "its first call since it was warmed") as round:
        compare(round, f"before {name}", values)
