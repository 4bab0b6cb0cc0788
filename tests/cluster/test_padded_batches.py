"""Steps that pad batches, in a pod: each process passes its part, and pads that."""

import numpy as np
import pytest

from tests.cluster.pods import run_pod, succeeded

TRAIN = """
@sc.step(carry="state", batch="batch", pad=sc.Pad("batch", mask="mask", sizes=(4, 8, 16)))
def train(state, batch, mask):
    def loss_of(w):
        errors = (batch["x"] @ w - batch["y"]) ** 2
        return (errors * mask).sum() / mask.sum()
    loss, gradient = jax.value_and_grad(loss_of)(state["w"])
    return dict(w=state["w"] - 0.1 * gradient), loss
state, random = dict(w=np.zeros(3, np.float32)), np.random.default_rng(0)
with sc.Session(mesh):
    for first, second in ((8, 8), (5, 6), (8, 8), (4, 1), (7, 8)):
        x = random.normal(size=(first + second, 3)).astype(np.float32)
        if COUNT > 1:
            x = x[:first] if RANK == 0 else x[first:]
        state, loss = train(state, dict(x=x, y=x.sum(1)))
        say("loss", float(loss))
    batch = dict(x=x[:5], y=x[:5].sum(1))
    train.warm(state, batch)
    say("shape", train.eval_shape(state, batch)[1].shape)
say("weights", *np.asarray(state["w"]))
say("counts", train.stats().misses, train.stats().traces, train.stats().compiles)
"""


def numbers(rank, word):
    return [[float(number) for number in line.split()] for line in rank.said(word)]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_ranks_pad_their_parts(tmp_path, devices):
    """Parts may differ in size: the losses are those of one process."""
    runs = []
    for name, count in (("alone", 1), ("cold", 2), ("warm", 2)):
        (tmp_path / name).mkdir()
        cache = tmp_path / f"cache{count}"
        runs.append(succeeded(run_pod(tmp_path / name, TRAIN, count, cache=cache, devices=devices)))
    (alone,), cold, warm = runs
    for rank in (*cold, *warm):
        for word in ("loss", "weights"):
            np.testing.assert_allclose(numbers(rank, word), numbers(alone, word), rtol=1e-5)
        assert rank.said("shape") == ["()"]
    assert [rank.said("counts") for rank in warm] == [["2 2 0"]] * 2


WHOLE = """
from jax.experimental import multihost_utils
def mean(batch, mask):
    return (batch * mask).sum() / mask.sum()
with sc.Session(mesh):
    # A global array: its size, and so the mask, is that of the whole.
    step = sc.step(mean, batch="batch", pad=sc.Pad("batch", mask="mask"))
    mine = NamedSharding(mesh, P("data"))
    say("mean", step(jax.make_array_from_process_local_data(mine, np.full(3, 1.0 + RANK))))
    # A rule that replicates: each process passes the whole.
with sc.Session(mesh, rules=[("batch", P())]):
    def count_all(batch, n):
        return batch.sum() / n
    counted = sc.step(count_all, batch="batch", pad=sc.Pad("batch", count="n", sizes=(4,)))
    say("replicated", step(np.arange(3.0)), counted(np.array([3.0, 3.0, 3.0, 3.0])))
    masked = sc.step(mean, batch="batch", pad=sc.Pad("batch", mask="mask", sizes=(4,)))
    say("masked", masked(np.arange(3.0)))
# A rule for the mask cannot have each process pass the whole of it.
with sc.Session(mesh, rules=[("mask", P())]):
    say("parts", masked(np.full(3, 1.0 + RANK)))
"""


def test_arguments_that_are_whole(shared_pod, tmp_path):
    for rank in succeeded(shared_pod(2).run(tmp_path, WHOLE)):
        assert rank.said("mean") == ["1.5"] and rank.said("replicated") == ["1.0 3.0"]
        assert rank.said("masked") == ["1.0"] and rank.said("parts") == ["1.5"]


REFUSED = """
def total(batch, mask=None, n=None):
    return batch.sum()
def refused(what, call):
    try:
        call()
    except sc.PaddingError as error:
        say(what, str(error).replace(chr(10), " | "))
with sc.Session(mesh):
    part = np.ones(3 + RANK, np.float32)
    for what in (dict(count="n"), dict(mask="mask", check=True)):
        step = sc.step(total, batch="batch", pad=sc.Pad("batch", **what))
        refused("option", lambda: step(part))
    double = sc.step(lambda batch: 2 * batch, batch="batch", pad=sc.Pad("batch"))
    refused("rows", lambda: double(np.ones(3, np.float32)))
    say("full", double(np.ones(4, np.float32)).shape)
"""


def test_what_needs_the_rows_of_all_processes_is_refused(shared_pod, tmp_path):
    """A number of rows, a second run with other rows, and outputs to cut."""
    for rank in succeeded(shared_pod(2).run(tmp_path, REFUSED)):
        count, check = rank.said("option")
        assert "count= needs the whole axis" in count and "mask=" in count, rank.output
        assert "check= needs all rows in one process" in check, rank.output
        (rows,) = rank.said("rows")
        assert "a row for each padded row" in rows, rank.output
        assert rank.said("full") == ["(8,)"], rank.output
