"""A client that leaves: what it has started runs to its end, and then nothing of it is left."""

import contextlib
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stepcache as sc
from stepcache.remote.messages import Kind, Message, decode, packed
from stepcache.remote.task import Task
from tests.remote.processes import resident_bytes, tasks_of, wait_until
from tests.remote.test_failing_steps import Replies

X = np.ones((128, 128), np.float32)  # Through shared memory.
TURNS = np.int32(200)  # Some tenths of a second.
SLOW_RUNS, LARGE_OUTPUTS = 20, 4
LARGE_BYTES = 40 << 20  # The allocator gives so much back to the system as soon as it is freed.
ROOT = str(Path(__file__).parents[2])


@sc.step(carry="state")
def add_slowly(state, x, turns):
    x = jax.lax.fori_loop(0, turns, lambda _, x: jnp.tanh(x @ x), x)
    return state + 1 + 0 * x.sum(), x


@sc.step
def large(x):
    return jnp.full(LARGE_BYTES // 4, x)


@sc.step(carry="state")
def add(state, x):
    return state + x, state


CLIENT = """
import sys
sys.path.insert(0, {root!r})
import numpy as np
import stepcache as sc
from tests.remote.test_leaving import LARGE_OUTPUTS, SLOW_RUNS, TURNS, X, add_slowly, large
session = sc.Session(target="local:{directory}", name={name!r})
with session:
    connection = session._scope.target.connection
    state = sc.Variables(np.float32(0), name="state")
    outputs = [large(np.float32(n)) for n in range(LARGE_OUTPUTS)]
    outputs[-1].block_until_ready()
    print("holds", flush=True)
    sys.stdin.readline()
    for _ in range(SLOW_RUNS):
        outputs.append(add_slowly(state, X, TURNS)[1])
    connection.status()  # Once it is answered, the coordinator has passed all of them on.
    print(connection.runs - connection.done, flush=True)
    sys.stdin.readline()
session.close()
print("closed", flush=True)
sys.stdin.readline()
"""


def shared_files(pid):
    """How many files with blocks of shared memory a process has opened."""
    count = 0
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # It may be closed meanwhile.
            count += "memfd:stepcache" in str(each.readlink())
    return count


def owners_of(session):
    """Whose variables the tasks hold."""
    return {owner for owner, *_ in session._scope.target.connection.status()["variables"]}


@pytest.mark.sample
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="looks into /proc")
@pytest.mark.parametrize("how", ["closes", "killed"])
@pytest.mark.parametrize("size", ["1x2", "2x1"])
@pytest.mark.parametrize("is_named", [False, True])
def test_its_runs_end_and_nothing_is_left_while_others_go_on(running, how, size, is_named):
    served, name = running(size), f"leaving-{how}" if is_named else None
    with served.session(deadline=60) as session:
        status = session._scope.target.connection.status
        state = sc.Variables(np.float32(0), name="state")
        add_slowly.warm(state, X, TURNS)
        large.warm(np.float32(0))
        add(state, np.float32(1))
        assert state.value == 1
        (coordinator, tasks), owners_before = tasks_of(session), owners_of(session)
        bytes_before = {pid: resident_bytes(pid) for pid in tasks}
        files_before = {pid: shared_files(pid) for pid in (coordinator, *tasks)}
        text = CLIENT.format(root=ROOT, directory=served.directory, name=name)
        command = [sys.executable, "-c", text]
        client = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, bufsize=0)
        assert client.stdin is not None and client.stdout is not None
        assert client.stdout.readline() == b"holds\n"
        for pid, before in bytes_before.items():
            assert resident_bytes(pid) > before + LARGE_OUTPUTS * LARGE_BYTES // 2
        client.stdin.write(b"\n")
        assert int(client.stdout.readline()) >= SLOW_RUNS // 2  # So many are started, not done.
        assert shared_files(coordinator) > files_before[coordinator]
        if how == "closes":
            client.stdin.write(b"\n")
            assert client.stdout.readline() == b"closed\n"
        else:
            client.kill()
            client.wait()
        add(state, np.float32(1))
        assert state.value == 2
        wait_until(lambda: len(status()["clients"]) == 1)
        assert owners_of(session) - owners_before == ({name} if name else set())
        for pid, before in bytes_before.items():
            wait_until(lambda: resident_bytes(pid) < before + LARGE_BYTES)  # noqa: B023
        for pid, before in files_before.items():
            wait_until(lambda: shared_files(pid) <= before)  # noqa: B023
        assert tasks_of(session) == (coordinator, tasks)
        add(state, np.float32(1))
        assert state.value == 3
        client.communicate()
    session.close()
    if name is not None:
        with served.session(name=name) as again:
            assert sc.Variables(np.float32(0), name="state").value == SLOW_RUNS
        again.close()


class FailingRun:
    """Stands for an output of a run that fails while it is waited for."""

    def is_deleted(self):
        return False

    def is_ready(self):
        return False

    def block_until_ready(self):
        raise RuntimeError("no memory")


def test_its_runs_are_reported_before_it_is_forgotten():
    """Else nobody would notice one that fails on this task alone, and the others would hang."""
    replies = Replies()
    task = Task(replies, 1, shares=False)  # type: ignore[arg-type]
    task._pending.extend([(7, 1, [jnp.ones(1)]), (5, 1, [jnp.ones(1)]), (7, 2, [FailingRun()])])
    task._pending.append((5, 2, [jnp.ones(1)]))
    task._carry_out(Message(Kind.DROP, 7, 1, body=packed(variables=[])))
    found = []
    while (message := decode(replies.received)) is not None:
        found.append((message.kind, message.client, message.number))
    done = [(Kind.DONE, 7, 1), (Kind.DONE, 5, 1), (Kind.FAILED, 7, 2), (Kind.DONE, 7, 2)]
    assert found == [*done, (Kind.DROP, 7, 0)]
    assert [row[:2] for row in task._pending] == [(5, 2)]
