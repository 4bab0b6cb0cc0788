"""The network between the ranks of a pod is cut, loses packets, or is slow."""

import pytest

from tests.cluster.network import Network, why_not
from tests.cluster.pods import run_pod, succeeded

COUNT, STEPS, CUT_AT = 3, 30, 10
SECONDS_TO_NOTICE = 60
SCRIPT = """
@sc.step(carry="state", batch="batch")
def train(state, batch):
    return {{**state, "w": state["w"] + batch.sum(), "n": state["n"] + 1}}, batch.mean()
try:
    with sc.Session(mesh, hang_after={hang_after}, agree_timeout=20):
        state = sc.Variables({{"w": np.zeros((16, 8), np.float32), "n": np.int32(0)}}, name="state")
        for step in range({steps}):
            if RANK == {victim} and step == {cut_at}:
                open("cut", "w").close()
            float(train(state, np.ones(3, np.float32))[1])
            time.sleep(0.05)
        value = state.value
        say("finished", float(value["w"].min()), float(value["w"].max()), int(value["n"]))
except (sc.RankLostError, sc.AgreementError) as error:
    say("error", type(error).__name__, str(error).replace(chr(10), " | "))
    raise
"""
OTHERS = {rank: [each for each in range(COUNT) if each != rank] for rank in range(COUNT)}


@pytest.fixture(scope="module", autouse=True)
def needs_namespaces():
    if reason := why_not():
        pytest.skip(reason)


def run(directory, network, *, victim, hang_after, steps=STEPS):
    script = SCRIPT.format(victim=victim, hang_after=hang_after, steps=steps, cut_at=CUT_AT)
    with network:
        ranks = run_pod(directory, script, COUNT, limit=120, heartbeat=10, network=network)
    assert network.carried > 100, "the ranks have not talked through this network"
    return ranks


def assert_all_end(ranks):
    """All end, in time and with an error."""
    for number, rank in enumerate(ranks):
        assert rank.code != 0, f"rank {number} has not noticed\n{rank.output}"
        assert "finished" not in rank.output
        assert rank.seconds < SECONDS_TO_NOTICE, f"rank {number}\n{rank.output}"


@pytest.mark.slow
@pytest.mark.parametrize("victim", range(COUNT))
def test_a_rank_is_cut_off(tmp_path, victim):
    links = {link for other in OTHERS[victim] for link in ((victim, other), (other, victim))}
    ranks = run(tmp_path, Network(tmp_path, COUNT, cut=links), victim=victim, hang_after=4)
    assert_all_end(ranks)


@pytest.mark.slow
@pytest.mark.parametrize("sends", [True, False])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_is_cut_off_in_one_direction(tmp_path, victim, sends):
    links = {(other, victim) if sends else (victim, other) for other in OTHERS[victim]}
    ranks = run(tmp_path, Network(tmp_path, COUNT, cut=links), victim=victim, hang_after=4)
    assert_all_end(ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "steps"),
    [({"loss": 0.2}, STEPS), ({"delay_seconds": 0.5}, 3)],  # A step is some ten seconds of delays.
    ids=["20 % are lost", "500 ms"],
)
def test_a_bad_network_is_slow_and_nothing_else(tmp_path, how, steps):
    network = Network(tmp_path, COUNT, **how)
    ranks = run(tmp_path, network, victim=None, hang_after=60, steps=steps)
    for rank in succeeded(ranks):
        assert "waiting for ranks  to agree" not in rank.output, "only the answer is late"
        assert rank.said("finished") == [f"{9.0 * steps} {9.0 * steps} {steps}"]
