"""Who waits for the others in one long call of the service heeds signals, losses and its end."""

import functools

import pytest

from tests.cluster.pods import run_pod

# One rank does not come; another one is ended by a signal, or the one that did not come is.
WAITS = """
import signal, threading
step = sc.step(lambda batch: batch.sum(), batch="batch")
def end(number):
    say("signalled", time.monotonic())
    os.kill(os.getpid(), number)
try:
    with sc.Session(mesh, agree_timeout=60):
        step(np.ones(2, np.float32)).block_until_ready()
        if RANK == {victim}:
            threading.Timer(1.0, end, (signal.{signal},)).start()
        if RANK == 1:
            time.sleep(60)
        step(np.ones(3, np.float32))
except BaseException as error:
    say("raised", time.monotonic(), type(error).__name__, str(error).splitlines()[:1])
    raise
"""


CASES = [(2, "SIGINT"), (0, "SIGINT"), (1, "SIGKILL")]
TOGETHER = {
    case: functools.partial(
        run_pod, body=WAITS.format(victim=case[0], signal=case[1]), count=3, limit=40
    )
    for case in CASES
}


@pytest.mark.slow
@pytest.mark.sample(every=3)
@pytest.mark.parametrize(("victim", "signal"), CASES)
def test_a_signal_ends_it_and_the_others_know(together, victim, signal):
    ranks = together((victim, signal))
    when = float(ranks[victim].said("signalled")[0])
    for number, rank in enumerate(ranks):
        assert "Fatal Python error" not in rank.output, rank.output
        if number == victim:
            assert rank.code in (-9, -2, 1, 130), rank.output
            if signal == "SIGINT":
                seconds, name, *_ = rank.said("raised")[0].split()
                assert name == "KeyboardInterrupt" and float(seconds) < when + 1, rank.output
        elif number != 1:  # It sleeps, and is not to be interrupted.
            seconds, name, *_ = rank.said("raised")[0].split()
            assert name == "RankLostError" and float(seconds) < when + 8, rank.output
            assert f"rank {victim} of the pod is lost" in rank.output
            assert rank.code == 1, rank.output
