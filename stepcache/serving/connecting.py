"""`connect`: the way to variables that another process holds. Engines are imported when used."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from stepcache.errors import OptionError

if TYPE_CHECKING:
    from stepcache.serving.connection import Connection
    from stepcache.serving.transport import Transport


def connect(address: str, *, timeout: float = 60.0, max_unsaved_bytes: int = 1 << 30) -> Connection:
    """Connects to a host of variables that several processes use.

        with sc.connect("local:runs/server") as server:  # stepcache serve --variables runs/server
            params = server.variables("params", init(), write=sc.Write(mode="add"))
            for batch in batches:
                params.push(step(params, batch))

    Args:
        address: `local:DIRECTORY`, of a server on this machine; or `ray:NAME`, of an actor in the
            Ray cluster that this process is connected to. If it is to none, it connects to the one
            of this machine, or of `RAY_ADDRESS`, or starts one.
        timeout: how long a request may take in seconds, a restart of the server included.
        max_unsaved_bytes: bound on the writes that this process keeps, to send them again, because
            no snapshot or image of the server has them. A write beyond it waits for one.

    Returns:
        A connection; a context manager. Nothing is sent before variables are asked for.

    Raises:
        OptionError: the address names no engine, or a bound is not positive.
        VariablesError: Ray is not installed, or its cluster cannot be reached.

    This is a parameter server (Li et al., OSDI 2014) that states what is cached where, and does
    each write exactly once, whichever side is killed and started again.
    """
    from stepcache.serving.client import Client
    from stepcache.serving.connection import Connection

    engine, _, place = str(address).partition(":")
    if engine not in _ENGINES or not place:
        raise OptionError(
            "unknown address of variables",
            where="connect",
            expected="local:DIRECTORY or ray:NAME",
            got=repr(address),
        )
    for name, bound in (("timeout", timeout), ("max_unsaved_bytes", max_unsaved_bytes)):
        if bound <= 0:
            raise OptionError(f"{name} must be positive", where="connect", got=repr(bound))
    make = functools.partial(_ENGINES[engine], place)
    return Connection(address, Client(make, address, timeout, max_unsaved_bytes))


def _local(place: str, client: str) -> Transport:
    from stepcache.serving.local_transport import LocalTransport

    return LocalTransport(Path(place), client)


def _ray(place: str, client: str) -> Transport:
    from stepcache.serving.ray_transport import RayTransport

    return RayTransport(place, client)


_ENGINES: dict[str, Callable[[str, str], Transport]] = {"local": _local, "ray": _ray}
