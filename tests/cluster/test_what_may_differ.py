"""Scripts whose ranks differ in what does not change the program run as they do on one rank."""

import pytest

from tests.cluster.pods import run_pod

# Each defines `make()`: a function that runs one step and returns its loss.
SCRIPTS = {
    "argparse": """
import argparse
def make():
    parser = argparse.ArgumentParser()
    parser.add_argument("--process_id", type=int)
    parser.add_argument("--lr", type=float, default=0.5)
    args = parser.parse_args(["--process_id", str(RANK)])
    @sc.step(carry="state", batch="batch")
    def train(state, batch):
        if args.process_id == 0:
            print("tracing", flush=True)
        return state + args.lr * batch.mean(), batch.mean()
    return train
""",
    "trainer": """
class Trainer:
    def __init__(self, rank):
        self.rank, self.lr = rank, 0.5
        self.step = sc.step(self.train, carry="state", batch="batch")
    def train(self, state, batch):
        if self.rank == 0:
            print("tracing", flush=True)
        return state + self.lr * batch.mean(), batch.mean()
def make():
    return Trainer(RANK).step
""",
    "static self": """
class Trainer:
    def __init__(self, rank):
        self.rank, self.lr = rank, 0.5
    @functools.partial(sc.step, static_argnames="self", carry="state", batch="batch")
    def train(self, state, batch):
        if self.rank == 0:
            print("tracing", flush=True)
        return state + self.lr * batch.mean(), batch.mean()
def make():
    return Trainer(RANK).train
""",
    "dataclass": """
@dataclasses.dataclass(frozen=True)
class Config:
    rank: int
    lr: float = 0.5
config = Config(RANK)
def log(config, what):
    if config.rank == 0:
        print(what, flush=True)
def make():
    @sc.step(carry="state", batch="batch")
    def train(state, batch):
        log(config, "tracing")
        return state + config.lr * batch.mean(), batch.mean()
    return train
""",
    "static dataclass": """
@dataclasses.dataclass(frozen=True)
class Config:
    rank: int
    lr: float = 0.5
def make():
    @sc.step(carry="state", batch="batch", static_argnames="config")
    def train(state, batch, config):
        print(config.rank, flush=True)
        return state + config.lr * batch.mean(), batch.mean()
    return lambda state, batch: train(state, batch, config=Config(RANK))
""",
    "dataclass in the state": """
@functools.partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["rank"])
@dataclasses.dataclass
class State:
    w: object
    rank: int
    def __float__(self):
        return float(self.w)
def make():
    @sc.step(carry="state", batch="batch")
    def train(state, batch):
        if state.rank == 0:
            print("tracing", flush=True)
        return State(state.w + 0.5 * batch.mean(), state.rank), batch.mean()
    return train
def start():
    return State(np.zeros((), np.float32), RANK)
""",
    "started": """
STARTED = time.time() + RANK
def make():
    @sc.step(carry="state", batch="batch")
    def train(state, batch):
        print(f"traced in a run of {STARTED}", flush=True)
        return state + 0.5 * batch.mean(), batch.mean()
    return train
""",
    "logger": """
import logging
logger = logging.getLogger(f"train.{RANK}")
logger.setLevel(logging.INFO if RANK == 0 else logging.ERROR)
if RANK == 0:
    logger.addHandler(logging.StreamHandler(sys.stdout))
def make():
    @sc.step(carry="state", batch="batch")
    def train(state, batch):
        logger.info("tracing %s", batch)
        return state + 0.5 * batch.mean(), batch.mean()
    return train
""",
    "print": """
def make():
    @sc.step(carry="state", batch="batch")
    def train(state, batch):
        if RANK == 0:
            print("tracing", flush=True)
        return state + 0.5 * batch.mean(), batch.mean()
    return train
""",
    "random": """
import random
AUGMENT = False
def make():
    @sc.step(carry="state", batch="batch")
    def train(state, batch):
        if AUGMENT:
            batch = batch * random.random()
        return state + 0.5 * batch.mean(), batch.mean()
    return train
random.seed(RANK)
""",
    "sets": """
KINDS = {"mean", "sum", "max", "min", "median", "std"}
NAMES = list(KINDS)
def make():
    @sc.step(carry="state", batch="batch", static_argnames="kind")
    def train(state, batch, kind="mean"):
        assert kind in {"mean", "sum", "max", "min", "median"} and kind in NAMES
        scales = {name: 0.5 for name in KINDS}
        return state + scales[kind] * getattr(batch, kind)(), batch.mean()
    return train
""",
    "file and variable": """
path = f"rank{RANK}.cfg"
with open(path, "w") as file:
    file.write(f"# of rank {RANK}")
os.environ["NODE"] = str(RANK)
def make():
    @sc.step(carry="state", batch="batch")
    def train(state, batch):
        with open(path) as file:
            text = file.read()
        if os.environ["NODE"] == "0":
            print("tracing", text, flush=True)
        return state + 0.5 * batch.mean(), batch.mean()
    return train
""",
}
MODULE = """
import dataclasses, functools, os, sys, time
import jax, jax.numpy as jnp, numpy as np
import stepcache as sc
from __main__ import RANK, mesh, say
def start():
    return np.zeros((), np.float32)
{script}
try:
    with sc.Session(mesh, agree_timeout=10):
        train, state = make(), start()
        for number in range(10):
            state, loss = train(state, np.full(2 + {number}, RANK, np.float32))
        say("ran", {name!r}, float(state), float(loss))
except sc.StepCacheError as error:
    say("failed", {name!r}, str(error).replace(chr(10), " | "))
"""


@pytest.fixture(
    scope="module",
    params=[
        "cache{rank}",
        pytest.param("off", marks=pytest.mark.slow),
        pytest.param("cache", marks=pytest.mark.slow),
    ],
)
def ranks(request, tmp_path_factory):
    """Two runs of one pod that has run every script."""
    directory = tmp_path_factory.mktemp("scripts")
    for number, (name, script) in enumerate(SCRIPTS.items()):
        text = MODULE.replace("{script}", script).replace("{number}", str(number))
        text = text.replace("{name!r}", repr(name.replace(" ", "-")))
        (directory / f"script{number}.py").write_text(text, encoding="utf-8")
    script = f"""
    import importlib
    from stepcache.events import Built, recorder
    built = []
    recorder.subscribe(lambda event: built.append(event) if isinstance(event, Built) else None)
    sys.path.insert(0, ".")
    for number in range({len(SCRIPTS)}):
        before = len(built)
        importlib.import_module(f"script{{number}}")
        say("built", number, len(built) - before)
    sc.current_session().cache.flush()
    """
    cache = request.param if request.param == "off" else directory / request.param
    seeds = {rank: {"PYTHONHASHSEED": str(rank + 1)} for rank in range(2)}
    runs = [run_pod(directory, script, of_rank=seeds, cache=cache) for _ in range(2)]
    return request.param, runs


@pytest.mark.sample(every=12)
@pytest.mark.parametrize("name", SCRIPTS)
def test_it_runs_and_is_compiled_once(ranks, name):
    cache, runs = ranks
    number = list(SCRIPTS).index(name)
    for run_number, run in enumerate(runs):
        built = 0
        for rank in run:
            word = name.replace(" ", "-") + " "
            failed = [line for line in rank.said("failed") if line.startswith(word)]
            ran = [line for line in rank.said("ran") if line.startswith(word)]
            assert not failed and ran == [f"{word}2.5 0.5"], rank.output[-3000:]
            (count,) = [
                line.split()[1] for line in rank.said("built") if line.startswith(f"{number} ")
            ]
            built += int(count)
        assert built == (1 if run_number == 0 or cache == "off" else 0), (run_number, built)
