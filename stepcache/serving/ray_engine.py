"""The ray engine: a host of variables in a Ray actor, for the processes of a Ray cluster.

Ray places the actor, names it, starts it again after a crash, and says who may reach it. Requests
are calls of one method. Large values do not travel inside them: a writer puts its update into
Ray's object store, and the actor puts each version that is read there once, so that all readers of
a node map one copy. Where several hosts share a set of variables, each is an actor; host 0 has the
name and the directory of the set. Import this module only where Ray is used.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stepcache.errors import VariablesError, first_line
from stepcache.serving.durable_host import TEND_SECONDS, DurableHost
from stepcache.serving.messages import MalformedMessageError, Reply, from_plain, to_plain
from stepcache.serving.ray_transport import INLINE_BYTES, NAMESPACE, initialise
from stepcache.serving.transport import place_of
from stepcache.storage import plain
from stepcache.storage.private_files import make_directory
from stepcache.units import counted

# After `ray_transport`, which says what to do where Ray is not installed.
import ray  # isort: skip
from ray.exceptions import RayActorError  # isort: skip
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # isort: skip

_RECOVERY_SECONDS = 2.0  # Clients learn through Ray's control service that an actor is back.


class ActorBlock:
    """Memory of a value: of the actor's process, and from its first read on of the object store.

    Attributes:
        data: its bytes. They are not written to after `reference`.
    """

    __slots__ = ("_reference", "data")

    def __init__(self, size_bytes: int):
        self.data: np.ndarray = np.empty(size_bytes, np.uint8)
        self._reference: Any = None

    def reference(self) -> Any:
        """Where other processes find it. `data` is a view of that from then on."""
        if self._reference is None:
            reference: Any = ray.put(self.data)
            # A snapshot under way goes on with the memory that `data` had.
            self._reference, self.data = reference, ray.get(reference)
        return self._reference


class About(NamedTuple):
    """What an actor serves.

    Attributes:
        directory: of its snapshots.
        epoch: of its host.
        hosts: how many share the set of variables.
        variables: how many it holds.
        moment: the number of writes so far.
        pid: of its process, on its node.
        is_stopped: it serves nobody any more, and is about to be removed.
    """

    directory: str
    epoch: int
    hosts: int
    variables: int
    moment: int
    pid: int
    is_stopped: bool


class HostActor:
    """The actor: a host of variables and its directory. Made by `start`.

    Args:
        directory: of the snapshots. Ray may start the actor again on any node: all must see it.
        options: as for `DurableHost`.

    Raises:
        VariablesError: the directory cannot be served.
    """

    def __init__(self, directory: str, options: dict[str, Any]):
        import jax

        jax.config.update("jax_platforms", "cpu")  # It takes no accelerator.
        if not Path(directory).is_dir():  # Not a new one: the snapshots are elsewhere.
            raise VariablesError(
                "this node does not have the directory of the snapshots",
                where=directory,
                hint="serve a directory that all nodes share",
            )
        self._lock = threading.Lock()  # `_durable` is used by two threads.
        options = {"recovery_seconds": _RECOVERY_SECONDS, **options}
        self._durable = DurableHost(Path(directory), ActorBlock, **options)
        self._is_stopped = False
        threading.Thread(target=self._tend, name="stepcache host", daemon=True).start()

    def serve(self, request: bytes, payload: Any = None) -> Any:
        """Serves a request.

        Bytes alone cost Ray least: an array as argument and one as result, 0.3 ms a call.

        Args:
            request: who sends it, the message, and a small block that goes with it, as plain data.
            payload: a large block.

        Returns:
            The reply and its small blocks, as plain data; with references to large blocks, if it
            has any. None once the actor is stopped.
        """
        with self._lock:
            if self._is_stopped:
                return None
            started, durable = time.perf_counter(), self._durable
            blocks: list[Any] = []
            try:
                client, message, payload = _unpacked(request, payload)
            except MalformedMessageError as error:
                reply = durable.refuse_malformed(error)
            else:
                durable.counts["bytes received"] += len(request)
                reply, blocks = durable.handle(client, message, payload)
                durable.counts["bytes sent"] += sum(block.data.size for block in blocks)
            sent = _packed(reply, blocks)
            durable.seconds.append(time.perf_counter() - started)
            return sent

    @ray.method(max_task_retries=-1)
    def about(self) -> About:
        """What it serves."""
        host = self._durable.host
        with self._lock:
            held = len(host.status().variables)
            rows = (host.epoch, self._durable.hosts, held, host.moment)
        return About(str(self._durable.directory), *rows, os.getpid(), self._is_stopped)

    @ray.method(max_task_retries=-1)
    def stop(self) -> bool:
        """Writes the last snapshot, and serves nobody from then on.

        Returns:
            Whether it could be written. If not, the actor goes on.
        """
        with self._lock:
            if not self._is_stopped:
                self._is_stopped = self._durable.finish()
            return self._is_stopped

    def _tend(self) -> None:
        while not self._is_stopped:
            with self._lock:
                if not self._is_stopped:
                    self._durable.tend()
            time.sleep(TEND_SECONDS)


def _packed(reply: Reply, blocks: list[Any]) -> Any:
    """A reply, as `serve` returns it."""
    are_small = [block.data.size < INLINE_BYTES for block in blocks]
    pairs = list(zip(blocks, are_small, strict=True))
    inline = [block.data.tobytes() if is_small else None for block, is_small in pairs]
    packed = plain.pack([to_plain(reply), inline])
    held = [block.reference() for block, is_small in pairs if not is_small]
    return (packed, held) if held else packed


def _unpacked(request: Any, payload: Any) -> tuple[str, Any, np.ndarray | None]:
    """The client, the message and the block of a request.

    Raises:
        MalformedMessageError: it holds none.
    """
    try:
        client, data, inline = plain.unpack(request)
    except Exception:
        raise MalformedMessageError("its header cannot be read") from None
    if not isinstance(client, str) or not isinstance(inline, bytes | None):
        raise MalformedMessageError("its header is of another type")
    block = np.frombuffer(inline, np.uint8) if inline is not None else payload
    if block is not None and not isinstance(block, np.ndarray):
        raise MalformedMessageError(f"a {type(block).__name__} is no block of bytes")
    return client, from_plain(data), block


# ---- actors --------------------------------------------------------------------------------------


def start(name: str, directory: Path, *, hosts: int = 1, **options: Any) -> list[About]:
    """Starts the actors that serve the variables of a directory, or finds those that do.

    They are detached: they go on after this process, until `stop`. The first is put on the node of
    this process, each other one on the next node, while there are more.

    Args:
        name: how clients find them: `ray:NAME`.
        directory: of the snapshots.
        hosts: how many actors share the variables.
        options: as for `DurableHost`.

    Returns:
        What each serves.

    Raises:
        VariablesError: the directory cannot be served; or an actor serves another one, or is one of
            another number.
        CacheDirectoryError: others can write to the directory.
    """
    initialise()
    wanted = str(directory.expanduser().resolve())
    options["hosts"] = hosts
    first = _start(name, wanted, options, 0)  # It knows how many there are.
    others = [(place_of(name, n), place_of(wanted, n), options, n) for n in range(1, hosts)]
    with ThreadPoolExecutor(max(len(others), 1)) as threads:
        return [first, *threads.map(_start, *zip(*others, strict=True))]


def _start(name: str, directory: str, options: dict[str, Any], number: int) -> About:
    make_directory(Path(directory))
    nodes = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])
    own = nodes.index(ray.get_runtime_context().get_node_id())
    node = nodes[(own + number) % len(nodes)]
    actor_class: Any = ray.remote(HostActor)
    actor = actor_class.options(
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        max_restarts=-1,
        num_cpus=0,  # To start it again must not wait for a free CPU.
        enable_task_events=False,  # Ray's list of tasks has room for others' then.
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True),
        get_if_exists=True,
    ).remote(directory, options)
    try:
        about: Any = ray.get(actor.about.remote())
    except RayActorError as error:
        raise VariablesError(
            "the actor could not be started", where=f"ray:{name}", got=_cause(error)
        ) from error
    if about.is_stopped:  # The process that stopped it was killed before it had removed it.
        ray.kill(actor, no_restart=True)
        return _start(name, directory, options, number)
    if (about.directory, about.hosts) != (directory, options["hosts"]):
        raise VariablesError(
            "an actor of this name serves another directory, or is one of another number",
            where=f"ray:{name}",
            expected=f"{directory}, {counted(options['hosts'], 'host')}",
            got=f"{about.directory}, {counted(about.hosts, 'host')}",
        )
    return about


def stop(name: str) -> int:
    """Stops all actors of a name after their last snapshots.

    Returns:
        The number of writes in these snapshots.

    Raises:
        VariablesError: there is no such actor; or a snapshot cannot be written, and its actor goes
            on.
    """
    try:
        first = ray.get_actor(name, namespace=NAMESPACE)
        about: Any = ray.get(first.about.remote())
        names = [place_of(name, host) for host in range(about.hosts)]
        actors = [ray.get_actor(each, namespace=NAMESPACE) for each in names]
        are_saved = ray.get([actor.stop.remote() for actor in actors])
        found = ray.get([actor.about.remote() for actor in actors])
    except (ValueError, RayActorError) as error:
        raise VariablesError(
            "the actor is gone", where=f"ray:{name}", got=first_line(error)
        ) from error
    if not all(are_saved):
        raise VariablesError(
            "the last snapshot cannot be written; the actor goes on",
            where=f"ray:{names[are_saved.index(False)]}",
            hint="see its log; make room, then stop it again",
        )
    for actor in reversed(actors):  # The first one knows how many there are.
        ray.kill(actor, no_restart=True)
    return sum(each.moment for each in found)


def _cause(error: Exception) -> str:
    """The line of an actor's traceback that says what was wrong, and those that explain it."""
    lines = str(error).strip().splitlines()
    found = [number for number, line in enumerate(lines) if "Error: " in line]
    return "\n".join(lines[found[-1] :]) if found else lines[-1]
