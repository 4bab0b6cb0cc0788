"""The ray engine: a host of variables in a Ray actor, for the processes of a Ray cluster.

Ray places the actor, names it, restarts it after a crash, and controls access to it. Requests are
calls of one method. Large values go through Ray's object store: a writer puts its update there, and
the actor puts each version there at its first read, so that all readers of a node map one copy.
Processes on the machine of the actor need neither: it serves them as the local engine does.

If several hosts share the variables, each is an actor; host 0 has the name and the directory of the
set. Import this module only where Ray is used.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stepcache.errors import VariablesError, first_line
from stepcache.link import plain
from stepcache.link.processes import Process
from stepcache.serving import host_directory
from stepcache.serving.durable_host import TEND_SECONDS, DurableHost
from stepcache.serving.local_server import LocalServer
from stepcache.serving.messages import MalformedMessageError, Reply, from_plain, to_plain
from stepcache.serving.ray_transport import (
    INLINE_BYTES,
    NAMESPACE,
    cause,
    initialise,
    run_actor,
    start_actor,
)
from stepcache.serving.shared_memory import Block, Pool, private
from stepcache.serving.transport import place_of
from stepcache.units import counted

# After `ray_transport`, which raises a helpful error if Ray is not installed.
import ray  # isort: skip
from ray.exceptions import RayActorError  # isort: skip
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # isort: skip

_RECOVERY_SECONDS = 2.0  # Ray's control service takes time to tell clients of a new actor.
# Of blocks that are in the object store too, as calls of Ray have read them.
_references: weakref.WeakKeyDictionary[Block, Any] = weakref.WeakKeyDictionary()


class About(NamedTuple):
    """Description of an actor, as of `Status` and `DurableHost`.

    Attributes:
        variables: how many variables and tables it holds.
        is_stopped: whether it was stopped, and is about to be removed.
        process: its process as `Process` writes it, if it serves the processes of its machine.
    """

    directory: str
    epoch: int
    hosts: int
    variables: int
    moment: int
    pid: int
    is_stopped: bool
    process: str


class HostActor:
    """The actor: a host of variables and its directory. Made by `start`.

    Args:
        directory: directory of the snapshots. Ray may restart the actor on any node, so that all
            nodes must share it.
        options: options of `DurableHost`.
        shares: serve the processes of this machine as the local engine does.

    Raises:
        VariablesError: the directory cannot be served.
    """

    def __init__(self, directory: str, options: dict[str, Any], shares: bool = True):
        import jax

        jax.config.update("jax_platforms", "cpu")  # Leave the accelerators to others.
        if not Path(directory).is_dir():  # A new one here would lack the snapshots.
            raise VariablesError(
                "this node does not have the directory of the snapshots",
                where=directory,
                hint="serve a directory that all nodes share",
            )
        options = {"recovery_seconds": _RECOVERY_SECONDS, **options}
        allocate = Pool().allocate if shares else private
        self._durable = durable = DurableHost(Path(directory), allocate, **options)
        self._is_stopped = False
        self._server = LocalServer(Path(directory), durable) if shares else None
        self._lock = self._server.lock if self._server else threading.Lock()
        run_actor("the actor", self._server.serve if self._server else self._tend)

    def serve(self, request: bytes, payload: Any = None) -> Any:
        """Serves a request.

        Plain bytes are fastest: an array as argument and another as result add 0.3 ms to a call.

        Args:
            request: client, message and a small block or None, packed.
            payload: a large block.

        Returns:
            The reply and its small blocks, packed. If there are large blocks, a pair of that and
            their references. None once the actor is stopped.
        """
        with self._lock:
            if self._is_stopped:
                return None
            started, durable = time.perf_counter(), self._durable
            blocks: list[Block] = []
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
        """Describes this actor."""
        host = self._durable.host
        with self._lock:
            held = len(host.status().variables)
            rows = (host.epoch, self._durable.hosts, held, host.moment)
        process = str(Process.current()) if self._server else ""
        directory = str(self._durable.directory)
        return About(directory, *rows, os.getpid(), self._is_stopped, process)

    @ray.method(max_task_retries=-1)
    def stop(self) -> bool:
        """Writes the last snapshot, and stops to serve. If it returns False, the actor goes on."""
        with self._lock:
            if not self._is_stopped:
                self._is_stopped = self._durable.finish()
                if self._is_stopped and self._server:
                    self._server.stop()
            return self._is_stopped

    def _tend(self) -> None:
        while not self._is_stopped:
            with self._lock:
                if not self._is_stopped:
                    self._durable.tend()
            time.sleep(TEND_SECONDS)


def _packed(reply: Reply, blocks: list[Block]) -> Any:
    """Packs a reply; the result of `HostActor.serve`."""
    are_small = [block.data.size < INLINE_BYTES for block in blocks]
    pairs = list(zip(blocks, are_small, strict=True))
    inline = [block.data.tobytes() if is_small else None for block, is_small in pairs]
    packed = plain.pack([to_plain(reply), inline])
    held = [_reference(block) for block, is_small in pairs if not is_small]
    return (packed, held) if held else packed


def _reference(block: Block) -> Any:
    """Puts a block into the object store, unless it is there, and returns the reference.

    Private memory is freed then, and `data` is a view of the object store.
    """
    if (reference := _references.get(block)) is None:
        _references[block] = reference = ray.put(block.data)
        if block.place is None:  # A snapshot in progress keeps a reference to the old memory.
            block.data = ray.get(reference)
    return reference


def _unpacked(request: Any, payload: Any) -> tuple[str, Any, np.ndarray | None]:
    """Unpacks client, message and block of a request."""
    try:
        client, data, inline = plain.unpack(request)
    except Exception:
        raise MalformedMessageError("its header cannot be decoded") from None
    if not isinstance(client, str) or not isinstance(inline, bytes | None):
        raise MalformedMessageError("a field of its header has another type")
    block = np.frombuffer(inline, np.uint8) if inline is not None else payload
    if block is not None and not isinstance(block, np.ndarray):
        raise MalformedMessageError(
            f"a block must be an array of bytes, not a {type(block).__name__}"
        )
    return client, from_plain(data), block


def start(
    name: str, directory: Path, *, hosts: int = 1, shares: bool = True, **options: Any
) -> list[About]:
    """Starts the actors that serve the variables of a directory, or finds running ones.

    They are detached: they run until `stop`, also after this process ends. The first one is placed
    on the node of this process, the others on the next nodes in turn.

    Args:
        name: the name by which clients find them: `ray:NAME`.
        directory: directory of the snapshots.
        hosts: how many actors share the variables.
        shares: whether each serves the processes of its machine as the local engine does. If not,
            they use calls of Ray too.
        options: options of `DurableHost`.

    Returns:
        A description of each.

    Raises:
        VariablesError: the directory cannot be served; or running actors of this name serve another
            directory, or are of another number.
        CacheDirectoryError: other users can write to the directory.
    """
    initialise()
    wanted = str(directory.expanduser().resolve())
    rest = ({**options, "hosts": hosts}, shares)
    first = _start(name, wanted, 0, *rest)  # Alone: it checks the number of hosts.
    others = [(place_of(name, n), place_of(wanted, n), n, *rest) for n in range(1, hosts)]
    with ThreadPoolExecutor(max(len(others), 1)) as threads:
        return [first, *threads.map(_start, *zip(*others, strict=True))]


def _start(name: str, directory: str, number: int, options: dict[str, Any], shares: bool) -> About:
    host_directory.make(Path(directory))
    nodes = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])
    own = nodes.index(ray.get_runtime_context().get_node_id())
    node = nodes[(own + number) % len(nodes)]
    actor = start_actor(
        name,
        HostActor,
        *(directory, options, shares),
        enable_task_events=False,  # Each request would be an entry in Ray's list of tasks.
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True),
    )
    try:
        about: Any = ray.get(actor.about.remote())
    except RayActorError as error:
        raise VariablesError(
            "the actor could not be started", where=f"ray:{name}", got=cause(error)
        ) from error
    if about.is_stopped:  # The process that stopped it was killed before it removed it.
        ray.kill(actor, no_restart=True)
        return _start(name, directory, number, options, shares)
    if (about.directory, about.hosts) != (directory, options["hosts"]):
        raise VariablesError(
            "an actor of this name serves another directory, or another number of hosts",
            where=f"ray:{name}",
            expected=f"{directory}, {counted(options['hosts'], 'host')}",
            got=f"{about.directory}, {counted(about.hosts, 'host')}",
        )
    return about


def stop(name: str) -> int:
    """Stops all actors of a name. They write their last snapshots.

    Returns:
        How many writes these snapshots hold.

    Raises:
        VariablesError: there is no such actor; or an actor cannot write its snapshot, and goes on.
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
            "there is no such actor", where=f"ray:{name}", got=first_line(error)
        ) from error
    if not all(are_saved):
        raise VariablesError(
            "the last snapshot cannot be written; the actor goes on",
            where=f"ray:{names[are_saved.index(False)]}",
            hint="see its log; make room, then stop it again",
        )
    for actor in reversed(actors):  # The first one last: `stop` asks it for their number.
        ray.kill(actor, no_restart=True)
    return sum(each.moment for each in found)
