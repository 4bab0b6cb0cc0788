"""A rank is killed: the others raise a typed error in time, none hangs, none is left."""

import pytest

from tests.cluster import pods
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


def check(directory, point, victim, count=4):
    ranks = run_pod(directory, SCRIPT.format(victim=victim, point=point), count)
    assert ranks[victim].said("dying"), ranks[victim].output
    died = float(ranks[victim].said("dying")[0])
    for number, rank in enumerate(ranks):
        if number == victim:
            assert rank.code == (1 if point == "raising" else -9)
            continue
        assert rank.said("lost"), f"rank {number}: {rank.code}\n{rank.output}"
        text, _, when = rank.said("lost")[0].rpartition(" ")
        assert text == f"({victim},)", f"rank {number}\n{rank.output}"
        assert float(when) - died < HEARTBEAT_SECONDS / 4, rank.output
        assert rank.code == 0, f"rank {number}\n{rank.output}"
        assert rank.seconds < HEARTBEAT_SECONDS
        if point == "raising":
            assert "a mistake" in rank.said("error")[0]


@pytest.mark.parametrize(("point", "victim"), CASES)
def test_the_others_say_who_has_gone(tmp_path, point, victim):
    check(tmp_path, point, victim)


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(10))
@pytest.mark.parametrize(("point", "victim"), CASES + MORE)
def test_again_and_again(tmp_path, point, victim, turn):
    check(tmp_path, point, victim)


SILENT = """
from pathlib import Path
@sc.step(carry="state", batch="batch")
def train(state, batch):
    return state + batch.sum(), batch.mean()
if RANK == {victim}:
    Path("victim").write_text(str(os.getpid()))
try:
    with sc.Session(mesh):
        state = np.ones(3, np.float32)
        for step in range(1000):
            state, mean = train(state, np.ones(4, np.float32))
            float(mean)
            if step == 5 and RANK == {victim}:
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.01)
except sc.RankLostError as error:
    say("lost", error.ranks, str(error).replace(chr(10), " | "))
    if RANK == 2:
        time.sleep(1)  # Until all have said so.
        os.kill(int(Path("victim").read_text()), signal.SIGKILL)
"""


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_one_that_falls_silent_is_an_error_after_the_heartbeats(tmp_path, monkeypatch, victim):
    monkeypatch.setattr(pods, "HEARTBEAT_SECONDS", 10)
    ranks = run_pod(tmp_path, SILENT.format(victim=victim), 3)
    for number, rank in enumerate(ranks):
        if number == victim:
            assert rank.code == -9
            continue
        assert "() a process of the pod has fallen silent" in rank.said("lost")[0], rank.output
        assert rank.code == 0, rank.output
        assert 10 < rank.seconds < 30


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
            value.restore("saved")
            look = value.value
            ends = (float(look["w"].min()), float(look["w"].max()))
            say("restored", value.version, *ends, int(look["n"]))
        else:
            bump(value)
            value.save("saved")
            bump(value)
            if RANK == {victim}:
                if RANK == 0 and {point!r} == "between the names":
                    Path.rename = between_the_names
                else:
                    checkpoints._write = die
            value.save("saved")
            say("saved")
except sc.RankLostError as error:
    say("lost", error.ranks, time.time())
"""


@pytest.mark.parametrize(("point", "victim"), [("between the names", 0), ("writing", 1)])
def test_what_was_saved_is_whole(tmp_path, point, victim):
    script = SAVING.format(victim=victim, point=point, restoring=False)
    ranks = run_pod(tmp_path, script, 2)
    died = float(ranks[victim].said("dying")[0])
    other = ranks[1 - victim]
    assert other.said("lost"), f"{other.code}\n{other.output}"
    assert float(other.said("lost")[0].rpartition(" ")[2]) - died < HEARTBEAT_SECONDS / 4
    assert other.code == 0, other.output
    restored = succeeded(run_pod(tmp_path, SAVING.format(victim=9, point="", restoring=True), 1))
    version, low, high, count = restored[0].said("restored")[0].split()
    assert low == high == f"{count}.0" and version in ("1", "2")


def test_a_pod_that_is_shut_down_is_not_lost(tmp_path):
    script = """
    with sc.Session(mesh):
        say("result", float(sc.step(lambda batch: batch.sum(), batch="batch")(np.ones(2))))
    jax.distributed.shutdown()
    time.sleep(1.5)
    say("still there")
    """
    for rank in succeeded(run_pod(tmp_path, script, 2)):
        assert "still there" in rank.output and "gone" not in rank.output, rank.output
