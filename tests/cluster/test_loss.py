"""A rank is killed: the others raise a typed error in time, none hangs, none is left."""

import functools

import pytest

from tests.cluster.pods import HEARTBEAT_SECONDS, run_pod, succeeded

SCRIPT = """
from stepcache.events import StageStarted
def die(*_, **__):
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
    return run_pod(directory, SCRIPT.format(victim=victim, point=point), 4, heartbeat=10)


def check(ranks, point, victim):
    assert ranks[victim].said("dying"), ranks[victim].output
    assert ranks[victim].code == (1 if point == "raising" else -9)
    died = float(ranks[victim].said("dying")[0])
    raised = 0
    for number, rank in enumerate(ranks):
        if number == victim:
            continue
        # Since then: how long the pod took to start says nothing about it.
        assert rank.seconds - ranks[victim].seconds < HEARTBEAT_SECONDS + 5
        if not rank.said("lost"):
            says_who_has_gone(rank, victim, killed=point != "raising")
            continue
        raised += 1
        text, _, when = rank.said("lost")[0].rpartition(" ")
        assert text == f"({victim},)", f"rank {number}\n{rank.output}"
        assert float(when) - died < 5, rank.output
        if point == "raising":
            assert "a mistake" in rank.said("error")[0]
        if victim != 0 or point == "raising":
            assert rank.code == 0, f"rank {number}\n{rank.output}"
    if point in ("running", "between") and victim:  # The neighbours: their collectives fail.
        assert raised, [rank.output for rank in ranks]


def says_who_has_gone(rank, victim, *, killed=True):
    """A rank that cannot raise prints the error; one whose coordinator was killed is aborted, and
    one that waits for a killed rank without a collective that fails, once JAX misses heartbeats.

    """
    if killed and rank.code == -6:
        assert "Terminating process because the JAX distributed service" in rank.output
        return
    assert rank.code == 1, f"{rank.code}\n{rank.output}"
    assert f"RankLostError: rank {victim} of the pod is lost" in rank.output, rank.output


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
import logging
logging.basicConfig(stream=sys.stdout, format="log %(message)s")
@sc.step(carry="state", batch="batch")
def train(state, batch):
    return state + batch.sum(), batch.mean()
with sc.Session(mesh, hang_after=2):
    state = np.ones(3, np.float32)
    for step in range(1000):
        state, mean = train(state, np.ones(4, np.float32))
        float(mean)
        if step == 5 and RANK == 1:
            say("stopping", time.time())
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.01)
"""


@pytest.mark.slow
def test_one_that_falls_silent_is_lost_by_its_heartbeats(together):
    """JAX ends the others, with a message of its own; how long that takes is JAX's setting."""
    ranks = together("silent")
    for rank in (ranks[0], ranks[2]):
        assert rank.code not in (0, -9) and "stopped sending heartbeats" in rank.output
        assert rank.seconds < 45, rank.output


SAVING = """
from pathlib import Path
from stepcache.variables import checkpoint_steps
import orbax.checkpoint as ocp
from orbax.checkpoint._src.checkpointers import async_checkpointer
bump = sc.step(lambda state: jax.tree.map(lambda x: x + 1, state), carry="state")
def die(*_, **__):
    say("dying", time.time())
    os.kill(os.getpid(), signal.SIGKILL)
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
                if RANK == 0 and {point!r} == "removing":
                    checkpoint_steps._remove = die
                elif {point!r} == "behind":
                    async_checkpointer._background_wait_for_commit_futures = die
                else:
                    ocp.StandardCheckpointer.save = die
            sc.save("saved", value=value)
            say("saved")
except sc.RankLostError as error:
    say("lost", error.ranks, time.time())
"""


SAVED = [("removing", 0), ("writing", 1), ("behind", 1)]


def saving(directory, point, victim):
    """The ranks of a pod that saves, and of one that then restores."""
    return (
        run_pod(directory, SAVING.format(victim=victim, point=point, restoring=False)),
        run_pod(directory, SAVING.format(victim=9, point="", restoring=True), 1),
    )


@pytest.mark.slow
@pytest.mark.parametrize(("point", "victim"), SAVED)
def test_what_was_saved_is_whole(together, point, victim):
    ranks, restored = together((point, victim))
    other, died = ranks[1 - victim], float(ranks[victim].said("dying")[0])
    if victim == 0 and not other.said("lost"):
        says_who_has_gone(other, 0)
    elif point == "behind":  # Both are in orbax's barrier, which JAX's heartbeats end.
        assert other.code not in (0, -9) and "heartbeat" in other.output, other.output
    else:
        assert other.said("lost"), f"{other.code}\n{other.output}"
        assert float(other.said("lost")[0].rpartition(" ")[2]) - died < 5
    version, low, high, count = succeeded(restored)[0].said("restored")[0].split()
    assert low == high == f"{count}.0" and version in ("1", "2")


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(4))
def test_the_coordinator_is_killed_during_steps(tmp_path, turn):
    """JAX aborts the others within a fraction of a second, or the error is raised before."""
    ranks = run_pod(tmp_path, SCRIPT.format(victim=0, point="running"), 3)
    for rank in ranks[1:]:
        if rank.said("lost"):
            assert rank.said("lost")[0].startswith("(0,)"), rank.output
        else:
            says_who_has_gone(rank, 0)


MISTAKE = """
import logging
logging.basicConfig(stream=sys.stdout, format="log %(message)s")
from stepcache.pods import watch
look, failures = watch.Watch._look, []
watch.TICK_SECONDS = 0.5
def fail_twice(self):
    if len(failures) < 2:
        failures.append(1)
        raise KeyError("a mistake")
    look(self)
watch.Watch._look = fail_twice
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
        waiting = "waits at pod.py:" in rank.output
        # A rank that ends by an error says so itself.
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


FIRST_TO_LEAVE = """
from stepcache.events import StageStarted
from stepcache.programs.together import Together
def compiling(event):
    if isinstance(event, StageStarted) and event.stage == "compile":
        time.sleep(6)
if RANK == 0:
    sc.recorder.subscribe(compiling)
take = Together.take
def take_slowly(*args):
    taken = take(*args)
    time.sleep(6)
    return taken
Together.take = take_slowly if RANK else take
total = sc.step(lambda batch: batch.sum(), batch="batch")
with sc.Session(mesh):
    total.warm(np.ones(2, np.float32))
say("left", time.time())
time.sleep(10 if RANK == 0 else 0)
"""


def test_one_that_has_done_its_part_of_a_round_may_leave_it_first(together):
    """Rank 0 compiles for long, gives the program, and leaves; rank 1 is still taking it."""
    first, second = succeeded(together("first to leave"))
    assert float(second.said("left")[0]) > float(first.said("left")[0]) + 5
    assert "is lost" not in first.output + second.output


WORK_ALONE = """
@sc.step(carry="state", batch="batch")
def train(state, batch):
    return state + batch.sum(), batch.mean()
evaluate = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda _, y: jnp.tanh(y @ y), x).sum())
def wait(x):
    time.sleep(8)
    return x
alone = jax.jit(lambda x: jax.pure_callback(wait, jax.ShapeDtypeStruct((), np.float32), x))
with sc.Session(mesh, hang_after=3):
    state, mean = train(np.ones(3, np.float32), np.ones(4, np.float32))
    float(mean)
    if RANK == 0:
        started = time.monotonic()
        while time.monotonic() < started + 4:
            float(evaluate(np.ones((300, 300), np.float32)))
        float(alone(np.float32(1)))
        time.sleep(4)
say("finished")
"""


def test_work_of_one_rank_alone_is_no_loss(together):
    """Rank 0 evaluates and saves, in its session, while the others have ended their scripts."""
    for rank in succeeded(together("work alone")):
        assert "finished" in rank.output and "is lost" not in rank.output, rank.output


HANGING = """
import logging
from stepcache.pods import watch
watch.TICK_SECONDS = 1.0
logging.basicConfig(stream=sys.stdout, format="log %(message)s")
@sc.step(carry="state", batch="batch")
def train(state, batch):
    return state + batch.sum(), batch.mean()
def batches():
    for step in range(8):
        if step == 5 and RANK == 2:
            time.sleep(16)
        yield np.ones(4, np.float32)
with sc.Session(mesh, hang_after=3):
    state = np.ones(3, np.float32)
    for batch in batches():
        state, mean = train(state, batch)
        float(mean)
say("finished")
"""


def test_a_hang_is_logged_once_with_where_all_ranks_are(together):
    ranks = succeeded(together("hang"))
    for number, rank in enumerate(ranks):
        assert rank.output.count(f"rank {number} is here:") == 1 and "finished" in rank.output
        stack = rank.output.partition("is here:")[2].partition("The ranks are here")[0]
        assert ("in batches" in stack) == (number == 2) and "MainThread" in stack
        assert ("The ranks are here:" in rank.output) == (number == 0)
    table = ranks[0].output.partition("The ranks are here:")[2].splitlines()[1:3]
    assert "ranks 0–1: call 6 of train, pod.py:" in table[0], table
    assert "rank 2: call 5 of train, pod.py:" in table[1] and "time.sleep(16)" in table[1], table


CAUGHT = """
@sc.step(carry="state", batch="batch")
def train(state, batch):
    return state + batch.sum(), batch.mean()
try:
    with sc.Session(mesh):
        state = np.ones(3, np.float32)
        for step in range(20):
            state, mean = train(state, np.ones(4, np.float32))
            float(mean)
            if RANK == {victim} and step == 5:
                raise ValueError("a bad batch")
except ValueError:
    say("ending", time.time())
"""


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_one_that_catches_its_error_and_simply_ends_lets_the_pod_end(together, victim):
    ranks = together(("caught", victim))
    started = float(ranks[victim].said("ending")[0])
    for number, rank in enumerate(ranks):
        assert rank.ended - started < 15, rank.output
        if number != victim:
            assert rank.code == 1 and f"rank {victim} of the pod is lost" in rank.output
            assert "ValueError: a bad batch" in rank.output or "ended its script" in rank.output


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
    "silent": lambda place: run_pod(place, SILENT, 3, heartbeat=10, stopped=1),
    **{case: functools.partial(losing, point=case[0], victim=case[1]) for case in CASES},
    **{case: functools.partial(saving, point=case[0], victim=case[1]) for case in SAVED},
    "a mistake": lambda place: run_pod(place, MISTAKE),
    "first to leave": lambda place: run_pod(place, FIRST_TO_LEAVE),
    "work alone": lambda place: run_pod(place, WORK_ALONE),
    "hang": lambda place: run_pod(place, HANGING, 3),
    **{
        ("caught", victim): functools.partial(run_pod, body=CAUGHT.format(victim=victim), count=3)
        for victim in (0, 1)
    },
    **{case: functools.partial(ending, how=case[0], victim=case[1]) for case in ENDED[:4]},
    "has ended": lambda place: run_pod(place, HAS_ENDED, 3),
    "some ranks": lambda place: run_pod(place, SOME_RANKS, 3),
    "next pod": lambda place: run_pod(place, NEXT_POD),
    "shut down": lambda place: run_pod(place, SHUT_DOWN),
    "own error": lambda place: run_pod(place, OWN_ERROR),
    "connections": lambda place: run_pod(place, CONNECTIONS, 3),
}
