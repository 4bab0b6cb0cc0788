"""A rank is killed: the others raise a typed error in time, none hangs, none is left."""

import functools
import os
import subprocess
import time
import traceback
from types import SimpleNamespace
from typing import Any

import pytest

from stepcache.distributed import pod_events
from stepcache.distributed.agreement import Round
from stepcache.distributed.loss import Loss
from stepcache.errors import RankLostError
from stepcache.jaxcompat.coordination import Unreachable
from tests.cluster.pods import HEARTBEAT_SECONDS, run_pod, succeeded

SCRIPT = """
from stepcache.events import StageStarted
def die(*_):
    say("dying", time.time())
    os.kill(os.getpid(), signal.SIGKILL)
def at_stage(event):
    if isinstance(event, StageStarted) and event.stage == {point!r}:
        die()
if RANK == {victim}:
    sc.recorder.subscribe(at_stage)
@sc.step(carry="state", batch="batch")
def train(state, batch):
    gradient = jax.grad(lambda w: ((batch["x"] @ w - batch["y"]) ** 2).mean())(state["w"])
    return dict(state, w=state["w"] - 0.1 * gradient), jnp.abs(gradient).sum()
generator = np.random.default_rng(RANK)
batch = dict(x=generator.normal(size=(4, 8)).astype(np.float32), y=np.ones(4, np.float32))
try:
    with sc.Session(mesh):
        float(sc.step(lambda x: x.sum(), batch="x")(np.ones(2))) if {point!r} == "beside" else None
        if RANK == {victim} and {point!r} == "beside":
            time.sleep(0.5)
            die()
        state = dict(w=np.zeros(8, np.float32))
        for step in range(200):
            state, loss = train(state, batch)
            if step == 5 and RANK == {victim} and {point!r} == "running":
                die()
            float(loss)
            if step == 5 and RANK == {victim} and {point!r} == "between":
                die()
            if step == 5 and RANK == {victim} and {point!r} == "raising":
                say("dying", time.time())
                raise KeyError("a mistake")
            time.sleep(0.01)
    say("finished")
except sc.RankLostError as error:
    say("lost", error.ranks, time.time())
    say("error", str(error).replace(chr(10), " | "))
"""
CASES = [
    ("beside", 0),
    ("compile", 0),
    ("wait", 3),
    ("running", 1),
    ("between", 0),
    ("raising", 2),
]
MORE = [
    ("beside", 2),
    ("trace", 0),
    ("give", 0),
    ("load", 1),
    ("running", 0),
    ("between", 3),
    ("raising", 0),
]


def losing(directory, point, victim):
    return run_pod(directory, SCRIPT.format(victim=victim, point=point), 4)


def check(ranks, point, victim):
    assert ranks[victim].said("dying"), ranks[victim].output
    assert ranks[victim].code == (1 if point == "raising" else -9)
    died = float(ranks[victim].said("dying")[0])
    raised = silent = 0
    for number, rank in enumerate(ranks):
        if number == victim:
            continue
        # Since then: how long the pod took to start says nothing about it.
        assert rank.seconds - ranks[victim].seconds < HEARTBEAT_SECONDS
        if not rank.said("lost"):
            silent += not says_who_has_gone(rank, victim, killed=point != "raising")
            continue
        raised += 1
        text, _, when = rank.said("lost")[0].rpartition(" ")
        assert text == f"({victim},)", f"rank {number}\n{rank.output}"
        assert float(when) - died < HEARTBEAT_SECONDS / 4, rank.output
        if point == "raising":
            assert "a mistake" in rank.said("error")[0]
        if victim != 0 or point == "raising":
            assert rank.code == 0, f"rank {number}\n{rank.output}"
    if point in ("running", "between"):  # The neighbours: their collectives fail.
        assert raised, [rank.output for rank in ranks]
    assert silent <= 1, [rank.output for rank in ranks]


def says_who_has_gone(rank, victim, *, killed=True):
    """A rank that cannot raise prints the error; one whose coordinator was killed is aborted.

    Returns False for a rank that was aborted before its threads got the CPU to log who has gone.
    """
    if victim == 0 and killed and rank.code == -6:
        assert "Terminating process because the JAX distributed service" in rank.output
        return "rank 0 of the pod is lost" in rank.output
    assert rank.code == 1, f"{rank.code}\n{rank.output}"
    assert f"RankLostError: rank {victim} of the pod is lost" in rank.output, rank.output
    return True


@pytest.mark.sample(every=10)
@pytest.mark.parametrize(("point", "victim"), CASES)
def test_the_others_say_who_has_gone(together, point, victim):
    check(together((point, victim)), point, victim)


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(10))
@pytest.mark.parametrize(("point", "victim"), CASES + MORE)
def test_again_and_again(tmp_path, point, victim, turn):
    check(losing(tmp_path, point, victim), point, victim)


SILENT = """
@sc.step(carry="state", batch="batch")
def train(state, batch):
    return state + batch.sum(), batch.mean()
try:
    with sc.Session(mesh, hang_after=2):
        state = np.ones(3, np.float32)
        for step in range(1000):
            state, mean = train(state, np.ones(4, np.float32))
            float(mean)
            if step == 5 and RANK == {victim}:
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.01)
except sc.RankLostError as error:
    say("lost", error.ranks)
"""


def silent(directory, victim):
    return run_pod(directory, SILENT.format(victim=victim), 3, heartbeat=60, stopped=victim)


@pytest.mark.parametrize(
    ("what", "victim"), [pytest.param("silent", n, marks=pytest.mark.slow) for n in (0, 1)]
)
def test_one_that_falls_silent_is_lost_before_the_heartbeats_end_all(together, what, victim):
    """Where rank 0 is stopped, so is the coordination service: no call of it returns."""
    ranks = together((what, victim))
    for number, rank in enumerate(ranks):
        if number == victim:
            assert rank.code == -9
            continue
        if not rank.said("lost"):
            says_who_has_gone(rank, victim, killed=False)
        assert "does not answer" in rank.output
        assert rank.seconds < 40


ALONE = """
import queue
from stepcache.distributed import failure_detection, pod_events
# As with NCCL, TPUs and other machines: no collective fails, and no process is seen to end.
pod_events._has_ended = lambda pid: False
failure_detection.Watch.suspect = lambda self, error: None
total = sc.step(lambda batch: batch.sum(), batch="batch")
pair = NamedSharding(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",)), P("data"))
both = jax.jit(lambda x: x.sum())
try:
    with sc.Session(mesh, hang_after=3):
        float(total(np.ones(2, np.float32)))
        if RANK < 2:
            ones = jax.make_array_from_process_local_data(pair, np.ones(1, np.float32))
            float(both(ones))
        if RANK == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if RANK == 1:
            float(both(ones))
        try:
            queue.Queue().get(timeout=12)
        except queue.Empty:
            pass
        total(np.ones(4, np.float32))
except sc.RankLostError as error:
    say("lost", error.ranks)
"""


@pytest.mark.parametrize("what", [pytest.param("roll call alone", marks=pytest.mark.slow)])
def test_one_that_was_killed_is_found_out_by_a_roll_call_alone(together, what):
    """Rank 0 waits for its data and calls a step then; rank 1 waits in a collective."""
    ranks = together(what)
    assert ranks[0].said("lost") == ["(2,)"] and ranks[0].code == 0, ranks[0].output
    says_who_has_gone(ranks[1], 2)
    for rank in ranks[:2]:
        assert "no progress for 3 s, and it does not answer" in rank.output, rank.output
        assert rank.seconds < 50


SAVING = """
from pathlib import Path
from stepcache.variables import checkpoints
bump = sc.step(lambda state: jax.tree.map(lambda x: x + 1, state), carry="state")
def die(*_):
    say("dying", time.time())
    os.kill(os.getpid(), signal.SIGKILL)
rename = Path.rename
def between_the_names(self, target):
    rename(self, target)
    if target.name == "old":
        die()
try:
    with sc.Session(mesh):
        value = sc.Variables({{"w": np.zeros((64, 8), np.float32), "n": 0}}, name="value")
        if {restoring}:
            sc.restore("saved", value=value)
            look = value.value
            ends = (float(look["w"].min()), float(look["w"].max()))
            say("restored", value.version, *ends, int(look["n"]))
        else:
            bump(value)
            sc.save("saved", value=value)
            bump(value)
            if RANK == {victim}:
                if RANK == 0 and {point!r} == "between the names":
                    Path.rename = between_the_names
                else:
                    checkpoints._write = die
            sc.save("saved", value=value)
            say("saved")
except sc.RankLostError as error:
    say("lost", error.ranks, time.time())
"""


SAVED = [("between the names", 0), ("writing", 1)]


def saving(directory, point, victim):
    """The ranks of a pod that saves, and of one that then restores."""
    return (
        run_pod(directory, SAVING.format(victim=victim, point=point, restoring=False)),
        run_pod(directory, SAVING.format(victim=9, point="", restoring=True), 1),
    )


@pytest.mark.slow
@pytest.mark.parametrize(("point", "victim"), SAVED)
def test_what_was_saved_is_whole(together, tmp_path, point, victim):
    ranks, restored = together((point, victim))
    if not raises_or_says(ranks, victim):  # Seldom, on a busy machine.
        ranks, restored = saving(tmp_path, point, victim)
        assert raises_or_says(ranks, victim), ranks[1 - victim].output
    version, low, high, count = succeeded(restored)[0].said("restored")[0].split()
    assert low == high == f"{count}.0" and version in ("1", "2")


def raises_or_says(ranks, victim):
    other, died = ranks[1 - victim], float(ranks[victim].said("dying")[0])
    if victim == 0 and not other.said("lost"):
        return says_who_has_gone(other, 0)
    assert other.said("lost"), f"{other.code}\n{other.output}"
    assert float(other.said("lost")[0].rpartition(" ")[2]) - died < HEARTBEAT_SECONDS / 4
    return True


@pytest.mark.slow
@pytest.mark.parametrize("turn", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(7))])
def test_the_coordinator_is_killed_during_steps(tmp_path, turn):
    """JAX aborts the others within a fraction of a second: the error is raised before."""
    ranks = run_pod(tmp_path, SCRIPT.format(victim=0, point="running"), 2)
    assert ranks[1].said("lost") and ranks[1].said("lost")[0].startswith("(0,)"), ranks[1].output


AWAY = """
total = sc.step(lambda batch: batch.sum(), batch="batch")
with sc.Session(mesh):
    float(total(np.ones(2, np.float32)))
    if RANK == 0:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    if RANK == 1:
        time.sleep(60)
    while True:
        sum(range(10_000))
"""


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(4))
def test_the_coordinator_is_killed_while_the_others_are_on_their_own(tmp_path, turn):
    """JAX aborts them; who has gone is in their logs before, whatever their main threads do."""
    ranks = run_pod(tmp_path, AWAY, 3)[1:]
    assert [rank.code for rank in ranks] == [-6, -6]
    says = [says_who_has_gone(rank, 0) for rank in ranks]
    assert any(says), [rank.output for rank in ranks]


MISTAKE = """
import logging
logging.basicConfig(stream=sys.stdout, format="log %(message)s")
from stepcache.distributed import failure_detection
look, failures = failure_detection.Watch._look, []
def fail_twice(self):
    if len(failures) < 2:
        failures.append(1)
        raise KeyError("a mistake")
    look(self)
failure_detection.Watch._look = fail_twice
total = sc.step(lambda batch: batch.sum(), batch="batch")
try:
    with sc.Session(mesh):
        float(total(np.ones(2, np.float32)))
        while RANK and len(failures) < 2:
            time.sleep(0.1)
        if RANK:
            time.sleep(3)
            os.kill(os.getpid(), signal.SIGKILL)
        total(np.ones(4, np.float32))
except sc.RankLostError as error:
    say("lost", error.ranks)
"""


def test_an_exception_does_not_end_the_watch(together):
    """It is logged once, and losses are detected as before."""
    rank = together("a mistake")[0]
    assert rank.said("lost") == ["(1,)"] and rank.code == 0, rank.output
    assert len([line for line in rank.said("log") if "detection of lost processes" in line]) == 1
    assert "KeyError: 'a mistake'" in rank.output


# ---- one ends, and the others wait ---------------------------------------------------------------

ENDING = """
import contextlib, faulthandler
@sc.step(carry="state", batch="batch")
def train(state, batch):
    return state + batch.sum(), batch.mean()
def end():
    say("ending", time.time())
    {ending}
try:
    with sc.Session(mesh):
        state = np.ones(3, np.float32)
        for step in range(10):
            state, mean = train(state, np.ones(4, np.float32))
            float(mean)
            if step == 5 and RANK == {victim}:
                end()
                break
    if RANK == {victim} and {stays}:
        time.sleep(60)
except sc.RankLostError as error:
    say("lost", error.ranks)
    say("error", str(error).replace(chr(10), " | "))
"""
ENDINGS = {
    "leaves": ("pass", "left its session", 1),
    "ends": ("pass", "ended its script", 0),
    "exits": ("sys.exit(3)", "ended by SystemExit: 3", 3),
    "raises": ("raise KeyError('mine')", "ended by KeyError: 'mine'", 1),
    "is interrupted": ("signal.raise_signal(signal.SIGINT)", "ended by KeyboardInterrupt", None),
    "leaves by an error": ("raise KeyError('mine')", "left its session by KeyError", 1),
}


ENDED = [
    *(("leaves", 1), ("ends", 1), ("exits", 2), ("raises", 0)),
    *(("is interrupted", 1), ("leaves", 0), ("ends", 0), ("exits", 0)),
]


def ending(directory, how, victim):
    stays, end = how == "leaves", ENDINGS[how][0]
    script = ENDING.format(victim=victim, ending=end, stays=stays)
    return run_pod(directory, script, 3, limit=60)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "victim"),
    [*ENDED[:2], *(pytest.param(*case, marks=pytest.mark.slow) for case in ENDED[2:])],
)
def test_one_that_ends_is_an_error_of_those_that_wait_for_it(together, tmp_path, how, victim):
    says, code = ENDINGS[how][1:]
    sample = (how, victim) in TOGETHER
    ranks = together((how, victim)) if sample else ending(tmp_path, how, victim)
    ended = ranks[victim]
    assert ended.said("ending"), ended.output
    if how == "exits":
        assert ended.code == code, ended.output
    for number, rank in enumerate(ranks):
        if number == victim:
            continue
        assert rank.code in (0, 1), rank.output
        assert f"rank {victim} of the pod is lost" in rank.output, rank.output
        assert says in rank.output and rank.seconds < 30
        assert "after call 6 of train" in rank.output, rank.output
        waiting = "pod.py:" in rank.output and "train(state, np.ones(4, np.float32))" in rank.output
        # A rank that ends by an error says so itself, and does not ask where the others are.
        assert waiting or how in ("exits", "raises", "is interrupted"), rank.output


HAS_ENDED = """
total = sc.step(lambda batch: batch.sum(), batch="batch")
try:
    with sc.Session(mesh):
        say("total", float(total(np.ones(2, np.float32))))
        if RANK != 1:
            total(np.ones(4, np.float32))
except sc.RankLostError as error:
    say("lost", error.ranks, "ended its script" in str(error))
"""


@pytest.mark.slow
def test_one_that_has_ended_is_not_waited_for_to_agree(together):
    ranks = together("has ended")
    for rank in (ranks[0], ranks[2]):
        assert rank.said("lost") == ["(1,) True"] and rank.seconds < 30, rank.output


WORK_ALONE = """
@sc.step(carry="state", batch="batch")
def train(state, batch):
    return state + batch.sum(), batch.mean()
evaluate = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda _, y: jnp.tanh(y @ y), x).sum())
with sc.Session(mesh, hang_after=3):
    state, mean = train(np.ones(3, np.float32), np.ones(4, np.float32))
    float(mean)
    if RANK == 0:
        started = time.monotonic()
        while time.monotonic() < started + 4:
            float(evaluate(np.ones((300, 300), np.float32)))
        time.sleep(4)
say("finished")
"""


def test_work_of_one_rank_alone_is_no_loss(together):
    """Rank 0 evaluates and saves, in its session, while the others have ended their scripts."""
    for rank in succeeded(together("work alone")):
        assert "finished" in rank.output and "is lost" not in rank.output, rank.output


HANGING = """
import logging
logging.basicConfig(stream=sys.stdout, format="log %(message)s")
@sc.step(carry="state", batch="batch")
def train(state, batch):
    return state + batch.sum(), batch.mean()
def batches():
    for step in range(8):
        if step == 5 and RANK == 2:
            time.sleep(12)
        yield np.ones(4, np.float32)
try:
    with sc.Session(mesh, hang_after=3, on_hang={on_hang!r}):
        state = np.ones(3, np.float32)
        for batch in batches():
            state, mean = train(state, batch)
            float(mean)
    say("finished")
except sc.RankLostError as error:
    say("lost", error.ranks, str(error).replace(chr(10), " | "))
"""


def test_a_hang_is_logged_once_with_where_all_ranks_are(together):
    for rank in succeeded(together("hang, warn")):
        reports = [text for text in rank.said("log") if "no progress" in text]
        (report,) = [text for text in reports if "batches" in text]  # A busy machine hangs, too.
        assert "finished" in rank.output
        assert "ranks 0–1: call 6 of train, pod.py:" in report
        assert "train(state, batch) in <module>" in report
        assert (
            "rank 2: call 5 of train, pod.py:" in report and "time.sleep(12) in batches" in report
        )


def test_a_hang_can_be_an_error(together):
    ranks = together("hang, error")
    assert ranks[1].code == 1
    # While rank 0, before it ends, waits for the others, the end of rank 1 can end its call.
    assert ranks[0].code == 1 or ranks[0].said("lost"), ranks[0].output
    for rank in ranks[:2]:
        assert "finished" not in rank.output
        # A main thread that is in a collective dies of it; one that raises says so itself.
        assert "RankLostError" in rank.output or rank.said("lost")
        assert "the pod is broken: no progress for 3 s" in rank.output


# ---- nothing is lost -----------------------------------------------------------------------------


SHUT_DOWN = """
with sc.Session(mesh):
    say("result", float(sc.step(lambda batch: batch.sum(), batch="batch")(np.ones(2))))
jax.distributed.shutdown()
time.sleep(1.5)
say("still there")
"""


@pytest.mark.slow
def test_a_pod_that_is_shut_down_is_not_lost(together):
    for rank in succeeded(together("shut down")):
        assert "still there" in rank.output and "is lost" not in rank.output, rank.output


NEXT_POD = """
import jax.extend, socket
from pathlib import Path
def total():
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    with sc.Session(mesh):
        return float(sc.step(lambda batch: batch.sum(), batch="batch")(np.ones(2, np.float32)))
say("first", total())
for turn in range(2):
    jax.distributed.shutdown()
    jax.extend.backend.clear_backends()
    place = Path(f"port{turn}")
    if RANK == 0:
        with socket.create_server(("localhost", 0)) as free:
            Path("part").write_text(str(free.getsockname()[1]))
        Path("part").rename(place)
    while not place.exists():
        time.sleep(0.01)
    jax.distributed.initialize(
        f"localhost:{place.read_text()}", COUNT, RANK, initialization_timeout=20,
        heartbeat_timeout_seconds=20, shutdown_timeout_seconds=20,
    )
    say("again", total(), total())
"""


@pytest.mark.slow
def test_the_next_pod_of_a_process(together):
    """`jax.distributed.shutdown`, and a new one, over other devices."""
    for rank in succeeded(together("next pod")):
        assert rank.said("first") == ["4.0"], rank.output
        assert rank.said("again") == ["4.0 4.0"] * 2 and "is lost" not in rank.output, rank.output


SOME_RANKS = """
total = sc.step(lambda batch: batch.sum(), batch="batch")
def wait():
    time.sleep(7)
    return np.float32(0)
zero = jax.ShapeDtypeStruct((), np.float32)
slow = sc.step(lambda batch: batch.sum() + jax.pure_callback(wait, zero), batch="batch")
def mesh_of(*ranks):
    return jax.sharding.Mesh(np.array([jax.devices()[rank] for rank in ranks]), ("data",))
for turn in range(3):
    with sc.Session(mesh):
        say("all", float(total(np.ones(2, np.float32))))
if RANK < 2:
    with sc.Session(mesh_of(0, 1)):
        say("two", float(slow(np.ones(2, np.float32))))
with sc.Session(mesh_of(2)) if RANK == 2 else sc.Session():
    say("one", float(jnp.sum(jnp.ones(2))))
"""


@pytest.mark.slow
def test_meshes_of_some_ranks_and_sessions_one_after_the_other(together):
    """A rank that is in no session, or has left another one, is not waited for."""
    ranks = succeeded(together("some ranks"))
    for number, rank in enumerate(ranks):
        assert rank.said("all") == ["6.0"] * 3 and "is lost" not in rank.output, rank.output
        assert rank.said("two") == (["4.0"] if number < 2 else []) and rank.said("one") == ["2.0"]


CONNECTIONS = """
import socket
from pathlib import Path
if RANK == 0:
    server = socket.create_server(("localhost", 0))
    Path("port.part").write_text(str(server.getsockname()[1]))
    Path("port.part").rename("port")
    mine, _ = server.accept()
if RANK == 1:
    while not Path("port").exists():
        time.sleep(0.01)
    mine = socket.create_connection(("localhost", int(Path("port").read_text())))
try:
    with sc.Session(mesh):
        for step in range(1000):
            float(sc.step(lambda batch: batch.sum(), batch="batch")(np.ones(2, np.float32)))
            if RANK == 2 and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
except sc.RankLostError as error:
    mine.settimeout(10)
    mine.sendall(b"x")
    say("received", mine.recv(1))
    mine.sendall(b"x")
    mine.recv(1)
"""


OWN_ERROR = """
total = sc.step(lambda batch: batch.sum(), batch="batch")
for turn in range(2):
    try:
        with sc.Session(mesh):
            say("total", float(total(np.ones(2, np.float32))))
            if RANK == 1 and turn == 0:
                raise ConnectionResetError("Connection reset by peer")
    except ConnectionResetError:
        say("mine")
"""


def test_an_error_of_a_users_own_connection_is_no_loss(together):
    ranks = succeeded(together("own error"))
    assert [rank.said("total") for rank in ranks] == [["4.0", "4.0"]] * 2, ranks[1].output
    assert [rank.said("mine") for rank in ranks] == [[], [""]]


def test_a_users_own_connections_outlive_a_loss(together):
    for rank in together("connections")[:2]:
        assert rank.said("received") == ["b'x'"], rank.output


# ---- at the same time ----------------------------------------------------------------------------

TOGETHER = {
    **{("silent", victim): functools.partial(silent, victim=victim) for victim in (0, 1)},
    "roll call alone": lambda place: run_pod(place, ALONE, 3, heartbeat=60),
    **{case: functools.partial(losing, point=case[0], victim=case[1]) for case in CASES},
    **{case: functools.partial(saving, point=case[0], victim=case[1]) for case in SAVED},
    "a mistake": lambda place: run_pod(place, MISTAKE),
    "work alone": lambda place: run_pod(place, WORK_ALONE),
    "hang, warn": lambda place: run_pod(place, HANGING.format(on_hang="warn"), 3),
    "hang, error": lambda place: run_pod(place, HANGING.format(on_hang="error"), 3),
    **{case: functools.partial(ending, how=case[0], victim=case[1]) for case in ENDED[:4]},
    "has ended": lambda place: run_pod(place, HAS_ENDED, 3),
    "some ranks": lambda place: run_pod(place, SOME_RANKS, 3),
    "next pod": lambda place: run_pod(place, NEXT_POD),
    "shut down": lambda place: run_pod(place, SHUT_DOWN),
    "own error": lambda place: run_pod(place, OWN_ERROR),
    "connections": lambda place: run_pod(place, CONNECTIONS, 3),
}


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the ends of processes are not seen")
def test_ranks_that_have_ended_are_not_waited_for():
    ended = subprocess.Popen(["true"])
    ended.wait()

    class Service:
        def put(self, name, value): ...
        def listed(self, directory):
            pids = {"here/0": os.getpid(), "here/1": ended.pid}
            return pids if directory == f"{pod_events._PROCESSES}/" else {}

    events: Any = object.__new__(pod_events.PodEvents)
    events._service, events._rank, events._machine = Service(), 0, "here"
    started = time.monotonic()
    events.leave(set(), 20.0)
    assert time.monotonic() - started < 10


def test_a_loss_is_shown_without_the_call_that_failed_of_it():
    nothing: Any = None
    loss = Loss(1, nothing, nothing)
    agreement: Any = object.__new__(Round)
    agreement._watch = SimpleNamespace(loss=loss, lose_service=lambda why: loss.note([0], why))
    with pytest.raises(RankLostError) as raised, agreement._losses_raised():
        raise Unreachable("a process is lost")
    assert "Unreachable" not in "".join(traceback.format_exception(raised.value))
