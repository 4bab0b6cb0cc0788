"""Servers of variables, of both engines; and several hosts that share one set."""

import os
import secrets
import subprocess
import sys
from collections import Counter

import pytest

from stepcache.events import Moved, recorder
from tests.serving.servers import LocalHosts, LocalServer, RayCalls, RayServer

# In a process of its own: Ray forks to start its processes, and JAX has threads here. Its log
# monitor and its autoscaler, which no test needs, would take as long to start as an actor.
RAY = """
import sys
from ray.cluster_utils import Cluster
head = {"num_cpus": 2, "object_store_memory": 1 << 30, "include_dashboard": False}
head |= {"include_log_monitor": False, "no_monitor": True}
cluster = Cluster(initialize_head=True, head_node_args=head)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()  # Else Ray would go on telling every `ray.init()` of this address.
"""


SAMPLED = {RayServer: (1, 24), RayCalls: (2, 96), LocalHosts: (3, 12)}  # First, and every.


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """By default, one engine does all that is not slow; the others do samples: they take long.

    Actors of Ray are killed at points of failure alone.
    """
    groups = {}
    for item in items:
        engine = item.callspec.params.get("engine") if hasattr(item, "callspec") else None
        if engine in SAMPLED and not item.get_closest_marker("slow"):
            groups.setdefault((item.path, engine), []).append(item)
    for (_, engine), of_engine in groups.items():
        first, every = SAMPLED[engine]
        first = min(first, len(of_engine) - 1)
        for number, item in enumerate(of_engine):
            kills = "kill" in item.name
            if number % every != first or kills:
                item.add_marker(pytest.mark.slow)


# Ray reads both when it is imported, whichever test does that first.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


@pytest.fixture(scope="package")
def ray_session():
    """One Ray for all tests, and for the processes that they start."""
    with pytest.MonkeyPatch.context() as patch:
        ray = pytest.importorskip("ray", reason="the ray engine needs Ray")
        command, pipe = [sys.executable, "-c", RAY], subprocess.PIPE
        head = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
        )
        patch.setenv("RAY_ADDRESS", head.stdout.readline().strip())
        ray.init(address="auto", log_to_driver=False)
        yield
        ray.shutdown()
        head.communicate()  # It ends when its input does.


@pytest.fixture(
    scope="module",
    params=[LocalServer, RayServer, RayCalls, LocalHosts],
    ids=["local", "ray", "ray calls", "hosts"],
)
def engine(request):
    """The class of its servers. What is of one engine alone overrides this."""
    if issubclass(request.param, RayServer):
        request.getfixturevalue("ray_session")
    return request.param


@pytest.fixture
def server(engine, tmp_path):
    server = engine(tmp_path / "server").start()
    yield server
    server.stop()


@pytest.fixture(scope="package")
def servers_of_samples():
    """A server of each engine that runs only a few tests of each module, by its class."""
    servers = {}
    yield servers
    if LocalHosts in servers:  # Ray ends its own.
        servers[LocalHosts].stop()


@pytest.fixture(scope="module")
def shared_server(engine, servers_of_samples, tmp_path_factory):
    """A server for all tests of a module, or of all modules where they are few."""
    server = servers_of_samples.get(engine)
    if server is None:
        server = engine(tmp_path_factory.mktemp("shared") / "server").start()
    if engine in SAMPLED:
        servers_of_samples[engine] = server
    yield server
    if engine not in SAMPLED:
        server.stop()


@pytest.fixture
def connection(shared_server):
    with shared_server.connect() as connection:
        yield connection


@pytest.fixture
def name(request):
    """A name that no other test gives to variables."""
    return f"{request.path.stem}-{request.node.name}-{os.getpid()}"


@pytest.fixture
def moved():
    """Bytes over each link, of all steps and methods."""
    seen = Counter()

    def note(event):
        if isinstance(event, Moved):
            seen.update(dict(event.link_bytes))

    unsubscribe = recorder.subscribe(note)
    yield seen
    unsubscribe()
