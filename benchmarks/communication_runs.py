"""One run of `benchmarks.communication`: a model, a policy, a seed; in one process or in a worker.

What crosses each link is what stepcache's `Moved` events count.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import stepcache as sc
from benchmarks.communication_models import HELD_OUT, MODELS, Model
from stepcache.events import Moved
from stepcache.variables.plan import HOST_LINK, SERVER_LINK

Links = dict[str, int]


@dataclass(frozen=True)
class Policy:
    """What is varied. The defaults are the base: on the host or served, read at each step, each
    update written, all exact."""

    name: str
    cache: Literal["device"] | None = None
    staleness: int = 0
    every: int = 1
    placement: Literal["host", "replicated", "sharded"] = "host"

    @property
    def is_exact(self) -> bool:
        """Whether a single trainer computes what it computes with the base."""
        return self.every == 1

    @property
    def read(self) -> sc.Read:
        return sc.Read(cache=self.cache, max_staleness=self.staleness)

    def write(self, model: Model) -> sc.Write:
        return sc.Write("apply", optimizer=model.optimizer, every=self.every)


def staleness(steps: int) -> Policy:
    return Policy(f"max_staleness={steps}", "device", steps)


READ_ALWAYS, CACHED = Policy("read at each step"), Policy("cache until changed", "device")
EVERY = [Policy(f"every={k}", every=k) for k in (4, 16)]
CACHED_EVERY = [Policy(f"cache, every={k}", "device", every=k) for k in (4, 16)]
STALE = [staleness(k) for k in (1, 4, 16)]
STALE_EVERY = [Policy(f"max_staleness={k}, every={k}", "device", k, k) for k in (4, 16)]
ON_DEVICES = [Policy(each, placement=each) for each in ("replicated", "sharded")]


@dataclass(frozen=True)
class Run:
    """What one run has measured.

    Attributes:
        links: bytes that crossed each link in all steps.
        seconds: of each step.
        curve: after each step: seconds since the start, bytes so far (of workers those to and from
            the server), the loss of its batch.
        loss: of the batch that is held out, with the parameters at the end.
    """

    links: Links
    seconds: list[float]
    curve: list[tuple[float, int, float]]
    loss: float


class Counted:
    """Context manager that counts the bytes that cross each link."""

    def __init__(self):
        self.links: Counter = Counter()

    def __enter__(self) -> Counted:
        self._end = sc.recorder.subscribe(self._count)
        return self

    def __exit__(self, *_: Any) -> None:
        self._end()

    def _count(self, event: Any) -> None:
        if isinstance(event, Moved):
            self.links.update(dict(event.link_bytes))

    @property
    def bytes(self) -> int:
        return sum(self.links.values())


@contextlib.contextmanager
def predicted(counted: Counted, plan: Links | None) -> Iterator[None]:
    """Context manager that checks that what crosses is what the plan says, if there is one."""
    before = Counter(counted.links)
    yield
    if plan is not None:
        found = {link: size - before[link] for link, size in counted.links.items()}
        found = {link: size for link, size in found.items() if size}
        assert found == plan, f"predicted {plan}, counted {found}"


def session(devices: int) -> sc.Session:
    chosen = jax.devices()[:devices]
    return sc.Session(jax.make_mesh((devices,), ("data",), (AxisType.Auto,), devices=chosen))


@functools.cache
def gradients_of(model: Model) -> Any:
    @sc.step(batch="batch")
    def gradients(params, batch):
        return jax.value_and_grad(model.loss)(params, batch)

    return gradients


@functools.cache
def row_gradients_of(model: Model) -> Any:
    """The same where a step gets the rows of its batch alone."""

    @sc.step
    def gradients(params, rows, batch):
        def loss_of(params, values):
            whole = params | {"items": values}
            return model.loss(whole, batch | {"items": rows.index})

        loss, (for_params, for_rows) = jax.value_and_grad(loss_of, (0, 1))(params, rows.values)
        return loss, for_params, for_rows

    return gradients


@functools.cache
def loss_of(model: Model) -> Any:
    return sc.step(batch="batch")(model.loss)


# ---- in one process --------------------------------------------------------------------------


def push_nothing(params: sc.Variables, zeros: Any) -> None:
    """Makes one update that changes no parameter: the optimizer's program is built before a run."""
    for _ in range(params.write.every):
        params.push(zeros)


def in_one_process(
    model: Model, policy: Policy, devices: int, seed: int, steps: int, *, check: bool = False
) -> Run:
    """Trains in one process, on a mesh of devices.

    Args:
        check: whether to check each step's bytes against what is predicted.
    """
    placements = {
        "host": sc.OnHost(update="host"),
        "replicated": sc.Replicated(),
        "sharded": sc.Sharded(model.rules),
    }
    on_host = policy.placement == "host"
    step, seconds, curve = gradients_of(model), [], []
    with session(devices):
        params = sc.Variables(
            model.whole(seed),
            placement=placements[policy.placement],
            read=policy.read if on_host else sc.Read(),
            write=policy.write(model),
        )
        _, update = step(params, model.batch(seed, 0, 0))
        push_nothing(params, jax.tree.map(lambda leaf: leaf * 0, update))
        pushed = {HOST_LINK: params.nbytes} if on_host else {}
        with Counted() as counted:
            for number in range(steps):
                batch = model.batch(seed, 0, number)
                plan = step.explain(params, batch).plan.link_bytes if check else None
                started = time.perf_counter()
                with predicted(counted, plan):
                    loss, update = jax.block_until_ready(step(params, batch))
                with predicted(counted, pushed if check else None):
                    params.push(update)
                params.block_until_ready()
                seconds.append(time.perf_counter() - started)
                curve.append((sum(seconds), counted.bytes, float(loss)))
            params.flush()
        held_out = float(loss_of(model)(params.value, model.batch(*HELD_OUT)))
    return Run(dict(counted.links), seconds, curve, held_out)


def read_by_another(
    model: Model, reads: list[Policy], devices: int, seed: int, steps: int, publish_every: int
) -> dict[str, Run]:
    """One session trains and publishes its parameters; another one evaluates them at each step.

    Each policy has variables of its own, in one run, so that all meet the same versions. The loss
    of a run is the mean of those that the reader saw, on the batch that is held out.
    """
    trainer, reader = session(devices), session(devices)
    held_out, evaluate = model.batch(*HELD_OUT), loss_of(model)
    with trainer:
        params = sc.Variables(model.whole(seed), write=Policy("").write(model))
        published = {
            policy.name: sc.Variables(params.value, placement=sc.OnHost(), read=policy.read)
            for policy in reads
        }
    totals: dict[str, Counter] = {policy.name: Counter() for policy in reads}
    seconds: dict[str, list[float]] = {policy.name: [] for policy in reads}
    losses: dict[str, list[float]] = {policy.name: [] for policy in reads}
    for number in range(steps):
        with trainer:
            params.push(gradients_of(model)(params, model.batch(seed, 0, number))[1])
            if number % publish_every == 0:
                value = params.value
                for each in published.values():
                    each.assign(value)
        with reader:
            for name, each in published.items():
                plan = evaluate.explain(each, held_out).plan.link_bytes
                with Counted() as counted, predicted(counted, plan):
                    started = time.perf_counter()
                    losses[name].append(float(evaluate(each, held_out)))
                    seconds[name].append(time.perf_counter() - started)
                totals[name].update(counted.links)
    return {
        name: Run(dict(totals[name]), seconds[name], [], float(np.mean(losses[name])))
        for name in totals
    }


# ---- in a worker process ---------------------------------------------------------------------


class Worker:
    """One of the processes that train what a server holds. A line on its input says what to do.

    "prepare" connects and makes the variables, "run" trains, "finish" evaluates and disconnects.
    """

    def __init__(self):
        self._end = contextlib.ExitStack()

    def prepare(
        self,
        address: str,
        name: str,
        model: str,
        policy: dict[str, Any],
        seed: int,
        rank: int,
        steps: int,
        check: bool,
    ) -> dict[str, Any]:
        self.model, self.policy = MODELS[model], Policy(**policy)
        self.seed, self.rank, self.steps, self.check = seed, rank, steps, check
        connection = sc.connect(address)
        self._end = contextlib.ExitStack()
        self._end.enter_context(connection)
        self.params = connection.variables(
            f"{name}/params",
            self.model.init(self.seed),
            read=self.policy.read,
            write=self.policy.write(self.model),
        )
        push_nothing(self.params, jax.tree.map(np.zeros_like, self.model.init(seed)))
        self.table = None
        if self.model.rows:
            self.table = connection.table(
                f"{name}/items",
                self.model.rows,
                (self.model.width,),
                stddev=0.1,
                seed=self.seed,
                optimizer=sc.RowOptimizer("adagrad", learning_rate=0.1),
                read=self.policy.read,
                every=self.policy.every,
            )
        return {}

    def run(self) -> dict[str, Any]:
        seconds, curve, began = [], [], time.time()
        with Counted() as counted:
            for number in range(self.steps):
                batch = self.model.batch(self.seed, self.rank, number)
                started = time.perf_counter()
                loss = self._with_rows(batch, counted) if self.table else self._step(batch, counted)
                seconds.append(time.perf_counter() - started)
                curve.append((time.time(), counted.links[SERVER_LINK], float(loss)))
            self.params.flush()
            if self.table:
                self.table.flush()
        links = dict(counted.links)
        return {"links": links, "seconds": seconds, "curve": curve, "began": began}

    def _step(self, batch: Any, counted: Counted) -> Any:
        loss, update = self._call(counted, gradients_of(self.model), self.params, batch)
        self.params.push(update)
        return loss

    def _with_rows(self, batch: Any, counted: Counted) -> Any:
        assert self.table is not None
        before = counted.links[SERVER_LINK]
        rows = self.table.lookup(batch["items"])
        if self.check and self.policy.cache is None:  # The number of each row, and the row.
            expected = len(rows.ids) * (8 + 4 * self.model.width)
            assert counted.links[SERVER_LINK] - before == expected, counted.links
        batch = {name: each for name, each in batch.items() if name != "items"}
        step = row_gradients_of(self.model)
        loss, for_params, for_rows = self._call(counted, step, self.params, rows, batch)
        self.table.push(rows, for_rows)
        self.params.push(for_params)
        return loss

    def _call(self, counted: Counted, step: Any, *arguments: Any) -> Any:
        """Calls the step. What it moves is compared with its plan, where nobody else writes."""
        plan = step.explain(*arguments).plan.link_bytes if self.check else None
        with predicted(counted, plan):
            return jax.block_until_ready(step(*arguments))

    def finish(self) -> dict[str, Any]:
        loss = None
        if self.rank == 0:
            params, batch = self.params.value, self.model.batch(*HELD_OUT)
            if self.table:
                rows = self.table.lookup(batch["items"])
                params, batch = params | {"items": rows.values}, batch | {"items": rows.index}
            loss = float(loss_of(self.model)(jax.tree.map(jnp.asarray, params), batch))
        self._end.close()
        return {"loss": loss}


def serve_runs() -> None:
    """Does what the lines of the input say, and answers each with a line of JSON."""
    worker = Worker()
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        answer = getattr(worker, asked.pop("do"))(**asked)
        print(json.dumps(answer), flush=True)
