"""A client without devices trains the language model on two tasks of four CPU devices each.

The client is killed (kill -9) half-way. The tasks hold its variables and its programs: started
again under its name, it goes on where it was.

    python examples/remote_char_lm.py
"""

import os
import signal
import subprocess
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np
from char_lm import batches, optimizer, params, read_text, train_step

import stepcache as sc

STEPS, KILLED_AT = 30, 15


def train(name: str, killed_at: int | None) -> None:
    with sc.Session(target="local:2x4", name=name) as session:
        state = {
            "params": sc.Variables(params, name="params"),
            "optimizer": sc.Variables(optimizer.init(params), name="optimizer"),
        }
        start = state["params"].version
        print(f"{session}: goes on at step {start}")
        stream = batches(read_text(), np.random.default_rng(start))
        for step in range(start, STEPS):
            state, loss = train_step(state, next(stream))
            if step == start:
                first = float(loss)
                print(train_step.explain(state, next(stream)))
            if step == killed_at:
                loss.block_until_ready()
                os.kill(os.getpid(), signal.SIGKILL)
        print(f"loss {first:.2f} → {float(loss):.2f}; {train_step.stats()}")
        assert float(loss) < first, "the loss has to fall"


def main() -> None:
    name = f"char-lm-{os.getpid()}"
    command = [sys.executable, __file__, name]
    try:
        killed = subprocess.run([*command, str(KILLED_AT)])
        assert killed.returncode == -signal.SIGKILL, killed.returncode
        print("the client was killed; here is another one")
        again = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        print(again.stdout, end="")
        assert f"goes on at step {KILLED_AT + 1}" in again.stdout
    finally:
        subprocess.run([sys.executable, "-m", "stepcache", "stop", name], check=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None)
    else:
        main()
