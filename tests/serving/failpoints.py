"""Runs a script that is killed at a point of its code.

python tests/serving/failpoints.py POINT TIMES SCRIPT [ARGUMENT...]
"""

import functools
import importlib
import os
import runpy
import signal
import sys

# Where the process ends: before or after so many calls of a function.
OF_SERVERS = {
    "before a write is applied": ("stepcache.serving.host:Host._do", "before", 40),
    "after a write is applied": ("stepcache.serving.host:Host._do", "after", 40),
    "before a snapshot": ("stepcache.serving.snapshots:write", "before", 4),
    "in the middle of a snapshot": ("stepcache.serving.snapshots:sync", "before", 30),
    "after a snapshot": ("stepcache.serving.snapshots:write", "after", 4),
    "when writes are known to be saved": ("stepcache.serving.host:Host.is_saved", "before", 4),
}
OF_SOCKETS = {
    "before a reply is sent": ("stepcache.serving.local_server:LocalServer._send", "before", 90),
    "after a reply is sent": ("stepcache.serving.local_server:LocalServer._send", "after", 90),
}
OF_IMAGES = {  # The ray engine has none.
    "in the middle of an image": ("stepcache.serving.images:write_at", "after", 2),
    "after an image": ("stepcache.serving.images:Images.write", "after", 1),
}
OF_CALLS = {  # Of Ray.
    "before a reply is packed": ("stepcache.serving.ray_engine:_packed", "before", 90),
    "after a reply is packed": ("stepcache.serving.ray_engine:_packed", "after", 90),
    "before a block is in the store": ("stepcache.serving.ray_engine:_reference", "before", 30),
}
OF_RESTARTS = {
    "after an epoch": ("stepcache.serving.host_directory:next_epoch", "after", 1),
    "before a client has joined": ("stepcache.serving.host:Host._join", "before", 2),
    "after a client has joined": ("stepcache.serving.host:Host._join", "after", 2),
    "when a write comes again": ("stepcache.serving.host:Host._do", "after", 3),
}
OF_CLIENTS = {
    "before a write is sent": ("stepcache.serving.client:Client._send", "before", 30),
    "after a write is confirmed": ("stepcache.serving.client:Client._send", "after", 30),
    "when a write is kept": ("stepcache.serving.unsaved:Unsaved.add", "after", 30),
    "when a write is forgotten": ("stepcache.serving.unsaved:Unsaved.forget", "before", 20),
}
OF_LOCAL_CLIENTS = {
    "before a request": ("stepcache.serving.local_transport:LocalTransport.request", "before", 90),
}
OF_RAY_CLIENTS = {
    "before a request to an actor": (
        "stepcache.serving.ray_transport:RayTransport.request",
        "before",
        90,
    ),
    "after a request to an actor": (
        "stepcache.serving.ray_transport:RayTransport.request",
        "after",
        90,
    ),
}
POINTS = {
    name: point
    for group in (
        *(OF_SERVERS, OF_SOCKETS, OF_IMAGES, OF_CALLS, OF_RESTARTS),
        *(OF_CLIENTS, OF_LOCAL_CLIENTS, OF_RAY_CLIENTS),
    )
    for name, point in group.items()
}


def arm(point, times):
    """Has the process killed at a point, the `times`-th time."""
    place, when, _ = POINTS[point]
    module, _, path = place.partition(":")
    *outer, name = path.split(".")
    owner = functools.reduce(getattr, outer, importlib.import_module(module))
    function, calls = getattr(owner, name), []

    @functools.wraps(function)
    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == times and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*args, **kwargs)
        if len(calls) == times:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, failing)


if __name__ == "__main__":
    _, point, times, script, *arguments = sys.argv
    arm(point, int(times))
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
