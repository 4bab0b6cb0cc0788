"""One of a pod's processes ends, anyhow and at any time: one law for all that are left."""

import functools
import random

import pytest

from tests.cluster.pods import run_pod, succeeded

COUNT = 3
WAYS = ("KILL", "STOP", "TERM", "ABRT", "INT", "exit", "raise", "end")
SCRIPT = """
import faulthandler, threading
faulthandler.dump_traceback_later(60)  # A rank that hangs says where.
def end():
    say("ending")
    if {way!r} in ("KILL", "STOP", "TERM", "ABRT", "INT"):
        os.kill(os.getpid(), getattr(signal, "SIG" + {way!r}))
if RANK == {victim} and {way!r} not in ("exit", "raise", "end"):
    timer = threading.Timer({seconds}, end)
    timer.daemon = True
    timer.start()
@sc.step(carry="state", batch="batch")
def train(state, batch):
    return {{**state, "w": state["w"] + batch.sum(), "n": state["n"] + 1}}, batch.mean()
try:
    with sc.Session(mesh, hang_after=4, agree_timeout=10):
        state = sc.Variables({{"w": np.zeros((16, 8), np.float32), "n": np.int32(0)}}, name="state")
        for step in range(40):
            mean = train(state, np.ones(3, np.float32))[1]
            float(mean)
            if step % 10 == 9:
                sc.save("saved", value=state)
            if RANK == {victim} and step == {step}:
                if {way!r} == "exit":
                    sys.exit(3)
                if {way!r} == "raise":
                    raise KeyError("mine")
                if {way!r} == "end":
                    break
            time.sleep(0.02)
    say("finished")
except (sc.RankLostError, sc.AgreementError) as error:
    say("error", type(error).__name__, str(error).replace(chr(10), " | "))
    raise
"""
RESTORING = """
import contextlib
with sc.Session(mesh):
    state = sc.Variables({"w": np.zeros((16, 8), np.float32), "n": np.int32(0)}, name="state")
    with contextlib.suppress(FileNotFoundError):  # The first save was interrupted, or never made.
        sc.restore("saved", value=state)
    value = state.value
    say("restored", float(value["w"].min()), float(value["w"].max()), int(value["n"]))
"""


def check(directory, way, seed):
    """Who is left raises an error that names who has gone, or exits with an error, in time."""
    chance = random.Random(seed)
    victim, step, seconds = chance.randrange(COUNT), chance.randrange(40), chance.uniform(0, 3)
    script = SCRIPT.format(way=way, victim=victim, step=step, seconds=seconds)
    stopped = victim if way == "STOP" else None
    ranks = run_pod(directory, script, COUNT, limit=80, stopped=stopped)
    for number, rank in enumerate(ranks):
        if number == victim:
            continue
        if rank.said("error"):
            assert f"rank {victim}" in rank.said("error")[0], rank.output
        elif rank.code == 0:
            assert "finished" in rank.output, rank.output
    (alone,) = succeeded(run_pod(directory, RESTORING, 1))
    low, high, steps = alone.said("restored")[0].split()
    assert low == high == f"{9.0 * int(steps)}" and int(steps) % 10 == 0, alone.output


TOGETHER = {way: functools.partial(check, way=way, seed=1) for way in ("STOP", "raise", "end")}


@pytest.mark.slow
@pytest.mark.sample(every=3)
@pytest.mark.parametrize("way", TOGETHER)
def test_a_sample(together, way):
    together(way)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(38))
@pytest.mark.parametrize("way", WAYS)
def test_in_full(tmp_path, way, seed):
    check(tmp_path, way, seed)
