"""What is the best way to cut communication? Two models train with each policy, over five seeds.

In one process, on 1 to 8 devices, variables are in host memory or on the devices; 1 to 4 worker
processes train what a server holds, by both engines. From a base, which reads all at each step and
writes each update, one policy is varied at a time; a few are combined. Each run gives the bytes
that crossed each link, the time of a step, and the loss after the same number of steps and after
the same time. What a step moves is compared with what `explain` predicts, once for each policy.

With `--tensorflow PYTHON`, an interpreter that has TensorFlow, clones read a variable of its
parameter server with and without `caching_device`, beside a step of stepcache with as many readers.

    python -m benchmarks.communication [--quick] [--tensorflow PYTHON] [--only WORD] [--seeds N]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ["STEPCACHE_DIR"] = "off"  # What is kept between processes is another affair.
os.environ.setdefault("NPROC", "32")  # The size of XLA's thread pool: see examples/char_lm.py.

import jax
import numpy as np

import stepcache as sc
from benchmarks.communication_models import MODELS
from benchmarks.communication_runs import (
    CACHED,
    CACHED_EVERY,
    EVERY,
    ON_DEVICES,
    READ_ALWAYS,
    STALE,
    STALE_EVERY,
    Counted,
    Policy,
    Run,
    in_one_process,
    read_by_another,
    serve_runs,
    session,
)
from benchmarks.communication_tensorflow import caching_device
from benchmarks.harness import quartiles, write
from benchmarks.served import HAS_RAY, ray_cluster
from benchmarks.served_processes import Group, served_by
from stepcache.variables.plan import SERVER_LINK

SETTINGS = {
    "rounds": 5,
    "steps": 80,
    "worker_steps": 160,
    "publish_every": 4,
    "clones_size": 1 << 20,
}
QUICK = SETTINGS | {"rounds": 1, "steps": 8, "worker_steps": 12, "clones_size": 1 << 16}
FEW = [READ_ALWAYS, CACHED_EVERY[0], *ON_DEVICES]
ALL = [READ_ALWAYS, CACHED, *EVERY, *CACHED_EVERY, *ON_DEVICES]
ON_MESHES = {4: ALL, 1: FEW, 2: FEW, 8: FEW}
SERVED_FEW = [READ_ALWAYS, CACHED, CACHED_EVERY[0], STALE_EVERY[1]]
SERVED = [READ_ALWAYS, CACHED, *STALE, *EVERY, *CACHED_EVERY, *STALE_EVERY]
BY_WORKERS = {
    "local": {2: SERVED, 1: SERVED_FEW, 4: SERVED_FEW},
    "ray": {2: SERVED_FEW, 1: [READ_ALWAYS, STALE_EVERY[1]], 4: [READ_ALWAYS, STALE_EVERY[1]]},
}
READERS = [READ_ALWAYS, CACHED]
SMOOTHED = 16
"""Of so many steps a loss is the mean, in curves and after the same time."""

DRAWN = ("workers", "local, 2 workers")
"""The group and the place whose losses are kept step by step, for the picture."""

Case = tuple[str, str, str, str]
"""What trains, and where: the group, the place, the model, the policy."""


def say(text: str, started: float = time.perf_counter()) -> None:
    print(f"{time.perf_counter() - started:6.1f} s  {text}", flush=True)


# ---- the runs ----------------------------------------------------------------------------------


def on_meshes(settings: Mapping[str, int], quick: bool) -> dict[Case, list[Run]]:
    """Trains in one process, with each policy on each number of devices."""
    meshes = {2: [*FEW, CACHED]} if quick else ON_MESHES
    models = list(MODELS)[:1] if quick else list(MODELS)
    cases = [(m, d, p) for m in models for d, policies in meshes.items() for p in policies]
    runs: dict[Case, list[Run]] = {}
    for model, devices, policy in cases:  # Builds the programs, and checks what they move.
        in_one_process(MODELS[model], policy, devices, 0, 6, check=True)
    say("one process: what moves is what is predicted")
    for seed in range(settings["rounds"]):
        for model, devices, policy in random.Random(seed).sample(cases, len(cases)):
            run = in_one_process(MODELS[model], policy, devices, seed, settings["steps"])
            case = ("one process", f"{devices} devices", model, policy.name)
            runs.setdefault(case, []).append(run)
        say(f"one process: seed {seed}")
    for model, devices, policy in cases:
        check_same(runs, ("one process", f"{devices} devices", model), policy)
    return runs


def check_same(
    runs: Mapping[Case, Sequence[Run]], place: tuple[str, str, str], policy: Policy
) -> None:
    """Checks that a policy that changes no result has changed none, where one trains alone."""
    if not policy.is_exact:
        return
    for ours, base in zip(runs[*place, policy.name], runs[*place, READ_ALWAYS.name], strict=True):
        found, expected = ([loss for _, _, loss in run.curve] for run in (ours, base))
        if policy.placement == "host":
            assert found == expected, (place, policy)
        else:  # Other programs, whose roundings grow from step to step.
            assert np.allclose(found[:8], expected[:8], rtol=1e-4), (place, policy)


def by_readers(settings: Mapping[str, int], quick: bool) -> dict[Case, list[Run]]:
    """One session trains, and another one reads what it publishes."""
    runs: dict[Case, list[Run]] = {}
    devices = 2 if quick else 4
    for seed in range(0 if quick else -1, settings["rounds"]):
        for model in MODELS.values():
            steps = settings["steps"] if seed >= 0 else 6
            every = settings["publish_every"]
            found = read_by_another(model, READERS, devices, max(seed, 0), steps, every)
            assert found[CACHED.name].loss == found[READ_ALWAYS.name].loss
            for name, run in found.items() if seed >= 0 else ():  # The first builds programs.
                case = ("another session reads", f"{devices} devices", model.name, name)
                runs.setdefault(case, []).append(run)
        say(f"another session reads: seed {seed}" if seed >= 0 else "another session: ready")
    return runs


@contextlib.contextmanager
def server(engine: str) -> Iterator[str]:
    """A server of variables; its address."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "stepcache", "serve", "--variables", directory]
        name = Path(directory).name
        with served_by(command + (["--ray", name] if engine == "ray" else [])):
            yield f"local:{directory}" if engine == "local" else f"ray:{name}"


def by_workers(settings: Mapping[str, int], quick: bool) -> dict[Case, list[Run]]:
    """Worker processes train what a server holds, by each engine."""
    counts: dict[str, dict[int, list[Policy]]] = (
        BY_WORKERS if HAS_RAY else {"local": BY_WORKERS["local"]}
    )
    if quick:
        counts = {engine: {1: [READ_ALWAYS, STALE_EVERY[1]]} for engine in counts}
        counts["local"] = {1: [*SERVED_FEW, STALE[-1]], 2: [READ_ALWAYS]}
    cases = [
        (engine, workers, model, policy)
        for engine, by_count in counts.items()
        for workers, policies in by_count.items()
        for model in MODELS
        for policy in policies
    ]
    runs: dict[Case, list[Run]] = {}
    most = max(workers for _, workers, *_ in cases)
    command = [sys.executable, "-m", "benchmarks.communication", "--worker"]
    with ray_cluster() if HAS_RAY else contextlib.nullcontext():
        group = Group([command] * most)
        try:
            for seed in range(0 if quick else -1, settings["rounds"]):
                with contextlib.ExitStack() as stack:
                    addresses = {each: stack.enter_context(server(each)) for each in counts}
                    for engine, workers, model, policy in random.Random(seed).sample(
                        cases, len(cases)
                    ):
                        place = f"{engine}, {workers} worker{'s' * (workers > 1)}"
                        asked = {"address": addresses[engine], "model": model}
                        # The first turn builds programs, and checks what one worker moves.
                        asked["check"] = (quick or seed < 0) and workers == 1
                        steps = settings["worker_steps"] if seed >= 0 else 4 * workers
                        run = together(group, asked, policy, workers, max(seed, 0), steps)
                        if seed >= 0:
                            case = ("workers", place, model, policy.name)
                            runs.setdefault(case, []).append(run)
                say(f"workers: seed {seed}" if seed >= 0 else "workers: ready")
        finally:
            group.end()
    for engine, workers, model, policy in cases:
        if workers == 1:
            check_same(runs, ("workers", f"{engine}, 1 worker", model), policy)
    return runs


def together(
    group: Group, asked: dict[str, Any], policy: Policy, workers: int, seed: int, steps: int
) -> Run:
    """Runs a policy in so many workers, with so many steps of all of them."""
    name = f"{asked['model']}/{policy.name}/{workers}"
    asked = asked | {"policy": dataclasses.asdict(policy), "name": name, "seed": seed}
    asked |= {"do": "prepare", "steps": steps // workers}
    group.ask(*(json.dumps(asked | {"rank": rank}) for rank in range(workers)))
    answers = group.ask(*['{"do": "run"}'] * workers)
    finished = group.ask(*['{"do": "finish"}'] * workers)
    links = {
        link: sum(each["links"].get(link, 0) for each in answers)
        for link in {link for each in answers for link in each["links"]}
    }
    moved, points = [0] * workers, []
    lines = [
        (when, rank, *rest) for rank, each in enumerate(answers) for when, *rest in each["curve"]
    ]
    started = min(each["began"] for each in answers)
    for when, rank, size, loss in sorted(lines):
        moved[rank] = size
        points.append((when - started, sum(moved), loss))
    seconds = [each for answer in answers for each in answer["seconds"]]
    return Run(links, seconds, points, finished[0]["loss"])


def clones(settings: Mapping[str, int], quick: bool, python: str | None) -> dict[str, Any]:
    """Clones that read one variable of a server, each on a device of its own, in one step."""
    size, rounds = settings["clones_size"], 5 if quick else 31
    counts, rows = (1, 2, 4, 8), []
    if python:
        found, version = caching_device(python, size, counts, rounds)
        rows = [row | {"contender": f"TensorFlow {version}"} for row in found]
    with server("local") as address, sc.connect(address) as connection:
        for count in counts:
            for cache in (None, "device"):
                how = {"read": sc.Read(cache=cache), "write": sc.Write("add")}
                rows.append(read_by_clones(connection, count, size, how, rounds))
    for row in rows:
        row["seconds"] = quartiles(row["seconds"])
        if row["contender"] == "stepcache":
            assert row["changed"] == 1 and row["unchanged"] == (not row["cache"]), row
    say("clones: done")
    return {"size_bytes": 4 * size, "rounds": rounds, "rows": rows}


def read_by_clones(
    connection: Any, count: int, size: int, how: dict[str, Any], rounds: int
) -> dict[str, Any]:
    """A step in which each of so many devices reads a served variable."""
    with session(count):
        value = connection.variables(f"{count} {how['read']}", np.zeros(size, np.float32), **how)
        clones = np.zeros((count, 1), np.float32)
        step = sc.step(lambda value, clones: clones + value.max(), batch="clones")
        row = {"contender": "stepcache", "cache": how["read"].cache, "clones": count}
        jax.block_until_ready(step(value, clones))
        value.push(np.ones(size, np.float32))
        for name in ("changed", "unchanged"):
            with Counted() as counted:
                jax.block_until_ready(step(value, clones))
            row[f"{name}_bytes"] = counted.links[SERVER_LINK]
            row[name] = row[f"{name}_bytes"] // value.nbytes
        seconds = []
        for _ in range(rounds):
            started = time.perf_counter()
            jax.block_until_ready(step(value, clones))
            seconds.append(time.perf_counter() - started)
    return row | {"seconds": seconds}


# ---- the figures -------------------------------------------------------------------------------


def smoothed(run: Run, at: int) -> float:
    """The mean loss of the last steps up to one."""
    return float(np.mean([loss for _, _, loss in run.curve[max(0, at + 1 - SMOOTHED) : at + 1]]))


def records(runs: Mapping[Case, Sequence[Run]]) -> list[dict[str, Any]]:
    """Summarizes the runs of each case over the seeds.

    A loss "after the same time" is at the time that the fastest policy of the same group, place,
    model and seed took for all its steps.
    """
    made = []
    for case, of_seeds in runs.items():
        rivals = [found for other, found in runs.items() if other[:3] == case[:3]]
        group, place, model, policy = case
        steps = len(of_seeds[0].seconds)
        every_link = {link for run in of_seeds for link in run.links}
        record: dict[str, Any] = {
            "group": group,
            "place": place,
            "model": model,
            "policy": policy,
            "bytes_a_step": {
                link: float(np.median([run.links.get(link, 0) / steps for run in of_seeds]))
                for link in sorted(every_link)
            },
            "step_seconds": quartiles([float(np.median(run.seconds)) for run in of_seeds]),
            "loss": quartiles([run.loss for run in of_seeds]),
        }
        if of_seeds[0].curve:
            timed = []
            for seed, run in enumerate(of_seeds):
                limit = min(found[seed].curve[-1][0] for found in rivals)
                done = [when for when, _, _ in run.curve if when <= limit]
                timed.append(smoothed(run, max(len(done) - 1, 0)))
            record["loss_after_same_time"] = quartiles(timed)
        if (group, place) == DRAWN:
            chosen = np.linspace(min(SMOOTHED, steps) // 2, steps - 1, 12).astype(int)
            points = [
                [(*run.curve[at][:2], smoothed(run, at)) for at in chosen] for run in of_seeds
            ]
            record["curve"] = np.median(points, axis=0).round(4).tolist()
        made.append(record)
    return made


def check_order(found: Sequence[Mapping[str, Any]]) -> None:
    """Checks the order that holds whatever the times: each saving saves bytes."""
    total = {
        tuple(row[n] for n in ("group", "place", "model", "policy")): sum(
            row["bytes_a_step"].values()
        )
        for row in found
    }
    for (*place, policy), size in total.items():
        base = total[*place, READ_ALWAYS.name]
        if policy in {each.name for each in (*CACHED_EVERY, *STALE_EVERY)}:
            assert size < base, (place, policy, size, base)
        if policy in {each.name for each in ON_DEVICES}:
            assert size == 0, (place, policy, size)
        if policy == CACHED.name and place[0] == "another session reads":
            assert size < base, (place, policy, size, base)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="show that it runs; no real figures")
    parser.add_argument("--tensorflow", help="a Python that has TensorFlow")
    parser.add_argument("--only", default="", help="the groups with this word; writes nothing")
    parser.add_argument("--seeds", type=int, help=f"how many; {SETTINGS['rounds']} by default")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return serve_runs()
    jax.config.update("jax_num_cpu_devices", 8)
    settings = dict(QUICK if options.quick else SETTINGS)
    settings["rounds"] = options.seeds or settings["rounds"]
    groups = {"mesh": on_meshes, "reader": by_readers, "worker": by_workers}
    runs: dict[Case, list[Run]] = {}
    for word, group in groups.items():
        if options.only in word:
            runs |= group(settings, options.quick)
    figures: dict[str, Any] = {"runs": records(runs)}
    check_order(figures["runs"])
    if options.only in "clones":
        figures["clones"] = clones(settings, options.quick, options.tensorflow)
    for row in figures["runs"]:
        sizes = ", ".join(
            f"{size / 1e3:,.1f} kB {link}" for link, size in row["bytes_a_step"].items()
        )
        name = ", ".join(row[each] for each in ("group", "place", "model", "policy"))
        print(f"{name}: {row['step_seconds'][1] * 1e3:.1f} ms, loss {row['loss'][1]:.3f}; {sizes}")
    for row in figures.get("clones", {"rows": []})["rows"]:
        print(row)
    if not options.quick and not options.only:
        print(f"written to {write('communication', [], figures, **settings)}")
    say("done")


if __name__ == "__main__":
    main()
