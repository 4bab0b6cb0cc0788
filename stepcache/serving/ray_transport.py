"""`RayTransport`: sends requests to a Ray actor; see `ray_engine`. Import it only to use Ray.

If the actor is on the same machine, requests go to its socket, and values through shared memory. If
nothing answers there, the same request goes to the actor by a call of Ray: the host applies each
write once, however often it arrives.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from stepcache.errors import VariablesError, first_line
from stepcache.link import plain
from stepcache.link.processes import Process
from stepcache.serving.local_transport import LocalTransport
from stepcache.serving.messages import JoinRequest, Request, from_plain, to_plain
from stepcache.serving.shared_memory import Block, Pool
from stepcache.serving.transport import READER, Received, is_ending

try:
    import ray
    from ray.exceptions import ActorDiedError, GetTimeoutError, ObjectLostError, RayActorError
except ModuleNotFoundError as error:
    raise VariablesError(
        "Ray is not installed",
        where="the address ray:NAME",
        hint="pip install 'stepcache[ray]'",
    ) from error

NAMESPACE = "stepcache"
"""Namespace of the actors in a Ray cluster."""
INLINE_BYTES = 64 << 10
"""Smaller blocks are sent as part of a call, as Ray does with small arguments."""

_RETRY_SECONDS = 0.05
_TURN_SECONDS = 0.5
_SILENCE_SECONDS = 2.0  # After which a request to the socket is sent by a call of Ray.
_LOOK_SECONDS = 5.0  # How often to look whether the actor is on this machine.


def initialise(log_to_driver: bool = False, *, starts: bool = True) -> None:
    """Connects this process to a Ray cluster, or starts Ray here, unless that is done.

    Args:
        log_to_driver: whether this process prints what the processes of Ray print. They write to
            standard output at any time, also in the middle of a line.
        starts: whether it starts Ray where there is no cluster.

    Raises:
        VariablesError: there is a cluster, and it cannot be reached; or there is none, and it shall
            not be started.
    """
    if ray.is_initialized():
        return
    options: Any = {"ignore_reinit_error": True, "log_to_driver": log_to_driver}
    try:
        ray.init(address="auto", **options)
    except ConnectionError as error:
        if os.environ.get("RAY_ADDRESS"):
            raise VariablesError(
                "the Ray cluster cannot be reached",
                where=f"RAY_ADDRESS={os.environ['RAY_ADDRESS']}",
                got=first_line(error),
                hint="if it asks for a token, set RAY_AUTH_MODE=token",
            ) from error
        if not starts:
            raise VariablesError(
                "no Ray cluster runs on this machine",
                hint="set RAY_ADDRESS to the address of a cluster; `ray start --head` starts one",
            ) from None
        ray.init(address="local", include_dashboard=False, **options)


def start_actor(name: str, kind: type, *arguments: Any, **options: Any) -> Any:
    """Starts an actor, or finds the one of this name. It runs also after this process ends.

    Ray starts it again after a crash, for which it need not wait for a free CPU.
    """
    options |= {"namespace": NAMESPACE, "lifetime": "detached", "max_restarts": -1, "num_cpus": 0}
    actor_class: Any = ray.remote(kind)
    return actor_class.options(name=name, get_if_exists=True, **options).remote(*arguments)


def run_actor(what: str, run: Callable[[], Any]) -> None:
    """Runs the loop of an actor in a thread. The process ends with it, if it fails."""

    def run_or_end() -> None:
        try:
            run()
        except BaseException as error:
            print(f"{what} ends: {error}", file=sys.stderr, flush=True)
            os._exit(1)  # Ray starts it again, or tells why that fails.

    threading.Thread(target=run_or_end, name="stepcache actor", daemon=True).start()


def cause(error: Exception) -> str:
    """Returns the last error in the text of an actor's traceback, with the lines after it."""
    lines = str(error).strip().splitlines()
    found = [number for number, line in enumerate(lines) if "Error: " in line]
    return "\n".join(lines[found[-1] :]) if found else lines[-1]


def _get(references: Any, deadline: float) -> Any:
    """Calls `ray.get` until a deadline, a part of a second at a time.

    Between two calls, Python can end the thread with its process.
    """
    while (left := deadline - time.monotonic()) > _TURN_SECONDS and not _is_over():
        with contextlib.suppress(GetTimeoutError):
            return ray.get(references, timeout=_TURN_SECONDS)
    return ray.get(references, timeout=0 if _is_over() else max(left, 0))


def _is_over() -> bool:
    """Whether this thread may use Ray no more, which would end the process with an error."""
    is_left = is_ending.is_set() and threading.current_thread().name == READER
    return is_left or not ray.is_initialized()


class RayTransport:
    """Sends the requests of a client to an actor, given their names."""

    def __init__(self, name: str, client: str):
        self._name, self._client = name, client
        self._actor: Any = None
        self._pool = Pool()
        self._local: LocalTransport | None = None  # Leads to the actor's socket.
        self._look_time = 0.0
        self._process = ""  # The actor's process that was found on this machine.
        self._has_answered = True  # Its socket; else it is of no use.
        initialise()

    def allocate(self, size_bytes: int) -> Block:
        return self._pool.allocate(size_bytes)

    def request(self, message: Request, block: Block | None, deadline: float) -> Received | None:
        """See `Transport`. Repeats the request if the actor restarts.

        Raises:
            VariablesError: Ray was shut down in this process.
        """
        self._check_initialised()
        call: list[Any] | None = None
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            with contextlib.suppress(GetTimeoutError):
                if self._local is None and isinstance(message, JoinRequest):
                    self._look(deadline)  # Only then: the socket's server has to know the process.
                if self._local is not None:
                    received = self._ask_locally(message, block, deadline)
                else:
                    call = call or self._call(message, block)
                    received = self._attempt(call, deadline)
                if received is not None:
                    return received
            time.sleep(min(_RETRY_SECONDS, max(deadline - time.monotonic(), 0)))
            self._check_initialised()

    # ---- the socket of an actor on this machine ------------------------------------------------

    def _look(self, deadline: float) -> None:
        """Connects to the actor's socket if the actor is on this machine."""
        if time.monotonic() < self._look_time or not self._find_actor():
            return
        try:
            about = _get(self._actor.about.remote(), deadline)
        except ActorDiedError:
            self._actor = None
            return
        except RayActorError:
            return
        if about.is_stopped:
            return
        process = Process.parse(about.process)
        is_useless = about.process == self._process and not self._has_answered
        if process is None or not process.is_local() or is_useless:
            self._look_time = time.monotonic() + _LOOK_SECONDS
            return
        if about.process != self._process:
            self._process, self._has_answered = about.process, False
        self._local = LocalTransport(Path(about.directory), self._client)

    def _ask_locally(
        self, message: Request, block: Block | None, deadline: float
    ) -> Received | None:
        """Sends a request to the socket. If there is no reply, the next one is sent by Ray."""
        assert self._local is not None
        silence = min(deadline, time.monotonic() + _SILENCE_SECONDS)
        received = self._local.request(message, block, silence)
        self._has_answered |= received is not None
        if received is None:
            self._local.close()
            self._local = None
        return received

    # ---- calls of Ray --------------------------------------------------------------------------

    def _call(self, message: Request, block: Block | None) -> list[Any]:
        """Returns the arguments of a call."""
        is_small = block is not None and block.data.size < INLINE_BYTES
        inline = block.data.tobytes() if block is not None and is_small else None
        call: list[Any] = [plain.pack([self._client, to_plain(message), inline])]
        if block is not None and not is_small:
            # The store, which all processes share, has this copy only until the reply: the client
            # keeps the block.
            call.append(ray.put(block.data))
        return call

    def _find_actor(self) -> bool:
        """Looks for the actor by its name. Returns whether there is one."""
        if self._actor is None:
            with contextlib.suppress(ValueError):  # No actor has this name yet.
                self._actor = ray.get_actor(self._name, namespace=NAMESPACE)
        return self._actor is not None

    def _attempt(self, call: list[Any], deadline: float) -> Received | None:
        """Sends a request once; returns the reply, or None if no actor serves at the moment."""
        if not self._find_actor():
            return None
        try:
            sent = self._actor.serve.remote(*call)
            reply: Any = _get(sent, deadline)
            if reply is None:
                return None
            packed, held = reply if isinstance(reply, tuple) else (reply, [])
            large = iter(_get(held, deadline))
        except ActorDiedError:
            self._actor = None  # Another actor may get its name.
            return None
        except (RayActorError, ObjectLostError):
            return None  # Ray restarts the actor.
        message, inline = plain.unpack(packed)
        blocks = [next(large) if x is None else np.frombuffer(x, np.uint8) for x in inline]
        return Received(from_plain(message), blocks)

    def _check_initialised(self) -> None:
        """Raises if Ray was shut down: a call would start another cluster."""
        if _is_over():
            raise VariablesError(
                "Ray was shut down in this process", where=f"ray:{self._name}", hint="connect again"
            )

    def pause(self) -> None:
        time.sleep(_RETRY_SECONDS)

    def close(self) -> None:
        """Drops the reference to the actor. Ray goes on in this process."""
        if self._local is not None:
            self._local.close()
        self._actor = None
