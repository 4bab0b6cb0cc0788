"""Training that loses one of its processes half-way, and goes on without it from the last save.

Four local processes of one CPU device each train a small character model, data-parallel, until one
kills itself with SIGKILL. The others name the lost rank, and end. Two are started in their place:
they restore what the four have saved, load the program that an earlier run on two has compiled, and
their losses are those of that run, which nothing disturbed. Prints the losses across the break.

    python examples/pod.py

`train` is what to copy: it does not care how many processes there are, nor who has started them.
`jax.distributed.initialize()` takes no arguments under Slurm (`srun python train.py`), Open MPI,
Kubernetes (an indexed Job, with `jax[k8s]` installed), on TPU pods, and on one machine under
`stepcache launch -n 4 train.py`; elsewhere it takes the coordinator's address, the number of
processes and the own rank. Saves have to lie where all processes see them. Where one is lost all
end with an error, so that whatever started them may start them again, on as many as are left.
"""

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType

import stepcache as sc
from stepcache.pods.launch import launch

CONTEXT, EMBEDDED, WIDTH, BATCH = 16, 16, 64, 256
STEPS, SAVE_EVERY, VICTIM, KILLED_AT = 60, 8, 2, 30
optimizer = optax.adam(3e-3)


def fresh_state() -> dict[str, Any]:
    random = np.random.default_rng(0)
    shapes = {"embed": (256, EMBEDDED), "hidden": (CONTEXT * EMBEDDED, WIDTH), "out": (WIDTH, 256)}
    params = {
        name: (random.normal(size=shape) / shape[0] ** 0.5).astype(np.float32)
        for name, shape in shapes.items()
    }
    return {"params": params, "moments": optimizer.init(params)}


@sc.step(carry="state", batch="batch")
def train_step(state: Any, batch) -> tuple[Any, jax.Array]:
    def loss_of(params):
        x = params["embed"][batch["before"]].reshape(-1, CONTEXT * EMBEDDED)
        logits = jnp.tanh(x @ params["hidden"]) @ params["out"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"]).mean()

    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    updates, moments = optimizer.update(gradients, state["moments"])
    return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, loss


def batch_of(step: int, text: np.ndarray) -> dict[str, np.ndarray]:
    """This process's part of a batch whose whole does not depend on how many share it."""
    rank, count = jax.process_index(), jax.process_count()
    starts = np.random.default_rng(step).integers(0, len(text) - CONTEXT, BATCH)
    mine = starts[rank * BATCH // count : (rank + 1) * BATCH // count]
    return {"before": text[mine[:, None] + np.arange(CONTEXT)], "next": text[mine + CONTEXT]}


def train(directory: Path, losses: dict[int, float]) -> None:
    """Trains from the last save on, or from the beginning."""
    text = np.frombuffer(Path(tempfile.__file__).read_bytes(), np.uint8).astype(np.int32)
    saves = directory / "saves"
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    with sc.Session(mesh):
        state = sc.Variables(fresh_state(), name="state")
        try:  # The newest whole checkpoint, whatever number of processes saved it.
            first = sc.restore(saves, state=state, step=0)["step"]
        except FileNotFoundError:  # There is none yet.
            first = 0
        for step in range(first, STEPS):
            if jax.process_index() == VICTIM and step == KILLED_AT:  # Of two, none is rank 2.
                (directory / "killed").write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
            state, loss = train_step(state, batch_of(step, text))
            losses[step] = float(loss)
            if (step + 1) % SAVE_EVERY == 0:
                sc.save(saves, state=state, step=step + 1, keep=2)


def run_rank(directory: Path) -> None:
    """One process of a pod. Leaves a report for `main`."""
    jax.distributed.initialize(heartbeat_timeout_seconds=20)
    report, losses = {}, {}
    try:
        train(directory, losses)
    except sc.RankLostError as error:
        report |= {"lost": error.ranks, "lost_at": time.time()}
        sys.exit(f"lost ranks {[*error.ranks]} after {len(losses)} steps, so this one ends")
    finally:
        stats = train_step.stats()
        report["counts"] = {what: getattr(stats, what) for what in ("traces", "compiles", "loads")}
        path = directory / f"rank {jax.process_index()} of {jax.process_count()}"
        path.write_text(json.dumps(report | {"losses": [*losses.items()]}))


def run_pod(directory: Path, count: int, exit_code: int = 0) -> list[dict[str, Any]]:
    """Starts processes, waits for them, and returns the reports of those that left one."""
    print(f"\n{count} processes, {directory.name}", flush=True)
    directory.mkdir(exist_ok=True)
    code = launch(__file__, [str(directory)], ranks=count, devices=1)
    assert code == exit_code, f"{count} processes ended with {code}"
    paths = sorted(directory.glob(f"rank ? of {count}"))
    reports = [json.loads(path.read_text()) for path in paths]
    for path, report in zip(paths, reports, strict=True):
        report["losses"] = dict(report["losses"])
        counts = ", ".join(f"{times} {what}" for what, times in report["counts"].items())
        print(f"{path.name}: {len(report['losses'])} steps; {counts}", flush=True)
    return reports


def chart(losses: dict[int, float]) -> None:
    for step in [*losses][::3]:
        print(f"{step:4}  {losses[step]:.3f}  {'█' * round(10 * losses[step])}")


def main() -> None:
    # NPROC is the size of XLA's thread pool: see char_lm.py.
    os.environ |= {"JAX_PLATFORMS": "cpu", "NPROC": os.environ.get("NPROC", "4")}
    with tempfile.TemporaryDirectory() as name:
        os.environ.setdefault("STEPCACHE_DIR", f"{name}/programs")
        undisturbed, disturbed = Path(name, "undisturbed"), Path(name, "disturbed")
        whole = run_pod(undisturbed, 2)
        survivors = run_pod(disturbed, 4, exit_code=128 + signal.SIGKILL)
        restarted = run_pod(disturbed, 2)
        killed_at = float((disturbed / "killed").read_text())
    before, after, expected = (pod[0]["losses"] for pod in (survivors, restarted, whole))
    print("\nloss by step")
    chart(before)
    print(f"──── rank {VICTIM} of 4 is killed; 2 processes go on from step {min(after)} ────")
    chart(after)
    seconds = max(report["lost_at"] for report in survivors) - killed_at
    print(f"{seconds:.1f} s from the kill to the error of the last survivor")
    assert [report["lost"] for report in survivors] == [[VICTIM]] * 3
    apart = max(abs(loss / expected[step] - 1) for step, loss in (before | after).items())
    assert len(before | after) == STEPS and apart < 1e-4, apart
    print(f"the losses of all {STEPS} steps are those of the undisturbed run, to {apart:.0e}")
    if os.environ["STEPCACHE_DIR"] != "off":
        ready = {"traces": 1, "compiles": 0, "loads": 1}
        assert all(report["counts"] == ready for report in restarted)
        print("the restarted processes have compiled nothing")


if __name__ == "__main__":
    run_rank(Path(sys.argv[1])) if sys.argv[1:] else main()
