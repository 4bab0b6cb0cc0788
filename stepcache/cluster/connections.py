"""The connections and processes of this machine that a pod is made of, as Linux shows them.

Elsewhere there are none to be seen, and what is built on them does nothing.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_ESTABLISHED, _LISTENING = "01", "0A"
_IPV4_WITHIN_IPV6 = "0000000000000000FFFF0000"


class Connection(NamedTuple):
    """A TCP socket of this process.

    Attributes:
        local: this end, as address and port in the kernel's notation.
        remote: the other end.
        state: of the socket, likewise.
        descriptor: its number.
    """

    local: str
    remote: str
    state: str
    descriptor: int


def _sockets() -> list[Connection]:
    descriptors: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for path in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                link = str(path.readlink())
                if link.startswith("socket:["):
                    descriptors[link[8:-1]] = int(path.name)
    found = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[9] in descriptors:
                    local, remote = (each.removeprefix(_IPV4_WITHIN_IPV6) for each in fields[1:3])
                    found.append(Connection(local, remote, fields[3], descriptors[fields[9]]))
    return found


def listening() -> list[str]:
    """The ends at which this process takes connections."""
    return [each.local for each in _sockets() if each.state == _LISTENING]


def connected_by(port: int) -> bool:
    """Whether a connection by way of a port is there, where connections can be seen.

    The kernel takes milliseconds to list connections, and microseconds to say how one is. So the
    one that was found is looked at first, and the list where it is not as it was.
    """
    if not Path("/proc/self/net/tcp").exists():
        return True
    descriptor, link = _found.get(port, (-1, ""))
    if link and _link(descriptor) == link and _is_established(descriptor):
        return True
    for each in _sockets():
        if each.state == _ESTABLISHED and port in (_port(each.local), _port(each.remote)):
            _found[port] = (each.descriptor, _link(each.descriptor))
            return True
    return False


_found: dict[int, tuple[int, str]] = {}


def _link(descriptor: int) -> str:
    """What a descriptor stands for; empty for nothing."""
    try:
        return str(Path(f"/proc/self/fd/{descriptor}").readlink())
    except OSError:
        return ""


def _is_established(descriptor: int) -> bool:
    try:
        with socket.socket(fileno=os.dup(descriptor)) as end:
            return end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == int(_ESTABLISHED)
    except OSError:
        return False


def accepted_at(port: int) -> int:
    """How many connections other processes, or this one, have made to a port of this one."""
    return sum(each.state == _ESTABLISHED and _port(each.local) == port for each in _sockets())


def hang_up(own: Iterable[str], others: Iterable[str], spared_port: int) -> None:
    """Shuts down the connections between this process and some others.

    Args:
        own: where this process takes connections.
        others: where the others do.
        spared_port: connections by way of it stay.
    """
    own, others = set(own), set(others)
    addresses = {_address(end) for end in others}
    for local, remote, state, descriptor in _sockets():
        if state != _ESTABLISHED or spared_port in (_port(local), _port(remote)):
            continue
        if remote in others or (local in own and _address(remote) in addresses):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as end:
                end.shutdown(socket.SHUT_RDWR)


def _address(end: str) -> str:
    return end.partition(":")[0]


def _port(end: str) -> int:
    return int(end.partition(":")[2], 16)


def machine() -> str:
    """Names this machine, and the numbering of its processes."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {Path('/proc/self/ns/pid').readlink()}"
    return socket.gethostname()


def started(pid: int) -> str:
    """When a process of this machine was started; empty where it does not run any more."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except OSError:
        if Path("/proc/self/stat").exists():
            return ""
    try:
        os.kill(pid, 0)
    except OSError:
        return ""
    return "runs"
