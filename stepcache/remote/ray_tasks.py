"""Tasks on Ray: a named actor is their coordinator, and owns an actor for each task.

Ray places the actors, starts the coordinator again, ends the tasks with it, and tells a client
where it is, together with the key without which nobody can connect. Messages then go over sockets,
as a call of an actor takes ten times as long. Import this module only where Ray is used.
"""

from __future__ import annotations

import secrets
import socket
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from stepcache.errors import TaskError, VariablesError, first_line
from stepcache.link.processes import Process
from stepcache.remote.local_tasks import free_port
from stepcache.remote.task_group import TaskGroup

try:
    from stepcache.serving.ray_transport import NAMESPACE, cause, initialise, run_actor, start_actor
except VariablesError as error:
    raise TaskError(error.what, where="the target ray:NAME", hint=error.hint) from error

# After `ray_transport`, which raises a helpful error if Ray is not installed.
import ray  # isort: skip
from ray.exceptions import GetTimeoutError, RayActorError, RayError  # isort: skip

_KEY_BYTES = 32
_PLACE_SECONDS = 120.0


class TaskActor:
    """The process of a task."""

    def pod_address(self) -> str:
        """Returns where the processes of a pod can meet on this machine."""
        return f"{ray.util.get_node_ip_address()}:{free_port()}"

    def run(self, arguments: list[str], key: bytes) -> None:
        """Runs the task, until the coordinator ends or this process does."""
        from stepcache.remote import task

        task.main(arguments, key)


class _Launched:
    """The process of a `TaskActor`, as `subprocess.Popen` shows one."""

    def __init__(self, actor: Any):
        self._actor, self._run = actor, None
        self.returncode: int | None = None
        self.why = ""

    def pod_address(self) -> str:
        """Returns where the pod can meet on the machine of this task."""
        try:
            return ray.get(self._actor.pod_address.remote(), timeout=_PLACE_SECONDS)
        except GetTimeoutError:
            raise TaskError(
                f"Ray has not placed a task in {_PLACE_SECONDS:g} s",
                hint="does the cluster have the resources? `ray status` says what it waits for",
            ) from None

    def start(self, arguments: list[str], key: bytes) -> None:
        """Starts the task."""
        self._run = self._actor.run.remote(arguments, key)

    def poll(self) -> int | None:
        """Returns a number if the process has ended, else None."""
        if self.returncode is None and self._run is not None and _are_there(self._run, 0):
            try:
                ray.get(self._run)
            except RayError as error:
                lines = [line.strip() for line in str(error).splitlines() if line.strip()]
                self.why = f" ({first_line(error)}; {lines[-1][:200]})"
            self.returncode = 1
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits until the process has ended; raises `subprocess.TimeoutExpired` if it has not."""
        if self._run is not None and not _are_there(self._run, timeout):
            raise subprocess.TimeoutExpired("a task", timeout or 0)
        return self.poll() or 0

    def kill(self) -> None:
        """Ends the process."""
        ray.kill(self._actor, no_restart=True)


def _are_there(reference: Any, timeout: float | None) -> bool:
    return bool(ray.wait([reference], timeout=timeout)[0])


class RayTasks(TaskGroup):
    """Runs tasks in actors; the arguments are those of `start`.

    Attributes:
        address, key: what clients have to know.
    """

    logs = "the logs of Ray"

    def __init__(self, tasks: int, devices: int, options: dict[str, Any]):
        self._devices, self._options = devices, options
        self.key = secrets.token_bytes(_KEY_BYTES)
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.bind((ray.util.get_node_ip_address(), 0))
        self.address = "{}:{}".format(*listener.getsockname())
        super().__init__(listener, tasks, self.key)

    def _launched(self) -> Sequence[_Launched]:
        count = self.coordinator.tasks
        task_class: Any = ray.remote(TaskActor)
        options = {"num_cpus": 0, "scheduling_strategy": "SPREAD", **self._options}
        launched = [_Launched(task_class.options(**options).remote()) for _ in range(count)]
        pod = launched[0].pod_address()
        for rank, each in enumerate(launched):
            numbers = rank, count, self._devices, pod, self.coordinator.incarnation
            each.start([self.address, *map(str, numbers)], self.key)
        return launched

    def _how_ended(self, task: int, code: int) -> str:
        found = self._processes[task]
        return f"has ended{getattr(found, 'why', '')}"


class CoordinatorActor:
    """The actor that owns the tasks. Made by `start`."""

    def __init__(self, tasks: int, devices: int, options: dict[str, Any]):
        self._size = tasks, devices
        self._tasks = RayTasks(tasks, devices, options)
        self._has_given_up = False  # As the tasks end before they have joined.
        run_actor("the coordinator of tasks", self._run)

    def _run(self) -> None:
        self._tasks.run()
        self._has_given_up = True

    @ray.method(max_task_retries=-1)
    def about(self) -> dict[str, Any]:
        """Returns what clients have to know, as `local_tasks.address` does."""
        tasks, devices = self._size
        return {
            "address": self._tasks.address,
            "key": self._tasks.key,
            "process": str(Process.current()),
            "tasks": tasks,
            "devices": devices,
            "has given up": self._has_given_up,
        }


def start(name: str, tasks: int, devices: int, **options: Any) -> dict[str, Any]:
    """Starts tasks under a name, or finds them.

    They are detached: they run until `stop`, also after this process ends.

    Args:
        name: clients find them as `ray:NAME`.
        tasks: how many tasks.
        devices: how many devices of each, where these are CPUs.
        options: of the actor of each task, as Ray takes them: `num_gpus`, `resources`, ...

    Returns:
        What `find` does.

    Raises:
        TaskError: they cannot be started, or others of this name run.
    """
    initialise()
    actor = start_actor(_actor_name(name), CoordinatorActor, tasks, devices, options)
    try:
        found: dict[str, Any] = ray.get(actor.about.remote())
    except RayActorError as error:
        what = "the tasks cannot be started"
        raise TaskError(what, where=f"ray:{name}", got=cause(error)) from error
    if (found["tasks"], found["devices"]) != (tasks, devices):
        raise TaskError(
            "tasks of this name run already",
            where=f"ray:{name}",
            expected=f"{tasks}x{devices}",
            got=f"{found['tasks']}x{found['devices']}",
            hint=f"end them: stepcache stop ray:{name}",
        )
    return found


def find(name: str) -> dict[str, Any] | None:
    """Returns address, key and process of the coordinator of a name; None for none.

    Raises:
        TaskError: its tasks cannot be started.
    """
    initialise()
    try:
        actor = ray.get_actor(_actor_name(name), namespace=NAMESPACE)
        found: Any = ray.get(actor.about.remote(), timeout=5)
    except (ValueError, RayError):
        return None
    if found["has given up"]:
        raise TaskError(
            "the tasks end before they have joined",
            where=f"ray:{name}",
            hint=f"see the logs of Ray; then `stepcache stop ray:{name}`, and start them again",
        )
    return found


def stop(name: str, timeout: float = 20.0) -> None:
    """Ends the tasks of a name. Their arrays and variables are lost.

    Raises:
        TaskError: there are none.
    """
    initialise()
    try:
        actor = ray.get_actor(_actor_name(name), namespace=NAMESPACE)
    except ValueError:
        raise TaskError("no tasks run under this name", where=f"ray:{name}") from None
    ray.kill(actor, no_restart=True)
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            ray.get_actor(_actor_name(name), namespace=NAMESPACE)
        except ValueError:
            return
        time.sleep(0.05)
    raise TaskError(f"the tasks have not ended in {timeout:g} s", where=f"ray:{name}")


def _actor_name(name: str) -> str:
    return f"tasks/{name}"  # Variables may be served under the same name.
