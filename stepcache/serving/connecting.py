"""`connect`: connects to variables that another process holds. Engines are imported when used."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from stepcache.errors import OptionError

if TYPE_CHECKING:
    from stepcache.serving.connection import Connection


def connect(address: str, *, timeout: float = 60.0, max_unsaved_bytes: int = 1 << 30) -> Connection:
    """Connects to a server that holds variables for several processes.

        with sc.connect("local:runs/server") as server:  # stepcache serve --variables runs/server
            params = server.variables("params", init(), write=sc.Write(mode="add"))
            for batch in batches:
                params.push(step(params, batch))

    Args:
        address: `local:DIRECTORY` for a server on this machine, or `ray:NAME` for an actor in a Ray
            cluster: that of this process, else that of `RAY_ADDRESS` or of this machine, else a new
            one.
        timeout: how long a request may take in seconds, including a restart of the server.
        max_unsaved_bytes: limit of the writes that this process keeps for each host until a
            snapshot or an image has them, to repeat them after a crash. Further writes wait.

    If several hosts share the variables (`stepcache serve --hosts`), the connection uses all of
    them.

    Returns:
        A connection; a context manager. It sends nothing before variables are opened.

    Raises:
        OptionError: the address names no engine, or a bound is not positive.
        VariablesError: Ray is not installed, or its cluster cannot be reached.

    A parameter server (Li et al., OSDI 2014) whose caches can be inspected, and which applies each
    write exactly once, even if processes are killed and restarted.
    """
    from stepcache.serving.client import Client
    from stepcache.serving.connection import Connection
    from stepcache.serving.hosts import Hosts
    from stepcache.serving.transport import place_of

    engine, _, place = str(address).partition(":")
    if engine not in ("local", "ray") or not place:
        raise OptionError(
            "unknown address of variables",
            where="connect",
            expected="local:DIRECTORY or ray:NAME",
            got=repr(address),
        )
    for name, bound in (("timeout", timeout), ("max_unsaved_bytes", max_unsaved_bytes)):
        if not isinstance(bound, int | float) or not bound > 0:  # NaN is not.
            got = repr(bound)
            raise OptionError(f"no {name}", where="connect", expected="a number > 0", got=got)

    where = f"local:{Path(place).expanduser().absolute()}" if engine == "local" else address

    if engine == "local":
        from stepcache.serving.local_transport import LocalTransport as EngineTransport
    else:
        from stepcache.serving.ray_transport import RayTransport as EngineTransport

    def client(host: int) -> Client:
        make = functools.partial(EngineTransport, place_of(place, host))
        return Client(make, place_of(where, host), timeout, max_unsaved_bytes)

    return Connection(address, Hosts(client))
