"""A rank is killed: the others raise a typed error in time, none hangs, none is left."""

import pytest

from tests.cluster.pods import HEARTBEAT_SECONDS, run_pod

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
@sc.step(carry="state")
def train(state, batch):
    gradient = jax.grad(lambda w: ((batch["x"] @ w - batch["y"]) ** 2).mean())(state["w"])
    return dict(state, w=state["w"] - 0.1 * gradient), jnp.abs(gradient).sum()
generator = np.random.default_rng(RANK)
batch = dict(x=generator.normal(size=(4, 8)).astype(np.float32), y=np.ones(4, np.float32))
try:
    with sc.Session(mesh):
        float(sc.step(lambda x: x.sum())(np.ones(2))) if {point!r} == "beside" else None
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
