"""A network for the ranks of a pod that can be cut, slowed and made to lose packets.

Each rank has a Linux network namespace of its own, whose one interface is a TUN device. A thread of
the test carries packets from one device to the other, so that nothing but the kernel's own TCP is
between the ranks and what the test does to their packets. It needs root and `/dev/net/tun`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Container
from pathlib import Path

CLONE_NEWNET = 0x40000000
TUNSETIFF, TUN_WITHOUT_HEADER = 0x400454CA, 0x1001
LARGEST_PACKET = 1 << 16
LOOK_SECONDS = 0.02

Link = tuple[int, int]
"""From one rank to another."""


def why_not() -> str:
    """Why such a network cannot be made here; empty where it can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or not Path("/dev/net/tun").exists():
        return "network namespaces need `ip` and /dev/net/tun"
    name = f"try{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return made.stderr.strip()


class Network:
    """Carries packets between ranks. A context manager.

    Args:
        directory: for files of its own.
        count: how many ranks.
        loss: the part of all packets that are lost.
        delay_seconds: how long each packet takes.
        cut: the links that carry nothing once there is a file `cut` in the directory.
    """

    def __init__(
        self,
        directory: Path,
        count: int,
        *,
        loss: float = 0.0,
        delay_seconds: float = 0.0,
        cut: Container[Link] = (),
    ):
        self._directory, self._loss, self._delay_seconds = directory, loss, delay_seconds
        self._cut_later, self._chance = cut, random.Random(0)
        self._names = [f"pod{os.getpid()}-{id(self):x}-{rank}" for rank in range(count)]
        self._devices: list[int] = []
        self._is_open = True
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self.carried = 0

    def host(self, rank: int) -> str:
        """The address of a rank."""
        return f"10.77.0.{rank + 1}"

    def command(self, rank: int) -> list[str]:
        """What runs a command in the namespace of a rank, where its host name is its address."""
        hosts = self._directory / f"hosts{rank}"
        hosts.write_text(f"127.0.0.1 localhost\n{self.host(rank)} {os.uname().nodename}\n")
        script = 'mount --bind "$0" /etc/hosts && exec "$@"'
        return ["ip", "netns", "exec", self._names[rank], "sh", "-c", script, str(hosts)]

    def __enter__(self) -> Network:
        for rank, name in enumerate(self._names):
            _ip("netns", "add", name)
            opening = threading.Thread(target=lambda name=name: self._devices.append(_tun(name)))
            opening.start()  # A thread is in a namespace alone, and forever.
            opening.join()
            _ip("-n", name, "addr", "add", f"{self.host(rank)}/24", "dev", "tun0")
            _ip("-n", name, "link", "set", "tun0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        self._thread.start()
        return self

    def __exit__(self, *exception) -> None:
        self._is_open = False
        self._thread.join()
        for device in self._devices:
            os.close(device)
        for name in self._names:
            _ip("netns", "del", name)

    def _carry(self) -> None:
        on_the_way: list[tuple[float, int, int, bytes]] = []
        numbers = itertools.count()
        cut: Container[Link] = ()
        while self._is_open:
            if not cut and (self._directory / "cut").exists():
                cut = self._cut_later
            for device in select.select(self._devices, [], [], LOOK_SECONDS)[0]:
                packet = os.read(device, LARGEST_PACKET)
                link = self._devices.index(device), _destination(packet)
                is_for_a_rank = 0 <= link[1] < len(self._devices)
                if is_for_a_rank and link not in cut and self._chance.random() >= self._loss:
                    arrival = time.monotonic() + self._delay_seconds
                    heapq.heappush(on_the_way, (arrival, next(numbers), link[1], packet))
            while on_the_way and on_the_way[0][0] <= time.monotonic():
                _, _, rank, packet = heapq.heappop(on_the_way)
                self.carried += 1
                with contextlib.suppress(OSError):  # The device is going, with its namespace.
                    os.write(self._devices[rank], packet)


def _destination(packet: bytes) -> int:
    """The rank that an IPv4 packet is for; -1 for any other packet."""
    return packet[19] - 1 if packet[0] >> 4 == 4 else -1


def _tun(name: str) -> int:
    """A TUN device in a network namespace."""
    namespace = os.open(f"/run/netns/{name}", os.O_RDONLY)
    failed = ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET)
    os.close(namespace)
    if failed:
        raise OSError(ctypes.get_errno(), f"cannot enter the namespace {name}")
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"tun0", TUN_WITHOUT_HEADER))
    return device


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
